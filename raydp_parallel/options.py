"""The rare knobs, in one frozen place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnusedGrads = Literal["zeros", "none"]
Scalars = Literal["vector", "mean", "weighted_mean", "sum"]
LinkName = Literal["auto", "shared", "inline", "object_store", "collective"]
OnFault = Literal["replay", "raise"]

_CHOICES = {
    "unused_grads": ("zeros", "none"),
    "scalars": ("vector", "mean", "weighted_mean", "sum"),
    "link": ("auto", "shared", "inline", "object_store", "collective"),
    "on_fault": ("replay", "raise"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an executor and its wrappers behave where the default does not suit.

    Attributes:
        unused_grads: What a parameter gets that no replica used: ``"zeros"`` as upstream, or ``"none"`` as a plain
            module would leave it.
        scalars: What 0-dim outputs become: upstream's ``"vector"``, one entry per chunk, or one number, their
            ``"mean"``, their mean weighted by the chunks' rows, or their ``"sum"``.
        link: How bytes travel: ``"auto"`` sends small ones inside the call; large ones lie in shared memory if the
            cluster is one machine, the weights of CPU replicas included, else they go beside the call or through Ray's
            object store, and CPU replicas on several nodes sum gradients and pass weights on among themselves.
            ``"collective"`` lets replicas do so wherever they are, and on GPUs too. The other names force one way for
            everything.
        placement_timeout: Seconds that a replica may take to be placed and to start.
        call_timeout: Seconds that one forward or backward may take before its replica counts as dead and is ended;
            None waits.
        on_fault: What to do when a replica dies: ``"replay"`` runs its chunk again on another one, with the same
            result to the bit, while a new process starts behind the scenes; ``"raise"`` raises `ReplicaDied`, and the
            next call starts the new process.
        max_restarts_per_hour: How many replicas that died are replaced within an hour. Beyond that, calls go on with
            those that are left, and without any raise `RestartsSpent`.
        cpus_per_replica: What Ray books for each CPU replica. 0 lets any number of them share a small machine.
        gpus_per_replica: What Ray books for each GPU replica. Below 1, several replicas share one GPU.
        threads: Torch's threads in a CPU replica. None shares a node's cores among the chunks of a call.
        direct_line: Call replicas on the driver's machine over a socket, five times faster than a Ray task. False
            makes every phase a Ray task, which Ray's dashboard lists.
        name: What Ray's dashboard, metrics and `raydp-parallel status` call the executor; None is the program's name.
        metrics: Report to Ray's metrics and to `raydp-parallel status`, once per second, in the background.
        profile_dir: A folder to write all calls to, as a trace for Chrome or Perfetto with the driver and the replicas
            on one clock. It grows by about 1 KB per call and chunk.
        in_process: Run the replicas inside the driver's process, one after the other, without Ray. For debuggers.
    """

    unused_grads: UnusedGrads = "zeros"
    scalars: Scalars = "vector"
    link: LinkName = "auto"
    placement_timeout: float = 60.0
    call_timeout: float | None = None
    on_fault: OnFault = "replay"
    max_restarts_per_hour: int = 100
    cpus_per_replica: float = 0.0
    gpus_per_replica: float = 1.0
    threads: int | None = None
    direct_line: bool = True
    name: str | None = None
    metrics: bool = True
    profile_dir: str | None = None
    in_process: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"Options({name}={getattr(self, name)!r}): expected one of {', '.join(choices)}")
        if self.placement_timeout <= 0 or (self.call_timeout is not None and self.call_timeout <= 0):
            raise ValueError("Options: placement_timeout and call_timeout are seconds, and must be above 0")
        if self.max_restarts_per_hour < 0:
            raise ValueError(f"Options(max_restarts_per_hour={self.max_restarts_per_hour}): expected at least 0")
        if self.cpus_per_replica < 0 or not 0 < self.gpus_per_replica <= 1:
            raise ValueError(
                f"Options(cpus_per_replica={self.cpus_per_replica}, gpus_per_replica={self.gpus_per_replica}): "
                "expected cpus >= 0 and 0 < gpus <= 1"
            )
        if self.name is not None and (not self.name or any(c in self.name for c in "/:@\n")):
            raise ValueError(f"Options(name={self.name!r}): expected a name without '/', ':' and '@', such as 'train'")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"Options(threads={self.threads}): expected None or at least 1")

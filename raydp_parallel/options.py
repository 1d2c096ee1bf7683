"""`Options`: the settings that few programs need, in one frozen dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

UnusedGrads = Literal["zeros", "none"]
Scalars = Literal["vector", "mean"]
GpuPath = Literal["host", "ipc", "nccl"]

GPU_PATHS = get_args(GpuPath)
"""Names ways, with commas between them, and goes before ``gpu_paths``."""

_CHOICES = {"unused_grads": get_args(UnusedGrads), "scalars": get_args(Scalars)}

_LONGEST = 1e6
"""The longest timeout in seconds, eleven days: `poll` counts milliseconds in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an executor and its wrappers behave where the default does not suit.

    Attributes:
        unused_grads: The gradient of a parameter that no replica used: ``"zeros"`` as upstream, or
            ``"none"`` as a plain module would leave it.
        scalars: The form of 0-dim outputs: upstream's ``"vector"``, one entry per chunk, or one
            number, their ``"mean"``, weighted by the chunks' rows.
        chunk_weights: Proportions of the rows of the chunks, one number for each of
            ``device_ids``, such as ``(4, 1)``; None cuts batches as upstream does. All arguments
            that are split must have one size then.
        placement_timeout: Seconds that replicas may take to be placed and to start. While they wait
            for a place Ray's autoscaler knows of it, and a node that is added is used.
        call_timeout: Seconds that one forward or backward may take before its replica counts as
            dead and is ended; None waits. The first call of a process has ``placement_timeout``, if
            that is more: it imports.
        cpus_per_replica: CPUs that Ray books for each replica, on a CPU or a GPU. 0 lets any number
            of them share a small machine.
        gpus_per_replica: The part of a GPU that Ray books for each replica, above 0 and at most 1.
            With 0.5 each GPU of the cluster counts as two logical GPUs, whose replicas share it.
        resources: Further resources that Ray books for each replica, such as
            ``{"accelerator_type:A100": 0.001}``. Only nodes that have them are used.
        label_selector: Labels that a node must have to be used, such as ``{"market-type":
            "!spot"}``, as Ray's label selectors have it. Give ``device_ids`` with it. It needs a
            Ray that places by label, 2.49 or newer.
        elastic: Start with as many GPUs as there are, one at least, instead of waiting for all;
            they run the chunks of the others, too. Nodes that join are used, nodes that drain are
            left. Chunks stay what ``device_ids`` say, so that results do not depend on which
            replicas run.
        threads: Torch's threads in a CPU replica. None shares a node's cores among the chunks of a
            call: those that Ray was told of, and never more than the process may use.
        name: The executor's name in Ray's dashboard, metrics and `raydp-parallel status`; None is
            the program's name.
        metrics: Report to Ray's metrics and to `raydp-parallel status`, once per second, in the
            background.
        gpu_paths: Ways in which bytes may leave a GPU. ``"host"``, by pinned memory, is always
            there; ``"ipc"`` is memory of a GPU that the driver and a replica share; ``"nccl"``
            carries weights and gradients from GPU to GPU. ``"auto"`` is all of them; each is tried
            before it is used, and left out where it fails.
    """

    unused_grads: UnusedGrads = "zeros"
    scalars: Scalars = "vector"
    chunk_weights: Sequence[float] | None = None
    placement_timeout: float = 60.0
    call_timeout: float | None = None
    cpus_per_replica: float = 0.0
    gpus_per_replica: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    label_selector: Mapping[str, str] = field(default_factory=dict, hash=False)
    elastic: bool = False
    threads: int | None = None
    name: str | None = None
    metrics: bool = True
    gpu_paths: Literal["auto"] | Sequence[GpuPath] = "auto"

    @property
    def replicas_per_gpu(self) -> int:
        """How many replicas `gpus_per_replica` puts on each GPU."""
        return int(1 / self.gpus_per_replica + 1e-6)

    @property
    def ways(self) -> set[str]:
        """The ways to try: those of the environment, else those of `gpu_paths`."""
        return {*GPU_PATHS} if self.gpu_paths == "auto" else {*self.gpu_paths}

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                self._refuse(name, f"expected one of {', '.join(choices)}")
        paths = self.gpu_paths
        if paths != "auto" and (isinstance(paths, str) or not {*paths} <= {*GPU_PATHS}):
            self._refuse("gpu_paths", f"expected 'auto' or some of {GPU_PATHS}")
        object.__setattr__(self, "gpu_paths", paths if paths == "auto" else tuple(paths))
        weights: Any = self.chunk_weights
        if weights is not None:
            above = isinstance(weights, Sequence) and all(_is_number(w) and w > 0 for w in weights)
            if not above or not 0 < math.fsum(weights) < math.inf:
                text = "expected finite numbers above 0, one for each device, such as (4, 1)"
                self._refuse("chunk_weights", text)
            object.__setattr__(self, "chunk_weights", tuple(weights))
        for name, (fits, text) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in ("call_timeout", "threads"):
                continue
            if not _is_number(value):
                self._refuse(name, f"expected a number, got {type(value).__name__}", TypeError)
            if not fits(value):
                self._refuse(name, f"expected {text}")
        for name in ("resources", "label_selector"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(k, str) and k for k in value):
                self._refuse(name, "expected a dict by name", TypeError)
            object.__setattr__(self, name, dict(value))
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                text = "CPUs and GPUs are booked with cpus_per_replica and gpus_per_replica"
                self._refuse("resources", f"expected custom resources of Ray's; {text}")
            if not _is_number(amount) or not 0 < amount < math.inf:
                self._refuse("resources", f"expected a number above 0 for {name!r}")
        if self.name is not None and (
            not self.name or any(c in "/:@" or not c.isprintable() for c in self.name)
        ):
            text = "expected printable characters without '/', ':' and '@', such as 'train'"
            self._refuse("name", text)

    def _refuse(self, name: str, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"Options({name}={getattr(self, name)!r}): {text}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_time(seconds: float) -> bool:
    return 0 < seconds <= _LONGEST


_TIME = f"seconds above 0, at most {_LONGEST:g}"
_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "placement_timeout": (_is_time, _TIME),
    "call_timeout": (_is_time, f"{_TIME}; None waits without a limit"),
    "cpus_per_replica": (lambda n: 0 <= n < math.inf, "at least 0"),
    "gpus_per_replica": (
        lambda n: 0 < n <= 1,
        "a number above 0 and at most 1. For CPU replicas, give device_ids=['cpu', ...]",
    ),
    "threads": (lambda n: n >= 1, "None or at least 1"),
}
"""Settings that are numbers: what they may be, and how an error says it."""

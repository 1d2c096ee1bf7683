"""`Options`: the settings that few programs need, in one frozen dataclass."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar, get_args

UnusedGrads = Literal["zeros", "none"]
Scalars = Literal["vector", "mean"]
GpuPath = Literal["host", "ipc", "nccl"]

GPU_PATHS = get_args(GpuPath)
_VARIABLE = "RAYDP_PARALLEL_GPU_PATHS"
"""Names ways, with commas between them, and goes before ``gpu_paths``."""

_CHOICES = {"unused_grads": get_args(UnusedGrads), "scalars": get_args(Scalars)}

_LONGEST = 1e6
"""The longest timeout in seconds, eleven days: `poll` counts milliseconds in 32 bits."""

V = TypeVar("V")


class Frozen(dict[str, V]):
    """A dict that cannot be changed, and may be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]  # dict has none, because it can change
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return Frozen, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "Options are frozen: make new ones, as with dataclasses.replace(options, ...)"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


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
            before it is used, and left out where it fails. The variable
            ``RAYDP_PARALLEL_GPU_PATHS=host`` goes before this setting.
    """

    unused_grads: UnusedGrads = "zeros"
    scalars: Scalars = "vector"
    chunk_weights: Sequence[float] | None = None
    placement_timeout: float = 60.0
    call_timeout: float | None = None
    cpus_per_replica: float = 0.0
    gpus_per_replica: float = 1.0
    resources: Mapping[str, float] = field(default_factory=Frozen)
    label_selector: Mapping[str, str] = field(default_factory=Frozen)
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
        told = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",") if name.strip()]
        if not {*told} <= {"auto", *GPU_PATHS}:
            raise ValueError(f"{_VARIABLE}: expected 'auto' or some of {GPU_PATHS}, got {told}")
        chosen = told or ([self.gpu_paths] if self.gpu_paths == "auto" else self.gpu_paths)
        return {*GPU_PATHS} if "auto" in chosen else {*chosen}

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                self._refuse(name, f"expected one of {', '.join(choices)}")
        paths = self.gpu_paths
        if paths != "auto" and (isinstance(paths, str) or not {*paths} <= {*GPU_PATHS}):
            self._refuse("gpu_paths", f"expected 'auto' or some of {GPU_PATHS}")
        object.__setattr__(self, "gpu_paths", paths if paths == "auto" else tuple(paths))
        self._check_weights()
        self._check_numbers()
        self._check_placement()
        if self.name is not None and (
            not self.name or any(c in "/:@" or not c.isprintable() for c in self.name)
        ):
            self._refuse(
                "name", "expected printable characters without '/', ':' and '@', such as 'train'"
            )
        if self.threads is not None and self.threads < 1:
            self._refuse("threads", "expected None or at least 1")

    def _refuse(self, name: str, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"Options({name}={getattr(self, name)!r}): {text}")

    def _check_weights(self) -> None:
        weights: Any = self.chunk_weights
        if weights is None:
            return
        if isinstance(weights, str) or not isinstance(weights, Sequence):
            text = "expected one number for each device, such as (4, 1)"
            self._refuse("chunk_weights", text, TypeError)
        if not weights or not all(_is_number(w) and 0 < float(w) < math.inf for w in weights):
            self._refuse("chunk_weights", "expected finite numbers above 0, one for each device")
        object.__setattr__(self, "chunk_weights", tuple(weights))

    def _check_numbers(self) -> None:
        for name in ("placement_timeout", "call_timeout", "cpus_per_replica", "gpus_per_replica"):
            value = getattr(self, name)
            if not _is_number(value) and not (name == "call_timeout" and value is None):
                self._refuse(name, f"expected a number, got {type(value).__name__}", TypeError)
        for name in ("placement_timeout", "call_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= _LONGEST:
                without = "; None waits without a limit" if name == "call_timeout" else ""
                self._refuse(name, f"expected seconds above 0, at most {_LONGEST:g}{without}")
        if not 0 <= self.cpus_per_replica < math.inf:
            self._refuse("cpus_per_replica", "expected at least 0")
        if not 0 < self.gpus_per_replica <= 1:
            self._refuse(
                "gpus_per_replica",
                "expected a number above 0 and at most 1. For CPU replicas, give "
                "device_ids=['cpu', ...]",
            )

    def _check_placement(self) -> None:
        examples = {
            "resources": "{'accelerator_type:A100': 0.001}",
            "label_selector": "{'zone': 'a'}",
        }
        for name, example in examples.items():
            value = getattr(self, name)
            named = isinstance(value, Mapping) and all(isinstance(k, str) and k for k in value)
            if not named:
                self._refuse(name, f"expected a dict by name, such as {example}", TypeError)
            object.__setattr__(self, name, Frozen(value))  # it is part of a key
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                self._refuse(
                    "resources",
                    "expected custom resources of Ray's; CPUs and GPUs are booked with "
                    "cpus_per_replica and gpus_per_replica",
                )
            if not _is_number(amount) or not 0 < amount < math.inf:
                self._refuse("resources", f"expected a number above 0 for {name!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

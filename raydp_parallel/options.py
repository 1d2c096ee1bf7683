"""`Options`: the settings that few programs need, in one frozen dataclass."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

import torch

UnusedGrads = Literal["zeros", "none"]
Scalars = Literal["vector", "mean", "weighted_mean", "sum"]
BufferPolicy = Literal["first", "mean"]
LinkName = Literal["auto", "shared", "inline", "object_store", "collective"]
OnFault = Literal["replay", "raise"]
RandomNumbers = Literal["per_chunk", "per_sample"]
GpuPath = Literal["host", "registered", "ipc", "peer", "courier", "nccl"]
BufferUpdates = Literal["every_forward", "evaluation"]
ChunkWeights = Sequence[float] | Literal["auto"] | None

_CHOICES = {
    "unused_grads": ("zeros", "none"),
    "scalars": ("vector", "mean", "weighted_mean", "sum"),
    "buffers": ("first", "mean"),
    "rng": ("per_chunk", "per_sample"),
    "buffer_updates": ("every_forward", "evaluation"),
    "link": ("auto", "shared", "inline", "object_store", "collective"),
    "on_fault": ("replay", "raise"),
}

GPU_PATHS = ("host", "registered", "ipc", "peer", "courier", "nccl")
"""Ways by which bytes leave a GPU, in the order in which they should be tried."""

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What gradients may become on their way."""

_SELECTOR = r"!?(in\([^(),!]+(,[^(),!]+)*\)|[^(),!]+)"
"""What Ray takes for a label: ``a``, ``!a``, ``in(a, b)`` or ``!in(a, b)``."""

_LONGEST = 1e6
"""The longest timeout in seconds, eleven days: `poll` counts milliseconds in 32 bits."""

V = TypeVar("V")


class Frozen(dict[str, V]):
    """A dict that cannot be changed, and may be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]  # dict has none, because it can change
        return hash(frozenset(self))  # values may be dicts, as those of compile={"options": ...}

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
        unused_grads: What a parameter gets that no replica used: ``"zeros"`` as upstream, or
            ``"none"`` as a plain module would leave it.
        scalars: What 0-dim outputs become: upstream's ``"vector"``, one entry per chunk, or one
            number, their ``"mean"``, their mean weighted by the chunks' rows, or their ``"sum"``.
        buffers: What the module's buffers are after a forward that writes to them in place, such as
            batch norm's running statistics: as upstream what the ``"first"`` chunk wrote; or the
            ``"mean"`` over the chunks, each of which counts the same, for buffers of floating-point
            and complex numbers.
        rng: Where random numbers of a chunk come from: ``"per_chunk"`` gives each chunk a stream of
            its own. ``"per_sample"`` makes those of dropout and of other operations with one entry
            for each row follow from the row's number in the batch, so that they do not depend on
            the number of devices. That costs each operation of the module some microseconds, and
            each random one some for each row.
        buffer_updates: When the other replicas get what the first chunk's forward wrote to small
            buffers, such as batch norm's running means: with ``"every_forward"``, as upstream's;
            or, while `DataParallel.optimizer` trains, for an ``"evaluation"``, which is any forward
            of a module that is not in training mode, or has been changed otherwise. That is for
            buffers that a training forward writes and does not read. The master has them after each
            forward either way.
        chunk_weights: What the rows of the chunks are in proportion to, one number for each of
            ``device_ids``, such as ``(4, 1)``; or ``"auto"``, by what each device was measured to
            compute per second; None cuts batches as upstream does. All arguments that are split
            must have one size then.
        least_rows: The fewest rows of a chunk, for batch norm. Smaller batches make fewer chunks,
            and one that has fewer rows than this makes one.
        compile: Whether replicas compile the module by `torch.compile`, with its defaults, or a
            dict of its settings, such as ``{"mode": "reduce-overhead"}``. Each replica compiles
            with its first forward, and keeps that while only values change.
        gradient_dtype: What gradients of parameters in a wider dtype become on their way from a
            replica, such as ``torch.bfloat16``; the driver sums them in the parameter's dtype.
            Those in float64 are only changed by ``torch.float32``. Replicas do not sum among
            themselves then. None sends them as they are.
        link: How bytes travel: ``"auto"`` sends small ones inside the call; large ones lie in
            shared memory if the cluster is one machine, the weights of CPU replicas included, else
            they go beside the call or through Ray's object store; replicas on several nodes sum
            gradients among themselves and pass weights on. ``"collective"`` lets replicas do both
            wherever they are. The other names force one way for everything.
        gpu_paths: By which ways bytes may leave a GPU, such as ``("ipc", "courier")``. ``"host"``,
            by pinned memory of torch's with one wait before the answer, is always among them, and
            alone by default, because no other way was ever seen on a GPU. ``"registered"``
            registers shared memory with CUDA, for direct copies. ``"ipc"`` leaves bytes on a GPU
            that driver and replica share. ``"peer"`` copies between the GPUs of one machine, and is
            ``"ipc"`` on each of them. ``"courier"`` copies gradients while backward runs.
            ``"nccl"`` lets replicas with GPUs of their own sum gradients there. Each is tried when
            replicas start, and not used where that fails; ``docs/gpu.md`` compares them.
        placement_timeout: Seconds that replicas may take to be placed and to start. While they wait
            for a place Ray's autoscaler knows of it, and a node that is added is used.
        call_timeout: Seconds that one forward or backward may take before its replica counts as
            dead and is ended; None waits.
        on_fault: What to do when a replica dies: ``"replay"`` runs its chunk again on another one,
            with the same result to the bit, while a new process starts in the background;
            ``"raise"`` raises `ReplicaDied`, and the next call starts the new process. On GPUs the
            last bits are the same as far as their kernels repeat them: not where these add
            atomically or cuDNN chooses by speed, nor on another model of GPU.
        max_restarts_per_hour: How many replicas that died are replaced within an hour. Beyond that,
            calls go on with those that are left, and without any raise `RestartsSpent`.
        cpus_per_replica: CPUs that Ray books for each replica, on a CPU or a GPU. 0 lets any number
            of them share a small machine.
        gpus_per_replica: What Ray books for each GPU replica, above 0 and at most 1. With 0.5 each
            GPU of the cluster counts as two logical GPUs, and their replicas share it.
        resources: Further resources that Ray books for each replica, such as
            ``{"accelerator_type:A100": 0.001}``. Only nodes that have them are used.
        label_selector: Labels that a node must have to be used, such as ``{"market-type":
            "!spot"}``; the values are those of Ray's label selectors. It needs a Ray that places by
            label, 2.49 or newer.
        elastic: Start with as many GPUs as there are, one at least, instead of waiting for all;
            they run the chunks of the others, too. Nodes that join are used, nodes that drain are
            left. Chunks stay what ``device_ids`` say, so that results do not depend on which
            replicas run.
        threads: Torch's threads in a CPU replica. None shares a node's cores among the chunks of a
            call: those that Ray was told of, and never more than the process may use, by affinity
            and quota, as the replicas that started first found.
        direct_line: Call replicas over a socket, five times faster than a Ray task. False makes
            every phase a Ray task, which Ray's dashboard lists, at the price of about 2 ms per
            step. Memory is shared on one machine either way.
        name: What Ray's dashboard, metrics and `raydp-parallel status` call the executor; None is
            the program's name.
        metrics: Report to Ray's metrics and to `raydp-parallel status`, once per second, in the
            background.
        profile_dir: A folder to write all calls to, as a trace for Chrome or Perfetto with the
            driver and the replicas on one clock. It grows by about 1 KB per call and chunk. When
            the executor ends, the page of `raydp-parallel report` is written beside it.
        passthrough: Names that the wrapper has not got are looked up on the module: with
            ``model.config`` for ``model.module.config``. What is found is the master's, so that
            ``model.generate(x)`` runs in this process; ``model.call("generate", x)`` runs on the
            replicas. Setting an attribute, names with two underscores on each side, and those of
            the wrapper's own, stay the wrapper's.
        in_process: Run the replicas inside the driver's process, one after the other, without Ray.
            For debuggers.
    """

    unused_grads: UnusedGrads = "zeros"
    scalars: Scalars = "vector"
    buffers: BufferPolicy = "first"
    rng: RandomNumbers = "per_chunk"
    buffer_updates: BufferUpdates = "every_forward"
    chunk_weights: ChunkWeights = None
    least_rows: int = 1
    compile: bool | Mapping[str, Any] = False
    gradient_dtype: torch.dtype | None = None
    link: LinkName = "auto"
    gpu_paths: Sequence[GpuPath] = ("host",)
    placement_timeout: float = 60.0
    call_timeout: float | None = None
    on_fault: OnFault = "replay"
    max_restarts_per_hour: int = 100
    cpus_per_replica: float = 0.0
    gpus_per_replica: float = 1.0
    resources: Mapping[str, float] = field(default_factory=Frozen)
    label_selector: Mapping[str, str] = field(default_factory=Frozen)
    elastic: bool = False
    threads: int | None = None
    direct_line: bool = True
    name: str | None = None
    metrics: bool = True
    profile_dir: str | None = None
    passthrough: bool = False
    in_process: bool = False

    @property
    def replicas_per_gpu(self) -> int:
        """How many replicas `gpus_per_replica` puts on each GPU."""
        return int(1 / self.gpus_per_replica + 1e-6)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"Options({name}={getattr(self, name)!r}): expected one of {', '.join(choices)}"
                )
        self._check_compile()
        if self.compile is not False and self.rng == "per_sample":
            raise ValueError(
                "Options(compile=..., rng='per_sample'): compiled code makes its random numbers "
                "itself, and not row by row"
            )
        if self.buffers == "mean" and self.buffer_updates == "evaluation":
            raise ValueError(
                "Options(buffers='mean', buffer_updates='evaluation'): the mean would be over "
                "buffers that were written at different times"
            )
        self._check_gradient_dtype()
        self._check_gpu_paths()
        self._check_chunks()
        self._check_numbers()
        self._check_placement()
        if self.elastic and self.on_fault != "replay":
            raise ValueError(
                "Options(elastic=True, on_fault='raise'): replicas that are "
                "away need others to stand in"
            )
        if self.name is not None and (
            not self.name or any(c in "/:@" or not c.isprintable() for c in self.name)
        ):
            raise ValueError(
                f"Options(name={self.name!r}): expected printable characters without '/', "
                "':' and '@', such as 'train'"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"Options(threads={self.threads}): expected None or at least 1")

    def _check_compile(self) -> None:
        if isinstance(self.compile, bool):
            return
        if not isinstance(self.compile, Mapping):
            raise TypeError(
                f"Options(compile={self.compile!r}): expected True, False, or a dict of settings "
                "of torch.compile, such as {'mode': 'reduce-overhead'}"
            )
        known = [*inspect.signature(torch.compile).parameters][1:]
        for name in self.compile:
            if name not in known:
                raise ValueError(
                    f"Options(compile={{{name!r}: ...}}): torch.compile has the settings "
                    f"{', '.join(known)}"
                )
        if not isinstance(self.compile.get("backend", ""), str):
            raise TypeError(
                "Options(compile={'backend': ...}): expected the name of a backend, as replicas "
                "are other processes"
            )
        object.__setattr__(self, "compile", Frozen(self.compile))

    def _check_gradient_dtype(self) -> None:
        if self.gradient_dtype is None:
            return
        known = ", ".join(map(str, GRADIENT_DTYPES))
        if not isinstance(self.gradient_dtype, torch.dtype):
            raise TypeError(
                f"Options(gradient_dtype={self.gradient_dtype!r}): expected one of {known}"
            )
        if self.gradient_dtype not in GRADIENT_DTYPES:
            raise ValueError(
                f"Options(gradient_dtype={self.gradient_dtype}): expected one of {known}"
            )
        if self.link == "collective":
            raise ValueError(
                f"Options(gradient_dtype={self.gradient_dtype}, link='collective'): replicas that "
                "sum gradients among themselves send them as they are"
            )

    def _check_gpu_paths(self) -> None:
        paths: Any = self.gpu_paths
        if isinstance(paths, str) or not isinstance(paths, (Sequence, Set)):
            raise TypeError(
                f"Options(gpu_paths={paths!r}): expected names, such as ('ipc', 'courier')"
            )
        for name in paths:
            if name not in GPU_PATHS:
                raise ValueError(
                    f"Options(gpu_paths={paths!r}): expected some of {', '.join(GPU_PATHS)}"
                )
        named = {"host", *paths, *(("ipc",) if "peer" in paths else ())}
        object.__setattr__(self, "gpu_paths", tuple(p for p in GPU_PATHS if p in named))

    def _check_chunks(self) -> None:
        weights: Any = self.chunk_weights
        if weights is not None and not (isinstance(weights, str) and weights == "auto"):
            if isinstance(weights, str) or not isinstance(weights, Sequence):
                raise TypeError(
                    f"Options(chunk_weights={weights!r}): expected 'auto', or one number for each "
                    "device, such as (4, 1)"
                )
            good = all(_is_number(weight) and 0 < float(weight) < math.inf for weight in weights)
            if not good or not weights:
                raise ValueError(
                    f"Options(chunk_weights={weights!r}): expected finite numbers above 0, one for "
                    "each device"
                )
            object.__setattr__(self, "chunk_weights", tuple(weights))
        if isinstance(self.least_rows, bool) or not isinstance(self.least_rows, int):
            raise TypeError(f"Options(least_rows={self.least_rows!r}): expected an int")
        if self.least_rows < 1:
            raise ValueError(f"Options(least_rows={self.least_rows}): expected at least 1")

    def _check_numbers(self) -> None:
        for name in ("placement_timeout", "call_timeout", "cpus_per_replica", "gpus_per_replica"):
            value = getattr(self, name)
            if not _is_number(value) and not (name == "call_timeout" and value is None):
                raise TypeError(
                    f"Options({name}={value!r}): expected a number, got {type(value).__name__}"
                )
        for name in ("placement_timeout", "call_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= _LONGEST:
                without = "; None waits without a limit" if name == "call_timeout" else ""
                raise ValueError(
                    f"Options({name}={seconds!r}): expected seconds above 0, at most "
                    f"{_LONGEST:g}{without}"
                )
        if (
            not _is_number(self.max_restarts_per_hour)
            or not 0 <= self.max_restarts_per_hour < math.inf
        ):
            raise ValueError(
                f"Options(max_restarts_per_hour={self.max_restarts_per_hour}): expected at least 0"
            )
        if not 0 <= self.cpus_per_replica < math.inf or not 0 < self.gpus_per_replica <= 1:
            raise ValueError(
                f"Options(cpus_per_replica={self.cpus_per_replica}, "
                f"gpus_per_replica={self.gpus_per_replica}): "
                "expected cpus >= 0 and 0 < gpus <= 1. For CPU replicas, give "
                "device_ids=['cpu', ...]"
            )

    def _check_placement(self) -> None:
        for name, example in (
            ("resources", "{'accelerator_type:A100': 0.001}"),
            ("label_selector", "{'zone': 'a'}"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(
                isinstance(key, str) and key for key in value
            ):
                raise TypeError(
                    f"Options({name}={value!r}): expected a dict by name, such as {example}"
                )
            object.__setattr__(self, name, Frozen(value))
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(
                    f"Options(resources={{{name!r}: ...}}): expected custom resources of "
                    "Ray's; CPUs and GPUs are "
                    "booked with cpus_per_replica and gpus_per_replica"
                )
            if not _is_number(amount) or not 0 < amount < math.inf:
                raise ValueError(
                    f"Options(resources={{{name!r}: {amount!r}}}): expected a number above 0"
                )
        for name, wanted in self.label_selector.items():
            if not isinstance(wanted, str) or not re.fullmatch(_SELECTOR, wanted):
                raise ValueError(
                    f"Options(label_selector={{{name!r}: {wanted!r}}}): expected 'a', '!a', "
                    "'in(a, b)' or '!in(a, b)'"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

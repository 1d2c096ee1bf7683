"""`Options`: the settings that few programs need, in one frozen dataclass. Those of wrappers and
those of executors are a class each, whose fields have the rules for their values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Literal, get_args

UnusedGrads = Literal["zeros", "none"]
Scalars = Literal["vector", "mean"]
GpuPath = Literal["host", "ipc", "nccl"]
GPU_PATHS = get_args(GpuPath)


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _are_resources(value: Mapping[object, object]) -> bool:
    booked = {"CPU", "GPU", "memory", "object_store_memory"}  # by the settings below, and by Ray
    named = all(isinstance(name, str) and name for name in value)
    return named and not booked & {*value} and all(map(_is_amount, value.values()))


# The rules of fields: the class of a value, the values there may be, and how an error says it.
# Eleven days at most: `poll` counts milliseconds in 32 bits.
_TIME = {"rule": (Real, lambda n: 0 < n <= 1e6, "a number of seconds, above 0 and at most 1e+06")}
_SCALARS = {"rule": (str, get_args(Scalars).__contains__, "one of vector, mean")}
_UNUSED = {"rule": (str, get_args(UnusedGrads).__contains__, "one of zeros, none")}
_SHOWN = "printable characters without '/', ':' and '@', such as 'train'"
_NAME = {"rule": (str, lambda text: text.isprintable() and not re.search("^$|[/:@]", text), _SHOWN)}
_COUNT = {"rule": (Integral, lambda n: n >= 1, "None or a whole number, at least 1")}
_EACH = "finite numbers above 0, one for each device, such as (4, 1)"
_WEIGHTS = {"rule": (Sequence, lambda w: all(map(_is_amount, w)) and _is_amount(sum(w)), _EACH)}
_CPUS = {"rule": (Real, lambda n: 0 <= n < math.inf, "a number, at least 0")}
_PART = "a number above 0, at most 1. For CPU replicas, give device_ids=['cpu', ...]"
_GPUS = {"rule": (Real, lambda n: 0 < n <= 1, _PART)}
_AMOUNTS = "numbers above 0 by names of Ray's custom resources; cpus_per_replica books CPUs"
_RESOURCES = {"rule": (Mapping, _are_resources, _AMOUNTS)}
_LABELS = {"rule": (Mapping, all, "conditions by names of labels")}
_SOME = f"'auto' or some of {GPU_PATHS}"
_PATHS = {"rule": (Collection, lambda p: p == "auto" or all(w in GPU_PATHS for w in p), _SOME)}


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Settings that are checked by the rules of their fields."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not entry.metadata or (value is None and entry.default is None):
                continue
            kind, fits, text = entry.metadata["rule"]
            known = isinstance(value, kind) and not isinstance(value, bool)
            if not known or not fits(value):
                error = ValueError if known else TypeError
                raise error(f"Options({entry.name}={value!r}): expected {text}")
            if not isinstance(value, (str, Real)):  # a copy: the program may change its own
                copied = dict(value) if isinstance(value, Mapping) else tuple(value)
                object.__setattr__(self, entry.name, copied)


@dataclass(frozen=True, kw_only=True)
class WrapperOptions(_Checked):
    """The settings that wrappers read. An executor has them for wrappers without their own."""

    scalars: Scalars = field(default="vector", metadata=_SCALARS)
    unused_grads: UnusedGrads = field(default="zeros", metadata=_UNUSED)
    chunk_weights: Sequence[float] | None = field(default=None, metadata=_WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions(_Checked):
    """The settings that an executor reads, and the starts of its replicas."""

    placement_timeout: float = field(default=180.0, metadata=_TIME)
    call_timeout: float | None = field(default=None, metadata=_TIME)
    elastic: bool = False
    name: str | None = field(default=None, metadata=_NAME)
    metrics: bool = True
    threads: int | None = field(default=None, metadata=_COUNT)
    cpus_per_replica: float = field(default=0.0, metadata=_CPUS)
    gpus_per_replica: float = field(default=1.0, metadata=_GPUS)
    resources: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_RESOURCES)
    label_selector: Mapping[str, str] = field(default_factory=dict, hash=False, metadata=_LABELS)
    gpu_paths: Literal["auto"] | Sequence[GpuPath] = field(default="auto", metadata=_PATHS)

    @property
    def replicas_per_gpu(self) -> int:
        """How many replicas `gpus_per_replica` puts on each GPU."""
        return int(1 / self.gpus_per_replica + 1e-6)

    @property
    def ways(self) -> set[str]:
        """The ways of `gpu_paths` to try."""
        return {*GPU_PATHS} if self.gpu_paths == "auto" else {*self.gpu_paths}

    def refuse_others(self, beside: ExecutorOptions) -> None:
        """Refuse such settings beside an executor that has others: they would do nothing."""
        for name in ExecutorOptions.__dataclass_fields__:
            if getattr(beside, name) not in (getattr(Options(), name), getattr(self, name)):
                raise ValueError(f"Options({name}=...) is an executor's: give it to executor=, too")


@dataclass(frozen=True, kw_only=True)
class Options(ExecutorOptions, WrapperOptions):
    """How an executor and its wrappers behave where the default does not suit.

    Attributes:
        scalars: The form of 0-dim outputs: upstream's ``"vector"``, one entry per chunk, or one
            number, their ``"mean"``, weighted by the chunks' rows.
        unused_grads: The gradient of a parameter that no replica used: ``"zeros"`` as upstream, or
            ``"none"`` as a plain module would leave it.
        placement_timeout: Seconds that replicas may take to be placed and to start, which takes
            minutes where all cores are busy. While they wait for a place Ray's autoscaler knows of
            it, and a node that is added is used.
        call_timeout: Seconds that one forward or backward may take before its replica counts as
            dead and is ended; None waits. The first call of a process has ``placement_timeout``, if
            that is more: it imports.
        elastic: Start with as many GPUs as there are, one at least, instead of waiting for all;
            they run the chunks of the others, too. Nodes that join are used, nodes that drain are
            left. Chunks stay what ``device_ids`` say, so that results do not depend on which
            replicas run.
        name: The executor's name in Ray's dashboard, metrics and `raydp-parallel status`; None is
            the program's name.
        metrics: Report to Ray's metrics and to `raydp-parallel status`, once per second, in the
            background.
        threads: Torch's threads in a CPU replica. None shares a node's cores among the chunks of a
            call: those that Ray was told of, and never more than the process may use.
        chunk_weights: Proportions of the rows of the chunks, one number for each of
            ``device_ids``, such as ``(4, 1)``; None cuts batches as upstream does. All arguments
            that are split must have one size then.
        cpus_per_replica: CPUs that Ray books for each replica, on a CPU or a GPU. 0 lets any number
            of them share a small machine.
        gpus_per_replica: The part of a GPU that Ray books for each replica, above 0 and at most 1.
            With 0.5 each GPU of the cluster counts as two logical GPUs, whose replicas share it.
        resources: Further resources that Ray books for each replica, such as
            ``{"accelerator_type:A100": 0.001}``. Only nodes that have them are used.
        label_selector: Labels that a node must have to be used, such as ``{"market-type":
            "!spot"}``, as Ray's label selectors have it. Give ``device_ids`` with it. It needs a
            Ray that places by label, 2.49 or newer.
        gpu_paths: Ways in which bytes may leave a GPU. ``"host"``, by pinned memory, is always
            there; ``"ipc"`` is memory of a GPU that the driver and a replica share; ``"nccl"``
            carries weights and gradients from GPU to GPU. ``"auto"`` is all of them; each is tried
            before it is used, and left out where it fails.
    """

    def __new__(cls, **given: object) -> Options:
        """Suggest the name that was meant."""
        names = cls.__dataclass_fields__
        for name in given.keys() - names:
            meant = difflib.get_close_matches(name, names, 1) or names
            raise TypeError(f"Options has no {name!r}; it has {', '.join(meant)}")
        return super().__new__(cls)


Options.__new__.__wrapped__ = Options.__init__  # type: ignore[attr-defined]  # has the signature

"""Upstream's verbs `replicate` and `parallel_apply`, each usable alone; `batch` has the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raydp_parallel import batch
from raydp_parallel.batch import Keywords
from raydp_parallel.cluster.placement import Device, DeviceId, all_gpus, device_id
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import forward
from raydp_parallel.driver.executor import Executor, shared
from raydp_parallel.driver.forward import Called, ForwardChunk
from raydp_parallel.options import Options, UnusedGrads
from raydp_parallel.state.look import look


@dataclass(eq=False, repr=False, init=False)
class RemoteReplica:
    """A module's replica on a device of the cluster. Called like the module; gradients reach the
    module itself.

    It is the module as it is when called: edits since `replicate` are seen. Methods and submodules
    can be called, too.
    """

    module: nn.Module  # the master copy
    device_id: DeviceId  # where the replica runs
    _slot: ReplicaSlot
    _executor: Executor
    _detach: bool
    _unused: UnusedGrads
    _writes: bool  # back to the module, as the first one does
    _called: Called = None

    def __init__(self, **parts: object) -> None:
        vars(self).update({"_called": None, **parts})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set on a replica: set it on the module")

    def __getattr__(self, name: str) -> Any:
        # A value of the module's, or a method or submodule to be called there.
        if name.startswith("__") or self.__dict__.get("_called", "") is not None:
            raise AttributeError(f"RemoteReplica has no attribute {name!r}")
        value = getattr(self.module, name)
        if not callable(value):
            return value
        if hasattr(nn.Module, name) and name != "forward":
            raise AttributeError(
                f"RemoteReplica has no attribute {name!r}: the replica's module is in another "
                "process. Change the module before the call, and read it after the call"
            )
        return replace(self, _called=name)

    @ambient.uncompiled
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the replica. An exception of the module is raised as it is, as a plain call would."""
        executor, chunk = self._executor, self.chunk(args, kwargs)
        with executor.replica_set.lock:  # nobody else's call may come between
            return forward.start(executor, [chunk]).finish()[0]

    def chunk(
        self, args: object, kwargs: Keywords, dim: int = 0, number: int | None = None
    ) -> ForwardChunk:
        """Make a chunk of arguments for this replica. An exception names its number, if any."""
        prefix = None if number is None else f"in replica {number} on device {self.device_id}"
        positional = tuple(args) if isinstance(args, (list, tuple)) else (args,)
        given = self._slot, self.module, positional, kwargs, prefix
        rows = next(batch.sizes((positional, kwargs), dim), 0)
        return ForwardChunk(*given, rows, self._detach, self._unused, self._called, self._writes)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_slot": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        vars(self)["_slot"] = self._executor.slots([self.device_id])[0]

    def __repr__(self) -> str:
        return f"RemoteReplica({type(self.module).__name__} on {self._slot})"


Modules = Sequence[RemoteReplica | nn.Module]


@ambient.uncompiled
def replicate(
    network: nn.Module,
    devices: Iterable[Device],
    detach: bool = False,
    *,
    executor: Executor | None = None,
) -> list[RemoteReplica]:
    """Replicate a module on devices of the cluster.

    Args:
        network: The module.
        devices: Logical GPUs of the cluster, or ``"cpu"`` entries.
        detach: True if the replicas take no gradients for the module's parameters.
        executor: The executor that runs the replicas; None is the process's.

    Returns:
        One callable replica per device.
    """
    look(network, {})  # raises upstream's errors for modules that it cannot replicate either
    ids = [device_id(entry) for entry in devices]
    executor = executor or shared(Options())
    return replicas_of(network, ids, detach, executor, executor.options.unused_grads) if ids else []


def replicas_of(
    net: nn.Module, ids: Sequence[DeviceId], detach: bool, executor: Executor, unused: UnusedGrads
) -> list[RemoteReplica]:
    """Make one callable replica per device; a look at the module comes with the call."""
    alike = {"module": net, "_executor": executor, "_detach": detach, "_unused": unused}
    made = enumerate(zip(ids, executor.slots(ids), strict=True))
    return [RemoteReplica(**alike, device_id=k, _slot=slot, _writes=not i) for i, (k, slot) in made]


@ambient.uncompiled
def parallel_apply(
    modules: Modules,
    inputs: Sequence[object],
    kwargs_tup: Sequence[Keywords] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Apply each module to its input, all at once.

    Args:
        modules: Remote replicas; or plain modules, which run on ``devices``.
        inputs: For each module its arguments, a tuple or list, or a single argument.
        kwargs_tup: For each module its keyword arguments.
        devices: For each module its device. Replicas have theirs.

    Returns:
        The outputs.

    Raises:
        AssertionError: The numbers of modules, inputs, kwargs or devices differ.
    """
    return apply(modules, inputs, kwargs_tup, devices)


def apply(
    modules: Modules,
    inputs: Sequence[object],
    kwargs_tup: Sequence[Keywords] | None,
    devices: Sequence[Device] | None,
    dim: int = 0,
    lend: bool = False,
) -> list[object]:
    """Do as `parallel_apply`, with the settings of a wrapper."""
    for name, others in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if others is not None and len(others) != len(modules):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {name} "
                f"{len(others)}"
            )
    if not modules:
        raise IndexError("parallel_apply: list of modules is empty")
    for module in modules:
        if not isinstance(module, (RemoteReplica, nn.Module)):
            raise TypeError(f"parallel_apply: a {type(module).__name__} is no replica or module")
    known = {module._executor for module in modules if isinstance(module, RemoteReplica)}
    owners = known or {shared(Options())}
    executor = owners.pop()
    if owners:
        raise ValueError("parallel_apply: give replicas of one executor, got those of several")
    chunks = []
    for i, module in enumerate(modules):
        if not isinstance(module, RemoteReplica):
            ids = [device_id(entry) for entry in devices or all_gpus(executor.options) or ["cpu"]]
            ids = [ids[k % len(ids)] for k in range(len(modules))]
            made = replicas_of(module, ids, False, executor, executor.options.unused_grads)
            module = replace(made[i], _writes=True)
        chunks.append(module.chunk(inputs[i], kwargs_tup[i] if kwargs_tup else {}, dim, i))
    with executor.replica_set.lock:  # nobody else's call may come between
        return forward.start(executor, chunks).finish(lend)


def module_device(module: nn.Module, ids: Sequence[DeviceId] = ()) -> torch.device:
    """Return the device of a module's first tensor. Without one that is, as upstream, the first of
    its ids, if this process has that GPU; else the CPU.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    known = bool(ids) and ids[0] in range(torch.cuda.device_count())
    return torch.device(f"cuda:{ids[0]}" if known else "cpu")

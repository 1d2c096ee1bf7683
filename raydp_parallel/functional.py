"""Upstream's verbs `replicate` and `parallel_apply`, each usable alone; `batch` has the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from raydp_parallel.batch import Keywords
from raydp_parallel.cluster.placement import Device, DeviceId, all_gpus, device_id
from raydp_parallel.devices import ambient
from raydp_parallel.driver import forward
from raydp_parallel.driver.executor import Executor, shared
from raydp_parallel.driver.forward import RemoteReplica
from raydp_parallel.options import Options, UnusedGrads
from raydp_parallel.state.look import look

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
        return forward.start(chunks).finish(lend)


def module_device(module: nn.Module, ids: Sequence[DeviceId] = ()) -> torch.device:
    """Return the device of a module's first tensor. Without one that is, as upstream, the first of
    its ids, if this process has that GPU; else the CPU.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    known = bool(ids) and ids[0] in range(torch.cuda.device_count())
    return torch.device(f"cuda:{ids[0]}" if known else "cpu")

"""Groups of replicas that exchange tensors, in the layers of synchronised batch norm and in the
steps of an optimizer in the replicas.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.driver.executor import Executor
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm
from raydp_parallel.wire.group import check_apart, open_store
from raydp_parallel.wire.messages import ExchangeRequest

Places = Callable[[Sequence[int]], dict[int, ExchangeRequest]]
"""Gives the chunks of one trip their places in a group."""

_PATIENCE = 300.0
"""Seconds that chunks wait for each other, without a ``call_timeout``."""

_names = itertools.count(1)


class _Group:
    """A group of some replicas, each in one life.

    Args:
        key: The slots' indices and lives.
        host: The address where members find each other.
    """

    def __init__(self, key: tuple[tuple[int, int], ...], host: str) -> None:
        self.key = key
        self.store = open_store(host)
        self.address = host, int(self.store.port)
        self.name = f"group {next(_names)}"


_groups: weakref.WeakKeyDictionary[Executor, _Group] = weakref.WeakKeyDictionary()


def places(executor: Executor, chunks: Sequence[Any]) -> Places | None:
    """Return what gives chunks their places; None if they do not exchange anything."""
    if len(chunks) < 2 or not SyncBatchNorm.made:
        return None
    modules = {id(chunk.module): chunk.module for chunk in chunks}
    if not any(map(_exchanges, modules.values())):
        return None
    if len(modules) > 1:
        raise ValueError("synchronised batch norm: apply each module alone")
    slots = [chunk.slot for chunk in chunks]
    check_apart(slots, executor.options.in_process)

    def give(numbers: Sequence[int]) -> dict[int, ExchangeRequest]:
        if not all(slot.ready for slot in slots):
            executor.replica_set.grow(executor.options.placement_timeout)
        return members(executor, slots, numbers)

    return give


def members(
    executor: Executor, slots: Sequence[ReplicaSlot], numbers: Sequence[int]
) -> dict[int, ExchangeRequest]:
    """Return places of some members, by number, in a group of all that these slots have now."""
    key = tuple((slot.index, slot.life) for slot in slots)
    group = _groups.get(executor)
    if group is None or group.key != key:
        group = _groups[executor] = _Group(key, _host(slots))
    timeout = executor.options.call_timeout or _PATIENCE
    return {i: ExchangeRequest(group.address, group.name, i, len(slots), timeout) for i in numbers}


def forget(executor: Executor) -> None:
    """Make another group next time: a member has left this one."""
    _groups.pop(executor, None)


def _exchanges(module: nn.Module) -> bool:
    return any(isinstance(part, SyncBatchNorm) and part.exchanges for part in module.modules())


def _host(slots: Sequence[Any]) -> str:
    near = all(slot.client is not None and slot.client.hello.near for slot in slots)
    return "127.0.0.1" if near else ray_api.own_address()

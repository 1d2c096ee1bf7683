"""Groups of replicas that exchange tensors: in the layers of synchronised batch norm, in the steps
of an optimizer in the replicas, and, if each has a GPU of its own, weights and gradients.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.driver.dispatcher import ChunkCall
from raydp_parallel.driver.executor import Executor
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm
from raydp_parallel.wire.group import check_apart, close_store, open_store
from raydp_parallel.wire.messages import ExchangeRequest

log = logging.getLogger("raydp_parallel")

Places = Callable[[Sequence[int]], dict[int, ExchangeRequest]]
"""Gives the chunks of one trip their places in a group."""

_PATIENCE = 300.0
"""Seconds that chunks wait for each other, without a ``call_timeout``."""
_TRIAL, _GRACE = 30.0, 5.0
"""Seconds for the trial of NCCL, and then for all members to give it up."""
_REMEDY = (
    "NCCL_SOCKET_IFNAME names the network between machines, --shm-size=1g gives a container shared "
    "memory, and NCCL_P2P_DISABLE=1 helps where one GPU cannot read another's memory"
)
_MOST_JOINS = 3
"""How often a replica may die while it joins, before that is taken for NCCL's fault."""
_MOST_GROUPS = 4
"""Groups of one executor that live at once: for models on several sets of GPUs."""
_LEAST = 1 << 20
"""Bytes of weights or gradients from which on NCCL carries them."""

_names = itertools.count(1)


class _Group:
    """A group of some replicas, each in one life.

    Args:
        slots: The slots that have them.
        patience: Seconds that they wait for each other.
        nccl: True if tensors go by NCCL.
    """

    def __init__(self, slots: Sequence[ReplicaSlot], patience: float, nccl: bool) -> None:
        near = all(slot.client is not None and slot.client.hello.near for slot in slots)
        host = None if near else ray_api.own_address()
        self._store = store = open_store(len(slots), host)
        self.address = store if host is None else (host, store.port)
        name = f"group {next(_names)}"
        links = [getattr(slot.client, "link", "") for slot in slots]
        root = links.index("ipc") if "ipc" in links else 0
        self.nccl = nccl
        self.places = {
            i: ExchangeRequest(name, i, len(slots), patience, nccl=nccl, root=root)
            for i in range(len(slots))
        }

    def close(self) -> None:
        """Let the members leave."""
        close_store(self._store)
        self._store = None


def places(executor: Executor, chunks: Sequence[Any]) -> Places | None:
    """Return what gives chunks their places; None if their layers do not exchange anything."""
    if len(chunks) < 2 or not SyncBatchNorm.made:
        return None
    modules = {id(chunk.module): chunk.module for chunk in chunks}
    parts = [part for module in modules.values() for part in module.modules()]
    if not any(isinstance(part, SyncBatchNorm) and part.exchanges for part in parts):
        return None
    if len(modules) > 1:
        raise ValueError("synchronised batch norm: apply each module alone")
    slots = [chunk.slot for chunk in chunks]
    check_apart(slots)

    def give(numbers: Sequence[int]) -> dict[int, ExchangeRequest]:
        if not all(slot.ready for slot in slots):
            executor.replica_set.grow(executor.options.placement_timeout)
        found = members(executor, slots)
        return {i: found[i]._replace(layers=True) for i in numbers}

    return give


def members(executor: Executor, slots: Sequence[ReplicaSlot]) -> dict[int, ExchangeRequest]:
    """Return the places, by number, in a group of all replicas that these slots have now."""
    key = tuple([(slot.index, slot.life) for slot in slots])
    if key not in executor.groups:
        if len(executor.groups) >= _MOST_GROUPS:
            forget(executor)
        patience = executor.options.call_timeout or _PATIENCE
        for nccl in (True, False) if _may_use_nccl(executor, slots) else (False,):
            group = _Group(slots, patience, nccl)
            try:
                if _join(executor, slots, group):
                    executor.groups[key] = group
                    break
            finally:
                if key not in executor.groups:  # also after Ctrl-C
                    group.close()
        else:
            return group.places  # who uses them finds out, and others are made next time
    return executor.groups[key].places  # type: ignore[no-any-return]


def forget(executor: Executor) -> None:
    """Make other groups next time: a member has left one, and all others leave theirs now."""
    while executor.groups:
        executor.groups.popitem()[1].close()


def _may_use_nccl(executor: Executor, slots: Sequence[ReplicaSlot]) -> bool:
    """Tell if these are all GPUs of the executor, each a whole card: NCCL takes gigabytes for each
    set of them, and refuses a second part of one card.
    """
    if "nccl" not in executor.options.ways or executor.failed_joins >= _MOST_JOINS:
        return False
    everyone = {slot for slot in executor.replica_set.ready() if slot.client.hello.gpu}
    hellos = [slot.client.hello for slot in everyone]
    gpus = {(hello.node, hello.gpu_uuid) for hello in hellos if "MIG" not in hello.gpu}
    return {*slots} == everyone and 1 < len(gpus) == len(slots)


def _join(executor: Executor, slots: Sequence[ReplicaSlot], group: _Group) -> bool:
    """Let replicas join a group, and try NCCL, if it uses that; tell if it works."""
    begun, dispatcher = time.monotonic(), executor.dispatcher
    sent = []
    for slot, place in zip(slots, group.places.values(), strict=True):
        place = place._replace(address=group.address)
        sent.append(dispatcher.send(slot, ChunkCall(slot, "join", lambda _, p=place: p, 0)))  # type: ignore[misc]
    limit = executor.replica_set.options.call_timeout
    dispatcher.watch(sent, group.close, _TRIAL if group.nccl else limit)
    problem, died, late, until = "", "", "", time.monotonic() + _GRACE
    for slot, pending in zip(slots, sent, strict=True):
        left = max(0.0, until - time.monotonic())
        if group.nccl and pending.gone is None and not slot.client.ready(left):
            problem = f"{slot} hangs in NCCL. {_REMEDY}"
            executor.replica_set.lost(slot, pending.life, "join", problem)
        answer = dispatcher.receive(pending)
        if answer is None:
            died = f"{slot} died"
        elif answer.failure is not None and answer.failure.name.endswith("Abandoned"):
            late = answer.failure.text.splitlines()[-1]
        elif answer.failure is not None:
            problem = answer.failure.text.splitlines()[-1]
    if not group.nccl:
        return not (problem or died or late)
    problem = problem or ("" if died else late)
    if problem or died:
        executor.failed_joins += _MOST_JOINS if problem else 1
        again = executor.failed_joins < _MOST_JOINS
        log.warning("NCCL is left out%s: %s", " for now" * again, problem or died)
        return False
    text = "weights and gradients of %d GPUs go by NCCL (tried in %.1f s)"
    log.info(text, len(slots), time.monotonic() - begun)
    return True


def direct(
    executor: Executor, slots: Sequence[ReplicaSlot], size: Callable[[], int]
) -> dict[int, ExchangeRequest]:
    """Return the places in a group in which tensors of some size go from GPU to GPU; none if there
    is no NCCL, or they are small.
    """
    if not _may_use_nccl(executor, slots) or size() < _LEAST:
        return {}
    found = members(executor, slots)
    return found if found[0].nccl else {}

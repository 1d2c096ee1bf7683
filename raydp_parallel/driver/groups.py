"""Groups of replicas that exchange tensors: in layers that ask for it, in the steps of an optimizer
in the replicas, and, if each has a GPU of its own, weights and gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.driver.dispatcher import Call, Dispatcher, Flight, Group
from raydp_parallel.errors import log
from raydp_parallel.wire.group import exchanging_layers
from raydp_parallel.wire.messages import Seat

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


def have_layers(chunks: Sequence[nn.Module], slots: Sequence[ReplicaSlot]) -> bool:
    """Tell if layers exchange tensors, of the modules of chunks for some slots."""
    if len(chunks) < 2 or not exchanging_layers:
        return False
    modules = {id(module): module for module in chunks}
    parts = [part for module in modules.values() for part in module.modules()]
    known = exchanging_layers.items()
    if not any(isinstance(part, kind) and does(part) for kind, does in known for part in parts):
        return False
    if len(modules) > 1:
        raise ValueError("synchronised batch norm: apply each module alone")
    if len({*slots}) < len(slots):
        raise ValueError("synchronised batch norm needs a replica for each chunk: no device twice")
    return True


def of_layers(dispatcher: Dispatcher, slots: Sequence[ReplicaSlot]) -> list[Seat]:
    """Return the seats of replicas whose layers exchange tensors. None may be missing: one whose
    death is found as they meet has another one in its place by the next time.
    """
    for _ in range(_MOST_JOINS):
        if not all(slot.ready for slot in slots):
            dispatcher.replica_set.grow()
        group = join(dispatcher, slots)
        if all(slot.ready for slot in slots):
            break
    return [seat._replace(layers=True) for seat in group.seats]


def direct(
    dispatcher: Dispatcher, slots: Sequence[ReplicaSlot], size: Callable[[], int]
) -> list[Seat]:
    """Return the seats in a group in which tensors of some size go from GPU to GPU; none if there
    is no NCCL, or they are small.
    """
    if not _may_use_nccl(dispatcher, slots) or size() < _LEAST:
        return []
    group = join(dispatcher, slots)
    return group.seats if group.nccl else []


def join(dispatcher: Dispatcher, slots: Sequence[ReplicaSlot]) -> Group:
    """Return the group of all replicas that these slots have now."""
    key = tuple([(slot.index, slot.life) for slot in slots])
    known = dispatcher.groups
    if key in known:
        return known[key]
    if len(known) >= _MOST_GROUPS:
        dispatcher.close_groups()
    patience = dispatcher.replica_set.options.call_timeout or _PATIENCE
    for nccl in (True, False) if _may_use_nccl(dispatcher, slots) else (False,):
        group = Group(slots, Seat("", 0, len(slots), patience, nccl=nccl))
        try:
            if _join(dispatcher, slots, group):
                known[key] = group
                break
        finally:
            if key not in known:  # also after Ctrl-C
                group.close()
    return group  # if they did not find each other, who uses it finds out


def _may_use_nccl(dispatcher: Dispatcher, slots: Sequence[ReplicaSlot]) -> bool:
    """Tell if these are all GPUs of the executor, each a whole card: NCCL takes gigabytes for each
    set of them, and refuses a second part of one card.
    """
    gpus = {(slot.hello.node, slot.hello.gpu_uuid) for slot in slots if slot.hello.gpu}
    if not 1 < len(gpus) == len(slots) or any("MIG" in slot.hello.gpu for slot in slots):
        return False
    everyone = {slot for slot in dispatcher.replica_set.ready_slots() if slot.hello.gpu}
    ways = dispatcher.replica_set.options.ways
    return dispatcher.failed_joins < _MOST_JOINS and "nccl" in ways and {*slots} == everyone


def _join(dispatcher: Dispatcher, slots: Sequence[ReplicaSlot], group: Group) -> bool:
    """Let replicas join a group, and try NCCL, if it uses that; tell if it works."""
    begun, hanging = time.monotonic(), dict[ReplicaSlot, str]()

    def leave() -> None:
        group.close()
        until = time.monotonic() + _GRACE
        for slot in slots if group.nccl else ():
            left = max(0.0, until - time.monotonic())
            if slot.ready and not slot.client.has_answer(left):
                hanging[slot] = f"{slot} hangs in NCCL. {_REMEDY}"
                dispatcher.replica_set.lost(slot, slot.life, "join", hanging[slot])

    seats = [seat._replace(address=group.address) for seat in group.seats]
    calls = [Call(slot, "join", seat) for slot, seat in zip(slots, seats, strict=True)]
    limit = _TRIAL if group.nccl else None
    flight = Flight(calls, grouped=True, on=slots, leave=leave, limit=limit)
    problem, died, late = "", "", ""
    for slot, answer in zip(slots, dispatcher.finish(dispatcher.start(flight)), strict=True):
        if answer.failure is None:
            died = f"{slot} died" if answer.lacking and slot not in hanging else died
        elif answer.failure.name.endswith("Abandoned"):
            late = answer.failure.text.splitlines()[-1]
        else:
            problem = answer.failure.text.splitlines()[-1]
    # A death may be why another one hangs.
    why = died or next(iter(hanging.values()), "") or problem or late
    if group.nccl and why:
        dispatcher.failed_joins += 1 if why == died else _MOST_JOINS
        rejoins = dispatcher.failed_joins < _MOST_JOINS
        log.warning("NCCL is left out%s: %s", " for now" * rejoins, why)
    elif group.nccl:
        text = "weights and gradients of %d GPUs go by NCCL (tried in %.1f s)"
        log.info(text, len(slots), time.monotonic() - begun)
    return not why

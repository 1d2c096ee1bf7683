"""How a replica begins with the weights and the optimizer that another replica has.

On one machine the giver leaves them in shared memory, and the driver says where they lie. A copy of
the model in the giver's own process takes what the giver keeps. On other nodes the giver keeps
them, too, and passes them on in a group. The driver reads nothing of it; if any of that fails,
replicas begin by way of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raydp_parallel.calls.replica_groups import GroupTicket, ReplicaGroups
from raydp_parallel.calls.training_entries import PackedEntry
from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.transport.links import Attachments, ForeignMemory, PassedOn
from raydp_parallel.transport.messages import (
    Parcel,
    PassSnapshot,
    Reply,
    TrainingEntry,
    TrainingHandover,
)

_SLOWEST = 20e6
"""Bytes per second that a network carries at least."""


class Handover(NamedTuple):
    """What one replica begins with.

    Attributes:
        slot: Its slot.
        incarnation: Which of the slot's replicas it is.
        number: The last entry of the record that the giver had made.
        start: A start without weights and state.
        snapshot: The parcel of these; its bytes lie elsewhere, unless they are few.
        packet: Where they lie, if that is memory of this machine.
        key: The key under which the replica keeps them, if it does.
    """

    slot: ReplicaSlot
    incarnation: int
    number: int
    start: PackedEntry
    snapshot: Parcel
    packet: PassedOn | None
    key: int | None

    def placed(self, attachments: Attachments) -> TrainingEntry:
        """The entry for one message."""
        start, snapshot = self.start.placed(attachments).value, self.snapshot
        assert isinstance(start, Parcel)
        if self.packet is not None:
            snapshot = snapshot._replace(packet=attachments.place(self.packet))
        return TrainingEntry(self.number, TrainingHandover(start, snapshot, self.key))

    def is_made(self, name: int) -> bool:
        """Whether the replica has begun with it, under the model's name there, or is gone: until
        then the memory has to stay.
        """
        gone = self.slot.incarnation != self.incarnation or not self.slot.ready
        return gone or self.slot.trained.get(name, 0) >= self.number

    def drop(self) -> None:
        """Let the replica free what it keeps."""
        if self.key is not None:
            self.slot.drop_graph(self.key, self.incarnation)


def shares(slot: ReplicaSlot) -> bool:
    """Whether a replica reads memory of this machine that others wrote."""
    return bool(getattr(slot.client, "shares", False))


def left_behind(reply: Reply, attachments: Attachments) -> tuple[Parcel, PassedOn | None] | None:
    """What an answer says of a snapshot that lies in memory of this machine: the parcel, and where
    its bytes are, unless it has them itself. None if others cannot read it.
    """
    parcel = reply.value
    if parcel is None:
        return None
    packet = attachments.find(parcel.packet)
    if isinstance(packet, bytes):
        return parcel, None
    if not isinstance(packet, ForeignMemory) or packet.on_device:
        return None
    try:
        return parcel, PassedOn(packet)
    except OSError:  # the giver has just died
        return None


def passing(
    groups: ReplicaGroups, ticket: GroupTicket, giver: ReplicaSlot, key: int, size: int
) -> PassSnapshot:
    """The request that lets a giver pass on what it keeps, and others keep it."""
    patience = groups.share(groups.patience + size / _SLOWEST)
    return PassSnapshot(key, ticket.name, ticket.rank(giver), size, patience)


def arrived(answers: Sequence[tuple[Reply, Attachments] | Death]) -> list[bool]:
    """Which members of a group have what was passed on."""
    known = [None if isinstance(one, Death) else one[0] for one in answers]
    return [one is not None and not one.missed and one.failure is None for one in known]

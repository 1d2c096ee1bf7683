"""The entries of the record that an optimizer in the replicas follows (see `training_record`), and
how a replica begins with the weights and the optimizer that another replica has.

[Note: how a replica begins]
On one machine the giver leaves them in shared memory, and the driver says where they lie. A copy of
the model in the giver's own process takes what the giver keeps. On other nodes the giver keeps
them, too, and passes them on in a group. The driver reads nothing of it; if any of that fails,
replicas begin by way of the driver.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from raydp_parallel.calls.remote_gradients import GradientSum
from raydp_parallel.calls.replica_groups import GroupTicket, ReplicaGroups
from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state.optimizer_state import changed_options, options_of
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, ForeignMemory, Link, PassedOn
from raydp_parallel.transport.messages import (
    Parcel,
    PassSnapshot,
    Reply,
    TrainingEntry,
    TrainingHandover,
    TrainingNews,
    TrainingSum,
)


class PackedEntry(NamedTuple):
    """An entry of the record, packed once for all replicas.

    Attributes:
        number: Its number.
        parcel: Its parcel; a packet beside the message counts from 0.
        packets: The packets beside the message.
        size: Bytes of tensors in it.
        sums: The gradients that it needs, which replicas keep.
        makes: Gradients that replicas keep once they have made it. The entry holds them, so that
            no replica is told to free them before it made them; None if there are none.
    """

    number: int
    parcel: Parcel | TrainingSum
    packets: Sequence[Attachment]
    size: int
    sums: Sequence[GradientSum] = ()
    makes: GradientSum | None = None

    def placed(self, attachments: Attachments) -> TrainingEntry:
        """The entry for one message, with its packets added to ``attachments``."""
        attachments.size += self.size
        if isinstance(self.parcel, TrainingSum):
            beside = tuple(map(attachments.place, self.packets))
            return TrainingEntry(self.number, self.parcel._replace(packets=beside))
        packet = self.parcel.packet
        if type(packet) is int:
            packet = attachments.place(self.packets[packet])
        return TrainingEntry(self.number, self.parcel._replace(packet=packet))


def packed(number: int, value: Any, root: str, link: Link) -> PackedEntry:
    """An entry that needs no gradients which replicas keep."""
    attachments = Attachments(link)
    parcel, _ = codec.encode(value, attachments, root)
    return PackedEntry(number, parcel, attachments.beside, attachments.size)


class Record:
    """The entries that replicas have still to make, and the options that they have been told.

    Attributes:
        number: The last entry.
        begun: The entry that a replica begins with that has nothing, or other weights.
        start: That entry, if what the master has now is packed already.
        options: Of each group its options, as of the last step.
    """

    def __init__(self) -> None:
        self.number = self.begun = 1
        self.start: PackedEntry | None = None
        self.options: tuple[dict[str, Any], ...] = ()
        self._entries: deque[PackedEntry] = deque()

    def __len__(self) -> int:
        return sum(not isinstance(entry.parcel, TrainingSum) for entry in self._entries)

    def begin_anew(self, groups: Sequence[dict[str, Any]]) -> None:
        """Let all replicas begin with what the master has."""
        self.number += 1
        self.begun = self.number
        self.start = None
        self.options = copy.deepcopy(options_of(groups))
        for one in self._sums():
            one.entered = False
        self._entries.clear()

    def _sums(self) -> list[GradientSum]:
        return [one for entry in self._entries for one in entry.sums]

    def makes(self) -> list[GradientSum]:
        """The gradients that replicas are told to make."""
        return [entry.makes for entry in self._entries if entry.makes is not None]

    def skipped(self, slot: ReplicaSlot) -> None:
        """Note that the replica in a slot begins behind the entries."""
        for one in [*self._sums(), *self.makes()]:
            one.lose(slot)

    def changed(self, groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """The options of each group that have changed since the last step, which count as told."""
        now = copy.deepcopy(options_of(groups))
        changed = tuple([changed_options(*both) for both in zip(now, self.options, strict=True)])
        self.options = now
        return changed

    def enter(
        self,
        value: Any,
        link: Link,
        sums: Sequence[GradientSum],
        makes: GradientSum | None = None,
    ) -> None:
        """Enter what replicas make next.

        Args:
            value: The entry's value.
            link: What its tensors travel by.
            sums: The gradients that it needs, which replicas keep.
            makes: The gradients that replicas keep once they have made it.
        """
        self.enter_sums(sums)
        entry = packed(self.number + 1, value, "step", link)
        self._append(entry._replace(sums=sums, makes=makes))

    def enter_sums(self, sums: Sequence[GradientSum]) -> None:
        """Let replicas take gradients that lie where they can read them, before they are used."""
        for one in sums:
            if one.shared is not None and not one.entered:
                message = TrainingSum(one.key, one.shared.layout, ())
                entry = PackedEntry(self.number + 1, message, one.shared.packets, 0, sums=(one,))
                self._append(entry)
                one.entered = True

    def _append(self, entry: PackedEntry) -> None:
        self._entries.append(entry)
        self.number = entry.number
        self.start = None

    def trim(self, made: int) -> None:
        """Let go of entries up to a number."""
        while self._entries and self._entries[0].number <= made:
            self._entries.popleft()

    def follows(self, slot: ReplicaSlot, made: int) -> bool:
        """Whether a replica that has made some entries can make those that follow."""
        begins = self._entries[0].number - 1 if self._entries else self.number
        left = [entry for entry in self._entries if entry.number > made]
        there = all(one.on(slot) for entry in left for one in entry.sums)
        return made > 0 and made >= begins and there

    def news(self, made: int, attachments: Attachments) -> TrainingNews:
        """What follows after an entry."""
        left = [entry for entry in self._entries if entry.number > made]
        return TrainingNews(tuple([entry.placed(attachments) for entry in left]), anew=False)


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
        return gone or self.slot.contents.trained.get(name, 0) >= self.number

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

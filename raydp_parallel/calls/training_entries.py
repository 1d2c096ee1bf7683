"""The entries of the record that an optimizer in the replicas follows; see `training_record`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from raydp_parallel.calls.remote_gradients import GradientSum
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.state.optimizer_state import changed_options, options_of
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import Parcel, TrainingEntry, TrainingNews, TrainingSum


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

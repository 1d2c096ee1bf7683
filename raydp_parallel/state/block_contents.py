"""The contents of a module's tensors: which blocks changed when, and where the sent bytes lie.

The sent bytes are kept as long as they are current. Replicas that start later get them, and
`differing` compares the tensors with them, at memory speed, to find edits that moved no version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from raydp_parallel import devices
from raydp_parallel.devices.ranges import (
    COPIED,
    Attachment,
    MemoryRange,
    TensorSpec,
    aligned,
    paged,
)
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, UNNAMED, BlockRow, Rows, Spare, Told, copy
from raydp_parallel.state.versions import Look, bump, geometry, look, pointers, unlike, versions
from raydp_parallel.transport import codec, cuda_ipc
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import Blob, SlotSpec, WriteBack

_CALM = 8
"""A storage is moved into shared memory if the one before it lasted this many revisions."""

_OFTEN = 8
"""A storage that was sent this many times is moved there, however small it is."""

_PATIENCE = 64
"""A small storage that could not be moved is tried again after being sent this many times."""


class Homes:
    """The storage that each block lies in, the revision that found it there first, and how often it
    was sent.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sent: dict[int, int] = {}

    def settled(self, block: int, storage: Any, revision: int) -> bool:
        """Whether a block keeps its storage, which is about to be sent, for many revisions.

        If it does not, a move into shared memory costs several times what a copy of its bytes does.
        """
        home, since = self._known.get(block, (None, -_CALM))
        if home is None or home.cdata != storage._cdata:
            # The weak reference keeps the number from being given to another storage.
            self._known[block] = StorageWeakRef(storage), -_CALM if home is None else revision
            self._sent[block] = 0
        self._sent[block] += 1
        return revision - since >= _CALM

    def often(self, block: int) -> bool:
        """Whether a block was sent often without being moved. It is True once; then only after
        `_PATIENCE` more times.
        """
        often = self._sent[block] > _OFTEN
        if often:
            # if it could not be moved now, it is tried again, but not soon
            self._sent[block] -= _PATIENCE
        return often

    def written(self, blocks: Iterable[int]) -> None:
        """Note that replicas write to some blocks, and so need pages of their own in any case."""
        self._sent.update(dict.fromkeys(blocks, 0))


class Lookers:
    """How many tensors look at each storage. It is counted on demand: most blocks that change are
    too small to be moved.

    Args:
        row: All tensors.
    """

    def __init__(self, row: Iterable[Tensor]) -> None:
        self._row = row
        self._known: dict[int, set[int]] = defaultdict(set)

    @property
    def asked(self) -> bool:
        """Whether a count was asked for."""
        return bool(self._known)

    def of(self, storage: Any) -> int:
        """How many tensors of the row look at a storage."""
        if not self._known:
            for tensor in self._row:
                whole = tensor if tensor._base is None else tensor._base
                self._known[tensor.untyped_storage()._cdata] |= {id(tensor), id(whole)}
        return len(self._known[storage._cdata])


CPU = torch.device("cpu")
_device = attrgetter("device")


class _Place(NamedTuple):
    """The place of a block's bytes in the packet in which they were sent."""

    packet: Attachment
    packet_size: int
    offset: int
    size: int


_new_place: Any = partial(tuple.__new__, _Place)
_packet, _offset, _size = map(attrgetter, ("packet", "offset", "size"))


def _stragglers(places: dict[int, _Place]) -> list[int]:
    """Blocks that alone keep a mostly outdated packet alive. They are moved to their own packet,
    once.
    """
    live: dict[int, list[int]] = defaultdict(list)
    for block, place in places.items():
        if not isinstance(place.packet, bytes):
            live[id(place.packet)].append(block)
    groups = [
        g for g in live.values() if 2 * sum([places[b].size for b in g]) < places[g[0]].packet_size
    ]
    return [block for group in groups for block in group]


_NOTHING = block_layout.BlockLayout({}, {}, {})


class BlockContents:
    """The plain tensors of one module, by slot.

    Args:
        link: The link that carries the bytes.
        exposes: Whether replicas may see the memory of blocks itself, where the link can.

    Attributes:
        layout: The blocks that they lie in.
        slots: Their slots.
        tensors: The tensors, in the order of the slots.
        seen: Their versions, addresses and flags when changes were last taken over.
    """

    def __init__(self, link: Link, exposes: bool = True) -> None:
        self._link = link
        self._exposes = exposes
        self.layout = _NOTHING
        self.slots: list[int] = []
        self.tensors: dict[int, Tensor] = {}
        self._row: list[Tensor] = []
        self.seen = Look([], [], [])
        self._places: dict[int, _Place] = {}
        self._block_at: dict[int, int] = {}
        self._version_at: dict[int, int] = {}
        self._flag_at: dict[int, int] = {}
        self._stale: set[int] = set()
        self._exposed: set[int] = set()
        self._homes = Homes()
        self._prints = devices.prints({})
        self._unprinted: set[int] = set()
        self._told: Spare[Told] = Spare()
        self._rest: Rows | None = None
        self._far: BlockRow | None = None
        self._small: set[int] = set()
        self._geometry: list[Any] = []
        self._as_sent: tuple[list[_Place | None], Told | None] = [], None
        self._kept: tuple[int, set[int]] = UNNAMED, set()

    def news(self) -> Look | None:
        """The versions, addresses and flags of now; None if there are no changes to take over."""
        now = self.look()
        return now if now != self.seen or self._stale or self._withdrawn() else None

    def write_back(
        self, written: WriteBack, attachments: Attachments
    ) -> Callable[[], dict[int, Tensor]]:
        """Apply, in place, what a replica wrote.

        Returns:
            A function that returns the overwritten contents, by slot.
        """
        blob, moved, replaced = written.blob, dict(written.slots), {*written.replaced}
        source = attachments.open(blob.packet)
        places = dict(zip(blob.blocks, zip(blob.offsets, blob.sizes, strict=True), strict=True))
        told = self._run_of([block for block in blob.blocks if block in self._small])
        rows = told.rows if told is not None else None
        before: Callable[[], dict[int, Tensor]] = dict
        news: dict[int, Tensor] = {}
        if rows is not None:
            rows.take(self.tensors)
            before = rows.kept()
            rows.flat.load(rows.flat.blocks, [places[b][0] for b in rows.flat.blocks], source)
            news = dict(zip(rows.slots, rows.views, strict=True))
        together = frozenset(news)
        for block in places.keys() - {*(rows.flat.blocks if rows is not None else ())}:
            news.update(self._shown(block, source.part(*places[block])))
        alone = {s: self.tensors[s].detach().clone() for s in moved if s not in together}
        chosen = [slot for slot in news if slot in moved and slot not in replaced]
        # An edit that moves no version there moves none here; batch norm's running means are such.
        targets = [
            target if moved[slot] and not target.is_inference() else target.data
            for slot, target in zip(chosen, map(self.tensors.__getitem__, chosen), strict=True)
        ]
        copy(targets, [news[slot] for slot in chosen])
        self._replace(written, attachments)
        stale = {self.layout.specs[slot].block for slot in moved}
        if rows is not None:
            stale.update(rows.flat.blocks)
        stale -= self._exposed
        self._homes.written(stale)
        self._stale |= stale
        if told is not None and stale.issuperset(told.rows.flat.blocks) and not replaced:
            told.report = written.report
            self._told.keep(told)
        return lambda: {**{s: t for s, t in before().items() if s in moved}, **alone}

    def contents_of(self, written: WriteBack, attachments: Attachments) -> dict[int, Tensor]:
        """What a replica wrote, by slot, but for tensors that it gave other memory."""
        blob, changed = written.blob, dict(written.slots).keys() - {*written.replaced}
        source = attachments.open(blob.packet)
        found: dict[int, Tensor] = {}
        for block, offset, size in zip(blob.blocks, blob.offsets, blob.sizes, strict=True):
            found.update(self._shown(block, source.part(offset, size)))
        return {slot: tensor for slot, tensor in found.items() if slot in changed}

    def fill(self, news: Mapping[int, tuple[Tensor, bool]]) -> dict[int, Tensor]:
        """Write to some slots, in place; returns the overwritten contents.

        Args:
            news: By slot the new contents, with whether its version moves.
        """
        overwritten = {slot: self.tensors[slot].detach().clone() for slot in news}
        for slot, (found, moves) in news.items():
            target = self.tensors[slot]
            (target if moves and not target.is_inference() else target.data).copy_(found)
        stale = {self.layout.specs[slot].block for slot in news} - self._exposed
        self._homes.written(stale)
        self._stale |= stale
        return overwritten

    def _run_of(self, blocks: Sequence[int]) -> Told | None:
        """A run for some small blocks: that of the last report, if it had the same blocks."""
        if not blocks:
            return None
        told, device = self._told.take(), self._device_of(blocks[0])
        if told is not None and told.rows.fit(tuple(blocks), self.layout, device):
            return told
        return Told(Rows(tuple(blocks), self.layout, device))

    def _device_of(self, block: int) -> torch.device:
        return self.tensors[self.layout.members[block][0]].device

    def _shown(self, block: int, source: MemoryRange) -> dict[int, Tensor]:
        """The tensors of a block's slots over bytes that were sent of it."""
        slots = self.layout.members[block]
        specs = [self.layout.specs[slot] for slot in slots]
        kinds = [codec.DTYPES[spec.tensor.dtype] for spec in specs]
        placed = [
            spec.tensor._replace(offset=spec.offset * kind.itemsize)
            for spec, kind in zip(specs, kinds, strict=True)
        ]
        found = devices.windows(source, placed, kinds, self._device_of(block))
        return dict(zip(slots, found, strict=True))

    def _replace(self, written: WriteBack, attachments: Attachments) -> None:
        """Give tensors other memory, if those of the replica were given other memory."""
        if not written.replaced:
            return
        moved, device = dict(written.slots), self.tensors[written.replaced[0]].device
        news = codec.unpack(written.tensors, attachments, device)
        for slot, new in zip(written.replaced, news, strict=True):
            self.tensors[slot].data = new.clone()
            if moved[slot]:
                bump([self.tensors[slot]])

    def _withdrawn(self) -> bool:
        """Whether some replica cannot see what was exposed, and needs copies."""
        return bool(self._exposed) and not self._link.exposes

    def versions(self) -> list[int]:
        """The version of every tensor, now."""
        return versions(self._row)

    def take_versions(self, now: Look, revision: int) -> tuple[int, ...] | None:
        """Take over that versions moved, if replicas see all blocks and nothing else changed.
        Returns the slots.

        An optimizer's step leaves that where memory is shared. None if there are other changes.
        """
        then, sees_all = self.seen, len(self._exposed) == len(self.layout.sizes)
        if not sees_all or self._stale or not self._link.exposes or now[1:] != then[1:]:
            return None
        written = [
            s
            for s, old, new in zip(self.slots, then.versions, now.versions, strict=True)
            if old != new
        ]
        self._version_at.update(dict.fromkeys(written, revision))
        self.seen = now
        return tuple(written)

    def take(self, now: Look, revision: int) -> bool:
        """Take over what moved. False if a tensor no longer lies as the layout says: then `adopt`
        must follow.
        """
        then = self.seen
        elsewhere: list[int] = []
        if now.pointers != then.pointers:
            elsewhere = unlike(then.pointers, now.pointers)
            # `verify` checks all of them, while the replicas work
            slots = [self.slots[i] for i in elsewhere]
            if not self.fits(elsewhere) or not block_layout.lie_as(
                self.layout, self.tensors, slots
            ):
                return False
        written = unlike(then.versions, now.versions)
        self._note(now, written, revision)
        stale, specs, exposed = self._withdraw(), self.layout.specs, self._exposed
        moved = stale | {
            block for i in written if (block := specs[self.slots[i]].block) not in exposed
        }
        for i in elsewhere:
            block = specs[self.slots[i]].block
            if block not in exposed or not self._in_sight(block):
                moved.add(block)
        if moved:
            self.send([block for block in self.layout.sizes if block in moved], revision, stale)
        return True

    def _withdraw(self) -> set[int]:
        """The blocks that must be sent, whatever their versions."""
        stale, self._stale = self._stale, set()
        if self._withdrawn():
            stale |= self._exposed
            self._exposed = set()
        return stale

    def _in_sight(self, block: int) -> bool:
        """Whether replicas still see the memory of an exposed block, which moved."""
        place, first = self._places[block], self.tensors[self.layout.members[block][0]]
        return (
            place.packet.storage._cdata == first.untyped_storage()._cdata
            and place.offset == self._start(block)
        )

    def _start(self, block: int) -> int:
        return block_layout.start([self.tensors[slot] for slot in self.layout.members[block]])

    def adopt(self, tensors: dict[int, Tensor], revision: int) -> None:
        """Take over a new set of tensors. Blocks that did not move keep their places."""
        stale = self._withdraw()
        before = dict(zip(self.slots, zip(*self.seen, strict=True), strict=True))
        layout, old = block_layout.lay_out(tensors), self.layout
        self.layout, self.tensors = layout, dict(sorted(tensors.items()))
        self.slots, self._row = [*self.tensors], [*self.tensors.values()]
        self._geometry, kinds = [], layout.specs
        self._small = {
            b for b, n in layout.sizes.items() if n <= SMALL and kinds[b].tensor.dtype in COPIED
        }
        now = self.look()
        after = dict(zip(self.slots, zip(*now, strict=True), strict=True))
        kept = {
            block
            for block, members in layout.members.items()
            if block in self._places
            and block not in stale
            and old.members.get(block) == members
            and all(
                block_layout.alike(old.specs[s], layout.specs[s]) and before[s][:2] == after[s][:2]
                for s in members
            )
        }
        for slot in self.slots:
            if slot in before and before[slot][0] != after[slot][0]:
                self._version_at[slot] = revision
        self.seen = now
        self._places = {block: place for block, place in self._places.items() if block in kept}
        self._block_at = {block: at for block, at in self._block_at.items() if block in kept}
        self._exposed &= kept
        self.send([block for block in layout.sizes if block not in kept], revision, stale)

    def fits(self, rows: Iterable[int] | None = None) -> bool:
        """Whether tensors, by default all, still have the sizes and strides that the layout
        says.
        """
        seen = geometry(self._row) if rows is None else []
        if seen and seen == self._geometry:
            return True
        chosen = range(len(self._row)) if rows is None else rows
        fit = False not in [
            _fits(self._row[i], self.layout.specs[self.slots[i]].tensor) for i in chosen
        ]
        self._geometry = seen if fit else []
        return fit

    def differing(self, revision: int, besides: Collection[int] = ()) -> list[int]:
        """The blocks, except ``besides``, with contents other than those sent up to ``revision``,
        although no version moved.
        """
        known = [b for b, at in self._block_at.items() if at <= revision]
        return self._unlike([b for b in known if b not in self._exposed and b not in besides])

    def large(self, blocks: Iterable[int]) -> list[int]:
        """The blocks among some that are too large to be compared with many others at once."""
        return sorted([block for block in blocks if self.layout.sizes[block] > SMALL])

    def differing_part(
        self, chosen: Sequence[int], revision: int, begin: int, size: int
    ) -> tuple[list[int], int]:
        """The blocks among those chosen that differ, as in `differing`, in a run of bytes.

        Args:
            chosen: The blocks; their bytes are counted in this order.
            revision: See `differing`.
            begin: The first byte.
            size: The bytes of the run.

        Returns:
            The blocks, and where the next run begins: at the first byte again, after the last one.
        """
        pairs, blocks, at = [], [], 0
        for block in chosen:
            length = self.layout.sizes[block]
            first, last = max(begin, at), min(begin + size, at + length)
            if first < last and self._block_at.get(block, revision + 1) <= revision:
                part = first - at, last - first
                pairs.append((self._read(block).part(*part), self._sent(block).part(*part)))
                blocks.append(block)
            at += length
        alike = zip(blocks, devices.compare(pairs)(), strict=True)
        end = begin + size
        return [block for block, same in alike if not same], end if end < at else 0

    def edited(self, besides: set[int]) -> list[int]:
        """The blocks, except ``besides``, that differ from what was sent last, although no version
        moved.
        """
        besides = besides | self._stale | self._exposed
        return self._unlike([block for block in self._places if block not in besides])

    def _unlike(self, chosen: list[int]) -> list[int]:
        """The blocks among those chosen that differ from what was sent. On a GPU fingerprints are
        compared, not bytes.
        """
        if not chosen:
            return []
        self._print([block for block in chosen if block in self._unprinted])
        together = [b for b in chosen if b in self._small] if not self._prints.keys else []
        if len(together) > 1 and {*map(_device, self._row)} == {CPU}:
            found = {*self._unlike_together(together)}
            apart = [block for block in chosen if block not in self._small]
            found.update(_unlike(apart, self._prints, self._read, self._sent))
            return [block for block in chosen if block in found]
        return _unlike(chosen, self._prints.of(chosen), self._read, self._sent)

    def _unlike_together(self, chosen: list[int]) -> list[int]:
        """The small blocks among those chosen that differ from what was sent: all are compared at
        once.
        """
        (places, told), now = self._as_sent, [*map(self._places.get, chosen)]
        # Each is one object as long as its bytes are; packets, which are arrays, have no equality.
        same = [*map(id, places)] == [*map(id, now)]
        if told is None or not same or not told.rows.fit(tuple(chosen), self.layout, CPU):
            told = Told(Rows(tuple(chosen), self.layout, CPU))
            for block, run in zip(chosen, told.rows.flat.runs, strict=True):
                devices.load(run, self._sent(block))
            self._as_sent = now, told
        told.now.take(self.tensors)
        return told.now.flat.compare(told.rows.flat)()

    def _print(self, chosen: Sequence[int]) -> None:
        """Make the fingerprints of blocks that the host sent, when they are first compared.

        Where training changes all weights in each step, they are never compared.
        """
        if chosen:
            sent = {block: self._sent(block) for block in chosen}
            newer = devices.prints_of_host(sent, self._device_of(chosen[0]))
            self._prints = self._prints.joined(newer)
        self._unprinted.difference_update(chosen)

    def send(self, chosen: list[int], revision: int, written: Collection[int] = ()) -> None:
        """Pack or expose the contents of some blocks; replicas wrote to those in ``written``."""
        self._exposed -= {*chosen}
        if self._exposes and self._link.exposes and chosen:
            small = {block for block in written if self.layout.sizes.get(block, 0) <= SMALL}
            self._expose([block for block in chosen if block not in small], revision)
            chosen = [block for block in chosen if block not in self._exposed]
        self._pack(chosen, revision)
        if len(self._places) - len(self._exposed) == len(chosen):
            return  # all that is packed lies in the new packet
        packed = {
            block: place for block, place in self._places.items() if block not in self._exposed
        }
        self._pack(sorted({*_stragglers(packed)} - {*chosen}), revision)

    def specs(self) -> dict[int, SlotSpec]:
        """The specs of all slots, with their current flags."""
        flags = zip(self.slots, self.seen.flags, strict=True)
        specs = self.layout.specs
        return {
            s: specs[s]._replace(tensor=specs[s].tensor._replace(requires_grad=flag))
            for s, flag in flags
        }

    def flags_since(self, held: int) -> tuple[tuple[int, bool], ...]:
        """The slots whose ``requires_grad`` changed after revision ``held``."""
        known, flags = self._flag_at, zip(self.slots, self.seen.flags, strict=True)
        if not known:
            return ()
        return tuple([(slot, flag) for slot, flag in flags if known.get(slot, 0) > held])

    def moved_since(self, held: int) -> tuple[int, ...]:
        """The slots whose version moved after revision ``held``."""
        return tuple(
            [slot for slot, at in self._version_at.items() if at > held and slot in self.tensors]
        )

    def moved_from(self, slots: list[int], then: list[int], held: int) -> tuple[int, ...]:
        """The slots with a version that differs both from ``then`` and from that at revision
        ``held``.

        ``slots`` are those of ``then``, in their order: the structure may have changed since.
        """
        now = self.versions()
        if slots is not self.slots:
            before = dict(zip(slots, then, strict=True))
            pairs = zip(self.slots, now, strict=True)
            then = [before.get(slot, version) for slot, version in pairs]
        if now == then:
            return ()
        rows = zip(self.slots, then, now, self.seen.versions, strict=True)
        known = {slot for slot in self.slots if self._version_at.get(slot, 0) <= held}
        return tuple(
            s for s, old, new, seen in rows if old != new and (new != seen or s not in known)
        )

    def kept_since(self, held: int) -> tuple[int, tuple[int, ...]]:
        """A report, and the blocks that changed after revision ``held`` but are as reported."""
        report, kept = self._kept
        return report, tuple([b for b, at in self._block_at.items() if b in kept and at > held])

    def blobs_since(
        self, held: int, attachments: Attachments, besides: Collection[int] = ()
    ) -> tuple[Blob, ...]:
        """The contents that changed after revision ``held``, except those of blocks ``besides``."""
        chosen = [block for block, at in self._block_at.items() if at > held]
        if besides:
            chosen = [block for block in chosen if block not in besides]
        packets = [*map(id, map(_packet, map(self._places.__getitem__, chosen)))]
        if len({*packets}) == 1:
            return (self._blob(chosen, attachments),)
        groups: dict[int, list[int]] = defaultdict(list)
        for block, packet in zip(chosen, packets, strict=True):
            groups[packet].append(block)
        return tuple([self._blob(group, attachments) for group in groups.values()])

    def sent(self, blobs: Iterable[Blob]) -> int:
        """The bytes of contents that are sent with some blobs; exposed blocks are not sent."""
        exposed, total = self._exposed, 0
        for blob in blobs:
            if exposed.isdisjoint(blob.blocks):
                total += sum(blob.sizes)
            else:
                sizes = zip(blob.blocks, blob.sizes, strict=True)
                total += sum([size for block, size in sizes if block not in exposed])
        return total

    def _blob(self, group: list[int], attachments: Attachments) -> Blob:
        places = [*map(self._places.__getitem__, group)]
        offsets, sizes = tuple(map(_offset, places)), tuple(map(_size, places))
        return Blob(tuple(group), offsets, sizes, attachments.place(places[0].packet))

    def look(self) -> Look:
        """The versions, addresses and flags of now."""
        return look(self._row)

    def _note(self, now: Look, written: list[int], revision: int) -> None:
        if now.flags != self.seen.flags:
            flags = zip(self.slots, now.flags, self.seen.flags, strict=True)
            self._flag_at.update({slot: revision for slot, flag, before in flags if flag != before})
        self._version_at.update(dict.fromkeys([self.slots[i] for i in written], revision))
        self.seen = now

    def _expose(self, chosen: list[int], revision: int) -> None:
        """Let replicas see the memory of blocks itself, where the link can."""
        lookers, none = Lookers(self._row), Lookers(())
        for block in chosen:
            first = self.tensors[self.layout.members[block][0]]
            if not devices.is_cpu(first.device):
                # no CPU replica sees a GPU's memory, of which torch says that it is shared
                continue
            if len(self.layout.members[block]) == 1 and block_layout.is_loose(first):
                continue  # it is sent as a compact copy
            storage = first.untyped_storage()
            chosen_lookers = lookers if self._homes.settled(block, storage, revision) else none
            count = partial(chosen_lookers.of, storage)
            packet = self._link.expose(storage, count, self._homes.often(block))
            if packet is not None:
                size = self.layout.sizes[block]
                self._places[block] = _Place(packet, 0, self._start(block), size)
                self._block_at[block] = revision
                self._exposed.add(block)
        if lookers.asked:  # some may have moved
            self.seen = self.seen._replace(pointers=pointers(self._row))

    def _pack(self, chosen: list[int], revision: int) -> None:
        if not chosen:
            return
        pieces: list[MemoryRange] = []
        offsets: list[int] = []
        starts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        end = 0
        self._kept = self._kept[0], self._kept[1].difference(chosen)
        used = {*map(_device, self._row)}
        far = not all(map(devices.is_cpu, used))
        lying = self._lying(tuple(chosen)) if far and len(used) == 1 else None
        if lying is not None:
            pieces, offsets, end = [lying.piece(self.tensors)], [0], lying.end
            starts = dict(lying.starts)
            sizes = {block: self.layout.sizes[block] for block in starts}
        for rows in self._in_runs(chosen) if lying is None else ():
            flat = rows.flat
            pieces.append(flat.piece())
            offsets.append(end)
            begins = flat.offsets if not end else [end + offset for offset in flat.offsets]
            starts.update(zip(flat.blocks, begins, strict=True))
            sizes.update(zip(flat.blocks, flat.sizes, strict=True))
            end += flat.bytes.nbytes
        apart = [block for block in chosen if block not in starts]
        for block in apart:
            piece = self._read(block)
            offsets.append(paged(end, piece.size))
            starts[block], sizes[block] = offsets[-1], piece.size
            pieces.append(piece)
            end = offsets[-1] + aligned(piece.size)
        packet = self._link.send(pieces, offsets, end)
        self._prints = self._prints.without(chosen)
        self._unprinted.difference_update(chosen)
        if far and not cuda_ipc.lies_on_a_gpu(packet):  # such a packet needs no fingerprints
            self._unprinted.update(b for b in chosen if not devices.is_cpu(self._device_of(b)))
        places = zip(repeat(packet), repeat(end), starts.values(), sizes.values())
        self._places.update(zip(starts, map(_new_place, places), strict=True))
        self._block_at.update(dict.fromkeys(chosen, revision))

    def _lying(self, chosen: tuple[int, ...]) -> BlockRow | None:
        """The blocks among those chosen, all on one GPU, that one operation sends; None if there
        are none.
        """
        found = self._far
        if found is None or found.asked != chosen or found.layout is not self.layout:
            found = self._far = BlockRow(chosen, self.layout, self.tensors)
        return found if found.starts else None

    def _in_runs(self, chosen: Sequence[int]) -> list[Rows]:
        """The small blocks among those chosen, in runs; blocks reported together share one."""
        device = self._device_of(chosen[0])
        small = [block for block in chosen if block in self._small]
        if {*map(_device, self._row)} != {device}:
            small = [block for block in small if self._device_of(block) == device]
        told, found = self._told.take(), []
        if told is not None and told.rows.fit(told.rows.flat.blocks, self.layout, device):
            reported = {*told.rows.flat.blocks}
            if reported <= {*small}:
                found.append(self._as_told(told))
                small = [block for block in small if block not in reported]
            self._told.keep(told)
        if len(small) > 1:
            if self._rest is None or not self._rest.fit(tuple(small), self.layout, device):
                self._rest = Rows(tuple(small), self.layout, device)
            self._rest.take(self.tensors)
            found.append(self._rest)
        return found

    def _as_told(self, told: Told) -> Rows:
        """The run of blocks that a replica reported, read anew; notes which are as reported."""
        told.now.take(self.tensors)
        if devices.is_cpu(told.now.flat.bytes.device):  # a GPU would have to be waited for
            unlike = {*told.now.flat.compare(told.rows.flat)()}
            self._kept = told.report, {b for b in told.rows.flat.blocks if b not in unlike}
        return told.now

    def _read(self, block: int) -> MemoryRange:
        return block_layout.read([self.tensors[slot] for slot in self.layout.members[block]])

    def _sent(self, block: int) -> MemoryRange:
        place = self._places[block]
        whole = self._link.open(place.packet)
        return whole.part(place.offset, place.size)


def _unlike(
    chosen: list[int],
    printed: devices.Prints,
    read: Callable[[int], MemoryRange],
    sent: Callable[[int], MemoryRange],
) -> list[int]:
    if not printed.keys:
        same = devices.compare([(read(block), sent(block)) for block in chosen])()
        return [block for block, alike in zip(chosen, same, strict=True) if not alike]
    marked = {*printed.keys}
    now = devices.prints({block: read(block) for block in dict.fromkeys(printed.keys)})
    unlike = {*printed.unlike(now)}
    plain = [block for block in chosen if block not in marked]
    same = devices.compare([(read(block), sent(block)) for block in plain])()
    unlike.update(block for block, alike in zip(plain, same, strict=True) if not alike)
    return [block for block in chosen if block in unlike]


def _fits(tensor: Tensor, spec: TensorSpec) -> bool:
    return (
        tensor.shape == spec.shape
        and codec.DTYPE_NAMES[tensor.dtype] == spec.dtype
        and (tensor.stride() == spec.stride or block_layout.is_loose(tensor))
        and block_layout.is_plain(tensor)
    )

"""The contents of a master's tensors, by blocks: which changed when, and where the sent bytes lie.

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

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange, aligned, paged
from raydp_parallel.state import block_layout
from raydp_parallel.state.block_layout import SMALL, copy
from raydp_parallel.state.block_runs import CPU, BlockRuns
from raydp_parallel.state.versions import Look, Lookers, MasterTensors, bump
from raydp_parallel.transport import codec, cuda_ipc
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.messages import Blob, WriteBack

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


class _Place(NamedTuple):
    """The place of a block's bytes in the packet in which they were sent, and the revision that
    found them there.
    """

    packet: Attachment
    packet_size: int
    offset: int
    size: int
    at: int


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


class Fingerprints:
    """The fingerprints of what was sent of blocks that lie on a GPU: they are compared in place of
    bytes.

    Where training changes all weights in each step, nothing is ever compared. So those of what the
    host sent are made when they are first asked for.
    """

    def __init__(self) -> None:
        self.known = devices.prints({})
        self._lacking: set[int] = set()

    def forget(self, chosen: Sequence[int], lacking: Iterable[int]) -> None:
        """Note that other bytes were sent of some blocks, of which those in ``lacking`` need
        fingerprints.
        """
        self.known = self.known.without(chosen)
        self._lacking.difference_update(chosen)
        self._lacking.update(lacking)

    def complete(
        self, chosen: Sequence[int], master: MasterTensors, sent: Callable[[int], MemoryRange]
    ) -> None:
        """Make those that some blocks lack."""
        lacking = [block for block in chosen if block in self._lacking]
        if lacking:
            runs = {block: sent(block) for block in lacking}
            newer = devices.prints_of_host(runs, master.device_of(lacking[0]))
            self.known = self.known.joined(newer)
            self._lacking.difference_update(lacking)

    def unlike(
        self, chosen: list[int], master: MasterTensors, sent: Callable[[int], MemoryRange]
    ) -> list[int]:
        """The blocks among those chosen that differ from what was sent."""
        then = self.known.of(chosen)
        marked = {*then.keys}
        plain = [block for block in chosen if block not in marked] if marked else chosen
        unlike: set[int] = set()
        if marked:
            now = devices.prints({block: master.read(block) for block in dict.fromkeys(then.keys)})
            unlike.update(then.unlike(now))
        same = devices.compare([(master.read(block), sent(block)) for block in plain])()
        unlike.update(block for block, alike in zip(plain, same, strict=True) if not alike)
        return [block for block in chosen if block in unlike]


class BlockContents:
    """The contents of one module's plain tensors, and the places where they were sent.

    Args:
        link: The link that carries the bytes.
        exposes: Whether replicas may see the memory of blocks itself, where the link can.

    Attributes:
        master: The tensors.
    """

    def __init__(self, link: Link, exposes: bool = True) -> None:
        self._link = link
        self._exposes = exposes
        self.master = MasterTensors()
        self._places: dict[int, _Place] = {}
        self._stale: set[int] = set()
        self._exposed: set[int] = set()
        self._homes = Homes()
        self._prints = Fingerprints()
        self._runs = BlockRuns(self.master)

    def news(self) -> Look | None:
        """The versions, addresses and flags of now; None if there are no changes to take over."""
        now = self.master.look()
        return now if now != self.master.seen or self._stale or self._withdrawn() else None

    def write_back(
        self, written: WriteBack, attachments: Attachments
    ) -> Callable[[], dict[int, Tensor]]:
        """Apply, in place, what a replica wrote.

        Returns:
            A function that returns the overwritten contents, by slot.
        """
        blob, moved, replaced = written.blob, dict(written.slots), {*written.replaced}
        tensors, source = self.master.tensors, attachments.open(blob.packet)
        places = dict(zip(blob.blocks, zip(blob.offsets, blob.sizes, strict=True), strict=True))
        told = self._runs.told([block for block in blob.blocks if block in self.master.small])
        rows = told.rows if told is not None else None
        before: Callable[[], dict[int, Tensor]] = dict
        news: dict[int, Tensor] = {}
        if rows is not None:
            rows.take(tensors)
            before = rows.kept()
            rows.flat.load(rows.flat.blocks, [places[b][0] for b in rows.flat.blocks], source)
            news = dict(zip(rows.slots, rows.views, strict=True))
        together = frozenset(news)
        for block in places.keys() - {*(rows.flat.blocks if rows is not None else ())}:
            news.update(self.master.over(block, source.part(*places[block])))
        alone = {s: tensors[s].detach().clone() for s in moved if s not in together}
        chosen = [slot for slot in news if slot in moved and slot not in replaced]
        # An edit that moves no version there moves none here; batch norm's running means are such.
        targets = [
            target if moved[slot] and not target.is_inference() else target.data
            for slot, target in zip(chosen, map(tensors.__getitem__, chosen), strict=True)
        ]
        copy(targets, [news[slot] for slot in chosen])
        self._replace(written, attachments)
        stale = self.master.layout.blocks_of(moved)
        if rows is not None:
            stale.update(rows.flat.blocks)
        self._note_written(stale)
        if told is not None and not replaced and self._exposed.isdisjoint(told.rows.flat.blocks):
            self._runs.keep(told, written.report)
        return lambda: {**{s: t for s, t in before().items() if s in moved}, **alone}

    def contents_of(self, written: WriteBack, attachments: Attachments) -> dict[int, Tensor]:
        """What a replica wrote, by slot, but for tensors that it gave other memory."""
        blob, changed = written.blob, dict(written.slots).keys() - {*written.replaced}
        source = attachments.open(blob.packet)
        found: dict[int, Tensor] = {}
        for block, offset, size in zip(blob.blocks, blob.offsets, blob.sizes, strict=True):
            found.update(self.master.over(block, source.part(offset, size)))
        return {slot: tensor for slot, tensor in found.items() if slot in changed}

    def fill(self, news: Mapping[int, tuple[Tensor, bool]]) -> dict[int, Tensor]:
        """Write to some slots, in place; returns the overwritten contents.

        Args:
            news: By slot the new contents, with whether its version moves.
        """
        tensors = self.master.tensors
        overwritten = {slot: tensors[slot].detach().clone() for slot in news}
        for slot, (found, moves) in news.items():
            target = tensors[slot]
            (target if moves and not target.is_inference() else target.data).copy_(found)
        self._note_written(self.master.layout.blocks_of(news))
        return overwritten

    def _note_written(self, blocks: set[int]) -> None:
        """Note that replicas wrote to some blocks; those that they see need not be sent."""
        stale = blocks - self._exposed
        self._homes.written(stale)
        self._stale |= stale

    def _replace(self, written: WriteBack, attachments: Attachments) -> None:
        """Give tensors other memory, if those of the replica were given other memory."""
        if not written.replaced:
            return
        moved, tensors = dict(written.slots), self.master.tensors
        device = tensors[written.replaced[0]].device
        news = codec.unpack(written.tensors, attachments, device)
        for slot, new in zip(written.replaced, news, strict=True):
            tensors[slot].data = new.clone()
            if moved[slot]:
                bump([tensors[slot]])

    def _withdrawn(self) -> bool:
        """Whether some replica cannot see what was exposed, and needs copies."""
        return bool(self._exposed) and not self._link.exposes

    def take_versions(self, now: Look, revision: int) -> tuple[int, ...] | None:
        """Take over that versions moved, if replicas see all blocks and nothing else changed.
        Returns the slots.

        An optimizer's step leaves that where memory is shared. None if there are other changes.
        """
        sees_all = len(self._exposed) == len(self.master.layout.sizes)
        moved = now[1:] != self.master.seen[1:]
        if not sees_all or self._stale or not self._link.exposes or moved:
            return None
        return tuple(self.master.note(now, revision))

    def take(self, now: Look, revision: int) -> bool:
        """Take over what moved. False if a tensor no longer lies as the layout says: then `adopt`
        must follow.
        """
        elsewhere = self.master.elsewhere(now)
        if elsewhere is None:
            return False
        written = self.master.note(now, revision)
        stale, specs, sizes = self._withdraw(), self.master.layout.specs, self.master.layout.sizes
        moved = stale | {
            block for slot in written if (block := specs[slot].block) not in self._exposed
        }
        for slot in elsewhere:
            block = specs[slot].block
            if block not in self._exposed or not self._in_sight(block):
                moved.add(block)
        if moved:
            self.send([block for block in sizes if block in moved], revision, stale)
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
        place, first = self._places[block], self.master.members(block)[0]
        return (
            place.packet.storage._cdata == first.untyped_storage()._cdata
            and place.offset == self.master.start(block)
        )

    def adopt(self, tensors: dict[int, Tensor], revision: int) -> None:
        """Take over a new set of tensors. Blocks that did not move keep their places."""
        stale = self._withdraw()
        kept = (self.master.adopt(tensors, revision) & self._places.keys()) - stale
        self._places = {block: place for block, place in self._places.items() if block in kept}
        self._exposed &= kept
        sizes = self.master.layout.sizes
        self.send([block for block in sizes if block not in kept], revision, stale)

    def differing(self, revision: int, besides: Collection[int] = ()) -> list[int]:
        """The blocks, except ``besides``, with contents other than those sent up to ``revision``,
        although no version moved.
        """
        known = [block for block, place in self._places.items() if place.at <= revision]
        return self._unlike([b for b in known if b not in self._exposed and b not in besides])

    def large(self, blocks: Iterable[int]) -> list[int]:
        """The blocks among some that are too large to be compared with many others at once."""
        sizes = self.master.layout.sizes
        return sorted([block for block in blocks if sizes[block] > SMALL])

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
            length, place = self.master.layout.sizes[block], self._places.get(block)
            first, last = max(begin, at), min(begin + size, at + length)
            if first < last and place is not None and place.at <= revision:
                part = first - at, last - first
                pairs.append((self.master.read(block).part(*part), self._sent(block).part(*part)))
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
        """The blocks among those chosen that differ from what was sent."""
        if not chosen:
            return []
        self._prints.complete(chosen, self.master, self._sent)
        small = self.master.small
        together = [] if self._prints.known.keys else [b for b in chosen if b in small]
        if len(together) <= 1 or self.master.devices() != {CPU}:
            return self._prints.unlike(chosen, self.master, self._sent)
        places = [*map(self._places.get, together)]
        found = {*self._runs.unlike(together, places, self._sent)}
        apart = [block for block in chosen if block not in small]
        found.update(self._prints.unlike(apart, self.master, self._sent))
        return [block for block in chosen if block in found]

    def send(self, chosen: list[int], revision: int, written: Collection[int] = ()) -> None:
        """Pack or expose the contents of some blocks; replicas wrote to those in ``written``."""
        self._exposed -= {*chosen}
        if self._exposes and self._link.exposes and chosen:
            sizes = self.master.layout.sizes
            small = {block for block in written if sizes.get(block, 0) <= SMALL}
            self._expose([block for block in chosen if block not in small], revision)
            chosen = [block for block in chosen if block not in self._exposed]
        self._pack(chosen, revision)
        if len(self._places) - len(self._exposed) == len(chosen):
            return  # all that is packed lies in the new packet
        packed = {
            block: place for block, place in self._places.items() if block not in self._exposed
        }
        self._pack(sorted({*_stragglers(packed)} - {*chosen}), revision)

    def kept_since(self, held: int) -> tuple[int, tuple[int, ...]]:
        """A report, and the blocks that changed after revision ``held`` but are as reported."""
        report, kept = self._runs.kept
        return report, tuple([b for b, p in self._places.items() if b in kept and p.at > held])

    def blobs_since(
        self, held: int, attachments: Attachments, besides: Collection[int] = ()
    ) -> tuple[Blob, ...]:
        """The contents that changed after revision ``held``, except those of blocks ``besides``."""
        chosen = [block for block, place in self._places.items() if place.at > held]
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

    def _expose(self, chosen: list[int], revision: int) -> None:
        """Let replicas see the memory of blocks itself, where the link can."""
        lookers, none = self.master.lookers(), Lookers(())
        for block in chosen:
            members = self.master.members(block)
            if not devices.is_cpu(members[0].device):
                # no CPU replica sees a GPU's memory, of which torch says that it is shared
                continue
            if len(members) == 1 and block_layout.is_loose(members[0]):
                continue  # it is sent as a compact copy
            storage = members[0].untyped_storage()
            chosen_lookers = lookers if self._homes.settled(block, storage, revision) else none
            count = partial(chosen_lookers.of, storage)
            packet = self._link.expose(storage, count, self._homes.often(block))
            if packet is not None:
                size = self.master.layout.sizes[block]
                self._places[block] = _Place(packet, 0, block_layout.start(members), size, revision)
                self._exposed.add(block)
        if lookers.asked:  # some may have moved
            self.master.note_moves()

    def _pack(self, chosen: list[int], revision: int) -> None:
        if not chosen:
            return
        pieces: list[MemoryRange] = []
        offsets: list[int] = []
        starts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        end = 0
        self._runs.outdate(chosen)
        used = self.master.devices()
        far = not all(map(devices.is_cpu, used))
        lying = self._runs.on_gpu(tuple(chosen)) if far and len(used) == 1 else None
        if lying is not None:
            pieces, offsets, end = [lying.piece(self.master.tensors)], [0], lying.end
            starts = dict(lying.starts)
            sizes = {block: self.master.layout.sizes[block] for block in starts}
        for rows in self._runs.read(chosen) if lying is None else ():
            flat = rows.flat
            pieces.append(flat.piece())
            offsets.append(end)
            begins = flat.offsets if not end else [end + offset for offset in flat.offsets]
            starts.update(zip(flat.blocks, begins, strict=True))
            sizes.update(zip(flat.blocks, flat.sizes, strict=True))
            end += flat.bytes.nbytes
        for block in [block for block in chosen if block not in starts]:
            piece = self.master.read(block)
            offsets.append(paged(end, piece.size))
            starts[block], sizes[block] = offsets[-1], piece.size
            pieces.append(piece)
            end = offsets[-1] + aligned(piece.size)
        packet, lacking = self._link.send(pieces, offsets, end), list[int]()
        if far and not cuda_ipc.lies_on_a_gpu(packet):  # such a packet needs no fingerprints
            lacking = [b for b in chosen if not devices.is_cpu(self.master.device_of(b))]
        self._prints.forget(chosen, lacking)
        lies = map(starts.__getitem__, chosen), map(sizes.__getitem__, chosen)
        places = map(_new_place, zip(repeat(packet), repeat(end), *lies, repeat(revision)))
        self._places.update(zip(chosen, places, strict=True))

    def _sent(self, block: int) -> MemoryRange:
        place = self._places[block]
        whole = self._link.open(place.packet)
        return whole.part(place.offset, place.size)

"""Small blocks of the master that are read, sent and compared together, each row of them in one run
of bytes. See `block_layout`'s note on one run.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import COPIED, MemoryRange, SpecRow, aligned, paged
from raydp_parallel.state.block_layout import SMALL, UNNAMED, BlockLayout, Flat, copy, tensors_in
from raydp_parallel.state.versions import MasterTensors

T = TypeVar("T")


class Rows:
    """Some blocks, and the tensors that lie in them.

    Args:
        blocks: The blocks.
        layout: The layout of the master's tensors.
        device: The device of the run.

    Attributes:
        layout: The layout.
        flat: The bytes of the blocks, as they were last read or loaded.
        slots: The slots of the tensors in them.
        views: The tensors in the run.
    """

    def __init__(self, blocks: tuple[int, ...], layout: BlockLayout, device: torch.device) -> None:
        self.layout = layout
        self.flat = Flat({block: layout.sizes[block] for block in blocks}, device)
        self.slots = tuple([slot for block in blocks for slot in layout.members[block]])
        self._specs = [layout.specs[slot] for slot in self.slots]
        self.views = self._shown(self.flat.bytes)

    def fit(self, blocks: tuple[int, ...], layout: BlockLayout, device: torch.device) -> bool:
        """Whether the run has these blocks of this layout on this device."""
        return (
            self.flat.blocks == blocks
            and self.layout is layout
            and self.flat.bytes.device == device
        )

    def like(self) -> Rows:
        """Another run for the same blocks."""
        return Rows(self.flat.blocks, self.layout, self.flat.bytes.device)

    def take(self, tensors: Mapping[int, Tensor]) -> None:
        """Read the blocks, given all tensors by slot."""
        copy(self.views, [tensors[slot] for slot in self.slots])

    def kept(self) -> Callable[[], dict[int, Tensor]]:
        """A function that returns the contents of now, by slot, whatever is read later."""
        return functools.partial(self._by_slot, self.flat.copied())

    def _by_slot(self, run: Tensor) -> dict[int, Tensor]:
        return dict(zip(self.slots, self._shown(run), strict=True))

    def _shown(self, run: Tensor) -> list[Tensor]:
        starts = dict(zip(self.flat.blocks, self.flat.offsets, strict=True))
        return tensors_in(run, starts, self._specs)


class BlockRow:
    """Blocks of one tensor each, which a GPU sends from where they lie. Small buffers are
    neighbours in the packet, as in the run that a replica keeps of them.

    Args:
        blocks: Blocks; those of several tensors, or of none, are left out.
        layout: The layout of the master's tensors.
        tensors: The tensors, by slot.

    Attributes:
        asked: The blocks that were given.
        layout: The layout.
        starts: Where each block lies in the packet.
        end: The bytes of the packet.
    """

    def __init__(
        self, blocks: tuple[int, ...], layout: BlockLayout, tensors: Mapping[int, Tensor]
    ) -> None:
        self.asked, self.layout, self.starts, self.end = blocks, layout, dict[int, int](), 0

        def is_apart(block: int) -> bool:
            return layout.sizes[block] > SMALL or isinstance(tensors[block], nn.Parameter)

        specs = []
        for block in sorted(blocks, key=lambda block: (is_apart(block), block)):
            size, spec = layout.sizes[block], layout.specs[block].tensor
            if size and len(layout.members[block]) == 1 and spec.dtype in COPIED:
                start = self.starts[block] = paged(self.end, size)
                specs.append(spec._replace(offset=start, cls=None, requires_grad=False))
                self.end = start + aligned(size)
        self._plan = SpecRow(specs).plan

    def piece(self, tensors: Mapping[int, Tensor]) -> MemoryRange:
        """The bytes, given all tensors by slot."""
        assert self._plan is not None
        chosen = [*map(tensors.__getitem__, self.starts)]  # a block is named by its first slot
        origin = devices.DeviceRow(chosen, self._plan, self.end)
        return MemoryRange(0, self.end, chosen, origin)


class Told:
    """The blocks that a replica last reported.

    Args:
        rows: The blocks, as they were reported.

    Attributes:
        report: The report's number.
        now: Another run of the same blocks, to read and compare.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.now = rows.like()
        self.report = UNNAMED


class Spare(Generic[T]):
    """One object that is kept for later use. A thread that takes it has it alone."""

    def __init__(self) -> None:
        self._kept: deque[T] = deque(maxlen=1)

    def take(self) -> T | None:
        """The kept object; None if another thread has it."""
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def keep(self, thing: T) -> None:
        """Keep an object instead of the one before."""
        self._kept.append(thing)


CPU = torch.device("cpu")


class BlockRuns:
    """The runs of one master. Each is kept, because the next call mostly needs the same blocks.

    Args:
        master: The tensors.
    """

    def __init__(self, master: MasterTensors) -> None:
        self._master = master
        self._told: Spare[Told] = Spare()
        self._rest: Rows | None = None
        self._far: BlockRow | None = None
        self._as_sent: tuple[Sequence[object], Told | None] = [], None
        self._kept: tuple[int, set[int]] = UNNAMED, set()

    @property
    def kept(self) -> tuple[int, set[int]]:
        """A report of a replica, and the blocks that are as it left them."""
        return self._kept

    def outdate(self, chosen: Sequence[int]) -> None:
        """Note that some blocks changed: they are no longer as a replica reported them."""
        self._kept = self._kept[0], self._kept[1].difference(chosen)

    def told(self, blocks: Sequence[int]) -> Told | None:
        """A run for small blocks that a replica reports: that of the last report, if it had the
        same blocks.
        """
        if not blocks:
            return None
        layout, device = self._master.layout, self._master.device_of(blocks[0])
        told = self._told.take()
        if told is not None and told.rows.fit(tuple(blocks), layout, device):
            return told
        return Told(Rows(tuple(blocks), layout, device))

    def keep(self, told: Told, report: int) -> None:
        """Keep a run with the contents of a report, which the master has now."""
        told.report = report
        self._told.keep(told)

    def on_gpu(self, chosen: tuple[int, ...]) -> BlockRow | None:
        """The blocks among those chosen, all on one GPU, that one operation sends; None if there
        are none.
        """
        layout, found = self._master.layout, self._far
        if found is None or found.asked != chosen or found.layout is not layout:
            found = self._far = BlockRow(chosen, layout, self._master.tensors)
        return found if found.starts else None

    def read(self, chosen: Sequence[int]) -> list[Rows]:
        """The small blocks among those chosen, in runs; blocks reported together share one."""
        master, device = self._master, self._master.device_of(chosen[0])
        small = [block for block in chosen if block in master.small]
        if master.devices() != {device}:
            small = [block for block in small if master.device_of(block) == device]
        told, found = self._told.take(), []
        if told is not None and told.rows.fit(told.rows.flat.blocks, master.layout, device):
            reported = {*told.rows.flat.blocks}
            if reported <= {*small}:
                found.append(self._as_told(told))
                small = [block for block in small if block not in reported]
            self._told.keep(told)
        if len(small) > 1:
            if self._rest is None or not self._rest.fit(tuple(small), master.layout, device):
                self._rest = Rows(tuple(small), master.layout, device)
            self._rest.take(master.tensors)
            found.append(self._rest)
        return found

    def _as_told(self, told: Told) -> Rows:
        """The run of blocks that a replica reported, read anew; notes which are as reported."""
        told.now.take(self._master.tensors)
        if devices.is_cpu(told.now.flat.bytes.device):  # a GPU would have to be waited for
            unlike = {*told.now.flat.compare(told.rows.flat)()}
            self._kept = told.report, {b for b in told.rows.flat.blocks if b not in unlike}
        return told.now

    def unlike(
        self, chosen: list[int], places: Sequence[object], sent: Callable[[int], MemoryRange]
    ) -> list[int]:
        """The blocks among those chosen, on a CPU, that differ from what was sent.

        Args:
            chosen: The blocks.
            places: Of each the place where it was sent, one object as long as it is the same.
            sent: Returns what was sent of a block.
        """
        (before, told), layout = self._as_sent, self._master.layout
        # Packets, which are arrays, have no equality.
        same = [*map(id, before)] == [*map(id, places)]
        if told is None or not same or not told.rows.fit(tuple(chosen), layout, CPU):
            told = Told(Rows(tuple(chosen), layout, CPU))
            for block, run in zip(chosen, told.rows.flat.runs, strict=True):
                devices.load(run, sent(block))
            self._as_sent = places, told
        told.now.take(self._master.tensors)
        return told.now.flat.compare(told.rows.flat)()

"""Small blocks of a master in one run of bytes, and what a replica last reported of them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raydp_parallel.state.block_layout import BlockLayout
from raydp_parallel.state.flat_layout import UNNAMED, Flat, copy, tensors_in

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

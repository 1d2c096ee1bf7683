"""Small blocks of a master copy in one run of bytes, and what of them a replica reported last."""

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
        layout: The layout of the master copy's tensors.
        device: Where the run lies.

    Attributes:
        layout: The layout.
        flat: The blocks' bytes, as they were taken or loaded last.
        slots: The slots whose tensors lie in them.
        views: Their contents in the run.
    """

    def __init__(self, blocks: tuple[int, ...], layout: BlockLayout, device: torch.device) -> None:
        self.layout = layout
        self.flat = Flat({block: layout.sizes[block] for block in blocks}, device)
        self.slots = tuple([slot for block in blocks for slot in layout.members[block]])
        self._specs = [layout.specs[slot] for slot in self.slots]
        self.views = self._shown(self.flat.bytes)

    def fit(self, blocks: tuple[int, ...], layout: BlockLayout, device: torch.device) -> bool:
        """Whether these are those blocks."""
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
        """What gives the contents of today, by slot, whatever is taken later."""
        return functools.partial(self._by_slot, self.flat.bytes.clone())

    def _by_slot(self, run: Tensor) -> dict[int, Tensor]:
        return dict(zip(self.slots, self._shown(run), strict=True))

    def _shown(self, run: Tensor) -> list[Tensor]:
        return tensors_in(
            run, dict(zip(self.flat.blocks, self.flat.offsets, strict=True)), self._specs
        )


class Told:
    """What a replica reported last.

    Args:
        rows: The blocks, as they were reported.

    Attributes:
        report: The report's number.
        now: The same blocks, to be compared with that.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.now = rows.like()
        self.report = UNNAMED


class Spare(Generic[T]):
    """One thing that is kept for the next time. A thread that takes it has it alone."""

    def __init__(self) -> None:
        self._kept: deque[T] = deque(maxlen=1)

    def take(self) -> T | None:
        """What was kept, if another thread does not have it."""
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def keep(self, thing: T) -> None:
        """Keep something, and let go of what was kept."""
        self._kept.append(thing)

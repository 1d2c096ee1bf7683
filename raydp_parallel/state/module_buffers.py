"""A replica's small blocks that kernels write to without moving a version, such as batch norm's
running means.

[Note: reported blocks]
After each forward they are copied into one run of bytes and compared with another. What the forward
changed is reported, and the driver writes it to the master. With its next update the driver sends
it to all replicas, and says which blocks are as which report left them. The replica that made the
report has them already.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.state.flat_layout import SMALL, UNNAMED, Flat, copy
from raydp_parallel.state.replica_memory import (
    BlockMemory,
    BlockSource,
    CopiedMemory,
    Packet,
)


class Buffers:
    """The blocks in three runs of bytes: the driver's, as last reported, as a forward left them.

    Args:
        memory: The memory of all blocks of the model.
        blocks: The blocks that kernels write to without moving a version.
        device: Their device.

    Attributes:
        blocks: The small ones among them; large blocks and windows are handled separately.
    """

    def __init__(
        self, memory: Mapping[int, BlockMemory], blocks: Iterable[int], device: torch.device
    ) -> None:
        self._memory = memory
        chosen = {b: found for b in blocks if isinstance(found := memory[b], CopiedMemory)}
        sizes = {
            b: len(found.tensor) for b, found in chosen.items() if 0 < len(found.tensor) <= SMALL
        }
        self._driver = Flat(sizes, device)
        self._told, self._now = self._driver.like(), self._driver.like()
        self.blocks = frozenset(sizes)
        self._answer: Callable[[], list[int]] = list
        self._report = UNNAMED
        if self.blocks:
            drivers = [chosen[block].driver() for block in self._driver.blocks]
            devices.load_all(self._driver.runs, drivers)
        for block, run in zip(self._driver.blocks, self._driver.runs, strict=True):
            chosen[block].lie(devices.piece(run))
        self._told.follow(self._driver)

    def look(self) -> None:
        """Begin to compare, to find the blocks that were written to."""
        if self.blocks:
            copy(self._now.runs, [self._memory[block].tensor for block in self._now.blocks])
            self._answer = self._now.compare(self._told)

    def written(self) -> set[int]:
        """The blocks that differ from what was last reported, or from the driver's bytes if they
        never were; it waits for the comparison.
        """
        found, self._answer = self._answer(), list
        return {*found}

    def together(self, changed: Sequence[int]) -> Sequence[int]:
        """The blocks to report if some changed: all if most did, so that the next report has the
        same blocks.
        """
        return self._now.blocks if 2 * len(changed) > len(self._now.blocks) else changed

    def report(self, changed: Sequence[int]) -> int:
        """Note that some blocks are reported with their last compared contents; returns the number
        of the report.
        """
        self._report = secrets.randbits(62) + 1
        self._told.load(changed, self._places(changed), self._now.piece())
        return self._report

    def packed(
        self, changed: Sequence[int]
    ) -> tuple[Sequence[int], list[tuple[MemoryRange, int]], int]:
        """Some blocks with their last compared contents, for a packet. See `Flat.packed`."""
        return self._now.packed(changed)

    def keep(self, report: int, kept: Sequence[int]) -> set[int]:
        """Take over as the driver's bytes the blocks ``kept`` as they were in ``report``; returns
        them, or none if the last report was another.
        """
        if report != self._report or report == UNNAMED:
            return set()
        found = [block for block in kept if block in self.blocks]
        self._driver.load(found, self._places(found), self._told.piece())
        return {*found}

    def forget_report(self) -> None:
        """Note that the blocks are no longer as last reported."""
        self._report = UNNAMED

    def settle(self) -> None:
        """Note that all blocks hold the driver's bytes."""
        self._told.follow(self._driver)
        self._answer, self._report = list, UNNAMED

    def adopt(self, sources: Mapping[int, BlockSource]) -> None:
        """Copy new bytes of the driver into some blocks."""
        packets: dict[Packet, list[int]] = defaultdict(list)
        for block, source in sources.items():
            packets[source.packet].append(block)
        for packet, chosen in packets.items():
            offsets = [sources[block].offset for block in chosen]
            self._driver.load(chosen, offsets, packet.whole)
        rows = self._driver.rows([*sources])
        copy(
            [self._memory[block].tensor for block in sources],
            [self._driver.runs[row] for row in rows],
        )

    def _places(self, chosen: Sequence[int]) -> Sequence[int]:
        if tuple(chosen) == self._driver.blocks:
            return self._driver.offsets
        return [self._driver.offsets[row] for row in self._driver.rows(chosen)]

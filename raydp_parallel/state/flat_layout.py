"""Small blocks in one run of bytes, so that an operation on many of them is done once.

[Note: one run]
A ResNet-50 has 159 buffers, most of them with a few hundred bytes. To read, compare, send and write
each of them separately takes Python longer than the network takes for its forward. So both sides
copy them into one run of bytes, and out of it, by one call of torch; the run is compared and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, aligned
from raydp_parallel.transport import codec
from raydp_parallel.transport.messages import SlotSpec

SMALL = 1 << 16
"""Bytes up to which a block lies in a run with others. A larger one costs more to copy than to
handle separately.
"""

PLAIN = {
    codec.DTYPE_NAMES[kind]
    for kind in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}
"""The dtypes of tensors in such runs. Others may lack a copy operation."""

UNNAMED = 0
"""No report has this number."""


class Flat:
    """Blocks in one run of bytes.

    Args:
        sizes: The bytes of each block, by its number.
        device: The device of the run.

    Attributes:
        blocks: The blocks, in order.
        sizes: Their bytes.
        offsets: Where each begins.
        bytes: The run.
        runs: The bytes of each block.
    """

    def __init__(self, sizes: Mapping[int, int], device: torch.device) -> None:
        self.blocks = tuple(sizes)
        self.sizes = tuple(sizes.values())
        spaces = [*map(aligned, self.sizes)]
        starts = [0]
        for space in spaces:
            starts.append(starts[-1] + space)
        self.offsets = tuple(starts[:-1])
        with torch.inference_mode(False):
            self.bytes = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
            parts: list[int] = []  # the bytes of each block, and the gap behind it
            for size, space in zip(self.sizes, spaces, strict=True):
                parts += [size, space - size]
            self.runs = [*self.bytes.split_with_sizes(parts)[::2]]

    def like(self) -> Flat:
        """Another run for the same blocks."""
        return Flat(dict(zip(self.blocks, self.sizes, strict=True)), self.bytes.device)

    def piece(self) -> MemoryRange:
        """The whole run."""
        return devices.piece(self.bytes)

    def follow(self, other: Flat) -> None:
        """Copy all of another run of the same blocks. See `copied`."""
        devices.load(self.bytes, other.piece())

    def copied(self) -> Tensor:
        """A copy of the run.

        By one thread: torch takes several from 32 KB on, and helper threads of this process would
        wait for cores on which those of another one spin (see `devices.process`).
        """
        found = torch.empty_like(self.bytes)
        devices.load(found, self.piece())
        return found

    def load(self, blocks: Sequence[int], offsets: Sequence[int], source: MemoryRange) -> None:
        """Copy some blocks, each from an offset of ``source``; neighbours are copied together."""
        for here, there, size in self._joined(blocks, offsets):
            devices.load(self.bytes[here : here + size], source.part(there, size))

    def packed(
        self, blocks: Sequence[int]
    ) -> tuple[Sequence[int], list[tuple[MemoryRange, int]], int]:
        """Some blocks for a packet: where each lies there, the pieces with their places, and the
        packet's size.
        """
        offsets, end = self.offsets, len(self.bytes)
        if tuple(blocks) != self.blocks:
            offsets, end = packed([self.sizes[row] for row in self.rows(blocks)])
        whole = self.piece()
        pieces = [(whole.part(here, size), at) for here, at, size in self._joined(blocks, offsets)]
        return offsets, pieces, end

    def rows(self, blocks: Sequence[int]) -> list[int]:
        """The positions of some blocks in the run."""
        if tuple(blocks) == self.blocks:
            return [*range(len(self.blocks))]
        at = {block: row for row, block in enumerate(self.blocks)}
        return [at[block] for block in blocks]

    def _joined(self, blocks: Sequence[int], offsets: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where runs of neighbours begin here and at other offsets, and their bytes."""
        if tuple(offsets) == self.offsets and tuple(blocks) == self.blocks:
            return [(0, 0, self.offsets[-1] + self.sizes[-1])] if self.sizes else []
        found: list[tuple[int, int, int]] = []
        for row, there in zip(self.rows(blocks), offsets, strict=True):
            here, size = self.offsets[row], self.sizes[row]
            if found:
                start, other, length = found[-1]
                if here == start + aligned(length) and here - start == there - other:
                    found[-1] = start, other, here - start + size
                    continue
            found.append((here, there, size))
        return found

    def compare(self, other: Flat) -> Callable[[], list[int]]:
        """Compare with another run of the same blocks.

        Returns:
            A function that returns the blocks that differ. A GPU begins at once; the function waits
            for it.
        """
        alike = devices.compare_runs(self.bytes, other.bytes, self.offsets, self.sizes)
        return lambda: [block for block, same in zip(self.blocks, alike(), strict=True) if not same]


def tensors_in(run: Tensor, starts: Mapping[int, int], specs: Iterable[SlotSpec]) -> list[Tensor]:
    """The tensors of some slots over a run of bytes.

    Args:
        run: The bytes.
        starts: Where each block begins.
        specs: The slots' specs.
    """
    typed: dict[str, Tensor] = {}
    found = []
    with torch.inference_mode(False), torch.no_grad():
        for block, offset, kind in specs:
            whole = typed.get(kind.dtype)
            if whole is None:
                whole = typed[kind.dtype] = run.view(codec.DTYPES[kind.dtype])
            start = starts[block] // whole.itemsize + offset if 0 not in kind.shape else 0
            found.append(whole.as_strided(kind.shape, kind.stride, start))
    return found


def packed(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where blocks of some sizes lie in a packet of their own, and how long it is."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += aligned(size)
    return tuple(offsets), end


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of some tensors to another, all by one call."""
    if targets:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([*targets], [*sources])

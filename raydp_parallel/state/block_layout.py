"""Blocks: the runs of bytes that a module's tensors lie in, and how a tensor lies in its block.

Most tensors have a block of their own. Tensors that share memory (views, ties of different shapes,
the flat weights of a recurrent net) share a block, so that they share memory in a replica too.
Tensors that are no plain window on a storage have none: they are sent inside the structure.

[Note: one run]
A ResNet-50 has 159 buffers, most of them with a few hundred bytes. To read, compare, send and write
each of them separately takes Python longer than the network takes for its forward. So both sides
copy small blocks into one run of bytes, and out of it, by one call of torch; the run is compared
and sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, TensorSpec, aligned
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import Parcel, SlotSpec

_PARAMETER = b"parameter"
"""Stands for `nn.Parameter`, the most common class."""

_GAP = 64
"""Bytes between the weights of a recurrent net that cuDNN uses as one run of memory, at most."""

_SPARE = 2
"""A tensor that uses less than this part (one byte in so many) of its span is copied compactly."""


class BlockLayout(NamedTuple):
    """How the tensors of a module lie in memory.

    Attributes:
        specs: For each tensor: its block and how it lies there. Blocks are named by the slot of
            their first tensor.
        sizes: Bytes of each block.
        members: Which tensors lie in each block.
    """

    specs: dict[int, SlotSpec]
    sizes: dict[int, int]
    members: dict[int, tuple[int, ...]]

    def blocks_of(self, slots: Iterable[int]) -> set[int]:
        """The blocks of those slots that are here."""
        specs = self.specs
        return {specs[slot].block for slot in slots if slot in specs}


def layout_of(specs: dict[int, SlotSpec], sizes: dict[int, int]) -> BlockLayout:
    """The layout with some specs and sizes of blocks."""
    members: dict[int, tuple[int, ...]] = {}
    for slot, spec in sorted(specs.items()):
        members[spec.block] = (*members.get(spec.block, ()), slot)
    return BlockLayout(specs, sizes, members)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a window on a storage, and nothing else."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
        and not hasattr(tensor, "__tensor_flatten__")
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def lay_out(tensors: dict[int, Tensor]) -> BlockLayout:
    """Find the blocks of some plain tensors, known by slot."""
    specs: dict[int, SlotSpec] = {}
    sizes: dict[int, int] = {}
    members: dict[int, tuple[int, ...]] = {}
    by_storage: dict[int, list[int]] = defaultdict(list)
    for slot, tensor in tensors.items():
        by_storage[_storage_key(tensor)].append(slot)
    for group in by_storage.values():
        for cluster in _overlapping(group, tensors):
            _lay_out_cluster(cluster, tensors, specs, sizes, members)
    return BlockLayout(dict(sorted(specs.items())), sizes, members)


def lie_as(layout: BlockLayout, tensors: dict[int, Tensor], moved: Sequence[int]) -> bool:
    """Whether tensors, some of which moved, still share memory as in a layout. Most share it with
    no other.
    """
    apart = len(layout.members) == len(tensors) == len({*map(_storage_key, tensors.values())})
    if apart and all(tensors[slot].stride() == layout.specs[slot].tensor.stride for slot in moved):
        return True
    now = lay_out(tensors)
    return now.members == layout.members and all(
        alike(spec, now.specs[slot]) for slot, spec in layout.specs.items()
    )


def alike(one: SlotSpec, other: SlotSpec) -> bool:
    """Whether two specs place a tensor alike in its block, whatever its flag."""
    flagless = other.tensor._replace(requires_grad=one.tensor.requires_grad)
    return one.offset == other.offset and one.tensor == flagless


def _storage_key(tensor: Tensor) -> int:
    pointer = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    return pointer or -id(tensor)


def _overlapping(group: list[int], tensors: dict[int, Tensor]) -> list[list[int]]:
    if len(group) == 1:
        return [group]
    clusters: list[list[int]] = []
    end = -1
    for slot in sorted(group, key=lambda s: span(tensors[s])):
        start, stop = span(tensors[slot])
        before = tensors[clusters[-1][-1]] if clusters else None
        close = before is not None and start - end <= _GAP and _are_flat(before, tensors[slot])
        if start < end or close:
            clusters[-1].append(slot)
        else:
            clusters.append([slot])
        end = max(end, stop)
    return clusters


def _are_flat(one: Tensor, other: Tensor) -> bool:
    """Whether neighbours in one storage must stay neighbours: otherwise cuDNN copies a recurrent
    net's weights in each call.
    """
    return (
        isinstance(one, nn.Parameter)
        and isinstance(other, nn.Parameter)
        and not devices.is_cpu(one.device)
    )


def _lay_out_cluster(
    cluster: list[int],
    tensors: dict[int, Tensor],
    specs: dict[int, SlotSpec],
    sizes: dict[int, int],
    members: dict[int, tuple[int, ...]],
) -> None:
    block = min(cluster)
    members[block] = tuple(sorted(cluster))
    if len(cluster) == 1 and is_loose(tensors[block]):
        flat = codec.compact(tensors[block])
        specs[block] = SlotSpec(block, 0, _spec(tensors[block])._replace(stride=flat.stride()))
        sizes[block] = flat.nbytes
        return
    start = min(span(tensors[slot])[0] for slot in cluster)
    sizes[block] = max(span(tensors[slot])[1] for slot in cluster) - start
    for slot in cluster:
        tensor = tensors[slot]
        specs[slot] = SlotSpec(block, (span(tensor)[0] - start) // tensor.itemsize, _spec(tensor))


def _spec(tensor: Tensor) -> TensorSpec:
    cls = _PARAMETER if type(tensor) is nn.Parameter else codec.pack_class(type(tensor))
    return codec.spec_of(tensor)._replace(
        cls=None if type(tensor) is Tensor else cls, requires_grad=tensor.requires_grad
    )


def span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    if not tensor.numel():
        return 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start: int = tensor.storage_offset() * tensor.itemsize  # type: ignore[assignment]  # SymInt while tracing only
    return start, start + (last + 1) * tensor.itemsize


def start(block: Sequence[Tensor]) -> int:
    """Where a block begins in its storage, given the tensors in it."""
    return min(span(tensor)[0] for tensor in block)


def is_loose(tensor: Tensor) -> bool:
    """Whether a tensor uses only a small part of the bytes that it spans."""
    start, end = span(tensor)
    return end - start > _SPARE * max(tensor.nbytes, 1)


def read(block: Sequence[Tensor]) -> MemoryRange:
    """The bytes of a block, given the tensors in it."""
    first = block[0]
    if not first.numel():
        return MemoryRange(0, 0, None)
    if len(block) == 1:
        if first.is_contiguous():  # most are
            return devices.piece(first.detach())
        whole = codec.compact(first) if is_loose(first) else _window(first, *span(first))
        return devices.piece(whole)
    starts, ends = zip(*map(span, block), strict=True)
    return devices.piece(_window(first, min(starts), max(ends)))


def _window(tensor: Tensor, start: int, end: int) -> Tensor:
    if tensor.is_contiguous():
        whole = tensor.detach()
        if end - start == whole.nbytes:
            return whole
    window = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return window.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def build(spec: SlotSpec, storage: Tensor) -> Tensor:
    """The tensor of a slot, over its block's bytes."""
    kind = spec.tensor
    plain = torch.empty(0, dtype=codec.DTYPES[kind.dtype], device=storage.device)
    if 0 in kind.shape:
        plain = plain.new_empty(kind.shape)
    else:
        plain.set_(storage.untyped_storage(), spec.offset, kind.shape, kind.stride)
    if kind.cls is None:
        return plain.requires_grad_(kind.requires_grad)
    cls = nn.Parameter if kind.cls == _PARAMETER else codec.load_class(kind.cls)
    return Tensor._make_subclass(cls, plain, kind.requires_grad)  # type: ignore[no-any-return]


SMALL = 1 << 16
"""Bytes up to which a block lies in a run with others. A larger one costs more to copy than to
handle separately.
"""

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
    if targets and devices.is_cpu(targets[0].device):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([*targets], [*sources])
    elif targets:
        devices.copy_each(targets, sources)


class Specials:
    """The special ones of some tensors, by slot, as they are now.

    Args:
        found: All tensors.

    Attributes:
        tensors: The special ones.
    """

    def __init__(self, found: Mapping[int, Tensor]) -> None:
        self.tensors = {slot: t for slot, t in sorted(found.items()) if not is_plain(t)}
        self._look, self._parcel = _look(self.tensors.values()), _encode(self.tensors.values())

    @property
    def message(self) -> tuple[tuple[int, ...], Parcel] | None:
        """What replicas need to build them; None if there are none."""
        return (tuple(self.tensors), self._parcel) if self._parcel else None

    def look_alike(self) -> bool:
        """Whether they are unchanged, as far as versions and flags show."""
        return not self.tensors or _look(self.tensors.values()) == self._look

    def are_alike(self) -> bool:
        """Whether their contents are unchanged."""
        return not self.tensors or _encode(self.tensors.values()) == self._parcel


def _look(tensors: Iterable[Tensor]) -> list[Any]:
    return [(t._version, t.requires_grad) for t in tensors]


def _encode(tensors: Iterable[Tensor]) -> Parcel | None:
    row = tuple(tensors)
    if not row:
        return None
    return codec.encode(row, Attachments(InlineLink()), "module", requires_grad=True)[0]

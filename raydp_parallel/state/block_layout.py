"""Blocks: the runs of bytes that a module's tensors lie in, and how a tensor lies in its block.

Most tensors have a block of their own. Tensors that share memory (views, ties of different shapes,
the flat weights of a recurrent net) share a block, so that they share memory in a replica too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, TensorSpec
from raydp_parallel.transport import codec
from raydp_parallel.transport.messages import SlotSpec

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

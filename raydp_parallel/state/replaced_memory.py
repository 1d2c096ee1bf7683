"""Tensors that forward gave other memory: by `self.x.data = ...`, `set_` or `resize_`.

Such a tensor no longer shows the bytes of its block. Its new contents are reported if upstream's
replica 0 would hold the master's own tensor, so that the driver gives the master's tensor other
memory too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.state import block_layout
from raydp_parallel.state.replica_memory import BlockMemory
from raydp_parallel.transport import codec
from raydp_parallel.transport.messages import SlotSpec


def shows_other(tensor: Tensor, spec: SlotSpec, address: int) -> bool:
    """Whether a tensor shows other memory than its spec says, of the block at an address."""
    kind = spec.tensor
    if tensor.shape != kind.shape or codec.DTYPE_NAMES[tensor.dtype] != kind.dtype:
        return True
    if not tensor.numel():
        return False
    lies = tensor.storage_offset(), tensor.stride()
    return lies != (spec.offset, kind.stride) or tensor.untyped_storage().data_ptr() != address


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _lying(row: Sequence[Tensor]) -> list[Any]:
    """How some tensors lie in their storages."""
    kinds = [*map(_shape, row), *map(_dtype, row)]
    return [*kinds, *map(Tensor.stride, row), *map(Tensor.storage_offset, row)]


def _said(specs: Sequence[SlotSpec]) -> list[Any]:
    """How tensors with some specs lie."""
    kinds = [spec.tensor for spec in specs]
    shapes = [torch.Size(kind.shape) for kind in kinds]
    dtypes = [codec.DTYPES[kind.dtype] for kind in kinds]
    strides = [kind.stride for kind in kinds]
    return [*shapes, *dtypes, *strides, *[spec.offset for spec in specs]]


def lasts(tensor: Tensor, *, alone: bool, detached: bool) -> bool:
    """Whether upstream's replica 0 holds the master's own tensor there.

    Args:
        tensor: The tensor of the replica.
        alone: Whether there is one device only, where upstream runs the master itself.
        detached: Whether the module takes no gradients.
    """
    return alone or detached or not (isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad)


class Replaced:
    """The slots of one replica that show other memory, and what was reported about them."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self._known: tuple[Mapping[int, SlotSpec], tuple[int, ...], list[Any]] = {}, (), []
        self._reported: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Note that all slots show the bytes of their blocks."""
        self.slots = set()
        self._reported.clear()

    def lie_as_said(
        self,
        chosen: tuple[int, ...],
        tensors: Mapping[int, Tensor],
        specs: Mapping[int, SlotSpec],
    ) -> bool:
        """Whether tensors whose addresses are as at first lie as their specs say. Mostly the same
        ones are written in each forward, so what the specs say is kept.
        """
        known, slots, said = self._known
        if known is not specs or slots != chosen:
            said = _said([specs[slot] for slot in chosen])
            self._known = specs, chosen, said
        return _lying([tensors[slot] for slot in chosen]) == said

    def news(
        self,
        chosen: Collection[int],
        tensors: dict[int, Tensor],
        specs: dict[int, SlotSpec],
        memory: dict[int, BlockMemory],
    ) -> list[int]:
        """The slots among those chosen that show other bytes than the driver has; they count as
        reported from now on.
        """
        found = [
            slot
            for slot in chosen
            if self._differs(slot, tensors[slot], specs[slot], memory[specs[slot].block])
        ]
        self._reported.update((slot, tensors[slot].detach().clone()) for slot in found)
        return found

    def _differs(self, slot: int, tensor: Tensor, spec: SlotSpec, memory: BlockMemory) -> bool:
        before = self._reported.get(slot)
        geometry = tensor.shape, tensor.stride(), codec.DTYPE_NAMES[tensor.dtype]
        if before is not None:
            if geometry != (before.shape, before.stride(), codec.DTYPE_NAMES[before.dtype]):
                return True
            driver = block_layout.read([before])
        else:
            if geometry != (spec.tensor.shape, spec.tensor.stride, spec.tensor.dtype):
                return True
            driver = memory.driver()
        return not devices.compare([(block_layout.read([tensor]), driver)])()[0]

"""Gradients that leave while backward still runs, where a device can copy beside computing.

[Note: gradients that change on their way]
A large gradient is copied once torch has added it up. If more is added afterwards (a reentrant
checkpoint runs a backward of its own inside, and a leaf may be used in two of them), or a hook
writes to it, its version has moved, or it is another tensor, when backward has ended. Then it is
copied again, on the same stream, hence after its first copy. The small ones are copied then too,
all at once: each by itself would take the host longer than the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, TensorSpec, aligned
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, ReservedMemory
from raydp_parallel.transport.messages import Parcel

LARGE = 1 << 18
"""Bytes from which a gradient is watched for. That costs the host some microseconds."""

TOGETHER = 4 << 20
"""Bytes of gradients that begin to travel together, and from which it pays at all."""


class _Begun(NamedTuple):
    """A gradient on its way, as it was."""

    grad: Tensor
    version: int
    spec: TensorSpec


class GradientStream:
    """The gradients of one backward.

    Args:
        leaves: The leaves of the graph.
        room: Where their gradients go.
        courier: The thread that copies.
    """

    def __init__(
        self, leaves: Sequence[Tensor], room: ReservedMemory, courier: devices.Courier
    ) -> None:
        self._leaves = leaves
        self._room = room
        self._courier = courier
        self._makers = devices.Makers(leaves[0].device)
        self._there: list[int] = []
        self._size = 0
        self._begun: dict[int, _Begun] = {}
        self._end = 0
        self._failed = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Begin to copy large gradients as soon as torch has added them up."""
        rows = [
            row for row, leaf in enumerate(self._leaves) if leaf.is_leaf and _size(leaf) >= LARGE
        ]
        hooks = [
            self._leaves[row].register_post_accumulate_grad_hook(self._hook(row)) for row in rows
        ]
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._courier.finish()  # the room is lent to others next
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        return lambda leaf: self._arrived(row, leaf)

    def _arrived(self, row: int, leaf: Tensor) -> None:
        grad = leaf.grad
        if (
            row in self._begun
            or row in self._there
            or grad is None
            or grad.layout is not torch.strided
        ):
            return
        self._there.append(row)
        self._makers.note()
        self._size += grad.nbytes
        if self._size >= TOGETHER:
            self._go()

    def _go(self) -> None:
        """Begin to copy what is there."""
        rows, self._there, self._size = self._there, [], 0
        if self._failed:
            return
        try:
            pieces: list[MemoryRange] = []
            offsets: list[int] = []
            # A module may compute on streams of its own, and this is the hook of the last one.
            self._makers.catch_up()
            for row in rows:
                grad = self._leaves[row].grad
                if grad is not None and self._end + aligned(grad.nbytes) <= self._room.size:
                    version = grad._version
                    spec, self._end = codec.write(grad, pieces, offsets, self._end)
                    self._begun[row] = _Begun(grad, version, spec)
            self._courier.carry(pieces, [self._room.address + offset for offset in offsets])
        except RuntimeError:
            self._failed = True  # for want of memory, perhaps: backward goes on

    def parcel(self, found: Sequence[Tensor | None], back: Attachments) -> Parcel | None:
        """All gradients, once backward has ended; None if they have to be sent anew.

        Args:
            found: The gradients, by leaf.
            back: What they travel by.
        """
        pieces: list[MemoryRange] = []
        offsets: list[int] = []
        specs = []
        for row, grad in enumerate(found):
            if grad is not None:
                specs.append(self._spec(row, grad, pieces, offsets))
        fits = self._end <= self._room.size and not self._failed and codec.is_row(tuple(found))
        try:
            if fits:
                self._courier.carry(pieces, [self._room.address + offset for offset in offsets])
        finally:
            self._courier.finish()
        return codec.row(tuple(found), specs, back.filled(self._room, self._end)) if fits else None

    def _spec(
        self, row: int, grad: Tensor, pieces: list[MemoryRange], offsets: list[int]
    ) -> TensorSpec:
        """Where a gradient lies in the packet; its bytes are among the pieces if they are not there
        as they are now.
        """
        begun = self._begun.get(row)
        if begun is not None and begun.grad is grad and begun.version == grad._version:
            return begun.spec
        if begun is not None and grad.layout is torch.strided and grad.nbytes == begun.grad.nbytes:
            return codec.write(grad, pieces, offsets, begun.spec.offset)[0]
        spec, self._end = codec.write(grad, pieces, offsets, self._end)
        return spec


def begin(
    leaves: Sequence[Tensor], back: Attachments, device: torch.device
) -> GradientStream | None:
    """What sends gradients early; None where that cannot be, or does not pay."""
    courier = devices.courier(device)
    if courier is None:
        return None
    sizes = [*map(_size, leaves)]
    if sum(size for size in sizes if size >= LARGE) < TOGETHER:
        return None
    room = back.room(sum(map(aligned, sizes)))
    return GradientStream(leaves, room, courier) if room is not None else None


def _size(leaf: Tensor) -> int:
    return leaf.nbytes if leaf.layout is torch.strided else 0  # others have none

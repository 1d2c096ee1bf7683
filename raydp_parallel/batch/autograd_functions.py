"""The autograd Functions behind scatter and gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raydp_parallel import devices

Cut = int | list[int]
"""The most chunks that `torch.chunk` makes; or the size of each chunk."""


class Scatter(torch.autograd.Function):
    """Chunks of a tensor, as views; its backward is a concatenation, so it is differentiable any
    number of times.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split ``tensor``."""
        # Without this, a chunk without a gradient would arrive as zeros, and "no gradient at all"
        # could not be told from that.
        ctx.set_materialize_grads(False)
        views = _views(tensor, cut, dim)
        ctx.dim, ctx.sizes = dim, [view.shape for view in views]
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        """Put the chunks' gradients one after the other; chunks without one count as zero."""
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None
        whole = [
            known.new_zeros(size) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return None, None, join_along(whole, ctx.dim)


class Gather(torch.autograd.Function):
    """``torch.cat`` into memory that was used before; its backward is made of views, as that of
    ``torch.cat`` is.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Concatenate."""
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.sizes = dim, [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        return torch.cat(tensors, dim, out=devices.recycled(shape, tensors[0].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Split."""
        (grad,) = grads
        return None, *([None] * len(ctx.sizes) if grad is None else grad.split(ctx.sizes, ctx.dim))


def join_along(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The concatenation of tensors of one dtype and device."""
    if _is_large(tensors) and all(map(_is_plain, tensors)):
        joined: torch.Tensor = Gather.apply(dim, *tensors)
        return joined
    return torch.cat(tuple(tensors), dim)


def _is_large(tensors: Sequence[torch.Tensor]) -> bool:
    return sum([tensor.numel() * tensor.itemsize for tensor in tensors]) >= devices.RECYCLED


def _is_plain(tensor: torch.Tensor) -> bool:
    ordinary = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and devices.is_cpu(tensor.device)
    )
    return ordinary and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def split_tensor(tensor: torch.Tensor, cut: Cut, dim: int) -> tuple[torch.Tensor, ...]:
    """Views of a tensor along ``dim``."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _views(tensor, cut, dim)
    views: tuple[torch.Tensor, ...] = Scatter.apply(cut, dim, tensor)
    return views


def _views(tensor: torch.Tensor, cut: Cut, dim: int) -> tuple[torch.Tensor, ...]:
    return tensor.chunk(cut, dim) if isinstance(cut, int) else tensor.split(cut, dim)

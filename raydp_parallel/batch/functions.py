"""The autograd Function behind scatter."""

from __future__ import annotations

from typing import Any

import torch


class Scatter(torch.autograd.Function):
    """Chunks of a tensor, as views; its backward is a concatenation, so it is differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, chunks: int, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split ``tensor`` as ``torch.chunk`` does."""
        # Without this, a chunk nobody used would arrive as zeros, and "no gradient at all" could not be told.
        ctx.set_materialize_grads(False)
        views = tensor.chunk(chunks, dim)
        ctx.dim, ctx.sizes = dim, [view.shape for view in views]
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        """Put the chunks' gradients one after the other; chunks without one count as zero."""
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None
        whole = [known.new_zeros(size) if grad is None else grad for grad, size in zip(grads, ctx.sizes, strict=True)]
        return None, None, torch.cat(whole, ctx.dim)


def split_tensor(tensor: torch.Tensor, chunks: int, dim: int) -> tuple[torch.Tensor, ...]:
    """At most ``chunks`` views of a tensor along ``dim``."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.chunk(chunks, dim)
    views: tuple[torch.Tensor, ...] = Scatter.apply(chunks, dim, tensor)
    return views

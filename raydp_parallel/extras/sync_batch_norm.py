"""Batch norm over the whole batch (pytorch#1051, #38940): each replica normalises its chunk by the
statistics of all chunks.

Each chunk's count, mean and sum of squares go to all others in one exchange, and the rest is made
of ordinary operations, so that derivatives of any order follow from that of the exchange.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from raydp_parallel.wire import group


class _Marked(FunctionCtx):
    mark: int  # of the exchange: the number of its layer
    sums: bool  # it gave the sum of rows


class Exchanged(Function):
    """The rows that all chunks give to each; or, as the derivative of that, the sum of the rows
    that they give to this one. So it is differentiable to any order.
    """

    @staticmethod
    def forward(ctx: _Marked, own: Tensor, mark: int, sums: bool, count: int = 0) -> Tensor:
        ctx.mark, ctx.sums = mark, sums
        if group.current is None:
            text = "outputs of a chunk have no graph: let those of all chunks require a gradient"
            raise RuntimeError(f"synchronised batch norm: {text}")
        if sums:
            return torch.sum(group.current.swap(own, mark), 0)
        return group.current.swap(own.expand(group.current.size, *own.shape), mark, count)

    @staticmethod
    def backward(ctx: _Marked, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Exchanged.apply(grads[0], ctx.mark, not ctx.sums), None, None, None


M = TypeVar("M", bound=nn.Module)

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_EVERY: type[nn.Module] = nn.BatchNorm1d.__mro__[1]
"""The class of all batch norms, of a program's own, too: torch has no public name for it."""


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm that uses the statistics of all chunks of a call, in training.

    With one chunk, in place, or where running statistics are used, it is ordinary batch norm.
    """

    number = 0
    """Its number among those of its module."""

    def exchanges(self) -> bool:
        """Tell whether it uses the batch's statistics, and not the running ones."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def forward(self, input: Tensor) -> Tensor:
        odd = input.dim() < 2 or not input.size(1)  # which the ordinary one refuses
        if group.current is None or not self.exchanges() or odd:
            return nn.BatchNorm1d.forward(self, input)
        exact = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, count = _statistics(group.current, exact, self.number)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), var.detach() * (count / (count - 1)))
        shape = (1, -1, *[1] * (input.dim() - 2))
        out = (exact - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Count the batch, and add its statistics to the running ones."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            for running, found in ((self.running_mean, mean), (self.running_var, var)):
                if running is not None:
                    running.mul_(1 - factor).add_(found.to(running.dtype), alpha=factor)


group.exchanging_layers[SyncBatchNorm] = SyncBatchNorm.exchanges


def _statistics(exchange: group.Exchange, x: Tensor, number: int) -> tuple[Tensor, Tensor, float]:
    """Mean, variance and number of the values of each channel, over all chunks."""
    dims, channels = [0, *range(2, x.dim())], x.size(1)
    count = x.numel() // channels
    if count:
        var, mean = torch.var_mean(x, dims, correction=0)
        squares = var * count
    else:
        mean = squares = x.sum(dims)
    own = torch.cat([x.new_full((1,), count), mean, squares])
    rows: Tensor = Exchanged.apply(own, number, False, count)
    counts = rows[:, :1].detach()
    total = float(sum(exchange.numbers))  # without a wait for a GPU
    if total <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape} and "
            "as good as nothing in the other chunks"
        )
    means, parts = rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    mean = (counts * means).sum(0) / total
    var = (parts + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def convert_sync_batchnorm(module: M) -> M:
    """Make all batch norms of a module use the statistics of the whole batch, in training.

    ::

        model = DataParallel(convert_sync_batchnorm(net), ["cpu", "cpu"])
        model(x).square().mean().backward()

    Outputs, gradients and running statistics are then those of the plain module on the whole
    batch, but for the order of sums. Each chunk needs a replica of its own, and a death during a
    call raises `ReplicaDied`. The module is changed in place; keys of ``state_dict()`` stay.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm: expected a module, got {type(module).__name__}")
    found = {name: part for name, part in module.named_modules() if isinstance(part, _EVERY)}
    for name, part in found.items():
        if type(part) not in _CONVERTED and not isinstance(part, SyncBatchNorm):
            raise TypeError(
                f"convert_sync_batchnorm: {name or 'the module'} is a {type(part).__name__}: its "
                "forward cannot be replaced by that of batch norm. Run a lazy module before"
            )
    for number, part in enumerate(found.values(), 1):
        if type(part) in _CONVERTED:
            part.__class__ = SyncBatchNorm
            part.process_group = None  # type: ignore[assignment]
        part.number = number  # type: ignore[assignment]
    return module

"""Batch norm over the whole batch (pytorch#1051, #38940): each replica normalises its chunk by the
statistics of all chunks.

Each chunk's count, mean and sum of squares go to all others in one exchange, and the rest is made
of ordinary operations, so that derivatives of any order follow from that of the exchange.

[Note: exchanges]
An exchange is an operation of all chunks of a call, each in a replica of its own, so that all must
come to the same exchanges in the same order, in forward and in backward. That is so for chunks that
run the same layers. If one of them fails, it leaves the group of replicas, and the others get
`GroupBroken` instead of waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from raydp_parallel.errors import GroupBroken
from raydp_parallel.transport import collective
from raydp_parallel.transport.group_messages import TakePart


class ChunkExchange:
    """What the replica of one chunk gives to those of the others, and gets, in one call.

    Args:
        part: The driver's request.
        group: The group of replicas; None if this replica has left it.
        played: What was gathered in the forward that runs again for its graph alone, without the
            others; None if the others take part.

    Attributes:
        gathered: What was gathered so far, the same for all chunks; None if that is not all that
            was exchanged.
    """

    def __init__(
        self,
        part: TakePart,
        group: collective.Group | None,
        played: Sequence[Tensor] | None = None,
    ) -> None:
        self._part = part
        self._group = group
        self._played = None if played is None else iter(played)
        self.gathered: list[Tensor] | None = []

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all chunks, in their order; each gives one, of the same length."""
        if self._played is not None:
            found = next(self._played, None)
            if found is None:
                raise GroupBroken("batch norm ran more often than in the forward that is run again")
            return found.to(own.device)
        rows = self._swapped(own.expand(len(self._part.order), -1))
        if self.gathered is not None:
            self.gathered.append(rows)
        return rows

    def swap(self, rows: Tensor) -> Tensor:
        """Give each chunk one row; returns what each chunk gave to this one."""
        self.gathered = None
        if self._played is not None:
            raise GroupBroken("a forward that differentiates inside cannot be run again alone")
        return self._swapped(rows)

    def _swapped(self, rows: Tensor) -> Tensor:
        if self._group is None:
            raise GroupBroken("this replica has left the group")
        order, patience = self._part.order, self._part.patience
        by_rank = sorted(range(len(order)), key=order.__getitem__)
        given = rows.detach()[by_rank].contiguous()
        try:
            got = self._group.swap(given.view(-1), patience, time.monotonic() + patience)
        except RuntimeError as error:
            raise GroupBroken(f"the replicas of the other chunks did not answer: {error}") from None
        return got.view(len(order), -1)[[*order]].to(rows.device)


_current: ChunkExchange | None = None


def current() -> ChunkExchange | None:
    """The exchange of the chunk that this process runs just now; None if it runs without others."""
    return _current


@contextlib.contextmanager
def taking_part(
    groups: collective.Groups, part: TakePart, played: Sequence[Tensor] | None = None
) -> Iterator[ChunkExchange]:
    """Run a block as one of several chunks; if it fails, the others do not wait for this one.

    Args:
        groups: The groups of this process.
        part: The driver's request.
        played: See `ChunkExchange`.
    """
    global _current
    before = _current
    _current = made = ChunkExchange(part, groups.find(part.group), played)
    try:
        yield made
    except BaseException:
        groups.leave(part.group)
        raise
    finally:
        _current = before


def gather(own: Tensor) -> Tensor:
    """The rows of all chunks, in their order, differentiable to any order."""
    rows: Tensor = GatherRows.apply(own)
    return rows


def _needed() -> ChunkExchange:
    if _current is None:
        raise GroupBroken(
            "synchronised batch norm was differentiated outside of the call that ran it"
        )
    return _current


class GatherRows(Function):
    """One row of each chunk in, all rows out."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return _needed().gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total: Tensor = CollectRow.apply(grads[0])
        return total


class CollectRow(Function):
    """The sum of what each chunk has for this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.sum(_needed().swap(rows), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rows: Tensor = GatherRows.apply(grads[0])
        return rows


M = TypeVar("M", bound=nn.Module)

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm that uses the statistics of all chunks of a call, in training.

    With one chunk, in place, or where running statistics are used, it is ordinary batch norm.
    """

    made = False
    """Whether this process ever had one, so that models need not be searched for them."""

    number = 0
    """Which of its module's it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SyncBatchNorm.made = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        SyncBatchNorm.made = True

    @property
    def exchanges(self) -> bool:
        """Whether it uses the batch's statistics, and not the running ones."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        factor = self._factor()
        if current() is None or not self.exchanges:
            tracks = not self.training or self.track_running_stats
            return nn.functional.batch_norm(
                input,
                self.running_mean if tracks else None,
                self.running_var if tracks else None,
                weight=self.weight,
                bias=self.bias,
                training=self.exchanges,
                momentum=factor,
                eps=self.eps,
            )
        exact = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, count = _statistics(exact, input.shape, self.number)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), var.detach() * (count / (count - 1)), factor)
        shape = (1, -1, *[1] * (input.dim() - 2))
        out = (exact - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    def _factor(self) -> float:
        """Counts the batch; the weight of its statistics."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return factor

    def _track(self, mean: Tensor, var: Tensor, factor: float) -> None:
        with torch.no_grad():
            for running, found in ((self.running_mean, mean), (self.running_var, var)):
                if running is not None:
                    running.mul_(1 - factor).add_(found.to(running.dtype), alpha=factor)


def _statistics(x: Tensor, shape: torch.Size, number: int) -> tuple[Tensor, Tensor, float]:
    """Mean, variance and number of the values of each channel, over all chunks; all chunks must be
    at the batch norm of this number.
    """
    dims, channels = [0, *range(2, x.dim())], x.size(1)
    count = x.numel() // channels
    if count:
        var, mean = torch.var_mean(x, dims, correction=0)
        squares = var * count
    else:
        mean = squares = x.sum(dims)
    rows = gather(torch.cat([x.new_tensor([number, count]), mean, squares]))
    found = rows[:, 0].detach()
    if bool((found != number).any()):
        raise GroupBroken(
            "the chunks run different layers: while one is at the synchronised batch norm number "
            f"{number} of the module, another one is at number {int(found[found != number][0])}. "
            "What decides which layers run must be the same for all chunks"
        )
    counts = rows[:, 1:2].detach()
    total = float(counts.sum())
    if total <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {shape} and as "
            "good as nothing in the other chunks"
        )
    means, parts = rows[:, 2 : 2 + channels], rows[:, 2 + channels :]
    mean = (counts * means).sum(0) / total
    var = (parts + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def convert_sync_batchnorm(module: M) -> M:
    """Make all batch norms of a module use the statistics of the whole batch, in training.

    ::

        model = DataParallel(convert_sync_batchnorm(net), ["cpu", "cpu"])
        model(x).square().mean().backward()

    Outputs, gradients and running statistics are then those of the plain module on the whole
    batch, but for the order of sums. Each chunk needs a replica of its own, and a call waits for a
    new one where a replica died. Keys of ``state_dict()`` stay as they are.

    Args:
        module: The module; its batch norms change their class, in place.

    Returns:
        The module.

    Raises:
        TypeError: It is no module, or one of its batch norms is of a class of its own.
        ValueError: A batch norm does not know its number of channels yet.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm: expected a module, got {type(module).__name__}")
    found = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, SyncBatchNorm)
    ]
    for name, part in found:
        if isinstance(part, _LAZY):
            raise ValueError(
                f"convert_sync_batchnorm: {name or 'the module'} is lazy: run the module before"
            )
        if type(part) not in _CONVERTED:
            raise TypeError(
                f"convert_sync_batchnorm: {name or 'the module'} is a {type(part).__name__}, a "
                "class of its own, and its forward cannot be replaced by that of batch norm"
            )
    for _, part in found:
        part.__class__ = SyncBatchNorm
        part.process_group = None  # type: ignore[assignment]
        SyncBatchNorm.made = True
    every = [part for part in module.modules() if isinstance(part, SyncBatchNorm)]
    for number, part in enumerate(every, 1):
        part.number = number
    return module

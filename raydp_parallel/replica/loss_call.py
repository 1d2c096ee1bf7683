"""`LossCall`: the loss of one chunk, computed where its outputs are, so that numbers travel and no
output.

[Note: a loss in parts]
A mean over the batch is no mean of the chunks' means: chunks differ in rows, and in what a
criterion leaves out (``ignore_index``) or weighs. So each chunk gives two numbers: the sum of its
losses, and what the criterion would divide by. The batch's loss is the sum of the former over that
of the latter. Torch's criteria give a loss for each element with ``reduction="none"``, and what
they divide by is known. Of another criterion it has to be said.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydp_parallel import batch

_MODULES: dict[Any, Callable[..., Tensor]] = {
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.CTCLoss: F.ctc_loss,
    nn.CosineEmbeddingLoss: F.cosine_embedding_loss,
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.GaussianNLLLoss: F.gaussian_nll_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.HuberLoss: F.huber_loss,
    nn.KLDivLoss: F.kl_div,
    nn.L1Loss: F.l1_loss,
    nn.MSELoss: F.mse_loss,
    nn.MarginRankingLoss: F.margin_ranking_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
    nn.NLLLoss: F.nll_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.TripletMarginLoss: F.triplet_margin_loss,
    nn.TripletMarginWithDistanceLoss: F.triplet_margin_with_distance_loss,
}
"""Torch's criteria, and the functions that they call."""

_ROWS = {
    F.cosine_embedding_loss: 2,
    F.cross_entropy: 2,
    F.ctc_loss: 3,
    F.multi_margin_loss: 2,
    F.multilabel_margin_loss: 2,
    F.multilabel_soft_margin_loss: 2,
    F.nll_loss: 2,
    F.triplet_margin_loss: 2,
    F.triplet_margin_with_distance_loss: 2,
}
"""Those with one loss for each row, or position, and the fewest dimensions of an output with rows.
All others have one for each element.
"""

_FUNCTIONS = frozenset(_MODULES.values())


def function_of(criterion: Any) -> Callable[..., Tensor] | None:
    """The function of torch that computes a criterion; None if it is not one of torch's."""
    if isinstance(criterion, nn.Module):
        for kind, function in _MODULES.items():
            if isinstance(criterion, kind) and type(criterion).forward is kind.forward:
                return function
        return None
    plain = criterion
    if isinstance(plain, functools.partial) and not plain.args:
        plain = plain.func
    try:
        return plain if plain in _FUNCTIONS else None
    except TypeError:  # it cannot be hashed
        return None


@dataclass(frozen=True)
class LossCall:
    """Called with a module and the arguments of `DataParallel.with_loss`'s wrapper, it gives the
    loss of one chunk.

    Attributes:
        criterion: What is called with the output and the targets.
        targets: How many of the last positional arguments are targets; or the names of the keyword
            arguments that are.
        reduction: What the criterion gives: a mean, a sum, or ``"none"``: what is gathered as any
            output; for ``nn.KLDivLoss`` also ``"batchmean"``.
        count: What a mean is divided by, of the output and the targets; None is the rows, but for
            torch's criteria.
        dim: The dimension along which the batch is split.
        whole: Whether one chunk is the whole batch, so that nothing is left to be joined.
    """

    criterion: Callable[..., Any]
    targets: int | tuple[str, ...] = 1
    reduction: str = "mean"
    count: Callable[..., Any] | None = None
    dim: int = 0
    whole: bool = False

    @property
    def joins(self) -> bool:
        """Whether chunks give the parts of one number."""
        return self.reduction != "none" and not self.whole

    def __call__(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loss, or its parts; see the note."""
        inputs, targets, others = self.divided(args, kwargs)
        output = module(*inputs, **others)
        if not self.joins:
            return self.criterion(output, *targets)
        function = function_of(self.criterion)
        if function is None:
            return self._own(output, targets, batch.rows(args, kwargs, self.dim, None))
        return self._of_torch(function, output, targets)

    def for_chunks(self, chunks: int, dim: int) -> LossCall:
        """The same for a batch in so many chunks, of one of them.

        Raises:
            ValueError: The criterion's rows are along dimension 0, and the batch's are not.
        """
        if chunks == 1:
            return replace(self, whole=True)
        function = function_of(self.criterion)
        if dim != 0 and (function in _ROWS or self.reduction == "batchmean"):
            raise ValueError(
                f"with_loss: the rows of {getattr(function, '__name__', '')} are along dimension "
                f"0, and the batch is split along {dim}"
            )
        return replace(self, whole=False, dim=dim)

    def joined(self, parts: Sequence[Any], place: Any) -> Tensor:
        """The batch's loss, of what its chunks gave, on the device ``place``."""
        if self.whole:
            parts = [(_number(parts[0]), None, None)]
        total, divisor, like = batch.gather(parts, place, scalars="sum")
        if divisor is not None:
            total = total / divisor.to(total.dtype)
        found: Tensor = total if like is None else total.to(like.dtype)
        return found

    def divided(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Any], dict[str, Any]]:
        """The module's positional arguments, the targets, and its keyword arguments.

        Raises:
            TypeError: A target is not among the arguments.
        """
        if isinstance(self.targets, int):
            first = len(args) - self.targets
            if first < 0:
                raise TypeError(
                    f"with_loss: got {len(args)} positional arguments, of which the last "
                    f"{self.targets} are targets; with_loss(targets=...) says how many, or which "
                    "keyword arguments"
                )
            return args[:first], args[first:], kwargs
        missing = [name for name in self.targets if name not in kwargs]
        if missing:
            raise TypeError(f"with_loss: the keyword arguments {missing} are targets, and missing")
        others = {name: value for name, value in kwargs.items() if name not in self.targets}
        return args, [kwargs[name] for name in self.targets], others

    def _own(self, output: Any, targets: Sequence[Any], rows: int | None) -> Any:
        """The parts of the user's own criterion."""
        value = _number(self.criterion(output, *targets))
        if self.reduction == "sum":
            return _parts(value, None)
        divisor: Any = rows
        if self.count is not None:
            divisor = self.count(output, *targets)
        if divisor is None:
            raise ValueError(
                "with_loss: no argument is a tensor with rows, so the means of chunks cannot be "
                "weighed by them: give with_loss(count=...)"
            )
        number = torch.as_tensor(divisor, dtype=torch.float64, device=value.device)
        if number.dim() or not number >= 0:
            raise ValueError(f"with_loss: count gave {divisor!r}, expected a number, not negative")
        # The mean of nothing is no number.
        total = (
            _wide(value) * number.to(_wide(value).dtype) if number else _wide(value.new_zeros(()))
        )
        return _parts(total, number, value)

    def _of_torch(
        self, function: Callable[..., Tensor], output: Any, targets: Sequence[Any]
    ) -> Any:
        """The parts of one of torch's criteria."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"with_loss: the module returned a {type(output).__name__}, and "
                f"{function.__name__} takes a tensor: give a function that takes the one from the "
                "other, with its reduction"
            )
        given = inspect.signature(function).bind(output, *targets).arguments
        _check_rows(function, output, given, self.dim)
        if isinstance(self.criterion, nn.Module):
            criterion: Any = copy.copy(self.criterion)
            criterion.reduction = "none"
            settings = vars(criterion) | criterion._buffers
        else:
            criterion = functools.partial(self.criterion, reduction="none")
            settings = criterion.keywords
        losses = criterion(output, *targets)
        settings = {**settings, **given}
        if function is F.ctc_loss and self.reduction == "mean":  # over sequences, of their means
            lengths = torch.as_tensor(settings["target_lengths"], device=losses.device)
            losses = losses / lengths.clamp(min=1)
        divisor: Any = None
        if self.reduction == "mean":
            divisor = _divisor(function, losses, output, settings)
        elif self.reduction == "batchmean":
            divisor = len(output)
        if divisor is not None:
            divisor = torch.as_tensor(divisor, device=losses.device).to(torch.float64)
        return _parts(_wide(losses).sum(), divisor, losses)


def loss_call(criterion: Any, targets: Any, reduction: Any, count: Any) -> LossCall:
    """What `DataParallel.with_loss` was given, checked.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: It is not known how the losses of chunks become that of the batch.
    """
    if not callable(criterion) or isinstance(criterion, type):
        raise TypeError(
            "with_loss: expected a criterion that is called with the output and the targets, such "
            f"as torch.nn.CrossEntropyLoss(), got {criterion!r}"
        )
    if reduction not in (None, "mean", "sum", "none", "batchmean"):
        raise ValueError(f"with_loss: reduction={reduction!r}, expected 'mean', 'sum' or 'none'")
    if count is not None and not callable(count):
        raise TypeError(f"with_loss: count must be a function, got {type(count).__name__}")
    function = function_of(criterion)
    if function is None:
        reduction = _told(criterion, reduction, count)
    elif count is not None:
        raise ValueError(
            f"with_loss: what {function.__name__} divides by is known, so it takes no count"
        )
    elif isinstance(criterion, nn.Module):
        if reduction not in (None, criterion.reduction):
            raise ValueError(
                f"with_loss: {type(criterion).__name__} has reduction={criterion.reduction!r}, "
                f"and reduction={reduction!r} was given"
            )
        reduction = criterion.reduction
    else:
        keywords = getattr(criterion, "keywords", {})
        if {"size_average", "reduce"} & keywords.keys():
            raise ValueError("with_loss: size_average and reduce are deprecated: give reduction")
        reduction = reduction or keywords.get("reduction", "mean")
        criterion = functools.partial(criterion, reduction=reduction)
    return LossCall(criterion, _checked_targets(targets), reduction, count)


def _told(criterion: Any, reduction: Any, count: Any) -> str:
    """The reduction of a criterion that is not one of torch's."""
    name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
    if reduction == "batchmean" or (count is not None and reduction not in (None, "mean")):
        raise ValueError(
            f"with_loss: reduction={reduction!r} of {name}: expected 'mean', 'sum' or 'none', and "
            "a count for a mean alone"
        )
    if reduction is None and count is None:
        raise ValueError(
            f"with_loss: how do the losses of chunks become that of the batch? {name} is not one "
            "of torch's criteria: give reduction='mean' (over the rows), 'sum' or 'none', or for a "
            "mean count=..., a function of the output and the targets that says what it is divided "
            "by. A loss that compares rows with each other is none of these: compute it in this "
            "process, of the model's output"
        )
    return reduction or "mean"


def _checked_targets(targets: Any) -> int | tuple[str, ...]:
    if isinstance(targets, int) and not isinstance(targets, bool) and targets >= 0:
        return targets
    names = (targets,) if isinstance(targets, str) else targets
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise TypeError(
        f"with_loss: targets={targets!r}, expected how many of the last positional arguments are "
        "targets, or the names of keyword arguments"
    )


def _number(value: Any) -> Tensor:
    if isinstance(value, Tensor) and not value.dim():
        return value
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise TypeError(
        f"with_loss: the criterion returned a {type(value).__name__}{shape}, expected a tensor "
        "with one number; reduction='none' gathers whatever it returns"
    )


def _parts(
    total: Tensor, divisor: Tensor | None, like: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A chunk's total, what it is divided by, and, if the loss has another dtype, a tensor without
    elements that has it.
    """
    same = like is None or like.dtype == total.dtype
    return total, divisor, None if same or like is None else like.new_empty(0)


def _wide(losses: Tensor) -> Tensor:
    """Losses that can be added up: a sum of many in half precision may be infinite."""
    half = losses.dtype in (torch.float16, torch.bfloat16)
    return losses.float() if half else losses


def _divisor(
    function: Callable[..., Tensor], losses: Tensor, output: Tensor, given: dict[str, Any]
) -> Any:
    """What the mean of a criterion is divided by."""
    weight = given.get("weight")
    if function in (F.mse_loss, F.l1_loss) and weight is not None:
        return weight.sum()
    if function not in (F.cross_entropy, F.nll_loss):
        return losses.numel()
    target = given["target"]
    if function is F.cross_entropy and target.shape == output.shape:  # of probabilities
        return output.numel() // output.shape[1] if output.shape[1] else 0
    kept = target != given.get("ignore_index", -100)
    if weight is None:
        return kept.sum()
    return (weight.take(target.masked_fill(~kept, 0).long()) * kept).sum()


def _check_rows(
    function: Callable[..., Tensor], output: Tensor, given: dict[str, Any], dim: int
) -> None:
    """Refuse outputs that a criterion would not take for rows: its loss of all chunks would be
    another than that of the batch, and it would not say so.

    Raises:
        ValueError: The output has no rows, or the targets have others.
    """
    least = _ROWS.get(function, 1)
    if output.dim() < least or not -output.dim() <= dim < output.dim():
        raise ValueError(
            f"with_loss: the module returned a tensor of shape {tuple(output.shape)}, which has no "
            f"rows for {function.__name__}: expected at least {least} dimensions, and rows along "
            f"dim {dim}"
        )
    if function is F.ctc_loss:
        if isinstance(given.get("targets"), Tensor) and given["targets"].dim() < 2:
            raise ValueError(
                "with_loss: targets of ctc_loss that are concatenated cannot be split by rows; "
                "give them as a tensor of sequences × length"
            )
        return
    if function in _ROWS:
        return  # torch compares the rows
    for name, other in given.items():
        if not isinstance(other, Tensor) or not other.dim() or other is output:
            continue
        alike = other.dim() == output.dim()
        if (not alike and name in ("target", "input2")) or (
            alike and other.shape[dim : dim + 1 or None] != output.shape[dim : dim + 1 or None]
        ):
            raise ValueError(
                f"with_loss: the output of a chunk has shape {tuple(output.shape)} and the {name} "
                f"{tuple(other.shape)}, which pairs other rows (dim {dim}) than in the whole "
                "batch: give both as many dimensions and rows"
            )

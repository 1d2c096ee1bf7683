"""`LossCall`: the loss of one chunk, computed where its outputs are, so that numbers travel and no
output.

[Note: a loss in parts]
A mean over the batch is no mean of the chunks' means: chunks differ in rows, and in what a
criterion leaves out (``ignore_index``) or weighs. So each chunk gives two numbers: the sum of its
losses, and what the criterion would divide by. The batch's loss is the sum of the former over that
of the latter. Torch's criteria give a loss for each element with ``reduction="none"``, and what
they divide by is known. Of another criterion it has to be said. A chunk that counts nothing gives a
zero that hangs on its outputs, so that its backward runs as that of the others does.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raydp_parallel import batch
from raydp_parallel.batch.containers import contents, kind_of

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

_SETTINGS = ("weight", "pos_weight", "ignore_index")
"""Those of a criterion that matter where a batch is split."""

_REDUCTIONS = ("mean", "sum", "none")

_FUNCTIONS = frozenset(_MODULES.values())

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def function_of(criterion: Any) -> Callable[..., Tensor] | None:
    """The function of torch that computes a criterion; None if it is not one of torch's, or if
    other code sees or changes its loss: it would get one for each element.
    """
    if isinstance(criterion, nn.Module):
        own = vars(criterion)
        if type(criterion).__call__ is not nn.Module.__call__ or "forward" in own:
            return None
        if any(own.get(hooks) for hooks in _HOOKS):
            return None
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
        known: Whether it was one of torch's when `reduction` was read.
    """

    criterion: Callable[..., Any]
    targets: int | tuple[str, ...] = 1
    reduction: str = "mean"
    count: Callable[..., Any] | None = None
    dim: int = 0
    whole: bool = False
    known: bool = False

    @property
    def joins(self) -> bool:
        """Whether chunks give the parts of one number."""
        return self.reduction != "none" and not self.whole

    def __call__(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loss, or its parts; see the note."""
        inputs, targets, others = self.divided(args, kwargs)
        output = module(*inputs, **others)
        function = None if self.whole else function_of(self.criterion)
        if function is not None:
            return self._of_torch(function, output, targets)
        if not self.joins:
            return self.criterion(output, *targets)
        return self._own(output, targets, {*batch.sizes((args, kwargs), self.dim)})

    def for_chunks(self, chunks: int, dim: int) -> LossCall:
        """The same for a batch in so many chunks, of one of them.

        Raises:
            ValueError: The criterion's rows are along dimension 0, and the batch's are not; or it
                was changed so that it is not known any more what it gives.
        """
        function, reduction = function_of(self.criterion), self.reduction
        if (function is not None) != self.known:
            raise ValueError(
                f"with_loss: {type(self.criterion).__name__} got, or lost, hooks or a forward of "
                "its own: call with_loss() again, which then says what it has to know"
            )
        if function is not None and isinstance(self.criterion, nn.Module):
            reduction = _reduction(function, self.criterion.reduction)  # as it is by now
        if chunks == 1:
            return replace(self, whole=True, reduction=reduction)
        if dim != 0 and (function in _ROWS or reduction == "batchmean"):
            raise ValueError(
                f"with_loss: the rows of {getattr(function, '__name__', '')} are along dimension "
                f"0, and the batch is split along {dim}"
            )
        return replace(self, whole=False, dim=dim, reduction=reduction)

    def joined(self, parts: Sequence[Any], place: Any) -> Tensor:
        """The batch's loss, of what its chunks gave, on the device ``place``."""
        if self.whole:
            parts = [_parts(_number(parts[0]), None)]
        total, divisor, like, nothing = batch.gather(parts, place, scalars="sum")
        if nothing is not None and not divisor:
            total = total + parts[0][3].to(total.device)
        elif divisor is not None:
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

    def _own(self, output: Any, targets: Sequence[Any], rows: set[int]) -> Any:
        """The parts of the user's own criterion. ``rows`` are the sizes of the chunk's tensors."""
        value = _number(self.criterion(output, *targets))
        if self.reduction == "sum":
            return _parts(value, None)
        if self.count is not None:
            divisor: Any = self.count(output, *targets)
        elif len(rows) == 1:
            (divisor,) = rows
            _warn_of_rows(value, output, divisor)
        elif rows:
            raise ValueError(
                "with_loss: the rows of a chunk are ambiguous, because its tensors have "
                f"{sorted(rows)} along dim {self.dim}: give with_loss(count=...)"
            )
        else:
            raise ValueError(
                "with_loss: no argument is a tensor with rows, so the means of chunks cannot be "
                "weighed by them: give with_loss(count=...)"
            )
        number = torch.as_tensor(divisor, dtype=torch.float64, device=value.device)
        if number.dim() or not number >= 0:
            raise ValueError(f"with_loss: count gave {divisor!r}, expected a number, not negative")
        wide = _wide(value)
        if number:
            return _parts(wide * number.to(wide.dtype), number, value, value.new_zeros(()))
        # The mean of nothing may be no number, and is the batch's only if all chunks have nothing.
        return _parts(_zero_of(output, wide), number, value, value)

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
        if {"size_average", "reduce", "reduction"} & given.keys():
            raise ValueError(
                f"with_loss: {function.__name__} got {len(targets)} targets, one of which would be "
                "its reduction: with_loss(targets=...) says how many there are"
            )
        if isinstance(self.criterion, nn.Module):
            criterion: Any = copy.copy(self.criterion)
            criterion.reduction = "none"
            held = {name: getattr(criterion, name, None) for name in _SETTINGS}
            settings = {name: value for name, value in held.items() if value is not None}
        else:
            criterion = functools.partial(self.criterion, reduction="none")
            settings = criterion.keywords
        _check_rows(function, output, given, settings, self.dim)
        losses = criterion(output, *targets)
        if self.reduction == "none":
            return losses
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
    if reduction not in (None, *_REDUCTIONS, "batchmean"):
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
    else:
        keywords = getattr(criterion, "keywords", {})
        if {"size_average", "reduce"} & keywords.keys():
            raise ValueError("with_loss: size_average and reduce are deprecated: give reduction")
        if isinstance(criterion, nn.Module):
            own: Any = criterion.reduction
        else:
            own = keywords.get("reduction", reduction or "mean")
        own = _reduction(function, own)
        if reduction not in (None, own):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise ValueError(
                f"with_loss: {name} has reduction={own!r}, and reduction={reduction!r} was given"
            )
        reduction = own
        if not isinstance(criterion, nn.Module):
            criterion = functools.partial(criterion, reduction=reduction)
    checked = _checked_targets(targets)
    return LossCall(criterion, checked, reduction, count, known=function is not None)


def _reduction(function: Callable[..., Tensor], found: Any) -> str:
    """The reduction of one of torch's criteria, in today's words.

    Raises:
        ValueError: The criterion has no such reduction.
    """
    if found == "elementwise_mean":
        return "mean"
    if found in _REDUCTIONS or (found == "batchmean" and function is F.kl_div):
        return str(found)
    raise ValueError(
        f"with_loss: {function.__name__} with reduction={found!r}: expected 'mean', 'sum' or 'none'"
    )


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
    total: Tensor,
    divisor: Tensor | None,
    like: Tensor | None = None,
    nothing: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """A chunk's total; what it is divided by; if the loss has another dtype, a tensor without
    elements that has it; and what the criterion gives where nothing counts, if it is not known.
    """
    same = like is None or like.dtype == total.dtype
    return total, divisor, None if same or like is None else like.new_empty(0), nothing


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    for part in contents(value, kind_of(value)).values():
        yield from _tensors(part)


def _zero_of(output: Any, like: Tensor) -> Tensor:
    """A zero that has the graph of the outputs, which get gradients of zeros: replicas may wait for
    each other in backward.
    """
    zero = like.new_zeros(())
    for tensor in _tensors(output):
        if tensor.requires_grad:
            zero = zero + tensor.flatten()[:0].sum().to(zero.dtype)
    return zero


def _warn_of_rows(value: Tensor, output: Any, rows: int) -> None:
    """Say that a mean may be over something else than rows: the mean of nothing shows it."""
    if not rows or value.isfinite() or not all(t.isfinite().all() for t in _tensors(output)):
        return
    warnings.warn(
        f"with_loss: the criterion gave {value.item()} for a chunk with finite outputs. If it "
        "leaves something out, its mean is not over rows: give with_loss(count=...), the number "
        "that it divides by. This is said once",
        stacklevel=2,
    )


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
        return weight.double().sum()
    if function not in (F.cross_entropy, F.nll_loss):
        return losses.numel()
    target = given["target"]
    if function is F.cross_entropy and target.shape == output.shape:  # of probabilities
        return output.numel() // output.shape[1] if output.shape[1] else 0
    classes = target.long()  # a target of bytes would be compared with 156, and not with -100
    kept = classes != given.get("ignore_index", -100)
    if weight is None:
        return kept.sum()
    return (weight.double().take(classes.masked_fill(~kept, 0)) * kept).sum()


def _check_rows(
    function: Callable[..., Tensor],
    output: Tensor,
    given: dict[str, Any],
    settings: dict[str, Any],
    dim: int,
) -> None:
    """Refuse outputs that a criterion would not take for rows: its loss of all chunks would be
    another than that of the batch, and it would not say so.

    Raises:
        ValueError: The output has no rows, or the targets have others, or a setting has rows.
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
    if function in _ROWS and function is not F.multilabel_soft_margin_loss:
        return  # torch compares the rows
    from_end = dim - output.dim() if dim >= 0 else dim
    for name in ("weight", "pos_weight"):
        held = settings.get(name)
        if isinstance(held, Tensor) and held.dim() >= -from_end and held.shape[from_end] != 1:
            raise ValueError(
                f"with_loss: the {name} of {function.__name__} has shape {tuple(held.shape)}, so "
                "it has rows, which are not split with the batch: give it as a target, to the "
                "function"
            )
    for name, other in given.items():
        if not isinstance(other, Tensor) or not other.dim() or other is output:
            continue
        alike = other.dim() == output.dim()
        if (not alike and name in ("target", "input2", "weight", "pos_weight")) or (
            alike and other.shape[dim : dim + 1 or None] != output.shape[dim : dim + 1 or None]
        ):
            raise ValueError(
                f"with_loss: the output of a chunk has shape {tuple(output.shape)} and the {name} "
                f"{tuple(other.shape)}, which pairs other rows (dim {dim}) than in the whole "
                "batch: give both as many dimensions and rows"
            )

"""`LossCall`: the loss of one chunk, computed where its outputs are, so that no output travels.

A mean over the batch is no mean of the chunks' means: chunks differ in rows, and in what a
criterion leaves out or weighs. So each chunk gives the sum of its losses and the number that the
criterion would divide by, and the driver divides. A chunk that counts nothing gives a zero that
hangs on its outputs, so that its backward runs as that of the others does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydp_parallel import batch
from raydp_parallel.batch import Function, Keywords

_FORWARDS: dict[Function, tuple[Function, int]] = {
    nn.BCELoss.forward: (F.binary_cross_entropy, 1),
    nn.BCEWithLogitsLoss.forward: (F.binary_cross_entropy_with_logits, 1),
    nn.CTCLoss.forward: (F.ctc_loss, 3),
    nn.CosineEmbeddingLoss.forward: (F.cosine_embedding_loss, 2),
    nn.CrossEntropyLoss.forward: (F.cross_entropy, 2),
    nn.GaussianNLLLoss.forward: (F.gaussian_nll_loss, 1),
    nn.HingeEmbeddingLoss.forward: (F.hinge_embedding_loss, 1),
    nn.HuberLoss.forward: (F.huber_loss, 1),
    nn.KLDivLoss.forward: (F.kl_div, 1),
    nn.L1Loss.forward: (F.l1_loss, 1),
    nn.MSELoss.forward: (F.mse_loss, 1),
    nn.MarginRankingLoss.forward: (F.margin_ranking_loss, 1),
    nn.MultiLabelMarginLoss.forward: (F.multilabel_margin_loss, 2),
    nn.MultiLabelSoftMarginLoss.forward: (F.multilabel_soft_margin_loss, 2),
    nn.MultiMarginLoss.forward: (F.multi_margin_loss, 2),
    nn.NLLLoss.forward: (F.nll_loss, 2),
    nn.PoissonNLLLoss.forward: (F.poisson_nll_loss, 1),
    nn.SmoothL1Loss.forward: (F.smooth_l1_loss, 1),
    nn.SoftMarginLoss.forward: (F.soft_margin_loss, 1),
    nn.TripletMarginLoss.forward: (F.triplet_margin_loss, 2),
    nn.TripletMarginWithDistanceLoss.forward: (F.triplet_margin_with_distance_loss, 2),
}
"""Torch's criteria by their forwards: their functions, and the fewest dimensions of an output with
rows: 1 for those that have a loss for each element, more for those that have one for each row or
position.
"""

_DIMS = dict(_FORWARDS.values())
_OWN = "forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""What a criterion may have that sees or changes its loss."""


def function_of(criterion: object) -> Function | None:
    """The function of torch that computes a criterion; None if it is not one of torch's, or if
    other code sees or changes its loss, of which nothing is known.
    """
    if isinstance(criterion, nn.Module):
        own, cls = vars(criterion), type(criterion)
        plain = cls.__call__ is nn.Module.__call__ and not any(map(own.get, _OWN))
        found = _FORWARDS.get(getattr(cls, "forward", nn.Module.forward))  # a script has none
        return found[0] if plain and found else None
    if isinstance(criterion, functools.partial) and not criterion.args:
        criterion = criterion.func
    return criterion if inspect.isroutine(criterion) and criterion in _DIMS else None


@dataclass(frozen=True)
class LossCall:
    """Called in a replica with a module and the arguments of a wrapper with a loss, it gives what
    is gathered, or the parts of one number: sum, divisor or None, and an empty tensor of its dtype.
    """

    criterion: Function
    targets: int | tuple[str, ...] = 1  # the last positional arguments, or keywords
    reduction: str | None = None
    count: Function | None = None  # the divisor, of the output and the targets
    dim: int = 0  # along which the batch is split
    whole: bool = False  # one chunk is the batch

    def for_chunks(self, chunks: int, dim: int) -> LossCall:
        """The same for one of so many chunks of a batch, with the reduction that the criterion has
        by now; raises an error if it is not known how their losses become that of the batch.
        """
        function, reduction = function_of(self.criterion), self.reduction
        name = getattr(self.criterion, "__qualname__", type(self.criterion).__qualname__)
        if function is not None:
            settings = getattr(self.criterion, "keywords", {})
            if {"size_average", "reduce"} & settings.keys():
                raise ValueError("with_loss: size_average, reduce are deprecated: give reduction")
            own = getattr(self.criterion, "reduction", settings.get("reduction", "mean"))
            if self.count is not None or reduction not in (None, own):
                raise ValueError(f"{name} has reduction={own!r}, and takes no count or other")
            by_rows = _DIMS[function] > 1 or own == "batchmean"
            if chunks > 1 and dim != 0 and by_rows:
                raise ValueError(f"{name} takes rows along 0, and the batch is split along {dim}")
            reduction = own
        elif reduction not in (("mean", "sum", "none") if self.count is None else (None, "mean")):
            raise ValueError(
                f"with_loss: {name} needs reduction='mean' (over the rows), 'sum' or 'none', or "
                f"count= for a mean alone, a function that gives the divisor; got {reduction!r}. "
                "A loss that compares rows with each other is none of these: compute it of model(x)"
            )
        return replace(self, reduction=reduction or "mean", dim=dim, whole=chunks == 1)

    def __call__(self, module: Function, /, *args: object, **kwargs: object) -> object:
        inputs, targets, others = self.divided(args, kwargs)
        output = module(*inputs, **others)
        function = None if self.whole else function_of(self.criterion)
        given = {} if function is None else self._given(function, output, targets)
        value = self.criterion(output, *targets)
        if self.reduction == "none":
            return value
        if not isinstance(value, Tensor) or value.dim():
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TypeError(
                f"with_loss: the criterion returned a {type(value).__name__}{shape}, expected a "
                "tensor with one number; reduction='none' gathers whatever it returns"
            )
        # A sum of many in half precision may be infinite.
        wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        if self.whole or self.reduction == "sum":
            return wide, None, value.new_empty(0)
        if function is not None:
            divisor = _divisor(function, output, given, self.dim)
        elif self.count is not None:
            divisor = self.count(output, *targets)
        else:
            rows = {*batch.sizes((args, kwargs), self.dim)}
            if len(rows) != 1:
                raise ValueError(
                    f"with_loss: {sorted(rows) or 'no argument is a tensor with rows'} along dim "
                    f"{self.dim}: the rows of a chunk are not known, so give with_loss(count=...)"
                )
            (divisor,) = rows
        number = torch.as_tensor(divisor, dtype=torch.float64, device=value.device)
        if number.dim() or not number >= 0:
            raise ValueError(f"with_loss: count gave {divisor!r}, expected a number, not negative")
        total = wide * number.to(wide.dtype)
        if not number and function is not None:  # rows that weigh nothing are smoothed all the same
            total = function(**given | {"reduction": "sum"}).to(wide.dtype)
        elif not number:  # the mean of nothing may be no number, and backward needs a graph
            nothing = [tensor.flatten()[:0].sum() for tensor in batch.tensors_in(output)]
            total = sum(nothing, wide.new_zeros(())).to(wide.dtype)
        return total, number, value.new_empty(0)

    def divided(
        self, args: Sequence[object], kwargs: Keywords
    ) -> tuple[Sequence[object], Sequence[object], Keywords]:
        """The module's positional arguments, the targets, and its keyword arguments."""
        if isinstance(self.targets, int):
            first = len(args) - self.targets
            if first < 0 or (first == 0 < self.targets and not kwargs):
                raise TypeError(
                    f"with_loss: got {len(args)} positional arguments, and the last {self.targets} "
                    "are targets, as in model(x, y): with_loss(targets=...) says how many, or which"
                )
            return args[:first], args[first:], kwargs
        missing = [name for name in self.targets if name not in kwargs]
        if missing:
            raise TypeError(f"with_loss: the keyword arguments {missing} are targets, and missing")
        others = {name: value for name, value in kwargs.items() if name not in self.targets}
        return args, [kwargs[name] for name in self.targets], others

    def joined(self, parts: Sequence[Any], place: torch.device) -> Tensor:
        """The batch's loss on a device, of the parts that its chunks gave."""
        total = torch.stack([part[0].to(place) for part in parts]).sum()
        if parts[0][1] is not None:
            total = total / sum(part[1].to(place) for part in parts).to(total.dtype)
        return total.to(parts[0][2].dtype)

    def _given(self, function: Function, output: object, targets: Sequence[object]) -> Keywords:
        """The arguments of a function of torch by name. Refuses outputs and targets of which chunks
        would pair other rows than the batch.
        """
        least, dim, name = _DIMS[function], self.dim, f"with_loss: {function.__name__}"
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{name} takes a tensor, and the module returned a {type(output).__name__}: give a "
                "function that takes the one from the other, with its reduction"
            )
        shape = tuple(output.shape)
        if len(shape) < least or not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"{name} got shape {shape}, expected at least {least} dims and rows along dim {dim}"
            )
        signature, own = inspect.signature(function), vars(self.criterion)
        given = signature.bind(output, *targets).arguments
        own = own | own.get("_buffers", {}) | getattr(self.criterion, "keywords", {})
        settings = {key: held for key, held in own.items() if key in signature.parameters}
        if function is F.ctc_loss and getattr(given.get("targets"), "ndim", 2) < 2:
            raise ValueError(f"{name}: give targets of sequences × length, not concatenated ones")
        at = dim - len(shape) if dim >= 0 else dim
        # Of the others torch compares the rows.
        elements = least == 1 or function is F.multilabel_soft_margin_loss
        for key, held in (settings | given).items() if elements else ():
            if not isinstance(held, Tensor) or not held.dim():
                continue
            alike = held.dim() == len(shape)
            if key in given and (held.size(at) != shape[at] if alike else key != "var"):
                raise ValueError(
                    f"{name}: the output has shape {shape} and the {key} {tuple(held.shape)}, "
                    f"which pairs other rows (dim {dim}) than in the whole batch"
                )
            if key not in given and held.dim() >= -at and held.size(at) != 1:
                raise ValueError(
                    f"{name} has a {key} of shape {tuple(held.shape)}, so it has rows, which are "
                    "not split with the batch: give it as a target, to the function"
                )
        return settings | given


def loss_call(
    criterion: Function, targets: object, reduction: str | None, count: Function | None
) -> LossCall:
    """Check the arguments of `DataParallel.with_loss`."""
    if not callable(criterion) or isinstance(criterion, type):
        raise TypeError(f"with_loss: expected a criterion, as nn.MSELoss(), got {criterion!r}")
    if count is not None and not callable(count):
        raise TypeError(f"with_loss: count must be a function, got {type(count).__name__}")
    names = [targets] if isinstance(targets, str) else targets
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        targets = tuple(names)
    elif type(targets) is not int or targets < 0:
        raise TypeError(f"with_loss: targets={targets!r}, expected how many, or names of keywords")
    if reduction is not None and inspect.isroutine(criterion) and criterion in _DIMS:
        criterion = functools.partial(criterion, reduction=reduction)
    found = LossCall(criterion, targets, reduction, count)
    found.for_chunks(1, 0)  # raises what is wrong
    # One of torch's has its own in each call.
    return replace(found, reduction=None) if function_of(criterion) else found


def _divisor(function: Function, output: Tensor, given: Keywords, dim: int) -> object:
    """The number that the mean of a criterion is divided by, or one in proportion to it."""
    weight, target = given.get("weight"), given.get("target", output)
    if function is F.ctc_loss:
        return len(given["target_lengths"])
    if function in (F.mse_loss, F.l1_loss) and weight is not None:
        return weight.double().sum()
    of_classes = function in (F.cross_entropy, F.nll_loss)
    if not of_classes or target.shape == output.shape:  # probabilities of classes
        return output.size(dim)
    classes = target.long()  # a target of bytes would be compared with 156, and not with -100
    kept = classes != given.get("ignore_index", -100)
    if weight is None:
        return kept.sum()
    return (weight.double().take(classes.masked_fill(~kept, 0)) * kept).sum()

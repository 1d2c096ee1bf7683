"""`LossCall`: the parts of a loss, which give the criterion's own on the whole batch.

The module is the identity and all is computed here: what matters is what is added up, and divided.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydp_parallel.replica.loss_call import LossCall, loss_call

SIZES = (3, 3, 1)


def itself(out: Any) -> Any:
    """The module."""
    return out


def parts_of(call: LossCall, sizes: tuple[int, ...], *args: Tensor) -> list[Any]:
    """What each chunk gives."""
    return [call(itself, *part) for part in zip(*[a.split([*sizes]) for a in args], strict=True)]


def split_loss(
    criterion: Any, *args: Tensor, sizes: tuple[int, ...] = SIZES, **settings: Any
) -> Tensor:
    """The loss of a batch in chunks; of more than an output and a target, the latter are more."""
    call = loss_call(
        criterion,
        settings.get("targets", len(args) - 1),
        settings.get("reduction"),
        settings.get("count"),
    ).for_chunks(len(sizes), 0)
    parts = parts_of(call, sizes, *args)
    return torch.cat(parts) if call.reduction == "none" else call.joined(parts, "cpu")


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    """Outputs and targets."""
    torch.manual_seed(0)
    return torch.randn(7, *shape, requires_grad=True), torch.randn(7, *shape)


def labels() -> tuple[Tensor, Tensor]:
    """Outputs of four classes, and classes, some left out."""
    out, _ = numbers(4)
    return out, torch.tensor([0, -100, 2, 3, 1, -100, -100])


# --- what the mean is over ---


@pytest.mark.filterwarnings("ignore:.*elementwise_mean:UserWarning")
def test_an_old_name_of_the_mean() -> None:
    """Is the mean."""
    out, y = numbers(4)
    for criterion in (
        nn.MSELoss(reduction="elementwise_mean"),
        functools.partial(F.mse_loss, reduction="elementwise_mean"),
    ):
        torch.testing.assert_close(split_loss(criterion, out, y), F.mse_loss(out, y))


def test_an_unknown_reduction_is_refused() -> None:
    """It gave the sum."""
    out, y = numbers(4)
    for criterion, settings in (
        (nn.MSELoss(reduction="Mean"), {}),
        (F.mse_loss, {"reduction": "batchmean"}),
        (functools.partial(F.mse_loss, reduction="median"), {}),
        (functools.partial(F.mse_loss, reduction=None), {}),
        (nn.MSELoss(reduction="batchmean"), {}),
    ):
        with pytest.raises(ValueError, match="mse_loss with reduction="):
            split_loss(criterion, out, y, **settings)
    with pytest.raises(ValueError, match="has reduction='sum', and reduction='mean' was given"):
        split_loss(functools.partial(F.mse_loss, reduction="sum"), out, y, reduction="mean")
    with pytest.raises(ValueError, match="got 3 targets, one of which would be its reduction"):
        split_loss(F.mse_loss, out, y, y, y)
    call = loss_call(F.kl_div, 1, "batchmean", None)
    assert call.for_chunks(2, 0).reduction == "batchmean"


def test_a_reduction_that_is_changed_later() -> None:
    """Counts, whether the batch is split or not."""
    out, y = numbers(4)
    criterion = nn.MSELoss()
    call = loss_call(criterion, 1, None, None)
    for reduction in ("sum", "none", "mean"):
        criterion.reduction = reduction
        split = call.for_chunks(3, 0)
        parts = parts_of(split, SIZES, out, y)
        found = torch.cat(parts) if reduction == "none" else split.joined(parts, "cpu")
        torch.testing.assert_close(found, criterion(out, y))
        alone = call.for_chunks(1, 0)
        assert alone.reduction == reduction
        torch.testing.assert_close(alone(itself, out, y), criterion(out, y))
    criterion.reduction = "Mean"
    with pytest.raises(ValueError, match="reduction='Mean'"):
        call.for_chunks(3, 0)


def test_class_weights_of_any_kind() -> None:
    """A buffer, a parameter, in half precision, in which their sum is infinite."""
    out, y = labels()
    frozen = nn.CrossEntropyLoss(torch.ones(4))
    del frozen.weight
    frozen.weight = nn.Parameter(torch.tensor([1.0, 2, 3, 4]), requires_grad=False)
    torch.testing.assert_close(split_loss(frozen, out, y), frozen(out, y))
    heavy = torch.full((4,), 3e4).half()  # three of them are more than half precision can hold
    found = split_loss(nn.CrossEntropyLoss(heavy), out.half() / 10, y, sizes=(5, 2))
    exact = F.cross_entropy(out / 10, y)
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=0)


def test_targets_of_bytes() -> None:
    """None of which is -100: 156 is another number."""
    out = torch.randn(4, 200)
    y = torch.tensor([156, 3, 156, 7], dtype=torch.uint8)
    expected = F.cross_entropy(out, y.long())
    torch.testing.assert_close(split_loss(nn.CrossEntropyLoss(), out, y, sizes=(3, 1)), expected)


# --- chunks in which nothing counts ---


def guarded(out: Tensor, y: Tensor) -> Tensor:
    """The mean of what is not left out; zero if that is nothing."""
    return F.cross_entropy(out, y, reduction="sum") / kept(out, y).clamp(min=1)


def kept(_out: Tensor, y: Tensor) -> Tensor:
    """How many are not left out."""
    return (y != -100).sum()


@pytest.mark.parametrize("criterion", [guarded, lambda out, y: F.cross_entropy(out, y)])
def test_a_batch_of_which_nothing_counts(criterion: Any) -> None:
    """Has the criterion's own loss, with a graph; one chunk of that kind changes nothing."""
    out, y = labels()
    loss = split_loss(criterion, out, y, count=kept)
    expected = criterion(out, y)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, out)[0], torch.autograd.grad(expected, out)[0]
    )
    nothing = torch.full_like(y, -100)
    loss = split_loss(criterion, out, nothing, count=kept)
    torch.testing.assert_close(loss, criterion(out, nothing), equal_nan=True)
    assert loss.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(loss, out)[0],
        torch.autograd.grad(criterion(out, nothing), out)[0],
        equal_nan=True,
    )


def test_a_chunk_of_which_nothing_counts_has_a_graph() -> None:
    """And gradients of zeros, also where the criterion's would be no numbers."""
    out, y = labels()

    def criterion(outs: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(outs["deep"][0], y, reduction="sum") / kept(out, y)

    def module(x: Tensor) -> Any:
        return {"deep": [x, x * 2]}

    call = loss_call(criterion, 1, None, kept).for_chunks(3, 0)
    total, counted, *_ = call(module, out[6:], y[6:])
    assert total.requires_grad and not counted
    assert torch.autograd.grad(total, out)[0].eq(0).all()


# --- rows ---


def test_no_tensor_says_how_many_rows_there_are() -> None:
    """If two say different numbers; the first one's would have been taken."""
    edges, nodes, y = torch.zeros(2, 6), torch.randn(4, 5), torch.randn(4, 5)

    def of_nodes(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean()

    call = loss_call(of_nodes, 1, "mean", None).for_chunks(2, 0)
    with pytest.raises(ValueError, match=r"rows of a chunk are ambiguous.*\[2, 4\].*count="):
        call(lambda edges, nodes: nodes, edges, nodes, y)
    counted = loss_call(of_nodes, 1, None, lambda out, y: len(y)).for_chunks(2, 0)
    assert counted(lambda edges, nodes: nodes, edges, nodes, y)[1] == 4
    summed = loss_call(of_nodes, 1, "sum", None).for_chunks(2, 0)
    assert summed(lambda edges, nodes: nodes, edges, nodes, y)[1] is None


def test_a_mean_over_something_else_than_rows_is_warned_of() -> None:
    """If a chunk shows it: its outputs are numbers, and its mean is not."""
    out, y = labels()

    def own(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    with pytest.warns(UserWarning, match=r"gave nan for a chunk with finite outputs.*count="):
        split_loss(own, out, y, reduction="mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_loss(own, out, y, count=kept)
        split_loss(own, out * float("inf"), y, reduction="mean")
        split_loss(own, out, y.clamp(min=0), reduction="mean")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_rows_that_would_pair_otherwise_are_refused(reduction: str) -> None:
    """With each reduction: the losses of (8, 1) and (8,) are (8, 8), and of chunks (4, 4)."""
    out, y = torch.randn(8, 1), torch.randn(8)
    with pytest.raises(ValueError, match="pairs other rows"):
        split_loss(nn.MSELoss(reduction=reduction), out, y, sizes=(4, 4))
    square, weight = torch.rand(8, 4), torch.rand(8)
    logits = functools.partial(F.binary_cross_entropy_with_logits, reduction=reduction)
    with pytest.raises(ValueError, match=r"and the weight .4,., which pairs other rows"):
        split_loss(logits, square, square, weight, sizes=(4, 4))
    expected = logits(square, square, weight.unsqueeze(1))
    found = split_loss(logits, square, square, weight.unsqueeze(1), sizes=(4, 4))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_settings_with_rows_are_refused(reduction: str) -> None:
    """They are not split with the batch."""
    out, y = torch.randn(4, 3), torch.rand(4, 3).round()
    rows = torch.rand(2, 1)
    for criterion in (
        nn.MultiLabelSoftMarginLoss(rows, reduction=reduction),
        nn.BCEWithLogitsLoss(rows, reduction=reduction),
        nn.BCEWithLogitsLoss(pos_weight=rows, reduction=reduction),
    ):
        with pytest.raises(ValueError, match=r"weight of .* has shape .2, 1., so it has rows"):
            split_loss(criterion, out, y, sizes=(2, 2))
    for right in (torch.rand(3), torch.rand(1, 3)):
        criterion = nn.BCEWithLogitsLoss(right, reduction=reduction)
        torch.testing.assert_close(split_loss(criterion, out, y, sizes=(2, 2)), criterion(out, y))


# --- which criteria are torch's ---


class Called(nn.MSELoss):
    """Computes more in `__call__`."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


def hooked(name: str, hook: Any) -> nn.Module:
    """A criterion with a hook."""
    criterion = nn.MSELoss()
    getattr(criterion, name)(hook)
    return criterion


def with_its_own_forward() -> nn.Module:
    """A criterion of which one instance computes something else."""
    criterion = nn.MSELoss()
    criterion.forward = lambda out, y: (out - y).abs().mean()
    return criterion


def test_a_criterion_with_code_of_ones_own_is_ones_own() -> None:
    """Hooks would get a loss for each element."""
    out, y = numbers(4)
    squared = hooked("register_forward_hook", lambda _m, _args, loss: loss.square())
    shifted = hooked("register_forward_pre_hook", lambda _m, args: (args[0] + 1, args[1]))
    for criterion in (Called(), squared, shifted, with_its_own_forward()):
        with pytest.raises(ValueError, match="not one of torch's criteria: give reduction="):
            loss_call(criterion, 1, None, None)
    call = loss_call(shifted, 1, "mean", None).for_chunks(3, 0)
    torch.testing.assert_close(call.joined(parts_of(call, SIZES, out, y), "cpu"), shifted(out, y))
    later = nn.MSELoss()
    call = loss_call(later, 1, None, None)
    later.register_forward_hook(lambda _m, _args, loss: loss.square())
    with pytest.raises(ValueError, match=r"call with_loss.. again"):
        call.for_chunks(3, 0)

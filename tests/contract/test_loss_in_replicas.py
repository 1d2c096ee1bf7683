"""`with_loss`: the loss is the criterion's on the plain module's output, in double precision."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import Apply, assert_same_grads, assert_same_state, carried
from torch import Tensor, nn

from raydp_parallel import DataParallel, Options, convert_sync_batchnorm

ROWS = 7
"""In three chunks of 3, 3 and 1 rows."""
SAME = nn.Identity()


class Head(nn.Module):
    """Outputs of any shape of a row, with which something is done at last."""

    def __init__(self, shape: tuple[int, ...] = (4,), last: Any = SAME) -> None:
        super().__init__()
        self.shape, self.last = shape, last
        self.linear = nn.Linear(5, int(torch.tensor(shape).prod()))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.linear(x).unflatten(-1, self.shape) if self.shape else x)


class Case(NamedTuple):
    """A criterion, what makes its targets, and the settings of `Head`."""

    criterion: Any
    targets: Callable[[], tuple[Any, ...]]
    shape: tuple[int, ...] = (4,)
    last: Callable[[Any], Any] = SAME


Targets = tuple[Tensor, ...]


def classes(*shape: int) -> Targets:
    """Classes, some of which are left out by ``ignore_index``: two rows, all of chunk 2."""
    target = torch.randint(0, 4, (ROWS, *shape))
    target[1], target[6:] = -100, -100
    return (target,)


def kept() -> Targets:
    """Classes of which none is left out."""
    return (classes()[0].abs() % 4,)


def like(*shape: int) -> Targets:
    """Numbers."""
    return (torch.randn(ROWS, *shape),)


def soft(*shape: int) -> Targets:
    """Probabilities of classes."""
    return (like(*(shape or (4,)))[0].softmax(1),)


def unit() -> Targets:
    """Numbers between 0 and 1."""
    return (like(4)[0].sigmoid(),)


def signs(*shape: int) -> Targets:
    """Ones, positive and negative."""
    return (torch.randint(0, 2, (ROWS, *shape)).mul(2).sub(1).double(),)


def texts() -> Targets:
    """Labels with their lengths, and those of the inputs."""
    labels, lengths = torch.randint(1, 4, (ROWS, 3)), torch.tensor([1, 2, 3, 1, 2, 3, 1])
    return labels, torch.full((ROWS,), 6), lengths


def logs_in_time(out: Tensor) -> Tensor:
    """Logarithms of probabilities, with time as the first dimension."""
    return out.transpose(0, 1).log_softmax(2)


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
SETTINGS = {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.2}
DISTANCE = nn.PairwiseDistance(3.0)
CASES: dict[str, Case] = {
    "cross entropy": Case(nn.CrossEntropyLoss(), classes),
    "weights": Case(nn.CrossEntropyLoss(weight=WEIGHT), classes),
    "smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "smoothing, weights": Case(nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), classes),
    "smoothing, no weight": Case(
        nn.CrossEntropyLoss(WEIGHT * (WEIGHT < 3), label_smoothing=0.1),
        lambda: (torch.tensor([3, 0, 1, 3, 2, 3, 3]),),
    ),
    "ignore_index": Case(nn.CrossEntropyLoss(ignore_index=2), kept),
    "soft": Case(nn.CrossEntropyLoss(), soft),
    "soft, weights": Case(nn.CrossEntropyLoss(WEIGHT), soft),
    "images": Case(nn.CrossEntropyLoss(WEIGHT), lambda: classes(3, 2), (4, 3, 2)),
    "soft images": Case(nn.CrossEntropyLoss(), lambda: soft(4, 3), (4, 3)),
    "nll": Case(nn.NLLLoss(WEIGHT), classes, last=nn.LogSoftmax(1)),
    "nll, images": Case(nn.NLLLoss(), lambda: classes(3), (4, 3), nn.LogSoftmax(1)),
    "mse": Case(nn.MSELoss(), lambda: like(4)),
    "mse, broadcast": Case(nn.MSELoss(), lambda: like(1)),
    "one number a row": Case(nn.MSELoss(), like, (1,), lambda out: out.squeeze(1)),
    "l1": Case(nn.L1Loss(), lambda: like(4)),
    "smooth l1": Case(nn.SmoothL1Loss(beta=0.5), lambda: like(4)),
    "huber": Case(nn.HuberLoss(delta=0.5), lambda: like(2, 3), (2, 3)),
    "bce": Case(nn.BCELoss(), unit, last=torch.sigmoid),
    "bce, weights": Case(nn.BCELoss(WEIGHT), unit, last=torch.sigmoid),
    "logits": Case(nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT + 1), unit),
    "kl": Case(nn.KLDivLoss(), soft),
    "kl, batchmean": Case(
        nn.KLDivLoss(reduction="batchmean", log_target=True), lambda: (soft()[0].log(),)
    ),
    "poisson": Case(nn.PoissonNLLLoss(full=True), lambda: (like(4)[0].exp(),)),
    "gaussian": Case(nn.GaussianNLLLoss(), lambda: (*like(4), like(1)[0].exp())),
    "soft margin": Case(nn.SoftMarginLoss(), lambda: signs(4)),
    "hinge": Case(nn.HingeEmbeddingLoss(0.5), lambda: signs(4)),
    "ranking": Case(nn.MarginRankingLoss(0.2), lambda: (*like(4), *signs(4))),
    "cosine": Case(nn.CosineEmbeddingLoss(0.2), lambda: (*like(4), *signs())),
    "triplet": Case(nn.TripletMarginLoss(swap=True), lambda: (*like(4), *like(4))),
    "triplet, distance": Case(
        nn.TripletMarginWithDistanceLoss(distance_function=DISTANCE), lambda: like(4) + like(4)
    ),
    "multi margin": Case(nn.MultiMarginLoss(weight=WEIGHT), kept),
    "multilabel margin": Case(
        nn.MultiLabelMarginLoss(), lambda: (torch.tensor([[0, 2, -1, -1]] * ROWS),)
    ),
    "multilabel soft margin": Case(
        nn.MultiLabelSoftMarginLoss(WEIGHT), lambda: (unit()[0].round(),)
    ),
    "ctc": Case(nn.CTCLoss(), texts, (6, 4), logs_in_time),
    "function": Case(F.cross_entropy, classes),
    "function, settings": Case(functools.partial(F.cross_entropy, **SETTINGS), kept),
    "function, weights of rows": Case(
        F.binary_cross_entropy_with_logits, lambda: (*unit(), like(1)[0].exp())
    ),
    "function, sum": Case(functools.partial(F.mse_loss, reduction="sum"), lambda: like(4)),
    "sum": Case(nn.CrossEntropyLoss(WEIGHT, reduction="sum"), classes),
    "sum, ctc": Case(nn.CTCLoss(reduction="sum"), texts, (6, 4), logs_in_time),
    "none": Case(nn.CrossEntropyLoss(WEIGHT, reduction="none"), classes),
}


def compared(
    model: Any, plain: nn.Module, criterion: Any, x: Tensor, *targets: Any
) -> tuple[Tensor, Tensor]:
    """The loss of a wrapper, and the criterion's of the plain module; both were differentiated."""
    model.zero_grad()
    plain.zero_grad()
    loss, expected = model(x, *targets), criterion(plain(x), *targets)
    exact = x.dtype is torch.float64
    torch.testing.assert_close(loss, expected, **({"rtol": 1e-12, "atol": 1e-12} if exact else {}))
    loss.sum().backward()
    expected.sum().backward()
    assert_same_grads(model, plain, **({"rtol": 1e-10, "atol": 1e-12} if exact else {}))
    return loss, expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_T6_the_loss_is_that_of_the_whole_batch(executors: Any, name: str) -> None:
    """Of torch's criteria, with chunks of different sizes, the last of which may count nothing."""
    torch.manual_seed(0)
    case = CASES[name]
    plain = Head(case.shape, case.last).double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        targets = case.targets()
        found = model.with_loss(case.criterion, targets=len(targets))
        compared(found, plain, case.criterion, x, *targets)
    finally:
        torch.set_default_dtype(torch.float32)


class Margin(nn.Module):
    """A criterion with parameters, as for faces: each class has a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(4, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(out, F.normalize(self.directions)) * self.scale, y)


def test_T6_parameters_of_a_criterion_get_gradients(executors: Any) -> None:
    """They stay here, with an optimizer of their own."""
    net, criterion = Head((3,)), Margin()
    plain, other = copy.deepcopy(net), copy.deepcopy(criterion)
    found = DataParallel(net, executor=executors(3)).with_loss(criterion, reduction="mean")
    ours, theirs = nn.ModuleList([net, criterion]), nn.ModuleList([plain, other])
    optimizers = [torch.optim.SGD(both.parameters(), 0.1) for both in (ours, theirs)]
    for _ in range(3):
        x, y = torch.randn(ROWS, 5), torch.randint(0, 4, (ROWS,))
        losses = found(x, y), other(plain(x), y)
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "directions" not in "".join(found.state_dict())
    assert_same_state(ours, theirs)


def of_words(out: Tensor, y: Tensor) -> Tensor:
    """A mean over what is not left out."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1)


def words(_out: Tensor, y: Tensor) -> Tensor:
    """How many there are."""
    return (y != -1).sum()


def test_T6_a_count_says_what_a_mean_is_over(executors: Any) -> None:
    """Also where a chunk counts nothing, so that its mean is no number."""
    plain = Head((6, 4)).double()
    y = torch.randint(0, 4, (ROWS, 6))
    y[0, 2:], y[3:] = -1, -1
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, found = torch.randn(ROWS, 5).double(), model.with_loss(of_words, count=words)
    compared(found, plain, of_words, x, y)
    assert found(x, torch.full_like(y, -1)).isnan()  # as of_words itself


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_T6_a_function_of_ones_own_says_what_it_gives(executors: Any, reduction: str) -> None:
    """A closure with a tensor that gets a gradient, of several targets and a tuple of outputs."""
    plain = Head((4,), lambda out: (out, {"square": out.square()})).double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def criterion(out: Any, y: Tensor, weight: Tensor) -> Tensor:
        each = ((out[0] - y) * weight).abs().sum(1) + out[1]["square"].sum(1) * scale
        return each if reduction == "none" else getattr(each, reduction)()

    targets = like(4)[0].double(), like(1)[0].double()
    found = model.with_loss(criterion, targets=2, reduction=reduction)
    x = torch.randn(ROWS, 5).double()
    compared(found, plain, criterion, x, *targets)
    losses = found(x, *targets), criterion(plain(x), *targets)
    torch.testing.assert_close(*[torch.autograd.grad(loss.sum(), scale) for loss in losses])


def test_T6_targets_by_keyword(executors: Any) -> None:
    """Their names say which they are; all else goes to the model."""
    plain = Apply(
        lambda net, x, *, scale, flag=False: net.linear(x) * scale + flag, linear=nn.Linear(5, 4)
    )
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, scale, y = torch.randn(ROWS, 5), torch.rand(ROWS, 1), torch.randint(0, 4, (ROWS,))
    expected = F.cross_entropy(plain(x, scale=scale, flag=True), y)
    for targets in ("labels", ["labels"]):
        found = model.with_loss(nn.CrossEntropyLoss(), targets=targets)
        torch.testing.assert_close(found(x, labels=y, scale=scale, flag=True), expected)
    own = model.with_loss(lambda out: out.square().mean(), targets=0, reduction="mean")
    torch.testing.assert_close(own(x, scale=scale), plain(x, scale=scale).square().mean())


# --- what cannot be right ---


class Strange(nn.CrossEntropyLoss):
    """Computes something else."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) + input.std(0).mean()


class Similar(nn.CrossEntropyLoss):
    """Has settings of its own, and computes the same."""

    def __init__(self) -> None:
        super().__init__(ignore_index=1)


def test_T6_it_has_to_be_known_how_losses_add_up(executors: Any) -> None:
    """Or the error says what to give."""
    net = Head()
    model = DataParallel(net, executor=executors(3))
    for own in (lambda out, y: out.mean(), Strange(), functools.partial(of_words)):
        with pytest.raises(ValueError, match=r"needs reduction='mean'.*compares rows"):
            model.with_loss(own)
    x, y = torch.randn(ROWS, 5), torch.arange(ROWS) % 4
    compared(model.with_loss(Similar()), copy.deepcopy(net), Similar(), x, y)
    hooked = nn.CrossEntropyLoss()
    late = model.with_loss(hooked, reduction="mean")
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="CrossEntropyLoss needs"):
        late(x, y)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (nn.CrossEntropyLoss, {}, "got <class"),
        ("mse", {}, "got 'mse'"),
        (nn.MSELoss(), {"reduction": "sum"}, "MSELoss has reduction='mean'"),
        (nn.MSELoss(), {"count": words}, "takes no count"),
        (of_words, {"count": 3}, "count must be a function, got int"),
        (of_words, {"count": words, "reduction": "sum"}, "count= for a mean alone"),
        (of_words, {"reduction": "batchmean"}, "of_words needs"),
        (of_words, {"reduction": "median"}, "got 'median'"),
        (functools.partial(F.mse_loss, size_average=False), {}, "deprecated"),
        (nn.MSELoss(), {"targets": -1}, "targets=-1"),
        (nn.MSELoss(), {"targets": True}, "targets=True"),
        (nn.MSELoss(), {"targets": [1]}, r"targets=\[1\]"),
        (net, {"reduction": "mean"}, "has parameters of the model"),
        (net.forward, {"reduction": "mean"}, "has parameters of the model"),
    ]
    for criterion, settings, text in refused:
        with pytest.raises((TypeError, ValueError), match=text):
            model.with_loss(criterion, **settings)


class Penalty:
    """A criterion that is an object, and has a module."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return penalty(self.net, out, y)


def penalty(net: nn.Module, out: Tensor, _y: Tensor) -> Tensor:
    """Of the weights."""
    return sum((p.square().sum() for p in net.parameters()), out.new_zeros(()))


def test_T6_parameters_of_the_model_are_refused_wherever_they_are(executors: Any) -> None:
    """They would be sent as they are here, where they lack the steps that replicas have made."""
    net = Head()
    model = DataParallel(net, executor=executors(2))
    x, y = torch.randn(4, 5), torch.arange(4)
    refused: list[tuple[Any, Any]] = [
        (lambda out, y: F.cross_entropy(out, y) + penalty(net, out, y), None),
        (functools.partial(penalty, net), None),
        (Penalty(net), None),
        (of_words, lambda out, y: (net.linear.weight > 0).sum()),
    ]
    for criterion, count in refused:
        found = model.with_loss(criterion, reduction="mean", count=count)
        with pytest.raises(ValueError, match="has parameters of the model"):
            found(x, y)
    model.with_loss(functools.partial(penalty, copy.deepcopy(net)), reduction="mean")(x, y)
    found = model.run(lambda inner, x: inner(x) + net.linear.weight.sum(), x)
    torch.testing.assert_close(found, net(x) + net.linear.weight.sum())  # nothing is trained there


def test_T6_what_a_call_cannot_do_is_refused(executors: Any) -> None:
    """Where the loss of the chunks would be another one than that of the batch."""
    x, y, deep, executor = torch.randn(8, 5), torch.randn(8), torch.randn(3, 4, 5), executors(2)
    lengths = torch.ones(8).long(), torch.full((8,), 4), torch.ones(8).long()
    times_first, flat = Head((4, 4), logs_in_time), nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    no_rows = nn.BCEWithLogitsLoss(torch.rand(2, 1))  # weights of rows, which are not split
    first = Head((1,), lambda out: out[:, 0])
    refused: list[tuple[int, nn.Module, Any, tuple[Any, ...], str]] = [
        (0, Head((1,)), nn.MSELoss(), (x, y), "pairs other rows"),
        (0, Head((8,)), nn.MSELoss(), (x, y), "pairs other rows"),
        (0, Head((), torch.mean), nn.MSELoss(), (x, y), "at least 1 dim"),
        (0, first, nn.CrossEntropyLoss(), (x, y), "at least 2 dim"),
        (0, Head((), lambda out: {"a": out}), nn.MSELoss(), (x, y), "returned a dict"),
        (0, times_first, nn.CTCLoss(), (x, *lengths), "concatenated"),
        (0, Head(), lambda out, y: out, (x, y), r"shape .4, 4., expected a tensor with one number"),
        (0, Head(), lambda out, y: 1.5, (x, y), "returned a float"),
        (0, Head(()), lambda out, text: out.mean(), (y[0], "text"), "no argument is a tensor with"),
        (0, Head(), no_rows, (x[:2], torch.rand(2, 4)), "so it has rows"),
        (1, flat, nn.MSELoss(), (deep, torch.zeros(3, 4)), "rows along dim 1"),
        (1, Head(), nn.CrossEntropyLoss(), (deep, torch.zeros(3, 4).long()), "is split along 1"),
    ]
    for dim, net, criterion, (given, *targets), text in refused:
        found = DataParallel(net, executor=executor, dim=dim).with_loss(
            criterion,
            targets=len(targets),
            reduction=None if isinstance(criterion, nn.Module) else "mean",
        )
        with pytest.raises((TypeError, ValueError), match=text):
            found(given, *targets)
    model = DataParallel(Head(), executor=executor)
    for wrong in (-1, float("nan"), torch.ones(2)):
        found = model.with_loss(of_words, count=lambda out, y, wrong=wrong: wrong)
        with pytest.raises(ValueError, match="count gave"):
            found(x.unsqueeze(1), torch.zeros(8, 1).long())
    with pytest.raises(TypeError, match=r"\['labels'\] are targets, and missing"):
        model.with_loss(nn.MSELoss(), targets="labels")(x, y)
    with pytest.raises(TypeError, match="got 1 positional arguments"):
        model.with_loss(nn.MSELoss(), targets=2)(x)


@pytest.mark.parametrize("batch", [1, 2, 4, 0])
def test_T6_few_rows(executors: Any, batch: int) -> None:
    """As many chunks as there are rows; of none the mean is no number, as torch's."""
    plain = Head().double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, y = torch.randn(batch, 5).double(), torch.randn(batch, 4).double()
    for criterion in (nn.MSELoss(), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        loss, expected = model.with_loss(criterion)(x, y), criterion(plain(x), y)
        torch.testing.assert_close(loss, expected, equal_nan=True)
    own = model.with_loss(lambda out, y: (out - y).square().mean(), reduction="mean")
    torch.testing.assert_close(own(x, y), F.mse_loss(plain(x), y), equal_nan=True)


def test_T6_it_is_the_wrapper_with_a_loss(executors: Any) -> None:
    """One master, one executor, the same names in state_dict; pickled, copied, chosen again."""
    net = Head()
    model = DataParallel(net, executor=executors(2))
    called: list[Any] = []
    model.register_forward_hook(lambda *args: called.append(args))
    found = model.with_loss(nn.MSELoss())
    assert type(found) is DataParallel and found.module is net and found.executor is model.executor
    assert [*found.state_dict()] == [*model.state_dict()]
    assert [*found.parameters()] == [*model.parameters()]
    x, y = torch.randn(6, 5), torch.randn(6, 4)
    expected = F.mse_loss(net(x), y)
    for one in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        torch.testing.assert_close(one(x, y), expected)
    assert not called
    torch.testing.assert_close(model(x), net(x))
    assert len(called) == 1
    torch.testing.assert_close(found.with_loss(nn.L1Loss())(x, y), F.l1_loss(net(x), y))
    torch.testing.assert_close(found.run(lambda inner, x: inner(x), x), net(x))
    with torch.no_grad():
        net.linear.weight.mul_(2)
    torch.testing.assert_close(found(x, y), F.mse_loss(net(x), y))
    replaced = Head()
    found.module = replaced
    torch.testing.assert_close(model(x), replaced(x))
    found.eval()
    assert not replaced.training
    with torch.no_grad():
        assert not found(x, y).requires_grad
    with torch.inference_mode():
        assert found(x, y).is_inference()


def test_T6_without_replicas() -> None:
    """The criterion's own, in place."""
    plain = Head()
    model = DataParallel(copy.deepcopy(plain), ["cpu"])
    x, y = torch.randn(5, 5), torch.randint(0, 4, (5,))
    compared(model.with_loss(nn.CrossEntropyLoss()), plain, F.cross_entropy, x, y)
    own = model.with_loss(lambda out, y: F.cross_entropy(out, y), reduction="mean")
    compared(own, plain, F.cross_entropy, x, y)


def test_T6_no_output_travels(executors: Any) -> None:
    """A megabyte of outputs stays in the replicas, and so does its gradient."""
    model = DataParallel(Head((1000,)), executor=executors(2))
    x, y = torch.randn(256, 5), torch.randint(0, 1000, (256,))
    found = model.with_loss(nn.CrossEntropyLoss())
    counts = []
    for loss in (found, found, lambda x, y: F.cross_entropy(model(x), y)):
        loss(x, y).backward()
        counts.append(carried(model))
    assert counts[1] - counts[0] < 100_000 < 2_000_000 < counts[2] - counts[1]


def test_T6_derivatives_of_any_order(executors: Any) -> None:
    """A gradient penalty, and a gradient of the target."""
    plain = Head((4,), lambda out: out.tanh()).double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, y = torch.randn(ROWS, 5).double(), torch.randn(ROWS, 4).double()
    losses = model.with_loss(nn.MSELoss()), lambda x, y: F.mse_loss(plain(x), y)
    results = []
    for net, loss in zip((model, plain), losses, strict=True):
        mine, target = x.clone().requires_grad_(), y.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(mine, target), mine, create_graph=True)
        slope.square().sum().backward()
        loss(mine, target).backward()
        results.append([mine.grad, target.grad, *[p.grad for p in net.parameters()]])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_T6_half_precision(executors: Any, dtype: torch.dtype | None) -> None:
    """A sum that would be infinite; None is autocast, which holds for the criterion, too."""
    plain = Head().to(dtype)
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, y = torch.randn(3000, 5).to(dtype), torch.full((3000, 4), 12.0).to(dtype)
    exact = F.mse_loss(plain(x).double(), y.double())
    for criterion, reduction in ((nn.MSELoss(), None), (lambda out, y: F.mse_loss(out, y), "mean")):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            loss = model.with_loss(criterion, reduction=reduction)(x, y)
            assert loss.dtype == F.mse_loss(plain(x), y).dtype and loss.isfinite()
        torch.testing.assert_close(loss.double(), exact, rtol=1e-2, atol=0)


def test_T6_chunks_of_chosen_sizes_and_other_options(executors: Any) -> None:
    """Weights of chunks, scalars, unused parameters, and map."""
    x, y = torch.randn(10, 5), torch.randint(0, 4, (10,))
    executor, plain = executors(2), Head()
    for options in (Options(chunk_weights=(4, 1)), Options(scalars="mean", unused_grads="none")):
        model = DataParallel(copy.deepcopy(plain), executor=executor, options=options)
        compared(model.with_loss(nn.CrossEntropyLoss()), plain, F.cross_entropy, x, y)
    batches = [(x, y), (x[:3], y[:3]), (x, y)]
    for split in (True, False):
        found = [*model.with_loss(nn.CrossEntropyLoss()).map(batches, split=split)]
        for loss, (xs, ys) in zip(found, batches, strict=True):
            torch.testing.assert_close(loss, F.cross_entropy(plain(xs), ys).detach())


@pytest.mark.parametrize("guard", [None, 0, 1])
def test_T6_synchronised_batch_norm(executors: Any, guard: int | None) -> None:
    """With chunks of other sizes too; the backward of one that counts nothing has to run."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    model = DataParallel(net, executor=executors(3))

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum") / (y != -100).sum().clamp(min=guard or 0)

    own = model.with_loss(criterion, count=lambda out, y: (y != -100).sum())
    found = model.with_loss(nn.CrossEntropyLoss()) if guard is None else own
    compared(found, plain, criterion, torch.randn(ROWS, 5).double(), *classes())


def test_T6_along_another_dimension(executors: Any) -> None:
    """Where each element has a loss."""
    plain = nn.LSTM(5, 4)
    x, y = torch.randn(3, 7, 5), torch.randn(3, 7, 4)
    model = DataParallel(copy.deepcopy(plain), executor=executors(3), dim=1)
    found = model.with_loss(lambda out, y: F.smooth_l1_loss(out[0], y), reduction="mean")
    torch.testing.assert_close(found(x, y), F.smooth_l1_loss(plain(x)[0], y))
    net = nn.Linear(5, 4)
    found = DataParallel(copy.deepcopy(net), executor=executors(3), dim=1)
    compared(found.with_loss(nn.SmoothL1Loss()), net, F.smooth_l1_loss, x, y)

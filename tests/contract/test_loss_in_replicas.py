"""`DataParallel.with_loss`: the loss is the criterion's on the whole batch, computed where the
outputs are.

Each is compared with the criterion on the plain module's output, in double precision.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same_grads, optimizer_of, raised
from mortal import Everything, Mortal, arm, armed, fate, rows, same
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm
from raydp_parallel.calls import synced_call

pytestmark = pytest.mark.usefixtures("cluster")

ROWS = 7
"""In three chunks of 3, 3 and 1 rows."""


def as_it_is(out: Tensor) -> Tensor:
    """The outputs of a `Head` that does nothing to them."""
    return out


class Head(nn.Module):
    """Outputs of any shape.

    Args:
        shape: The shape of a row's output.
        last: What is done to the outputs.
    """

    def __init__(
        self, shape: tuple[int, ...] = (4,), last: Callable[[Tensor], Any] = as_it_is
    ) -> None:
        super().__init__()
        self.shape, self.last = shape, last
        self.linear = nn.Linear(5, int(torch.tensor(shape).prod()))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.linear(x).unflatten(-1, self.shape) if self.shape else x)


class Case(NamedTuple):
    """A criterion and what it takes.

    Attributes:
        criterion: The criterion.
        targets: Makes the targets.
        shape: Of `Head`.
        last: Of `Head`.
    """

    criterion: Any
    targets: Callable[[], tuple[Any, ...]]
    shape: tuple[int, ...] = (4,)
    last: Callable[[Any], Any] = as_it_is


def classes(*shape: int) -> tuple[Tensor, ...]:
    """Classes, some of which are left out by ``ignore_index``: two rows, all of chunk 2."""
    target = torch.randint(0, 4, (ROWS, *shape))
    target[1], target[6:] = -100, -100
    return (target,)


def like(*shape: int) -> tuple[Tensor, ...]:
    """Numbers."""
    return (torch.randn(ROWS, *shape),)


def signs(*shape: int) -> tuple[Tensor, ...]:
    """Ones, positive and negative."""
    return (torch.randint(0, 2, (ROWS, *shape)).mul(2).sub(1).double(),)


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
CASES: dict[str, Case] = {
    "cross entropy": Case(nn.CrossEntropyLoss(), classes),
    "weights": Case(nn.CrossEntropyLoss(weight=WEIGHT), classes),
    "smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "smoothing, weights": Case(nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), classes),
    "ignore_index": Case(nn.CrossEntropyLoss(ignore_index=2), lambda: (classes()[0].abs() % 4,)),
    "soft": Case(nn.CrossEntropyLoss(), lambda: (like(4)[0].softmax(1),)),
    "soft, weights": Case(nn.CrossEntropyLoss(WEIGHT), lambda: (like(4)[0].softmax(1),)),
    "images": Case(nn.CrossEntropyLoss(WEIGHT), lambda: classes(3, 2), (4, 3, 2)),
    "soft images": Case(nn.CrossEntropyLoss(), lambda: (like(4, 3)[0].softmax(1),), (4, 3)),
    "nll": Case(nn.NLLLoss(WEIGHT), classes, last=lambda out: out.log_softmax(1)),
    "nll, images": Case(nn.NLLLoss(), lambda: classes(3), (4, 3), lambda out: out.log_softmax(1)),
    "mse": Case(nn.MSELoss(), lambda: like(4)),
    "mse, broadcast": Case(nn.MSELoss(), lambda: like(1)),
    "one number a row": Case(nn.MSELoss(), like, (1,), lambda out: out.squeeze(1)),
    "l1": Case(nn.L1Loss(), lambda: like(4)),
    "smooth l1": Case(nn.SmoothL1Loss(beta=0.5), lambda: like(4)),
    "huber": Case(nn.HuberLoss(delta=0.5), lambda: like(2, 3), (2, 3)),
    "bce": Case(nn.BCELoss(), lambda: (like(4)[0].sigmoid(),), last=torch.sigmoid),
    "bce, weights": Case(nn.BCELoss(WEIGHT), lambda: (like(4)[0].sigmoid(),), last=torch.sigmoid),
    "logits": Case(
        nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT + 1), lambda: (like(4)[0].sigmoid(),)
    ),
    "kl": Case(nn.KLDivLoss(), lambda: (like(4)[0].softmax(1),)),
    "kl, batchmean": Case(
        nn.KLDivLoss(reduction="batchmean", log_target=True), lambda: (like(4)[0].log_softmax(1),)
    ),
    "poisson": Case(nn.PoissonNLLLoss(full=True), lambda: (like(4)[0].exp(),)),
    "gaussian": Case(nn.GaussianNLLLoss(), lambda: (*like(4), like(1)[0].exp())),
    "soft margin": Case(nn.SoftMarginLoss(), lambda: signs(4)),
    "hinge": Case(nn.HingeEmbeddingLoss(0.5), lambda: signs(4)),
    "ranking": Case(nn.MarginRankingLoss(0.2), lambda: (*like(4), *signs(4))),
    "cosine": Case(nn.CosineEmbeddingLoss(0.2), lambda: (*like(4), *signs())),
    "triplet": Case(nn.TripletMarginLoss(swap=True), lambda: (*like(4), *like(4))),
    "triplet, distance": Case(
        nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance(3.0)),
        lambda: (*like(4), *like(4)),
    ),
    "multi margin": Case(nn.MultiMarginLoss(weight=WEIGHT), lambda: (classes()[0].abs() % 4,)),
    "multilabel margin": Case(
        nn.MultiLabelMarginLoss(), lambda: (torch.tensor([[0, 2, -1, -1]] * ROWS),)
    ),
    "multilabel soft margin": Case(
        nn.MultiLabelSoftMarginLoss(WEIGHT), lambda: (like(4)[0].sigmoid().round(),)
    ),
    "ctc": Case(
        nn.CTCLoss(),
        lambda: (
            torch.randint(1, 4, (ROWS, 3)),
            torch.full((ROWS,), 6),
            torch.tensor([1, 2, 3, 1, 2, 3, 1]),
        ),
        (6, 4),
        lambda out: out.transpose(0, 1).log_softmax(2),
    ),
    "function": Case(F.cross_entropy, classes),
    "function, settings": Case(
        functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=1, label_smoothing=0.2),
        lambda: (classes()[0].abs() % 4,),
    ),
    "function, weights of rows": Case(
        F.binary_cross_entropy_with_logits, lambda: (like(4)[0].sigmoid(), like(1)[0].exp())
    ),
    "function, sum": Case(functools.partial(F.mse_loss, reduction="sum"), lambda: like(4)),
    "sum": Case(nn.CrossEntropyLoss(WEIGHT, reduction="sum"), classes),
    "sum, ctc": Case(
        nn.CTCLoss(reduction="sum"),
        lambda: (
            torch.randint(1, 4, (ROWS, 3)),
            torch.full((ROWS,), 6),
            torch.tensor([1, 2, 3, 1, 2, 3, 1]),
        ),
        (6, 4),
        lambda out: out.transpose(0, 1).log_softmax(2),
    ),
    "none": Case(nn.CrossEntropyLoss(WEIGHT, reduction="none"), classes),
}


def compared(model: Any, plain: nn.Module, case: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The loss of a wrapper, and the criterion's of the plain module; both were differentiated."""
    targets = case.targets()
    loss = model(*args, *targets)
    expected = case.criterion(plain(*args), *targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.sum().backward()
    expected.sum().backward()
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-12)
    return loss, expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_T6_the_loss_is_that_of_the_whole_batch(executors: Any, replicas: int, name: str) -> None:
    """Of torch's criteria, with chunks of different sizes, the last of which may count nothing."""
    torch.manual_seed(0)
    case = CASES[name]
    plain = Head(case.shape, case.last).double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(replicas))
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        count = len(case.targets())
        found = model.with_loss(case.criterion, targets=count)
        loss, expected = compared(found, plain, case, x)
        if replicas == 1:
            assert torch.equal(loss, expected)
    finally:
        torch.set_default_dtype(torch.float32)


# --- criteria of one's own ---


class Margin(nn.Module):
    """A criterion with parameters, as for faces: each class has a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(4, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(out, F.normalize(self.directions)) * self.scale, y)


@pytest.mark.parametrize("steps", [False, True])
def test_T6_parameters_of_a_criterion_get_gradients(executors: Any, steps: bool) -> None:
    """They stay here, with an optimizer of their own; also beside one in the replicas."""
    plain, criterion = Head((3,)), Margin()
    copies = copy.deepcopy(plain), copy.deepcopy(criterion)
    model = DataParallel(plain, executor=executors(3))
    found = model.with_loss(criterion, reduction="mean")
    made = model.optimizer if steps else torch.optim.SGD
    optimizers = [
        made(torch.optim.SGD, lr=0.1) if steps else torch.optim.SGD(plain.parameters(), 0.1),
        torch.optim.SGD(criterion.parameters(), 0.1),
    ]
    others = [torch.optim.SGD(one.parameters(), 0.1) for one in copies]
    for _ in range(3):
        x, y = torch.randn(ROWS, 5), torch.randint(0, 4, (ROWS,))
        loss, expected = found(x, y), copies[1](copies[0](x), y)
        torch.testing.assert_close(loss, expected)
        for one, steppers in ((loss, optimizers), (expected, others)):
            one.backward()
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
    assert "directions" not in "".join(found.state_dict())
    torch.testing.assert_close(criterion.directions, copies[1].directions)
    torch.testing.assert_close(criterion.scale, copies[1].scale)
    torch.testing.assert_close(model.module.linear.weight, copies[0].linear.weight)


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
    case = Case(of_words, lambda: (y,))
    x = torch.randn(ROWS, 5).double()
    compared(model.with_loss(of_words, count=words), plain, case, x)
    nothing = torch.full_like(y, -1)
    assert model.with_loss(of_words, count=words)(x, nothing).isnan()  # as of_words itself


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
    compared(found, plain, Case(criterion, lambda: targets), torch.randn(ROWS, 5).double())
    (first, second) = scale.grad / 2, scale.grad / 2  # both have added the same
    (alone,) = torch.autograd.grad(
        criterion(plain(x := torch.ones(ROWS, 5).double()), *targets).sum(), scale
    )
    (here,) = torch.autograd.grad(found(x, *targets).sum(), scale)
    torch.testing.assert_close(here, alone)
    assert torch.equal(first, second)


def test_T6_targets_by_keyword(executors: Any) -> None:
    """Their names say which they are; all else goes to the model."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)

        def forward(self, x: Tensor, *, scale: Tensor, flag: bool = False) -> Tensor:
            return self.linear(x) * scale + flag

    plain = Both()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, scale, y = torch.randn(ROWS, 5), torch.rand(ROWS, 1), torch.randint(0, 4, (ROWS,))
    expected = F.cross_entropy(plain(x, scale=scale, flag=True), y)
    for targets in ("labels", ["labels"], ("labels",)):
        found = model.with_loss(nn.CrossEntropyLoss(), targets=targets)
        loss = found(x, labels=y, scale=scale, flag=True)
        torch.testing.assert_close(loss, expected)
    loss = model.with_loss(lambda out: out.square().mean(), targets=0, reduction="mean")(
        x, scale=scale
    )
    torch.testing.assert_close(loss, plain(x, scale=scale).square().mean())


@pytest.mark.long
def test_T6_a_model_output_of_transformers(executors: Any) -> None:
    """A function takes from it what the criterion needs."""
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.SequenceClassifierOutput
    plain = Head((4,), lambda out: output(loss=out.mean(), logits=out))
    model = DataParallel(copy.deepcopy(plain), executor=executors(2))
    x, y = torch.randn(ROWS, 5), torch.randint(0, 4, (ROWS,))
    found = model.with_loss(lambda out, y: F.cross_entropy(out.logits, y), reduction="mean")
    torch.testing.assert_close(found(x, y), F.cross_entropy(plain(x).logits, y))
    own = model.with_loss(lambda out: out.loss, targets=0, reduction="mean")
    torch.testing.assert_close(own(x), plain(x).loss)
    error = raised(lambda: model.with_loss(nn.CrossEntropyLoss())(x, y))
    assert isinstance(error, TypeError) and "SequenceClassifierOutput" in str(error)


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
        with pytest.raises(ValueError, match=r"give reduction='mean'.*compares rows"):
            model.with_loss(own)
    x, y = torch.randn(ROWS, 5), torch.arange(ROWS) % 4
    compared_loosely(model.with_loss(Similar()), copy.deepcopy(net), Similar(), x, y)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (nn.CrossEntropyLoss, {}, "got <class"),
        ("mse", {}, "got 'mse'"),
        (nn.MSELoss(), {"reduction": "sum"}, "MSELoss has reduction='mean'"),
        (nn.MSELoss(), {"count": words}, "takes no count"),
        (of_words, {"count": 3}, "count must be a function, got int"),
        (of_words, {"count": words, "reduction": "sum"}, "a count for a mean alone"),
        (of_words, {"reduction": "batchmean"}, "of of_words: expected"),
        (of_words, {"reduction": "median"}, "reduction='median'"),
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
        return F.cross_entropy(out, y) + penalty(self.net, out, y)


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
    other = copy.deepcopy(net)
    model.with_loss(functools.partial(penalty, other), reduction="mean")(x, y)

    def closure(inner: nn.Module, x: Tensor) -> Tensor:
        return inner(x) + net.linear.weight.sum()

    expected = net(x) + net.linear.weight.sum()
    torch.testing.assert_close(model.run(closure, x), expected)  # nothing is trained there
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="function has parameters of the model, which are trained"):
        model.run(closure, x)
    torch.testing.assert_close(model.run(lambda inner, x: inner(x), x), model(x))


def test_T6_what_a_call_cannot_do_is_refused(executors: Any) -> None:
    """Where the loss of the chunks would be another one than that of the batch."""
    x, y = torch.randn(8, 5), torch.randn(8)
    executor = executors(2)
    lengths = torch.ones(8).long(), torch.full((8,), 4), torch.ones(8).long()
    times_first = Head((4, 4), lambda out: out.log_softmax(2).transpose(0, 1))
    refused: list[tuple[nn.Module, Any, tuple[Any, ...], str]] = [
        (Head((1,)), nn.MSELoss(), (y,), "pairs other rows"),
        (Head((8,)), nn.MSELoss(), (y,), "pairs other rows"),
        (Head((), torch.mean), nn.MSELoss(), (y,), "at least 1 dim"),
        (Head((1,), lambda out: out[:, 0]), nn.CrossEntropyLoss(), (y,), "at least 2 dim"),
        (Head((), lambda out: {"a": out}), nn.MSELoss(), (y,), "returned a dict"),
        (times_first, nn.CTCLoss(), lengths, "concatenated"),
        (Head(), lambda out, y: out, (y,), r"shape .4, 4., expected a tensor with one number"),
        (Head(), lambda out, y: 1.5, (y,), "returned a float"),
    ]
    for net, criterion, targets, text in refused:
        found = DataParallel(net, executor=executor).with_loss(
            criterion,
            targets=len(targets),
            reduction=None if isinstance(criterion, nn.Module) else "mean",
        )
        with pytest.raises((TypeError, ValueError), match=text):
            found(x, *targets)
    weights = nn.BCEWithLogitsLoss(torch.rand(2, 1))  # of rows, which are not split
    found = DataParallel(Head(), executor=executor).with_loss(weights)
    with pytest.raises(ValueError, match="so it has rows"):
        found(x[:2], torch.rand(2, 4))
    flat = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    along = DataParallel(flat, executor=executor, dim=1).with_loss(nn.MSELoss())
    with pytest.raises(ValueError, match="rows along dim 1"):
        along(torch.randn(3, 4, 5), torch.zeros(3, 4))
    along = DataParallel(Head(), executor=executor, dim=1).with_loss(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="along dimension 0, and the batch is split along 1"):
        along(torch.randn(3, 4, 5), torch.zeros(3, 4).long())
    for wrong in (-1, float("nan"), torch.ones(2)):
        found = DataParallel(Head(), executor=executor).with_loss(
            of_words, count=lambda out, y, wrong=wrong: wrong
        )
        with pytest.raises(ValueError, match="count gave"):
            found(x.unsqueeze(1), torch.zeros(8, 1).long())
    with pytest.raises(ValueError, match="no argument is a tensor with rows"):
        DataParallel(Head(()), executor=executor).with_loss(
            lambda out, text: out.mean(), reduction="mean"
        )(torch.tensor(1.0), "text")
    model = DataParallel(Head(), executor=executor)
    with pytest.raises(TypeError, match=r"\['labels'\] are targets, and missing"):
        model.with_loss(nn.MSELoss(), targets="labels")(x, y)
    with pytest.raises(TypeError, match="got 1 positional arguments"):
        model.with_loss(nn.MSELoss(), targets=2)(x)


# --- the same wrapper ---


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
    called: list[str] = []
    model.register_forward_hook(lambda *_: called.append("outputs"))
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
    assert called == ["outputs"]
    other = found.with_loss(nn.L1Loss())
    torch.testing.assert_close(other(x, y), F.l1_loss(net(x), y))
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


@pytest.mark.parametrize("where", ["in place", "in process"])
def test_T6_without_replicas(where: str) -> None:
    """The criterion's own, in place; and with replicas in this process."""
    plain = Head()
    if where == "in place":
        model = DataParallel(copy.deepcopy(plain), executor=None, device_ids=None)
        model.device_ids = []
    else:
        options = Options(in_process=True, threads=1)
        model = DataParallel(copy.deepcopy(plain), ["cpu", "cpu"], options=options)
    x, y = torch.randn(5, 5), torch.randint(0, 4, (5,))
    compared_loosely(model.with_loss(nn.CrossEntropyLoss()), plain, F.cross_entropy, x, y)
    compared_loosely(
        model.with_loss(lambda out, y: F.cross_entropy(out, y), reduction="mean"),
        plain,
        F.cross_entropy,
        x,
        y,
    )


def compared_loosely(
    model: Any, plain: nn.Module, criterion: Any, x: Tensor, *targets: Tensor
) -> None:
    """In single precision."""
    model.zero_grad()
    plain.zero_grad()
    loss, expected = model(x, *targets), criterion(plain(x), *targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_grads(model, plain)


def test_T6_no_output_travels(executors: Any) -> None:
    """A megabyte of outputs stays in the replicas, and so does its gradient."""
    model = DataParallel(Head((1000,)), executor=executors(2))
    x, y = torch.randn(256, 5), torch.randint(0, 1000, (256,))
    found = model.with_loss(nn.CrossEntropyLoss())
    found(x, y).backward()
    before = carried(model)
    found(x, y).backward()
    between = carried(model)
    F.cross_entropy(model(x), y).backward()
    after = carried(model)
    assert between - before < 100_000 < 2_000_000 < after - between


def carried(model: DataParallel[Any]) -> int:
    """Bytes of tensors that travelled, but for weights."""
    return sum(replica.bytes_in + replica.bytes_out for replica in model.stats().replicas)


def test_T6_derivatives_of_any_order(executors: Any) -> None:
    """A gradient penalty, and a gradient of the target."""
    plain = Head((4,), lambda out: out.tanh()).double()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    y = torch.randn(ROWS, 4, dtype=torch.float64)
    results = []
    for net, loss in (
        (model, model.with_loss(nn.MSELoss())),
        (plain, lambda x, y: F.mse_loss(plain(x), y)),
    ):
        mine, target = x.clone().requires_grad_(), y.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(mine, target), mine, create_graph=True)
        slope.square().sum().backward()
        loss(mine, target).backward()
        results.append([mine.grad, target.grad, *[p.grad for p in net.parameters()]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_T6_half_precision(executors: Any, dtype: torch.dtype) -> None:
    """A sum that would be infinite in half precision; the loss has the criterion's dtype."""
    plain = Head().to(dtype)
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, y = torch.randn(3000, 5).to(dtype), torch.full((3000, 4), 12.0).to(dtype)
    loss = model.with_loss(nn.MSELoss())(x, y)
    assert loss.dtype == dtype and loss.isfinite()
    exact = F.mse_loss(plain(x).double(), y.double())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-2, atol=0)
    own = model.with_loss(lambda out, y: F.mse_loss(out, y), reduction="mean")(x, y)
    assert own.dtype == dtype
    torch.testing.assert_close(own.double(), exact, rtol=1e-2, atol=0)


def test_T6_autocast(executors: Any) -> None:
    """The caller's holds for the criterion, too."""
    plain = Head()
    model = DataParallel(copy.deepcopy(plain), executor=executors(3))
    x, y = torch.randn(ROWS, 5), torch.randint(0, 4, (ROWS,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.with_loss(nn.CrossEntropyLoss())(x, y)
        expected = F.cross_entropy(plain(x), y)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)


def test_T6_chunks_of_chosen_sizes_and_other_options(executors: Any) -> None:
    """Weights of chunks, compiled modules, scalars, unused parameters, capture, and map."""
    x, y = torch.randn(10, 5), torch.randint(0, 4, (10,))
    executor = executors(2)
    plain = Head()
    expected = F.cross_entropy(plain(x), y)
    for options in (
        Options(chunk_weights=(4, 1)),
        Options(scalars="weighted_mean"),
        Options(scalars="mean", unused_grads="none"),
        Options(compile={"backend": "eager"}),
        Options(rng="per_sample"),
    ):
        model = DataParallel(copy.deepcopy(plain), executor=executor, options=options)
        compared_loosely(model.with_loss(nn.CrossEntropyLoss()), plain, F.cross_entropy, x, y)
        with model.capture("", "linear") as captured:
            loss = model.with_loss(nn.CrossEntropyLoss())(x, y)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(captured[""], plain(x))
    batches = [(x, y), (x[:3], y[:3]), (x, y)]
    for split in (True, False):
        found = [*model.with_loss(nn.CrossEntropyLoss()).map(batches, split=split)]
        for loss, (xs, ys) in zip(found, batches, strict=True):
            torch.testing.assert_close(loss, F.cross_entropy(plain(xs), ys).detach())


def test_T6_synchronised_batch_norm(executors: Any) -> None:
    """Then all is as on the whole batch, with chunks of other sizes too."""
    plain = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    synced = convert_sync_batchnorm(copy.deepcopy(plain))
    model = DataParallel(synced, executor=executors(3))
    case = Case(nn.CrossEntropyLoss(), classes)
    compared(model.with_loss(case.criterion), plain, case, torch.randn(ROWS, 5).double())


@pytest.mark.parametrize("guard", [0, 1])
def test_T6_synchronised_batch_norm_where_a_chunk_counts_nothing(
    executors: Any, monkeypatch: pytest.MonkeyPatch, guard: int
) -> None:
    """Its backward has to run, because the other chunk's waits for it."""
    monkeypatch.setattr(synced_call, "_PATIENCE", 10.0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    model = DataParallel(net, executor=executors(2))

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum") / (y != -100).sum().clamp(min=guard)

    found = model.with_loss(criterion, count=lambda out, y: (y != -100).sum())
    x, y = torch.randn(6, 5).double(), torch.tensor([1, 2, 3, -100, -100, -100])
    compared(found, plain, Case(criterion, lambda: (y,)), x)


def test_T6_along_another_dimension(executors: Any) -> None:
    """Where each element has a loss."""
    plain = nn.LSTM(5, 4)
    x, y = torch.randn(3, 7, 5), torch.randn(3, 7, 4)
    model = DataParallel(copy.deepcopy(plain), executor=executors(3), dim=1)

    def first(out: Any, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(out[0], y)

    found = model.with_loss(first, reduction="mean")
    torch.testing.assert_close(found(x, y), first(plain(x), y))
    model = DataParallel(nn.Sequential(nn.Linear(5, 4)), executor=executors(3), dim=1)
    criterion = nn.SmoothL1Loss()
    torch.testing.assert_close(model.with_loss(criterion)(x, y), criterion(model.module(x), y))


# --- training, and deaths ---


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_T6_training(executors: Any, replicas: int, inside: bool) -> None:
    """With an optimizer in the driver or in the replicas: the weights that a loss in the driver
    gives, accumulation and an uneven last batch included.
    """
    results = []
    for with_loss in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        model = DataParallel(net.double(), executor=executors(replicas))
        criterion = nn.CrossEntropyLoss(ignore_index=1)
        found = model.with_loss(criterion)
        optimizer = optimizer_of(model, inside, torch.optim.AdamW, lr=0.01)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                x = torch.randn(12 if step < 5 else 8, 5).double()
                y = torch.randint(0, 4, (len(x),))
                loss = found(x, y) if with_loss else criterion(model(x), y)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
        results.append([*losses, *found.state_dict().values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


class Loss(nn.Module):
    """Cross entropy; its process may end.

    Args:
        folder: See `Mortal`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        fate(self.folder, f"criterion {int(y[0])}")
        return F.cross_entropy(out, y % 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", ["forward 1", "late forward 0", "criterion 1", "backward 0", "backward 1"]
)
@pytest.mark.parametrize("inside", [False, True])
def test_T6_a_death_changes_no_bit(
    killable: Executor, tmp_path: Path, moment: str, inside: bool
) -> None:
    """In forward, in the criterion, in backward."""
    results = []
    for dies in (False, True):
        torch.manual_seed(2)
        model = DataParallel(Mortal(Everything(), tmp_path), executor=killable)
        found = model.with_loss(Loss(tmp_path), reduction="mean")
        optimizer = optimizer_of(model, inside, torch.optim.Adam, lr=0.01)
        losses = []
        for number in range(4):
            if dies and number == 2:
                arm(tmp_path, moment)
            optimizer.zero_grad()
            loss = found(rows(2, number), torch.arange(2).repeat_interleave(4))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append([t.clone() for t in (*losses, *found.state_dict().values())])
    assert not armed(tmp_path)
    assert same(*results)

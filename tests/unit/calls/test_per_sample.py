"""`Options(rng="per_sample")`: random numbers that follow from a row's number in the batch
(pytorch#70447), compared between numbers of replicas, to the bit.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mortal import Mortal, arm, armed, rows, same, state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, Executor, Options

INSIDE = Options(rng="per_sample", in_process=True, threads=1)


def outputs(
    module: nn.Module, x: Tensor, options: Options = INSIDE, counts: Any = (1, 2, 3, 4)
) -> list[Any]:
    """What each number of replicas gives, from the same seed; no warning is allowed."""
    found = []
    for count in counts:
        torch.manual_seed(11)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(DataParallel(module, ["cpu"] * count, options=options)(x))
    return found


class Draws(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def generator_of(x: Tensor) -> Tensor:
    """Numbers of the user's own generator, between others."""
    own = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(0))
    return torch.rand_like(x) + 0 * own.sum() / len(x)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "dropout twice": lambda x: torch.dropout(torch.dropout(x, 0.3, True).tanh(), 0.5, True),
    "dropout in place": lambda x: nn.functional.dropout(x.clone(), 0.5, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "feature dropout": lambda x: nn.functional.dropout1d(x.unsqueeze(2).expand(-1, -1, 4), 0.5),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, hard=True),
    "rand_like": torch.rand_like,
    "randn_like, transposed": lambda x: torch.randn_like(x.t().contiguous().t()),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "rand": lambda x: torch.rand(len(x), 3, 2),
    "randn, float64": lambda x: torch.randn(len(x), 20, dtype=torch.double),
    "randint": lambda x: torch.randint(5, 100, (len(x),)),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal of two": lambda x: torch.normal(x, x.exp()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty(len(x), 40).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "a view": lambda x: torch.zeros(len(x), 4, 2)[:, 1].normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
    "poisson": lambda x: torch.poisson(x.exp()),
    "a distribution": lambda x: torch.distributions.Gamma(x.exp(), 1.0).sample(),
    "the user's generator": generator_of,
    "one number": lambda x: x * torch.rand(()) + torch.rand(1),
    "Python and NumPy": lambda x: x * random.random() + np.random.rand(),
    "without gradients": lambda x: torch.dropout(x.detach(), 0.5, True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_X5_operations_do_not_depend_on_the_number_of_replicas(name: str) -> None:
    """To the bit; rows differ from each other, and calls too."""
    x = torch.linspace(-1, 1, 60).view(12, 5).requires_grad_()
    module = Draws(OPERATIONS[name])
    first, *others = outputs(module, x)
    assert all(torch.equal(first, other) for other in others)
    torch.manual_seed(12)
    again = DataParallel(module, ["cpu"] * 2, options=INSIDE)(x)
    assert not torch.equal(first, again)


def test_X5_rows_and_operations_have_numbers_of_their_own() -> None:
    """Among 12 rows, two operations and two calls there are 48 different rows."""
    model = DataParallel(
        Draws(lambda x: torch.cat([torch.rand_like(x), torch.rand_like(x)], 1)),
        ["cpu"] * 3,
        options=INSIDE,
    )
    found = [model(torch.zeros(12, 4)).view(24, 4) for _ in range(2)]
    assert len(torch.cat(found).unique(dim=0)) == 48


class Net(nn.Module):
    """Dropout in an LSTM, in attention and in a checkpoint, with elementwise weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 6))

    def noisy(self, x: Tensor) -> Tensor:
        """What runs again in backward."""
        return torch.dropout((x * self.weight).tanh(), 0.5, True) + torch.randn_like(x)

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.noisy, x, use_reentrant=False)
        out = checkpoint(self.noisy, out, use_reentrant=True)
        return torch.dropout(out, 0.2, True)


def test_X5_gradients_of_what_runs_again() -> None:
    """Of inputs to the bit, of weights but for the order of sums."""
    grads = []
    for count in (1, 2, 4):
        torch.manual_seed(5)
        net = Net()
        x = torch.linspace(-1, 1, 48).view(8, 6).requires_grad_()
        out = DataParallel(net, ["cpu"] * count, options=INSIDE)(x)
        out.square().sum().backward()
        assert x.grad is not None and net.weight.grad is not None
        grads.append((x.grad, net.weight.grad))
    for by_input, by_weight in grads[1:]:
        assert torch.equal(by_input, grads[0][0])
        torch.testing.assert_close(by_weight, grads[0][1])


def test_X5_modules_of_torch_drop_the_same_entries() -> None:
    """Attention's, called in C++, and a transformer's; products may round."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)

    class Attends(nn.Module):
        """Attention over the columns of each row."""

        def forward(self, x: Tensor) -> Tensor:
            one = x.unsqueeze(1)
            out: Tensor = nn.functional.scaled_dot_product_attention(one, one, one, dropout_p=0.5)
            return out

    x = torch.randn(8, 3, 6)
    for module in (Draws(layer), Attends()):
        first, *others = outputs(module, x, counts=(1, 2, 4))
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_X5_splits_and_methods_do_not_matter() -> None:
    """Uneven chunks, `call`, `run`, and whole batches of `map`, beside one device."""
    module, x = Draws(OPERATIONS["dropout twice"]), torch.randn(12, 5)
    (first,) = outputs(module, x, counts=(1,))
    options = Options(
        rng="per_sample", chunk_weights=(5, 1), least_rows=2, in_process=True, threads=1
    )
    model = DataParallel(module, ["cpu"] * 2, options=options)
    for found in (
        lambda: model(x),
        lambda: model.call("forward", x),
        lambda: model.run(lambda net, x: net(x), x),
        lambda: model.call("forward", x, split=False),
        lambda: next(model.map([x], split=False)),
        lambda: next(model.map([x], split=True)),
    ):
        torch.manual_seed(11)
        assert torch.equal(found(), first)


def test_X5_the_default_is_a_stream_for_each_chunk() -> None:
    """Which `per_sample` does not change for other wrappers."""
    module, x = Draws(torch.rand_like), torch.zeros(4, 3)
    plain = Options(in_process=True, threads=1)
    one, two = outputs(module, x, plain, (1, 2))
    assert torch.equal(one[:2], two[:2]) and not torch.equal(one[2:], two[2:])
    outputs(module, x)
    assert torch.equal(outputs(module, x, plain, (2,))[0], two)


RECURRENT = nn.GRU(1, 2, num_layers=2, dropout=0.5, batch_first=True)  # time first inside

# --- what is warned of, and what is refused ---


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("time before batch", lambda x: torch.dropout(x.t(), 0.5, True).t()),
        ("recurrent", lambda x: RECURRENT(x.unsqueeze(2))[0].sum(2)),
        ("rows and heads", lambda x: torch.dropout(x.repeat(2, 1), 0.5, True)[: len(x)]),
        ("a permutation", lambda x: x + torch.randn(7).sum()),
        ("an order of rows", lambda x: x + torch.randperm(len(x)).sum()),
        ("a choice among rows", lambda x: x + torch.multinomial(x[:, 0] + 1, 2).sum()),
        ("one step of all rows", lambda x: torch.dropout(x.unsqueeze(0), 0.5, True)[0]),
    ],
)
def test_X5_other_first_dimensions_are_warned_of(name: str, function: Any) -> None:
    """With the operation and the sizes; what follows is not out of step."""

    def both(x: Tensor) -> Tensor:
        return torch.cat([function(x), torch.rand_like(x)], 1)

    found = []
    for count in (1, 2):
        torch.manual_seed(11)
        model = DataParallel(Draws(both), ["cpu"] * count, options=INSIDE)
        with pytest.warns(UserWarning, match=r"aten\.\w+.* has the first dimension \d+ and the"):
            found.append(model(torch.ones(6, 5))[:, 5:])
    assert torch.equal(*found)


def test_X5_bad_options() -> None:
    """Names that there are not, and rows along another dimension."""
    with pytest.raises(ValueError, match=r"rng='sample'.*expected one of per_chunk, per_sample"):
        Options(rng="sample")  # type: ignore[arg-type]
    model = DataParallel(nn.Dropout(), ["cpu"] * 2, dim=1, options=INSIDE)
    with pytest.raises(ValueError, match="along dimension 0, and dim is 1"):
        model(torch.ones(4, 4))


def test_X5_without_rows_there_is_one_stream() -> None:
    """No tensor is split, or an empty one."""
    model = DataParallel(Draws(lambda x: torch.rand(2, 2)), ["cpu"] * 2, options=INSIDE)
    assert DataParallel(nn.Dropout(), ["cpu"] * 2, options=INSIDE)(torch.ones(0, 3)).shape == (0, 3)
    with pytest.warns(UserWarning, match="the chunk 0 rows"):
        model(None)


# --- on replicas ---


@pytest.mark.long
def test_X5_processes_and_deaths(killable: Executor, tmp_path: Path) -> None:
    """Two and one replica give the same bits, and a death changes nothing."""
    runs = []
    for moments in ((), ("forward 1",), ("backward 0",)):
        torch.manual_seed(5)
        arm(tmp_path, *moments)
        net = Mortal(Net(), tmp_path)
        model = DataParallel(net, executor=killable, options=Options(rng="per_sample"))
        x = rows(2, 0).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        assert not armed(tmp_path) and x.grad is not None
        runs.append([out.detach(), x.grad, *state(model)])
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])
    torch.manual_seed(5)
    one = DataParallel(
        Mortal(Net(), tmp_path), ["cpu"], executor=killable, options=Options(rng="per_sample")
    )
    assert torch.equal(one(rows(2, 0)), runs[0][0])

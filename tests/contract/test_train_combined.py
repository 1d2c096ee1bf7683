"""`DataParallel.optimizer` together with other options and verbs, and on two nodes: the bits of the
same optimizer in the driver, also where a replica dies. Rows T1 and T8.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import optimizer_of, raised
from mortal import same
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm

HERE = Path(__file__).parent


class Net(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(torch.dropout(hidden, 0.3, self.training))


LINKS = ("auto", "collective")


@pytest.fixture(params=LINKS)
def two(executors: Any, request: pytest.FixtureRequest) -> Executor:
    """Two replicas that may die, of both ways to sum gradients."""
    return executors(link=request.param, name="killable")  # type: ignore[no-any-return]


def train(executor: Executor, inside: bool, how: dict[str, Any], dies: bool) -> list[Tensor]:
    """Five steps: losses, weights, buffers and the optimizer's state. Before one of them a replica
    may die.
    """
    torch.manual_seed(0)
    net: nn.Module = Net()
    how = dict(how)
    if how.pop("synchronised", False):
        net = convert_sync_batchnorm(net)
    with_loss = how.pop("with_loss", False)
    options = Options(link=executor.options.link, **how)
    model = DataParallel(net, executor=executor, options=options)
    optimizer = optimizer_of(model, inside, torch.optim.AdamW, lr=0.01)
    criterion = model.with_loss(nn.CrossEntropyLoss()) if with_loss else None
    found: list[Tensor] = []
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        x, y = torch.randn(13, 6), torch.randint(0, 3, (13,))
        if dies and step == 2:
            executor.grow()
            process = os.pidfd_open(executor.replicas()[1].pid)
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [])
            os.close(process)
        loss = nn.functional.cross_entropy(model(x), y) if criterion is None else criterion(x, y)
        loss.backward()
        if step == 3:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        found.append(loss.detach())
    found += [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        found += [*values.values()]
    return [tensor.clone() for tensor in found]


COMBINED: dict[str, dict[str, Any]] = {
    "weights": {"chunk_weights": (3, 1), "least_rows": 2},
    "half": {"gradient_dtype": torch.bfloat16},
    "rng": {"rng": "per_sample"},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "synchronised": {"synchronised": True, "rng": "per_sample", "chunk_weights": (3, 1)},
    "loss": {"with_loss": True, "synchronised": True},
}


MORE = ("weights", "rng", "compiled")
"""Those that are tried with ``--long`` alone where replicas sum gradients among themselves."""


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("two", "name"),
    [
        pytest.param(link, name, marks=[pytest.mark.long] * (link != "auto" and name in MORE))
        for link in LINKS
        for name in COMBINED
    ],
    indirect=["two"],
)
def test_T1_with_other_options(name: str, dies: bool, two: Executor) -> None:
    """What a wrapper may ask for besides; where that cannot be, the error is the ordinary one."""
    how = COMBINED[name]
    if name == "half" and two.options.link == "collective":
        error = raised(lambda: train(two, True, how, dies=False))
        assert isinstance(error, ValueError) and "gradient_dtype" in str(error)
        return
    expected = train(two, False, how, dies=False)
    assert same(train(two, True, how, dies), expected)


class Wide(nn.Module):
    """Running means of 12 KB each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 3000), nn.BatchNorm1d(3000)
        self.last = nn.Linear(3000, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("two", "dies"),
    [
        ("auto", None),
        ("collective", None),
        ("auto", 0),
        pytest.param("collective", 0, marks=pytest.mark.long),
        pytest.param("auto", 1, marks=pytest.mark.long),
        pytest.param("collective", 1, marks=pytest.mark.long),
    ],
    indirect=["two"],
)
def test_T8_buffers_for_an_evaluation(two: Executor, dies: int | None) -> None:
    """Nothing of them is sent to the other replica in between; evaluations, checkpoints, edits and
    frozen statistics find those of the last step, also after a death.
    """
    found: list[list[Tensor]] = []
    sent: list[int] = []
    for when in ("every_forward", "evaluation"):
        torch.manual_seed(0)
        two.grow()
        net = Wide()
        options = Options(link=two.options.link, buffer_updates=when)
        model = DataParallel(net, executor=two, options=options)
        optimizer = model.optimizer(torch.optim.SGD, lr=1e-6)
        seen: list[Tensor] = []

        def advance(steps: int, model: Any = model, optimizer: Any = optimizer) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                first = model(torch.randn(8, 6)).square().mean()
                model(torch.randn(8, 6)).square().mean().backward()
                first.backward()
                optimizer.step()

        def evaluate(model: Any = model, seen: list[Tensor] = seen) -> None:
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.ones(4, 6)))
            model.train()

        advance(3)
        evaluate()
        advance(1)
        before = two.stats().replicas
        advance(4)
        after = two.stats().replicas
        if dies is None:
            sent.append(after[1].state_sent - before[1].state_sent)
        elif when == "evaluation":
            process = os.pidfd_open(two.replicas()[dies].pid)
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [])
            os.close(process)
        advance(2)
        seen += [tensor.clone() for tensor in model.state_dict().values()]
        evaluate()
        net.norm.running_mean.zero_()  # type: ignore[union-attr]
        advance(1)
        net.norm.eval()
        advance(2)
        net.norm.train()
        seen.append(model.call("forward", torch.ones(4, 6)))
        advance(2)
        evaluate()
        seen += [tensor.clone() for tensor in model.state_dict().values()]
        found.append([tensor.detach() for tensor in seen])
        optimizer.close()
    assert same(*found)
    if dies is None:
        # In a group the first replica passes them on.
        least = 0 if two.options.link == "collective" else 8 * 24_000
        assert sent[1] == 0 and sent[0] >= least, sent


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("test_train_in_replicas.py", "T1_the_bits or T1_groups"),
        ("test_train_in_replicas.py", "T2_a_death and 2-"),
        ("test_train_in_replicas.py", "T2_newcomers and memory"),
        ("test_train_in_replicas.py", "T5 and collective"),
        ("test_train_combined.py", "T8 and not on_two_nodes"),
    ],
)
def test_T1_on_two_nodes(file: str, rows: str) -> None:
    """The tests of one node hold there: the bits on 1, 2 and 3 replicas, deaths in each phase,
    gradients that stay, and buffers that do.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--nodes=2", "--long", "-k", rows]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(HERE / file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout, done.stdout

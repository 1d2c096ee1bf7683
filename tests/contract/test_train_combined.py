"""`DataParallel.optimizer` together with other options and verbs, and on two nodes: the bits of the
same optimizer in the driver, also where a replica dies.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import raised
from mortal import same
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm

PLENTY = Options(max_restarts_per_hour=10_000)
HERE = Path(__file__).parent


class Net(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(torch.dropout(hidden, 0.3, self.training))


@pytest.fixture(scope="module", params=["auto", "collective"])
def two(cluster: None, request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Two replicas, that may die."""
    with Executor(["cpu"] * 2, options=replace(PLENTY, link=request.param)) as executor:
        yield executor


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
    options = replace(PLENTY, link=executor.options.link, **how)
    model = DataParallel(net, executor=executor, options=options)
    optimizer: Any
    if inside:
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
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


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", COMBINED)
def test_T1_with_other_options(name: str, dies: bool, two: Executor) -> None:
    """What a wrapper may ask for besides; where that cannot be, the error is the ordinary one."""
    how = COMBINED[name]
    if name == "half" and two.options.link == "collective":
        error = raised(lambda: train(two, True, how, dies=False))
        assert isinstance(error, ValueError) and "gradient_dtype" in str(error)
        return
    expected = train(two, False, how, dies=False)
    assert same(train(two, True, how, dies), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "rows", ["T1_the_bits or T1_groups", "T2_a_death and 2-", "T5 and collective"]
)
def test_T1_on_two_nodes(rows: str) -> None:
    """The tests of one node hold there: the bits on 1, 2 and 3 replicas, deaths in each phase, and
    gradients that stay.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--nodes=2", "--long", "-k", rows]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(HERE / "test_train_in_replicas.py")],
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

"""Sequences: whatever was done with a wrapper before, the next action gives what the plain module
gives, with optimizers in the driver and in the replicas, and whatever dies.
"""

from __future__ import annotations

import gc
from typing import Any

import poison
import pytest
import sequences
import torch
from torch import nn

from raydp_parallel import Executor
from raydp_parallel.driver.dispatcher import Dispatcher

SHORT, ALL = 3, 60
FOUND = (800008, 800025)
"""Seeds of a longer run that found something."""


@pytest.mark.parametrize("run", sequences.RUNS)
@pytest.mark.parametrize(
    "seed",
    [*FOUND, *(n if n < SHORT else pytest.param(n, marks=pytest.mark.long) for n in range(ALL))],
)
@pytest.mark.filterwarnings("ignore")
def test_sequences(seed: int, run: str, executors: Any) -> None:
    """Outputs, gradients, weights and errors after each of 30 actions; no graph stays."""
    both = {"two": executors(), "killable": executors(name="killable")}

    def graphs() -> int:
        gc.collect()
        return sum(count for one in both.values() for _, count in one.flush())

    before = graphs()  # other tests may have left some
    told = sequences.report(seed, run, sequences.sequence(seed, run), both)
    if told is not None:
        pytest.fail(told, pytrace=False)
    assert graphs() <= before


@pytest.mark.parametrize("planted", [False, True])
def test_poison_shows_an_output_that_lies_in_a_window(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planted that all outputs may lie there, also those that an object keeps."""
    poison.use(monkeypatch.setattr)
    finish = Dispatcher.finish

    def lent(*flight: Any) -> Any:
        return [answer._replace(anew=answer.anew or planted) for answer in finish(*flight)]

    monkeypatch.setattr(Dispatcher, "finish", lent)
    with Executor(["cpu", "cpu"]) as executor, torch.no_grad():
        model = sequences.wrapping(executor)(nn.Linear(3, 2), 2, "none", None)
        kept = model.run(lambda net, x: sequences.Box([net(x)]), torch.ones(4, 3)).parts
        executor.flush()  # a message after which nobody may read the answers of before
    assert [bool(part.isnan().any()) for part in kept] == [planted] * 2

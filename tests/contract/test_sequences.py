"""Sequences: whatever was done with a wrapper before, the next action gives what the plain module
gives, with optimizers in the driver and in the replicas, and whatever dies.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import sequences

SHORT, ALL = 3, 60


@pytest.mark.parametrize("run", sequences.RUNS)
@pytest.mark.parametrize(
    "seed", [n if n < SHORT else pytest.param(n, marks=pytest.mark.long) for n in range(ALL)]
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

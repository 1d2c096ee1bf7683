"""Sequences: whatever was done with a wrapper before, the next action gives what the plain module
gives, with an ordinary optimizer and with one in the replicas.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import sequences
from torch import nn

from raydp_parallel import DataParallel, Executor

SHORT, ALL, LENGTH = 5, 150, 30


def seeds(short: int, every: int) -> list[Any]:
    """Number sequences, of which all but a few are long."""
    return [*range(short), *[pytest.param(n, marks=pytest.mark.long) for n in range(short, every)]]


@pytest.mark.parametrize("inside", [False, True], ids=["driver", "replicas"])
@pytest.mark.parametrize("seed", seeds(SHORT, ALL))
@pytest.mark.filterwarnings("ignore")
def test_sequences(seed: int, inside: bool, two: Executor) -> None:
    """Outputs, gradients, weights and errors after each of 30 actions."""
    compare(seed, inside, two)


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.filterwarnings("ignore")
def test_sequences_with_deaths(seed: int, killable: Executor) -> None:
    """The same, where replicas that train end on the way."""
    compare(-1 - seed, True, killable)


def compare(seed: int, inside: bool, executor: Executor) -> None:
    """Play one sequence with a wrapper and with the plain module."""

    def graphs() -> int:
        gc.collect()
        return sum(count for _, count in executor.flush())

    def found(steps: list[sequences.Step]) -> str | None:
        def wrap(net: nn.Module, devices: int) -> Any:
            return DataParallel(net, ["cpu"] * devices, executor=executor)

        ours = sequences.play(seed, inside, steps, wrap)
        return sequences.difference(ours, sequences.play(seed, inside, steps, sequences.Plain))

    steps, before = sequences.sequence(seed, LENGTH), graphs()  # other tests may have left some
    if found(steps) is not None:
        steps = sequences.shrunk(steps, lambda fewer: found(fewer) is not None)
        told = "\n".join(map(str, steps))
        pytest.fail(f"seed {seed}, inside={inside}: {found(steps)}\n{told}", pytrace=False)
    assert graphs() <= before

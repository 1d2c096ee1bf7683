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


@pytest.mark.parametrize("inside", [False, True], ids=["driver", "replicas"])
@pytest.mark.parametrize(
    "seed", [*range(SHORT), *[pytest.param(n, marks=pytest.mark.long) for n in range(SHORT, ALL)]]
)
@pytest.mark.filterwarnings("ignore")
def test_sequences(seed: int, inside: bool, two: Executor) -> None:
    """Outputs, gradients, weights and errors after each of 30 actions."""

    def graphs() -> list[int]:
        gc.collect()
        return [count for _, count in two.flush()]

    def found(steps: list[sequences.Step]) -> str | None:
        def wrap(net: nn.Module, devices: int) -> Any:
            return DataParallel(net, ["cpu"] * devices, executor=two)

        ours = sequences.play(seed, inside, steps, wrap)
        return sequences.difference(ours, sequences.play(seed, inside, steps, sequences.Plain))

    steps, before = sequences.sequence(seed, LENGTH), graphs()  # other tests may have left some
    if found(steps) is not None:
        steps = sequences.shrunk(steps, lambda fewer: found(fewer) is not None)
        told = "\n".join(map(str, steps))
        pytest.fail(f"seed {seed}, inside={inside}: {found(steps)}\n{told}", pytrace=False)
    assert graphs() == before

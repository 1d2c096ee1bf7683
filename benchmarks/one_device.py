"""How long does the wrapper take with one own device, beside the plain module?

`python -m benchmarks.one_device` takes a ResNet-50 with its 286 modules and a small GPT-2 with its
76 parameters, both of `transformers`, and compares, interleaved, the wrapper on ``["cpu"]``, which
runs in place, with the module itself: a forward under no_grad, and a training step. The weights
must agree at the end.

Each turn is several runs, and the first ones do not count: for some milliseconds after a run the
threads of a contender spin, and would slow the next one, which no program meets that has only one
of them.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, compared, interleaved, timed
from benchmarks.nets import CASES, GPT2_SMALL, RESNET50, usable
from benchmarks.peers import stepper

LIMIT = 1.04
ROUNDS = {RESNET50: 16, GPT2_SMALL: 40}
PLAIN, OURS = "plain module", "raydp_parallel"
_SETTLING = {RESNET50: 1, GPT2_SMALL: 4}
_COUNTED = {RESNET50: 3, GPT2_SMALL: 8}
_CLOSE = 1e-3


def measure(case: str, rounds: int, works: Sequence[str]) -> dict[str, dict[str, float]]:
    """Milliseconds of the plain module and of the wrapper, for a forward and a step."""
    plain = CASES[case].make()
    models = {PLAIN: plain, OURS: raydp_parallel.DataParallel(copy.deepcopy(plain), ["cpu"])}
    found = {}
    for what in works:
        work = {name: WORK[what](case, model) for name, model in models.items()}
        turns = {name: functools.partial(turn, case, run) for name, run in work.items()}
        found[what] = interleaved(turns, rounds, warmup=1)
    both = zip(plain.parameters(), models[OURS].parameters(), strict=True)
    if not all(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE) for one, other in both):
        raise RuntimeError(f"{case}: different weights at the end")
    return found


def turn(case: str, run: Callable[[], None]) -> float:
    """The median seconds of some runs, behind some that do not count."""
    for _ in range(_SETTLING[case]):
        run()
    return statistics.median(timed(run) for _ in range(_COUNTED[case]))


def forward(case: str, model: nn.Module) -> Callable[[], None]:
    """A forward without gradients."""
    loss_of, (x, y) = CASES[case].loss, CASES[case].batch()

    def run() -> None:
        with torch.no_grad():
            loss_of(model, x, y)

    return run


FORWARD, STEP = "forward, no_grad", "training step"
WORK = {FORWARD: forward, STEP: stepper}


def run(effort: Effort) -> Report:
    """One device beside the plain module."""
    cases = [case for case in ROUNDS if usable(case)]
    cases = cases[-1:] if effort is Effort.SMOKE else cases
    tables: list[Table] = []
    asked: list[Asked] = []
    data: dict[str, Any] = {}
    for case in cases:
        data[case] = measure(case, effort.rounds(ROUNDS[case]), (*WORK,))
        for what, medians in data[case].items():
            tables.append(compared(f"{case}: {what}", medians))
            ratio = medians[OURS] / medians[PLAIN]
            asked.append(Asked(f"one device, {case}: {what} to the plain module", ratio, LIMIT))
    notes = [] if cases else ["Left out: not installed: transformers"]
    question = "How long does the wrapper take with one own device, beside the plain module?"
    return Report("one_device", question, tables, asked, {"median_ms": data}, notes)


if __name__ == "__main__":
    alone(run)

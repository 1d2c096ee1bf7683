"""What does the wrapper cost with one device, beside the plain module?

`python -m benchmarks.one_device` takes a ResNet-50 with its 286 modules and a small GPT-2 with its
76 parameters, both of `transformers`, and compares, interleaved, the wrapper on one CPU replica
with the module itself: a forward under no_grad, and a training step. All compute with all cores.
The floor is the plain module in another process that is only told to run. The weights must agree at
the end.

Each turn is several runs, and the first ones do not count: for some milliseconds after a run the
threads of a contender spin, and would slow the next one, which no program meets that has only one
of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, compared, interleaved, timed
from benchmarks.nets import CASES, GPT2_SMALL, RESNET50, usable

LIMITS = {RESNET50: 1.1, GPT2_SMALL: 1.5}
"""What is asked of the wrapper's time, as a multiple of the module's own."""

ROUNDS = {RESNET50: 16, GPT2_SMALL: 40}
_SETTLING = {RESNET50: 1, GPT2_SMALL: 4}
_COUNTED = {RESNET50: 3, GPT2_SMALL: 8}
_FORWARD, _STEP = "forward, no_grad", "training step"
_PLAIN, _FLOOR = "plain module", "plain module, in another process"
_CLOSE = 1e-3


def measure(case: str, effort: Effort) -> dict[str, dict[str, float]]:
    """Milliseconds of the plain module and of the wrapper, for each of the two."""
    plain = CASES[case].make()
    wrapped = raydp_parallel.DataParallel(copy.deepcopy(plain), ["cpu"])
    models = {_PLAIN: plain, "raydp_parallel": wrapped}
    found = {}
    with in_another_process(case) as ask:
        for what, of in WORK.items():
            work = {name: of(case, model) for name, model in models.items()}
            work[_FLOOR] = functools.partial(ask, what)
            contenders = {name: functools.partial(turn, case, run) for name, run in work.items()}
            found[what] = interleaved(contenders, effort.rounds(ROUNDS[case]), warmup=1)
    check(case, plain, wrapped.module)
    return found


def turn(case: str, run: Callable[[], None]) -> float:
    """The median seconds of some runs, behind some that do not count."""
    for _ in range(_SETTLING[case]):
        run()
    return statistics.median(timed(run) for _ in range(_COUNTED[case]))


@contextlib.contextmanager
def in_another_process(case: str) -> Iterator[Callable[[str], None]]:
    """A function that lets another process do some work with a module of its own, and waits."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (case, torch.get_num_threads(), there)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()

    def ask(what: str) -> None:
        here.send(what)
        here.recv()

    try:
        yield ask
    finally:
        here.send(None)
        process.join()


def serve(case: str, threads: int, line: Connection) -> None:
    """Do what is asked until None is."""
    torch.set_num_threads(threads)
    model = CASES[case].make()
    work = {what: of(case, model) for what, of in WORK.items()}
    while (what := line.recv()) is not None:
        work[what]()
        line.send(None)


def forward(case: str, model: nn.Module) -> Callable[[], None]:
    """A forward without gradients."""
    loss_of, (x, y) = CASES[case].loss, CASES[case].batch()

    def run() -> None:
        with torch.no_grad():
            loss_of(model, x, y)

    return run


def step(case: str, model: nn.Module) -> Callable[[], None]:
    """A training step."""
    loss_of, (x, y) = CASES[case].loss, CASES[case].batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


WORK = {_FORWARD: forward, _STEP: step}
"""What is timed."""


def check(case: str, plain: nn.Module, wrapped: nn.Module) -> None:
    """Both trained to the same weights."""
    rows = zip(plain.parameters(), wrapped.parameters(), strict=True)
    if not all(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE) for one, other in rows):
        raise RuntimeError(f"{case}: different weights at the end")


def run(effort: Effort) -> Report:
    """One device beside the plain module."""
    cases = [case for case in LIMITS if usable(case)]
    cases = cases[-1:] if effort is Effort.SMOKE else cases
    tables: list[Table] = []
    asked: list[Asked] = []
    data: dict[str, Any] = {}
    for case in cases:
        data[case] = measure(case, effort)
        for what, medians in data[case].items():
            tables.append(compared(f"{case}: {what}", medians))
            ratio = medians["raydp_parallel"] / medians[_PLAIN]
            asked.append(
                Asked(f"one device, {case}: {what} to the plain module", ratio, LIMITS[case])
            )
    notes = ["The driver and its replica have the same cores; while one computes, the other waits."]
    if not cases:
        notes = ["Left out: not installed: transformers"]
    question = "What does the wrapper cost with one device, beside the plain module?"
    return Report("one_device", question, tables, asked, {"median_ms": data}, notes)


if __name__ == "__main__":
    alone(run)

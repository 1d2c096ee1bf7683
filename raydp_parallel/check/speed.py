"""Step times compared with the plain module, torch's own wrapper and DDP; and how much runs at the
same time.
"""

from __future__ import annotations

import copy
import functools
import time

import torch

from raydp_parallel.check import ddp
from raydp_parallel.check.here import Here, one_thread
from raydp_parallel.check.loads import GPT2, LOADS, PERCEPTRON, RESNET, stepper
from raydp_parallel.check.table import Row, RowResult

ROUNDS = 20
FLOOR = 0.97
"""The part of the plain module's throughput that one replica must reach on a large net."""


def steps(name: str, here: Here) -> RowResult:
    """Milliseconds of a step."""
    load = LOADS[name]
    torch.manual_seed(0)
    made = load.make().to(here.device)
    x, y = (part.to(here.device) for part in load.batch())
    rounds = here.rounds(ROUNDS)

    def timed(net: torch.nn.Module) -> float:
        return 1e3 * here.seconds(stepper(load, net, x, y), rounds)

    with one_thread():
        found = {"plain": timed(copy.deepcopy(made))}
        for ids in (here.one, here.several):
            found[f"ours {len(ids)}"] = timed(here.ours(copy.deepcopy(made), ids))
        if here.gpus:
            for ids in (here.one, here.several):
                upstreams = here.upstreams(copy.deepcopy(made), ids)
                found[f"nn.DataParallel {len(ids)}"] = timed(upstreams)
    workers = max(2, here.gpus)
    found[f"DDP {workers}"] = 1e3 * ddp.step_seconds(name, here.gpus, workers, rounds)
    return RowResult(
        "ms per step: " + ", ".join(f"{name} {ms:.2f}" for name, ms in found.items()), found
    )


def throughput(name: str, here: Here) -> RowResult:
    """One replica and the plain module, in turns, so that a slow moment is slow for both."""
    load = LOADS[name]
    torch.manual_seed(0)
    made = load.make().to(here.device)
    x, y = (part.to(here.device) for part in load.batch())
    ours = stepper(load, here.ours(copy.deepcopy(made), here.one), x, y)
    plain = stepper(load, made, x, y)
    for _ in range(5):
        plain()
        ours()
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(ROUNDS):
        for kind, step in (("plain", plain), ("ours", ours)):
            here.finish()
            begun = time.perf_counter()
            step()
            here.finish()
            times[kind].append(time.perf_counter() - begun)
    medians = {kind: sorted(found)[ROUNDS // 2] for kind, found in times.items()}
    ratio = medians["plain"] / medians["ours"]
    numbers = {"plain_ms": 1e3 * medians["plain"], "ours_ms": 1e3 * medians["ours"], "ratio": ratio}
    text = (
        f"{ratio:.3f} of plain's throughput, at least {FLOOR} is asked; "
        f"{numbers['ours_ms']:.1f} ms, plain {numbers['plain_ms']:.1f} ms"
    )
    return RowResult(text, {**numbers, "rows_per_second": len(x) / medians["ours"]}, ratio >= FLOOR)


def overlap(here: Here) -> RowResult:
    """The share of each phase in the time of calls, and how many replicas work at the same time."""
    load = LOADS[PERCEPTRON]
    x, y = (part.to(here.device) for part in load.batch())
    model = here.ours(load.make(), here.several)
    step = stepper(load, model, x, y)
    for _ in range(3):
        step()
    before, begun = here.executor().stats(), time.perf_counter()
    for _ in range(here.rounds(ROUNDS)):
        step()
    here.finish()
    wall, after = time.perf_counter() - begun, here.executor().stats()
    seconds = {
        name: sum(getattr(r.phases, name) for r in after.replicas)
        - sum(getattr(r.phases, name) for r in before.replicas)
        for name in ("adopt", "copy_in", "work", "copy_out", "wait", "reduce", "idle")
    }
    verify = after.driver.verify - before.driver.verify
    parts = ", ".join(
        f"{name.replace('_', ' ')} {spent / wall:.0%}" for name, spent in seconds.items()
    )
    busy = seconds["adopt"] + seconds["copy_in"] + seconds["work"] + seconds["copy_out"]
    text = (
        f"{busy / wall:.2f} replicas busy on average: {parts}; beside that the driver "
        f"compared for {verify / wall:.0%}"
    )
    return RowResult(text, {**seconds, "wall": wall, "verify": verify, "busy": busy / wall})


ROWS = (
    *(
        Row("speed", f"step, {name}", functools.partial(steps, name))
        for name in LOADS
        if name not in (RESNET, GPT2)
    ),
    Row("speed", "overlap", overlap),
    *(
        Row("speed", f"throughput, {name}", functools.partial(throughput, name), 1, True)
        for name in (RESNET, GPT2)
    ),
)

"""How fast is batch inference, beside one replica's rate and Ray Data?

`python -m benchmarks.inference` computes the same batches with a net that is bound by the CPU,
interleaved: `map` on one replica, `map` on two, a loop that calls the wrapper on two replicas, two
Ray actors that are kept busy by hand, and Ray Data's `map_batches` with two actors. Each replica
and each actor has one thread. Ray Data starts its actors anew each time; its time counts from when
the first of them begins its first batch. All outputs are compared. The floor is the net in two
processes that each compute a batch of their own half as many times, when told: two cores that share
caches and memory are not twice one (1.67 to 2.04 of it, on the machines that were tried). So two
replicas are asked for 0.95 of what these two processes reach.

`map` and the actors by hand run a second time with a loader that waits as long for each batch as
two replicas compute one. Such a loader can be hidden but for the first batch, which nothing
computes meanwhile, and the last, which is computed when all are loaded; the floor is the two
processes again, each told of its next batch when the loader has it. What the driver does for a
batch, 3 to 4 ms of one thread while replicas have all cores, stands between two loads and is not
hidden. That is so for the actors by hand, too, and these are what is asked for.

A second table has training steps on two replicas of which one takes twice as long for a row: split
evenly, split by `chunk_weights=(2, 1)`, which is ideal, and by ``"auto"`` after 20 steps. Their
gradients are compared.

Sending a batch and taking its output needs 1.3 to 3 ms of the driver's CPU time, by machine, and on
two cores the driver has none of its own. A batch takes one core 45 ms or more, so that this does
not decide, but with the slow loader.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, compared, interleaved, timed

REPLICAS = 2
WIDTH, ROWS, LAYERS = 1024, 128, 24
_ROUNDS = 12
ONE, TWO = "one replica", "two replicas"
LOOP, RAY_DATA = "two replicas, a loop of calls", "Ray Data, two actors"
BY_HAND, FLOOR = "two Ray actors, by hand", "two processes, alone"
LOADED, BY_HAND_LOADED, FLOOR_LOADED = (
    f"{name}, a loader as slow" for name in (TWO, BY_HAND, FLOOR)
)
EVEN, IDEAL, AUTO = "even", "(2, 1)", "auto, after 20 steps"
_STEPS = 20
_LIMIT_TWO = 1 / 0.95
_LIMIT_BY_HAND = 1.05
_LIMIT_RAY_DATA = 1.0
_LIMIT_AUTO = 1 / 0.9


class Predictor:
    """What Ray Data's actors compute.

    Args:
        net: The net.
    """

    def __init__(self, net: nn.Module) -> None:
        torch.set_num_threads(1)
        self._net = net
        with torch.no_grad():
            net(torch.zeros(ROWS, WIDTH))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began = time.time()
        with torch.no_grad():
            out = self._net(torch.from_numpy(np.ascontiguousarray(batch["data"])))
        return {"out": out.numpy(), "began": np.full(len(out), began)}


def ray_data(net: nn.Module, batches: list[Tensor], check: Callable[[Any], None]) -> Any:
    """A contender that runs `map_batches`, and times itself."""
    import ray.data  # optional: it needs pyarrow

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    loaded = ray.data.from_numpy([x.numpy() for x in batches]).materialize()
    actors = ray.data.ActorPoolStrategy(size=REPLICAS)

    def run() -> float:
        computed = loaded.map_batches(
            Predictor,
            fn_constructor_kwargs={"net": net},
            compute=actors,
            batch_size=ROWS,
            num_cpus=0.5,
        )
        began, total = [], 0.0
        for out in computed.iter_batches(batch_size=ROWS, batch_format="numpy"):
            began.append(float(out["began"][0]))
            total += float(out["out"].sum())
        seconds = time.time() - min(began)
        check(total)
        return seconds

    return run


def by_hand(net: nn.Module, check: Callable[[float], None]) -> Callable[[Iterable[Tensor]], None]:
    """A contender that keeps two actors busy, with two batches each on their way."""
    actor = ray.remote(num_cpus=0)(Predictor)
    actors = [actor.remote(net) for _ in range(REPLICAS)]

    def run(loader: Iterable[Tensor]) -> None:
        waiting: list[Any] = []
        total = 0.0
        for number, x in enumerate(loader):
            if len(waiting) == 2 * REPLICAS:
                total += float(ray.get(waiting.pop(0))["out"].sum())
            waiting.append(actors[number % REPLICAS].__call__.remote({"data": x.numpy()}))
        check(total + sum(float(ray.get(one)["out"].sum()) for one in waiting))

    return run


class AloneInProcesses:
    """A contender that lets processes compute a batch of their own, and carries none."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        for _ in range(REPLICAS):
            here, there = context.Pipe()
            context.Process(target=compute_when_told, args=(there,), daemon=True).start()
            self._lines.append(here)

    def compute(self, count: int) -> None:
        """Compute so many batches together."""
        for line in self._lines:
            line.send(count // REPLICAS)
        for line in self._lines:
            line.recv()

    def compute_loaded(self, loader: Iterable[Tensor]) -> None:
        """Compute one batch for each that is loaded, in turn."""
        told = []
        for _, line in zip(loader, itertools.cycle(self._lines), strict=False):
            line.send(1)
            told.append(line)
        for line in told:
            line.recv()

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            line.send(0)


def compute_when_told(line: Connection) -> None:
    """Compute a batch as many times as is asked for, until that is none."""
    torch.set_num_threads(1)
    net = deep(WIDTH, LAYERS).eval()
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        while count := line.recv():
            for _ in range(count):
                net(x)
            line.send(None)


class Slowed(nn.Module):
    """Computes twice in one process.

    Args:
        body: What it computes.
        slow: The process.
    """

    def __init__(self, body: nn.Module, slow: int) -> None:
        super().__init__()
        self.body = body
        self.slow = slow

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + 0 * self.body(x) if os.getpid() == self.slow else out


def mixed_speeds(effort: Effort) -> dict[str, float]:
    """Milliseconds of a training step where one replica is half as fast, by how it is split."""
    options = raydp_parallel.Options(threads=1)
    with raydp_parallel.Executor(["cpu"] * REPLICAS, options=options) as executor:
        net = Slowed(deep(WIDTH // 2, LAYERS // 4).double(), executor.replicas()[1].pid)
        x = torch.randn(3 * ROWS, WIDTH // 2, dtype=torch.double)
        ways: dict[str, Any] = {EVEN: None, IDEAL: (2, 1), AUTO: "auto"}
        models = {
            name: raydp_parallel.DataParallel(
                copy.deepcopy(net),
                executor=executor,
                options=raydp_parallel.Options(threads=1, chunk_weights=weights),
            )
            for name, weights in ways.items()
        }

        def step(model: Any) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        for _ in range(_STEPS):
            step(models[AUTO])
        contenders = {name: (lambda model=model: step(model)) for name, model in models.items()}
        medians = interleaved(contenders, effort.rounds(4 * _ROUNDS), 3)
        for model in models.values():
            for one, other in zip(model.parameters(), models[EVEN].parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
        return medians


def deep(width: int, layers: int) -> nn.Module:
    """So many square layers."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def measure(effort: Effort) -> tuple[dict[str, float], int]:
    """Milliseconds that all batches take, and how many there are."""
    count = 8 if effort is Effort.SMOKE else 32
    net = deep(WIDTH, LAYERS).eval()
    batches = [*torch.randn(count, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        expected = sum(float(net(x).sum()) for x in batches)

    def check(total: float) -> None:
        if abs(total - expected) > 1e-2 * count:
            raise RuntimeError(f"other outputs: they add up to {total}, expected {expected}")

    options = raydp_parallel.Options(threads=1)
    with (
        raydp_parallel.Executor(["cpu"] * REPLICAS, options=options) as executor,
        contextlib.closing(AloneInProcesses()) as floor,
    ):
        one = raydp_parallel.DataParallel(net, ["cpu"], executor=executor)
        two = raydp_parallel.DataParallel(net, executor=executor)

        def mapped(model: Any, loader: Callable[[], Any]) -> None:
            check(sum(float(out.sum()) for out in model.map(loader())))

        def called() -> None:
            with torch.no_grad():
                check(sum(float(two(x).sum()) for x in batches))

        mapped(two, lambda: batches)
        wait = min(timed(lambda: mapped(two, lambda: batches)) for _ in range(3)) / count

        def slow() -> Iterator[Tensor]:
            for x in batches:
                time.sleep(wait)
                yield x

        actors = by_hand(net, check)
        contenders: dict[str, Callable[[], Any]] = {
            ONE: lambda: mapped(one, lambda: batches),
            TWO: lambda: mapped(two, lambda: batches),
            LOOP: called,
            BY_HAND: lambda: actors(batches),
            FLOOR: lambda: floor.compute(count),
            LOADED: lambda: mapped(two, slow),
            BY_HAND_LOADED: lambda: actors(slow()),
            FLOOR_LOADED: lambda: floor.compute_loaded(slow()),
        }
        if importlib.util.find_spec("pyarrow") is not None:
            contenders[RAY_DATA] = ray_data(net, batches, check)
        return interleaved(contenders, effort.rounds(_ROUNDS), 1), count


def run(effort: Effort) -> Report:
    """Batch inference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        medians, count = measure(effort)
        mixed = mixed_speeds(effort)
    finally:
        torch.set_num_threads(threads)
    rows = [[name, ms, count / ms * 1e3, medians[ONE] / ms] for name, ms in medians.items()]
    table = Table(
        f"{count} batches of {ROWS} rows", ["", "ms", "batches per s", f"rate to {ONE}"], rows
    )
    speeds = compared("A training step, one replica half as fast, by its split", mixed)
    asked = [
        Asked(
            "map: two replicas to two processes that carry nothing",
            medians[TWO] / medians[FLOOR],
            _LIMIT_TWO,
        ),
        Asked(
            "map, a loader as slow: to two Ray actors by hand",
            medians[LOADED] / medians[BY_HAND_LOADED],
            _LIMIT_BY_HAND,
        ),
        Asked(
            'chunk_weights="auto" to the ideal split after 20 steps',
            mixed[AUTO] / mixed[IDEAL],
            _LIMIT_AUTO,
        ),
    ]
    notes = ["One thread each. Ray Data's time is without the start of its actors."]
    if RAY_DATA in medians:
        ratio = medians[TWO] / medians[RAY_DATA]
        asked.append(Asked("map: two replicas to Ray Data", ratio, _LIMIT_RAY_DATA))
    else:
        notes.append("Left out: Ray Data. Not installed: pyarrow")
    question = "How fast is batch inference, beside one replica's rate and Ray Data?"
    numbers = {"median_ms": medians, "mixed_speeds_ms": mixed}
    return Report("inference", question, [table, speeds], asked, numbers, notes)


if __name__ == "__main__":
    alone(run)

"""How long does a death take, and does training end with the same bits, whatever dies?

`python -m benchmarks.faults soak --kills 100` trains while a thread kills and stops replicas at
random moments, then trains as many steps undisturbed, and compares every weight, buffer, loss and
generator.

`python -m benchmarks.faults cost` kills a replica again and again, before a step and between its
forward and backward, and compares the step with undisturbed ones in between; and then both replicas
at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from benchmarks.measure import RESULTS, connect, machine
from benchmarks.nets import perceptron, vectors
from raydp_parallel import DataParallel, Executor, Options

CALL_TIMEOUT = 8.0
"""Seconds after which a stopped replica counts as dead; a chunk that met two of them would be given
up.
"""


class Net(nn.Module):
    """Dropout, batch norm and spectral norm; something in it that has second derivatives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(16, width), nn.BatchNorm1d(width)
        self.two, self.last = spectral_norm(nn.Linear(width, width)), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.norm(self.one(x)).tanh(), 0.3, self.training)
        return self.last(self.two(h).tanh())


class Trainer:
    """A training run, step by step; every number of it follows from its seed.

    Args:
        executor: The replicas are its.
        seed: The seed of data, weights and masks.
        penalty: True if each step has a gradient penalty, and so a second derivative.
    """

    def __init__(self, executor: Executor, seed: int, penalty: bool) -> None:
        torch.manual_seed(seed)
        self.penalty = penalty
        self.model = DataParallel(Net(96), executor=executor)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """One step."""
        x = torch.randn(8 * len(self.model.device_ids), 16, requires_grad=self.penalty)
        loss = self.model(x).square().mean() - self.model(x + 1).mean()
        if self.penalty:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def state(self) -> list[Tensor]:
        """Return everything that there is to compare."""
        tensors = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        return [*tensors, torch.stack(self.losses), torch.get_rng_state()]


class Chaos(threading.Thread):
    """Does harm at random moments.

    Args:
        executor: Its replicas are harmed.
        seed: The seed of all that it does.
        kills: How many replicas it kills, before it stops.
        pause: Seconds between two deeds, on average.
    """

    def __init__(self, executor: Executor, seed: int, kills: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.executor, self.kills, self.pause = executor, kills, pause
        self.done = {"killed": 0, "stopped for good": 0, "stopped for a while": 0}

    def run(self) -> None:
        while self.done["killed"] < self.kills:
            time.sleep(self.random.expovariate(1 / self.pause))
            ready = [info.pid for info in self.executor.replicas() if info.state == "ready"]
            if ready:
                self.harm(self.random.choice(ready))

    def harm(self, pid: int) -> None:
        """One deed: nine in ten are kills."""
        what = self.random.choices([*self.done], [90, 2, 8])[0]
        try:
            os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            if what == "stopped for a while":
                time.sleep(0.3)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # it is dead already
        self.done[what] += 1


def settle(executor: Executor) -> None:
    """Wait until every slot is taken."""
    while not all(info.state == "ready" for info in executor.replicas()):
        executor.grow(60)


def soak(replicas: int, kills: int, seed: int, penalty: bool, pause: float) -> dict[str, Any]:
    """Train under fire, then undisturbed, and compare."""
    options = Options(call_timeout=CALL_TIMEOUT, threads=1)
    begun = time.monotonic()
    with Executor(["cpu"] * replicas, options=options) as executor:
        trainer = Trainer(executor, seed, penalty)
        chaos = Chaos(executor, seed, kills, pause)
        chaos.start()
        while chaos.is_alive():
            trainer.step()
        settle(executor)
        trainer.step()
        found, steps, stats = trainer.state(), len(trainer.losses), executor.stats()
    with Executor(["cpu"] * replicas, options=Options(threads=1)) as local:
        calm = Trainer(local, seed, penalty)
        for _ in range(steps):
            calm.step()
    same = all(torch.equal(one, other) for one, other in zip(found, calm.state(), strict=True))
    counted = {"deaths": stats.deaths, "replays": stats.replays, "respawns": stats.respawns}
    about = {"replicas": replicas, "seed": seed, "gradient penalty": penalty, "steps": steps}
    minutes = round((time.monotonic() - begun) / 60, 2)
    return {**about, "minutes": minutes, **chaos.done, **counted, "bit-identical": same}


def cost(rounds: int, replicas: int) -> dict[str, float]:
    """Milliseconds of undisturbed steps, and how many more a step with deaths takes."""
    x, y = vectors(1024, 64)
    calm: list[float] = []
    extra: dict[str, list[float]] = {"one, before": [], "one, between": [], "all, before": []}
    with Executor(["cpu"] * replicas) as executor:
        model = DataParallel(perceptron(1024), executor=executor)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(between: Callable[[], Any] = lambda: None) -> None:
            loss = nn.functional.cross_entropy(model(x), y)
            between()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def kill(count: int) -> None:
            for info in executor.replicas()[:count]:
                os.kill(info.pid, signal.SIGKILL)

        for number in range(2 * rounds + rounds // 3 + 1):
            settle(executor)
            for _ in range(5):
                step()
            around = [timed(step) for _ in range(5)]
            calm += around
            if number >= 2 * rounds:
                which, took = "all, before", timed(lambda: (kill(replicas), step()))
            elif number % 2:
                which, took = "one, before", timed(lambda: (kill(1), step()))
            else:
                which, took = "one, between", timed(lambda: step(lambda: kill(1)))
            extra[which].append(took - statistics.median(around))
    medians = {f"killed: {name} a step": statistics.median(m) for name, m in extra.items() if m}
    return {"undisturbed step": statistics.median(calm), **medians}


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    """Run one part, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("soak", "cost"))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--penalty", action="store_true")
    parser.add_argument(
        "--pause", type=float, default=1.2, help="seconds between two deeds, on average"
    )
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    logging.getLogger("raydp_parallel").setLevel(logging.ERROR)
    connect()
    if chosen.part == "soak":
        found: Any = soak(chosen.replicas, chosen.kills, chosen.seed, chosen.penalty, chosen.pause)
    else:
        found = cost(chosen.rounds, chosen.replicas)
    print(found)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "faults.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps({**kept, "machine": machine(), chosen.part: found}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    if chosen.part == "soak" and not found["bit-identical"]:
        raise SystemExit("the weights are not those of the undisturbed run")


if __name__ == "__main__":
    main()

"""Does a program hold for hours? What users do to it, in minutes, all at once.

`python -m benchmarks.soak threads --minutes 10` trains and predicts in several threads, under
Ctrl-C, deaths, stops and forks. `python -m benchmarks.soak deaths --kills 50` ends a replica in
each second step of a training in the replicas, at any moment, with and without a limit for calls.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import connect
from raydp_parallel import DataParallel, Executor, ForkedProcess, Options

STEPS = 12
"""Steps of a training, which then begins anew, so that it can be compared."""

PATIENCE = 120.0
"""Seconds without an answer after which a thread counts as hung."""


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def refused(model: DataParallel[Any]) -> bool:
    """Return if a forked child that calls the model is told that it may not."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            model(torch.ones(4, 16))
        except ForkedProcess:
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def batch(step: int) -> Tensor:
    """The rows of a step."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def training(model: DataParallel[Any], start: dict[str, Tensor]) -> Iterator[list[Tensor]]:
    """Train from the start, and give the state after each step."""
    model.module.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        yield [*[t.detach().clone() for t in model.state_dict().values()], *grads]


class Trainer:
    """Trains a net again and again, and compares each step with that of an undisturbed time."""

    def __init__(self, executor: Executor, width: int) -> None:
        torch.manual_seed(width)
        net = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)
        )
        self.start = copy.deepcopy(net.state_dict())
        self.expected = [*training(DataParallel(copy.deepcopy(net), executor=executor), self.start)]
        self.model = DataParallel(net, executor=executor)

    def run(self, done: Callable[[bool], bool]) -> None:
        """Train once, or until it is enough."""
        for found, expected in zip(training(self.model, self.start), self.expected, strict=True):
            if done(same(found, expected)):
                return


class Predictor:
    """Asks for outputs again and again, small or so large that they lie in shared memory."""

    def __init__(self, executor: Executor, size: int) -> None:
        torch.manual_seed(size)
        net = nn.Linear(16, size).eval()
        self.model = DataParallel(net, executor=executor)
        self.inputs = [batch(100 + number) for number in range(5)]
        with torch.no_grad():
            self.expected = [*map(self.model, self.inputs)]

    def run(self, done: Callable[[bool], bool]) -> None:
        """Ask for each output once, or until it is enough."""
        with torch.no_grad():
            for x, expected in zip(self.inputs, self.expected, strict=True):
                if done(torch.equal(self.model(x), expected)):
                    return


class Soak:
    """Counts what is done, what is wrong and what hangs, and says when it is enough."""

    def __init__(self, seconds: float) -> None:
        self.over = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.seen: dict[str, float] = {}
        self.errors: list[str] = []
        self.armed = False

    @property
    def enough(self) -> bool:
        """Whether the time is over, or something is wrong."""
        return time.monotonic() > self.over or bool(self.errors)

    def tally(self, name: str, right: bool) -> bool:
        """One result of a thread; whether it is enough."""
        self.counts[name] += 1
        self.seen[name] = time.monotonic()
        if not right:
            self.errors.append(f"{name}: result {self.counts[name]} is wrong")
        return self.enough

    def work(self, name: str, work: Any) -> None:
        """Run a trainer or a predictor until it is enough."""
        try:
            self.seen[name] = time.monotonic()
            while not self.enough:
                work.run(lambda right: self.tally(name, right))
        except Exception as error:
            self.errors.append(f"{name}: {error!r}")

    def interrupted(self, name: str, work: Any, others: Sequence[threading.Thread]) -> None:
        """The same in the main thread, where Ctrl-C arrives: what it broke off is begun anew. Then
        the others end.
        """

        def ctrl_c(_signal: int, _frame: FrameType | None) -> None:
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, ctrl_c)
        try:
            while not self.enough:
                try:
                    self.armed = True
                    self.work(name, work)
                    self.armed = False
                except KeyboardInterrupt:
                    self.counts["interrupted"] += 1
            for thread in others:
                thread.join(PATIENCE)
                if thread.is_alive():
                    self.errors.append(f"{thread.name}: does not end")
        finally:
            self.armed = False
            signal.signal(signal.SIGINT, before)

    def hung(self) -> list[str]:
        """Threads from which nothing was heard for long."""
        return [name for name, at in self.seen.items() if time.monotonic() - at > PATIENCE]


class Chaos:
    """Does something to the program every now and then: ends and stops replicas, and lets forked
    children call a model.
    """

    def __init__(self, soak: Soak, executor: Executor, model: DataParallel[Any]) -> None:
        self.soak, self.executor, self.model = soak, executor, model
        self.random = random.Random(1)
        self.samples: list[tuple[int, float]] = []

    def run(self) -> None:
        """Until it is enough."""
        try:
            while not self.soak.enough:
                time.sleep(self.random.uniform(0.1, 1.0))
                what = self.random.choice(["ctrl_c", "ctrl_c", "kill", "stop", "fork", "measure"])
                getattr(self, what)()
                for name in self.soak.hung():
                    self.soak.errors.append(f"{name}: hangs")
        except Exception as error:
            self.soak.errors.append(f"chaos: {error!r}")

    def ctrl_c(self) -> None:
        """As in a notebook."""
        os.kill(os.getpid(), signal.SIGINT)
        self.soak.counts["ctrl-c"] += 1

    def kill(self) -> None:
        """One of the replicas, if all are there: the successor needs some seconds."""
        infos = self.executor.replicas()
        if all(info.state == "ready" for info in infos):
            with contextlib.suppress(ProcessLookupError):  # it died, and no call has noticed yet
                os.kill(self.random.choice(infos).pid, signal.SIGKILL)
                self.soak.counts["killed"] += 1

    def stop(self) -> None:
        """One of the replicas, for a moment."""
        info = self.random.choice(self.executor.replicas())
        if info.state == "ready":
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(0.01, 1.0))
                os.kill(info.pid, signal.SIGCONT)
                self.soak.counts["stopped"] += 1

    def fork(self) -> None:
        """A child that calls the model, while other threads do."""
        if not refused(self.model):
            self.soak.errors.append("a child was not refused")
        self.soak.counts["forked"] += 1

    def measure(self) -> None:
        """Descriptors, and megabytes of memory."""
        status = Path("/proc/self/status").read_text()
        memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        self.samples.append((len(os.listdir("/proc/self/fd")), memory))


def middle(values: list[float]) -> float:
    """The median."""
    return sorted(values)[len(values) // 2]


def threads_through_everything(minutes: float) -> None:
    """Nothing is wrong, nothing hangs, and neither memory nor descriptors grow."""
    options = Options(call_timeout=60)
    with Executor(["cpu", "cpu"], options=options) as executor:
        main = Trainer(executor, 300)
        small, large = Predictor(executor, 8), Predictor(executor, 1 << 18)
        others = {"training": Trainer(executor, 64), "small": small, "large": large}
        soak = Soak(minutes * 60)
        chaos = Chaos(soak, executor, main.model)
        works: list[Any] = [functools.partial(soak.work, *one) for one in others.items()]
        threads = [threading.Thread(target=one, daemon=True) for one in (*works, chaos.run)]
        for thread in threads:
            thread.start()
        soak.interrupted("main", main, threads)
        assert not soak.errors, (soak.errors, soak.counts)
        gc.collect()
        executor.flush()
        held = executor.flush()
        stats = executor.stats()
    third = max(1, len(chaos.samples) // 3)
    early, late = chaos.samples[third : 2 * third], chaos.samples[2 * third :]
    files = [middle([sample[0] for sample in part]) for part in (early, late)]
    memory = [middle([sample[1] for sample in part]) for part in (early, late)]
    counts = stats.deaths, stats.respawns, stats.replays
    print(f"\n{minutes:g} minutes: {dict(soak.counts)}; deaths, respawns, replays {counts}")
    print(f"(bytes, graphs) {held}; descriptors {files}, megabytes {memory}")
    # Ctrl-C in a finalizer is lost, and with it, now and then, the word that a graph is of no use
    # any more.
    assert all(graphs <= soak.counts["interrupted"] // 20 for _, graphs in held)
    assert files[1] <= files[0] + 10
    assert memory[1] <= 1.1 * memory[0] + 50


def train_in_replicas(executor: Executor, steps: int, disturb: Callable[[int], None]) -> Any:
    """Train with momentum, accumulation, both ways to clip, and batch norm; the state at the end,
    and the seconds of each step.
    """
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
    model: DataParallel[Any] = DataParallel(net, executor=executor)
    optimizer: Any = model.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    seconds = []
    for step in range(steps):
        disturb(step)
        begun = time.monotonic()
        optimizer.zero_grad()
        for turn in range(2):
            model(batch(2 * step + turn)).square().mean().backward()
        if step % 3 == 1:
            optimizer.clip_grad_norm_(0.1)
        if step % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % 25 == 24:
            model.sync()
        seconds.append(time.monotonic() - begun)
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *[s["momentum_buffer"] for s in states]], seconds


def deaths_in_training(replicas: int, limit: float | None, kills: int) -> None:
    """The bits are the same, no step waits long, and with a limit none is lost."""
    chance = random.Random(replicas)
    with Executor(["cpu"] * replicas, options=Options(call_timeout=limit)) as executor:
        threads = []

        def kill(step: int) -> None:
            if step % 2:
                for thread in threads[-1:]:
                    thread.join()
                executor.flush()  # notices who died since
                executor.grow(120)
                pid, moment = chance.choice(executor.replicas()).pid, chance.uniform(0.0, 0.15)
                threads.append(threading.Timer(moment, os.kill, [pid, signal.SIGKILL]))
                threads[-1].start()

        expected, _ = train_in_replicas(executor, 2 * kills, lambda step: None)
        found, seconds = train_in_replicas(executor, 2 * kills, kill)
        for thread in threads:
            thread.join()
        executor.flush()
        deaths = executor.stats().deaths
    calm, hit = sorted(seconds[::2]), sorted(seconds[1::2])
    print(f"\n{replicas} replicas, limit {limit}: {deaths} deaths; steps {middle(calm):.3f} s, hit")
    print(f"{middle(hit):.3f} s, worst {hit[-5:]}, of others {calm[-3:]}")
    assert same(found, expected)
    assert deaths == kills
    assert max(seconds) < 60


def main() -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("threads", "deaths"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    connect()
    if options.part == "threads":
        threads_through_everything(options.minutes)
    else:
        for replicas in (2, 3):
            for limit in (None, 3.0):
                deaths_in_training(replicas, limit, options.kills)
    raydp_parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

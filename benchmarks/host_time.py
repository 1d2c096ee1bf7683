"""How much CPU time does the driver spend on a step, by replicas and by tensors?

`python -m benchmarks.host_time` takes nets of many tensors that compute next to nothing, and counts
the CPU time of the driver's process for forward and backward, beside that of the plain module's
own step. The driver is one process: whatever it does for each tensor of each replica, all GPUs wait
for. All run with one thread of torch's: those that only spin for work count as CPU time, too.

The last table is about steps whose computation needs no CPU, as where GPUs compute: the same
ResNet-50's tensors, but forward sleeps and so does backward. It has what a step takes beside that.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, compared, interleaved

REPLICAS = (2, 4, 8)
ROUNDS = 48
FORWARD, BACKWARD = 0.009, 0.019
"""Seconds that a chunk takes beside the CPU."""
BESIDE = "a step beside its computation"
HERE, THERE, WITH_LOSS = "in the driver", "in the replicas", "in the replicas, loss there"


Net = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""What makes a net, and the shape of its batch."""


class Bottleneck(nn.Module):
    """A block of a ResNet-50 with a few channels: as many tensors, and little to compute."""

    def __init__(self, into: int, width: int, out: int, past: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.past: nn.Module = nn.Identity()
        if past:
            self.past = nn.Sequential(nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.past(x))


def residual() -> nn.Module:
    """The 320 tensors of a ResNet-50: 161 parameters, 159 buffers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)]
    into = 4
    for blocks in (3, 4, 6, 3):
        for k in range(blocks):
            layers.append(Bottleneck(into, 2, 8, k == 0))
            into = 8
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


_SLEEP = functools.partial(next, map(time.sleep, itertools.repeat(BACKWARD)))
"""A hook that sleeps, as a process does whose GPU computes. It is no function of Python's, as is
nothing that a GPU runs: replicas compute no backward ahead that calls one.
"""


class Asleep(nn.Module):
    """A net whose computation takes no CPU time beside its own little."""

    def __init__(self) -> None:
        super().__init__()
        self.net = residual()

    def forward(self, x: Tensor) -> Tensor:
        """The net's output, later."""
        found: Tensor = self.net(x)
        time.sleep(FORWARD)
        assert found.grad_fn is not None
        found.grad_fn.register_prehook(_SLEEP)
        return found


def linear(tensors: int) -> Callable[[], nn.Module]:
    """Layers of 4 x 4 with so many parameters in all."""
    return lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(tensors // 2)])


RESNET50 = "ResNet-50's 320 tensors"
NETS: dict[str, Net] = {
    "20 parameters": (linear(20), (32, 4)),
    RESNET50: (residual, (8, 3, 2, 2)),
    "400 parameters": (linear(400), (32, 4)),
    "1,000 parameters": (linear(1000), (32, 4)),
}


class Stepper:
    """One net that is trained, and its times.

    Args:
        net: The net.
        model: What runs it.
        batch: The shape of its batch.
    """

    def __init__(self, net: nn.Module, model: nn.Module, batch: tuple[int, ...]) -> None:
        self._model, self._batch = model, torch.ones(batch)
        self._optimizer = torch.optim.SGD(net.parameters(), 0.01)
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def step(self) -> None:
        """Train one step, of which forward and backward are timed."""
        self._optimizer.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        self._model(self._batch).sum().backward()
        self.cpu.append(1e3 * (time.process_time() - cpu))
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self._optimizer.step()

    def median(self, times: list[float], warmup: int) -> float:
        """Median milliseconds, without the first steps."""
        return statistics.median(times[warmup:])


def beside(effort: Effort, replicas: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a step beside its computation, by replicas and place of the optimizer."""

    def stepping(net: nn.Module, count: int, place: str) -> Callable[[], float]:
        model: Any = raydp_parallel.DataParallel(net, ["cpu"] * count) if count else net
        make = torch.optim.SGD if place == HERE else model.optimizer
        given = [net.parameters(), 0.01] if place == HERE else [torch.optim.SGD]
        optimizer = make(*given, **({} if place == HERE else {"lr": 0.01}))
        loss = model.with_loss(functional.cross_entropy) if place == WITH_LOSS else None
        x, y = torch.ones(8, 3, 2, 2), torch.zeros(8, dtype=torch.long)

        def step() -> float:
            begun = time.perf_counter()
            optimizer.zero_grad()
            found = functional.cross_entropy(model(x), y) if loss is None else loss(x, y)
            found.backward()
            optimizer.step()
            return time.perf_counter() - begun - FORWARD - BACKWARD

        return step

    steps = {"plain": stepping(Asleep(), 0, HERE)}
    for count in replicas:
        for place in (HERE, THERE, WITH_LOSS):
            steps[f"{count} replicas, optimizer {place}"] = stepping(Asleep(), count, place)
    return interleaved(steps, effort.rounds(ROUNDS), effort.warmup)


def measure(
    nets: Mapping[str, Net], replicas: Sequence[int], effort: Effort
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the driver's CPU, and of the clock, by net and replicas, of which 0 are the
    plain module.
    """
    torch.set_num_threads(1)
    warmup = effort.warmup
    data: dict[str, dict[str, list[float]]] = {}
    for name, (make, batch) in nets.items():
        plain = make()
        steppers = {0: Stepper(plain, plain, batch)}
        for count in replicas:
            net = make()
            model = raydp_parallel.DataParallel(net, ["cpu"] * count)
            steppers[count] = Stepper(net, model, batch)
        for _ in range(warmup + effort.rounds(ROUNDS)):
            for one in steppers.values():
                one.step()
        found = {}
        for count, one in steppers.items():
            found[str(count)] = [one.median(one.cpu, warmup), one.median(one.wall, warmup)]
        data[name] = found
    return data


def run(effort: Effort) -> Report:
    """CPU time of the driver by replicas and tensors."""
    replicas = REPLICAS[:1] if effort is Effort.SMOKE else REPLICAS
    nets = {**NETS} if effort is Effort.FULL else dict([*NETS.items()][:3])
    data = measure(nets, replicas, effort)
    rows = []
    for name, found in data.items():
        plain_cpu, plain_wall = found["0"]
        for count in replicas:
            cpu, wall = found[str(count)]
            rows.append([name, count, cpu, cpu / plain_cpu, wall, wall / plain_wall])
    columns = ["net", "replicas", "driver's CPU ms", "to plain", "ms", "to plain"]
    asked = []
    name = RESNET50
    plain_cpu, first = data[name]["0"][0], data[name][str(replicas[0])][0]
    if 8 in replicas:
        eight = data[name]["8"][0]
        asked.append(Asked("8 replicas, driver's CPU to plain", eight / plain_cpu, 1.3))
        further = (eight - first) / 6 / plain_cpu
        asked.append(Asked("a further replica to plain", further, 0.07))
    wall = data["400 parameters"]
    asked.append(Asked("400 parameters, a step to plain", wall["2"][1] / wall["0"][1], 2.6))
    medians = beside(effort, replicas)
    tables = [Table("forward and backward", columns, rows), compared(BESIDE, medians)]
    for place in (HERE, WITH_LOSS):
        ratio = medians[f"2 replicas, optimizer {place}"] / medians["plain"]
        asked.append(Asked(f"{BESIDE}, optimizer {place}, to plain", ratio, 3.2))
    question = "How much CPU time does the driver spend on a step, by replicas and by tensors?"
    return Report("host_time", question, tables, asked, {**data, BESIDE: medians})


if __name__ == "__main__":
    alone(run)

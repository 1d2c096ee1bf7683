"""`raydp-parallel check`: compare what this machine's devices compute with the plain module.

A small net trains under the wrapper and beside it, in double precision, so that rounding is no
difference. Then one replica is killed in the middle of a step. Times are shown, and are not judged.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import normalize
from raydp_parallel.driver.executor import Executor
from raydp_parallel.options import Options
from raydp_parallel.wrapper import DataParallel

_STEPS = 3
_TIMED = 20

Result = tuple[bool, str]
"""True if a check holds, and its text."""


def small(width: int) -> nn.Module:
    """Make a net."""
    first = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    return nn.Sequential(*first, nn.Linear(width, 10))


def steps(
    model: nn.Module, x: Tensor, middle: Callable[[int], object] = int
) -> Iterator[list[Tensor]]:
    """Train, and yield the output, the gradients and the state of each step. ``middle`` is called
    between forward and backward.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    for step in range(_STEPS):
        optimizer.zero_grad()
        out = model(x)
        middle(step)
        out.square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        yield [out.detach(), *grads, *(t.clone() for t in model.state_dict().values())]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference, as a part of the other's norm."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(1e-9)) for a, b in pairs)


def compared(executor: Executor, net: nn.Module, x: Tensor) -> Result:
    """Train under the wrapper and beside it, and compare everything."""
    model = DataParallel(copy.deepcopy(net), executor=executor)
    pairs = zip(steps(model, x), steps(copy.deepcopy(net), x), strict=True)
    worst = max(distance(ours, theirs) for ours, theirs in pairs)
    exact = "the same bits" if worst == 0 else f"they differ by {worst:.0e}"
    # Sums in another order differ by less, in double precision.
    return worst <= 1e-9, f"outputs, gradients and weights of {_STEPS} steps: {exact}"


def killed(executor: Executor, net: nn.Module, x: Tensor) -> Result:
    """Kill a replica between forward and backward: same bits, and a new process comes."""
    _say("  A replica is killed now, and the log says so:")
    model, other = (DataParallel(copy.deepcopy(net), executor=executor) for _ in range(2))
    victim = executor.replica_set.ready()[-1].client
    expected = [*steps(model, x)]
    found = [*steps(other, x, lambda step: victim.end() if step == 1 else None)]
    same = all(all(map(torch.equal, *pair)) for pair in zip(expected, found, strict=True))
    executor.grow()
    deaths, states = executor.stats().deaths, {info.state for info in executor.replicas()}
    back = "came" if states == {"ready"} else "did NOT come"
    text = f"{'the same bits' if same else 'DIFFERENT values'}; a new process {back}"
    return same and states == {"ready"} and deaths == 1, text


def timed(executor: Executor, net: nn.Module, x: Tensor) -> Iterator[tuple[str, float]]:
    """Yield milliseconds of a step: of the plain module, the wrapper, and each device in it."""
    model = DataParallel(copy.deepcopy(net), executor=executor)
    for name, one in (("the plain module", net), ("the wrapper", model)):
        times = []
        for step in range(_TIMED):
            if step == _TIMED // 4:  # warm now
                before = executor.stats()
            begun = time.perf_counter()
            one(x).square().mean().backward()
            times.append((time.perf_counter() - begun) * 1e3)
        yield name, statistics.median(times)
    for replica in executor.stats().since(before).replicas:
        busy = replica.busy / (_TIMED - _TIMED // 4)
        yield f"  replica {replica.index} on {replica.device} {replica.gpu}".rstrip(), busy * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what is found; returns 0 if all holds, else 1."""
    parser = argparse.ArgumentParser(prog="raydp-parallel check", description=__doc__)
    text = "such as 0,1 or cpu,cpu; by default all GPUs of the cluster, else two CPU replicas"
    parser.add_argument("--devices", default="all", help=text)
    given = parser.parse_args(arguments).devices
    names = [int(name) if name.isdigit() else name for name in given.split(",")]
    try:
        ids = normalize(None if given == "all" else names, Options()) or ["cpu", "cpu"]
    except ValueError as error:
        parser.error(str(error))
    _say(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    failed = 0
    place = "cuda:0" if torch.cuda.is_available() and "cpu" not in ids else "cpu"
    with Executor(ids, options=Options(metrics=False, name="check")) as executor:
        net, x = small(64).double().to(place), torch.randn(8 * len(ids) + 1, 64)
        for check in (compared, killed):
            try:
                good, text = check(executor, net, x.double().to(place))
            except Exception as error:
                good, text = False, f"{type(error).__name__}: {error}"
            failed += not good
            _say(f"  {'ok    ' if good else 'FAILED'}  {check.__name__:10}{text}")
        _say("\nms per training step, with the whole batch or a device's part of it")
        net, x = small(1024).to(place), torch.randn(64 * len(ids), 1024).to(place)
        for name, milliseconds in timed(executor, net, x):
            _say(f"  {name:40}{milliseconds:9.2f}")
    if "cpu" in ids:
        _say("CPU replicas share the cores of one machine: they show that it works, not a gain")
    _say(f"check {'FAILED' if failed else 'passed'}")
    return int(failed > 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

"""`raydp-parallel check`: compare what this machine's devices compute with the plain module.

A small net trains under the wrapper and beside it, in double precision, so that rounding is no
difference. Then one replica is killed in the middle of a step. Times are shown, and are not judged.
"""

from __future__ import annotations

import copy
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import normalize
from raydp_parallel.driver.executor import Executor
from raydp_parallel.options import Options
from raydp_parallel.wrapper import DataParallel

_STEPS = 3
_TIMED = 20
_say = functools.partial(print, flush=True)


def small(width: int) -> nn.Module:
    """Make a net."""
    first = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    return nn.Sequential(*first, nn.Linear(width, 10))


def trained(
    net: nn.Module, x: Tensor, executor: Executor | None, middle: Callable[[int], object] = int
) -> list[Tensor]:
    """Train a copy, and return the outputs and the weights of all steps, which tell the gradients.
    ``middle`` is called between forward and backward.
    """
    net, found = copy.deepcopy(net), list[Tensor]()
    model = DataParallel(net, executor=executor) if executor is not None else net
    optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9)
    for step in range(_STEPS):
        optimizer.zero_grad()
        out = model(x)
        middle(step)
        out.square().mean().backward()
        optimizer.step()
        found += [out.detach(), *(p.detach().clone() for p in net.parameters())]
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the difference, as a part of the other's norm."""
    return float((ours - theirs).norm() / theirs.norm().clamp(1e-9))


def checks(executor: Executor, net: nn.Module, x: Tensor) -> Iterator[tuple[str, bool, str]]:
    """Compare everything of a training under the wrapper with the plain module's, and with one in
    which a replica is killed between forward and backward. Yield a check's name, if it holds, and a
    text.
    """
    ours = trained(net, x, executor)
    worst = max(map(distance, ours, trained(net, x, None)))
    exact = "the same bits" if worst == 0 else f"they differ by {worst:.0e}"
    # Sums in another order differ by less, in double precision.
    yield "compared", worst <= 1e-9, f"outputs and weights of {_STEPS} steps: {exact}"
    _say("  A replica is killed now, and the log says so:")
    victim = executor.replica_set.ready_slots()[-1].client
    found = trained(net, x, executor, lambda step: victim.end() if step == 1 else None)
    executor.grow()
    same = all(map(torch.equal, found, ours))
    back = {info.state for info in executor.replicas()} == {"ready"}
    bits, came = "the same bits" if same else "DIFFERENT values", "came" if back else "did NOT come"
    good = same and back and executor.stats().deaths == 1
    yield "killed", good, f"{bits}; a new process {came}"


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


def main(devices: str) -> int:
    """Check, and print what is found; returns 0 if all holds, else 1."""
    names = [int(name) if name.isdigit() else name for name in devices.split(",")]
    ids = normalize(None if devices == "all" else names, Options()) or ["cpu", "cpu"]
    _say(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    failed = 0
    place = "cuda:0" if torch.cuda.is_available() and "cpu" not in ids else "cpu"
    with Executor(ids, options=Options(metrics=False, name="check")) as executor:
        net, x = small(64).double().to(place), torch.randn(8 * len(ids) + 1, 64)
        try:
            for name, good, text in checks(executor, net, x.double().to(place)):
                failed += not good
                _say(f"  {'ok    ' if good else 'FAILED'}  {name:10}{text}")
        except Exception as error:
            failed += 1
            _say(f"  FAILED  {type(error).__name__}: {error}")
        _say("\nms per training step, with the whole batch or a device's part of it")
        net, x = small(1024).to(place), torch.randn(64 * len(ids), 1024).to(place)
        for name, milliseconds in timed(executor, net, x):
            _say(f"  {name:40}{milliseconds:9.2f}")
    if "cpu" in ids:
        _say("CPU replicas share the cores of one machine: they show that it works, not a gain")
    _say(f"check {'FAILED' if failed else 'passed'}")
    return int(failed > 0)

"""How fast is batch inference, beside one replica's rate and Ray Data?

`python -m benchmarks.inference` computes the same batches with a net that is bound by the CPU,
interleaved: `map` on one replica, `map` on two, a loop that calls the wrapper on two replicas, two
Ray actors that are kept busy by hand, and Ray Data's `map_batches` with two actors. Each replica
and each actor has one thread. Ray Data starts its actors anew each time; its time counts from when
the first of them begins its first batch. All outputs are compared.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved

REPLICAS = 2
WIDTH, ROWS, LAYERS = 1024, 128, 24
ONE, TWO = "one replica", "two replicas"
LOOP, RAY_DATA = "two replicas, a loop of calls", "Ray Data, two actors"
BY_HAND = "two Ray actors, by hand"
_ROUNDS = 12


class Predictor:
    """An actor's work.

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


def ray_data(net: nn.Module, batches: list[Tensor], check: Callable[[float], None]) -> Any:
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

    def run(batches: Iterable[Tensor]) -> None:
        waiting: list[Any] = []
        total = 0.0
        for number, x in enumerate(batches):
            if len(waiting) == 2 * REPLICAS:
                total += float(ray.get(waiting.pop(0))["out"].sum())
            waiting.append(actors[number % REPLICAS].__call__.remote({"data": x.numpy()}))
        check(total + sum(float(ray.get(one)["out"].sum()) for one in waiting))

    return run


def deep() -> nn.Module:
    """Many square layers."""
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 10)).eval()


def measure(effort: Effort, count: int) -> dict[str, float]:
    """Milliseconds that all batches take."""
    net = deep()
    batches = [*torch.randn(count, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        expected = sum(float(net(x).sum()) for x in batches)

    def check(total: float) -> None:
        if abs(total - expected) > 1e-2 * count:
            raise RuntimeError(f"other outputs: they add up to {total}, expected {expected}")

    options = raydp_parallel.Options(threads=1)
    with raydp_parallel.Executor(["cpu"] * REPLICAS, options=options) as executor:
        one = raydp_parallel.DataParallel(net, ["cpu"], executor=executor)
        two = raydp_parallel.DataParallel(net, executor=executor)

        def mapped(model: Any) -> None:
            check(sum(float(out.sum()) for out in model.map(batches)))

        def called() -> None:
            with torch.no_grad():
                check(sum(float(two(x).sum()) for x in batches))

        actors = by_hand(net, check)
        contenders: dict[str, Callable[[], Any]] = {
            ONE: lambda: mapped(one),
            TWO: lambda: mapped(two),
            LOOP: called,
            BY_HAND: lambda: actors(batches),
        }
        if importlib.util.find_spec("pyarrow") is not None:
            contenders[RAY_DATA] = ray_data(net, batches, check)
        return interleaved(contenders, effort.rounds(_ROUNDS), 1)


def run(effort: Effort) -> Report:
    """Batch inference."""
    count, threads = 8 if effort is Effort.SMOKE else 32, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        medians = measure(effort, count)
    finally:
        torch.set_num_threads(threads)
    rows = [[name, ms, count / ms * 1e3, medians[ONE] / ms] for name, ms in medians.items()]
    columns = ["", "ms", "batches per s", f"rate to {ONE}"]
    table = Table(f"{count} batches of {ROWS} rows", columns, rows)
    asked = [
        Asked(f"map: two replicas to {name}", medians[TWO] / medians[name], limit)
        for name, limit in ((BY_HAND, 1.05), (RAY_DATA, 1.0))
        if name in medians
    ]
    question = "How fast is batch inference, beside one replica's rate and Ray Data?"
    notes = ["One thread each. Ray Data's time is without the start of its actors."]
    return Report("inference", question, [table], asked, {"median_ms": medians}, notes)


if __name__ == "__main__":
    alone(run)

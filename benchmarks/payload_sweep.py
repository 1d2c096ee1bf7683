"""What does a step cost as its payload grows?

`python -m benchmarks.payload_sweep` sends a float tensor of 1 KB to 256 MB through a wrapped
`nn.Identity` on two CPU replicas, with and without gradients. Over the time of the tiny step, which
carries 1 KB, it costs as much as there is to copy. The floor is one copy each way of the same
bytes, between memory that is mapped already, by one thread; with gradients there are two. Beside it
stand the same copies into new memory, which is where an output has to go, and a naive Ray call: two
actors that take and return a NumPy array. Sizes are those of the whole batch; each replica gets
half of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved, timed
from benchmarks.peers import echo

KB, MB = 1024, 1024 * 1024
TINY = 1 * KB
SMALL = (1 * KB, 4 * KB, 16 * KB, 60 * KB, 120 * KB, 240 * KB, 1 * MB)
LARGE = (4 * MB, 16 * MB, 64 * MB, 256 * MB)
REPLICAS = 2
ROUNDS = 150
OURS, OURS_GRAD, FLOOR, FRESH, NAIVE = (
    "no gradients",
    "with gradients",
    "floor",
    "into new memory",
    "naive Ray",
)


def plain_step(model: nn.Module, x: Tensor) -> float:
    """A forward without gradients; letting go of its output is not timed."""
    with torch.no_grad():
        held: list[Tensor] = []
        return timed(lambda: held.append(model(x)))


def grad_step(model: nn.Module, x: Tensor, grad: Tensor) -> float:
    """Forward and backward: as many bytes there and back, twice."""
    seconds = timed(lambda: model(x).backward(grad))
    x.grad = None
    return seconds


def copies(size: int) -> Callable[[], None]:
    """A copy each way, from memory to memory, all mapped before."""
    here, there = (np.ones(size, dtype=np.uint8) for _ in range(2))
    one, other = here.ctypes.data, there.ctypes.data

    def copy() -> None:
        ctypes.memmove(other, one, size)
        ctypes.memmove(one, other, size)
        assert here.nbytes == there.nbytes == size  # and so both live as long as this

    return copy


def fresh_copies(size: int) -> Callable[[], float]:
    """A copy each way, the second into memory that is new."""
    here, there = (np.ones(size, dtype=np.uint8) for _ in range(2))

    def copy() -> float:
        held: list[np.ndarray] = []

        def work() -> None:
            np.copyto(there, here)
            held.append(there.copy())

        return timed(work)

    return copy


def contenders(
    model: nn.Module, actors: list[object], size: int
) -> dict[str, Callable[[], object]]:
    """Everything that takes a payload of this size."""
    x = torch.ones(REPLICAS, size // REPLICAS // 4)
    leaf, grad = x.clone().requires_grad_(), x.clone()
    return {
        OURS: partial(plain_step, model, x),
        OURS_GRAD: partial(grad_step, model, leaf, grad),
        FLOOR: copies(size),
        FRESH: fresh_copies(size),
        NAIVE: partial(echo.there_and_back, actors, x.numpy()),
    }


def together(
    model: nn.Module, actors: list[object], sizes: tuple[int, ...], rounds: int, effort: Effort
) -> dict:
    """Medians of several sizes in one interleaved run: by size, then by contender."""
    all_of_them = {size: contenders(model, actors, size) for size in sizes}
    flat = {
        f"{size} {name}": run for size, found in all_of_them.items() for name, run in found.items()
    }
    medians = interleaved(flat, rounds, min(effort.warmup, rounds))
    return {
        size: {name: medians[f"{size} {name}"] for name in found}
        for size, found in all_of_them.items()
    }


def run(effort: Effort) -> Report:
    """Payload sweep."""
    model = raydp_parallel.DataParallel(nn.Identity(), ["cpu"] * REPLICAS)
    actors = echo.start(REPLICAS)
    small, large = (
        (SMALL, LARGE)
        if effort is not Effort.SMOKE
        else ((TINY, 60 * KB, 120 * KB, 240 * KB), (4 * MB,))
    )
    found = together(model, actors, small, effort.rounds(ROUNDS), effort)
    tiny = dict.fromkeys(small, found[TINY])
    for size in large:
        rounds = max(4, min(ROUNDS // 2, 2000 * MB // size))
        both = together(model, actors, (TINY, size), effort.rounds(rounds), effort)
        found[size], tiny[size] = both[size], both[TINY]
    echo.end(actors)
    asked = _asked(found, tiny, 64 * MB if 64 * MB in found else large[-1])
    data = {
        "median_ms": {str(size): medians for size, medians in found.items()},
        "tiny_ms": tiny[large[-1]],
    }
    notes = [
        "Each replica gets half of the batch. The floor is one thread's copies between "
        "memory mapped before."
    ]
    return Report(
        "payload_sweep",
        "What does a step cost as its payload grows?",
        _tables(found, tiny),
        asked,
        data,
        notes,
    )


def over_floor(found: dict, tiny: dict, size: int, name: str, floor: str = FLOOR) -> float:
    """What a payload costs over the tiny step, to what its copies cost."""
    trips = 2 if name == OURS_GRAD else 1
    return (found[size][name] - tiny[size][name]) / (trips * found[size][floor])


def _asked(found: dict, tiny: dict, large: int) -> list[Asked]:
    asked = []
    for name in (OURS, OURS_GRAD):
        for size in (120 * KB, 240 * KB):
            ratio = found[size][name] / found[size // 2][name]
            asked.append(Asked(f"payload {label(size)} to {label(size // 2)}, {name}", ratio, 1.3))
        ratio = over_floor(found, tiny, large, name)
        asked.append(
            Asked(f"payload {label(large)} over the tiny step to its copies, {name}", ratio, 2.0)
        )
    return asked


def _tables(found: dict, tiny: dict) -> list[Table]:
    columns = [
        "payload",
        "ms",
        "over tiny",
        "copies",
        "into new memory",
        "over tiny : copies",
        "naive Ray",
        "to naive",
    ]
    tables = []
    for name in (OURS, OURS_GRAD):
        trips = 2 if name == OURS_GRAD else 1
        rows = []
        for size, medians in found.items():
            over = medians[name] - tiny[size][name]
            floor, fresh, naive = (trips * medians[key] for key in (FLOOR, FRESH, NAIVE))
            rows.append(
                [
                    label(size),
                    medians[name],
                    over,
                    floor,
                    fresh,
                    over / floor,
                    naive,
                    medians[name] / naive,
                ]
            )
        tables.append(Table(f"payload, {name}, {REPLICAS} replicas", columns, rows))
    return tables


def label(size: int) -> str:
    """A size to read."""
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


if __name__ == "__main__":
    alone(run)

"""What does it cost that weights have changed?

`python -m benchmarks.weights_sweep` times forwards of perceptrons with 1, 40 and 400 MB of weights,
one small row for each of two CPU replicas, so that a forward does little but read the weights.
Before it nothing was changed, or one layer, or all layers: in place as an optimizer does, by
`load_state_dict`, or replaced by `p.data = q`. The changes themselves are the user's and are not
timed. What they leave behind, cold caches, is no matter of weights: so what they are compared with
is a forward before which as much was written elsewhere, or as much loaded into another net. The
floor is the plain module's forward of one row, with one thread: what each replica cannot avoid.
What `p.data = q` brings lies in memory of the user's own, where no other process can see it: it has
to be copied, and is beside one such copy here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved, timed

SIZES = (1, 40, 400)
LAYERS = 10
REPLICAS = 2
LIMIT = 1.05
_FACTOR = 1.0001
IDLE, UNCHANGED = "nothing changed, nothing done", "nothing changed, as much written elsewhere"
UNLOADED = "nothing changed, as much loaded elsewhere"
UNREPLACED = "nothing changed, as much replaced elsewhere"
COPIED = "the same, and as much copied once"
ONE, IN_PLACE = "one layer changed", "all changed in place"
LOADED, REPLACED = "all changed by load_state_dict", "all replaced by p.data = q"
FLOOR = "floor: plain module, one row"
NOTHING = {IN_PLACE: UNCHANGED, LOADED: UNLOADED}
"""What each change is compared with."""


def perceptron(megabytes: int) -> nn.Module:
    """Square layers that together have so many MB of weights."""
    width = int((megabytes * 1024 * 1024 / 4 / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def changes(net: nn.Module) -> dict[str, Callable[[], None]]:
    """Each kind of change, to make before a forward."""
    weights = [*net.parameters()]
    others, other = [weight.detach().clone() for weight in weights], copy.deepcopy(net)
    saved = {name: value.clone() for name, value in net.state_dict().items()}

    @torch.no_grad()
    def scale(chosen: Sequence[Tensor]) -> None:
        torch._foreach_mul_(chosen, _FACTOR)

    def load(into: nn.Module) -> None:
        for value in saved.values():
            value.mul_(_FACTOR)
        into.load_state_dict(saved)

    def replace(chosen: Sequence[Tensor]) -> None:
        for parameter in chosen:
            parameter.data = parameter.data * _FACTOR

    return {
        IDLE: lambda: None,
        UNCHANGED: partial(scale, others),
        UNLOADED: partial(load, other),
        ONE: partial(scale, weights[:1]),
        IN_PLACE: partial(scale, weights),
        LOADED: partial(load, net),
        UNREPLACED: partial(replace, others),
        COPIED: partial(replace, others),
        REPLACED: partial(replace, weights),
    }


@torch.no_grad()
def forward(model: Callable[[Tensor], object], x: Tensor, change: Callable[[], None]) -> float:
    """Seconds of a forward after a change."""
    change()
    return timed(lambda: model(x))


def copied(model: nn.Module, into: list[Tensor], weights: list[Tensor], x: Tensor) -> None:
    """One copy of some weights, and a forward."""
    torch._foreach_copy_(into, weights)
    model(x)


@torch.no_grad()
def alone_forward(net: nn.Module, x: Tensor) -> float:
    """Seconds of the plain module's forward, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return timed(lambda: net(x))
    finally:
        torch.set_num_threads(threads)


def measure(megabytes: int, effort: Effort) -> dict[str, float]:
    """Milliseconds of a forward after each kind of change."""
    net = perceptron(megabytes)
    x = torch.randn(REPLICAS, net[0].in_features)  # type: ignore[index]
    # medians that are to be told apart by a few hundredths
    rounds = max(80, min(2400, 24000 // megabytes))
    medians: dict[str, float] = {}
    # Weights that are replaced are a net's own, and have a run of their own: they are copied as
    # long as that goes on, whatever else changes them, and what is copied pushes everybody's
    # weights out of the caches.
    for one, names, turns in (
        (net, (IDLE, UNCHANGED, UNLOADED, ONE, IN_PLACE, LOADED), rounds),
        (copy.deepcopy(net), (UNREPLACED, COPIED, REPLACED), rounds // 4),
    ):
        model, found = raydp_parallel.DataParallel(one, ["cpu"] * REPLICAS), changes(one)
        contenders: dict[str, Callable[[], float]] = {FLOOR: partial(alone_forward, one, x[:1])}
        contenders.update({name: partial(forward, model, x, found[name]) for name in names})
        if COPIED in names:
            weights = [p.detach().clone() for p in one.parameters()]
            rooms = [torch.empty_like(weight) for weight in weights]
            copying = partial(copied, model, rooms, weights)
            contenders[COPIED] = partial(forward, copying, x, found[COPIED])
        found_ms = interleaved(
            contenders, effort.rounds(turns), min(effort.warmup, 2 if megabytes >= 100 else 5)
        )
        medians = {**found_ms, **medians}
    return {name: medians[name] for name in (FLOOR, *changes(net))}


def run(effort: Effort) -> Report:
    """Weights sweep."""
    tables, asked, data = [], [], {}
    for megabytes in SIZES if effort is not Effort.SMOKE else SIZES[:1]:
        data[str(megabytes)] = medians = measure(megabytes, effort)
        raydp_parallel.shutdown()
        tables.append(compared(f"forward, {megabytes} MB of weights, {REPLICAS} replicas", medians))
        asked += [
            Asked(
                f"forward, {megabytes} MB of weights: {name} to {nothing}",
                medians[name] / medians[nothing],
                LIMIT,
            )
            for name, nothing in NOTHING.items()
        ]
    question = "What does it cost that weights have changed?"
    note = (
        "What p.data = q brings lies where no other process can see it, and has to be copied once."
    )
    return Report("weights_sweep", question, tables, asked, {"median_ms": data}, [note])


if __name__ == "__main__":
    alone(run)

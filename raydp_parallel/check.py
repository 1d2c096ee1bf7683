"""`raydp-parallel check`: compare what this machine's devices compute with the plain module, and
how fast they are.

A few small nets train under the wrapper and beside it chunk by chunk, in double precision, so that
a difference is an error and not rounding. Then one replica is killed in the middle of a step. Times
are shown, and are not judged.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp_parallel.cluster.placement import DeviceId, all_gpus, normalize
from raydp_parallel.driver.executor import Executor
from raydp_parallel.monitoring.stats import count
from raydp_parallel.options import Options
from raydp_parallel.replica import engine
from raydp_parallel.wrapper import DataParallel

STEPS = 3
CLOSE = 1e-9
"""The largest distance that sums in another order make, in double precision."""
START = 60.0
"""Seconds in which the successor of a killed replica must start."""
_FASTER = "the plain module", "the wrapper"


Row = tuple[bool, str]
"""True if a check holds, and its result."""


class Here:
    """The devices to check."""

    def __init__(self, ids: Sequence[DeviceId], quick: bool) -> None:
        self.ids, self.quick = list(ids), quick
        self.executor = Executor(ids, options=Options(metrics=False, name="check"))
        own = torch.cuda.is_available() and "cpu" not in self.ids
        self.place = torch.device("cuda:0" if own else "cpu")
        # Masks of dropout can be compared only with those of the same kind of device.
        self.dropout = 0.3 if own or set(self.ids) == {"cpu"} else 0.0

    def wrap(self, net: nn.Module) -> DataParallel[nn.Module]:
        """Wrap a net, with replicas also where there is one device."""
        return DataParallel(net, self.ids, executor=self.executor)

    def finish(self) -> None:
        """Wait for this process's GPU."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)


def encoder(width: int, dropout: float) -> nn.Module:
    """Make a small transformer, with scores for each word."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
    layers = layer, copy.deepcopy(layer)
    return nn.Sequential(nn.Embedding(64, width), *layers, nn.Linear(width, 64))


def perceptron(width: int, dropout: float = 0.0, normed: bool = False) -> nn.Module:
    """Make a net of three layers, with batch norm and dropout where they are asked for."""
    norm = [nn.BatchNorm1d(width), nn.Dropout(dropout)] if normed else []
    hidden = [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(nn.Linear(width, width), *norm, nn.ReLU(), *hidden, nn.Linear(width, 10))


def convolutions(width: int) -> nn.Module:
    """Make a convolutional net with batch norm."""
    layers: list[nn.Module] = []
    for into, out, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        conv = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*layers, *head)


class ChunkByChunk:
    """The plain module, called for one chunk after the other as the replicas are."""

    def __init__(self, net: nn.Module, chunks: int) -> None:
        self.net, self._chunks = net, chunks
        self._copies: list[nn.Module] = []

    def __call__(self, x: Tensor) -> Tensor:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())  # as the wrapper draws it
        parts = x.chunk(self._chunks)
        self._copies = [copy.deepcopy(self.net) for _ in parts]
        outputs = []
        for number, (net, part) in enumerate(zip(self._copies, parts, strict=True)):
            engine.seed(x.device, seed, number)
            outputs.append(net(part))
        return torch.cat(outputs)

    def settle(self) -> None:
        """Sum the gradients in chunk order, and take the buffers of the first chunk."""
        chunks = [_grads(net) for net in self._copies]
        for own, first, *others in zip(self.net.parameters(), *chunks, strict=True):
            own.grad = sum(others, start=first)
        for buffer, new in zip(self.net.buffers(), self._copies[0].buffers(), strict=True):
            buffer.copy_(new)


def loss_of(call: Callable[[Tensor], Tensor], x: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
    """Return outputs and a loss; with a gradient in it where that is to be differentiated twice."""
    x = x.detach().requires_grad_(twice)
    out = call(x)
    loss = out.square().mean()
    if twice:
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return out.detach(), loss


def trained(here: Here, net: nn.Module, batch: Tensor, twice: bool = False) -> Row:
    """Train a few steps under the wrapper and beside it, and compare everything."""
    net = net.double().to(here.place)
    batch = (batch.double() if batch.is_floating_point() else batch).to(here.place)
    beside = ChunkByChunk(copy.deepcopy(net), len(here.ids))
    calls: tuple[Any, ...] = here.wrap(net), beside
    optimizers = [torch.optim.SGD(n.parameters(), 0.05, 0.9) for n in (net, beside.net)]
    far = {"values": 0.0, "gradients": 0.0, "buffers": 0.0}
    for step in range(STEPS):
        outputs = []
        for call, optimizer in zip(calls, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            out, loss = loss_of(call, batch, twice)
            loss.backward()
            outputs.append(out)
        beside.settle()
        for what, ours, theirs in (
            ("values", [outputs[0]], [outputs[1]]),
            ("gradients", _grads(net), _grads(beside.net)),
            ("buffers", [*net.buffers()], [*beside.net.buffers()]),
        ):
            far[what] = max(far[what], distance(ours, theirs))
        for optimizer in optimizers:
            optimizer.step()
    worst = max(far.values())
    if worst > CLOSE:
        return False, ", ".join(f"{what} differ by {d:.0e}" for what, d in far.items())
    exact = "the same bits" if worst == 0 else f"within {worst:.0e} of the plain module's"
    return True, f"{', '.join(far)} of {STEPS} steps: {exact}"


def _grads(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters()]


def distance(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the norm of all differences as a part of the others' norm; infinite if one lacks."""
    if any(t is None for t in (*ours, *theirs)):
        return math.inf
    off = sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    size = sum(float(b.double().square().sum()) for b in theirs)
    found = math.sqrt(off / size) if off else 0.0
    return found if found == found else math.inf


def killed(here: Here) -> Row:
    """Kill a replica between forward and backward: same bits, and a new process comes."""
    say("  A replica is killed now, and the log says so:")
    torch.manual_seed(0)
    net = perceptron(64, here.dropout, normed=True).to(here.place)
    x = torch.randn(8 * len(here.ids), 64).to(here.place)
    grads, milliseconds, replicas = [], [], len(here.executor.replicas())
    for dies in (False, True):
        model = here.wrap(copy.deepcopy(net))
        for seed in range(2):  # the second one is looked at
            torch.manual_seed(seed)
            model.zero_grad()
            begun = time.perf_counter()
            out = model(x)
            if dies and seed:
                here.executor.replica_set.ready()[-1].client.end()
            out.square().mean().backward()
            here.finish()
            milliseconds.append((time.perf_counter() - begun) * 1e3)
        grads.append(_grads(model))
    same = all(map(torch.equal, *grads))
    here.executor.grow(START)
    deaths = here.executor.stats().deaths
    back = sum(info.state == "ready" for info in here.executor.replicas()) == replicas
    text = (
        f"{'the same bits' if same else 'DIFFERENT gradients'}, "
        f"{milliseconds[3] - milliseconds[1]:.0f} ms longer; "
        f"{deaths} noticed; a new process {'came' if back else 'did NOT come'}"
    )
    return same and back and deaths == 1, text


def speed(here: Here, net: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return milliseconds per training step of the plain module and the wrapper, in turns."""
    plain = net.to(here.place)
    models = plain, here.wrap(copy.deepcopy(plain))
    steps = [_stepper(here, model, x.to(here.place)) for model in models]
    times: list[list[float]] = [[], []]
    for _ in range(2 if here.quick else 12):
        for step, found in zip(steps, times, strict=True):
            step()  # threads of the turn before spin for a while
            for _ in range(3):
                begun = time.perf_counter()
                step()
                found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _stepper(here: Here, model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        out = model(x).flatten(0, -2)
        optimizer.zero_grad()
        F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=out.device)).backward()
        optimizer.step()
        here.finish()

    return step


def rows(here: Here) -> dict[str, Callable[[], Row]]:
    """Name what is checked, in order."""
    many, drop = 6 * len(here.ids), here.dropout
    x = torch.randn(many + 1, 16)
    pixels, words = torch.randn(many, 3, 8, 8), torch.randint(64, (many, 6))
    return {
        "MLP, dropout, batch norm": lambda: trained(here, perceptron(16, drop, True), x[1:]),
        "conv net, batch norm": lambda: trained(here, convolutions(4), pixels),
        "transformer": lambda: trained(here, encoder(16, drop), words),
        "double backward": lambda: trained(here, perceptron(16), x[1:], twice=True),
        "uneven chunks": lambda: trained(here, perceptron(16), x),
        "a replica is killed": lambda: killed(here),
    }


def timed(here: Here) -> dict[str, tuple[nn.Module, Tensor]]:
    """Name the nets that are timed, with their batches; GPUs get more rows."""
    times = 16 if here.place.type == "cuda" else 1
    return {
        "one small layer": (nn.Linear(4, 2), torch.randn(2 * len(here.ids), 4)),
        "MLP, 2.1 M": (perceptron(1024), torch.randn(64 * times, 1024)),
        "conv net, 0.1 M": (convolutions(32), torch.randn(8 * times, 3, 32, 32)),
        "transformer, 1.6 M": (encoder(256, 0.1), torch.randint(64, (4 * times, 32))),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print a table; returns 0 if all holds, else 1."""
    parser = argparse.ArgumentParser(prog="raydp-parallel check", description=__doc__)
    parser.add_argument(
        "--devices",
        default="all",
        help="such as 0,1 or cpu,cpu; by default all GPUs of the cluster, else two CPU replicas",
    )
    parser.add_argument("--quick", action="store_true", help="measure for a short time only")
    given = parser.parse_args(arguments)
    options = Options()
    names: list[Any] = [int(d) if d.isdigit() else d for d in given.devices.split(",")]
    try:
        gpus: list[Any] = all_gpus(options) if names == ["all"] else []
        ids = normalize(names, options) if names != ["all"] else gpus or ["cpu", "cpu"]
    except ValueError as error:
        parser.error(str(error))
    here = Here(ids, given.quick)
    with here.executor:
        return _report(here)


def _report(here: Here) -> int:
    """Print what is found; returns the exit status."""
    say(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    for info in here.executor.replicas():
        say(f"  replica {info.index}: {info.device} {info.gpu or '-'}, pid {info.pid}")
    torch.manual_seed(0)
    say("\nvalues, beside the plain module chunk by chunk")
    checks, failed = rows(here), []
    for name, run in checks.items():
        try:
            good, found = run()
        except Exception as error:
            good, found = False, f"{type(error).__name__}: {error}"
        failed += [] if good else [name]
        say(f"  {'ok    ' if good else 'FAILED'}  {name:26}{found}")
    say(f"\n{'ms per training step':34}{'plain':>9}{'wrapper':>9}{'ratio':>8}")
    for name, (net, batch) in timed(here).items():
        plain, ours = speed(here, net, batch)
        words = "as fast" if 0.95 < ours / plain < 1.05 else f"{_FASTER[ours < plain]} is faster"
        say(f"  {name:32}{plain:9.2f}{ours:9.2f}{ours / plain:8.2f}  {words}")
    place = "one GPU" if here.place.type == "cuda" else f"{torch.get_num_threads()} threads"
    say(
        f"Plain is the module itself with {place}, the wrapper has {count(len(here.ids), 'chunk')} "
        f"on {count(len(here.executor.replicas()), 'replica')}. The small layer shows\nthe cost of "
        "a step's two trips; the wrapper pays for nets whose step takes many times that."
    )
    if failed:
        say(f"\ncheck FAILED: {len(failed)} of {len(checks)} rows: {', '.join(failed)}")
        return 1
    say(f"\ncheck passed: all {len(checks)} rows hold")
    return 0


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""How long does the host work for each training step on a GPU?

`python -m benchmarks.gpu_host` needs no GPU: tensors lie on the CPU under the fake of the tests,
and the time that a GPU would spend, in copies, comparisons and the module's own work, is taken off.
What is left is the host's, in CPU time: this package, messages, and torch's own code. The tensors
and submodules are those of a ResNet-50 and a GPT-2 small in full size; all weights change with each
step. It counts the waits of the host for the GPU, and the operations that it asks the GPU for.

`--profile` prints the functions of this package that take longest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import functools
import importlib
import itertools
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone
from raydp_parallel.calls import executor
from raydp_parallel.check import nets
from raydp_parallel.cluster import in_process, replica_set
from raydp_parallel.devices import comparison
from raydp_parallel.devices.buffers import Arena, Descriptor, LeaseTable, SharedBuffer
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.options import Options
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport import cuda_ipc
from raydp_parallel.transport.links import Link, Mappings, shared_link
from raydp_parallel.transport.message_bytes import give_back, take_back
from tests.support.fake_gpu import FakeGpu, Stream, installed

_foreach_copy: Any = torch._foreach_copy_

CPU = torch.device("cpu")
OPTIONS = Options(in_process=True, metrics=False)
ROUNDS = 24

NETS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "ResNet-50": (nets.resnet50, 6.0),
    "GPT-2 small": (nets.gpt2_small, 4.0),
}
"""Each net, and the milliseconds that are asked of driver and replica together."""

LARGE = 1 << 18
"""Bytes from which the contents of a tensor are of no interest."""

WAYS = ("ipc", "host")
"""How bytes go between a driver and a replica on the same GPU."""


class Clock:
    """Where the time of a step goes.

    Args:
        stream: What the GPU is asked for in order.

    Attributes:
        replica: Seconds in calls of the replica.
        gpu: Seconds that stand for the GPU's, by side.
        waits: Waits for the GPU, by side.
        asked: Operations that the GPU was asked for, by side.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.replica = 0.0
        self.gpu: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.side = "driver"
        self._inside = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A block that the GPU would do."""
        if self._inside:
            yield
            return
        self._inside, start = True, time.thread_time()
        try:
            yield
        finally:
            self._inside = False
            self.gpu[self.side] += time.thread_time() - start

    @contextlib.contextmanager
    def in_replica(self) -> Iterator[None]:
        """A block in which the replica works."""
        self.side, start = "replica", time.thread_time()
        try:
            yield
        finally:
            self.side = "driver"
            self.replica += time.thread_time() - start

    def of_the_gpu(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation of the GPU's."""

        @functools.wraps(operation)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self.asked[self.side] += 1
                self.stream.later(_nothing)  # it has run once it was waited for
            with self.taken():
                return operation(*args, **kwargs)

        return run


def _nothing() -> None:
    """What a GPU does."""


class Gpu(FakeGpu):
    """A GPU that does at once what it is asked for. Its bytes do not pass through this process's
    caches: what is large is not copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(self.default)
        self._staging: dict[int, Tensor] = {}

    def read_later(self, source: Tensor, device: torch.device) -> None:
        """Nothing: what was copied is there."""

    def later(
        self, what: str, work: Callable[[], object], device: torch.device | None = None
    ) -> None:
        """Do it now."""
        work()

    def empty(self, *shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        """``torch.empty``. Torch uses pinned memory again and again."""
        if not pin_memory or shape[0] <= LARGE:
            return super().empty(*shape, **more)
        with self.clock.taken():
            if shape[0] not in self._staging:
                self._staging[shape[0]] = torch.zeros(*shape, **more)
            return self._staging[shape[0]]

    def is_pinned(self, tensor: Tensor) -> bool:
        """``Tensor.is_pinned``: what is copied to is shared memory, which is not registered."""
        return False

    def foreach_copy(
        self, targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False
    ) -> None:
        """``torch._foreach_copy_``."""
        small = [row for row, source in enumerate(sources) if source.nbytes <= LARGE]
        if small:
            _foreach_copy([targets[row] for row in small], [sources[row] for row in small])

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``Tensor.copy_``."""
        if source.nbytes > LARGE:
            return target
        return torch._C.TensorBase.copy_(target, source)  # type: ignore[attr-defined]

    def to(self, source: Tensor, *args: Any, **more: Any) -> Tensor:
        """``Tensor.to``."""
        if source.nbytes > LARGE and more.get("copy"):
            return torch.empty_like(source)
        return super().to(source, *args, **more)

    def say(self, what: str, stream: Any) -> None:
        """Count waits."""
        if what == "wait":
            self.clock.waits[self.clock.side] += 1

    def waits(self, stream: Any, other: Any, at: int) -> None:
        """Nothing: all is done in order."""


def _copy(target: Tensor, by_gpu: Callable[..., Tensor], source: Tensor, *more: Any) -> Tensor:
    """``Tensor.copy_``: the host's work where it writes to memory that processes share."""
    copy = by_gpu if target.untyped_storage().resizable() else torch._C.TensorBase.copy_  # type: ignore[attr-defined]
    return copy(target, source, *more)


class _Step(torch.autograd.Function):
    """Takes all parameters, and has gradients for all of them, without computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, grads: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.clock, ctx.grads = clock, grads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with ctx.clock.taken():
            return grads[0], None, None, *[grad.view_as(grad) for grad in ctx.grads]


class Shaped(nn.Module):
    """A net's modules, parameters and buffers. It writes its buffers as batch norm does, and does
    not compute.

    Args:
        net: The net.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        clock = _clocks[-1]
        with clock.taken(), torch.no_grad():
            leaves = [*self.net.parameters()]
            if len(leaves) not in _grads:
                _grads[len(leaves)] = [torch.zeros_like(p) for p in leaves]
            grads = _grads[len(leaves)]
            buffers = [*self.net.buffers()]
            counters = [b for b in buffers if not b.is_floating_point()]
            if counters:
                torch._foreach_add_(counters, 1)
                silent = [torch._C.TensorBase.detach(b) for b in buffers if b.is_floating_point()]
                versions = [b._version for b in silent]
                torch._foreach_add_(silent, 1)
                for tensor, version in zip(silent, versions, strict=True):
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        out: Tensor = _Step.apply(x, clock, grads, *leaves)
        return out


_clocks: list[Clock] = []
_grads: dict[int, list[Tensor]] = {}


class Client:
    """The driver's side of a replica of this process that lies on the same GPU.

    Args:
        clock: Where the time goes.
        way: How bytes go.
    """

    def __init__(self, clock: Clock, way: str) -> None:
        self._clock = clock
        self._server = ReplicaServer("cpu", shared_link(Arena(), exposes=False, always=False))
        self._mappings, self._ledger = Mappings(), LeaseTable()
        if way == "ipc":
            self._server._device_arena = cuda_ipc.DeviceArena(CPU)
            self._server._mappings.opener = cuda_ipc.Opener(CPU)
            self._server.start_device()
            self._mappings.opener = cuda_ipc.Opener(CPU)

    def call(self, method: str, header: bytes, beside: Sequence[Any]) -> Any:
        """Call the replica; what lies beside the message goes as over a line."""
        parts = []
        for packet in beside:
            if isinstance(packet, SharedBuffer):
                self._ledger.lend(packet)
            parts.append(getattr(packet, "descriptor", packet))
        ended = give_back(self._mappings)
        with self._clock.in_replica(), torch.enable_grad(), torch.inference_mode(False):
            ended, *answer = getattr(self._server, method)(ended, header, *parts)
        take_back(ended, self._ledger)
        answer = [self._mappings.find(p) if isinstance(p, Descriptor) else p for p in answer]
        return tuple(answer) if len(answer) > 1 else answer[0]


class GpuBackend(in_process.InProcessBackend):
    """Replicas of this process on the driver's GPU.

    Args:
        clock: Where the time goes.
        way: How bytes go.
        options: As of any backend.
    """

    def __init__(self, clock: Clock, way: str, options: Options) -> None:
        super().__init__(options)
        self._clock = clock
        self._way = way
        near = shared_link(Arena(), exposes=False, always=False)
        self.link: Link = near
        if way == "ipc":
            self.link = cuda_ipc.DeviceLink(near, cuda_ipc.DeviceArena(CPU))

    def start(
        self, places: Sequence[Any], cancelled: Callable[[], bool] | None = None
    ) -> dict[Any, tuple[Any, ReplicaHello]]:
        """One in each place."""
        found = super().start(places, cancelled)
        return {
            place: (Client(self._clock, self._way), hello) for place, (_, hello) in found.items()
        }


class Found(NamedTuple):
    """What a step takes.

    Attributes:
        driver: Milliseconds of the driver's host.
        replica: Milliseconds of the replica's.
        waits: Waits for the GPU: of the driver, and of the replica.
        asked: Operations that the GPU was asked for: by the driver, and by the replica.
    """

    driver: float
    replica: float
    waits: tuple[int, int]
    asked: tuple[int, int]


@contextlib.contextmanager
def fake_gpu(way: str) -> Iterator[Clock]:
    """A GPU on which the driver and its replica lie."""
    with pytest.MonkeyPatch.context() as patch, installed(patch, Gpu) as gpu:
        assert isinstance(gpu, Gpu)
        clock = gpu.clock
        _clocks.append(clock)
        for owner, names in {
            torch: ("_foreach_copy_", "ne", "cat"),
            torch.nn.functional: ("pad",),
            comparison: ("_print",),
        }.items():
            for name in names:
                patch.setattr(owner, name, clock.of_the_gpu(getattr(owner, name)))
        for name in ("copy_", "to", "clone", "cumsum"):
            type.__setattr__(Tensor, name, clock.of_the_gpu(getattr(Tensor, name)))
        type.__setattr__(Tensor, "copy_", functools.partialmethod(_copy, Tensor.copy_))
        patch.setattr(replica_set, "InProcessBackend", functools.partial(GpuBackend, clock, way))
        patch.setattr(replica_set.ReplicaSet, "after_fork", lambda _: None)
        executor.shared(OPTIONS).close()
        try:
            yield clock
        finally:
            executor.shared(OPTIONS).close()
            _clocks.clear()
            _grads.clear()
            for name in ("clone", "cumsum"):
                type.__delattr__(Tensor, name)


def measure(
    name: str, way: str, rounds: int, warmup: int, profile: cProfile.Profile | None = None
) -> Found:
    """The median step of a net."""
    with fake_gpu(way) as clock:
        net = Shaped(NETS[name][0]())
        model = raydp_parallel.DataParallel(net, ["cpu"], options=OPTIONS)
        weights = [*net.parameters()]
        x = torch.zeros(64, 4, requires_grad=True)
        steps: list[tuple[float, float]] = []
        for number in range(warmup + rounds):
            for counter in (clock.gpu, clock.waits, clock.asked):
                counter.clear()
            clock.replica = 0.0
            if profile is not None and number >= warmup:
                profile.enable()
            start = time.thread_time()
            model(x).sum().backward()
            whole = time.thread_time() - start
            if profile is not None:
                profile.disable()
            replica = clock.replica - clock.gpu["replica"]
            driver = whole - clock.replica - clock.gpu["driver"]
            if number >= warmup:
                steps.append((driver, replica))
            with clock.taken(), torch.no_grad():  # the optimizer, which is not this package's
                torch.autograd.graph.increment_version(weights)
            net.zero_grad()
        both = [1e3 * statistics.median(column) for column in zip(*steps, strict=True)]
        counts = [(c["driver"], c["replica"]) for c in (clock.waits, clock.asked)]
        return Found(both[0], both[1], counts[0], counts[1])


class _ByHand(torch.autograd.Function):
    """The copies that a step needs if weights, buffers and gradients go through one run of memory
    each, written down for one net that is known, and that nothing edits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, hand: Hand, *leaves: Tensor) -> Tensor:
        torch._foreach_copy_(hand.sent, [*leaves])
        torch._foreach_copy_(hand.weights, hand.sent)
        ctx.hand, ctx.x = hand, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.out = hand.net(ctx.x)
        if hand.buffers:
            torch._foreach_copy_(hand.reported, hand.buffers)
            torch.ne(hand.reported[0], hand.reported[0])
            torch._foreach_copy_(hand.own_buffers, hand.reported)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hand = ctx.hand
        own, *found = torch.autograd.grad(ctx.out, [ctx.x, *hand.weights], grads)
        torch._foreach_copy_(hand.given, found)
        return own, None, *map(torch.as_strided, *hand.plan)


class Hand:
    """What `_ByHand` needs.

    Args:
        own: The driver's net.
    """

    def __init__(self, own: nn.Module) -> None:
        self.net = copy.deepcopy(own)
        self.weights = [*self.net.parameters()]
        self.buffers = [*self.net.buffers()]
        self.own_buffers = [*own.buffers()]
        self.sent = [torch.empty_like(p, requires_grad=False) for p in self.weights]
        self.reported = [torch.empty_like(b) for b in self.buffers]
        sizes = [p.numel() for p in self.weights]
        run = torch.zeros(sum(sizes))
        parts = zip(run.split(sizes), self.weights, strict=True)
        self.given = [part.view(p.shape) for part, p in parts]
        starts = [*itertools.accumulate(sizes, initial=0)][:-1]
        shapes, strides = [p.shape for p in self.given], [p.stride() for p in self.given]
        self.plan = [run] * len(sizes), shapes, strides, starts


def by_hand(name: str, rounds: int, warmup: int) -> float:
    """Milliseconds of the host, of both sides together, for a step with nothing but the copies."""
    with fake_gpu("ipc") as clock:
        net = Shaped(NETS[name][0]())
        hand, weights = Hand(net), [*net.parameters()]
        x = torch.zeros(64, 4, requires_grad=True)
        steps = []
        for _ in range(warmup + rounds):
            clock.gpu.clear()
            start = time.thread_time()
            out: Tensor = _ByHand.apply(x, hand, *weights)
            out.sum().backward()
            steps.append(time.thread_time() - start - clock.gpu["driver"])
            net.zero_grad()
        return 1e3 * statistics.median(steps[warmup:])


def run(effort: Effort) -> Report:
    """Host time of a training step on a GPU."""
    rows: list[list[Any]] = []
    asked: list[Asked] = []
    for name, (_, limit) in NETS.items():
        floor = by_hand(name, effort.rounds(ROUNDS), effort.warmup)
        for way in WAYS:
            found = measure(name, way, effort.rounds(ROUNDS), effort.warmup)
            together = found.driver + found.replica
            rows.append(
                [
                    f"{name}, {way}",
                    found.driver,
                    found.replica,
                    together,
                    floor,
                    *found.waits,
                    *found.asked,
                ]
            )
            if way == "ipc":
                asked += [
                    Asked(f"host time per step on a GPU, {name}: ms", together, limit),
                    Asked(f"waits per step in the replica, {name}", found.waits[1], 2),
                    Asked(f"waits per step in the driver, {name}", found.waits[0], 0),
                ]
    columns = ["", "driver ms", "replica ms", "together", "by hand", *WAITS, *OPERATIONS]
    notes = [
        "Driver and replica are one process, which has one core for both. No GPU took part: its "
        "calls cost what a Python function costs, where CUDA's take 1 to 5 us.",
        "By hand: only the copies and torch's own calls, both sides together, for a net that "
        "nothing edits, without messages between processes.",
        "What is larger than 256 KB is not copied for the GPU: its bytes do not pass "
        "through the host's caches. Copies by the host itself are made, and counted.",
    ]
    data = {"rows": rows, "columns": columns}
    question = "How long does the host work for each training step on a GPU?"
    return Report("gpu_host", question, [Table("a step", columns, rows)], asked, data, notes)


WAITS = ("waits: driver", "replica")
OPERATIONS = ("operations: driver", "replica")


def main() -> None:
    """Measure, or profile."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--profile", choices=[*NETS])
    options, rest = parser.parse_known_args()
    if options.profile is None:
        sys.argv[1:] = rest
        alone(run)
        return
    profile = cProfile.Profile()
    print(measure(options.profile, "ipc", 8, 3, profile))
    pstats.Stats(profile).sort_stats("tottime").print_stats("raydp_parallel", 45)


if __name__ == "__main__":
    # as another module: classes of the program's own file travel by value
    importlib.import_module("benchmarks.gpu_host").main()

"""Every point: at each point of a program one thing goes wrong, once.

    python tests/support/points.py deaths    a replica ends, at each message, at three moments
    python tests/support/points.py calls     a system call of the wire fails
    python tests/support/points.py lines     Ctrl-C comes, at each line of the package

The program ends with the bits of the undisturbed one, or with an error, after which its next three
steps are right: those of another program in the same state. It does not hang, and leaves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import gc
import importlib
import itertools
import linecache
import mmap
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forked
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import raydp_parallel
from raydp_parallel import DataParallel, Executor
from raydp_parallel.errors import ParallelError
from raydp_parallel.wire.channel import Channel

ROOT = Path(raydp_parallel.__file__).parent
LIMIT = 20.0
"""Seconds of a point."""


# --- programs ---


def data(number: int, size: int = 12) -> Tensor:
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(number))


def plain(program: Program, x: Tensor) -> list[Tensor]:
    loss = program.model(x).square().mean()
    loss.backward()
    return [loss]


def accumulate(program: Program, x: Tensor) -> list[Tensor]:
    return plain(program, x) + plain(program, 2 * x)


def clip(program: Program, x: Tensor) -> list[Tensor]:
    losses = accumulate(program, x)
    if program.inside:
        return [*losses, program.optimizer.clip_grad_norm_(0.05)]
    return [*losses, nn.utils.clip_grad_norm_(program.model.parameters(), 0.05)]


def penalty(program: Program, x: Tensor) -> list[Tensor]:
    out = program.model(x.requires_grad_())
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = out.square().mean() + slope.square().mean()
    loss.backward()
    return [loss, x.grad]  # type: ignore[list-item]


def with_loss(program: Program, x: Tensor) -> list[Tensor]:
    loss = program.model.with_loss(nn.MSELoss())(x, x[:, :3])
    loss.backward()
    return [loss]


def maps(program: Program, x: Tensor) -> list[Tensor]:
    return [*program.model.map(x.split(2))]


STEPS = {step.__name__: step for step in (plain, accumulate, clip, penalty, with_loss, maps)}


class Program:
    """Trains a net with an optimizer here, or inside of the replicas."""

    def __init__(self, executor: Executor, step: str, place: str) -> None:
        torch.manual_seed(0)
        parts = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh()
        self.model = DataParallel(
            nn.Sequential(*parts, spectral_norm(nn.Linear(6, 3))), executor=executor
        )
        keywords = {"lr": 0.05, "momentum": 0.9}
        if place == "replicas":
            self.optimizer = self.model.optimizer(torch.optim.SGD, **keywords)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), **keywords)
        self.inside, self._step = place == "replicas", STEPS[step]

    def run(self, *numbers: int) -> list[Tensor]:
        """Make some steps; returns what they showed, and the state."""
        found = []
        for number in numbers:
            torch.manual_seed(number)
            self.optimizer.zero_grad()
            found += [t.detach().clone() for t in self._step(self, data(number))]
            if self._step is not maps:
                self.optimizer.step()
        return [*found, *tensors(self.state())]

    def state(self) -> Any:
        """Return all that training goes on from."""
        return copy.deepcopy([self.model.module.state_dict(), self.optimizer.state_dict()])

    def load(self, state: Any) -> None:
        """Go on from another program's."""
        state = copy.deepcopy(state)
        self.model.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def tensors(state: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, Tensor)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- faults ---


class Handler(Exception):
    """An exception of a signal's handler."""


class Hang(BaseException):
    """Took longer than a point may."""


MOMENTS = "before it is read", "before the answer", "after the answer"
SHORT, BEFORE, AFTER = "short", "handler before", "handler after"
HANDLERS = [BEFORE, AFTER]
FAILURES = {
    "send": ["ENOMEM", SHORT, *HANDLERS],
    "recv": ["ENOMEM", SHORT, *HANDLERS],
    "sendmsg": ["ENOMEM", "EMFILE", SHORT, *HANDLERS],
    "recvmsg": ["ENOMEM", SHORT, *HANDLERS],
    "memfd_create": ["ENOMEM", "EMFILE", *HANDLERS],
    "ftruncate": ["ENOSPC", *HANDLERS],
    "mmap": ["ENOMEM", *HANDLERS],
    "dup": ["EMFILE", *HANDLERS],
}
CALLS = [*FAILURES]
HOMES: dict[str, Any] = dict.fromkeys(CALLS[:4], socket.socket) | dict.fromkeys(CALLS[4:], os)
HOMES["mmap"] = mmap
_map = mmap.mmap
_page = memoryview(_map(-1, 1 << 16)).cast("q")
"""Shared by all processes: a `Fate` for the driver, and two for each replica."""


class Fate:
    """Says what happens to a process at which of its messages, or system calls of the wire."""

    SIZE = 500
    PID, COUNT, DUE, CODE, NAMES = range(5)

    def __init__(self, number: int) -> None:
        self.at = memoryview(_page)[number * self.SIZE : (number + 1) * self.SIZE]

    def set(self, pid: int, due: int, code: int) -> None:
        """Choose; a process without a number is the next one that starts."""
        self.at[self.PID], self.at[self.COUNT] = pid, 0
        self.at[self.CODE], self.at[self.DUE] = code, due

    def comes(self, name: int = 0) -> bool:
        """Count one more of this process, and tell if it is the one."""
        if self.at[self.PID] != os.getpid():
            return False
        count = self.at[self.COUNT] = self.at[self.COUNT] + 1
        self.at[min(self.NAMES + count, self.SIZE - 1)] = name
        return bool(count == self.at[self.DUE])


def fates(index: int) -> list[Fate]:
    """Those of a replica: of the one that runs, and of the next one."""
    return [Fate(1 + 2 * index), Fate(2 + 2 * index)]


def own_fate(index: int) -> Callable[[], Fate]:
    def find() -> Fate:
        now, newcomer = fates(index)
        return newcomer if newcomer.at[Fate.PID] == os.getpid() else now

    newcomer = fates(index)[1]
    if not newcomer.at[Fate.PID]:
        newcomer.at[Fate.PID] = os.getpid()
    return find


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def mortal(index: int) -> None:
    """Let a replica end at a message."""
    find, receive, send, due = own_fate(index), Channel.receive, Channel.send, False

    def receiving(self: Channel, *args: Any) -> Any:
        nonlocal due
        select.select([self._sock], [], [])
        due = find().comes()
        if due and find().at[Fate.CODE] == 0:
            die()
        return receive(self, *args)

    def sending(self: Channel, *args: Any) -> None:
        if due and find().at[Fate.CODE] == 1:
            die()
        send(self, *args)
        if due:
            die()

    Channel.receive, Channel.send = receiving, sending  # type: ignore[method-assign]


def fallible(find: Callable[[], Fate]) -> None:
    """Let a system call of the wire fail in this process."""

    def replace(number: int, name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            on_main = threading.current_thread() is threading.main_thread()
            if not on_main or not find().comes(number):
                return function(*args, **keywords)
            how = FAILURES[name][find().at[Fate.CODE]]
            if how in errno.errorcode.values():
                code = getattr(errno, how)
                raise OSError(code, os.strerror(code))
            if how == BEFORE:
                raise Handler
            if how == AFTER:
                function(*args, **keywords)
                raise Handler
            sock, what, *rest = args
            half = max(1, what // 2) if isinstance(what, int) else None
            if name == "sendmsg":
                half = [memoryview(what[0])[: len(what[0]) // 2 or 1]]
            elif name == "send":
                half = memoryview(what)[: len(what) // 2 or 1]
            return function(sock, half, *rest, **keywords)

        return call

    for number, (name, home) in enumerate(HOMES.items()):
        setattr(home, name, replace(number, name, getattr(home, name)))


def weak(index: int) -> None:
    """Let a system call of the wire fail in a replica."""
    fallible(own_fate(index))


# --- points ---


class Point(NamedTuple):
    """One point of a program."""

    step: str
    place: str  # of the optimizer
    replicas: int
    name: str = ""
    # What happens at which message, or system call, by the numbers of fates; or the line.
    faults: tuple[tuple[int, int, int], ...] = ()
    line: tuple[str, int, int] = "", 0, 0

    def __str__(self) -> str:
        return f"{self.step}/{self.place}/{self.replicas} {self.name}".strip()


class Machine:
    """Tries points of one kind.

    Attributes:
        limit: Seconds of a point.
    """

    prepare: Callable[[int], None] = staticmethod(lambda index: None)
    errors: tuple[type[BaseException], ...] = (ParallelError,)
    steps: tuple[tuple[int, ...], ...] = ((0, 1),)  # of which the last ones are disturbed
    limit = 20.0

    def __init__(self) -> None:
        self._pairs: dict[int, list[Executor]] = {}
        self._controls: dict[Any, tuple[Program, Any, list[Tensor]]] = {}

    def points(self, scenario: Point) -> Iterator[Point]:
        """Yield those of a program."""
        raise NotImplementedError

    def pair(self, replicas: int) -> list[Executor]:
        """Return an executor that things happen to, and another one to compare with."""
        if replicas not in self._pairs:
            self._pairs[replicas] = [Executor(["cpu"] * replicas) for _ in range(2)]
        self._pairs[replicas][0].grow(60)
        return self._pairs[replicas]

    def control(self, point: Point) -> tuple[Program, list[Tensor], list[Tensor]]:
        """Return the undisturbed program, what it showed, and what it did in the next step."""
        if point[:3] not in self._controls:
            made = Program(self.pair(point.replicas)[1], point.step, point.place)
            shown = [made.run(*numbers) for numbers in self.steps][-1]
            self._controls[point[:3]] = made, shown, made.run(3)
        return self._controls[point[:3]]

    @contextlib.contextmanager
    def armed(self, point: Point, executor: Executor) -> Iterator[None]:
        """Let it happen inside of the block."""
        pids = [os.getpid()]
        for info in executor.replicas():
            pids += [info.pid, 0]
        due = {number: rest for number, *rest in point.faults}
        for number, pid in enumerate(pids):
            Fate(number).set(pid, *due.get(number, (0, 0)))
        try:
            yield
        finally:
            for number in range(len(pids)):
                Fate(number).at[Fate.PID] = -1

    def attempt(self, point: Point) -> str:
        """Try one; returns what is wrong."""
        ours, _ = self.pair(point.replicas)
        control, expected, following = self.control(point)
        program = Program(ours, point.step, point.place)
        for numbers in self.steps[:-1]:
            program.run(*numbers)
        try:
            with self.armed(point, ours):
                found = program.run(*self.steps[-1])
        except self.errors as raised:
            error = raised.with_traceback(None)
            control.load(program.state())
            if not same(program.run(3, 4, 5), control.run(3, 4, 5)):
                return f"other numbers in the next steps, after {error!r}"
        else:
            if not same(found, expected):
                return "other numbers than those of the undisturbed program"
            if not same(program.run(3), following):
                return "other numbers in the next step, without an error"
        del program
        gc.collect()
        ours.grow(60)
        if {*itertools.chain(*ours.flush())} != {0}:
            return f"models or graphs that stay: {ours.flush()}"
        return self._left()

    def _left(self) -> str:
        """Say which processes are not those of replicas in use."""
        known = {
            info.pid for pair in self._pairs.values() for one in pair for info in one.replicas()
        }
        for _ in range(1000):
            if not (left := forked.running() - known):
                return ""
            time.sleep(0.005)
        return f"processes that stay: {left}"

    def run(self, point: Point) -> str:
        """Try one with a limit, whatever comes of it."""

        def late(*_: object) -> None:
            raise Hang(f"it took {self.limit:g} s")

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            problem = self.attempt(point)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            way = [f"{Path(f.filename).stem}:{f.lineno}" for f in frames if str(ROOT) in f.filename]
            problem = f"{error!r} by way of {' '.join(way[-8:])}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if problem:  # it has broken them
            self._controls = {key: one for key, one in self._controls.items() if key[2] != point[2]}
            for executor in self._pairs.pop(point.replicas, ()):
                for info in executor.replicas():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(info.pid, signal.SIGKILL)
                executor.close()
        return problem


class Deaths(Machine):
    """One replica ends, or two, or one and the next one."""

    steps = ((0, 1, 2),)

    prepare = staticmethod(mortal)

    def points(self, scenario: Point) -> Iterator[Point]:
        assert not self.run(scenario)
        counts = [Fate(1 + 2 * index).at[Fate.COUNT] for index in range(scenario.replicas)]
        for (index, count), how in itertools.product(enumerate(counts), range(3)):
            for due in range(1, count + 1):
                one, both = 1 + 2 * index, 1 + 2 * ((index + 1) % scenario.replicas)
                name = f"replica {index}, message {due} {MOMENTS[how]}"
                yield scenario._replace(name=name, faults=((one, due, how),))
                if not index:
                    faults = (one, due, how), (both, due, how)
                    yield scenario._replace(name=f"{name}, and its neighbour", faults=faults)
                for late in (1, 2, 3) if due % 2 == 0 else ():
                    faults = (one, due, how), (one + 1, late, how)
                    more = f"{name}, and the newcomer at message {late}"
                    yield scenario._replace(name=more, faults=faults)


class Calls(Machine):
    """A system call of the wire fails, in the driver or in a replica."""

    prepare = staticmethod(weak)
    errors = (ParallelError, OSError, Handler)

    def __init__(self) -> None:
        super().__init__()
        fallible(lambda: Fate(0))

    def points(self, scenario: Point) -> Iterator[Point]:
        assert not self.run(scenario)
        for number in range(0, 2 * scenario.replicas, 2):
            side = f"replica {number // 2}" if number else "driver"
            number = number and number - 1
            at = Fate(number).at
            names = [CALLS[at[Fate.NAMES + due]] for due in range(1, at[Fate.COUNT] + 1)]
            for due, name in enumerate(names, 1):
                for how, failure in enumerate(FAILURES[name]):
                    if not number or failure not in HANDLERS:
                        text = f"{side}, call {due}: {name}, {failure}"
                        yield scenario._replace(name=text, faults=((number, due, how),))


def _finalizes(frame: Any) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Lines(Machine):
    """Ctrl-C comes at a line of the package. One that begins with ``with`` is left out: it comes
    once more before the block's end, where no signal's handler runs. So are finalizers, in which
    Python drops it.
    """

    errors = (KeyboardInterrupt,)
    steps = ((0,), (1,))
    most = 40
    """Times of one line: a loop that waits takes as many turns as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[tuple[str, int]] = Counter()
        self._due: tuple[str, int, int] = "", 0, 0

    @contextlib.contextmanager
    def armed(self, point: Point, executor: Executor) -> Iterator[None]:
        """Let it happen inside of the block."""
        self._due = point.line
        self._seen.clear()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: Any, *_: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(str(ROOT)) else None

    def _line(self, frame: Any, event: str, _: object) -> Any:
        if event == "line":
            at = frame.f_code.co_filename, frame.f_lineno
            self._seen[at] += 1
            if self._due == (*at, self._seen[at]) and not _finalizes(frame):
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    def points(self, scenario: Point) -> Iterator[Point]:
        assert not self.run(scenario)
        for (file, number), times in self._seen.items():
            if linecache.getline(file, number).lstrip().startswith("with "):
                continue
            for time_ in range(1, min(times, self.most) + 1):
                name = f"{Path(file).relative_to(ROOT)}:{number}, time {time_}"
                yield scenario._replace(name=name, line=(file, number, time_))


MACHINES: dict[str, type[Machine]] = {"deaths": Deaths, "calls": Calls, "lines": Lines}


def scenarios(replicas: int) -> Iterator[Point]:
    """Yield all programs."""
    for step in STEPS:
        for place in ("driver", "replicas") if step != "maps" else ("driver",):
            yield Point(step, place, replicas)


def main(arguments: list[str]) -> int:
    """Try points; returns how many are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--sample", type=int, help="so many, with a fixed seed")
    parser.add_argument("--only", default="", help="those with this in their names")
    parser.add_argument("--part", default="1/1", help="as 2/3, the second of three")
    chosen = parser.parse_args(arguments)
    forked.start(MACHINES[chosen.machine].prepare)
    forked.use(True)
    torch.set_num_threads(1)
    machine, begun = MACHINES[chosen.machine](), time.monotonic()
    part, parts = map(int, chosen.part.split("/"))
    tried = wrong = 0
    importlib.import_module("torch._dynamo")  # optimizers do
    gc.freeze()
    for scenario in itertools.chain(scenarios(2), scenarios(3)):
        if chosen.only not in str(scenario) and not chosen.only.startswith(str(scenario)):
            continue
        points = [p for p in machine.points(scenario) if chosen.only in str(p)][part - 1 :: parts]
        if chosen.sample:
            points = random.Random(0).sample(points, min(len(points), chosen.sample))
        before = len(os.listdir("/proc/self/fd"))
        worst = 0.0, "none"
        for point in points:
            tried, at = tried + 1, time.monotonic()
            problem = machine.run(point)
            worst = max(worst, (time.monotonic() - at, point.name))
            if problem:
                wrong += 1
                print(f"WRONG {point}: {problem}", flush=True)
                print(f"  {sys.argv[0]} {chosen.machine} --only {str(point)!r}", flush=True)
        more = len(os.listdir("/proc/self/fd")) - before
        text = (
            f"{len(points)} points, {more} descriptors more, at most {worst[0]:.1f} s: {worst[1]}"
        )
        print(f"{scenario}: {text}", flush=True)
    print(f"{tried} points tried, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    for pair in machine._pairs.values():
        for executor in pair:
            executor.close()
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

"""Every point: one thing goes wrong at each point of a program, one point after the other.

    python tests/support/points.py deaths    a replica ends, at each message, at three moments
    python tests/support/points.py calls     a system call of the wire fails
    python tests/support/points.py lines     Ctrl-C comes, at each line of the package

A point ends with the bits of the undisturbed program, or with an error, after which three steps are
right: those of another program in the same state. Nothing hangs, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import errno
import functools
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
from raydp_parallel.driver import optimizer
from raydp_parallel.driver.dispatcher import Dispatcher
from raydp_parallel.errors import ParallelError, StateLost
from raydp_parallel.wire.channel import Channel

ROOT = str(Path(raydp_parallel.__file__).parent)

# --- programs ---


def penalty(program: Program, x: Tensor) -> list[Tensor]:
    """Learn with a gradient that is differentiated."""
    out = program.model(x.requires_grad_())
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = program.learn(out.square().mean() + slope.square().mean())
    assert x.grad is not None
    return [loss, x.grad]


STEPS: dict[str, Callable[[Program, Tensor], list[Tensor]]] = {
    "plain": lambda program, x: [program.learn(program.model(x).square().mean())],
    "accumulate": lambda program, x: [*STEPS["plain"](program, x), *STEPS["plain"](program, 2 * x)],
    "clip": lambda program, x: [*STEPS["accumulate"](program, x), program.clip(0.05)],
    "penalty": penalty,
    "with_loss": lambda program, x: [
        program.learn(program.model.with_loss(nn.MSELoss())(x, x[:, :3]))
    ],
    "maps": lambda program, x: [*program.model.map(x.split(2))],
}
"""What a program does before its optimizer steps; returns what that showed."""


class Program:
    """Trains a net with an optimizer in the ``"driver"``, or in the ``"replicas"``."""

    def __init__(self, executor: Executor, step: str, place: str) -> None:
        torch.manual_seed(0)
        parts = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh()
        net = nn.Sequential(*parts, spectral_norm(nn.Linear(6, 3)))
        self.model, self._step = DataParallel(net, executor=executor), step
        more: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
        if place == "replicas":
            self.optimizer = self.model.optimizer(torch.optim.SGD, **more)
            self.clip = self.optimizer.clip_grad_norm_
        else:
            self.optimizer = torch.optim.SGD(net.parameters(), **more)
            self.clip = functools.partial(nn.utils.clip_grad_norm_, [*net.parameters()])

    def learn(self, loss: Tensor) -> Tensor:
        """Call backward; returns the loss."""
        loss.backward()
        return loss

    def step(self, number: int) -> list[Tensor]:
        """Make one step; returns what it showed."""
        torch.manual_seed(number)
        self.optimizer.zero_grad()
        found = [t.detach().clone() for t in STEPS[self._step](self, torch.randn(12, 5))]
        if self._step != "maps":
            self.optimizer.step()
        return found

    def run(self, *numbers: int) -> list[Tensor]:
        """Make some steps; returns what they showed, and the state."""
        found = [shown for number in numbers for shown in self.step(number)]
        return [*found, *filter(torch.is_tensor, torch.utils._pytree.tree_leaves(self.state()))]

    def state(self) -> list[Any]:
        """Return all that training goes on from."""
        return copy.deepcopy([self.model.module.state_dict(), self.optimizer.state_dict()])

    def load(self, state: list[Any]) -> None:
        """Go on from another program's."""
        self.model.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


# --- faults ---


class Handler(Exception):
    """An exception of a signal's handler."""


class Hang(BaseException):
    """Took longer than a point may."""


class Fate(ctypes.Structure):
    """Says what happens to a process, at which of its messages, or system calls of the wire."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("pid", "count", "due", "how")),
        ("names", ctypes.c_int8 * 2000),
    ]

    def comes(self, name: int = 0) -> bool:
        """Count one more of this process, and tell if it is the one."""
        if self.pid != os.getpid():
            return False
        self.count += 1
        self.names[self.count] = name
        return bool(self.count == self.due)


_map = mmap.mmap
FATES = (Fate * 7).from_buffer(_map(-1, 7 * ctypes.sizeof(Fate)))
"""Shared by all processes: the driver's, then for each replica that of now, and the next one's."""
MOMENTS = "before it is read", "before the answer", "after the answer"
HOW = "ENOMEM", "EMFILE", "ENOSPC", "short", "handler before", "handler after"
CALLS: dict[str, tuple[Any, str]] = {
    "send": (socket.socket, "ENOMEM short handler"),
    "recv": (socket.socket, "ENOMEM short handler"),
    "sendmsg": (socket.socket, "ENOMEM EMFILE short handler"),
    "recvmsg": (socket.socket, "ENOMEM short handler"),
    "memfd_create": (os, "ENOMEM EMFILE handler"),
    "ftruncate": (os, "ENOSPC handler"),
    "mmap": (mmap, "ENOMEM handler"),
    "dup": (os, "EMFILE handler"),
}


def fate_of(index: int) -> Callable[[], Fate]:
    """Return a function that finds this replica's; the next one takes what is for it."""
    now, following = FATES[1 + 2 * index], FATES[2 + 2 * index]
    following.pid = following.pid or os.getpid()
    return lambda: following if following.pid == os.getpid() else now


def mortal(index: int) -> None:
    """Let a replica end at a message."""
    find, receive, send, due = fate_of(index), Channel.receive, Channel.send, False

    def end_at(moment: int) -> None:
        if due and find().how == moment:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def receiving(self: Channel, *args: Any) -> Any:
        nonlocal due
        select.select([self._sock], [], [])
        due = find().comes()
        end_at(0)
        return receive(self, *args)

    def sending(self: Channel, *args: Any) -> None:
        end_at(1)
        send(self, *args)
        end_at(2)

    Channel.receive, Channel.send = receiving, sending  # type: ignore[method-assign]


def half(what: Any) -> Any:
    """Return half of what is to be sent, or received."""
    if isinstance(what, int):
        return max(1, what // 2)
    if isinstance(what, list):
        return [half(what[0])]
    return memoryview(what)[: max(1, len(what) // 2)]


def fallible(find: Callable[[], Fate]) -> None:
    """Let a system call of the wire fail in this process."""

    def replace(number: int, name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            on_main = threading.current_thread() is threading.main_thread()
            how = HOW[find().how] if on_main and find().comes(number) else ""
            if how.startswith("E"):
                raise OSError(getattr(errno, how), how)
            if how == "handler before":
                raise Handler
            if how == "short" and name.startswith(("send", "recv")):
                args = args[0], half(args[1]), *args[2:]
            found = function(*args, **keywords)
            if how == "handler after":
                raise Handler
            return found

        return call

    for number, (name, (home, _)) in enumerate(CALLS.items()):
        setattr(home, name, replace(number, name, getattr(home, name)))


# --- points ---


class Point(NamedTuple):
    """One point of a program."""

    step: str
    place: str  # of the optimizer
    replicas: int
    name: str = ""
    # What happens, and when, by the number of a fate; or the line that Ctrl-C comes at.
    faults: tuple[tuple[int, int, int], ...] = ()
    line: tuple[str, int, int] = "", 0, 0

    def __str__(self) -> str:
        return f"{self.step}/{self.place}/{self.replicas} {self.name}".strip()


class Machine:
    """Tries points of one kind."""

    errors: tuple[type[BaseException], ...] = (ParallelError,)
    programs = (*STEPS,)
    steps: tuple[tuple[int, ...], ...] = ((0, 1),)  # the last ones are those that are disturbed
    limit = 20.0  # seconds of a point

    def __init__(self, planted: bool) -> None:
        self.planted = planted
        self._pairs: dict[int, list[Executor]] = {}
        self._controls: dict[Any, tuple[Program, list[Tensor], list[Tensor]]] = {}

    def prepare(self, index: int) -> None:
        """Prepare a replica for what may happen to it."""

    def points(self, scenario: Point) -> Iterator[Point]:
        """Yield those of a program that has just run undisturbed."""
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
            made = Program(self._pairs[point.replicas][1], point.step, point.place)
            shown = [made.run(*numbers) for numbers in self.steps][-1]
            self._controls[point[:3]] = made, shown, made.run(3)
        return self._controls[point[:3]]

    @contextlib.contextmanager
    def armed(self, point: Point, executor: Executor) -> Iterator[None]:
        """Let it happen inside of the block."""
        pids = [os.getpid()]
        for info in executor.replicas():
            pids += [info.pid, 0]
        for number, pid in enumerate(pids):
            FATES[number] = Fate(pid)
        for number, due, how in point.faults:
            FATES[number].due, FATES[number].how = due, how
        try:
            yield
        finally:
            for fate in FATES:
                fate.pid = -1

    def attempt(self, point: Point) -> str:
        """Try one; returns what is wrong."""
        ours, _ = self.pair(point.replicas)
        control, expected, following = self.control(point)
        program, way = Program(ours, point.step, point.place), "no error"
        for numbers in self.steps[:-1]:
            program.run(*numbers)
        try:
            with self.armed(point, ours):
                found = program.run(*self.steps[-1])
        except self.errors as error:
            way = way_of(error)
            with contextlib.suppress(StateLost):  # the step's gradients went, then earlier steps
                program.state()
            control.load(program.state())
            found, expected = program.run(3, 4, 5), control.run(3, 4, 5)
        else:
            found, expected = [*found, *program.run(3)], [*expected, *following]
        if not (len(found) == len(expected) and all(map(torch.equal, found, expected))):
            return f"other numbers, after {way}"
        del program
        gc.collect()
        ours.grow(60)
        kept = ours.flush()
        stays = {*itertools.chain(*kept)} != {0}
        return f"models or graphs that stay, {kept}, after {way}" if stays else self.left()

    def left(self) -> str:
        """Say which processes are not those of these replicas, if they do not end."""
        executors = itertools.chain(*self._pairs.values())
        pids = {info.pid for executor in executors for info in executor.replicas()}
        for _ in range(1000):
            if forked.running() <= pids:
                return ""
            time.sleep(0.005)
        return f"processes that stay: {forked.running() - pids}"

    def run(self, point: Point) -> str:
        """Try one with a limit; returns what is wrong, whatever that is."""

        def late(*_: object) -> None:
            raise Hang(f"it took {self.limit:g} s")

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            problem = self.attempt(point)
        except BaseException as error:
            problem = way_of(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if problem:  # what it has broken is made anew
            self._controls = {key: one for key, one in self._controls.items() if key[2] != point[2]}
            for executor in self._pairs.pop(point.replicas, ()):
                for info in executor.replicas():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(info.pid, signal.SIGKILL)
                executor.close()
        return problem


def way_of(error: BaseException) -> str:
    """Say what was raised, and by which lines of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    way = [f"{Path(f.filename).stem}:{f.lineno}" for f in frames if ROOT in f.filename]
    return f"{error!r} by way of {' '.join(way[-8:])}"


class Deaths(Machine):
    """One replica ends, or two, or one and the next one.

    Planted: the scale of gradients is lost where a replica dies as they are clipped.
    """

    steps = ((0, 1, 2),)

    def __init__(self, planted: bool) -> None:
        super().__init__(planted)
        clips = optimizer.InReplicas.clip_grad_norm_

        def clip(self: Any, most: float) -> Any:
            resident = self._resident
            slots = [*resident._set.slots.values()]
            before = [(slot.life, slot.ready) for slot in slots]
            norm = clips(self, most)
            for one in resident.gradients.sums.values():
                one.scale = one.scale if before == [(s.life, s.ready) for s in slots] else None
            return norm

        if planted:
            optimizer.InReplicas.clip_grad_norm_ = clip  # type: ignore[method-assign]

    def prepare(self, index: int) -> None:
        mortal(index)

    def points(self, scenario: Point) -> Iterator[Point]:
        counts = [FATES[1 + 2 * index].count for index in range(scenario.replicas)]
        for (index, count), how in itertools.product(enumerate(counts), range(3)):
            for due in range(1, count + 1):
                one, both = 1 + 2 * index, 1 + 2 * ((index + 1) % scenario.replicas)
                name = f"replica {index}, message {due} {MOMENTS[how]}"
                more = {"": (one, due, how), ", and the next one": (both, due, how)}
                for late in (1, 2, 3) if due % 2 == 0 else ():
                    more[f", and its successor at message {late}"] = one + 1, late, how
                for words, fault in more.items():
                    faults = ((one, due, how), fault)
                    yield scenario._replace(name=name + words, faults=faults)


class Calls(Machine):
    """A system call of the wire fails, in the driver or in a replica.

    Planted: a replica that could not read all of a message goes on.
    """

    errors = (ParallelError, OSError, Handler)

    def __init__(self, planted: bool) -> None:
        super().__init__(planted)
        self.fails = False

    def prepare(self, index: int) -> None:
        receive = Channel.receive

        def goes_on(self: Channel, *args: Any) -> Any:
            try:
                return receive(self, *args)
            except OSError:
                self._way = []
                raise

        if self.planted:
            Channel.receive = goes_on  # type: ignore[method-assign]
        fallible(fate_of(index))

    def pair(self, replicas: int) -> list[Executor]:
        """Return new replicas, which have no windows yet."""
        if not self.fails:  # only now: replicas have their own
            self.fails = True
            fallible(lambda: FATES[0])
        if known := self._pairs.get(replicas):
            known[0].close()
            known[0] = Executor(["cpu"] * replicas)
        return super().pair(replicas)

    def points(self, scenario: Point) -> Iterator[Point]:
        for number in range(0, 2 * scenario.replicas, 2):
            side = f"replica {number // 2 - 1}" if number else "driver"
            number = max(0, number - 1)
            fate = FATES[number]
            for due in range(1, fate.count + 1):
                name = [*CALLS][fate.names[due]]
                for at, how in enumerate(HOW):
                    is_handler = how.startswith("handler")
                    if how.partition(" ")[0] in CALLS[name][1] and not (number and is_handler):
                        text = f"{side}, call {due}: {name}, {how}"
                        yield scenario._replace(name=text, faults=((number, due, at),))


class Lines(Machine):
    """Ctrl-C comes at a line of the package. One that begins with ``with`` is left out: it comes
    once more before the block's end, where no signal's handler runs. So are finalizers, in which
    Python drops it.

    Planted: a request that Ctrl-C interrupts counts as answered.
    """

    errors = (KeyboardInterrupt,)
    programs = (*STEPS, "close")
    steps = ((0,), (1,))

    def __init__(self, planted: bool) -> None:
        super().__init__(planted)
        self._seen: Counter[tuple[str, int]] = Counter()
        self._due: tuple[str, int, int] = "", 0, 0
        receive = Dispatcher.receive

        def drops(self: Dispatcher, pending: Any) -> Any:
            try:
                return receive(self, pending)
            except KeyboardInterrupt:
                self.owed.pop(pending.slot, None)
                raise

        if planted:
            Dispatcher.receive = drops  # type: ignore[method-assign]

    def attempt(self, point: Point) -> str:
        """Try one; returns what is wrong."""
        if point.step != "close":
            return super().attempt(point)
        self.pair(point.replicas)
        as_plain = point._replace(step="plain")
        executor, expected = Executor(["cpu"] * point.replicas), self.control(as_plain)[1]
        program = Program(executor, "plain", point.place)
        program.run(0)
        shown = program.step(1)
        try:
            with self.armed(point, executor):
                executor.close()
        except KeyboardInterrupt:
            executor.close()
        same = all(map(torch.equal, [*shown, *program.run()], expected))
        return self.left() if same else "other weights than those of the last step"

    @contextlib.contextmanager
    def armed(self, point: Point, executor: Executor) -> Iterator[None]:
        """Let it come inside of the block."""
        self._due = point.line
        self._seen.clear()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: Any, *_: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame: Any, event: str, _: object) -> Any:
        if event == "line":
            at = frame.f_code.co_filename, frame.f_lineno
            self._seen[at] += 1
            if self._due == (*at, self._seen[at]):
                while frame is not None and frame.f_code.co_name != "__del__":
                    frame = frame.f_back
                if frame is None:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._line

    def points(self, scenario: Point) -> Iterator[Point]:
        for (file, number), times in self._seen.items():
            if not linecache.getline(file, number).lstrip().startswith("with "):
                for turn in range(1, min(times, 40) + 1):  # a loop that waits has any number
                    name = f"{file[len(ROOT) + 1 :]}:{number}, time {turn}"
                    yield scenario._replace(name=name, line=(file, number, turn))


def descriptors() -> int:
    """Count those that this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


MACHINES = {"deaths": Deaths, "calls": Calls, "lines": Lines}


def main() -> int:
    """Try points; returns how many are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--sample", type=int, default=1 << 30, help="so many of each program")
    parser.add_argument("--seed", type=int, default=0, help="chooses them")
    parser.add_argument("--only", default="", help="those with this in their names")
    parser.add_argument("--planted", action="store_true", help="with a defect to be found")
    chosen = parser.parse_args()
    machine = MACHINES[chosen.machine](chosen.planted)
    forked.start(machine.prepare)
    forked.use(True)
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as optimizers do
    gc.freeze()
    tried, wrong, begun = 0, 0, time.monotonic()
    places = "driver", "replicas"
    for replicas, step, place in itertools.product((2, 3), machine.programs, places):
        scenario = Point(step, place, replicas)
        of_this = chosen.only in str(scenario) or chosen.only.startswith(str(scenario))
        if not of_this or (step, place) == ("maps", "replicas"):
            continue
        assert not (problem := machine.run(scenario)), f"{scenario} by itself: {problem}"
        points = [point for point in machine.points(scenario) if chosen.only in str(point)]
        points = [point for point in points if chosen.only == str(point)] or points
        points = random.Random(chosen.seed).sample(points, min(len(points), chosen.sample))
        worst, before = (0.0, ""), descriptors()
        for point in points:
            at, problem = time.monotonic(), machine.run(point)
            worst = max(worst, (time.monotonic() - at, point.name))
            tried, wrong = tried + 1, wrong + bool(problem)
            if problem:
                print(f"WRONG {point}: {problem}\n  alone: {chosen.machine} --only {str(point)!r}")
        more = descriptors() - before
        text = f"{scenario}: {len(points)} points, {more} descriptors more"
        print(f"{text}, at most {worst[0]:.1f} s: {worst[1]}", flush=True)
        wrong += more > 20
    print(f"{chosen.machine}: {tried} points, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))

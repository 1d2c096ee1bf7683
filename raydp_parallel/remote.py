"""Calls to one replica: over its direct line, or as Ray tasks."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from raydp_parallel import devices
from raydp_parallel.actor import METHODS, SHARE_LIMIT, give_back, sample, shows, take_back
from raydp_parallel.crew import Death, Task
from raydp_parallel.line import Line, LineCut
from raydp_parallel.links import Arena, Descriptor, Exposed, Found, Ledger, Mappings, Packet, Slice

log = logging.getLogger("raydp_parallel")

TURN = 0.2
"""Seconds that Ray is waited for at a time: inside, it looks for Ctrl-C once a second only."""

_SHORT_TURN = 0.02
"""The same, where several threads read from one line."""

_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What this process, or its machine, has not got: no sign of a death."""

_FRAME = 1 << 15
"""Bytes that a socket takes in whether or not anybody reads."""


class Pending:
    """A call on its way: over the line, or as a Ray task.

    Args:
        door: Whose call it is.
        number: Its number at that door.
        ref: The Ray task, None if it went over the line.

    Attributes:
        turn: How many calls that door had then to answer, also those of other threads, this one included.
    """

    def __init__(self, door: RemoteDoor, number: int, ref: Any) -> None:
        self.door = door
        door.unanswered.add(number)
        self.turn = len(door.unanswered)
        self._line = door.line
        self._number = number
        self._ref = ref
        self._answer: Any = None

    @property
    def through_ray(self) -> bool:
        """Whether it is a Ray task."""
        return self._ref is not None

    def result(self, timeout: float | None) -> Any:
        """Wait for the answer."""
        try:
            return self._result(timeout)
        finally:
            self.door.unanswered.discard(self._number)

    def _result(self, timeout: float | None) -> Any:
        if self._answer is not None:
            return self._answer
        if self._ref is not None or self._line is None:
            return _get(self._ref, timeout)
        try:
            answer = self._line.receive(self._number, timeout)
        except LineCut:
            return Death("its direct line was cut")
        try:
            return self.door.opened(answer)
        except OSError as error:
            if error.errno in _OWN:
                raise  # other replicas would seem to die of it, too
            return Death(f"its memory is gone: {error}")  # it ended right behind its answer

    def give_up(self) -> None:
        """Nobody waits any more."""
        self.door.unanswered.discard(self._number)
        if self._ref is None and self._line is not None:
            self._line.give_up(self._number)


class Lost:
    """A call that could not be sent, because nobody is there.

    Args:
        door: Whose call it was.
        error: What was seen.
    """

    through_ray = False
    turn = 1

    def __init__(self, door: RemoteDoor, error: Exception) -> None:
        self.door = door
        self._error = error

    def result(self, timeout: float | None) -> Death:
        """What came of it."""
        return Death(in_short(self._error))

    def give_up(self) -> None:
        """Nothing is on its way."""


def await_each(calls: Sequence[Pending | Lost], deadlines: Sequence[float], take: Callable[[int, bool], None]) -> None:
    """Wait for calls, and let each answer be taken as soon as it is there, whoever else is still to answer.

    Args:
        calls: The calls.
        deadlines: When each is to be taken at the latest.
        take: Takes what came of a call, by its number and whether that is there.
    """
    left = dict(enumerate(calls))
    while left:
        found = {number for number, call in left.items() if isinstance(call, Lost)}
        for line, numbers in _by_line(left).items():
            found.update(numbers[at] for at in line.look(numbers))
        now = time.monotonic()
        late = {number for number in left if deadlines[number] <= now} - found
        if not found and not late:
            found = _await_some(left, min(deadlines[number] for number in left) - now)
        for number in sorted(found | late):
            del left[number]
            take(number, number in found)


def _by_line(left: dict[int, Pending | Lost]) -> dict[Line, dict[int, int]]:
    """The calls that went over lines, by what each line calls them."""
    found: dict[Line, dict[int, int]] = {}
    for number, call in left.items():
        if isinstance(call, Pending) and call._ref is None and call._line is not None:
            found.setdefault(call._line, {})[call._number] = number
    return found


def _await_some(left: dict[int, Pending | Lost], seconds: float) -> set[int]:
    """Wait a turn. Returns what Ray has brought; what came over lines is to be looked for."""
    refs = {number: call._ref for number, call in left.items() if isinstance(call, Pending) and call._ref is not None}
    if refs:
        return _fetch(left, refs, min(TURN, seconds))
    lines = _by_line(left)
    waiting = select.poll()
    # Another thread may have read what this one is about to wait for.
    turn = TURN if all(line.waits_for() <= len(numbers) for line, numbers in lines.items()) else _SHORT_TURN
    for line in lines:
        if line.file() >= 0:
            waiting.register(line.file(), select.POLLIN)
    waiting.poll(max(1.0, min(turn, seconds) * 1e3))
    return set()


def _fetch(left: dict[int, Pending | Lost], refs: dict[int, Any], seconds: float) -> set[int]:
    """Get what Ray carries, together, which costs a fifth of getting each alone."""
    try:
        answers = ray.get([*refs.values()], timeout=max(0.0, seconds))
    except ray.exceptions.RayError:  # of one that died, or all are not there yet: those that are, each for itself
        there, _ = ray.wait([*refs.values()], num_returns=len(refs), timeout=0)
        return {number for number, ref in refs.items() if ref in there}
    for number, answer in zip(refs, answers, strict=True):
        left[number]._answer = answer  # type: ignore[union-attr]  # only those that Ray carries
    return {*refs}


class RemoteDoor:
    """The driver's side of an actor's door.

    Args:
        actor: The actor.
        patience: Seconds that a frame may stand still on the line; None waits.

    Attributes:
        unanswered: The numbers of calls whose answers are waited for.
    """

    def __init__(self, actor: Any, patience: float | None = None) -> None:
        self.actor = actor
        self.unanswered: set[int] = set()
        self._patience = patience
        self.line: Line | None = None
        self.shares = False
        self.shares_device = False
        self._number = 0
        self._missed = False
        self._mappings = Mappings(devices.pinner(None))
        self._ledger = Ledger()
        self._process: int | None = None

    def watch(self, pid: int) -> None:
        """Hold on to the process, which is on this machine, so that `end` finds it and no other."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(pid)
                self._let_go = weakref.finalize(self, os.close, self._process)
                self._let_go.atexit = False

    def end(self) -> None:
        """End the process. Ray takes 5 s for one that was stopped, and cannot reach all of them."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            self._let_go()

    def last_words(self, seconds: float, asks: Callable[[], bool]) -> str | None:
        """Why its process ended, by Ray; None if Ray does not say so in time, or says that it did not.

        Not inside of Ray for longer than a look: who leaves the cluster while a thread is in there finds his process
        ended.

        Args:
            seconds: How long to wait.
            asks: Whether Ray may still be asked.
        """
        said, deadline = self.actor.hello.remote(), time.monotonic() + seconds
        while time.monotonic() < deadline and asks():
            if ray.wait([said], timeout=0)[0]:
                try:
                    ray.get(said)
                except ray.exceptions.RayError as error:
                    return in_short(error)
                return None
            time.sleep(TURN / 10)
        return None

    def call_directly(self, number: int = 0, timeout: float | None = None) -> None:
        """Open a direct line, if that can be had; else calls stay Ray tasks.

        Args:
            number: The first call that goes over it.
            timeout: Seconds to wait for calls that still run there.
        """
        found = ray.get(self.actor.open_line.remote(number, self._mappings.held()), timeout=timeout)
        if found is None:
            return
        address, held = found
        try:
            self.line = Line(address, self._take_note)
            self._ledger.settle(held)
            if self._patience is not None:
                self.line.limit(self._patience)
        except OSError as error:
            log.info("no direct line to a replica on this node (%s): calls go through Ray, 1 ms each", error)

    def submit(
        self,
        method: str,
        header: bytes,
        beside: Sequence[Packet],
        timeout: float | None = None,
        task: Task | None = None,
    ) -> Pending | Lost:
        """Send a call. What lies in the object store only Ray can carry."""
        number = self._number
        try:
            self._mend(number, timeout)
            self._number, self._missed = number + 1, True
            pending = self._send(number, method, header, beside, task)
            self._missed = False
            return pending
        except ray.exceptions.ObjectStoreFullError:
            raise  # which is nobody's death; other replicas would seem to die of it, too
        except (OSError, ray.exceptions.RayError) as error:
            return Lost(self, error)

    def _send(self, number: int, method: str, header: bytes, beside: Sequence[Packet], task: Task | None) -> Pending:
        if not self.shares_device:
            beside = [packet.elsewhere() if isinstance(packet, devices.DeviceSlice) else packet for packet in beside]
        if not self.shares:
            beside = [_stored(packet) for packet in beside]
        large = len(header) + sum(len(packet) for packet in beside if isinstance(packet, np.ndarray)) > _FRAME
        if (
            self.line is None
            or any(isinstance(packet, ray.ObjectRef) for packet in beside)
            # The replica may be in the midst of a long answer, and would not read before that is taken.
            or (large and self.line.busy)
            or (task is not None and task.shown)
        ):
            plain = [_copyable(packet) for packet in beside]
            call = getattr(self.actor, method)
            call = call.options(name=task.name) if task is not None else call
            return Pending(self, number, call.remote(number, header, *plain))
        for packet in beside:
            if isinstance(packet, Slice):
                self._ledger.lend(packet)
        self.line.send(number, [give_back(self._mappings), bytes([METHODS.index(method)]), header, *beside])
        return Pending(self, number, None)

    def _mend(self, number: int, timeout: float | None) -> None:
        """See that the replica waits for this call, and not for one that broke off or was never sent."""
        broken = self.line is not None and not self.line.intact
        if broken or self._missed:
            had_line = self.line is not None
            self.close()
            if had_line:
                self.call_directly(number, timeout)
            else:
                ray.get(self.actor.skip_to.remote(number), timeout=timeout)
            self._missed = False

    def _take_note(self, answer: list[Any]) -> list[Any]:
        """What an answer brings, and the word what of this process's memory is no longer used there."""
        take_back(answer[0], self._ledger)
        return [self._mappings.find(part) if isinstance(part, Descriptor) else part for part in answer[1:]]

    def opened(self, answer: list[Any]) -> Any:
        """An answer with its packets in reach; what lies in shared memory is kept there until it is garbage here."""
        parts = self._take_note(answer)
        for part in parts:
            if isinstance(part, Found):
                part.piece()  # now, while the other process is there
        return tuple(parts) if len(parts) > 1 else parts[0]

    def share(self, arena: Arena, always: bool, timeout: float | None = None) -> None:
        """Use shared memory on the line, if both sides can read the other's."""
        if self.line is not None:
            probe, shown = sample(arena)
            self._ledger.lend(probe)
            found = ray.get(self.actor.share.remote(probe.descriptor, shown), timeout=timeout)
            if found is not None and shows(self._mappings.find(found[0]), found[1]):
                ray.get(self.actor.start_sharing.remote(always), timeout=timeout)
                self.shares = True

    def share_device(self, arena: devices.DeviceArena) -> str:
        """Use the memory of the GPU that both are on, if each can open the other's; returns why not, else nothing."""
        try:
            probe, shown = devices.sample(arena)
            self._ledger.lend(probe)
            found = ray.get(self.actor.share_device.remote(probe.descriptor, shown))
            if isinstance(found, str):
                return found
            self._mappings.opener = devices.Opener(arena.device)
            if not devices.shows(self._mappings.find(found[0]).piece(), found[1]):
                return "what this process saw is not what the replica wrote"
        except (RuntimeError, OSError, AttributeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        ray.get(self.actor.start_device.remote())
        self.shares_device = True
        return ""

    def close(self) -> None:
        """Hang up."""
        if self.line is not None:
            self.line.close()


def _get(ref: Any, timeout: float | None) -> Any:
    """The result of a Ray task; waited for in short turns, between which Ctrl-C is heard."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return ray.get(ref, timeout=max(0.0, min(left, TURN)))
        except ray.exceptions.GetTimeoutError:
            if left <= TURN:
                raise


def _copyable(packet: Packet) -> Packet:
    """A packet as Ray, or a line without shared memory, can carry it."""
    if isinstance(packet, Exposed):
        return packet.descriptor
    return packet.array if isinstance(packet, Slice) else packet


_put: weakref.WeakKeyDictionary[Slice, Any] = weakref.WeakKeyDictionary()
"""What of this process's shared memory lies in the object store too, for replicas on other nodes."""


def _stored(packet: Packet) -> Packet:
    """A packet for a replica that shares no memory. Large ones are put into the store once, for all of them."""
    if not isinstance(packet, Slice) or packet.array.nbytes <= SHARE_LIMIT:
        return _copyable(packet)
    if packet not in _put:
        _put[packet] = ray.put(packet.array)
    return _put[packet]


def in_short(error: Exception) -> str:
    """What Ray says of a death, without its advice and what it repeats."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    return (text.partition("The actor is dead because ")[2] or text).rstrip(".")

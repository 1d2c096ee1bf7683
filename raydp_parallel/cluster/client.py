"""The driver's side of one replica: its calls, over a direct connection or through Ray, and the
wait for their answers, of one replica or of several at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import select
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.backend import Death, TaskLabel
from raydp_parallel.cluster.ray_api import TURN, RayError, get, in_short, late
from raydp_parallel.devices import forks, trials
from raydp_parallel.devices.buffers import Arena, Descriptor, LeaseTable, Pin, SharedBuffer
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.transport import cuda_ipc, handshake
from raydp_parallel.transport.direct_connection import Connection, LineCut, StoodStill
from raydp_parallel.transport.links import SHARE_LIMIT, Delivered, Exposed, ForeignMemory, Mappings
from raydp_parallel.transport.message_bytes import (
    METHODS,
    check_read,
    give_back,
    sample,
    shows,
    take_back,
)
from raydp_parallel.transport.messages import StoredObject

_SHORT_TURN = 0.02
"""Seconds of a turn, if several threads read from one connection."""

_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say what this process or its machine lacks. They are no sign that a replica died."""


class Called(Protocol):
    """The driver's side of a replica that was called.

    Attributes:
        line: Its direct connection, if it has one.
        unanswered: The numbers of the calls that it has still to answer.
    """

    line: Connection | None
    unanswered: set[int]

    @property
    def shares(self) -> bool:
        """Whether large tensors travel by shared memory."""

    def opened(self, answer: Sequence[Any]) -> Any:
        """An answer, with its attachments where this process can read them."""

    def give_up(self, ref: Any) -> None:
        """Stop waiting for a Ray task."""

    def look_after(self) -> None:
        """Check the replica, after a turn without an answer."""


class Pending:
    """A call that was sent, over the direct connection or as a Ray task.

    Args:
        client: The client that sent it.
        number: Its number at that client.
        ref: The Ray task, None if it went over the connection.

    Attributes:
        turn: How many calls the replica had to answer when this one was sent, itself and those of
            other threads included.
        through_ray: Whether it is a Ray task.
    """

    def __init__(self, client: Called, number: int, ref: Any) -> None:
        self.client = client
        client.unanswered.add(number)
        self.turn = len(client.unanswered)
        self._line = client.line if ref is None else None
        self._number = number
        self._ref = ref
        self._answer: Any = None
        self.through_ray = ref is not None

    def result(self, timeout: float | None) -> Any:
        """Wait for the answer."""
        try:
            return self._result(timeout)
        finally:
            self.client.unanswered.discard(self._number)

    def _result(self, timeout: float | None) -> Any:
        if self._answer is None:
            try:
                self._answer = self._receive(timeout)
            except LineCut:
                return Death("its direct line was cut")
        answer, self._answer = self._answer, None
        try:
            return self.client.opened(answer)
        except OSError as error:
            if error.errno in _OWN:
                raise  # else other replicas would seem to die of it, too
            return Death(f"its memory is gone: {error}")  # it ended right after its answer

    def _receive(self, timeout: float | None) -> Any:
        """The answer as it arrived."""
        if self._line is None:
            return get(self._ref, timeout)
        if not self._line.near:
            return self._receive_from_afar(self._line, timeout)
        return self._line.receive(self._number, timeout)

    @property
    def held_back(self) -> bool:
        """Whether it, or another call to that replica, is sent only once a thread reads answers."""
        return self._line is not None and self._line.holds_back

    def _receive_from_afar(self, line: Connection, timeout: float | None) -> Any:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return line.receive(self._number, max(0.0, min(left, TURN)))
            except StoodStill:
                raise
            except TimeoutError:
                if left <= TURN:
                    raise
                self.client.look_after()

    def give_up(self) -> None:
        """Stop waiting for the answer."""
        self.client.unanswered.discard(self._number)
        if self._line is not None:
            self._line.give_up(self._number)
        else:
            self.client.give_up(self._ref)


class Lost:
    """A call that could not be sent, because the replica is gone.

    Args:
        client: The client that was to send it.
        error: The error of sending.
    """

    through_ray = held_back = False
    turn = 1

    def __init__(self, client: Called, error: Exception) -> None:
        self.client = client
        self._error = error

    def result(self, timeout: float | None) -> Death:
        """The death of the replica."""
        return Death(in_short(self._error))

    def give_up(self) -> None:
        """Do nothing: the call was not sent."""


def await_each(
    calls: Sequence[Pending | Lost], deadlines: Sequence[float], take: Callable[[int, bool], None]
) -> None:
    """Wait for calls, and take each answer as soon as it arrives, in any order.

    Args:
        calls: The calls.
        deadlines: When each is taken at the latest.
        take: Takes the result of a call, by its number and whether its answer arrived.
    """
    left = dict(enumerate(calls))
    while left:
        found = {number for number, call in left.items() if isinstance(call, Lost)}
        for line, numbers in _by_line(left).items():
            found.update(numbers[at] for at in line.look(numbers))
        now = time.monotonic()
        late = {number for number in left if deadlines[number] <= now} - found
        if not found and not late:
            come = _await_some(left, min(deadlines[number] for number in left) - now)
            found = come or set()
            if come is None:
                for call in left.values():
                    call.client.look_after()
        for number in sorted(found | late):
            del left[number]
            take(number, number in found)


def await_any(calls: Sequence[Pending | Lost], seconds: float) -> set[int]:
    """Wait until one of the calls has its answer, and take none. Returns those that have theirs, by
    number.
    """
    left, deadline = dict(enumerate(calls)), time.monotonic() + seconds
    lines, refs = _by_line(left), _refs(left)
    while True:
        found = {number for number, call in left.items() if isinstance(call, Lost)}
        for line, numbers in lines.items():
            found.update(numbers[at] for at in line.look(numbers))
        remaining = deadline - time.monotonic()
        turn = max(0.0, min(remaining, _SHORT_TURN if lines else TURN))
        if refs:
            if not found:
                late([*refs.values()], turn, 1)
            missing = late([*refs.values()])
            found.update(number for number, ref in refs.items() if ref not in missing)
        if found or remaining <= 0:
            return found
        if not refs and _await_some(left, remaining) is None:
            for call in calls:
                call.client.look_after()


class AnswerReader:
    """Reads what replicas send, in a thread of its own, while the caller does something else.

    Replicas need that if bytes travel by their connections: a call that is held back is sent only
    when an earlier answer was read, and a large answer is sent only while it is read.
    """

    def __init__(self) -> None:
        self._lines: frozenset[Connection] = frozenset()
        self._closed = False

    def attend(self, calls: Iterable[Any]) -> None:
        """Read the connections of calls that need it, from now on."""
        before = self._lines
        self._lines = before.union([call._line for call in calls if _needs_reader(call)])
        for line in self._lines - before:
            line.attendants.add(self)
        if self._lines and not before:
            threading.Thread(target=self._read, name="raydp-answers", daemon=True).start()

    def _read(self) -> None:
        while not self._closed:
            lines = [line for line in self._lines if line.intact]
            waiting = select.poll()
            for file in [line.wire.file() for line in lines]:
                if file >= 0:
                    waiting.register(file, select.POLLIN)
            waiting.poll(TURN * 1e3)
            for line in lines:
                line.look(())

    def close(self) -> None:
        """End the thread soon."""
        self._closed = True
        for line in self._lines:
            line.attendants.discard(self)


def _needs_reader(call: Any) -> bool:
    in_line = isinstance(call, Pending) and call._line is not None
    return in_line and (call.held_back or not call.client.shares)


def _by_line(left: dict[int, Pending | Lost]) -> dict[Connection, dict[int, int]]:
    """The calls that went over direct connections, by connection and by their numbers there."""
    found: dict[Connection, dict[int, int]] = {}
    for number, call in left.items():
        if isinstance(call, Pending) and call._line is not None:
            found.setdefault(call._line, {})[call._number] = number
    return found


def _refs(left: dict[int, Pending | Lost]) -> dict[int, Any]:
    """The Ray tasks among the calls."""
    return {
        number: call._ref
        for number, call in left.items()
        if isinstance(call, Pending) and call._ref is not None
    }


def _await_some(left: dict[int, Pending | Lost], seconds: float) -> set[int] | None:
    """Wait for one turn. Returns the calls that Ray answered; the caller looks for those that
    connections answered. None if no answer arrived.
    """
    refs = _refs(left)
    if refs:
        return _fetch(left, refs, min(TURN, seconds)) or None
    lines = _by_line(left)
    waiting = select.poll()
    # Another thread may have read what this one is about to wait for.
    alone = all(
        line.waits_for() <= len(numbers) and not line.attendants for line, numbers in lines.items()
    )
    turn = TURN if alone else _SHORT_TURN
    for line in lines:
        if line.wire.file() >= 0:
            waiting.register(line.wire.file(), select.POLLIN)
    return set() if waiting.poll(max(1.0, min(turn, seconds) * 1e3)) else None


def _fetch(left: dict[int, Pending | Lost], refs: dict[int, Any], seconds: float) -> set[int]:
    """Get the answers that Ray carries in one call, which costs a fifth of getting each alone."""
    try:
        answers = get([*refs.values()], seconds)
    except RayError:  # one died, or some are late: the others are taken one by one
        missing = late([*refs.values()])
        return {number for number, ref in refs.items() if ref not in missing}
    for number, answer in zip(refs, answers, strict=True):
        left[number]._answer = answer  # type: ignore[union-attr]  # only those that Ray carries
    return {*refs}


log = logging.getLogger("raydp_parallel")

_SILENCE = 5
"""Turns without an answer after which Ray is asked whether a replica on another machine is still
there.
"""

_PATIENT = 2
"""How much longer the driver waits for a replica's part of a trial than the replica itself."""


class ReplicaProcess:
    """A replica's process on this machine, by a descriptor that cannot mean another one.

    Args:
        descriptor: The descriptor, which is closed with this object.
        pid: The number that the process has for itself. In this process's namespace it may belong
            to another process.
    """

    def __init__(self, descriptor: int, pid: int) -> None:
        self.descriptor = descriptor
        self._pid = pid
        self.let_go = weakref.finalize(self, os.close, descriptor)
        self.let_go.atexit = False

    def end(self) -> None:
        """End the process. Ray takes 5 s for a stopped one, and cannot reach every process."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        self.let_go()
        cuda_ipc.clear_after(self._pid)


class SilenceWatch:
    """Asks Ray now and then, after turns without an answer, whether a replica on another machine is
    gone: perhaps only Ray knows.

    Args:
        actor: The replica's actor.

    Attributes:
        turns: The turns since the last call was sent.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None
        self.turns = 0

    def turn(self, line: Connection) -> None:
        """Take note of one more turn; cut the connection if the replica is gone."""
        self.turns += 1
        asked = self._asked  # another thread may wait here, too
        if not ray_api.connected():
            line.wire.cut()  # asking Ray would start another cluster now
        elif asked is None and self.turns % _SILENCE == 0:
            self._asked = self._actor.hello.remote()
        elif asked is not None and not ray_api.late([asked]):
            try:
                ray_api.get(asked)
            except ray_api.RayError:
                line.wire.cut()
            self._asked = None


class LentMemory:
    """The memory that this process and a replica lend each other.

    Args:
        actor: The replica's actor.
        pin: Registers the replica's memory with a GPU that copies from it; None copies otherwise.

    Attributes:
        mappings: The replica's memory, as far as it is mapped here.
        ledger: What of this process's memory the replica uses.
        shares: Whether both processes can read the other's memory.
        arena: Memory of the replica's GPU that both processes can open; None if there is none.
    """

    def __init__(self, actor: Any, pin: Pin | None) -> None:
        self._actor = actor
        self.mappings = Mappings(pin)
        self.ledger = LeaseTable()
        self.shares = False
        self.arena: cuda_ipc.DeviceArena | None = None

    def share(self, arena: Arena, always: bool, timeout: float | None = None) -> None:
        """Use shared memory, if both processes can read the other's."""
        probe, shown = sample(arena)
        self.ledger.lend(probe)
        found = ray_api.get(self._actor.share.remote(probe.descriptor, shown), timeout=timeout)
        if found is not None and shows(self.mappings.find(found[0]), found[1]):
            ray_api.get(self._actor.start_sharing.remote(always), timeout=timeout)
            self.shares = True

    def share_device(self, arena: cuda_ipc.DeviceArena) -> str:
        """Use the memory of the GPU that both processes are on, if each can open the other's.
        Returns why not, else an empty text.
        """
        if cuda_ipc.expandable():
            return "this process's allocator uses expandable segments"
        self.mappings.opener = cuda_ipc.Opener(arena.device)
        try:
            for number in range(trials.ROUNDS):
                probe = cuda_ipc.sample(arena, number)
                lent = cuda_ipc.Addressed(probe, self)
                self.ledger.lend(lent)
                asked = self._actor.share_device.remote(lent.descriptor, number)
                found = ray_api.get(asked, timeout=_PATIENT * trials.LIMIT)
                if isinstance(found, str):
                    return found
                seen = functools.partial(cuda_ipc.sees, self.mappings.find(found), number)
                if why := trials.outcome(arena.device, seen):
                    return why
            ray_api.get(self._actor.start_device.remote(), timeout=trials.LIMIT)
        except TimeoutError:
            return f"the replica did not say within {_PATIENT * trials.LIMIT:g} s what it saw"
        except (RuntimeError, OSError, AttributeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            arena.trial = None
        self.arena = arena
        return ""

    def lent(self, packet: Attachment) -> Attachment:
        """An attachment. If it lies in shared memory, the lease is noted."""
        if isinstance(packet, SharedBuffer):
            self.ledger.lend(packet)
        return packet

    def within_reach(self, beside: Sequence[Attachment]) -> Sequence[Attachment]:
        """Attachments in a form that the replica can open: of a GPU's memory its own view, or the
        bytes by another way.
        """
        beside = [
            self._readable(packet) if isinstance(packet, cuda_ipc.DeviceBuffer) else packet
            for packet in beside
        ]
        return beside if self.shares else [_stored(packet) for packet in beside]

    def _readable(self, packet: cuda_ipc.DeviceBuffer) -> Attachment:
        found = None if self.arena is None else packet.on(self.arena)
        return packet.elsewhere() if found is None else cuda_ipc.Addressed(found, self)

    def take_note(self, answer: Sequence[Any]) -> list[Any]:
        """The parts of an answer. Its first part, which is taken off, says which leases of this
        process's memory ended.
        """
        if not isinstance(answer[0], MemoryError):
            take_back(answer[0], self.ledger)
        return [
            self.mappings.find(part) if isinstance(part, Descriptor) else part
            for part in answer[1:]
        ]


class ReplicaClient:
    """The driver's side of one replica.

    Args:
        actor: The replica's actor.
        patience: Seconds that a frame may stand still on the connection; None waits.
        pin: Registers the replica's memory with a GPU that copies from it; None copies otherwise.

    Attributes:
        unanswered: The numbers of the calls that the replica has still to answer.
        modules: The modules that it was sent, by name, each with a digest of its contents.
        code_version: The backend's `CodeDelivery.version` of which it has all modules.
        line: Its direct connection, which takes all calls; None if all are Ray tasks.
        memory: The memory that it and this process lend each other.
        process: Its process; None if that is on another machine, or is not known for certain.
    """

    def __init__(self, actor: Any, patience: float | None = None, pin: Pin | None = None) -> None:
        self.actor = actor
        self.unanswered: set[int] = set()
        self.modules: dict[str, str] = {}
        self.code_version = 0
        self._patience = patience
        self.line: Connection | None = None
        self.memory = LentMemory(actor, pin)
        self.process: ReplicaProcess | None = None
        self._silence = SilenceWatch(actor)
        self._number = 0
        self._deliveries = 0
        self._given_up: deque[Any] = deque()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Release the process: after a fork the replica is the parent's, and so is its end."""
        process, self.process = self.process, None
        if process is not None:
            process.let_go()

    @property
    def shares(self) -> bool:
        """Whether both processes can read the other's memory."""
        return self.memory.shares

    @property
    def near(self) -> bool:
        """Whether it has a connection that does not leave this machine."""
        return self.line is not None and self.line.near

    def watch(self, pid: int) -> None:
        """Keep a descriptor of the process, if its connection proves which one it is, so that `end`
        ends it and no other.
        """
        found = self.line.wire.process(pid) if self.line is not None else None
        self.process = None if found is None else ReplicaProcess(found, pid)

    def end(self) -> None:
        """End the process, if it is known."""
        process, self.process = self.process, None
        if process is not None:
            process.end()

    def cause_of_end(self, seconds: float, asks: Callable[[], bool]) -> str | None:
        """Why its process ended, by Ray; None if Ray does not say so in time, or says that it did
        not.

        It waits outside of Ray: if a program leaves the cluster while one of its threads waits
        inside, Ray ends the program's process.

        Args:
            seconds: How long to wait.
            asks: Whether Ray may still be asked.
        """
        said, deadline = self.actor.hello.remote(), time.monotonic() + seconds
        while time.monotonic() < deadline and asks():
            if not ray_api.late([said]):
                try:
                    ray_api.get(said)
                except ray_api.RayError as error:
                    return ray_api.in_short(error)
                return None
            time.sleep(ray_api.TURN / 10)
        return None

    def look_after(self) -> None:
        if self.line is not None and not self.line.near:
            self._silence.turn(self.line)

    def call_directly(self, near: bool, timeout: float | None = None) -> bool:
        """Open a direct connection, if possible; else calls are Ray tasks from now on.

        Args:
            near: Whether the replica is on this machine.
            timeout: Seconds to wait for calls that still run there.

        Returns:
            Whether to try other replicas of that machine too; False if the connection timed out,
            which takes seconds.
        """
        if not near and not handshake.far_lines():
            return True
        opened = self.actor.open_line.remote(self.memory.mappings.held(), near)
        found = ray_api.get(opened, timeout=timeout)
        if found is None:
            self._warn_of_ray(near, "the replica cannot listen at its node's address")
            return True
        address, held = found
        self.memory.ledger.settle(held)
        try:
            self.line = Connection(address, self.memory.take_note)
            if self._patience is not None:
                self.line.wire.limit(self._patience)
        except OSError as error:
            self._warn_of_ray(near, str(error) or type(error).__name__)
            return not isinstance(error, TimeoutError)
        return True

    def _warn_of_ray(self, near: bool, reason: str) -> None:
        """Log that the replica is not called in the way that was configured."""
        log.warning(
            "no direct line to a replica on %s (%s): it is called through Ray, 1 ms for each call, "
            "as long as it lives",
            "this node" if near else "another node",
            reason,
        )

    def submit(
        self,
        method: str,
        header: bytes,
        beside: Sequence[Attachment],
        timeout: float | None = None,
        task: TaskLabel | None = None,
    ) -> Pending | Lost:
        """Send a call, over the direct connection or as a Ray task."""
        self._silence.turns = 0
        try:
            if self.line is not None and not self.line.intact:
                self._mend(self.line, timeout)
            if beside:  # small messages have no attachments
                beside = self.memory.within_reach(beside)
                if self.line is not None:
                    beside = [self._brought(packet) for packet in beside]
            self._number += 1
            if self.line is None:
                return self._send_task(method, header, beside, task)
            parts = [self.memory.lent(packet) for packet in beside]
            ended_leases = give_back(self.memory.mappings)
            try:
                self.line.send(self._number, [ended_leases, METHODS[method], header, *parts])
                return Pending(self, self._number, None)
            except BaseException:  # Ctrl-C after it was sent: nothing would take the answer
                self.unanswered.discard(self._number)
                self.line.give_up(self._number)
                raise
        except ray_api.StoreFull:
            raise  # no replica died of it, and others would seem to die of it, too
        except (OSError, ray_api.RayError) as error:
            return Lost(self, error)

    def _send_task(
        self, method: str, header: bytes, beside: Sequence[Attachment], task: TaskLabel | None
    ) -> Pending:
        """Send a call as a Ray task. Of memory that the replica can read only the descriptors
        travel.
        """
        self._take_late_answers()
        parts = [getattr(self.memory.lent(packet), "descriptor", packet) for packet in beside]
        call = getattr(self.actor, method)
        call = call.options(name=task.name) if task is not None else call
        sent = call.remote(give_back(self.memory.mappings), header, *parts)
        return Pending(self, self._number, sent)

    def _brought(self, packet: Attachment) -> Attachment:
        """An attachment for the connection. If it lies in the object store, a Ray call of its own
        delivers it, or the reference to it.
        """
        if not isinstance(packet, (ray_api.Ref, StoredObject)):
            return packet
        self._deliveries += 1
        self.actor.deliver.remote(self._deliveries, packet)
        return Delivered(self._deliveries)

    def _mend(self, line: Connection, timeout: float | None) -> None:
        """Open another connection after this one broke, or call through Ray from now on."""
        self.line = None
        line.close()
        self.call_directly(line.near, timeout)

    def give_up(self, ref: Any) -> None:
        """Keep a task to read its answer later: it says which leases ended, and begins others."""
        self._given_up.append(ref)

    def _take_late_answers(self) -> None:
        for _ in range(len(self._given_up)):
            ref = self._given_up.popleft()
            if ray_api.late([ref]):
                self._given_up.append(ref)
                continue
            with contextlib.suppress(ray_api.RayError):
                self.memory.take_note(ray_api.get(ref))

    def opened(self, answer: Sequence[Any]) -> Any:
        """An answer with its attachments. Those in shared memory keep it until they are freed
        here.
        """
        check_read(*answer)
        if len(answer) == 2 and not len(answer[0]):  # a small answer, and no lease ended
            return answer[1]
        parts = self.memory.take_note(answer)
        for part in parts:
            if isinstance(part, ForeignMemory):
                part.piece()  # mapped now, while the other process lives
        return tuple(parts) if len(parts) > 1 else parts[0]

    def close(self) -> None:
        """Close the connection, and end all leases."""
        if self.line is not None:
            self.line.close()
        self.memory.ledger.end()


def await_ends(clients: Iterable[ReplicaClient], seconds: float) -> None:
    """Wait until the processes of clients on this machine have ended."""
    left = {client.process.descriptor for client in clients if client.process is not None}
    waiting, deadline = select.poll(), time.monotonic() + seconds
    for process in left:
        waiting.register(process, select.POLLIN)
    while left and (still := deadline - time.monotonic()) > 0:
        for process, _ in waiting.poll(still * 1e3):
            waiting.unregister(process)
            left.discard(process)


def _stored(packet: Attachment) -> Attachment:
    """An attachment for a replica that shares no memory. Large ones are put into the store once,
    for all such replicas.
    """
    if isinstance(packet, Exposed):
        return packet.copy()  # it was made for a replica that shares memory, and died
    if not isinstance(packet, SharedBuffer):
        return packet
    if packet.array.nbytes <= SHARE_LIMIT:
        return packet.array
    if packet.stored is None:
        packet.stored = ray_api.put(packet.array)
    return packet.stored

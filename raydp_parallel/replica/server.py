"""A replica behind messages: bytes in, bytes out. No Ray here."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydp_parallel import devices
from raydp_parallel.devices import forks, trials
from raydp_parallel.devices.buffers import Arena, Descriptor, LeaseTable, SharedBuffer
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.errors import TransferError
from raydp_parallel.monitoring.accounts import OpenSpan, unseen
from raydp_parallel.replica import exceptions
from raydp_parallel.replica.replica import Replica
from raydp_parallel.state import code_shipping
from raydp_parallel.state.module_sources import versions
from raydp_parallel.transport import cuda_ipc, direct_connection, handshake
from raydp_parallel.transport.direct_connection import LineCut
from raydp_parallel.transport.group_messages import HostStore, JoinGroup
from raydp_parallel.transport.links import (
    Attachments,
    Delivered,
    Deliveries,
    Link,
    Mappings,
    shared,
    shared_link,
)
from raydp_parallel.transport.message_bytes import (
    check_read,
    give_back,
    sample,
    seal,
    shows,
    take_back,
    unpack,
)
from raydp_parallel.transport.messages import Package, Reply, StoredObject

_PATIENCE = 600.0
"""Seconds in which Ray has to bring what lies in its object store."""


Work = Callable[[Any, Attachments, Attachments], Any]
"""What a call is answered by: it takes the message, its packets, and the mail of the answer."""


_LINE = "raydp-line"


class ReplicaServer:
    """A replica behind messages: bytes and packets in, bytes and packets out.

    [Note: one way]
    Its calls come over a line or by Ray, all of them, until the line breaks and no other can be
    had. So one thread computes, that of the line or Ray's. OpenMP gives each thread that computes
    helpers of its own; where they are more than the cores, GCC's wait asleep for each operation,
    which then takes up to twice the time. What else runs in Ray's thread sends away the helpers
    that it may have needed. What an earlier line had brought before it broke is not done any more.

    Args:
        device: Name of the torch device.
        link: What answers travel by.
        span: Opens a span for each phase of a call that Ray carries.
        paths: By which ways bytes may leave a GPU. See `Options.gpu_paths`.
    """

    def __init__(
        self, device: str, link: Link, span: OpenSpan = unseen, paths: Sequence[str] = ()
    ) -> None:
        self._device = torch.device(device)
        self._replica = Replica(self._device)
        self._span = span
        self._link = link
        self._working = threading.Lock()
        self._caller: object = None
        self._deliveries = Deliveries()
        self._mappings = Mappings(devices.pinner(self._device) if "registered" in paths else None)
        self._ledger = LeaseTable()
        self._followed = 0
        self._device_arena: cuda_ipc.DeviceArena | None = None
        self._spoiled = False
        forks.tell_child(self)

    def after_fork(self) -> None:
        """A child that a call forked leaves this as if it had been the one that was called."""
        self._working = threading.Lock()

    def forward(self, ended: bytes, header: bytes, *beside: Any) -> Any:
        """Run one chunk.

        Args:
            ended: The word which leases of this process's memory ended.
            header: The message.
            beside: Its packets.

        Returns:
            The word which leases of the caller's memory ended, the message of the answer, its
            packets.
        """
        return ReplicaServer._answer_task(
            self, self._replica.forward, ended, header, beside=beside, span=self._span
        )

    def backward(self, ended: bytes, header: bytes, *beside: Any) -> Any:
        """Differentiate one chunk's graph."""
        return ReplicaServer._answer_task(
            self, self._replica.backward, ended, header, beside=beside, span=self._span
        )

    def forget(self, ended: bytes, header: bytes) -> Any:
        """Free what the driver no longer needs. Answers how many models and graphs are left."""
        return ReplicaServer._answer_task(self, self._forget, ended, header)

    def group(self, ended: bytes, header: bytes) -> Any:
        """Host a store for groups of replicas, or become a member of one."""
        return ReplicaServer._answer_task(self, self._group, ended, header)

    def _group(
        self, what: HostStore | JoinGroup, _attachments: Attachments, _back: Attachments
    ) -> Any:
        groups = self._replica.groups
        if isinstance(what, HostStore):
            groups.address = self._address()
            return groups.host(what.group)
        groups.address = self._address()
        return groups.join(what)

    def train(self, ended: bytes, header: bytes, *beside: Any) -> Any:
        """Let a model's optimizer catch up, and answer what it has made."""
        return ReplicaServer._answer_task(self, self._replica.train, ended, header, beside=beside)

    def _works(self) -> tuple[Work, ...]:
        """What answers each of `METHODS`."""
        replica = self._replica
        return replica.forward, replica.backward, self._forget, self._group, replica.train

    def leave(self, groups: Sequence[str]) -> None:
        """Leave groups, at once: this waits for no call, for one may be waiting in such a group."""
        for name in groups:
            self._replica.groups.leave(name)

    def _address(self) -> str:
        """Where other nodes reach this one."""
        return "127.0.0.1"

    def _node(self) -> str:
        """Ray's id of this node."""
        return ""

    def _gpu(self) -> str:
        """The numbers of this process's GPUs on its node."""
        return ""

    def _session(self) -> str:
        """Names the run of the cluster, for what is kept on its nodes."""
        return "in-process"

    def _forget(self, what: Any, _attachments: Attachments, _back: Attachments) -> tuple[int, int]:
        self._replica.forget(what)
        return self._replica.holdings()

    def versions(self) -> tuple[tuple[str, str], ...]:
        """What is installed here, asked before anything else, and in plain types: other versions
        know others.
        """
        return versions()

    def hello(self) -> ReplicaHello:
        """The device and the process."""
        found = devices.describe(self._device, os.getpid(), self._node())
        return found._replace(gpu_index=self._gpu()) if found.gpu else found

    def empty(self) -> None:
        """Nothing at all: what a call costs at least. For benchmarks."""

    def learn(self, package: Package) -> None:
        """Take modules that only the driver has."""
        session = self._session()
        if code_shipping.unpack(package, code_shipping.place(session)):
            self._replica.import_anew()
        devices.rest()

    def share(self, probe: Descriptor, shown: bytes) -> tuple[Descriptor, bytes] | None:
        """See whether memory of the driver can be read here.

        Args:
            probe: Some memory of the driver's.
            shown: What lies in it.

        Returns:
            Some memory of this process, and what lies in it, for the driver to try; None if it does
            not work.
        """
        if not (shared.exists() and shows(self._mappings.find(probe), shown)):
            return None
        lent, shown = sample(Arena())
        self._ledger.lend(lent)
        return lent.descriptor, shown

    def start_sharing(self, always: bool) -> None:
        """Both can read the other's memory: answer through it from now on."""
        self._link = shared_link(Arena(pin=self._mappings.pin), exposes=False, always=always)

    def share_device(self, probe: Descriptor, number: int) -> Descriptor | str:
        """One round of a trial: whether memory of the driver's GPU, which is this replica's, can be
        opened here, and has the right bytes.

        Args:
            probe: Some memory of the driver's there.
            number: The round.

        Returns:
            Some memory of this process there, for the driver to try; or why it does not work.
        """
        if cuda_ipc.expandable():
            return "the replica's allocator uses expandable segments"
        if self._device_arena is None:
            self._device_arena = cuda_ipc.DeviceArena(self._device)
            self._mappings.opener = cuda_ipc.Opener(self._device)
        seen = functools.partial(cuda_ipc.sees, self._mappings.find(probe), number)
        if why := trials.outcome(self._device, seen):
            return why
        try:
            lent = cuda_ipc.sample(self._device_arena, number)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self._ledger.lend(lent)
        return lent.descriptor

    def start_device(self) -> None:
        """Both can open the other's memory: answer through it from now on."""
        if self._device_arena is not None:
            self._device_arena.trial = None
        self._link = cuda_ipc.DeviceLink(self._link, self._device_arena)

    def deliver(self, number: int, buffer: Any) -> None:
        """Keep what Ray's object store has for a message that comes over the line."""
        self._deliveries.arrive(number, buffer)

    def open_line(self, held: dict[int, int], near: bool) -> tuple[str, dict[int, int]] | None:
        """Start to listen for a direct line, once the call that runs has ended. An earlier line is
        over.

        Args:
            held: What the driver uses of this process's memory.
            near: Whether the driver is on this machine.

        Returns:
            Where to call, and what is used here of the driver's memory; None if there is no such
            thing here.
        """
        with self._working:
            caller = self._caller = object()
            found = handshake.listen(None if near else self._address())
            if found is None:
                return None
            address, listener = found
            self._ledger.settle(held)
            devices.start_thread(lambda: self._serve(caller, listener, near), _LINE)
            return address, self._mappings.held()

    def _serve(self, caller: object, listener: Any, near: bool) -> None:
        # Ray wraps an actor's own methods, for tracing; those of this class it leaves alone.
        def answer(number: int, buffers: list[Any]) -> Sequence[Any]:
            found = ReplicaServer._answer_line(self, caller, number, buffers)
            if near:
                devices.rest()  # a driver on this machine computes next
            return found

        direct_connection.serve(
            listener,
            answer,
            self._follow,
            functools.partial(ReplicaServer._use_pause, self, caller),
        )

    def _follow(self, driver: int) -> None:
        """End with the driver, however it ends. Ray takes seconds to notice that one was killed."""
        if driver and not self._followed and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._followed = os.pidfd_open(driver)
                threading.Thread(
                    target=_end_with, args=(self._followed,), name="raydp-driver", daemon=True
                ).start()

    def _answer_line(self, caller: object, _number: int, buffers: list[Any]) -> Sequence[Any]:
        """Answer a call that came over the line: leases that ended; method; header; packets."""
        ended, method, header, *beside = buffers
        works = self._works()
        lost = isinstance(method, MemoryError)
        work, header = (works[0], method) if lost else (works[method[0]], header)
        with self._working:
            if self._caller is not caller:
                raise LineCut("the driver calls by another way now")
            return ReplicaServer._lend_answer(self, work, ended, header, beside)

    def _use_pause(self, caller: object) -> None:
        """Between two calls of a line: what goes wrong here is left to the next call, which finds
        it as well.
        """
        with self._working:
            if self._caller is caller:
                with contextlib.suppress(BaseException):
                    self._replica.use_pause()

    def _answer_task(
        self,
        work: Work,
        ended: bytes,
        header: bytes,
        beside: Sequence[Any] = (),
        span: OpenSpan = unseen,
    ) -> Sequence[Any]:
        """Answer a call that Ray carries. Of memory that is lent it carries the descriptors
        alone.
        """
        with self._working:
            self._caller = None
            answer = ReplicaServer._lend_answer(self, work, ended, header, beside=beside, span=span)
            return tuple(
                [part.descriptor if isinstance(part, SharedBuffer) else part for part in answer]
            )

    def _lend_answer(
        self, work: Work, ended: Any, header: Any, beside: Sequence[Any], span: OpenSpan = unseen
    ) -> Sequence[Any]:
        """Answer a call. Both messages have in front which leases of the other's memory
        have ended.
        """
        if not isinstance(ended, MemoryError):
            take_back(ended, self._ledger)
        answer = ReplicaServer._answer(self, work, header, beside, span)
        answer = answer if isinstance(answer, tuple) else (answer,)
        for part in answer:
            if isinstance(part, SharedBuffer):
                self._ledger.lend(part)
        return give_back(self._mappings), *answer

    def _packet(self, found: Any) -> Any:
        """A packet, of what came in its place."""
        if isinstance(found, Descriptor):
            return self._mappings.find(found)
        if isinstance(found, Delivered):
            found = self._deliveries.take(found, _PATIENCE)
        if isinstance(found, StoredObject):
            return functools.partial(self._get, found.ref)
        return found

    def _get(self, ref: Any) -> Any:
        """An object of Ray's object store."""
        raise TransferError("this replica has no connection to Ray's object store")

    def _answer(
        self, work: Work, header: Any, beside: Sequence[Any], span: OpenSpan = unseen
    ) -> Any:
        """Do one call's work; whatever goes wrong is an answer too, and no death."""
        back, process = Attachments(self._link), os.getpid()
        try:
            if self._spoiled:
                self._end()
            self._replica.span = span
            beside = [*map(self._packet, beside)]
            check_read(header, *beside)
            asked = unpack(bytes(header))
            if type(self._link) is cuda_ipc.DeviceLink and getattr(asked, "by_host", False):
                back.link = cuda_ipc.by_host(self._link)
            reply = work(asked, Attachments(self._link, beside), back)
            self._check_process(process, None)
            if isinstance(reply, Reply) and reply.failure is not None:
                self._spoiled = devices.spoiled(self._device)
            return seal(reply, back)
        except BaseException as error:
            self._check_process(process, error)
            self._spoiled = devices.spoiled(self._device)
            return seal(
                Reply(failure=exceptions.failure(error, None)),
                Attachments(self._link),
            )

    def _check_process(self, process: int, error: BaseException | None) -> None:
        """End a child that the module forked, and that came here as if it were the replica: it
        answers nothing.
        """
        if os.getpid() != process:
            self._end_child(error)

    def _end_child(self, error: BaseException | None) -> None:
        """Of a replica in its driver's process the child is the user's."""
        if error is not None:
            raise error

    def _end(self) -> None:
        """The device works no more, which was told with the last answer: an actor ends, for another
        to take over.
        """


def _end_with(process: int) -> None:
    """Wait for the end of a process, by its descriptor, and end this one."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.poll()
    os._exit(0)

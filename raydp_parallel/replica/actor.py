"""The thin Ray actor around a `Replica`: one for each device."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from raydp_parallel.devices import threads
from raydp_parallel.devices.cuda import Hello, describe, take_given
from raydp_parallel.errors import ReplicaError, TransferError
from raydp_parallel.replica import exceptions, replica
from raydp_parallel.replica.replica import Replica, Request
from raydp_parallel.wire import trial
from raydp_parallel.wire.channel import Channel
from raydp_parallel.wire.codec import Flat, flat, unflat
from raydp_parallel.wire.messages import Answer

Sent = TypeVar("Sent")


def fetched(ref: ray.ObjectRef[object]) -> object:
    """Return an object of Ray's object store, or the exception to raise in its place."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
            return error.cause  # of the task that was to make it
        kind = type(error).__name__
        return TransferError(f"an argument in Ray's object store cannot be had ({kind}): {error}")


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of a socket's other end, as the kernel says."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[:2]


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this package with its sources, of torch and of NumPy."""
    folder = Path(__file__).parents[1]
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    own = getattr(sys.modules[folder.name], "__version__", "")
    found = {folder.name: f"{own} ({text.hexdigest()[:8]})"}
    return {**found, "torch": str(torch.__version__), "numpy": np.__version__}


def _refuse_debugger(*_: object, **__: object) -> None:
    raise ReplicaError(exceptions.NO_DEBUGGER)


def _end_child() -> None:
    """End a process that forward forked: the answer is its parent's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


# Housekeeping does not show among a replica's tasks.
_quiet: Any = functools.partial(ray.method, enable_task_events=False)
# These do not wait for the call that runs. All others keep to one thread and to their order.
_aside: Any = functools.partial(ray.method, concurrency_group="aside")


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"aside": 1, "life": 1})  # type: ignore[call-overload]
class ReplicaActor:
    """A replica as a Ray actor, on a ``"cpu"`` or a ``"gpu"``, and its number in the executor."""

    _channel: Channel | None = None  # to a driver on this machine
    _failed = False  # the last answer was an exception

    def __init__(self, kind: str, index: int) -> None:
        replica.own_process = True
        sys.breakpointhook = _refuse_debugger  # Ray's own waits until a debugger connects
        given = [*map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))]
        self._device = take_given(kind, given)
        self._index, self._pid = index, os.getpid()
        self._node = str(ray.get_runtime_context().get_node_id())
        self._replica = Replica(self._device)
        threads.rest()

    def __repr__(self) -> str:
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        gpu = f" = GPU {gpus}" if self._device.type == "cuda" else ""
        return f"Replica({self._index}@{self._device}{gpu}, node {self._node[:8]})"

    @_quiet()  # type: ignore[untyped-decorator]
    def hello(self) -> tuple[Hello, dict[str, str]]:
        """Describe this process."""
        return describe(self._device, self._node), versions()

    def serve(self, name: str) -> str:
        """Answer the driver on the abstract Unix socket of that name until it hangs up; returns
        why it could not be reached.
        """
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(f"\0{name}")
            except OSError as error:
                return str(error)
            if peer(sock)[1] != os.getuid():
                return "another user has its socket"
            channel = self._channel = Channel(sock, self._device.type == "cuda")
            with contextlib.suppress(EOFError, ConnectionError):
                while True:
                    self._respond(lambda: channel.receive(None, self._device), channel.send)
        return ""

    def answer(self, *parts: Any) -> Flat:
        """Answer a driver on another machine."""
        return self._respond(lambda: unflat(parts, self._device), flat)

    def _respond(
        self, receive: Callable[[], Request | trial.Trial], send: Callable[[Answer], Sent]
    ) -> Sent:
        """Answer a request; a failure to load it, or to make the answer, is the answer, too."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # for "cuda" without a number; each thread has one
            if self._failed:
                torch.cuda.synchronize()  # after a device-side assert this fails for ever
        self._replica.prepare(self._channel is not None)  # through Ray a request is here already
        request = answer = None
        try:
            request = receive()
            answer = self._answer(request)
            sent = send(answer)
        except Exception as error:
            if self._channel is not None and self._channel.unsent is not None:
                raise  # see [Note: crash-only]
            if answer is None or answer.failure is None:
                answer = Answer(failure=exceptions.failure(error, None), lacking=request is None)
            sent = send(answer)
        self._failed = answer.failure is not None
        threads.rest()  # before the driver's next work wants the cores
        return sent

    def _answer(self, request: Request | trial.Trial) -> Answer:
        if isinstance(request, trial.Trial):
            assert self._channel is not None
            return trial.answer(self._channel, request, self._device)
        try:
            return self._replica.answer(request)
        finally:
            if os.getpid() != self._pid:
                _end_child()

    @_quiet(concurrency_group="life")  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Return never: its end is the end of a replica that is called through Ray."""
        threading.Event().wait()

    @_aside()  # type: ignore[untyped-decorator]
    def work(self) -> None:
        """Do nothing: the name of this task shows in the dashboard."""

    @_aside(enable_task_events=False)  # type: ignore[untyped-decorator]
    def deliver(self, number: int, refs: list[ray.ObjectRef[object]]) -> None:
        """Hand an object of Ray's store to the call that waits for it by number."""
        self._replica.deliver(number, fetched(refs[0]))

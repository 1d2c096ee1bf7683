"""Replicas without Ray: processes that are forked from a warm one, in 30 ms.

What the package asks of Ray is answered here, for one node with two GPUs that are only counted. All
else is its own: placement, `Starter`, the actor's class, channels, windows, groups, dispatcher.

A script has them by ``import forked; forked.start(); forked.use(True)``, before torch computes.
``FORKED_LOG`` names a file for what replicas print.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import ray
import torch

from raydp_parallel import errors
from raydp_parallel.cluster import placement, ray_api
from raydp_parallel.cluster import start as starting
from raydp_parallel.devices import threads
from raydp_parallel.devices.cuda import describe
from raydp_parallel.replica import actor

NODE = "forked"
_zygote: socket.socket | None = None
_driver = _parent = 0
_session: object = None  # of the replicas that are in use
Prepare = Callable[[int], None]


# --- processes ---


def start(prepare: Prepare = lambda index: None) -> None:
    """Fork the process that replicas, each prepared, are forked from, before this has threads."""
    global _zygote, _driver, _parent
    if _zygote is None:
        _driver = os.getpid()
        _zygote, requests = socket.socketpair(type=socket.SOCK_SEQPACKET)
        _parent = os.fork()
        if not _parent:
            _serve(_zygote, requests, prepare)
        requests.close()


def running() -> set[int]:
    """Return the replicas' processes that have not ended."""
    pids = Path(f"/proc/{_parent}/task/{_parent}/children").read_text().split()
    return {int(pid) for pid in pids if " Z " not in Path(f"/proc/{pid}/stat").read_text()}


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let no replica start inside of the block, unless Ray starts it, which takes its time."""
    stopped = [_parent] if used() else []
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as the parent ends
    if os.getppid() != parent:
        os._exit(1)


def _serve(driver: socket.socket, requests: socket.socket, prepare: Prepare) -> NoReturn:
    """Fork replicas until the driver ends."""
    try:
        driver.close()
        _end_with(_driver)
        os.setsid()  # Ctrl-C is the driver's
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        log = os.open(os.environ.get("FORKED_LOG", os.devnull), flags)
        for stream in range(3):
            os.dup2(log, stream)
        # In the place of pytest's.
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "rww"[n]) for n in range(3))
        torch.set_num_threads(1)
        importlib.import_module("torch._dynamo")  # optimizers do
        gc.freeze()
        here = os.getpid()
        while True:
            message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 1)
            if not message:
                break
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                _end_with(here)
                kind, index, *others = pickle.loads(message)
                prepare(index)
                _be_replica(socket.socket(fileno=fds[0]), kind, index, *others)
                break
            os.close(fds[0])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _be_replica(
    orders: socket.socket, kind: str, index: int, path: list[str], variables: dict[str, str]
) -> None:
    """Make an actor, which serves as soon as it is told a name."""
    sys.path[:] = path
    os.environ.update(variables)
    random.seed()
    torch.seed()
    gpus = {"GPU": [str(index)] if kind == "gpu" else []}
    about = {"get_accelerator_ids": lambda: gpus, "get_node_id": lambda: NODE}
    ray.get_runtime_context = lambda: SimpleNamespace(**about)
    made = actor.ReplicaActor.__ray_metadata__.modified_class(kind, index)
    enter: Any = contextlib.nullcontext()
    device = made._device if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":  # else GPUs are only counted
        torch.set_num_threads(1)  # its kernels are the CPU's: others have other bits
        enter = importlib.import_module("on_gpus").there("cuda")
    orders.send(pickle.dumps(describe(device, NODE)))
    if name := orders.recv(1 << 10).decode():
        orders.close()
        with enter:
            made.serve(name)


class Actor:
    """A replica's handle, and a reference to its life: a call that lasts as long as it does."""

    def __init__(self, kind: str, index: int, variables: Mapping[str, str]) -> None:
        assert _zygote is not None
        self._orders, theirs = socket.socketpair()
        message = pickle.dumps((kind, index, sys.path, {**variables}))
        socket.send_fds(_zygote, [message], [theirs.fileno()])
        theirs.close()
        self._orders.settimeout(300)
        said = self._orders.recv(1 << 10)
        if not said:
            raise ray_api.RayError("a replica ended as it began")
        hello = pickle.loads(said)
        self._process = os.pidfd_open(hello.pid)
        self.hello = SimpleNamespace(remote=lambda: (hello, actor.versions()))
        self.serve = SimpleNamespace(remote=self._serve)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)

    def _serve(self, name: str) -> Actor:
        with contextlib.suppress(OSError):  # it is dead
            self._orders.send(name.encode())
        return self

    def lives(self) -> bool:
        """Tell if its process has not ended."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


# --- in the place of Ray ---


def _options(**options: Any) -> Any:
    variables = options.get("runtime_env", {}).get("env_vars", {})
    return SimpleNamespace(remote=lambda kind, index: Actor(kind, index, variables))


def _connect(start: bool = True) -> bool:
    if os.getpid() != _driver:
        raise errors.forked()
    return True


def _make_session() -> Callable[[], bool]:
    mine = _session
    return lambda: _session is mine


def _nodes() -> list[ray_api.Node]:
    gpus = float(os.environ.get("STANDIN_GPUS", 2))
    return [ray_api.Node(NODE, {"CPU": float(threads.cores()), "GPU": gpus})]


_answers: dict[str, Any] = {
    "PAUSE": 0.001,
    "connect": _connect,
    "session": _make_session,
    "here": lambda: NODE,
    "is_private": lambda: True,
    "nodes": _nodes,
    "living": lambda: frozenset([NODE]),
    "draining": frozenset,
    "free": lambda names: "nobody knows",
    "group": lambda name, bundles, *about: (name, len(bundles)),
    "nodes_of": lambda group: [NODE] * group[1],
    "remove": lambda groups: None,
    "strategy": lambda *hold: None,
    "get": lambda ref, timeout=None: None if isinstance(ref, Actor) else ref,
    "late": lambda refs, seconds=0.0: [r for r in refs if isinstance(r, Actor) and r.lives()],
    "kill": Actor.kill,
}
_places = [
    *((ray_api, name, answer) for name, answer in _answers.items()),
    *((placement, name, _answers[name]) for name in ("is_private", "nodes")),
    (starting, "ReplicaActor", SimpleNamespace(options=_options)),
]
_rays = [getattr(module, name) for module, name, _ in _places]


def use(forked: bool) -> None:
    """Let new executors have forked replicas, or Ray's again. The others are to be closed."""
    global _session
    _session = object() if forked else None
    for (module, name, answer), rays in zip(_places, _rays, strict=True):
        setattr(module, name, answer if forked else rays)


def used() -> bool:
    """Tell if replicas are forked now."""
    return _session is not None

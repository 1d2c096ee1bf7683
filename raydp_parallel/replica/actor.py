"""The thin Ray actor around a `ReplicaServer`: one for each device."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray._private.worker import global_worker

from raydp_parallel import devices
from raydp_parallel.devices import process
from raydp_parallel.errors import ReplicaError, TransferError
from raydp_parallel.replica import exceptions
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport.links import link_for

log = logging.getLogger("raydp_parallel")


def _task_span(phase: str) -> Any:
    """A span in `ray timeline`, inside the task that runs."""
    return global_worker.core_worker.profile_event(phase.encode(), {"name": phase})  # type: ignore[attr-defined]


def fetched(ref: Any) -> Any:
    """An object of Ray's object store. If the task failed that was to make it, its own exception is
    raised.

    Raises:
        TransferError: The object is lost.
    """
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise TransferError(f"the task that was to make an argument failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise TransferError(
            "an argument that lies in Ray's object store cannot be had "
            f"({type(error).__name__}): {error}"
        ) from error


def _refuse_debugger(*_: object, **__: object) -> None:
    """What ``breakpoint()`` does in a replica."""
    raise ReplicaError(exceptions.NO_DEBUGGER)


_quiet: Any = ray.method(enable_task_events=False)
"""Housekeeping does not show among a replica's tasks."""


_aside: Any = ray.method(enable_task_events=False, concurrency_group="aside")
"""What does not wait for the call that runs. All others keep to one thread, and to the order in
which they come.
"""


_listed: Any = ray.method(concurrency_group="aside")
"""The same, and it shows among a replica's tasks."""


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"aside": 1})  # type: ignore[call-overload]
class ReplicaActor(ReplicaServer):
    """The client as a Ray actor.

    Args:
        device: ``"cpu"`` or ``"gpu"``.
        link: Name of the link for answers.
        rank: Which of the executor's replicas this is, for the dashboard and for what it prints.
        environment: Variables of the driver's that change what is computed.
        secret: By this replicas of the same executor know each other when they form groups.
        paths: By which ways bytes may leave a GPU. See `Options.gpu_paths`.
    """

    def __init__(
        self,
        device: str,
        link: str,
        rank: int,
        environment: Mapping[str, str],
        secret: str,
        *,
        paths: Sequence[str],
    ) -> None:
        # Before CUDA starts, which reads them. What is read even earlier is there already.
        os.environ.update(environment)
        devices.keep_freed_memory()
        process.belong_to_replica()
        sys.breakpointhook = _refuse_debugger  # Ray's own waits until a debugger connects
        given = [*map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))]
        super().__init__(devices.take_given(device, given), link_for(link), _task_span, paths)
        self._replica.groups.secret = secret
        self._rank = rank
        # A child does not get so far as to write its answer, into the same shared memory.
        self._replica.check_process = functools.partial(self._check_process, os.getpid(), None)
        devices.rest()

    def __repr__(self) -> str:
        device = f"{self._device}"
        if not devices.is_cpu(self._device):
            device += f" = GPU {self._gpu()}"
        return f"Replica({self._rank}@{device}, node {self._node()[:8]})"

    def work(self, text: str) -> None:
        """Nothing: the name of the task says what is done here. See `summaries`.

        `ray timeline` calls the task's span "work", whatever its name; so there is one more.
        """
        with _task_span(text):
            pass

    def note(self, text: str) -> None:
        """Enter a line into the log."""
        log.warning("%s", text)

    def _end_child(self, error: BaseException | None) -> None:
        status = 0
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            # Without the error's text, which may hold data: other users may read the log.
            where = "".join(traceback.format_tb(error.__traceback__))
            with contextlib.suppress(Exception):
                sys.stderr.write(f"a forked process ended by {type(error).__name__}:\n{where}")
            status = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status & 0xFF)

    def _address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def _node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def _gpu(self) -> str:
        return ",".join(map(str, ray.get_gpu_ids()))

    def _session(self) -> str:
        node: Any = worker._global_node
        return Path(node.get_session_dir_path()).name

    def _get(self, ref: Any) -> Any:
        return fetched(ref)

    def _end(self) -> None:
        log.warning(
            "the GPU works no more in this process, which therefore ends; the error before says why"
        )
        os._exit(1)

    work = _listed(work)
    note = _quiet(note)
    versions = _quiet(ReplicaServer.versions)
    hello = _quiet(ReplicaServer.hello)
    empty = _quiet(ReplicaServer.empty)
    forget = _quiet(ReplicaServer.forget)
    learn = _quiet(ReplicaServer.learn)
    group = _quiet(ReplicaServer.group)
    train = _quiet(ReplicaServer.train)
    leave = _aside(ReplicaServer.leave)
    deliver = _aside(ReplicaServer.deliver)
    share = _quiet(ReplicaServer.share)
    start_sharing = _quiet(ReplicaServer.start_sharing)
    share_device = _aside(ReplicaServer.share_device)  # should it hang, calls go on
    start_device = _quiet(ReplicaServer.start_device)
    open_line = _quiet(ReplicaServer.open_line)

"""`InProcessBackend`: replicas in the driver's process, one after the other. For debuggers and for
tests.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raydp_parallel.cluster.backend import Death, DevicePlace, OnAnswer, TaskLabel
from raydp_parallel.devices.ranges import Attachment, ReplicaHello
from raydp_parallel.options import Options
from raydp_parallel.replica.actor import fetched
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport.links import Link, link_for
from raydp_parallel.transport.messages import Package


class _Server(ReplicaServer):
    def _get(self, ref: Any) -> Any:
        return fetched(ref)


class InProcessClient:
    """The driver's side of a `ReplicaServer` in its own process, which answers at once.

    Args:
        link: The link of its answers.
        paths: See `Options.gpu_paths`.
    """

    def __init__(self, link: Link, paths: Sequence[str] = ()) -> None:
        self._server = _Server("cpu", link, paths=paths)

    def call(self, method: str, header: bytes, beside: Any) -> Any:
        """Call a method of the server, and leave the driver's generators and settings as
        they were.
        """
        with _isolated():
            _, *answer = getattr(self._server, method)(b"", header, *beside)
            return tuple(answer) if len(answer) > 1 else answer[0]


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class Answered(NamedTuple):
    """A call that has ended already.

    Attributes:
        answer: Its answer.
    """

    answer: Any

    def give_up(self) -> None:
        """Do nothing: the call has ended."""


class InProcessBackend:
    """Replicas in the driver's process.

    Args:
        options: The link, and torch's threads.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.link: Link = link_for(options.link)

    def alive(self) -> bool:
        return True

    def threads(self, chunks: int) -> int | None:
        return self._options.threads

    def start(
        self, places: Sequence[DevicePlace], cancelled: Callable[[], bool] | None = None
    ) -> dict[DevicePlace, tuple[Any, ReplicaHello]]:
        hello = ReplicaHello(
            pid=os.getpid(),
            node="driver",
            device="cpu",
            gpu="",
            gpu_uuid="",
            memory=0,
            processors=0,
        )
        name, paths = self._options.link, self._options.gpu_paths
        return {place: (InProcessClient(link_for(name), paths), hello) for place in places}

    def link_to(self, client: InProcessClient) -> Link:
        return self.link

    def rest(self) -> None:
        """Do nothing: replicas compute in this thread."""

    def submit(
        self,
        client: InProcessClient,
        method: str,
        header: bytes,
        beside: Sequence[Attachment],
        task: TaskLabel | None = None,
    ) -> Answered:
        return Answered(client.call(method, header, beside))

    def collect(self, pending: Sequence[Answered], on_answer: OnAnswer | None = None) -> list[Any]:
        for number, call in enumerate(pending):
            if on_answer is not None:
                on_answer(number, call.answer)
        return [call.answer for call in pending]

    def come(self, pending: Sequence[Answered], wait: bool) -> Collection[int]:
        return range(len(pending))

    def leave(self, client: Any, groups: Sequence[str]) -> None:
        """Do nothing: there are no groups in one process."""

    def show(self, client: Any, text: str) -> None:
        """Do nothing: no dashboard lists these replicas."""

    def note(self, client: Any, text: str) -> None:
        """Do nothing: these replicas have no logs of their own."""

    def cause(self, client: Any, death: Death) -> str:
        return death.cause

    def stop(self, clients: Sequence[Any]) -> None:
        """Do nothing: replicas in this process end with their last reference."""

    def send_code(self, package: Package, clients: Sequence[Any]) -> bool:
        return False

    def release(self, places: Collection[DevicePlace] | None = None) -> None:
        """Do nothing: no resources are held."""

    def leaving(self) -> Collection[str]:
        return ()

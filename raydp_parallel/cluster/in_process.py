"""The same client without a process: replicas in the driver, one after the other. For debuggers and
for tests.
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
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.devices.specs import ReplicaHello
from raydp_parallel.options import Options
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport.links import Link, link_for
from raydp_parallel.transport.messages import Package


class InProcessClient:
    """A `ReplicaServer` that answers at once.

    Args:
        link: What answers travel by.
    """

    def __init__(self, link: Link) -> None:
        self._client = ReplicaServer("cpu", link)

    def call(self, method: str, header: bytes, beside: Any) -> Any:
        """Call a method of the client, and leave the driver's generators and settings as
        they were.
        """
        with _isolated():
            _, *answer = getattr(self._client, method)(b"", header, *beside)
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
        answer: What came of it.
    """

    answer: Any

    def give_up(self) -> None:
        """Nothing is on its way."""


class InProcessBackend:
    """Replicas in the driver's process.

    Args:
        options: Which link to go by.
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
        clients = {place: InProcessClient(link_for(self._options.link)) for place in places}
        return {
            place: (client, ReplicaHello(os.getpid(), "driver", "cpu", "", "", 0, 0))
            for place, client in clients.items()
        }

    def link_to(self, client: InProcessClient) -> Link:
        return self.link

    def rest(self) -> None:
        """They compute in this thread."""

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

    def leave(self, client: Any, groups: Sequence[str]) -> None:
        """One process is no group."""

    def show(self, client: Any, text: str) -> None:
        """No dashboard knows it."""

    def note(self, client: Any, text: str) -> None:
        """It has no log of its own."""

    def cause(self, client: Any, death: Death) -> str:
        return death.cause

    def stop(self, clients: Sequence[Any]) -> None:
        """Replicas in this process end with their last reference."""

    def teach(self, package: Package, clients: Sequence[Any]) -> bool:
        return False

    def release(self, places: Collection[DevicePlace] | None = None) -> None:
        """Nothing is held."""

    def leaving(self) -> Collection[str]:
        return ()

"""The same door without a process: replicas in the driver, one after the other. For debuggers and for tests."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raydp_parallel.actor import Door
from raydp_parallel.crew import Death, Heard, Place, Task
from raydp_parallel.links import Link, Packet, link_for
from raydp_parallel.messages import Hello, Package
from raydp_parallel.options import Options


class LocalDoor:
    """A `Door` that answers at once.

    Args:
        link: What answers travel by.
    """

    def __init__(self, link: Link) -> None:
        self._door = Door("cpu", link)

    def call(self, method: str, header: bytes, beside: Any) -> Any:
        """Call a method of the door, and leave the driver's generators and settings as they were."""
        with _isolated():
            _, *answer = getattr(self._door, method)(b"", header, *beside)
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


class LocalCrew:
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
        self, places: Sequence[Place], cancelled: Callable[[], bool] | None = None
    ) -> dict[Place, tuple[Any, Hello]]:
        doors = {place: LocalDoor(link_for(self._options.link)) for place in places}
        return {place: (door, Hello(os.getpid(), "driver", "cpu", "", "", 0, 0)) for place, door in doors.items()}

    def link_to(self, door: LocalDoor) -> Link:
        return self.link

    def rest(self) -> None:
        """They compute in this thread."""

    def submit(
        self, door: LocalDoor, method: str, header: bytes, beside: Sequence[Packet], task: Task | None = None
    ) -> Answered:
        return Answered(door.call(method, header, beside))

    def collect(self, pending: Sequence[Answered], heard: Heard | None = None) -> list[Any]:
        for number, call in enumerate(pending):
            if heard is not None:
                heard(number, call.answer)
        return [call.answer for call in pending]

    def leave(self, door: Any, groups: Sequence[str]) -> None:
        """One process is no group."""

    def show(self, door: Any, text: str) -> None:
        """No dashboard knows it."""

    def note(self, door: Any, text: str) -> None:
        """It has no log of its own."""

    def cause(self, door: Any, death: Death) -> str:
        return death.cause

    def stop(self, doors: Sequence[Any]) -> None:
        """Replicas in this process end with their last reference."""

    def teach(self, package: Package, doors: Sequence[Any]) -> bool:
        return False

    def release(self, places: Collection[Place] | None = None) -> None:
        """Nothing is held."""

    def leaving(self) -> Collection[str]:
        return ()

"""`Backend`: what an executor needs of the code that runs its replicas; and `DevicePlace`. No Ray
here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from raydp_parallel.devices.ranges import Attachment, ReplicaHello
from raydp_parallel.transport.links import Link
from raydp_parallel.transport.messages import Package

DeviceId = int | str
"""A logical GPU of the cluster, or ``"cpu"``."""


class DevicePlace(NamedTuple):
    """A device that can hold a replica. An executor finds its replicas by it.

    Attributes:
        kind: ``"gpu"`` or ``"cpu"``.
        number: The logical GPU, or which of the ``"cpu"`` entries.
    """

    kind: str
    number: int

    @property
    def device_id(self) -> DeviceId:
        """The entry of ``device_ids`` that names this place."""
        return self.number if self.kind == "gpu" else "cpu"


class TaskLabel(NamedTuple):
    """How a call looks in Ray's dashboard.

    Attributes:
        method: What is called.
        chunk: Which of the call's chunks it is, from 1.
        chunks: How many there are.
        again: Whether it makes a lost graph again.
    """

    method: str
    chunk: int
    chunks: int
    again: bool = False

    @property
    def name(self) -> str:
        """Its name there, if it is a Ray task. There are few of them, because Ray labels metrics
        with each name and keeps them.
        """
        return f"{self.method} {'again ' if self.again else ''}chunk {self.chunk}/{self.chunks}"


OnAnswer = Callable[[int, Any], None]
"""Called with the number of a call, and its answer."""


class Backend(Protocol):
    """Starts replicas and carries calls to them."""

    link: Link

    def alive(self) -> bool:
        """Whether the replicas may still run; False once the cluster was left."""

    def threads(self, chunks: int) -> int | None:
        """Torch's threads for each of so many chunks on CPUs, None leaves them.

        A function of the call alone: what a chunk computes, to the bit, must not depend on the
        replica that runs it, or on what ran before.
        """

    def start(
        self, places: Sequence[DevicePlace], cancelled: Callable[[], bool] | None = None
    ) -> dict[DevicePlace, tuple[Any, ReplicaHello]]:
        """Start a replica in each place, or raise `PlacementError` within the deadline, or once it
        is ``cancelled``.

        With ``Options.elastic`` fewer may be started, one at least. What a place was given it
        keeps, also for its next replica, until it is released.
        """

    def link_to(self, client: Any) -> Link:
        """The link of messages to one replica. What goes to several is sent by `link`."""

    def rest(self) -> None:
        """Leave the cores to the replicas that share them with the calling thread, which is about
        to wait.
        """

    def submit(
        self,
        client: Any,
        method: str,
        header: bytes,
        beside: Sequence[Attachment],
        task: TaskLabel | None = None,
    ) -> Any:
        """Send a call; returns what `collect` waits for. Its ``give_up()`` ends the wait early."""

    def collect(self, pending: Sequence[Any], on_answer: OnAnswer | None = None) -> Iterable[Any]:
        """Wait for all calls. Where a replica died, its answer is the `Death`.

        Args:
            pending: The calls.
            on_answer: Called with each answer as soon as it arrives: other replicas may be waiting
                for one that died.

        Returns:
            The answers, in the order of the calls. Without ``on_answer`` each is waited for when
            the caller takes it.
        """

    def come(self, pending: Sequence[Any], wait: bool) -> Collection[int]:
        """Which calls, by their place, `collect` would not wait for; it takes none.

        Args:
            pending: The calls.
            wait: Whether to wait for one, for as long as a call may take.
        """

    def leave(self, client: Any, groups: Sequence[str]) -> None:
        """Let a replica leave groups of replicas at once, even while it waits for other members."""

    def show(self, client: Any, text: str) -> None:
        """Let the dashboard show a text as what a replica does, if its calls are no Ray tasks."""

    def note(self, client: Any, text: str) -> None:
        """Enter a line into a replica's own log, which the dashboard shows on its page."""

    def cause(self, client: Any, death: Death) -> str:
        """Why a replica ended, as far as can be found out; this may take a while."""

    def stop(self, clients: Sequence[Any]) -> None:
        """End replicas, at once."""

    def send_code(self, package: Package, clients: Sequence[Any]) -> bool:
        """Send modules to replicas, to each before its next call; False if all of these have them
        already.
        """

    def release(self, places: Collection[DevicePlace] | None = None) -> None:
        """Release what some places hold of the cluster, by default all."""

    def leaving(self) -> Collection[str]:
        """The nodes that are known to end soon. Cheap enough for every call."""


class Ending(Enum):
    """How a replica failed to answer."""

    LOST = "lost"
    """Its process is gone, or cannot be reached. `Backend.cause` can say why."""
    SILENT = "silent"
    """It did not answer in time."""


class Death(NamedTuple):
    """A replica did not answer.

    Attributes:
        cause: What was seen of it.
        ending: How it ended.
    """

    cause: str
    ending: Ending = Ending.LOST


def places(device_ids: Sequence[DeviceId]) -> list[DevicePlace]:
    """The places that ``device_ids`` name. The n-th ``"cpu"`` is always the same replica."""
    return [*known_places(tuple(device_ids))]


@functools.lru_cache(maxsize=64)
def known_places(device_ids: tuple[DeviceId, ...]) -> tuple[DevicePlace, ...]:
    """`places` for the same ids in each call of a wrapper."""
    found = []
    cpus = 0
    for device_id in device_ids:
        if device_id == "cpu":
            found.append(DevicePlace("cpu", cpus))
            cpus += 1
        else:
            found.append(DevicePlace("gpu", int(device_id)))
    return tuple(found)


def device_id(entry: Any) -> DeviceId:
    """An entry of ``device_ids`` in its plain form."""
    if isinstance(entry, bool) or not isinstance(entry, (int, str, torch.device)):
        raise TypeError(
            f"device_ids: {entry!r} is a {type(entry).__name__}; give ints, torch devices, "
            "'cuda:N' or 'cpu'"
        )
    if isinstance(entry, int):
        if entry < 0:
            raise ValueError(
                f"device_ids: {entry} is negative; logical GPUs count from 0, "
                "CPU replicas are 'cpu'"
            )
        return entry
    try:
        device = torch.device(entry)
    except RuntimeError as error:
        raise ValueError(
            f"device_ids: {entry!r} names no device; give ints, torch devices, 'cuda:N' or 'cpu'"
        ) from error
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"device_ids: {entry!r} is neither a CUDA device nor 'cpu'")
    if device.index is not None:
        return device.index
    # Torch's stubs know no device without an index.
    return torch.cuda.current_device() if torch.cuda.is_available() else 0  # type: ignore[unreachable]

"""Seats: the places of an executor, who sits there now, and what a job for one of them is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from raydp_parallel.crew import Place
from raydp_parallel.links import Mail
from raydp_parallel.messages import Forget, Hello, Reply
from raydp_parallel.monitor import ReplicaInfo, Tally


class State(Enum):
    """The life of a seat."""

    EMPTY = "empty"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class Seat:
    """One place of an executor, and the replica that sits there now.

    Args:
        place: The device.
        index: Its number in the executor.
    """

    def __init__(self, place: Place, index: int) -> None:
        self.place = place
        self.index = index
        self.state = State.EMPTY
        self.tally = Tally()
        self.incarnation = 0
        self.held: dict[int, int] = {}
        self._door: Any = None
        self._hello: Hello | None = None
        # Finalizers append here, from any thread and at any moment; the next call takes what is there.
        self._graphs: deque[int] = deque()
        self._models: deque[int] = deque()
        self._told: list[Forget] = []

    def seat(self, door: Any, hello: Hello) -> None:
        """A new replica sits down."""
        self._door, self._hello = door, hello
        self.state = State.READY
        self.incarnation += 1
        self.leave_behind()

    def leave_behind(self) -> None:
        """Nothing that was sent to the old replica is here any more."""
        self.held.clear()
        self._graphs.clear()
        self._models.clear()
        self._told.clear()

    @property
    def door(self) -> Any:
        """What calls go through."""
        return self._door

    def forget(self) -> Forget | None:
        """What the driver let go of since the last call."""
        if not self._graphs and not self._models:
            return None
        told = Forget(_drain(self._graphs), _drain(self._models))
        self._told.append(told)
        return told

    def heard(self) -> None:
        """The replica answered: it knows what it was told."""
        self._told.clear()

    def forget_again(self) -> None:
        """Tell once more what may not have arrived; hearing it twice does no harm."""
        for told in self._told:
            self._graphs.extend(told.graphs)
            self._models.extend(told.models)
        self._told.clear()

    def drop_graph(self, key: int, incarnation: int) -> None:
        """Let go of a graph; told with the next call."""
        if incarnation == self.incarnation:
            self._graphs.append(key)

    def distrust(self, model: int) -> None:
        """What the replica holds of a model is not known: the next call sends everything."""
        if model in self.held:
            self.held[model] = 0

    def drop_model(self, model: int) -> None:
        """Let go of a model; told with the next call."""
        if self.held.pop(model, None) is not None:
            self._models.append(model)

    def info(self) -> ReplicaInfo:
        """Who sits here."""
        hello = self._hello or Hello(0, "", "", "", "", 0, 0)
        return ReplicaInfo(
            index=self.index,
            device=hello.device,
            device_id=self.place.device_id,
            node_id=hello.node,
            pid=hello.pid,
            state=self.state.value,
            gpu=hello.gpu,
            gpu_uuid=hello.gpu_uuid,
            gpu_index=hello.gpu_index,
        )

    @property
    def hello(self) -> Hello | None:
        """What the replica said of itself."""
        return self._hello

    def __str__(self) -> str:
        hello = self._hello
        where = f" (pid {hello.pid}, node {hello.node[:8]})" if hello is not None else ""
        return f"replica {self.index} for device {self.place.device_id}{where}"


class Job(NamedTuple):
    """One chunk's call.

    Attributes:
        seat: Who runs it.
        method: ``"forward"`` or ``"backward"``.
        prepare: Makes the message for the seat, and puts its packets into the mail.
        incarnation: Which of the seat's replicas it is for; None is whoever sits there.
        model: The model's id, for the books.
    """

    seat: Seat
    method: str
    prepare: Callable[[Seat, Mail], Any]
    incarnation: int | None = None
    model: int = 0


class Answer(NamedTuple):
    """What came of a job.

    Attributes:
        reply: The replica's answer.
        mail: Opens the answer's packets.
        incarnation: Which of the seat's replicas answered.
    """

    reply: Reply
    mail: Mail
    incarnation: int


def _drain(queue: deque[int]) -> tuple[int, ...]:
    return tuple(queue.popleft() for _ in range(len(queue)))

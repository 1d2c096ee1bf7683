"""Seats: the places of an executor, and who sits there now."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.devices.specs import ReplicaHello
from raydp_parallel.monitoring.stats import ReplicaInfo, Tally
from raydp_parallel.transport.messages import Forget

_GUESTS = 1 << 40
"""Models are counted below this; above it they are named that a slot keeps for another."""


class SlotState(Enum):
    """The life of a slot."""

    EMPTY = "empty"
    READY = "ready"
    AWAY = "away"
    """Nobody was placed there yet, or who sat there left its node before that ended."""
    DEAD = "dead"
    CLOSED = "closed"


class ReplicaSlot:
    """One place of an executor, and the replica that sits there now.

    Args:
        place: The device.
        index: Its number in the executor.

    Attributes:
        ready: Whether it can be called. Looked at on each call, hence no property.
        client: What calls go through.
        hello: What the replica said of itself.
    """

    def __init__(self, place: DevicePlace, index: int) -> None:
        self.place = place
        self.index = index
        self.ready = False
        self._state = SlotState.EMPTY
        self.tally = Tally()
        self.incarnation = 0
        self.held: dict[int, int] = {}
        self.client: Any = None
        self.hello: ReplicaHello | None = None
        # Finalizers append here, from any thread and at any moment; the next call takes what is
        # there.
        self._graphs: deque[int] = deque()
        self._models: deque[int] = deque()
        self.answered = False

    def slot(self, client: Any, hello: ReplicaHello) -> None:
        """A new replica sits down."""
        self.client, self.hello = client, hello
        self.state = SlotState.READY
        self.incarnation += 1
        self.answered = False
        self.leave_behind()

    def leave_behind(self) -> None:
        """Nothing that was sent to the old replica is here any more."""
        self.held.clear()
        self._graphs.clear()
        self._models.clear()

    @property
    def state(self) -> SlotState:
        """Where in its life it is."""
        return self._state

    @state.setter
    def state(self, state: SlotState) -> None:
        self._state = state
        self.ready = state is SlotState.READY

    def empty(self, state: SlotState) -> None:
        """Nobody sits here any more."""
        self.state = state
        self.leave_behind()

    def forget(self) -> Forget | None:
        """What the driver let go of since the last call."""
        if not self._graphs and not self._models:
            return None
        return Forget(_drain(self._graphs), _drain(self._models))

    def forget_again(self, told: Forget | None) -> None:
        """Tell once more what may not have arrived; hearing it twice does no harm."""
        if told is not None:
            self._graphs.extend(told.graphs)
            # Not what was sent anew since: its name is in use again.
            self._models.extend(name for name in told.models if name not in self.held)

    def drop_graph(self, key: int, incarnation: int) -> None:
        """Let go of a graph; told with the next call."""
        if incarnation == self.incarnation:
            self._graphs.append(key)

    def distrust(self, model: int) -> None:
        """What the replica holds of a model is not known: the next call sends everything."""
        if model in self.held:
            self.held[model] = 0

    def name_of(self, model: int, home: ReplicaSlot) -> int:
        """What a model is called here. A slot that stands in for another keeps a replica of its own
        for that one.

        So each chunk finds what its forward left, as it would have at home.
        """
        return model if home is self else (home.index + 1) * _GUESTS + model

    def drop_model(self, model: int) -> None:
        """Let go of a model; told with the next call."""
        self._drop([name for name in [*self.held] if name % _GUESTS == model])

    def dismiss(self, home: ReplicaSlot) -> None:
        """Let go of what was kept for another slot, which needs nobody to stand in any more."""
        self._drop([name for name in [*self.held] if name // _GUESTS == home.index + 1])

    def _drop(self, names: list[int]) -> None:
        for name in names:
            if self.held.pop(name, None) is not None:
                self._models.append(name)

    def info(self) -> ReplicaInfo:
        """Who sits here."""
        hello = self.hello or ReplicaHello(0, "", "", "", "", 0, 0)
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

    def __str__(self) -> str:
        hello = self.hello
        where = f" (pid {hello.pid}, node {hello.node[:8]})" if hello is not None else ""
        return f"replica {self.index} for device {self.place.device_id}{where}"


def _drain(queue: deque[int]) -> tuple[int, ...]:
    found: list[int] = []
    while queue:
        found.append(queue.popleft())
    return tuple(found)

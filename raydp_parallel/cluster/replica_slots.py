"""`ReplicaSlot`: one place of an executor, with its replica of today; `ReplicaContents`: what that
replica holds; `ChunkCall`: one call that a slot is asked to run; and `RemoteGraph`: the graph that
its replica keeps of it.

[Note: where a graph is]
A call is planned for a slot, and may run on another one if the slot's replica died. A `RemoteGraph`
knows the slot that made it last. It also knows how it was made, as long as torch would keep it: if
its replica is gone when backward needs it, another replica makes it again. A derived graph
(``create_graph``) is made of its parent, which has to be made first.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.devices.process import Freed, number
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.errors import GraphLost
from raydp_parallel.monitoring.stats import ReplicaInfo, Tally
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Forget, Reply

_FOR_OTHERS = 1 << 40
"""Numbers of models are below this. Above it are the numbers of models that a slot keeps for
another slot, as it runs that one's chunks.
"""


class SlotState(Enum):
    """The states of a slot."""

    EMPTY = "empty"
    READY = "ready"
    AWAY = "away"
    """No replica was placed there yet, or its replica left a node that was about to end."""
    DEAD = "dead"
    CLOSED = "closed"


class ReplicaContents:
    """What a replica holds, as far as the driver knows: models under their names there, and what of
    them and of its graphs it has still to be told to release. A new replica holds nothing.

    Attributes:
        held: The revision of each model that it was sent; 0 if that is not known.
        trained: The last entry of the record of each model's optimizer that it said it has made.
        sent_training: The last that was sent to it.
        failed_training: The last that it failed to make, and counts as made all the same.
        released_graphs: The graphs that the next call tells it to release.
    """

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.trained: dict[int, int] = {}
        self.sent_training: dict[int, int] = {}
        self.failed_training: dict[int, int] = {}
        self._dismissed: set[int] = set()
        # Finalizers append here, from any thread and at any moment; the next call takes what is
        # there.
        self.released_graphs: deque[int] = deque()
        self._released_models: deque[int] = deque()

    def forget(self) -> Forget | None:
        """What the driver released since the last call."""
        if _freed.ended:
            for action in _freed.take():
                action()
        if not self.released_graphs and not self._released_models:
            return None
        return Forget(_emptied(self.released_graphs), _emptied(self._released_models))

    def forget_again(self, told: Forget | None) -> None:
        """Send once more what may not have arrived; receiving it twice does no harm."""
        if told is not None:
            self.released_graphs.extend(told.graphs)
            # Not the models that were sent again since: their names are in use.
            self._released_models.extend(name for name in told.models if name not in self.held)

    def distrust(self, model: int) -> None:
        """Note that it is not known what the replica holds of a model: the next call sends all."""
        if model in self.held:
            self.held[model] = 0
        self.sent_training.pop(model, None)

    def has_trained(self, model: int, number: int, failed: int) -> None:
        """Note what an answer says.

        Args:
            model: The model.
            number: The last entry that its optimizer has made; 0 for none, -1 if it does not say.
            failed: The entry that raised the exception in the answer; 0 for none.
        """
        if number < 0:
            self.sent_training.pop(model, None)
        elif not number:
            self._forget_training(model)
        else:
            if failed:
                self.failed_training[model] = failed
            self.trained[model] = max(number, self.trained.get(model, 0))
            self.sent_training[model] = max(number, self.sent_training.get(model, 0))
            if model < _FOR_OTHERS:
                left = [
                    name for name in self.names_of(model) if name // _FOR_OTHERS in self._dismissed
                ]
                self._drop(left)

    def names_of(self, model: int) -> list[int]:
        """Under which numbers an optimizer of a model is here."""
        return [name for name in [*self.trained] if name % _FOR_OTHERS == model]

    def name_for(self, home: int, model: int) -> int:
        """The name of the copy of a model that is kept for another slot, by the slot's index."""
        self._dismissed.discard(home + 1)
        return (home + 1) * _FOR_OTHERS + model

    def drop_model(self, model: int) -> None:
        """Release a model; the next call says so."""
        self._drop([name for name in [*self.held] if name % _FOR_OTHERS == model])

    def dismiss(self, home: int) -> None:
        """Release what was kept for another slot, which has a replica of its own again.

        A copy that an optimizer trained stays until the slot's own copy has made as much: it may be
        the last one that has all steps.
        """
        self._dismissed.add(home + 1)
        names = [name for name in [*self.held] if name // _FOR_OTHERS == home + 1]
        self._drop([n for n in names if n not in self.trained or n % _FOR_OTHERS in self.trained])

    def _drop(self, names: list[int]) -> None:
        for name in names:
            self._forget_training(name)
            if self.held.pop(name, None) is not None:
                self._released_models.append(name)

    def _forget_training(self, model: int) -> None:
        for known in (self.trained, self.sent_training, self.failed_training):
            known.pop(model, None)


def _emptied(queue: deque[int]) -> tuple[int, ...]:
    found: list[int] = []
    while queue:
        found.append(queue.popleft())
    return tuple(found)


class ReplicaSlot:
    """One place of an executor, and the replica that it has now.

    Args:
        place: The device.
        index: Its number in the executor.

    Attributes:
        ready: Whether it can be called. Read on each call, hence no property.
        client: The client of its replica.
        hello: What the replica said of itself when it started.
        incarnation: The number of replicas that it had.
        contents: What its replica holds of models and graphs.
        tally: What its replicas did.
        answered: Whether its replica has answered a call.
    """

    def __init__(self, place: DevicePlace, index: int) -> None:
        self.place = place
        self.index = index
        self.ready = False
        self._state = SlotState.EMPTY
        self.tally = Tally()
        self.incarnation = 0
        self.contents = ReplicaContents()
        self.client: Any = None
        self.hello: ReplicaHello | None = None
        self.answered = False

    def install(self, client: Any, hello: ReplicaHello) -> None:
        """Take a new replica."""
        self.client, self.hello = client, hello
        self.state = SlotState.READY
        self.incarnation += 1
        self.answered = False
        self.contents = ReplicaContents()

    @property
    def state(self) -> SlotState:
        """Its state."""
        return self._state

    @state.setter
    def state(self, state: SlotState) -> None:
        self._state = state
        self.ready = state is SlotState.READY

    @property
    def is_replaced(self) -> bool:
        """Whether its next replica is started in the background."""
        return self._state in (SlotState.DEAD, SlotState.AWAY)

    def empty(self, state: SlotState) -> None:
        """Take the replica away."""
        self.state = state
        self.contents = ReplicaContents()

    def drop_graph(self, key: int, incarnation: int) -> None:
        """Release a graph; the next call says so."""
        if incarnation == self.incarnation:
            self.contents.released_graphs.append(key)

    def name_of(self, model: int, home: ReplicaSlot) -> int:
        """The name of a model here. A slot that runs the chunks of another keeps a separate copy of
        the model for them.

        So each chunk finds the state that its last forward left, as in its own slot.
        """
        return model if home is self else self.contents.name_for(home.index, model)

    def info(self) -> ReplicaInfo:
        """What users see of the slot."""
        hello = self.hello
        if hello is None:
            hello = ReplicaHello(
                pid=0, node="", device="", gpu="", gpu_uuid="", memory=0, processors=0
            )
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


Prepare = Callable[[ReplicaSlot, Attachments], Any]
"""Makes a message for a slot, and puts its tensors into the attachments. May be called again, for
another slot.
"""


class GraphRecipe(NamedTuple):
    """How a graph was made.

    Attributes:
        method: ``"forward"``, or ``"backward"`` for a derived graph.
        prepare: Makes the message that makes the graph again, and changes nothing else.
        parents: The graphs that it is derived from, with how they were made.
    """

    method: str
    prepare: Prepare
    parents: Sequence[tuple[RemoteGraph, GraphRecipe]] = ()


class GraphStep(NamedTuple):
    """One message of a job: its own, or one of those that make a graph again in front of it.

    Attributes:
        graph: The graph that it makes.
        method: The method that is called.
        prepare: Makes the message.
    """

    graph: RemoteGraph
    method: str
    prepare: Prepare


_freed: Freed[Callable[[], None]] = Freed()
"""What the next call does because an object was freed."""

when_freed = _freed.watch


class RemoteGraph:
    """A graph in a replica, or gradients that it keeps, under a key that nothing else of this
    process had.

    Args:
        what: What it is, for errors.
        remedy: What to do if it is lost.

    Attributes:
        what: What it is.
        remedy: See above.
        key: The key.
        slot: The slot that made it last, whether or not it is still there.
    """

    def __init__(
        self, what: str = "the graph of this forward", remedy: str = "run forward again"
    ) -> None:
        self.what = what
        self.remedy = remedy
        self.key = number("graph")
        self.slot: ReplicaSlot | None = None
        self._incarnation = 0
        self._recipe: GraphRecipe | None = None
        self._handle: weakref.ref[GraphHandle] | None = None
        self._dropped = False

    @property
    def recipe(self) -> GraphRecipe | None:
        """How to make it again; None before it was made, and once torch released it."""
        if self._handle is None:
            return self._recipe
        handle = self._handle()
        return None if handle is None else handle.recipes.get(self.key)

    @recipe.setter
    def recipe(self, recipe: GraphRecipe) -> None:
        if self._handle is None:
            self._recipe = recipe
        elif (handle := self._handle()) is not None:
            handle.recipes[self.key] = recipe

    def entrust(self, handle: GraphHandle) -> None:
        """Live as long as a handle."""
        if self._recipe is not None:
            handle.recipes[self.key] = self._recipe
        self._recipe, self._handle = None, weakref.ref(handle)

    @property
    def dropped(self) -> bool:
        """Whether torch released it."""
        return self._dropped or (self._handle is not None and self._handle() is None)

    def on(self, slot: ReplicaSlot) -> bool:
        """Whether it is on a slot, and the replica there is still the one that made it."""
        return (
            self.slot is slot
            and self._incarnation == slot.incarnation
            and slot.ready
            and not self.dropped
        )

    @property
    def whole(self) -> bool:
        """Whether the replica that made it last still has it."""
        return self.slot is not None and self.on(self.slot)

    def lay(self, slot: ReplicaSlot) -> None:
        """Note that it is made on a slot."""
        self._leave(elsewhere_than=slot)
        self.slot, self._incarnation = slot, slot.incarnation
        if self.dropped:
            self._leave()

    def lose(self) -> None:
        """Note that it could not be made after all."""
        self._leave()
        self.slot = None

    def drop(self) -> None:
        """Release it, as torch did."""
        self._dropped, self._recipe = True, None
        handle = self._handle() if self._handle is not None else None
        if handle is not None:
            handle.recipes.pop(self.key, None)
        self._leave()

    def _leave(self, elsewhere_than: ReplicaSlot | None = None) -> None:
        slot = self.slot  # another thread may lose it meanwhile
        if slot is not None and slot is not elsewhere_than:
            slot.drop_graph(self.key, self._incarnation)


class GraphHandle:
    """Lives as long as torch would keep the graphs. Once it is freed, the replicas free them.

    Attributes:
        recipes: How to make the graphs again, by key.
    """

    def __init__(self, graphs: Sequence[RemoteGraph]) -> None:
        self.recipes: dict[int, GraphRecipe] = {}
        for graph in graphs:
            graph.entrust(self)
        if graphs:
            when_freed(self, functools.partial(_drop_all, graphs))


def _drop_all(graphs: Sequence[RemoteGraph]) -> None:
    for graph in graphs:
        graph.drop()


def steps(graphs: Sequence[RemoteGraph], slot: ReplicaSlot) -> list[GraphStep]:
    """The messages that make the missing graphs of a slot again, each after those that it is
    derived from.

    Raises:
        GraphLost: One of them cannot be made again.
    """
    found: dict[RemoteGraph, GraphStep] = {}
    # Accumulated gradients are made of those before, thousands of times.
    todo: list[tuple[RemoteGraph, GraphRecipe | None, bool]] = [
        (graph, graph.recipe, False) for graph in reversed(graphs)
    ]
    while todo:
        graph, recipe, ready = todo.pop()
        if graph.on(slot) or graph in found:
            continue
        if recipe is None:
            raise GraphLost(
                f"{slot} has not got {graph.what}, and cannot make that again; {graph.remedy}"
            )
        if ready:
            found[graph] = GraphStep(graph, recipe.method, recipe.prepare)
            continue
        todo.append((graph, recipe, True))
        todo += [(parent, before, False) for parent, before in reversed(recipe.parents)]
    return [*found.values()]


class ChunkCall(NamedTuple):
    """One chunk's call.

    Attributes:
        slot: The slot that is to run it.
        method: ``"forward"`` or ``"backward"``.
        prepare: Makes the message for the slot that runs it.
        model: The model that it concerns.
        makes: The graph that it makes.
        needs: The graphs that it needs, all of them in one replica.
        rows: Rows of the batch that it computes, for statistics.
        on_answer: Called with its reply as soon as that arrives, while other replicas still work;
            with None if its replica died.
        bound: Whether no other slot may run it: if its replica dies, the run ends with that error.
    """

    slot: ReplicaSlot
    method: str
    prepare: Prepare
    model: int
    makes: RemoteGraph | None = None
    needs: Sequence[RemoteGraph] = ()
    rows: int = 0
    on_answer: Callable[[Reply | None], None] | None = None
    bound: bool = False


class ChunkAnswer(NamedTuple):
    """The answer to a `ChunkCall`.

    Attributes:
        reply: The replica's answer.
        attachments: Opens the answer's tensors.
        slot: The slot that answered.
    """

    reply: Reply
    attachments: Attachments
    slot: ReplicaSlot

"""`ChunkCall`: one call that a slot is asked to run; and `RemoteGraph`: the graph that its replica
keeps of it.

[Note: where a graph is]
A call is planned for a slot, and may run on another one if the slot's replica died. A `RemoteGraph`
knows the slot that made it last. It also knows how it was made, as long as torch would keep it: if
its replica is gone when backward needs it, another replica makes it again. A derived graph
(``create_graph``) is made of its parent, which has to be made first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices.process import number
from raydp_parallel.errors import GraphLost
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Reply

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
        recipe: How to make it again; None before it was made, and once torch released it.
        slot: The slot that made it last, whether or not it is still there.
    """

    def __init__(
        self, what: str = "the graph of this forward", remedy: str = "run forward again"
    ) -> None:
        self.what = what
        self.remedy = remedy
        self.key = number("graph")
        self.recipe: GraphRecipe | None = None
        self.slot: ReplicaSlot | None = None
        self._incarnation = 0
        self._dropped = False

    def on(self, slot: ReplicaSlot) -> bool:
        """Whether it is on a slot, and the replica there is still the one that made it."""
        return (
            self.slot is slot
            and self._incarnation == slot.incarnation
            and slot.ready
            and not self._dropped
        )

    @property
    def whole(self) -> bool:
        """Whether the replica that made it last still has it."""
        return self.slot is not None and self.on(self.slot)

    def lay(self, slot: ReplicaSlot) -> None:
        """Note that it is made on a slot."""
        self._leave(elsewhere_than=slot)
        self.slot, self._incarnation = slot, slot.incarnation
        if self._dropped:
            self._leave()

    def lose(self) -> None:
        """Note that it could not be made after all."""
        self._leave()
        self.slot = None

    def drop(self) -> None:
        """Note that torch released it."""
        self._dropped, self.recipe = True, None
        self._leave()

    def _leave(self, elsewhere_than: ReplicaSlot | None = None) -> None:
        slot = self.slot  # another thread may lose it meanwhile
        if slot is not None and slot is not elsewhere_than:
            slot.drop_graph(self.key, self._incarnation)


class GraphHandle:
    """Lives as long as torch would keep the graphs. When it is freed, the replicas free them."""

    def __init__(self, graphs: Sequence[RemoteGraph]) -> None:
        self._graphs = graphs

    def __del__(self) -> None:
        for graph in self._graphs:
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

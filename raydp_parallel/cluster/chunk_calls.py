"""Jobs: what a slot is asked to do, and the graphs that it keeps from it.

[Note: where a graph is]
A call is planned for a slot, and may end up on another: its replica died, and a survivor took over.
A `RemoteGraph` knows where it was laid last. It also knows how it was made, as long as torch would
keep it: if its replica is gone when backward needs it, a survivor makes it again. A derived graph
(``create_graph``) is made of its parent, which has to be there first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.errors import GraphLost
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Reply

_keys = itertools.count(1)

Prepare = Callable[[ReplicaSlot, Attachments], Any]
"""Makes a message for a slot, and puts its packets into the mail. May be called again, for another
slot.
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
        graph: What is there afterwards.
        method: What is called.
        prepare: Makes the message.
    """

    graph: RemoteGraph
    method: str
    prepare: Prepare


class RemoteGraph:
    """A graph in a replica, under a key that no other graph of this process had.

    Attributes:
        key: The key.
        recipe: How to make it again; None before it was made, and once torch let go of it.
        slot: Where it was laid last, whether or not it is still there.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.recipe: GraphRecipe | None = None
        self.slot: ReplicaSlot | None = None
        self._incarnation = 0
        self._dropped = False

    def on(self, slot: ReplicaSlot) -> bool:
        """Whether it lies on a slot, whose replica is still the one that made it."""
        return (
            self.slot is slot
            and self._incarnation == slot.incarnation
            and slot.ready
            and not self._dropped
        )

    @property
    def whole(self) -> bool:
        """Whether it lies where it was laid last."""
        return self.slot is not None and self.on(self.slot)

    def lay(self, slot: ReplicaSlot) -> None:
        """It was made on a slot."""
        self._leave(elsewhere_than=slot)
        self.slot, self._incarnation = slot, slot.incarnation
        if self._dropped:
            self._leave()

    def lose(self) -> None:
        """It could not be made after all."""
        self._leave()
        self.slot = None

    def drop(self) -> None:
        """Torch let go of it."""
        self._dropped, self.recipe = True, None
        self._leave()

    def _leave(self, elsewhere_than: ReplicaSlot | None = None) -> None:
        slot = self.slot  # another thread may lose it meanwhile
        if slot is not None and slot is not elsewhere_than:
            slot.drop_graph(self.key, self._incarnation)


class GraphHandle:
    """Alive while torch would keep the graphs; its end lets the replicas free them."""

    def __init__(self, graphs: Sequence[RemoteGraph]) -> None:
        self._graphs = graphs

    def __del__(self) -> None:
        for graph in self._graphs:
            graph.drop()


def steps(graphs: Sequence[RemoteGraph], slot: ReplicaSlot) -> list[GraphStep]:
    """What makes those of some graphs again that are not on a slot, and before them what they are
    derived from.

    Raises:
        GraphLost: One of them cannot be made again.
    """
    found: dict[RemoteGraph, GraphStep] = {}
    for graph in graphs:
        _enter(graph, graph.recipe, slot, found)
    return [*found.values()]


def _enter(
    graph: RemoteGraph,
    recipe: GraphRecipe | None,
    slot: ReplicaSlot,
    found: dict[RemoteGraph, GraphStep],
) -> None:
    if graph.on(slot) or graph in found:
        return
    if recipe is None:
        raise GraphLost(
            f"{slot} has not got the graph of this forward, and it cannot be made again"
        )
    for parent, before in recipe.parents:
        _enter(parent, before, slot, found)
    found[graph] = GraphStep(graph, recipe.method, recipe.prepare)


class ChunkCall(NamedTuple):
    """One chunk's call.

    Attributes:
        slot: Who is to run it.
        method: ``"forward"`` or ``"backward"``.
        prepare: Makes the message for whoever runs it.
        model: The model that it concerns.
        makes: The graph that is there afterwards.
        needs: The graphs that must be there before, all of them in one replica.
        rows: Rows of the batch that it computes, for statistics.
        on_answer: Called with its reply as soon as that arrives, while other replicas still work;
            with None if its replica died.
    """

    slot: ReplicaSlot
    method: str
    prepare: Prepare
    model: int
    makes: RemoteGraph | None = None
    needs: Sequence[RemoteGraph] = ()
    rows: int = 0
    on_answer: Callable[[Reply | None], None] | None = None


class ChunkAnswer(NamedTuple):
    """What came of a job.

    Attributes:
        reply: The replica's answer.
        attachments: Opens the answer's packets.
        slot: Who gave it.
    """

    reply: Reply
    attachments: Attachments
    slot: ReplicaSlot

"""Jobs: what a seat is asked to do, and the graphs that it keeps from it.

[Note: where a graph is]
A call is planned for a seat, and may end up on another: its replica died, and a survivor took over. A `Graph` knows
where it was laid last. It also knows how it was made, as long as torch would keep it: if its replica is gone when
backward needs it, a survivor makes it again. A derived graph (``create_graph``) is made of its parent, which has to be
there first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel.errors import GraphLost
from raydp_parallel.links import Mail
from raydp_parallel.messages import Reply
from raydp_parallel.seats import Seat

_keys = itertools.count(1)

Prepare = Callable[[Seat, Mail], Any]
"""Makes a message for a seat, and puts its packets into the mail. May be called again, for another seat."""


class Recipe(NamedTuple):
    """How a graph was made.

    Attributes:
        method: ``"forward"``, or ``"backward"`` for a derived graph.
        prepare: Makes the message that makes the graph again, and changes nothing else.
        parents: The graphs that it is derived from, with how they were made.
    """

    method: str
    prepare: Prepare
    parents: Sequence[tuple[Graph, Recipe]] = ()


class Step(NamedTuple):
    """One message of a job: its own, or one of those that make a graph again in front of it.

    Attributes:
        graph: What is there afterwards.
        method: What is called.
        prepare: Makes the message.
    """

    graph: Graph
    method: str
    prepare: Prepare


class Graph:
    """A graph in a replica, under a key that no other graph of this process had.

    Attributes:
        key: The key.
        recipe: How to make it again; None before it was made, and once torch let go of it.
        seat: Where it was laid last, whether or not it is still there.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.recipe: Recipe | None = None
        self.seat: Seat | None = None
        self._incarnation = 0
        self._dropped = False

    def on(self, seat: Seat) -> bool:
        """Whether it lies on a seat, whose replica is still the one that made it."""
        return self.seat is seat and self._incarnation == seat.incarnation and seat.ready and not self._dropped

    @property
    def whole(self) -> bool:
        """Whether it lies where it was laid last."""
        return self.seat is not None and self.on(self.seat)

    def lay(self, seat: Seat) -> None:
        """It was made on a seat."""
        self._leave(elsewhere_than=seat)
        self.seat, self._incarnation = seat, seat.incarnation
        if self._dropped:
            self._leave()

    def lose(self) -> None:
        """It could not be made after all."""
        self._leave()
        self.seat = None

    def drop(self) -> None:
        """Torch let go of it."""
        self._dropped, self.recipe = True, None
        self._leave()

    def _leave(self, elsewhere_than: Seat | None = None) -> None:
        seat = self.seat  # another thread may lose it meanwhile
        if seat is not None and seat is not elsewhere_than:
            seat.drop_graph(self.key, self._incarnation)


class Handle:
    """Alive while torch would keep the graphs; its end lets the replicas free them."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs

    def __del__(self) -> None:
        for graph in self._graphs:
            graph.drop()


def steps(graphs: Sequence[Graph], seat: Seat) -> list[Step]:
    """What makes those of some graphs again that are not on a seat, and before them what they are derived from.

    Raises:
        GraphLost: One of them cannot be made again.
    """
    found: dict[Graph, Step] = {}
    for graph in graphs:
        _enter(graph, graph.recipe, seat, found)
    return [*found.values()]


def _enter(graph: Graph, recipe: Recipe | None, seat: Seat, found: dict[Graph, Step]) -> None:
    if graph.on(seat) or graph in found:
        return
    if recipe is None:
        raise GraphLost(f"{seat} has not got the graph of this forward, and it cannot be made again")
    for parent, before in recipe.parents:
        _enter(parent, before, seat, found)
    found[graph] = Step(graph, recipe.method, recipe.prepare)


class Job(NamedTuple):
    """One chunk's call.

    Attributes:
        seat: Who is to run it.
        method: ``"forward"`` or ``"backward"``.
        prepare: Makes the message for whoever runs it.
        model: The model that it concerns.
        makes: The graph that is there afterwards.
        needs: The graphs that must be there before, all of them in one replica.
        rows: Rows of the batch that it computes, for statistics.
        heard: Is told what came of it as soon as that is known, while others still work: None if its replica died.
    """

    seat: Seat
    method: str
    prepare: Prepare
    model: int
    makes: Graph | None = None
    needs: Sequence[Graph] = ()
    rows: int = 0
    heard: Callable[[Reply | None], None] | None = None


class Answer(NamedTuple):
    """What came of a job.

    Attributes:
        reply: The replica's answer.
        mail: Opens the answer's packets.
        seat: Who gave it.
    """

    reply: Reply
    mail: Mail
    seat: Seat

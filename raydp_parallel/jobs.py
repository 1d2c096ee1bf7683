"""Jobs: what a seat is asked to do, and the graphs that it keeps from it.

[Note: where a graph is]
A call is planned for a seat, and may end up on another: its replica died, and a survivor took over. A `Graph` knows
where it was laid last. It also knows how it was made, as long as torch would keep it: if its replica is gone when
backward needs it, a survivor makes it again. A derived graph (``create_graph``) is made of its parent, which has to be
there first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

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
        parent: The graph that it is derived from.
        before: How that one was made.
    """

    method: str
    prepare: Prepare
    parent: Graph | None = None
    before: Recipe | None = None


class Step(NamedTuple):
    """One message of a job: its own, or one of those that make a graph again in front of it.

    Attributes:
        graph: What is there afterwards, if any.
        method: What is called.
        prepare: Makes the message.
    """

    graph: Graph | None
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

    def steps(self, seat: Seat, recipe: Recipe | None = None) -> list[Step]:
        """What makes it again on a seat."""
        recipe = recipe or self.recipe
        if self.on(seat) or recipe is None:
            return []
        before = recipe.parent.steps(seat, recipe.before) if recipe.parent is not None else []
        return [*before, Step(self, recipe.method, recipe.prepare)]


class Job(NamedTuple):
    """One chunk's call.

    Attributes:
        seat: Who is to run it.
        method: ``"forward"`` or ``"backward"``.
        prepare: Makes the message for whoever runs it.
        model: The model that it concerns.
        makes: The graph that is there afterwards.
        needs: The graph that must be there before.
        rows: Rows of the batch that it computes, for statistics.
        heard: Is told what came of it as soon as that is known, while others still work: None if its replica died.
    """

    seat: Seat
    method: str
    prepare: Prepare
    model: int
    makes: Graph | None = None
    needs: Graph | None = None
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

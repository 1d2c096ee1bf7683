"""One forward's new contents, sent to one replica and passed on by it to the others.

  driver ──► source ──► the first replica of each other node ──► the others of that node

So the driver sends them once, and each node gets them once. Whoever does not get them says so, and is sent them by the
driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel import collective
from raydp_parallel.exchange import Leg, Relay
from raydp_parallel.groups import Alliance, Groups
from raydp_parallel.links import Mail
from raydp_parallel.messages import Reply, StateUpdate
from raydp_parallel.seats import Seat
from raydp_parallel.snapshot.master import Master


class Route(NamedTuple):
    """The way from one replica to others.

    Attributes:
        source: Who gets the contents from the driver.
        legs: The groups, and who has the contents in each.
        seats: All on the way. Those that read the driver's memory are not: they have nothing to wait for.
    """

    source: Seat
    legs: Sequence[tuple[Alliance, Seat]]
    seats: frozenset[Seat]

    def legs_of(self, seat: Seat) -> tuple[Leg, ...]:
        """The legs that a seat is in; in the first it gets the contents, unless it is the source."""
        return tuple(Leg(a.name, a.rank(giver)) for a, giver in self.legs if seat in a.seats)


def route(groups: Groups, seats: Sequence[Seat], size: int) -> Route | None:
    """The way to some seats; makes the groups that it takes. None if each is better sent to, or has to be.

    Args:
        groups: The executor's groups.
        seats: Who is to get the contents.
        size: Their bytes, by estimate.
    """
    if not groups.wanted(seats, size):
        return None
    source = groups.near(seats)
    others = [seat for seat in seats if seat is not source and not getattr(seat.door, "shares", False)]
    nodes: dict[str, list[Seat]] = {}
    for seat in [source, *others]:
        nodes.setdefault(seat.hello.node if seat.hello is not None else "", []).append(seat)
    legs = []
    for members in [[found[0] for found in nodes.values()], *nodes.values()]:
        if len(members) > 1:
            alliance = groups.find(members, size, always=True)
            if alliance is None:
                return None
            legs.append((alliance, members[0]))
    return Route(source, legs, frozenset([source, *others])) if legs else None


class Post:
    """The contents of one model on their way.

    Args:
        groups: The executor's groups.
        way: The way they take.
        master: The model.
        held: The revision that all of them hold.
        chunks: Who is to run a chunk, by its number; those on the way only.
    """

    def __init__(self, groups: Groups, way: Route, master: Master, held: int, chunks: dict[int, Seat]) -> None:
        self._groups = groups
        self._way = way
        self._master = master
        self._held = held
        self._chunks = chunks
        self._told: set[int] = set()
        self._broken = False
        found = master.update_from(held)
        assert found is not None
        self._update, self._sizes = collective.placed(found.message)

    def update(
        self, number: int, seat: Seat, name: int, mail: Mail, note: Callable[[int], None]
    ) -> tuple[StateUpdate, Relay] | None:
        """What the message for a chunk brings; None if the driver has to send all of it.

        Args:
            number: The chunk.
            seat: Who runs it.
            name: What the model is called there.
            mail: Where contents go.
            note: Is told how many bytes are sent.
        """
        if number not in self._chunks:
            return None
        whole = all(alliance.whole for alliance, _ in self._way.legs)
        expected = seat is self._chunks[number] and seat.held.get(name, 0) == self._held
        # Who was told before, and is to be told again, did not get them.
        if self._broken or number in self._told or not whole or not expected:
            self.abandon()
            return None
        self._told.add(number)
        master, source = self._master, seat is self._way.source
        seat.held[name] = master.revision
        relay = Relay(self._way.legs_of(seat), self._sizes, source, self._groups.patience)
        if not source:
            note(0)
            return self._update, relay
        found = master.update_from(self._held)
        assert found is not None
        note(found.sent)
        return found.placed(mail), relay

    def heard(self, reply: Reply | None) -> None:
        """One of them answered, or died. If it did not get the contents, or could not pass them on, others will not."""
        if reply is None or reply.missed:
            self.abandon()

    def abandon(self) -> None:
        """Not all of them will get what they are waiting for."""
        if not self._broken:
            self._broken = True
            for alliance, _ in self._way.legs:
                self._groups.dissolve(alliance)


def post(groups: Groups, way: Route | None, master: Master, chunks: dict[int, Seat]) -> Post | None:
    """Begin to pass a model's new contents on; None if there are none, or the replicas hold different ones.

    Args:
        groups: The executor's groups.
        way: The way; None if there is none.
        master: The model.
        chunks: Who is to run its chunks, by their numbers.
    """
    if way is None:
        return None
    ours = {number: seat for number, seat in chunks.items() if seat in way.seats}
    held = {seat.held.get(master.id, 0) for seat in ours.values()}
    found = master.update_from(min(held)) if len(held) == 1 else None
    if found is None or not found.sent or not groups.wanted([*ours.values()], found.sent):
        return None
    return Post(groups, way, master, min(held), ours)


def size_of(master: Master, module: Any) -> int:
    """The bytes of a model, before it was ever looked at."""
    return master.size or sum(tensor.nbytes for tensor in module.parameters())

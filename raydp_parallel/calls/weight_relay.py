"""One forward's new contents, sent to one replica and passed on by it to the others.

  driver ──► source ──► the first replica of each other node ──► the others of that node

So the driver sends them once, and each node gets them once. Whoever does not get them says so, and
is sent them by the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel.calls.replica_groups import GroupTicket, ReplicaGroups
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import collective
from raydp_parallel.transport.group_messages import Leg, Relay
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Reply, StateUpdate


class RelayRoute(NamedTuple):
    """The way from one replica to others.

    Attributes:
        source: Who gets the contents from the driver.
        legs: The groups, and who has the contents in each.
        slots: All on the way. Those that read the driver's memory are not: they have nothing to
            wait for.
    """

    source: ReplicaSlot
    legs: Sequence[tuple[GroupTicket, ReplicaSlot]]
    slots: frozenset[ReplicaSlot]

    def legs_of(self, slot: ReplicaSlot) -> tuple[Leg, ...]:
        """The legs that a slot is in; in the first it gets the contents, unless it is the
        source.
        """
        return tuple(Leg(a.name, a.rank(giver)) for a, giver in self.legs if slot in a.slots)


def route(groups: ReplicaGroups, slots: Sequence[ReplicaSlot], size: int) -> RelayRoute | None:
    """The way to some slots; makes the groups that it takes. None if each is better sent to, or has
    to be.

    Args:
        groups: The executor's groups.
        slots: Who is to get the contents.
        size: Their bytes, by estimate.
    """
    if not groups.wanted(slots, size):
        return None
    source = groups.near(slots)
    others = [
        slot for slot in slots if slot is not source and not getattr(slot.client, "shares", False)
    ]
    nodes: dict[str, list[ReplicaSlot]] = {}
    for slot in [source, *others]:
        nodes.setdefault(slot.hello.node if slot.hello is not None else "", []).append(slot)
    legs = []
    for members in [[found[0] for found in nodes.values()], *nodes.values()]:
        if len(members) > 1:
            ticket = groups.find(members, size, always=True)
            if ticket is None:
                return None
            legs.append((ticket, members[0]))
    return RelayRoute(source, legs, frozenset([source, *others])) if legs else None


class WeightRelay:
    """The contents of one model on their way.

    Args:
        groups: The executor's groups.
        way: The way they take.
        tracker: The model.
        held: The revision that all of them hold.
        chunks: Who is to run a chunk, by its number; those on the way only.
    """

    def __init__(
        self,
        groups: ReplicaGroups,
        way: RelayRoute,
        tracker: ModuleTracker,
        held: int,
        chunks: dict[int, ReplicaSlot],
    ) -> None:
        self._groups = groups
        self._way = way
        self._tracker = tracker
        self._held = held
        self._chunks = chunks
        self._told: set[int] = set()
        self._broken = False
        found = tracker.update_from(held)
        assert found is not None
        self._update, self._sizes = collective.placed(found.message)

    def update(
        self,
        number: int,
        slot: ReplicaSlot,
        name: int,
        attachments: Attachments,
        note: Callable[[int], None],
    ) -> tuple[StateUpdate, Relay] | None:
        """What the message for a chunk brings; None if the driver has to send all of it.

        Args:
            number: The chunk.
            slot: Who runs it.
            name: What the model is called there.
            attachments: Where contents go.
            note: Is told how many bytes are sent.
        """
        if number not in self._chunks:
            return None
        whole = all(ticket.whole for ticket, _ in self._way.legs)
        expected = slot is self._chunks[number] and slot.held.get(name, 0) == self._held
        # Who was told before, and is to be told again, did not get them.
        if self._broken or number in self._told or not whole or not expected:
            self.abandon()
            return None
        self._told.add(number)
        tracker, source = self._tracker, slot is self._way.source
        slot.held[name] = tracker.revision
        relay = Relay(self._way.legs_of(slot), self._sizes, source, self._groups.patience)
        if not source:
            note(0)
            return self._update, relay
        found = tracker.update_from(self._held)
        assert found is not None
        note(found.sent)
        return found.placed(attachments), relay

    def heard(self, reply: Reply | None) -> None:
        """One of them answered, or died. If it did not get the contents, or could not pass them on,
        others will not.
        """
        if reply is None or reply.missed:
            self.abandon()

    def abandon(self) -> None:
        """Not all of them will get what they are waiting for."""
        if not self._broken:
            self._broken = True
            for ticket, _ in self._way.legs:
                self._groups.dissolve(ticket)


def post(
    groups: ReplicaGroups,
    way: RelayRoute | None,
    tracker: ModuleTracker,
    chunks: dict[int, ReplicaSlot],
) -> WeightRelay | None:
    """Begin to pass a model's new contents on; None if there are none, or the replicas hold
    different ones.

    Args:
        groups: The executor's groups.
        way: The way; None if there is none.
        tracker: The model.
        chunks: Who is to run its chunks, by their numbers.
    """
    if way is None:
        return None
    ours = {number: slot for number, slot in chunks.items() if slot in way.slots}
    held = {slot.held.get(tracker.id, 0) for slot in ours.values()}
    found = tracker.update_from(min(held)) if len(held) == 1 else None
    if found is None or not found.sent or not groups.wanted([*ours.values()], found.sent):
        return None
    return WeightRelay(groups, way, tracker, min(held), ours)


def size_of(tracker: ModuleTracker, module: Any) -> int:
    """The bytes of a model, before it was ever looked at."""
    return tracker.size or sum(tensor.nbytes for tensor in module.parameters())

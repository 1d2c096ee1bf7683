"""One forward's new contents, sent to one replica and passed on by it to the others.

  driver ──► source ──► the first replica of each other node ──► the others of that node

So the driver sends them once, and each node gets them once. A replica that does not get them says
so, and the driver sends them to it.
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
        source: The slot that gets the contents from the driver.
        legs: The groups, each with the member that has the contents first.
        slots: All slots on the way. Replicas that read the driver's memory are not among them: they
            need no relay.
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
    """The way to some slots; makes the groups that it needs. None if the driver sends to each slot
    itself.

    Args:
        groups: The executor's groups.
        slots: The slots that need the contents.
        size: An estimate of their bytes.
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
    """Passes the new contents of one model from replica to replica.

    Args:
        groups: The executor's groups.
        way: Their way.
        tracker: The model.
        held: The revision that all of them hold.
        chunks: The slot of each chunk, by the chunk's number; only slots on the way.
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
            slot: The slot that runs it.
            name: The model's name there.
            attachments: Where contents go.
            note: Called with the number of bytes that are sent.
        """
        if number not in self._chunks:
            return None
        whole = all(ticket.whole for ticket, _ in self._way.legs)
        expected = slot is self._chunks[number] and slot.held.get(name, 0) == self._held
        # A chunk that is sent for the second time did not get them.
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

    def take_answer(self, reply: Reply | None) -> None:
        """Take a member's answer, None if it died. If it did not get the contents, or could not
        pass them on, the relay is abandoned.
        """
        if reply is None or reply.missed:
            self.abandon()

    def abandon(self) -> None:
        """Dissolve the groups: not all members will get the contents."""
        if not self._broken:
            self._broken = True
            for ticket, _ in self._way.legs:
                self._groups.dissolve(ticket)


def begin_relay(
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
        chunks: The slot of each of its chunks, by the chunk's number.
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
    """The bytes of a model; an estimate if its tracker has not looked at it yet."""
    return tracker.size or sum(tensor.nbytes for tensor in module.parameters())

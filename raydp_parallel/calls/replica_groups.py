"""Which replicas form a group, so that they exchange tensors among themselves; and new weights that
are sent to one replica and passed on by it in groups. The driver's side of `collective`.

[Note: what a group may cost]
Time, and nothing else. Every member can answer without its group: it keeps what it gave into a sum
until the driver has the sum, and what did not arrive is sent again. So whether there is a group,
and whether it works, never decides whether results are right. A group ends with the first member
that does not do its part; the next call makes another, of the replicas that are ready then.

[Note: order]
The members of a group must begin its operations in the same order. The driver sends all messages of
a call under one lock, and each replica works through its messages in the order of their numbers. So
of two calls the same one is first everywhere, even if several threads make calls.

[Note: the way of weights]

  driver ──► source ──► the first replica of each other node ──► the others of that node

The driver sends them once, and each node gets them once. A replica that does not get them says so,
and the driver sends them to it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices import forks
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import collective, handshake
from raydp_parallel.transport.group_messages import GroupKind, HostStore, JoinGroup, Leg, Relay
from raydp_parallel.transport.links import Attachments, Link
from raydp_parallel.transport.message_bytes import pack, unseal
from raydp_parallel.transport.messages import Reply, StateUpdate

log = logging.getLogger("raydp_parallel")

_LEAST = 1 << 18
"""Bytes from which a group pays, by estimate; ``link="collective"`` uses it for any number."""

_JOIN = {GroupKind.GLOO: 15.0, GroupKind.NCCL: 60.0}
"""Seconds that members may take to find each other."""

_PATIENCE = 15.0
"""Seconds that a member waits for others. A member that dies is noticed at once; this is for a
network that fell silent. Doubles each time that it was too short."""

_LONGEST = 3600.0
"""The longest time in seconds that members wait."""

_SHARE_OF_TIMEOUT = 0.4
"""The part of `Options.call_timeout` that members may wait for each other, so that only a replica
that hangs itself exceeds the timeout.
"""

_PAUSE = 10.0
"""Seconds after a group could not be made until the next try. Doubles."""

_MOST = 8
"""Groups that are kept; calls with fewer chunks than replicas have groups of their own."""


class GroupTicket(NamedTuple):
    """A group, as the driver knows it.

    Attributes:
        name: Its name.
        kind: What its members exchange tensors by.
        slots: Its members, by rank.
        incarnations: Which of each slot's replicas it is.
    """

    name: str
    kind: GroupKind
    slots: tuple[ReplicaSlot, ...]
    incarnations: tuple[int, ...]

    def has(self, slot: ReplicaSlot) -> bool:
        """Whether the replica in a slot is a member."""
        members = zip(self.slots, self.incarnations, strict=True)
        return slot.ready and (slot, slot.incarnation) in members

    @property
    def whole(self) -> bool:
        """Whether all members are alive."""
        return all(map(self.has, self.slots))

    def rank(self, slot: ReplicaSlot) -> int:
        """The number of a slot's member."""
        return self.slots.index(slot)


class ReplicaGroups:
    """The groups of an executor's replicas.

    Args:
        replica_set: The replicas.

    Attributes:
        late: Models, by id. Their gradients are summed only after their backward is over.
        trouble: Why the last group could not be made; empty if it could.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        self.late: set[int] = set()
        self.trouble = ""
        self._replica_set = replica_set
        self._known: dict[tuple[GroupKind, tuple[ReplicaSlot, ...]], GroupTicket] = {}
        self._guard = threading.Lock()
        self._making = threading.Lock()
        self._numbers = itertools.count(1)
        self._not_before = 0.0
        self._pause = _PAUSE
        self._wait = _PATIENCE
        self._told = self._no_nccl = False
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Make the locks anew: the thread that held one is not in the child."""
        self._guard, self._making = threading.Lock(), threading.Lock()

    @property
    def patience(self) -> float:
        """Seconds that members may wait for each other."""
        return self.share(self._wait)

    def share(self, seconds: float) -> float:
        """So many seconds, or what `Options.call_timeout` allows."""
        limit = self._replica_set.options.call_timeout
        return seconds if limit is None else min(seconds, _SHARE_OF_TIMEOUT * limit)

    def kind(self, slots: Sequence[ReplicaSlot]) -> GroupKind:
        """What these replicas can sum by. NCCL refuses a GPU that comes twice: kernels on it would
        wait for each other.
        """
        if "nccl" not in self._replica_set.options.gpu_paths:
            return GroupKind.GLOO
        hellos = [slot.hello for slot in slots if slot.hello is not None]
        gpus = {hello.gpu_uuid for hello in hellos if hello.gpu_uuid and hello.device != "cpu"}
        return GroupKind.NCCL if len(gpus) == len(slots) and not self._no_nccl else GroupKind.GLOO

    def wanted(
        self, slots: Sequence[ReplicaSlot], size: int, kind: GroupKind | None = GroupKind.GLOO
    ) -> bool:
        """Whether so many bytes are to go by a group of these, if there can be one.

        Args:
            slots: The slots of its members.
            size: The bytes.
            kind: What it would be made of, None whatever they can.
        """
        options = self._replica_set.options
        if not self.can_be(slots) or (size < _LEAST and options.link != "collective"):
            return False
        if options.link == "collective":
            return True
        nodes = {slot.hello.node for slot in slots if slot.hello is not None}
        if len(nodes) > 1:
            return handshake.far_lines()  # members' connections are as plain to read as those
        return (kind or self.kind(slots)) is GroupKind.NCCL

    def can_be(self, slots: Sequence[ReplicaSlot]) -> bool:
        """Whether there can be a group of these."""
        options = self._replica_set.options
        if options.in_process or options.link not in ("auto", "collective") or len(slots) < 2:
            return False
        return len({*slots}) == len(slots) and all(slot.ready for slot in slots)

    def find(
        self,
        slots: Sequence[ReplicaSlot],
        size: int,
        kind: GroupKind = GroupKind.GLOO,
        always: bool = False,
        again: bool = False,
    ) -> GroupTicket | None:
        """The group of some slots, made if need be; None if they work without one.

        Args:
            slots: The slots of its members.
            size: How many bytes it is for.
            kind: What it is made of.
            always: Whether it is known that one is wanted.
            again: Whether it is tried also shortly after a failure, because the call cannot do
                without.
        """
        if not always and not self.wanted(slots, size, kind):
            return None
        members = tuple(sorted(slots, key=_order))
        known = self._known.get((kind, members))
        if known is not None and known.whole:
            return known
        if time.monotonic() < self._not_before and not again:
            return None
        with self._making:
            known = self._known.get((kind, members))
            return known if known is not None and known.whole else self._make(kind, members)

    def near(self, slots: Sequence[ReplicaSlot]) -> ReplicaSlot:
        """The slot that is cheapest to reach: one on the driver's node, else the first."""
        return min(slots, key=lambda slot: (not getattr(slot.client, "near", False), _order(slot)))

    def dissolve(self, ticket: GroupTicket, waited: float = 0.0) -> None:
        """End a group that is of no use any more. Members that wait in it are told so.

        Args:
            ticket: The group.
            waited: Seconds that members have waited for others. If no member died, the patience may
                have been too short, and is doubled.
        """
        with self._guard:
            if self._known.get((ticket.kind, ticket.slots)) is not ticket:
                return
            del self._known[ticket.kind, ticket.slots]
        if waited >= self._wait and ticket.whole:
            self._wait = min(2 * self._wait, _LONGEST)
        self._tell_to_leave(ticket)

    def _tell_to_leave(self, ticket: GroupTicket) -> None:
        """Let members stop waiting for others in a group. An ordinary message would wait behind the
        call that waits.
        """
        for slot in ticket.slots:
            if ticket.has(slot):
                self._replica_set.backend.leave(slot.client, [ticket.name])

    def _make(self, kind: GroupKind, members: tuple[ReplicaSlot, ...]) -> GroupTicket | None:
        name = f"{os.getpid()}-{id(self):x}-{next(self._numbers)}"
        ticket = GroupTicket(name, kind, members, tuple(slot.incarnation for slot in members))
        try:
            trouble = self._gather(ticket, min(_JOIN[kind], self.share(_JOIN[kind])))
        except BaseException:  # Ctrl-C, for one
            self._tell_to_leave(ticket)
            raise
        self.trouble = trouble
        if trouble and not ticket.whole:  # of the replicas that are there then it works
            self._tell_to_leave(ticket)
            return None
        if trouble:
            # All members are alive, so that NCCL itself does not work here.
            self._no_nccl |= kind is GroupKind.NCCL
            self._not_before = time.monotonic() + self._pause
            self._pause *= 2
            self._tell_to_leave(ticket)
            self._tell(members, trouble)
            return None
        self._pause = _PAUSE
        with self._guard:
            self._known[kind, members] = ticket
            gone = self._thin_out()
        for old in gone:
            self._tell_to_leave(old)
        return ticket

    def _thin_out(self) -> list[GroupTicket]:
        """Let go of groups that are not whole any more, and of the oldest if there are many."""
        gone = [key for key, known in self._known.items() if not known.whole]
        gone += [key for key in self._known if key not in gone][:-_MOST]
        return [self._known.pop(key) for key in gone]

    def _gather(self, ticket: GroupTicket, patience: float) -> str:
        """Let all members join; returns what went wrong."""
        ((store, death),) = self._ask(ticket, ticket.slots[:1], [HostStore(ticket.name)])
        if death:
            return death
        size = len(ticket.slots)
        first = JoinGroup(
            group=ticket.name,
            rank=0,
            size=size,
            store=tuple(store),
            patience=patience,
            kind=ticket.kind,
        )
        requests = [first._replace(rank=rank) for rank in range(size)]
        found = self._ask(ticket, ticket.slots, requests)
        return next((death or answer for answer, death in found if death or answer), "")

    def _ask(
        self, ticket: GroupTicket, slots: Sequence[ReplicaSlot], requests: Sequence[Any]
    ) -> list[tuple[Any, str]]:
        """What each replica answers, or what went wrong. After the first failure the others stop
        waiting.
        """
        backend = self._replica_set.backend
        with self._replica_set.lock:
            self._replica_set.check_open()
            if not ticket.whole:
                return [("", "a replica died")] * len(slots)
            headers = [pack(request) for request in requests]
            calls = [
                backend.submit(s.client, "group", header, ())
                for s, header in zip(slots, headers, strict=True)
            ]
        found: dict[int, tuple[Any, str]] = {}

        def take(number: int, answer: Any) -> None:
            if isinstance(answer, Death):
                slot, incarnation = slots[number], ticket.incarnations[number]
                self._replica_set.mark_dead(slot, incarnation, "group", answer)
            found[number] = _understood(answer, backend.link)
            said, trouble = found[number]
            if trouble or (isinstance(said, str) and said):
                self._tell_to_leave(ticket)

        backend.collect(calls, take)
        return [found[number] for number in range(len(calls))]

    def _tell(self, members: Sequence[ReplicaSlot], trouble: str) -> None:
        level = logging.INFO if self._told else logging.WARNING
        self._told = True
        names = ", ".join(str(slot.index) for slot in members)
        log.log(
            level,
            "replicas %s could not form a group (%s): gradients and weights go through the "
            "driver, which is slower; the next try is in %g s at the earliest",
            names,
            trouble,
            self._not_before - time.monotonic(),
        )


def _understood(answer: Any, link: Link) -> tuple[Any, str]:
    """What a replica answered, or what went wrong."""
    if isinstance(answer, Death):
        return "", answer.cause
    said, _ = unseal(answer, link)
    failure = getattr(said, "failure", None)
    return said, failure.text.strip().splitlines()[-1] if failure is not None else ""


def _order(slot: ReplicaSlot) -> tuple[str, int]:
    """Sorts the members of a group by node: sums go from one member to the next, if possible
    within a node.
    """
    return slot.hello.node if slot.hello is not None else "", slot.index


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
        expected = slot is self._chunks[number] and slot.contents.held.get(name, 0) == self._held
        # A chunk that is sent for the second time did not get them.
        if self._broken or number in self._told or not whole or not expected:
            self.abandon()
            return None
        self._told.add(number)
        tracker, source = self._tracker, slot is self._way.source
        slot.contents.held[name] = tracker.revision
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
    way: RelayRoute,
    tracker: ModuleTracker,
    chunks: dict[int, ReplicaSlot],
) -> WeightRelay | None:
    """Begin to pass a model's new contents on; None if there are none, or the replicas hold
    different ones.

    Args:
        groups: The executor's groups.
        way: The way.
        tracker: The model.
        chunks: The slot of each of its chunks, by the chunk's number.
    """
    ours = {number: slot for number, slot in chunks.items() if slot in way.slots}
    held = {slot.contents.held.get(tracker.id, 0) for slot in ours.values()}
    found = tracker.update_from(min(held)) if len(held) == 1 else None
    if found is None or not found.sent or not groups.wanted([*ours.values()], found.sent):
        return None
    return WeightRelay(groups, way, tracker, min(held), ours)


def size_of(tracker: ModuleTracker, module: Any) -> int:
    """The bytes of a model; an estimate if its tracker has not looked at it yet."""
    return tracker.structure.size or sum(tensor.nbytes for tensor in module.parameters())

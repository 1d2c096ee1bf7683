"""One loop for all calls: send, and take the answers. A death is an answer, too: the chunk runs
again on another replica.

The caller holds the executor's lock. Answers lie in windows: they are valid until the next request
to the same replica.

[Note: a call is data]
A call is first prepared for a replica, which may take other calls: of a source of weights, or of
forwards that run again. Only when all chunks are prepared are the requests made, of what is known
here, and sent: from then on the chunks may wait for each other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.batch.containers import mapped
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.clients import OWN, Gone
from raydp_parallel.cluster.replica_set import ReplicaSet, ReplicaSlot
from raydp_parallel.driver.gradients import Sums
from raydp_parallel.errors import GraphLost, ReplicaDied, StateChanged
from raydp_parallel.replica import exceptions
from raydp_parallel.state.mirror import Mark, Master, Way
from raydp_parallel.wire.group import close_store, open_store
from raydp_parallel.wire.messages import (
    Answer,
    BackwardRequest,
    Failure,
    Forget,
    ForwardRequest,
    ResumeRequest,
    Seat,
    StateUpdate,
)

_CPU = torch.device("cpu")
_LOOK = 0.05
"""Seconds between two looks whether the members of a group still live."""
_names = itertools.count(1)
LACKING = Answer(lacking=True)
"""The answer of a replica that is gone: it lacks everything."""
_MOST_DEATHS = 6
_MOST_ALIKE = 2
"""Deaths of one chunk after which it is taken for their cause: of all, and by one cause of its own.
"""


@dataclass(slots=True, eq=False)
class RemoteGraph:
    """A graph in a replica."""

    key: int  # its number there
    slot: ReplicaSlot | None = None
    life: int = 0  # that of the slot's replica
    recipe: list[Call] | None = None  # the calls that make it again; None if it cannot be made
    remade: bool = False  # these are on their way, and need no other

    def on(self, slot: ReplicaSlot) -> bool:
        """Tell if a slot's replica has it, or is about to."""
        return self.remade or (self.slot is slot and self.life == slot.life and slot.ready)

    def remade_by(self, slot: ReplicaSlot, phase: str) -> list[Call]:
        """Return the calls that make it again."""
        if self.recipe is None:
            raise GraphLost(
                f"{phase}: {slot} lost its graph, because its process ended, and the graph cannot "
                "be made again; run forward again, and all forwards since zero_grad() where their "
                "gradients are added up"
            )
        return self.recipe

    def move(self, slot: ReplicaSlot | None) -> None:
        """Note which slot's replica makes it. One that has it elsewhere frees it, with its next
        message.
        """
        last = self.slot
        if last is not None and last is not slot and last.life == self.life:
            last.forget.append(self.key)
        self.slot, self.life = slot, -1 if slot is None else slot.life

    def drop(self) -> None:
        """Let the replica free it."""
        self.move(None)
        self.recipe = None


@dataclass(eq=False)
class Call:
    """One request, for whatever replica gets it. See [Note: a call is data]."""

    slot: ReplicaSlot  # that it is for
    phase: str  # the kind of call, for messages
    message: object = None  # the request, if it is the same for all replicas
    master: Master | None = None
    needs: Sequence[RemoteGraph] = ()  # graphs that it needs, and what it adds to
    # Calls that make these again, also when torch has freed them.
    recipes: dict[RemoteGraph, list[Call] | None] = field(default_factory=dict)
    makes: RemoteGraph | None = None
    # The rows of the chunk, and the class of the module that runs forward, for statistics.
    work: tuple[int, str] = (0, "")
    mark: Mark | None = None  # of a backward: the model's tensors after its forward

    def prepare(self, slot: ReplicaSlot) -> None:
        """See to what the request takes for granted of a slot's replica."""

    def request(self, slot: ReplicaSlot, attempt: int) -> object:
        """Make the request. Attempts after the first, which is 0, do without others' help."""
        return self.message

    def changed(self) -> str | None:
        """Say what has changed since it ran, so that it cannot run again; None if nothing has."""
        return None

    def refuse_changed(self) -> None:
        """Raise an exception if it cannot run again."""
        what = self.changed()
        if what is not None:
            raise StateChanged(
                f"{self.phase}: what a replica held is lost, with it or by a backward that failed. "
                f"It cannot be made again, because {what} since the forward; run forward again"
            )

    def explain(self, failure: Failure) -> Failure:
        """Say more than the replica could, or raise a better error than its."""
        return failure


@dataclass(eq=False)
class Pending:
    """A request to a replica."""

    slot: ReplicaSlot
    call: Call
    life: int
    arrived: bool = False  # the replica got it
    answer: Answer | None = None  # if it had to be taken before somebody asked for it
    gone: str | None = None  # the cause of the replica's end, if that came first

    @property
    def lives(self) -> bool:
        """Tell if the replica that it was sent to still lives, and owes the answer or gave it."""
        slot = self.slot
        here = slot.ready and slot.life == self.life and slot.client.alive()
        return here and (self.answer is not None or slot.client.unsent == 0)


def copied(value: object) -> Any:
    """Copy the tensors of an answer, so that it outlives the next request."""
    return mapped(value, Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


@dataclass
class Flight:
    """The chunks of one call on their way."""

    calls: Sequence[Call]  # one for each chunk
    grouped: bool = False  # replicas exchange tensors meanwhile: they may wait for each other
    together: bool = False  # layers of the module do, so that no chunk can run again alone
    taking: Sums | None = None  # adds gradients as they come; answers have none then
    on: Sequence[ReplicaSlot] = ()  # whose replicas run the calls, where no others may
    attempt: int = 0
    # How members of a group are told not to wait, and after which seconds; by default all groups
    # are closed, after those that a call may take.
    leave: Callable[[], None] | None = None
    limit: float | None = None
    sent: dict[int, Pending] = field(default_factory=dict)  # in this attempt, by chunk
    answers: dict[int, Answer] = field(default_factory=dict)  # by chunk
    taken: int = 0  # how many gradients were added
    # The causes of deaths that may be the chunk's fault, by chunk.
    deaths: dict[int, list[str]] = field(default_factory=dict)


class Group:
    """A group of some replicas, each in one life.

    Args:
        slots: The slots that have them.
        seat: The place of one, but for what the group knows.
    """

    def __init__(self, slots: Sequence[ReplicaSlot], seat: Seat) -> None:
        host = None if all(slot.hello.near for slot in slots) else ray_api.own_address()
        self._store, self.address = open_store(len(slots), host)
        name = f"group {next(_names)}"
        links = [slot.client.link if slot.life else "" for slot in slots]
        root = links.index("ipc") if "ipc" in links else 0
        self.nccl = seat.nccl
        self.seats = [seat._replace(name=name, rank=i, root=root) for i in range(len(slots))]

    def close(self) -> None:
        """Let the members leave."""
        close_store(self._store)
        self._store = None


class Dispatcher:
    """Runs chunks on the replicas of a set."""

    def __init__(self, replica_set: ReplicaSet) -> None:
        self.replica_set, self.totals = replica_set, replica_set.recorder.totals
        self.groups: dict[object, Group] = {}  # in which they exchange tensors, by their members
        self.failed_joins = 0  # how often they could not join one that uses NCCL
        self.owed: dict[ReplicaSlot, Pending] = {}  # requests without an answer, of each the last

    def start(self, flight: Flight) -> Flight:
        """Send the chunks that have no answer, as far as there are replicas for them."""
        flight.sent = {}
        prepared: dict[ReplicaSlot, tuple[int, int]] = {}  # chunk and life
        try:
            for i, call in enumerate(flight.calls):
                if i in flight.answers:
                    continue
                if flight.attempt:  # while batches of `map` are in flight, the program goes on
                    call.refuse_changed()
                slot = flight.on[i] if flight.on else self._choose(call, prepared)
                if slot in prepared:
                    continue  # its turn comes: a window holds one answer
                prepared[slot] = i, slot.life
                for graph in call.needs:
                    if not graph.on(slot):
                        self.remake(graph, slot, call.phase, call.recipes.get(graph))
                call.prepare(slot)
            for slot, (i, life) in prepared.items():  # see [Note: a call is data]
                self.send(slot, flight, i, life)
        except BaseException:  # some may have been sent, and wait for the others
            if flight.grouped:
                (flight.leave or self.close_groups)()
            raise
        return flight

    def _choose(self, call: Call, busy: Collection[ReplicaSlot]) -> ReplicaSlot:
        """Choose the slot whose replica runs a call."""
        slot = call.slot
        for graph in call.needs:
            if graph.slot is not None and graph.on(graph.slot):
                slot = graph.slot  # also one that stood in for its own
        # A dead replica's chunk goes to another one, which may have a chunk of its own.
        return self.replica_set.choose(slot, busy)

    def finish(self, flight: Flight) -> list[Answer]:
        """Wait for all answers. Chunks of dead replicas run again; where no other may run them, the
        answer is `LACKING`.
        """
        answers, taking = flight.answers, flight.taking
        chunks = range(len(flight.calls))
        try:
            while True:
                if flight.grouped:
                    self._wait_or_leave(flight)
                # Answers are taken in the order of chunks; the slowest one decides anyway.
                died = ""
                for i in [*flight.sent]:
                    pending = flight.sent[i]
                    answer = self.receive(pending)
                    if answer is not None and self._may_count(answer, pending):
                        answers[i] = answer
                    elif answer is None and not flight.on:
                        died = self._died(flight, i, pending)
                    while taking is not None and flight.taken in answers:
                        taking.take(flight.taken, answers[flight.taken])
                        # What it still has would hold its memory.
                        rest = answers[flight.taken]._replace(rows=())
                        answers[flight.taken] = copied(rest) if rest.writes.tags else rest
                        flight.taken += 1
                    if not flight.on:  # the answer would be held for as long
                        del flight.sent[i], pending, answer
                if flight.on:
                    return [answers.get(i, LACKING) for i in chunks]
                if died and flight.together:
                    raise ReplicaDied(
                        f"{died}. The chunks of a call with synchronised batch norm cannot run "
                        "again alone: repeat the step"
                    )
                if len(answers) == len(chunks):
                    return [answers[i] for i in chunks]
                if flight.grouped:
                    self.close_groups()
                # The windows that hold earlier answers are about to be used again.
                answers.update({i: copied(answer) for i, answer in answers.items()})
                if taking is not None:
                    taking.copy_lent()
                flight.attempt += 1
                self.start(flight)
        except BaseException:  # some may wait for others
            if flight.grouped and not flight.on:
                self.close_groups()
            raise

    def effects(self, flight: Flight, answers: Sequence[Answer]) -> None:
        """Warn of what replicas warned, and raise the exception of the lowest chunk that failed
        (row A5); one of a chunk that only waited for another in vain comes last.
        """
        # Also where a chunk raises: upstream's replica 0 wrote to the master itself (row R6).
        for call, answer in zip(flight.calls, answers, strict=True):
            if call.master is not None and answer.writes.tags:  # [8] effects
                call.master.write_back(answer.writes, call.mark)
        failed = []
        for call, answer in zip(flight.calls, answers, strict=True):
            exceptions.warn_again(answer.warnings)
            if answer.failure is not None:
                failed.append((answer.failure, call))
        if failed and flight.grouped:
            self.close_groups()  # who failed has left it
        failed.sort(key=lambda pair: pair[0].name.endswith("Abandoned"))
        for failure, call in failed:
            exceptions.reraise(call.explain(failure), str(call.slot))

    def close_groups(self) -> None:
        """Make other groups next time: a member has left one, and all others leave theirs now."""
        while self.groups:
            self.groups.popitem()[1].close()

    def _wait_or_leave(self, flight: Flight) -> None:
        """Wait until the members of a group have answered. If one of them dies, or was not reached,
        or they take longer than they may, let the others leave: they may wait for it.
        """
        limit = flight.limit or self.replica_set.options.call_timeout or math.inf
        until = time.monotonic() + limit
        sent = [flight.sent.get(i) for i in range(len(flight.calls)) if i not in flight.answers]
        waited = [one for one in sent if one is not None and one.answer is None and one.lives]
        while not all([one.slot.client.has_answer(_LOOK / len(waited)) for one in waited]):
            lives = [one is not None and one.lives for one in sent]
            if not all(lives) or time.monotonic() > until:
                (flight.leave or self.close_groups)()
                return

    def _died(self, flight: Flight, chunk: int, pending: Pending) -> str:
        """Note the death of a chunk's replica, and say it. Too many of them raise."""
        phase, cause = pending.call.phase, str(pending.gone)
        own, causes = OWN.match(cause), flight.deaths.setdefault(chunk, [])
        # One that had worked, and is gone, did not die of this chunk.
        if own or pending.arrived or not pending.slot.answered:
            causes.append(cause.partition(";")[0])
        deaths = causes.count(causes[-1]) if own else len(causes)
        if deaths >= (_MOST_ALIKE if own else _MOST_DEATHS):
            raise ReplicaDied(
                f"{deaths} replicas died of chunk {chunk} in {phase}, one after the other, the "
                f"last of them: {cause}. It seems that the chunk ends its process, or takes longer "
                "than it may"
            )
        if pending.arrived:
            self.replica_set.recorder.count(pending.slot.index, "replays")
        return f"{pending.slot} died in {phase}: {pending.gone}"

    def _may_count(self, answer: Answer, pending: Pending) -> bool:
        """Tell if an answer is one; otherwise the call is to be made again."""
        slot = pending.slot
        if answer.lacking and answer.failure is None:
            return False
        if answer.failure is not None and answer.failure.name.endswith("SourceMismatch"):
            # A new process loads the driver's sources.
            if not slot.answered:
                exceptions.reraise(answer.failure, str(slot))
            self.replica_set.lost(slot, pending.life, "import", "its modules are not the driver's")
            return False
        if pending.call.phase != "join":  # in which nothing is imported
            slot.answered.add(pending.call.phase)
        return True

    def send(self, slot: ReplicaSlot, flight: Flight, at: int, life: int) -> Pending:
        """Send a call to a slot, prepared for a life of it. If its replica is gone, what is
        returned says so.
        """
        self.settle(slot)
        call = flight.calls[at]
        pending = Pending(slot, call, life)
        if not slot.ready or life != slot.life:
            pending.gone, flight.sent[at] = slot.cause, pending
            return pending
        request = call.request(slot, flight.attempt)
        forget: list[int] = []
        if isinstance(request, (ForwardRequest, BackwardRequest, Forget)):
            forget = [*slot.forget]  # finalizers of any thread add to them meanwhile
            if forget:
                request = request._replace(forget=tuple(forget))
        try:
            self.owed[slot] = flight.sent[at] = pending
            if call.makes is not None:  # from here on it is to be freed there: Ctrl-C may come
                call.makes.move(slot)
            slot.client.send(request, self._limit(pending))  # [3] request
        except Gone as gone:
            self._lost(pending, str(gone))
            return pending
        except BaseException:
            if slot.client.unsent is None:  # the replica knows nothing of it
                self.owed.pop(slot, None)
                flight.sent.pop(at, None)
                if call.makes is not None:
                    call.makes.life = -1
            raise
        del slot.forget[: len(forget)]
        pending.arrived = True
        if isinstance(request, (ForwardRequest, ResumeRequest)) and request.update is not None:
            slot.revisions[request.model] = request.update.revision
            self.totals.state_sends += 1
            self.totals.state_bytes += request.update.size
        self.replica_set.recorder.called(slot.index)
        return pending

    def _lost(self, pending: Pending, cause: str) -> None:
        """Note that the replica of a request is gone."""
        slot = pending.slot
        self.replica_set.lost(slot, pending.life, pending.call.phase, cause)
        pending.gone = cause
        if self.owed.get(slot) is pending:  # which would hold its module
            del self.owed[slot]

    def _limit(self, pending: Pending) -> float | None:
        """Return the seconds that a call may take. As those of a start they hold for a process that
        has not answered yet, and for its first optimizer: imports take place there.
        """
        options, known = self.replica_set.options, pending.slot.answered
        if pending.call.phase == "resume":
            known = known & {"resume"}
        least = 0.0 if known else options.placement_timeout
        return options.call_timeout and max(options.call_timeout, least)

    def receive(self, pending: Pending) -> Answer | None:
        """Take the answer to a call; returns None if the replica died."""
        if pending.answer is not None or pending.gone is not None:
            return pending.answer
        slot, call, client = pending.slot, pending.call, pending.slot.client
        device = _CPU if call.master is None else call.master.device
        try:
            if slot.life != pending.life:
                raise Gone("it was replaced")
            if client.unsent != 0:  # see [Note: crash-only]
                raise Gone("an exception, such as Ctrl-C, came within a message")
            pending.answer = answer = client.receive(self._limit(pending), device)
        except Gone as gone:
            self._lost(pending, str(gone))
            return None
        self.owed.pop(slot, None)
        if answer.lacking and call.master is not None:  # others it may have alone
            slot.revisions.pop(call.master.number, None)
        self.replica_set.recorder.answered(slot.index, answer.busy, client.traffic, call.work)
        client.traffic[:] = 0, 0
        return pending.answer

    def ask(self, call: Call, slot: ReplicaSlot | None = None, attempt: int = 0) -> Answer | None:
        """Call the replica of a slot, by default the call's own, and no other; returns None if it
        died, or lacks what the call takes for granted.
        """
        slot = slot or call.slot
        (answer,) = self.finish(self.start(Flight([call], on=[slot], attempt=attempt)))
        if answer.failure is not None:
            exceptions.reraise(answer.failure, str(slot))
        return None if answer.lacking else answer

    def settle(self, slot: ReplicaSlot) -> None:
        """Take an answer that nobody has waited for yet: of a call that was interrupted, or of one
        that is still to be asked for.
        """
        pending = self.owed.get(slot)
        if pending is not None and (answer := self.receive(pending)) is not None:
            pending.answer = copied(answer)

    def update(
        self, master: Master, slot: ReplicaSlot, weights: dict[int, Tensor] | None = None
    ) -> StateUpdate | None:
        """Collect what a slot's replica lacks of a model, with weights in the place of its own."""
        self.settle(slot)  # it may say that it lacks all
        way: Way = "sent"
        if slot.hello.near and (slot.client.link != "ipc" or master.device.type == "cpu"):
            way = "mapped" if slot.hello.device == "cpu" else "shared"
        if master.is_stale(way):  # see [Note: who reads a run]
            for other in self.replica_set.ready_slots():
                self.settle(other)
        return master.update_from(slot.revisions.get(master.number, 0), way, weights)

    def remake(
        self, graph: RemoteGraph, slot: ReplicaSlot, phase: str, recipe: list[Call] | None = None
    ) -> None:
        """Make a graph again whose replica died, or what a chunk had kept there. If this one dies,
        too, whoever needs it will see.
        """
        for call in recipe or graph.remade_by(slot, phase):
            freed = [one for one in call.needs if one.slot is None]  # by torch
            answer, graph.remade = None, True
            try:
                while slot.ready and answer is None:  # it may lack something
                    answer = self.ask(call, slot, 1)
            finally:
                graph.remade = False
                for one in freed:
                    one.drop()
                if answer is None:
                    graph.life = -1  # the replica has none
            if answer is None:
                return
            self.replica_set.recorder.count(slot.index, "replays")
        graph.slot, graph.life = slot, slot.life

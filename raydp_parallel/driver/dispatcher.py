"""One loop for all calls: send, look meanwhile, take the answers. A death is an answer, too: the
chunk runs again on another replica.

The caller holds the executor's lock. Answers lie in windows: they are valid until the next request
to the same replica.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from raydp_parallel.cluster.clients import Gone
from raydp_parallel.cluster.replica_set import ReplicaSet, ReplicaSlot
from raydp_parallel.errors import GraphLost, ReplicaDied
from raydp_parallel.replica import exceptions
from raydp_parallel.wire.codec import Parcel, Row
from raydp_parallel.wire.messages import Answer, ForwardRequest

_CPU = torch.device("cpu")
_MISMATCH = "SourceMismatch"
_LOOK = 0.05
"""Seconds between two looks whether the members of a group still live."""
_MOST_DEATHS = 6
_MOST_SILENT = 2
"""Deaths of one chunk, and calls without an answer, after which it is taken for their cause."""


class RemoteGraph:
    """A graph in a replica.

    Attributes:
        key: Its key there.
        recipe: Gives the calls that make it again, for a slot; None if it cannot be made again.
    """

    __slots__ = ("key", "life", "recipe", "slot")

    def __init__(self, key: int) -> None:
        self.key = key
        self.slot: ReplicaSlot | None = None
        self.life = 0
        self.recipe: Recipe | None = None

    def on(self, slot: ReplicaSlot) -> bool:
        """Tell if a slot's replica has it."""
        return self.slot is slot and self.life == slot.life and slot.ready

    @property
    def lives(self) -> bool:
        """Tell if some replica has it."""
        return self.slot is not None and self.on(self.slot)

    def drop(self) -> None:
        """Let the replica free it with the next message."""
        if self.slot is not None and self.slot.life == self.life:
            self.slot.forget.append(self.key)
        self.slot = self.recipe = None


Recipe = Callable[[ReplicaSlot], "Iterable[ChunkCall]"]
"""Gives the calls that make something again, one after the other, for the slot where they go."""


class ChunkCall(NamedTuple):
    """One chunk's work.

    Attributes:
        slot: The slot that it is for.
        phase: The kind of call, for messages.
        request: Makes the request for the replica that does it.
        model: The number of its model.
        needs: Graphs that it needs, and what it adds to.
        makes: The graph that it makes.
        together: True if it exchanges tensors with the other chunks, so that it cannot run again
            alone.
        rows: Rows of the chunk, for statistics.
        name: The class of the module that runs forward, for statistics.
        home: The driver's device, to which the answer's tensors go.
    """

    slot: ReplicaSlot
    phase: str
    request: Callable[[ReplicaSlot], Any]
    model: int
    needs: Sequence[RemoteGraph] = ()
    makes: RemoteGraph | None = None
    together: bool = False
    rows: int = 0
    name: str = ""
    home: torch.device = _CPU


class Pending:
    """A request that was sent.

    Attributes:
        answer: The answer, if it had to be taken before somebody asked for it.
        gone: The cause of the replica's end, if that came first.
    """

    def __init__(self, slot: ReplicaSlot, call: ChunkCall) -> None:
        self.slot = slot
        self.call = call
        self.life = slot.life
        self.answer: Answer | None = None
        self.gone: str | None = None
        self.before = (0, 0)

    @property
    def lives(self) -> bool:
        """Tell if the replica that it was sent to still lives."""
        slot = self.slot
        return slot.ready and slot.life == self.life and bool(slot.client.alive())


def own(answer: Answer) -> Answer:
    """Copy an answer's tensors, so that it outlives the next request."""
    value = answer.value
    if isinstance(value, Parcel):
        value = Parcel(value.skeleton, [_own(t) for t in value.tensors])
    elif isinstance(value, Row):
        value = _own_row(value)
    elif isinstance(value, tuple):
        value = tuple([_own_row(row) for row in value])
    writes = answer.writes
    return answer._replace(
        value=value, writes=writes._replace(values=Row(map(_own, writes.values)))
    )


def _own_row(row: Row) -> Row:
    return Row([None if t is None else _own(t) for t in row])


def _own(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


class Taking(Protocol):
    """Takes values of answers in the order of chunks, as they come."""

    def take(self, at: int, answer: Answer) -> None:
        """Take a value, in memory that is only lent."""

    def own(self) -> None:
        """Copy what is only lent: replicas are about to write there."""


class Dispatcher:
    """Runs chunks on the replicas of a set.

    Args:
        replica_set: The replicas.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        self._set = replica_set

    def run(
        self,
        calls: Sequence[ChunkCall],
        meanwhile: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
        taking: Taking | None = None,
    ) -> list[Answer]:
        """Run all calls, and wait for all answers.

        Args:
            calls: One call for each chunk.
            meanwhile: Called once while replicas run.
            leave: Lets replicas leave the group in which they exchange tensors; None without one.
            taking: Takes the values of answers as they come; those returned have none then.
        """
        answers: dict[int, Answer] = {}
        deaths = [0] * len(calls)
        todo = list(range(len(calls)))
        taken = 0
        while todo:
            sent: dict[int, Pending] = {}
            busy: dict[ReplicaSlot, int] = {}
            # The windows that hold earlier answers are about to be used again.
            answers = {i: own(answer) for i, answer in answers.items()}
            if taking is not None:
                taking.own()
            for i in todo:
                # A dead replica's chunk goes to another one, which may have a chunk of its own.
                slot = self._place(calls[i], busy)
                if slot in busy:
                    continue  # its turn comes: a window holds one answer
                sent[i] = self.send(slot, calls[i])
                busy[slot] = 1
            if meanwhile is not None:  # replicas compute now, and this process has time
                meanwhile()
                meanwhile = None
            if leave is not None:
                self.watch([sent.get(i) for i in todo], leave, self._set.options.call_timeout)
            # Answers are taken in the order of chunks; the slowest one decides anyway.
            died = ""
            for i, pending in sent.items():
                early = pending.gone is not None  # it did not get the chunk
                answer = self.receive(pending)
                if answer is None:
                    died = f"{pending.slot} died in {calls[i].phase}: {pending.gone}"
                    silent = pending.gone is not None and pending.gone.startswith("no answer")
                    # One that had worked, and is gone, did not die of this chunk.
                    deaths[i] += silent or not early or not pending.slot.answered
                    if deaths[i] >= (_MOST_SILENT if silent else _MOST_DEATHS):
                        hint = "takes longer than it may" if silent else "ends its process"
                        raise ReplicaDied(
                            f"{deaths[i]} replicas died of chunk {i} in {calls[i].phase}, one "
                            f"after the other, the last of them: {pending.gone}. It seems that the "
                            f"chunk {hint}"
                        )
                    if not early:
                        self._set.recorder.replayed(pending.slot.index)
                elif self._may_count(answer, pending):
                    answers[i] = answer
                while taking is not None and taken in answers:
                    taking.take(taken, answers[taken])
                    answers[taken] = answers[taken]._replace(value=None)
                    taken += 1
            if died and calls[0].together:
                raise ReplicaDied(
                    f"{died}. The chunks of a call with synchronised batch norm cannot run again "
                    "alone: repeat the step"
                )
            todo = [i for i in todo if i not in answers]
            if todo and leave is not None:
                leave()
        return [answers[i] for i in range(len(calls))]

    def watch(
        self, sent: Sequence[Pending | None], leave: Callable[[], None], seconds: float | None
    ) -> None:
        """Wait until the members of a group have answered. If one of them dies, or was not reached,
        or they take longer, let the others leave: they may wait for it.
        """
        until = time.monotonic() + (seconds or math.inf)
        waited = [one for one in sent if one is not None and one.answer is None and one.lives]
        while not all([one.slot.client.ready(_LOOK / len(waited)) for one in waited]):
            lives = [one is not None and one.lives for one in sent]
            if not all(lives) or time.monotonic() > until:
                leave()
                return

    def _may_count(self, answer: Answer, pending: Pending) -> bool:
        """Tell if an answer is one; otherwise the call is to be made again."""
        slot = pending.slot
        if answer.lacking:
            slot.revisions.pop(pending.call.model, None)
            if answer.failure is None:
                return False
        if answer.failure is not None and answer.failure.name.endswith(_MISMATCH):
            # A new process loads the driver's sources.
            if not slot.answered:
                exceptions.reraise(answer.failure, str(slot))
            self._set.lost(slot, pending.life, "import", "its modules are not the driver's")
            return False
        slot.answered = True
        return True

    def send(self, slot: ReplicaSlot, call: ChunkCall) -> Pending:
        """Send a call to a slot. If its replica is gone, what is returned says so."""
        self.settle(slot)
        request = call.request(slot) if slot.ready else None
        pending = Pending(slot, call)
        if not slot.ready:  # what the request needed may have ended the process
            pending.gone = slot.cause
            return pending
        slot.pending, pending.before = pending, slot.client.moved()
        try:
            slot.client.send(request, self._limit(pending))  # [3] request
        except Gone as gone:
            slot.pending, pending.gone = None, str(gone)
            self._set.lost(slot, pending.life, call.phase, pending.gone)
            return pending
        except Exception:  # it was not sent, so that the replica does not know this yet
            slot.pending = None
            slot.forget.extend(getattr(request, "forget", ()))
            raise
        if isinstance(request, ForwardRequest) and request.update is not None:
            slot.revisions[request.model] = request.update.revision
        if call.makes is not None:  # from here on it is to be freed there, whatever comes
            call.makes.slot, call.makes.life = slot, slot.life
        self._set.recorder.called(slot.index)
        return pending

    def _limit(self, pending: Pending) -> float | None:
        """Return the seconds that a call may take. As those of a start they hold for a process that
        has not answered yet, and for an optimizer's beginning: imports take place there.
        """
        options = self._set.options
        first = not pending.slot.answered or pending.call.phase == "resume"
        least = options.placement_timeout if first else 0.0
        return options.call_timeout and max(options.call_timeout, least)

    def receive(self, pending: Pending) -> Answer | None:
        """Take the answer to a call; returns None if the replica died."""
        if pending.answer is None and pending.gone is None:
            self._take(pending)
        return pending.answer

    def _take(self, pending: Pending) -> None:
        slot, call, client = pending.slot, pending.call, pending.slot.client
        if slot.life != pending.life:
            pending.gone = "it was replaced"
            return
        try:
            answer = client.receive(self._limit(pending), call.home)
        except Gone as gone:
            pending.gone = str(gone)
            self._set.lost(slot, pending.life, call.phase, pending.gone)
            return
        except Exception as error:  # the frame was read, and is lost
            pending.gone = repr(error)
            raise
        finally:
            if slot.pending is pending and (pending.gone or slot.life != pending.life):
                slot.pending = None
        slot.pending = None
        pending.answer = answer
        sent, received = client.moved()
        moved = sent - pending.before[0], received - pending.before[1]
        self._set.recorder.answered(slot.index, call.rows, answer.busy, *moved, call.name)

    def ask(self, call: ChunkCall) -> Answer | None:
        """Call the replica of the call's slot, and no other; returns None if it died."""
        answer = self.receive(self.send(call.slot, call))
        if answer is not None and answer.failure is not None:
            exceptions.reraise(answer.failure, str(call.slot))
        return answer

    def settle(self, slot: ReplicaSlot) -> None:
        """Take an answer that nobody has waited for yet: of a call that was interrupted, or of one
        that is still to be asked for.
        """
        pending: Pending | None = slot.pending
        if pending is not None:
            self._take(pending)
            if pending.answer is not None:
                pending.answer = own(pending.answer)

    def _place(self, call: ChunkCall, busy: dict[ReplicaSlot, int]) -> ReplicaSlot:
        """Choose the slot for a call, with the graphs that it needs."""
        slot = call.slot
        for graph in call.needs:
            if graph.lives and graph.slot is not None:
                slot = graph.slot
        slot = self._set.choose(slot, busy)
        if slot not in busy:
            for graph in call.needs:
                if not graph.on(slot):
                    self.remake(graph, slot, call.phase)
        return slot

    def remake(self, graph: RemoteGraph, slot: ReplicaSlot, phase: str) -> None:
        """Make a graph again whose replica died, or what a chunk had kept there."""
        if graph.recipe is None:
            raise GraphLost(
                f"{phase}: {slot} lost its graph, because its process ended, and the graph cannot "
                "be made again; run forward again"
            )
        for call in graph.recipe(slot):
            if self.ask(call) is None:
                return  # it died, too: the call's own sending will show that
            self._set.recorder.replayed(slot.index)
        graph.slot, graph.life = slot, slot.life


def apply_warnings(answers: Sequence[Answer]) -> None:
    """Warn in the driver of what replicas warned."""
    for answer in answers:
        exceptions.warn_again(answer.warnings)


def raise_first(answers: Sequence[Answer], calls: Sequence[ChunkCall]) -> None:
    """Raise the exception of the lowest chunk that failed (row A5); one of a chunk that only waited
    for another in vain comes last.
    """
    failed = [(a.failure, call) for a, call in zip(answers, calls, strict=True) if a.failure]
    failed.sort(key=lambda pair: pair[0].name.endswith("Abandoned"))
    for failure, call in failed:
        exceptions.reraise(failure, str(call.slot))


def home_of(value: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of an answer to the driver's device."""
    return value.to(device) if value.device != device else value

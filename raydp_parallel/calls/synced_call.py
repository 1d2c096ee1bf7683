"""`SyncedCall`: a call with chunks that exchange tensors while they run, as synchronised batch norm
does.

Its chunks cannot run one after the other, nor can one of them run alone: each has its own replica,
and if one of these dies, the others give up, and all run again once there is another one. A graph
that was lost with its replica is made again without the others, from what they had gathered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.calls.executor import Executor
from raydp_parallel.cluster.replica_slots import ChunkAnswer, ChunkCall, ReplicaSlot
from raydp_parallel.errors import GroupBroken, PlacementError, ReplicaDied
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import handshake
from raydp_parallel.transport.group_messages import TakePart
from raydp_parallel.transport.messages import Reply

_MOST_DEATHS, _MOST_BREAKS = 5, 2
"""How often a call is run again because a replica died, and run at all if none did."""

_PATIENCE = 120.0
"""Seconds that a chunk waits for the others. The driver tells it at once of a death or a failure;
this is for a network that fell silent."""

_GRACE = 1.0
"""Seconds at least that chunks may still run once one of them has ended; or as long as that one
took, if that is longer. The group ends then: one that has no exchange before it does not feel that.
"""

_BROKEN = f"{GroupBroken.__module__}.{GroupBroken.__qualname__}"


class _Elsewhere(Exception):
    """A chunk's replica died before it was sent its message."""


class SyncedCall:
    """One call with chunks that exchange tensors.

    Args:
        executor: The executor that runs it.
        slots: The slot of each chunk.
        tracker: The module.

    Attributes:
        gathered: What the chunks gathered in forward, to make a graph again; None if that cannot be
            done.
    """

    def __init__(
        self, executor: Executor, slots: Sequence[ReplicaSlot], tracker: ModuleTracker
    ) -> None:
        if len({*slots}) < len(slots) or executor.options.in_process:
            raise ValueError(
                "synchronised batch norm needs a replica in a process of its own for each chunk; "
                "here chunks run one after the other, because of Options(in_process=True) or a "
                "device that is given twice"
            )
        self._executor = executor
        self._slots = slots
        self._tracker = tracker
        self._part: TakePart | None = None
        self._ticket: Any = None
        self.gathered: Sequence[Tensor] | None = None

    def part(self, chunk: int, slot: ReplicaSlot) -> TakePart | None:
        """The field of a chunk's message that lets it take part. Asked for before all else of it:
        chunks that were sent theirs wait for this one.
        """
        if slot is not self._slots[chunk] or not self._ticket.has(slot):
            raise _Elsewhere
        return self._part

    def run(
        self,
        jobs: Sequence[ChunkCall],
        first: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[ChunkAnswer]:
        """Run one call per chunk, as `Executor.run` does; again from the start if a replica dies,
        ``meanwhile`` only once.
        """
        deaths = breaks = 0

        def once() -> None:
            nonlocal meanwhile
            work, meanwhile = meanwhile, None
            if work is not None:
                work()

        while True:
            answered = _Answers(len(jobs), self._dissolve)
            bound = [
                job._replace(bound=True, on_answer=answered.taker(job.on_answer)) for job in jobs
            ]
            try:
                self._join()
                answers = self._executor.run(bound, first, once)
            except (ReplicaDied, _Elsewhere) as error:
                self._dissolve()
                deaths += 1
                if not self._executor.replays or deaths > _MOST_DEATHS:
                    raise (
                        error
                        if isinstance(error, ReplicaDied)
                        else ReplicaDied(
                            "a replica died before a call with synchronised batch norm"
                        )
                    ) from None
                _lose(bound)
                continue
            except BaseException:
                self._dissolve()
                raise
            finally:
                answered.end()
            failed = [_name(answer) for answer in answers if _name(answer) is not None]
            if not failed:
                return answers
            self._dissolve()
            if {*failed} != {_BROKEN}:
                return [_without_breaks(answer) for answer in answers]
            if answered.waited_in_vain:
                raise GroupBroken(_unlike(answers))
            breaks += 1
            if breaks == _MOST_BREAKS or not self._executor.replays:
                return answers
            _lose(bound)

    def _join(self) -> None:
        """See that all replicas are there, with what their optimizers made, and in a group."""
        executor, slots = self._executor, self._slots
        executor.wait_for(slots)
        missing = [str(slot) for slot in slots if not slot.ready]
        if missing:
            raise PlacementError(
                "synchronised batch norm needs a replica of its own for each chunk, and there is "
                f"none for {', '.join(missing)}"
            )
        nodes = {slot.hello.node for slot in slots if slot.hello is not None}
        if len(nodes) > 1 and not handshake.far_lines():
            raise GroupBroken(
                "synchronised batch norm needs connections between nodes, which are not made with "
                "RAY_USE_TLS, because others could read them"
            )
        groups = executor.synced_groups
        ticket = self._ticket = groups.find(slots, 0, always=True, again=True)
        if ticket is None:
            if not all(slot.ready for slot in slots):
                raise _Elsewhere
            raise GroupBroken(
                "the replicas could not form a group, which synchronised batch norm needs: "
                f"{groups.trouble}"
            )
        if self._tracker.training is not None:
            self._tracker.training.bring_along(slots, together=True)
        order = tuple(ticket.rank(slot) for slot in slots)
        self._part = TakePart(ticket.name, order, groups.share(_PATIENCE))

    def _dissolve(self) -> None:
        if self._ticket is not None:
            self._executor.synced_groups.dissolve(self._ticket)


class _Answers:
    """Takes each chunk's answer at once: the other chunks may wait for one that has ended.

    Args:
        count: The number of chunks.
        dissolve: Lets them stop waiting.

    Attributes:
        waited_in_vain: Whether a chunk ended long before others did.
    """

    def __init__(self, count: int, dissolve: Callable[[], None]) -> None:
        self.waited_in_vain = False
        self._left = count
        self._begun = time.monotonic()
        self._dissolve = dissolve
        self._timer: threading.Timer | None = None

    def taker(self, other: Callable[[Reply | None], None] | None) -> Callable[[Reply | None], None]:
        """A function that takes a chunk's answer, after another one did."""

        def take(reply: Reply | None) -> None:
            self._left -= 1
            if other is not None:
                other(reply)
            if reply is None or reply.failure is not None:
                self._dissolve()
            elif self._left and self._timer is None:
                patience = max(_GRACE, time.monotonic() - self._begun)
                self._timer = threading.Timer(patience, self._stop_waiting)
                self._timer.daemon = True
                self._timer.start()

        return take

    def _stop_waiting(self) -> None:
        if self._left:
            self.waited_in_vain = True
            self._dissolve()

    def end(self) -> None:
        """Note that all answers are there, or that none is expected any more."""
        self._left = 0
        if self._timer is not None:
            self._timer.cancel()


def _unlike(answers: Sequence[ChunkAnswer]) -> str:
    """What to say of chunks some of which waited in vain."""
    waited = [number for number, answer in enumerate(answers) if _name(answer) is not None]
    ended = [number for number in range(len(answers)) if number not in waited]
    return (
        f"the chunks run different layers: chunks {ended} have ended, while chunks {waited} wait "
        "for them at a synchronised batch norm. What decides which layers run must be the same "
        "for all chunks"
    )


def _lose(jobs: Sequence[ChunkCall]) -> None:
    """Let the graphs that a backward needs be made again: one that failed halfway has freed parts
    of them, and what a checkpoint ran again has written to buffers.
    """
    for job in jobs:
        for graph in job.needs:
            graph.lose()


def plan(
    executor: Executor, slots: Sequence[ReplicaSlot], trackers: Sequence[ModuleTracker]
) -> SyncedCall | None:
    """The `SyncedCall` of a call, given the slot and the module of each chunk; None if its chunks
    exchange nothing.
    """
    if len(slots) < 2:
        return None
    distinct = {*trackers}
    if not any(_exchanges(tracker.module) for tracker in distinct):
        return None
    if len(distinct) == 1:
        return SyncedCall(executor, slots, trackers[0])
    if len(distinct) < len(trackers):
        raise ValueError(
            "parallel_apply: several modules, with several chunks each, in one call, and "
            "synchronised batch norm: apply each module alone"
        )
    return None


def _exchanges(module: nn.Module) -> bool:
    return any(isinstance(part, SyncBatchNorm) and part.exchanges for part in module.modules())


def fill(
    grads: dict[int, dict[int, Tensor]],
    outputs: Sequence[Sequence[tuple[torch.Size, torch.dtype, torch.device] | None]],
) -> None:
    """Give zeros to the outputs of chunks that have no gradient, where another chunk's have: all
    chunks go backward, since what one chunk computes depends on all.

    Args:
        grads: The gradients by chunk and number of the output; it is added to.
        outputs: For each chunk the outputs that can be differentiated.
    """
    wanted: Iterable[int] = sorted({k for found in grads.values() for k in found})
    for chunk, own in enumerate(outputs):
        for k in wanted:
            spec = own[k] if k < len(own) else None
            if spec is not None and k not in grads.setdefault(chunk, {}):
                shape, dtype, device = spec
                grads[chunk][k] = torch.zeros(shape, dtype=dtype, device=device)
        if not grads.get(chunk, True):
            del grads[chunk]


def _name(answer: ChunkAnswer) -> str | None:
    """The name of the exception that a chunk raised."""
    failure = answer.reply.failure
    return None if failure is None else failure.name


def _without_breaks(answer: ChunkAnswer) -> ChunkAnswer:
    """An answer without the error that it waited in vain, as another one says what went wrong."""
    if _name(answer) != _BROKEN:
        return answer
    return answer._replace(reply=answer.reply._replace(failure=None))

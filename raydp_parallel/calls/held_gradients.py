"""Gradients that stay in the replicas while a program accumulates them, under
`DataParallel.no_sync`.

[Note: what stays where]
A backward of a forward that was made under ``no_sync`` leaves each chunk's gradients of parameters
in the replica that computed them, and gives the master's parameters stand-ins for the sums
(`RemoteGradient`). The next backward takes what ``.grad`` stands for along: the replica adds to it,
chunk by chunk, and the new stand-in is all there is. The first backward outside does the same, and
is answered the whole. So ``.grad`` is at any time what it would be without ``no_sync``, but for the
order of additions: over backwards first, then over chunks. Whatever uses a stand-in fetches it.

[Note: what is taken along]
A stand-in gives up what it stands for while a backward runs, and gets the new sum in return; a
clone of it has what it had. Outside, ``.grad`` becomes an ordinary gradient, unless the program has
the stand-in too. A gradient that is in this process already, such as one that was edited, is what
the others are added to, in place. Where something else refers to its memory, such as a flat buffer,
or where a parameter has hooks, each gradient travels at once: they are to see it.

[Note: deaths]
What a replica has accumulated is made again as a graph is: its recipe is the backward's message,
with the graphs and the earlier gradients that went into it as parents. The driver keeps copies
of the batches for that until the sums were fetched: a reader may fill their memory again. What can
no longer be made again, because weights have changed since, is refused where it is used.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.calls import gradients
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.group_reduction import ReductionPart
from raydp_parallel.calls.remote_gradients import GradientState, RemoteGradient, Term
from raydp_parallel.cluster.chunk_calls import (
    ChunkAnswer,
    ChunkCall,
    GraphHandle,
    GraphRecipe,
    RemoteGraph,
)
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import StateChanged
from raydp_parallel.replica import exceptions
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import BackwardRequest, Holding

_WHAT = "the gradients accumulated under no_sync()"


class HeldPart(NamedTuple):
    """What one chunk has accumulated.

    Attributes:
        slot: The slot that the chunk is for.
        graph: Where it is, and how it is made again.
        handle: Lets the replica go of it.
    """

    slot: ReplicaSlot
    graph: RemoteGraph
    handle: GraphHandle


class HeldGradients:
    """Gradients of a model's parameters that stay in replicas, chunk by chunk.

    Args:
        executor: The executor of the replicas.
        tracker: The model.
        parts: What each chunk has, by its number.
        leaves: The parameters.
    """

    def __init__(
        self,
        executor: Executor,
        tracker: ModuleTracker,
        parts: dict[int, HeldPart],
        leaves: Sequence[Tensor],
    ) -> None:
        self.executor = executor
        self.tracker = tracker
        self.parts = parts
        self.leaves = leaves
        self._found: Sequence[Tensor | None] | None = None
        self._lock = threading.RLock()

    def row(self, number: int) -> Tensor:
        """The gradient of a parameter."""
        with self._lock:  # several parameters have it in common
            if self._found is None:
                self._found = self._fetch()
                self.parts = {}
        found = self._found[number]
        assert found is not None
        return found

    def _fetch(self) -> Sequence[Tensor | None]:
        parts = [part for _, part in sorted(self.parts.items())]
        jobs = [
            ChunkCall(
                part.slot,
                "backward",
                functools.partial(self._request, part),
                model=self.tracker.id,
                needs=[part.graph],
            )
            for part in parts
        ]
        answers = self.executor.run(jobs)
        for answer in answers:
            if answer.reply.failure is not None:
                exceptions.reraise(answer.reply.failure, str(answer.slot))
        shares = []
        for answer in answers:
            assert answer.reply.value is not None
            rows = range(len(self.leaves))
            shares.append(gradients.GradientShare(answer.reply.value, answer.attachments, rows))
        return gradients.total(shares, self.leaves[0].device, len(self.leaves))

    def _request(
        self, part: HeldPart, slot: ReplicaSlot, attachments: Attachments
    ) -> BackwardRequest:
        parcel, _ = codec.encode((), attachments, "gradients")
        return BackwardRequest(
            model=slot.name_of(self.tracker.id, part.slot),
            graph=part.graph.key,
            outputs=(),
            grads=parcel,
            needed=(),
            partial=False,
            keep=False,
            derived=None,
            bumped=(),
            write_back=False,
            threads=None,
            context=ambient_state.capture(),
            forget=slot.forget(),
            kept=part.graph.key,
            by_host=self.leaves[0].device.type == "cpu",
        )


class _Earlier(NamedTuple):
    """Gradients that a backward takes along.

    Attributes:
        found: What stands for them; None once nothing else refers to it.
        parts: What each chunk has.
        leaves: As in `HeldGradients`.
        pairs: Their rows, each with the leaf of the call.
    """

    found: weakref.ref[HeldGradients]
    parts: dict[int, HeldPart]
    leaves: Sequence[Tensor]
    pairs: list[tuple[int, int]]


class _Taken(NamedTuple):
    """What was taken from a parameter's gradient.

    Attributes:
        leaf: The parameter, by its number in the call.
        state: The state of its stand-in; None if that was taken away as a whole.
        terms: The gradients, each with its row.
    """

    leaf: int
    state: GradientState | None
    terms: list[tuple[_Earlier, int]]


class HeldPass:
    """What one backward leaves in the replicas, or takes along from there.

    Args:
        executor: The executor.
        parts: The chunks that have gradients, by their number.
        leaves: The call's leaves.
        stays: Whether its own gradients stay.
    """

    def __init__(
        self,
        executor: Executor,
        parts: dict[int, ReductionPart],
        leaves: Sequence[Tensor],
        stays: bool,
    ) -> None:
        self._executor = executor
        self._parts = parts
        self._leaves = leaves
        self._earlier: list[_Earlier] = []
        self._taken: list[_Taken] = []
        self._rows: list[int] = []
        self.makes: dict[int, RemoteGraph] = {}
        if stays:
            self.makes = {number: RemoteGraph(_WHAT) for number in parts}

    @property
    def _tracker(self) -> ModuleTracker:
        return next(iter(self._parts.values())).tracker

    def begin(self, chosen: Sequence[int]) -> bool:
        """Take along what some leaves' gradients stand for; returns whether there is anything to
        do.
        """
        for at in chosen:
            if self._take(at) or (self.makes and _accumulates(self._leaves[at])):
                self._rows.append(at)
        return bool(self._rows)

    def _take(self, at: int) -> bool:
        """Take along what a parameter's gradient stands for, if all of it can be."""
        leaf = self._leaves[at]
        alone = not self.makes and _refers_alone(leaf)
        grad = leaf.grad
        if not isinstance(grad, RemoteGradient) or not _match(grad, leaf):
            return False
        state = grad.state
        # Another thread may be about to use it, which takes a trip: it is added to as it is then.
        if not state.lock.acquire(blocking=False):
            return False
        try:
            return self._take_terms(at, state, alone)
        finally:
            state.lock.release()

    def _take_terms(self, at: int, state: GradientState, alone: bool) -> bool:
        leaf = self._leaves[at]
        state.settle()
        held = [term.sums for term in state.terms if isinstance(term.sums, HeldGradients)]
        own = state.untouched or state.base is not None
        # Another thread that fetches them takes their parts away.
        parts = [one.parts for one in held]
        if not own or not held or len(held) < len(state.terms):
            return False
        if not all(map(self._fits, held, parts)):
            return False
        del held
        terms = state.take()
        if alone:
            # What follows is an ordinary gradient.
            leaf.grad = torch.zeros_like(leaf) if state.zeros else state.base
            terms = (*terms, *state.take())
        found = []
        for term, had in zip(terms, parts, strict=True):
            assert isinstance(term.sums, HeldGradients)
            entry = self._entry(term.sums, had)
            entry.pairs.append((term.row, at))
            found.append((entry, term.row))
        self._taken.append(_Taken(at, None if alone else state, found))
        return True

    def _fits(self, held: HeldGradients, parts: dict[int, HeldPart]) -> bool:
        """Whether the replicas that this call asks have them, or can make them again."""
        return (
            held.executor is self._executor
            and held.tracker is self._tracker
            and bool(parts)
            and all(
                number in self._parts and self._parts[number].slot is part.slot
                for number, part in parts.items()
            )
        )

    def _entry(self, held: HeldGradients, parts: dict[int, HeldPart]) -> _Earlier:
        for one in self._earlier:
            if one.found() is held:
                return one
        made = _Earlier(weakref.ref(held), parts, held.leaves, [])
        self._earlier.append(made)
        return made

    def needs(self, number: int) -> list[RemoteGraph]:
        """The earlier gradients that a chunk needs."""
        return [e.parts[number].graph for e in self._earlier if e.pairs and number in e.parts]

    def hold(self, number: int) -> Holding:
        """The field of a chunk's message."""
        part = self._parts[number]
        rows = {leaf: row for row, leaf in enumerate(part.leaves[: part.own])}
        added = [
            (
                entry.parts[number].graph.key,
                entry.found() is None,
                tuple([(row, rows[leaf]) for row, leaf in entry.pairs]),
            )
            for entry in self._earlier
            if entry.pairs and number in entry.parts
        ]
        made = self.makes.get(number)
        kept = tuple([rows[at] for at in self._rows]) if made is not None else ()
        return Holding(None if made is None else made.key, kept, tuple(added))

    def recipe(self, recipe: GraphRecipe) -> GraphRecipe:
        """How a chunk's gradients are made again, as long as no optimizer in the replicas has made
        a step: the graph would be made with the weights of then.
        """
        training = self._tracker.training
        steps = 0 if training is None else training.steps

        def prepare(slot: ReplicaSlot, attachments: Attachments) -> BackwardRequest:
            now = self._tracker.training
            if now is not None and now.steps != steps:
                raise StateChanged(
                    "backward: gradients that no_sync() left in a replica died with it, and cannot "
                    "be made again, because the optimizer made a step since; set them to zero, and "
                    "accumulate again"
                )
            return recipe.prepare(slot, attachments)  # type: ignore[no-any-return]  # of a backward

        return recipe._replace(prepare=prepare)

    def spend(self) -> None:
        """Note that replicas have used up what was taken along: a further trip needs it anew."""
        for entry in self._earlier:
            if entry.found() is None:
                for part in entry.parts.values():
                    part.graph.lose()

    def finish(self, answers: Sequence[ChunkAnswer]) -> dict[int, RemoteGradient]:
        """What stands for the gradients that stayed, by leaf of the call."""
        self._taken, self._earlier = [], []
        stayed = {
            at
            for answer in answers
            for at, mark in zip(self._rows, answer.reply.stayed, strict=False)
            if mark
        }
        parts = {
            number: HeldPart(self._parts[number].slot, graph, GraphHandle([graph]))
            for number, graph in self.makes.items()
        }
        leaves = [self._leaves[at] for at in self._rows]
        held = HeldGradients(self._executor, self._tracker, parts, leaves)
        found = {}
        for row, at in enumerate(self._rows):
            if at in stayed:
                leaf = self._leaves[at]
                grad = leaf.grad
                if grad is not None and not isinstance(grad, RemoteGradient):
                    leaf.grad = RemoteGradient(grad, GradientState((), base=grad))
                found[at] = RemoteGradient(leaf, GradientState((Term(held, row),)))
        return found

    def abandon(self) -> None:
        """Give back what was taken along: the backward failed, so the replicas may have used it up,
        and make it again when it is used.
        """
        self.spend()
        for graph in self.makes.values():
            graph.drop()
        again: dict[int, HeldGradients] = {}
        for entry in self._earlier:
            found = entry.found() or HeldGradients(
                self._executor, self._tracker, entry.parts, entry.leaves
            )
            again[id(entry)] = found
        for one in self._taken:
            leaf = self._leaves[one.leaf]
            terms = [Term(again[id(entry)], row) for entry, row in one.terms]
            now = leaf.grad
            if one.state is not None:
                one.state.put(terms)
            elif isinstance(now, RemoteGradient):  # another thread's
                now.state.put(terms)
            else:
                state = GradientState(terms, base=now)
                leaf.grad = RemoteGradient(leaf if now is None else now, state)


def begin(
    executor: Executor,
    numbered: Iterable[tuple[int, ReductionPart]],
    leaves: Sequence[Tensor],
    needed: Sequence[bool],
) -> HeldPass | None:
    """What a backward that accumulates does with gradients that stay in the replicas; None if there
    are none.

    Args:
        executor: The executor.
        numbered: The chunks that have gradients, with their numbers.
        leaves: The call's leaves.
        needed: Which of their gradients are asked for.
    """
    parts = dict(numbered)
    first = next(iter(parts.values()), None)
    if first is None:
        return None
    own = [*first.leaves[: first.own]]
    if not first.holds:  # in most backwards nothing is held, which must cost little
        own_leaves = [(at, leaves[at]) for at in own]
        chosen = [at for at, t in own_leaves if t.is_leaf and type(t.grad) is RemoteGradient]
    else:
        chosen = own
    chosen = [at for at in chosen if needed[at] and _without_hooks(leaves[at])]
    if not chosen or any(
        part.tracker is not first.tracker or [*part.leaves[: part.own]] != own
        for part in parts.values()
    ):
        return None
    found = HeldPass(executor, parts, leaves, first.holds)
    return found if found.begin(chosen) else None


def _without_hooks(leaf: Tensor) -> bool:
    """Whether nothing but its gradient sees what a backward gives a tensor."""
    return leaf.is_leaf and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def _accumulates(leaf: Tensor) -> bool:
    """Whether a gradient that stays in the replicas can be added to what a leaf has, later."""
    grad = leaf.grad
    if leaf.layout is not torch.strided:
        return False
    if isinstance(grad, RemoteGradient):
        base = grad.state.base
        return grad.state.untouched if base is None else _users(base) == 1
    del grad
    return leaf.grad is None or _is_alone(leaf)


def _match(grad: Tensor, leaf: Tensor) -> bool:
    """Whether a gradient is one of what a leaf is now: its data may have been replaced."""
    return grad.shape == leaf.shape and grad.dtype == leaf.dtype and grad.device == leaf.device


def _is_alone(leaf: Tensor) -> bool:
    """Whether nothing but the leaf refers to the memory of its gradient, which is plain."""
    grad = leaf.grad
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad:
        return False
    users = _users(grad)
    del grad
    return users == 1 and _refers_alone(leaf)


def _refers_alone(leaf: Tensor) -> bool:
    """Whether nothing but the leaf refers to its gradient."""
    own, other = _references(leaf), _references_of_one()
    return own == other or own == (other[0], 0)


def _references(leaf: Tensor) -> tuple[int, int]:
    """The numbers of references to a leaf's gradient, in Python and in torch, and to its state."""
    grad = leaf.grad
    state = getattr(grad, "state", None)
    used = 0 if grad is None else grad._use_count()  # type: ignore[attr-defined]  # no stub has it
    return sys.getrefcount(grad) + used, 0 if state is None else sys.getrefcount(state)


@functools.cache
def _references_of_one() -> tuple[int, int]:
    """What `_references` says where nothing else refers to either."""
    leaf = torch.zeros((), requires_grad=True)
    leaf.grad = RemoteGradient(leaf, GradientState(()))
    return _references(leaf)


def _users(tensor: Tensor) -> int:
    """How many tensors use a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1

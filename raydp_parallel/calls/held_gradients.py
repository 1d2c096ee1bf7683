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
A stand-in lends what it stands for to a backward, and gets the new sum in return; if the pass ends
without that, it has what it had. Outside, ``.grad`` becomes an ordinary gradient at the end of the
pass, unless the program has the stand-in too. A gradient that is in this process already, such as
one that was edited, is what the others are added to, in place. Where something else refers to its
memory, such as a flat buffer, or where a parameter has hooks, each gradient travels at once: they
are to see it.

[Note: deaths]
What a replica has accumulated is made again as a graph is: its recipe is the backward's message,
with the graphs and the earlier gradients that went into it as parents. So is what a replica has
used up for a pass that brought nothing. The driver keeps copies of the batches for that until the
sums were fetched: a reader may fill their memory again. What can no longer be made again, because
weights have changed since, is refused where it is used.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel.calls import gradients
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.group_reduction import ReductionPart
from raydp_parallel.calls.remote_gradients import (
    GradientState,
    Loan,
    RemoteGradient,
    Term,
    changed_within,
)
from raydp_parallel.cluster.replica_slots import (
    ChunkAnswer,
    ChunkCall,
    GraphHandle,
    GraphRecipe,
    Prepare,
    RemoteGraph,
    ReplicaSlot,
)
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import StateChanged
from raydp_parallel.replica import exceptions
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import BackwardRequest, Holding

_WHAT = "the gradients accumulated under no_sync()"
_REMEDY = "set the gradients to zero, and accumulate again"


class HeldPart(NamedTuple):
    """What one chunk has accumulated.

    Attributes:
        slot: The slot that the chunk is for.
        graph: Where it is, and how it is made again.
        handle: Lets the replica go of it.
        taken: One entry for each backward that has taken some of it along. Threads append to it at
            the same time.
    """

    slot: ReplicaSlot
    graph: RemoteGraph
    handle: GraphHandle
    taken: list[None]


class HeldModel(NamedTuple):
    """The model that gradients are of. They belong to its parameters, so they do not keep it alive:
    Python's collector sees no reference from a parameter to its gradient.

    Attributes:
        executor: The executor of the replicas.
        tracker: The model's tracker.
        id: The model's number.
        device: Where its parameters are.
    """

    executor: Executor
    tracker: weakref.ref[ModuleTracker]
    id: int
    device: torch.device


class HeldGradients:
    """Gradients of a model's parameters that stay in replicas, chunk by chunk.

    Args:
        model: The model.
        parts: What each chunk has, by its number.
        count: How many gradients they are.
    """

    def __init__(self, model: HeldModel, parts: dict[int, HeldPart], count: int) -> None:
        self.model = model
        self.parts = parts
        self.count = count
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
                model=self.model.id,
                needs=[part.graph],
            )
            for part in parts
        ]
        answers = self.model.executor.run(jobs)
        for answer in answers:
            if answer.reply.failure is not None:
                exceptions.reraise(answer.reply.failure, str(answer.slot))
        shares = [gradients.share(answer, range(self.count)) for answer in answers]
        return gradients.total(shares, self.model.device, self.count)

    def _request(
        self, part: HeldPart, slot: ReplicaSlot, attachments: Attachments
    ) -> BackwardRequest:
        parcel, _ = codec.encode((), attachments, "gradients")
        return BackwardRequest(
            model=slot.name_of(self.model.id, part.slot),
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
            forget=slot.contents.forget(),
            kept=part.graph.key,
            by_host=self.model.device.type == "cpu",
        )


class _Earlier:
    """Gradients that a backward takes along.

    Args:
        held: What stands for them.
        parts: What each chunk has.

    Attributes:
        parts: See above.
        pairs: Their rows, each with the leaf of the call.
        last: Whether nothing else refers to them, so that replicas may add to them in place.
    """

    def __init__(self, held: HeldGradients, parts: dict[int, HeldPart]) -> None:
        self.parts = parts
        self.pairs: list[tuple[int, int]] = []
        self.last = False
        self._model, self._count = held.model, held.count
        self._found = weakref.ref(held)

    @property
    def found(self) -> HeldGradients | None:
        """What stands for them; None once nothing refers to it."""
        return self._found()

    @property
    def alone(self) -> bool:
        """Whether no other backward has taken some of them: another thread may have taken the
        gradients of other parameters.
        """
        return all(len(part.taken) == 1 for part in self.parts.values())

    def again(self) -> HeldGradients:
        """What stands for them, made again if need be."""
        found = self.found
        if found is None:
            found = HeldGradients(self._model, self.parts, self._count)
            self._found = weakref.ref(found)
        return found


class _Trip:
    """The time in which it is not known what of the earlier gradients replicas have used up."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.get_ident()

    def end(self) -> None:
        """End it."""
        self._ended.set()

    def again(self, terms: Sequence[tuple[_Earlier, int]], loan: Loan) -> list[Term]:
        """Earlier gradients, given back after the trip."""
        if threading.get_ident() != self._thread:
            # An interrupt just before the trip leaves nothing that would end it.
            while not self._ended.wait(1.0) and loan.runs:
                pass
        return [Term(earlier.again(), row) for earlier, row in terms]


class _PassEnd:
    """What torch calls once a pass has succeeded, and drops in any case.

    Args:
        loans: The leaves of which gradients were taken along, with what says whether the pass
            brought them.
        stays: Whether the gradients stay in the replicas.
    """

    def __init__(self, loans: list[tuple[Tensor, Loan]], stays: bool) -> None:
        self.loans = loans
        self._stays = stays

    def __call__(self) -> None:
        lost = False
        for leaf, loan in self.loans:
            lost = lost or not loan.repaid
            if not self._stays and _refers_alone(leaf):
                _make_ordinary(leaf)
        self.loans = []
        if lost:
            raise changed_within()


_making_remote = threading.Lock()
"""Held while a gradient in this process becomes what others are added to."""


def _make_remote(leaf: Tensor) -> None:
    """Give a leaf that has an ordinary gradient one to which those in replicas can be added."""
    with _making_remote:  # another thread may have done it, and added to that
        grad = leaf.grad
        if grad is not None and not isinstance(grad, RemoteGradient):
            leaf.grad = RemoteGradient(grad, GradientState((), base=grad))


def _make_ordinary(leaf: Tensor) -> None:
    """Give a leaf an ordinary gradient, if all of its gradient is in this process."""
    grad = leaf.grad
    if not isinstance(grad, RemoteGradient):
        return
    with grad.state.lock:  # other backwards add to it, or take it along, before or after
        found = grad.state.settled(grad) if leaf.grad is grad else None
        if found is not None:
            leaf.grad = found


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
        self._parts = parts
        self._leaves = leaves
        self._earlier: list[_Earlier] = []
        self._left: set[int] = set()
        self._rows: list[int] = []
        self._trip = _Trip()
        self._tracker = next(iter(parts.values())).tracker
        device = leaves[0].device
        ours = weakref.ref(self._tracker)
        self._model = HeldModel(executor, ours, self._tracker.id, device)
        self.makes: dict[int, RemoteGraph] = {}
        if stays:
            self.makes = {number: RemoteGraph(_WHAT, _REMEDY) for number in parts}

    def begin(self, chosen: Sequence[int]) -> bool:
        """Take along what some leaves' gradients stand for; returns whether there is anything to
        do.
        """
        loans: list[tuple[Tensor, Loan]] = []
        end = _PassEnd(loans, bool(self.makes))
        for at in chosen:
            loan = self._take(at, end)
            if loan is not None:
                loans.append((self._leaves[at], loan))
            if loan is not None or (self.makes and _accumulates(self._leaves[at])):
                self._rows.append(at)
        for entry in self._earlier:
            entry.last = entry.found is None and entry.alone
        if loans:
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return bool(self._rows)

    def _take(self, at: int, end: _PassEnd) -> Loan | None:
        """Take along what a parameter's gradient stands for, if all of it can be."""
        leaf = self._leaves[at]
        grad = leaf.grad
        if not isinstance(grad, RemoteGradient) or not _match(grad, leaf):
            return None
        state = grad.state
        # Another thread may be about to use it, which takes a trip: it is added to as it is then.
        if not state.lock.acquire(blocking=False):
            return None
        try:
            return self._take_terms(at, state, end) if leaf.grad is grad else None
        finally:
            state.lock.release()

    def _take_terms(self, at: int, state: GradientState, end: _PassEnd) -> Loan | None:
        if state.loan is not None and state.loan.runs:
            return None  # another backward has it
        terms = state.settle()
        held = [term.sums for term in terms if isinstance(term.sums, HeldGradients)]
        own = state.untouched or state.base is not None
        # Another thread that fetches them takes their parts away.
        parts = [one.parts for one in held]
        if not own or not held or len(held) < len(terms):
            return None
        if not all(map(self._fits, held, parts)):
            return None
        found = []
        for term, one, had in zip(terms, held, parts, strict=True):
            entry = self._entry(one, had)
            entry.pairs.append((term.row, at))
            found.append((entry, term.row))
        again = functools.partial(self._trip.again, found)
        loan = Loan(torch._C._current_graph_task_id(), end, again)
        state.lend(loan)
        return loan

    def _fits(self, held: HeldGradients, parts: dict[int, HeldPart]) -> bool:
        """Whether the replicas that this call asks have them, or can make them again."""
        return (
            held.model.executor is self._model.executor
            and held.model.id == self._model.id
            and bool(parts)
            and all(
                number in self._parts and self._parts[number].slot is part.slot
                for number, part in parts.items()
            )
        )

    def _entry(self, held: HeldGradients, parts: dict[int, HeldPart]) -> _Earlier:
        for one in self._earlier:
            if one.found is held:
                return one
        made = _Earlier(held, parts)
        for part in parts.values():  # while `held` is there, so that no other backward is the last
            part.taken.append(None)
        self._earlier.append(made)
        return made

    def _added(self, number: int) -> list[_Earlier]:
        """The earlier gradients that a chunk's are added to."""
        return [entry for entry in self._earlier if number in entry.parts]

    def needs(self, number: int) -> list[RemoteGraph]:
        """The earlier gradients that a chunk needs."""
        return [entry.parts[number].graph for entry in self._added(number)]

    def hold(self, number: int) -> Holding:
        """The field of a chunk's message."""
        part = self._parts[number]
        rows = {leaf: row for row, leaf in enumerate(part.leaves[: part.own])}
        added = [
            (
                entry.parts[number].graph.key,
                entry.last,
                tuple([(row, rows[leaf]) for row, leaf in entry.pairs]),
            )
            for entry in self._added(number)
        ]
        made = self.makes.get(number)
        kept = tuple([rows[at] for at in self._rows]) if made is not None else ()
        return Holding(None if made is None else made.key, kept, tuple(added))

    def recipe(self, recipe: GraphRecipe) -> GraphRecipe:
        """How a chunk's gradients are made again, as long as no optimizer in the replicas has made
        a step: the graph would be made with the weights of then.
        """
        parents = [
            (graph, one if graph.what == _WHAT else one._replace(prepare=_saying(one.prepare)))
            for graph, one in recipe.parents
        ]
        prepare = _before_steps(recipe.prepare, self._model.tracker)
        return recipe._replace(prepare=prepare, parents=parents)

    def note(self, answers: Sequence[ChunkAnswer]) -> None:
        """Note what replicas have left of what was taken along."""
        for answer in answers:
            self._left.update(answer.reply.left)

    def spend(self) -> None:
        """Note that replicas have used up what was taken along: a further use needs it anew."""
        for entry in self._earlier:
            for part in entry.parts.values() if entry.last else ():
                if part.graph.key not in self._left:
                    part.graph.lose()

    def finish(self, answers: Sequence[ChunkAnswer]) -> dict[int, RemoteGradient]:
        """What stands for the gradients that stayed, by leaf of the call."""
        stayed = {
            at
            for answer in answers
            for at, mark in zip(self._rows, answer.reply.stayed, strict=False)
            if mark
        }
        parts = {
            number: HeldPart(self._parts[number].slot, graph, GraphHandle([graph]), [])
            for number, graph in self.makes.items()
        }
        held = HeldGradients(self._model, parts, len(self._rows))
        found = {}
        for row, at in enumerate(self._rows):
            if at in stayed:
                leaf = self._leaves[at]
                _make_remote(leaf)
                found[at] = RemoteGradient(leaf, GradientState((Term(held, row),)))
        return found

    def abandon(self) -> None:
        """Let go of what the backward was to leave: it failed."""
        for graph in self.makes.values():
            graph.drop()

    def end(self) -> None:
        """End the trip: what was taken along can be used, in place of what the pass brings."""
        self.spend()
        self._trip.end()


def _lost(why: str) -> StateChanged:
    """The error for gradients that are lost for good."""
    return StateChanged(
        f"backward: {_WHAT} are no longer in a replica, which died or in which a backward "
        f"failed, and cannot be made again{why}; {_REMEDY}"
    )


def _saying(prepare: Prepare) -> Prepare:
    """The same, with an error that says what is lost."""

    def prepared(slot: ReplicaSlot, attachments: Attachments) -> Any:
        try:
            return prepare(slot, attachments)
        except StateChanged as error:
            raise _lost(f" ({error})") from error

    return prepared


def _before_steps(prepare: Prepare, tracker: weakref.ref[ModuleTracker]) -> Prepare:
    """The same, refused after a further step of an optimizer in the replicas."""

    def steps() -> int:
        found = tracker()
        training = None if found is None else found.training
        return 0 if training is None else training.steps

    then = steps()

    def prepared(slot: ReplicaSlot, attachments: Attachments) -> Any:
        if steps() != then:
            raise _lost(", because the optimizer made a step since")
        return prepare(slot, attachments)

    return prepared


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

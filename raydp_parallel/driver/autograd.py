"""Connects torch's graph in the driver with the graphs in the replicas.

  leaves ──► Fork ──► token ──► Join ──► output 0
                        └─────► Join ──► output 1
  grads  ◄── Fork ◄─────────── Join ◄── gradient

In forward there is one Fork per call, and one Join per output. In backward the Joins put their
gradients aside, and Fork, which the engine runs last, makes one trip for all of them.

[Note: how long a remote graph lives]
Exactly as long as torch would keep it. Each Join saves the token under hooks that pack it with the
call's `GraphHandle`; when the engine or the garbage collector frees the saved tensor, the handle
goes, and its end frees the remote graphs. The engine frees Join's saved tensor before it reaches
Fork, so unpacking pins the handle until Fork has made its trip.

[Note: higher orders]
Under ``create_graph`` Fork's backward is itself a call with graphs in the replicas. Its leaves are
the incoming gradients. The gradients that it passes to the graphs that it is derived from must be
added there to those of their own outputs, in one run of the engine: a hook on a tensor inside the
module is called once, with the sum. So a derived Fork makes a trip for the incoming gradients
alone, if they are asked for, and passes on what it received to the Forks that it is derived from,
which the engine runs after it because their tokens are among its inputs. Derived calls share nodes
with the ones they came from: from then on neither lets torch free buffers in passing, and the
handles free everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node, saved_tensors_hooks

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import Call, Flight, RemoteGraph
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.gradients import Numbers, Sums
from raydp_parallel.driver.resident import Trainable
from raydp_parallel.driver.resident_gradients import Gradients, Kept, Sum
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica import exceptions
from raydp_parallel.state.lagging import PLAINLY
from raydp_parallel.state.mirror import Leaf, Mark
from raydp_parallel.state.run import versions_of
from raydp_parallel.wire.messages import (
    ADDED,
    KEPT,
    LEFT_OUT,
    SENT,
    SUMMED,
    Answer,
    BackwardRequest,
    Seat,
    Terms,
)


class Part(NamedTuple):
    """One chunk of a call, as backward sees it."""

    graph: RemoteGraph
    terms: Terms  # of its forward
    slot: ReplicaSlot  # that it is for
    master: Trainable
    mark: Mark  # the model's tensors after the forward
    leaves: Numbers  # which of the call's leaves its own are: those of the module, then inputs


@dataclass(eq=False)
class CallNode:
    """One call, as backward sees it."""

    executor: Executor
    leaves: Sequence[Leaf]  # that gradients may be asked for
    unused: UnusedGrads
    layer_slots: Sequence[ReplicaSlot] | None  # the chunks' slots, if layers exchange tensors
    parts: dict[int, Part]  # its chunks that have a graph, by number
    parents: Sequence[CallNode] = ()  # that it is derived from
    token: Tensor | None = None  # the output of its Fork
    shared: bool = False  # it shares nodes with another call
    # What each running pass of torch's engine brought, by its number.
    passes: weakref.WeakValueDictionary[int, EnginePass] = field(
        default_factory=weakref.WeakValueDictionary
    )

    @property
    def now(self) -> EnginePass:
        """The gradients and handles of the running pass of torch's engine."""
        task = torch._C._current_graph_task_id()
        found = self.passes.get(task)
        if found is None:
            found = self.passes[task] = EnginePass({}, [], [])
            if task >= 0:  # torch has it as long as the pass lasts, which may fail on its way
                Variable._execution_engine.queue_callback(lambda: found.pinned.clear())
        return found

    def fill_unused(
        self, sums: Mapping[int, Tensor], needed: Set[int], filled: Set[str]
    ) -> list[Tensor | None]:
        """Give unused parameters what upstream gives them (row B3).

        Args:
            sums: The gradients, by leaf.
            needed: The leaves that get one.
            filled: The kinds of which some tensor has a gradient: a parameter gets zeros if another
                parameter has one, and a buffer if another buffer has one.
        """
        filled = filled & {"parameter", "buffer"} if self.unused == "zeros" else set()
        found = []
        for at, (leaf, kind) in enumerate(self.leaves):
            grad = sums.get(at)
            if grad is None and at in needed and kind in filled:
                grad = PLAINLY(torch.zeros_like, (), (leaf,))  # fetches nothing
            found.append(grad)
        return found


Stash = dict[CallNode, dict[int, dict[int, Tensor]]]
"""Gradients of outputs, by the call, the chunk and the number of the output."""


Outputs = list[tuple[RemoteGraph, list[tuple[int, Tensor]]]]
"""One chunk's graphs that have gradients, with these by the number of their output."""


@dataclass(eq=False)
class EnginePass:
    """Gradients and handles that one pass of the engine brought so far."""

    grads: Stash  # of the call's outputs, and of those of calls derived from it
    pinned: list[GraphHandle]  # which keep the remote graphs until the trip
    made: list[tuple[Tensor, torch.cuda.Stream]]  # on GPUs, each with the stream that writes it


@dataclass(eq=False)
class GraphHandle:
    """Lives as long as torch would keep a graph, and then lets replicas free theirs."""

    graphs: Sequence[RemoteGraph]  # the chunks'
    parents: Sequence[GraphHandle] = ()  # of the graphs that these share nodes with

    def __del__(self) -> None:
        for graph in self.graphs:
            graph.drop()


def attach(call: CallNode, handle: GraphHandle, rows: Mapping[int, list[Tensor]]) -> None:
    """Make the outputs that require a gradient part of torch's graph, in each chunk's list."""
    tokens = [parent.token for parent in call.parents]
    token = call.token = Fork.apply(call, *tokens, *[leaf.tensor for leaf in call.leaves])

    def unpack(packed: tuple[GraphHandle, Tensor]) -> Tensor:
        call.now.pinned.append(packed[0])
        return packed[1]

    with saved_tensors_hooks(lambda tensor: (handle, tensor), unpack):
        for chunk, row in rows.items():
            for k, tensor in enumerate(row):
                if tensor.requires_grad:
                    row[k] = Join.apply(call, chunk, k, token, tensor.requires_grad_(False))


class ForkNode(FunctionCtx):
    """A Fork's node in torch's graph."""

    call: weakref.ref[CallNode]
    next_functions: Sequence[tuple[Node | None, int]]


class Fork(Function):
    """Leaves in, a token out. Saves no tensor, so it may run again."""

    @staticmethod
    def forward(ctx: ForkNode, call: CallNode, *_: Tensor) -> Tensor:
        # The call holds the token, and the token holds this node. What makes the engine run the
        # node, a Join or a derived call, holds the call.
        ctx.call = weakref.ref(call)
        ctx.set_materialize_grads(False)  # a token has no gradient
        return torch.zeros((), device="cpu")

    @staticmethod
    @exceptions.ShortTraceback()
    @ambient.uncompiled
    def backward(ctx: ForkNode, *_: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call()
        assert call is not None
        ending = call.passes.pop(torch._C._current_graph_task_id())
        # Torch does not wait for the streams that write the gradients: what the Joins hand on is
        # nothing, and Fork runs on no GPU, so on the stream of whoever called backward.
        for grad, stream in ending.made:
            here = torch.cuda.current_stream(grad.device)
            if here != stream:
                here.wait_stream(stream)
        # Which leaves, and calls that it is derived from, does this pass go on to?
        # ``needs_input_grad`` is True for all of them, even under ``autograd.grad(y, x)``.
        running, captured = set(), False
        for at, edge in enumerate(ctx.next_functions):
            try:
                if edge[0] is not None and torch._C._will_engine_execute_node(edge[0]):
                    running.add(at)
            except RuntimeError:  # of a leaf whose gradient is captured: ``.grad`` stays as it is
                running.add(at)
                captured = True
        derived = len(call.parents)
        needed = {at - derived for at in running if at >= derived}
        grads: list[Tensor | None] = [None] * len(call.leaves)
        if needed or not derived:
            trip = Backward(call, ending.grads, needed)
            higher = torch.is_grad_enabled()
            # What is captured the program gets, and not ``.grad``.
            stay = set() if captured else needed
            grads = trip.derive(ending.pinned) if higher else trip.collect(stay)
        # Last: if the trip fails, nobody takes this out of the parents again.
        for at, parent in enumerate(call.parents):
            if at in running:
                parent.now.grads.update(ending.grads)
                parent.now.pinned.extend(ending.pinned)
        return (None, *[None] * derived, *grads)


class Join(Function):
    """A remote output."""

    @staticmethod
    def forward(
        ctx: Any, call: CallNode, chunk: int, number: int, token: Tensor, output: Tensor
    ) -> Tensor:
        ctx.call, ctx.chunk, ctx.number = call, chunk, number
        ctx.save_for_backward(token)
        # The output itself, not a view of it: users may write to it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @ambient.uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (_,) = ctx.saved_tensors  # raises torch's own error if the graph was freed
        now = ctx.call.now
        now.grads.setdefault(ctx.call, {}).setdefault(ctx.chunk, {})[ctx.number] = grads[0]
        if grads[0].is_cuda:
            now.made.append((grads[0], torch.cuda.current_stream(grads[0].device)))
        return None, None, None, None, None


class Backward:
    """The backward of a call's chunks that have gradients, for the leaves that need some."""

    def __init__(self, call: CallNode, stash: Stash, needed: Set[int]) -> None:
        self._call, self._stash, self._needed = call, stash, needed
        self._dispatcher = call.executor.dispatcher
        if call.layer_slots is not None:  # all take part, or none: replicas add zeros
            for grads in stash.values():
                for i in call.parts:
                    grads.setdefault(i, {})
        # For each chunk its graphs that have gradients, with these by the number of their output.
        self._outputs: dict[int, Outputs] = {}
        for i in sorted(set[int]().union(*stash.values())):
            calls = [(one, grads[i]) for one, grads in stash.items() if i in grads]
            self._outputs[i] = [(one.parts[i].graph, sorted(grads.items())) for one, grads in calls]
        # The leaves whose gradients stay in the replicas.
        self._gradients: Gradients | None = None
        self._kept: dict[int, Sum] = {}
        self._graphs: dict[int, RemoteGraph] = {}  # that are made under create_graph, by chunk
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        self._retain = retain or torch.is_grad_enabled() or any(one.shared for one in stash)

    def collect(self, stay: Set[int]) -> list[Tensor | None]:
        """First order: sum the chunks' gradients. Those of some leaves may ``stay`` in replicas."""
        call, parts = self._call, self._call.parts
        with self._dispatcher.replica_set.calling():
            master, *more = {part.master for part in parts.values()}
            resident = None if more or not stay else master.resident
            if resident is not None:
                resident.collect()
                self._gradients = resident.gradients
                self._gradients.begin_backward()
                for at in stay:
                    leaf, kind = call.leaves[at]
                    if kind == "parameter" and PLAINLY(self._gradients.keeps, (), (leaf,)):
                        self._kept[at] = self._gradients.sums[id(leaf)]
            others = parts.keys() - self._outputs.keys()
            chunks = [parts[i] for i in (*self._outputs, *others)]
            adding = Sums(master, call.leaves, [part.leaves for part in chunks])
            answers = self._run(adding)
            sums = adding.finish(call.unused)
            filled = {call.leaves[at].kind for at in sums}
            if any([any(answer.reached) for answer in answers]):  # those stay in the replicas
                filled.add("parameter")
            zeros = call.unused == "zeros" and "parameter" in filled
            for at, one in self._kept.items():
                # Of sparse ones the sum comes, and is added to what is kept.
                if resident is not None and (one.chunks or (zeros and at not in sums)):
                    PLAINLY(resident.gradients.stand_in, (), (one,))
        return call.fill_unused(sums, self._needed - self._kept.keys(), filled)

    def derive(self, pinned: Sequence[GraphHandle]) -> list[Tensor | None]:
        """Higher order: the same trip, with results that can be differentiated again. The handles
        are those of the graphs that it is derived from.
        """
        call = self._call
        leaves: list[Leaf] = []
        derived = CallNode(call.executor, leaves, call.unused, call.layer_slots, {}, [*self._stash])
        for one in (*self._stash, derived):
            one.shared = True
        self._graphs = {i: RemoteGraph(next(call.executor.keys)) for i in self._outputs}
        handle = GraphHandle([*self._graphs.values()], [*dict.fromkeys(pinned)])
        rows: dict[int, list[Tensor]] = {}
        places: list[tuple[int, int, int]] = []
        with self._dispatcher.replica_set.calling():
            for (i, given), answer in zip(self._outputs.items(), self._run(), strict=True):
                part, row, begin = call.parts[i], rows.setdefault(i, []), len(leaves)
                leaves += [Leaf(grad, "input") for _, found in given for _, grad in found]
                own = range(begin, len(leaves))
                derived.parts[i] = part._replace(graph=self._graphs[i], leaves=own)
                found = [grad for grads in answer.rows for grad in grads]
                for leaf, grad in zip(part.leaves, found, strict=True):
                    if grad is not None and leaf is not None:
                        places.append((leaf, i, len(row)))
                        mine = grad.detach().to(call.leaves[leaf].tensor.device).clone()
                        row.append(mine.requires_grad_(grad.requires_grad))
        attach(derived, handle, rows)
        sums: dict[int, Tensor] = {}
        for leaf, i, k in places:
            sums[leaf] = sums[leaf] + rows[i][k] if leaf in sums else rows[i][k]
        return call.fill_unused(sums, self._needed, {call.leaves[at].kind for at in sums})

    def _run(self, sums: Sums | None = None) -> list[Answer]:
        """Make one trip; what adds gradients takes them as they come."""
        call, dispatcher = self._call, self._dispatcher
        layers = [] if call.layer_slots is None else groups.of_layers(dispatcher, call.layer_slots)
        summing = [] if self._kept or self._graphs else self._summing()
        trips = self._trips(layers or summing, SUMMED if summing else SENT)
        flight = Flight(trips, bool(layers or summing), bool(layers), None if summing else sums)
        answers = dispatcher.finish(dispatcher.start(flight))  # [11] one trip
        if summing and sums is not None:
            answers = self._all_summed(trips, answers, summing[0].root)
            for at, answer in enumerate(answers):
                sums.take(at, answer)
        dispatcher.totals.backwards += 1
        for part, answer in zip([call.parts[i] for i in self._outputs], answers, strict=True):
            if part.terms.reports and answer.writes.tags:
                part.master.write_back(answer.writes, part.mark)
        dispatcher.effects(flight, answers)
        for trip, answer in zip(trips, answers, strict=True):
            if trip.kept is not None:
                rows = zip(trip.part.leaves, answer.reached, strict=True)
                stays = [self._kept[at] for at, there in rows if there and at is not None]
                trip.kept.note(trip, trip.life, stays)
        return answers

    def _trips(self, seats: Sequence[Seat], plain: int) -> list[_Trip]:
        """Make the chunks' calls, with places in a group of replicas, if they have one, and the
        plain fate of parameters' gradients that are not kept.
        """
        call, context = self._call, ambient.capture()
        threads = self._dispatcher.replica_set.threads(len(call.parts))
        left_out = [leaf for at, (leaf, _) in enumerate(call.leaves) if at not in self._needed]
        # The graph of a derived call leads to more leaves than its own.
        partial = bool(call.parents) or any([leaf.requires_grad for leaf in left_out])
        fates = dict[int | None, int].fromkeys([None, *range(len(call.leaves))], LEFT_OUT)
        for at in self._needed:
            fates[at] = plain if call.leaves[at].kind == "parameter" else SENT
        # The chunks of a model have the same mark.
        marks = {part.master: part.mark for part in call.parts.values()}
        moved = {master: master.moved_since(mark) for master, mark in marks.items()}
        trips = []
        for i, given in self._outputs.items():
            part, makes = call.parts[i], self._graphs.get(i)
            for at, one in self._kept.items():
                fates[at] = ADDED if i in one.chunks else KEPT
            try:
                # One object may stand here twice: both summands of ``a + b`` get the same gradient.
                row = [grad for _, found in given for _, grad in found]
                create = makes is not None
                grads = [g.detach().requires_grad_(create and g.requires_grad) for g in row]
            except RuntimeError as error:
                ambient.refuse_batches(error)
                raise
            seat = seats[i] if seats else None
            outputs = [(graph.key, tuple([k for k, _ in found])) for graph, found in given]
            request = BackwardRequest(
                # Without the forward's seed: replicas see if it is like the last one.
                part.terms._replace(context=context, threads=threads, group=seat, seed=0),
                graph=part.graph.key,
                outputs=tuple(outputs),
                grads=grads,
                needed=bytes([fates[at] for at in part.leaves]),
                partial=partial,
                retain=self._retain,
                derived=None if makes is None else makes.key,
                moved=moved[part.master],
            )
            trip = _Trip(part, given, request, self._gradients)
            trips.append(trip)
            trip.makes = makes
            if makes is not None and call.layer_slots is None:
                makes.recipe = [trip]
        return trips

    def _summing(self) -> list[Seat]:
        """Return the seats by which replicas sum gradients of parameters, if all of them do."""
        call, parts = self._call, [*self._call.parts.values()]
        master = parts[0].master
        if not 1 < len(parts) == len(self._outputs) or not master.alike:
            return []

        def size() -> int:
            if not all([p.graph.on(p.slot) and p.master is master for p in parts]):
                return 0
            wanted = [call.leaves[at] for at in self._needed]
            return sum([leaf.nbytes for leaf, kind in wanted if kind == "parameter"])

        return groups.direct(self._dispatcher, [part.slot for part in parts], size)

    def _all_summed(self, trips: Sequence[_Trip], answers: list[Answer], root: int) -> list[Answer]:
        """See to it that the root has the sums of all, or that each has its own gradients."""
        summed = [any(answer.reached) for answer in answers]
        if any(answer.failure is not None for answer in answers) or all(summed):
            return answers
        dispatcher = self._dispatcher
        if not summed[root] and dispatcher.groups:
            # Nobody died: chunks have gradients of different parameters.
            trips[root].part.master.alike = False
        if any(summed):  # what some gave is lost, or was made once more: all again, without a group
            for graph in [graph for trip in trips for graph in trip.needs]:
                graph.life = -1  # its replica may have freed it
            answers = dispatcher.finish(dispatcher.start(Flight(trips, attempt=1)))
        return answers


class _Trip(Call):
    """One chunk's backward, from the outputs of these graphs that have gradients."""

    def __init__(
        self, part: Part, given: Outputs, request: BackwardRequest, gradients: Gradients | None
    ) -> None:
        super().__init__(part.slot, "backward", master=part.master)
        self.needs = [part.graph, *[graph for graph, _ in given if graph is not part.graph]]
        self.kept: Kept | None = None
        self.life = 0  # of the replica that keeps gradients
        if gradients is not None and max(request.needed, default=SENT) >= KEPT:
            self.recipes = {graph: graph.recipe for graph in self.needs}
            self.kept = gradients.of(part.terms.chunk)
            self.needs = [self.kept, *self.needs]
        self.part, self._request = part, request
        self._versions = versions_of(request.grads)

    def request(self, slot: ReplicaSlot, attempt: int) -> BackwardRequest:
        """Return the request; after the first attempt the driver sums."""
        request = self._request
        if self.kept is not None:  # until all chunks' are noted: one that failed adds nothing
            self.life, self.kept.life = slot.life, -1
        if attempt and SUMMED in request.needed:
            terms, needed = request.terms, request.needed.replace(bytes([SUMMED]), bytes([SENT]))
            if terms.group is not None and not terms.group.layers:
                terms = terms._replace(group=None)
            request = request._replace(terms=terms, needed=needed)
        return request

    def changed(self) -> str | None:
        """Refuse to run again with other gradients."""
        same = versions_of(self._request.grads) == self._versions
        return None if same else "a gradient that it was given was changed"

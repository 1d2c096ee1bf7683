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

import functools
import weakref
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import gradients, groups
from raydp_parallel.driver.dispatcher import (
    ChunkCall,
    RemoteGraph,
    apply_warnings,
    home_of,
    own,
    raise_first,
)
from raydp_parallel.driver.executor import Executor, taken
from raydp_parallel.driver.gradients import Share, Sums
from raydp_parallel.errors import ExecutorClosed, StateChanged
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica import exceptions
from raydp_parallel.state.mirror import Mark, Master, versions_of
from raydp_parallel.wire.codec import Row
from raydp_parallel.wire.messages import (
    ADDED,
    KEPT,
    LEFT_OUT,
    SENT,
    SUMMED,
    Answer,
    BackwardRequest,
    ExchangeRequest,
    Terms,
)


class Part(NamedTuple):
    """One chunk of a call, as backward sees it.

    Attributes:
        graph: Its graph.
        slot: The slot that it is for.
        master: Its model.
        mark: The model's tensors after the forward.
        leaves: Which of the call's leaves the module's are; None for those that were not reached.
        inputs: Which of them its own inputs are.
        first: True if its writes come back.
        where: The place that an exception names.
    """

    graph: RemoteGraph
    slot: ReplicaSlot
    master: Master
    mark: Mark
    leaves: Sequence[int | None]
    inputs: Sequence[int | None]
    first: bool
    where: str | None

    @property
    def all(self) -> Sequence[int | None]:
        """All leaves, in the order of its graph."""
        return [*self.leaves, *self.inputs]


Like = tuple[torch.Size, torch.dtype, torch.device]
"""The shape, dtype and device of a tensor."""


class CallNode:
    """Describes one call to backward.

    Args:
        executor: The executor that runs it.
        leaves: The tensors that gradients may be asked for.
        kinds: The kind of each: ``"parameter"``, ``"buffer"``, ``"attribute"`` or ``"input"``.
        unused: The gradients of unused parameters.
        parents: The calls that it is derived from.
        group: Makes the chunks' places in a group that exchanges tensors; None if they do not.

    Attributes:
        token: The output of its `Fork`.
        shared: True if it shares nodes with another call.
        parts: Its chunks; None for one without a graph.
        outputs: For chunks that exchange tensors, a description of each output; None without a
            gradient.
        passes: Gradients that each running pass of torch's engine brought, by its number.
    """

    def __init__(
        self,
        executor: Executor,
        leaves: list[Tensor],
        kinds: list[str],
        unused: UnusedGrads,
        parents: Sequence[CallNode] = (),
        group: Any = None,
    ) -> None:
        self.executor = executor
        self.leaves = leaves
        self.kinds = kinds
        self.unused = unused
        self.parents = parents
        self.group = group
        self.shared = bool(parents)
        self.token: Tensor | None = None
        self.parts: list[Part | None] = []
        self.outputs: list[list[Like | None]] = []
        self.passes: dict[int, EnginePass] = {}

    @property
    def now(self) -> EnginePass:
        """The gradients and handles of the running pass of torch's engine."""
        task = torch._C._current_graph_task_id()
        found = self.passes.get(task)
        if found is None:
            found = self.passes[task] = EnginePass({}, [], [])
        return found


Stash = dict[CallNode, dict[int, dict[int, Tensor]]]
"""Gradients of outputs, by the call, the chunk and the number of the output."""


class EnginePass(NamedTuple):
    """Gradients and handles that one pass of the engine brought so far.

    Attributes:
        grads: The gradients, of the call's outputs and of those of calls derived from it.
        pinned: Handles that keep the remote graphs until the trip.
        made: Gradients on GPUs, each with the stream that writes it.
    """

    grads: Stash
    pinned: list[GraphHandle]
    made: list[tuple[Tensor, Any]]

    def wait(self) -> None:
        """Let this thread's streams wait for the gradients. Torch does not: what the Joins hand on
        is nothing, and Fork runs on no GPU, so on the stream of whoever called backward.
        """
        for grad, stream in self.made:
            here = torch.cuda.current_stream(grad.device)
            if here != stream:
                here.wait_stream(stream)
                grad.record_stream(here)


class GraphHandle:
    """Lives as long as torch would keep a graph, and then lets replicas free theirs.

    Args:
        graphs: The chunks' graphs.
        parents: Handles of the graphs that these share nodes with.
    """

    def __init__(self, graphs: Sequence[RemoteGraph], parents: Sequence[GraphHandle] = ()) -> None:
        self._graphs = graphs
        self._parents = list(dict.fromkeys(parents))

    def __del__(self) -> None:
        for graph in self._graphs:
            graph.drop()


def fork(call: CallNode) -> Tensor:
    """Enter the leaves into torch's graph."""
    token: Tensor = Fork.apply(call, *[parent.token for parent in call.parents], *call.leaves)
    call.token = token
    return token


def attach(call: CallNode, handle: GraphHandle, rows: Sequence[list[Tensor]]) -> None:
    """Make the outputs that require a gradient part of torch's graph, in each chunk's list."""
    token = fork(call)
    if call.group is not None:  # not the tensors: these hold the call
        for row in rows:
            like = [(t.shape, t.dtype, t.device) if t.requires_grad else None for t in row]
            call.outputs.append(like)

    def unpack(packed: tuple[GraphHandle, Tensor]) -> Tensor:
        call.now.pinned.append(packed[0])
        return packed[1]

    with saved_tensors_hooks(lambda tensor: (handle, tensor), unpack):
        for chunk, row in enumerate(rows):
            for k, tensor in enumerate(row):
                if tensor.requires_grad:
                    row[k] = Join.apply(call, chunk, k, token, tensor.requires_grad_(False))


class Fork(Function):
    """Leaves in, a token out. Saves no tensor, so it may run again."""

    @staticmethod
    def forward(ctx: Any, call: CallNode, *_: Tensor) -> Tensor:
        # The call holds the token, and the token holds this node. What makes the engine run the
        # node, a Join or a derived call, holds the call.
        ctx.call = weakref.ref(call)
        ctx.set_materialize_grads(False)  # a token has no gradient
        return torch.zeros((), device="cpu")

    @staticmethod
    @ambient.uncompiled
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        call: CallNode = ctx.call()
        if call.executor.closed:
            raise ExecutorClosed(
                "backward: the executor was closed, by close() or shutdown(), after the forward, "
                "and the graphs ended with its replicas; run backward before closing it, or run "
                "forward again with one that is open"
            )
        # Taken out: a pass that fails leaves nothing for the next one.
        ending = call.passes.pop(torch._C._current_graph_task_id())
        ending.wait()
        will_run, captured = _needed(ctx)
        derived = len(call.parents)
        for parent, runs in zip(call.parents, will_run[:derived], strict=True):
            if runs:
                parent.now.grads.update(ending.grads)
                parent.now.pinned.extend(ending.pinned)
        needed = will_run[derived:]
        if derived and not any(needed):
            return (None, *[None] * len(will_run))
        stash = ending.grads
        if torch.is_grad_enabled():
            grads = _derive(call, stash, needed, ending.pinned)
        else:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            keep = keep or any(one.shared for one in stash)
            grads = _collect(call, stash, needed, keep, captured)
        del ending
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (_,) = ctx.saved_tensors  # raises torch's own error if the graph was freed
        now = ctx.call.now
        now.grads.setdefault(ctx.call, {}).setdefault(ctx.chunk, {})[ctx.number] = grads[0]
        if grads[0].is_cuda:
            now.made.append((grads[0], torch.cuda.current_stream(grads[0].device)))
        return None, None, None, None, None


def _needed(ctx: Any) -> tuple[list[bool], bool]:
    """Tell which leaves this pass asks for, and whether it hands out gradients and leaves ``.grad``
    as it is. ``needs_input_grad`` is True for all of them, even under ``autograd.grad(y, x)``.
    """
    found = []
    captured = False
    for node, _ in ctx.next_functions:
        if node is None:
            found.append(False)
            continue
        try:
            found.append(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # of a leaf whose gradient is captured
            found.append(True)
            captured = True
    return found, captured


@exceptions.ShortTraceback()
def _run(
    call: CallNode,
    stash: Stash,
    needed: Sequence[bool],
    keep: bool,
    derived: dict[int, RemoteGraph],
    kept: Set[int] = frozenset(),
    sums: Sums | None = None,
) -> tuple[list[int], list[Answer]]:
    """Make one trip: the backward of every chunk that has gradients.

    Args:
        call: The call.
        stash: The gradients.
        needed: Which leaves get some.
        keep: True if graphs are used again.
        derived: The graphs that are made under ``create_graph``, by chunk.
        kept: The leaves whose gradients stay in the replicas.
        sums: Adds gradients as they come.
    """
    context = ambient.capture()
    pairs = zip(call.leaves, needed, strict=True)
    partial = any([leaf.requires_grad and not need for leaf, need in pairs])
    chunks = sorted(set[int]().union(*stash.values())) if stash else []
    if call.group is not None:  # all take part, or none
        chunks = _fill(call, stash)
    executor = call.executor
    threads = executor.replica_set.threads(len(call.parts))
    places: dict[int, ExchangeRequest] = {} if call.group is None else call.group(chunks)
    summing = {} if kept or derived else _summing(call, chunks, needed)
    places = {**summing, **places}
    calls = []
    trips = []
    codes = _Codes(call, needed, kept, SUMMED if summing else SENT)
    moved: dict[int, dict[int, int]] = {}  # the chunks of a call mostly have the same mark
    for i in chunks:
        part, given, makes = call.parts[i], _given(stash, i), derived.get(i)
        assert part is not None
        if id(part.mark) not in moved:
            moved[id(part.mark)] = part.master.moved_since(part.mark)
        trip = _Trip(
            executor,
            part,
            given,
            codes.of(part, i),
            Terms(i, context, threads, part.where, part.first, places.get(i)),
            moved=moved[id(part.mark)],
            partial=partial,
            keep=keep,
            derived=None if makes is None else makes.key,
        )
        if makes is not None and call.group is None:
            makes.recipe = trip.again
        trips.append(trip)
        needs = [part.graph, *(graph for graph, _ in given if graph is not part.graph)]
        calls.append(
            ChunkCall(
                part.slot,
                "backward",
                trip.request,
                part.master.number,
                needs,
                makes,
                together=call.group is not None,
                home=part.master.home,
            )
        )
    leave = functools.partial(groups.forget, executor) if places else None
    adding = None if sums is None else _Adding(sums, [call.parts[i] for i in chunks])
    try:
        answers = executor.dispatcher.run(  # [11] one trip
            calls, leave=leave, taking=None if summing else adding
        )
    except BaseException:  # some may have been sent, and wait for the others
        if leave is not None:
            leave()
        raise
    if summing:
        answers = _only_sums(call, calls, answers, summing[0].root)
        for at, answer in enumerate(answers):
            if adding is not None:
                adding.take(at, answer)
    executor.replica_set.recorder.totals.backwards += 1
    for i, answer in zip(chunks, answers, strict=True):
        part = call.parts[i]
        if part is not None and part.first and answer.writes.slots:
            part.master.write_back(answer.writes, keep=False)
    apply_warnings(answers)
    if leave is not None and any(answer.failure is not None for answer in answers):
        leave()  # who failed has left it
    raise_first(answers, calls)
    if kept:
        for trip, answer in zip(trips, answers, strict=True):
            trip.note(call.leaves, answer.reached)
    return chunks, answers


def _summing(
    call: CallNode, chunks: Sequence[int], needed: Sequence[bool]
) -> dict[int, ExchangeRequest]:
    """Return the places by which replicas sum gradients of parameters, if all of them do."""
    parts = [part for part in call.parts if part is not None]
    if len(parts) < 2 or len(chunks) < len(call.parts) or not parts[0].master.alike:
        return {}
    if not all(p.graph.on(p.slot) and p.master is parts[0].master for p in parts):
        return {}

    def size() -> int:
        rows = zip(call.leaves, call.kinds, needed, strict=True)
        return sum([t.nbytes for t, kind, need in rows if need and kind == "parameter"])

    return groups.direct(call.executor, [part.slot for part in parts], size)


def _only_sums(
    call: CallNode, calls: Sequence[ChunkCall], answers: list[Answer], root: int
) -> list[Answer]:
    """Leave out what is in the root's sums; if that has none, make again what went there."""
    if any(answer.failure is not None for answer in answers):
        return answers
    if not any(answers[root].reached):
        if call.executor.groups:  # nobody died: chunks have gradients of different parameters
            for part in call.parts:
                part.master.alike = False  # type: ignore[union-attr]
        lost = [i for i, answer in enumerate(answers) if any(answer.reached)]
        if lost:
            answers = [*map(own, answers)]
            for i in lost:
                for graph in calls[i].needs:
                    graph.life = -1  # its replica has freed it
            again = call.executor.dispatcher.run([calls[i] for i in lost])
            for i, answer in zip(lost, again, strict=True):
                answers[i] = answer
        return answers
    leaves = [part.leaves if part is not None else () for part in call.parts]
    there = {at for at, is_sum in zip(leaves[root], answers[root].reached, strict=True) if is_sum}
    for i, answer in enumerate(answers):
        if i != root:  # of a replica that died since it gave its part
            row, inputs = answer.value
            alone = Row([None if at in there else t for at, t in zip(leaves[i], row, strict=True)])
            answers[i] = answer._replace(value=(alone, inputs))
    return answers


class _Adding:
    """Adds gradients as the answers come.

    Args:
        sums: Adds them.
        parts: The chunks, in the order of the answers.
    """

    def __init__(self, sums: Sums, parts: Sequence[Part | None]) -> None:
        self._sums, self._parts = sums, parts
        self.own = sums.own

    def take(self, at: int, answer: Answer) -> None:
        """Add a chunk's gradients."""
        part = self._parts[at]
        if part is not None and answer.failure is None:
            row, inputs = answer.value
            self._sums.add(Share(row, part.leaves))  # [12] sum
            self._sums.add_apart(Share(inputs, part.inputs))


class _Codes:
    """Tells what becomes of the gradients of a chunk's leaves.

    Args:
        call: The call.
        needed: Which leaves get gradients.
        kept: The leaves whose gradients stay in the replicas.
        plain: The fate of other parameters' gradients.
    """

    def __init__(self, call: CallNode, needed: Sequence[bool], kept: Set[int], plain: int) -> None:
        self._call, self._needed, self._kept, self._plain = call, needed, kept, plain
        self._known: dict[int, bytes] = {}

    def of(self, part: Part, chunk: int) -> bytes:
        """Return the code for each leaf of a chunk."""
        inputs = bytes([self._code(at, part, chunk) for at in part.inputs])
        own = self._known.get(id(part.leaves))  # mostly one list for all chunks
        if own is None:
            own = bytes([self._code(at, part, chunk) for at in part.leaves])
            if not self._kept:  # where some are, chunks differ in what they have
                self._known[id(part.leaves)] = own
        return own + inputs

    def _code(self, at: int | None, part: Part, chunk: int) -> int:
        if at is None or not self._needed[at]:
            return LEFT_OUT
        if at in self._kept:
            has = chunk in part.master.resident.having(self._call.leaves[at])
            return ADDED if has else KEPT
        return self._plain if self._call.kinds[at] == "parameter" else SENT


Given = list[tuple[RemoteGraph, list[tuple[int, Tensor]]]]


def _given(stash: Stash, chunk: int) -> Given:
    """Collect the graphs of a chunk that have gradients, with the numbers of their outputs."""
    found: Given = []
    for call, grads in stash.items():
        part = call.parts[chunk] if chunk < len(call.parts) else None
        if chunk in grads and part is not None:
            found.append((part.graph, sorted(grads[chunk].items())))
    return found


def _fill(call: CallNode, stash: Stash) -> list[int]:
    """Give every chunk of a call that exchanges tensors a gradient, zeros where it has none."""
    chunks = [i for i, part in enumerate(call.parts) if part is not None]
    for one, found in stash.items():
        for i in chunks:
            if i not in found:
                found[i] = {}
                for k, like in enumerate(one.outputs[i]):
                    if like is not None:
                        shape, dtype, device = like
                        found[i][k] = torch.zeros(shape, dtype=dtype, device=device)
    return chunks


class _Trip:
    """One chunk's backward.

    Args:
        executor: The executor that runs it.
        part: The chunk.
        given: The graphs that have gradients.
        needed: The fate of the leaves' gradients, as in the request.
        terms: The terms on which it runs.
        fields: Further fields of the request.
    """

    def __init__(
        self,
        executor: Executor,
        part: Part,
        given: Given,
        needed: bytes,
        terms: Terms,
        **fields: Any,
    ) -> None:
        self._executor, self._part, self._given, self._terms = executor, part, given, terms
        self._needed, self._fields = needed, fields
        self._grads = [grad for _, found in given for _, grad in found]
        self._versions = versions_of(self._grads)
        self._keeps = max(needed, default=SENT) >= KEPT
        self._lies: tuple[ReplicaSlot, int] | None = None
        self._graphs = []
        if self._keeps:  # what makes the graphs again, also when torch has freed them
            self._graphs = [(graph, graph.recipe) for graph, _ in given]

    def request(self, slot: ReplicaSlot) -> BackwardRequest:
        """Make the request."""
        if self._keeps:
            self._part.master.resident.bring(self._terms.chunk, slot)
            self._lies = slot, slot.life
        request = self.once(slot)
        if SUMMED in self._needed:  # another time the driver sums
            self._needed = self._needed.replace(bytes([SUMMED]), bytes([SENT]))
            if request.terms.group is not None and not request.terms.group.layers:
                self._terms = self._terms._replace(group=None)
        return request

    def note(self, leaves: Sequence[Tensor], stays: Sequence[bool]) -> None:
        """Note which gradients were kept."""
        kept = []
        for at, there in zip(self._part.all, stays, strict=True):
            if at is not None and there:
                kept.append(leaves[at])
        resident = self._part.master.resident
        resident.kept(self._terms.chunk, self._lies, kept, self)

    def repeat(self, slot: ReplicaSlot) -> None:
        """Make again what was kept, in a replica of the same weights."""
        self.check()
        dispatcher = self._executor.dispatcher
        freed = [graph for graph, _ in self._graphs if graph.recipe is None]
        for graph, recipe in self._graphs:
            graph.recipe = recipe
            if not graph.on(slot):
                dispatcher.remake(graph, slot, "backward")
        call = ChunkCall(slot, "backward", self.once, self._part.master.number)
        answer = dispatcher.receive(dispatcher.send(slot, call))
        if answer is not None:
            raise_first([answer], [call])
        for graph in freed:
            graph.drop()

    def once(self, slot: ReplicaSlot) -> BackwardRequest:
        """Make the request, for a replica that has what it adds to."""
        try:
            # One object may stand here twice: both summands of ``a + b`` get the same gradient.
            grads = [grad.detach() for grad in self._grads]
        except RuntimeError as error:
            ambient.refuse_batches(error)
            raise
        return BackwardRequest(
            self._terms,
            graph=self._part.graph.key,
            outputs=tuple((graph.key, tuple(k for k, _ in found)) for graph, found in self._given),
            grads=grads,
            needed=self._needed,
            forget=taken(slot),
            **self._fields,
        )

    def again(self, slot: ReplicaSlot) -> ChunkCall:
        """Make the call that makes the derived graph again."""
        self.check()
        for graph, _ in [(self._part.graph, None), *self._given]:
            if not graph.on(slot):
                self._executor.dispatcher.remake(graph, slot, "backward")
        return ChunkCall(slot, "backward", self.request, self._part.master.number)

    def check(self) -> None:
        """Refuse to run again with other gradients."""
        if versions_of(self._grads) != self._versions:
            raise changed("a gradient that it was given was changed")


def changed(what: str) -> StateChanged:
    """Make the error for a graph that cannot be made again."""
    return StateChanged(
        "backward: the replica that held the graph died, and the graph cannot be made again, "
        f"because {what} since the forward; run forward again"
    )


def _collect(
    call: CallNode, stash: Stash, needed: Sequence[bool], keep: bool, captured: bool
) -> list[Tensor | None]:
    """First order: sum the chunks' gradients."""
    with call.executor.trip():
        kept = frozenset[int]() if captured else _kept(call, needed)
        adding = Sums(call.leaves)
        _run(call, stash, needed, keep, {}, kept, adding)
        sums = adding.finish()
        filled = gradients.filled(sums, call.kinds)
        resident: Any = next(p.master.resident for p in call.parts if p) if kept else None
        kept = frozenset(at for at in kept if sums[at] is None)  # sparse ones come all the same
        for at in kept:
            if resident.having(call.leaves[at]):
                filled.add("parameter")
        zeros = call.unused == "zeros" and "parameter" in filled
        for at in kept:
            resident.stand_in(call.leaves[at], zeros)
        needed = [need and at not in kept for at, need in enumerate(needed)]  # nor zeros
    whole = [True] * len(sums)
    if any([one is not None and one.layout is not torch.strided for one in sums]):
        whole = adding.whole([part.all for part in call.parts if part is not None])
    return gradients.settle(sums, call.leaves, needed, whole, call.unused, filled, call.kinds)


def _kept(call: CallNode, needed: Sequence[bool]) -> Set[int]:
    """Return the leaves whose gradients stay in the replicas that train them."""
    masters = {part.master for part in call.parts if part is not None}
    resident = masters.pop().resident if len(masters) == 1 else None
    if resident is None:
        return frozenset()
    resident.begin()
    kept = []
    for at, (leaf, kind) in enumerate(zip(call.leaves, call.kinds, strict=True)):
        if needed[at] and kind == "parameter" and resident.keeps(leaf):
            kept.append(at)
    return frozenset(kept)


def _derive(
    call: CallNode, stash: Stash, needed: Sequence[bool], pinned: Sequence[GraphHandle]
) -> list[Tensor | None]:
    """Higher order: the same trip, with results that can be differentiated again."""
    for one in stash:
        one.shared = True
    executor = call.executor
    incoming: dict[int, list[Tensor]] = {}
    if call.group is not None:
        _fill(call, stash)
    for i in sorted(set[int]().union(*stash.values())) if stash else []:
        incoming[i] = [grad for _, found in _given(stash, i) for _, grad in found]
    leaves = [grad for grads in incoming.values() for grad in grads]
    kinds = ["input"] * len(leaves)
    derived = CallNode(executor, leaves, kinds, call.unused, parents=[*stash], group=call.group)
    graphs = {i: RemoteGraph(executor.next_key()) for i in incoming}
    handle = GraphHandle([*graphs.values()], pinned)
    with executor.trip():
        chunks, answers = _run(call, stash, needed, True, graphs)
        rows: list[list[Tensor]] = [[] for _ in call.parts]
        derived.parts = [None] * len(call.parts)
        places: list[tuple[int, int, int]] = []
        at = 0
        for i, answer in zip(chunks, answers, strict=True):
            part = call.parts[i]
            assert part is not None
            own = range(at, at + len(incoming[i]))
            at = own.stop
            derived.parts[i] = part._replace(graph=graphs[i], leaves=[], inputs=own)
            found = [grad for row in answer.value for grad in row]
            for leaf, grad in zip(part.all, found, strict=True):
                if grad is not None:
                    if leaf is not None:
                        places.append((leaf, i, len(rows[i])))
                    mine = home_of(grad.detach(), call.leaves[0].device).clone()
                    rows[i].append(mine.requires_grad_(grad.requires_grad))
    attach(derived, handle, rows)
    sums: list[Tensor | None] = [None] * len(call.leaves)
    for leaf, i, row in places:
        before = sums[leaf]
        sums[leaf] = rows[i][row] if before is None else before + rows[i][row]
    whole = [True] * len(sums)
    filled = gradients.filled(sums, call.kinds)
    return gradients.settle(sums, call.leaves, needed, whole, call.unused, filled, call.kinds)

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

[Note: outputs of outputs]
With one device upstream runs the module itself, so that one output may be differentiated by another
that it was computed from: a loss by the features beside it. The Join of such an output has the
others among its inputs, and gives them

- nothing, in most passes: the replica's engine does, in Fork's one trip, which also brings the
  gradients of those with ``retain_grad``;
- what a trip of its own brings, where the pass ends here (``autograd.grad(loss, features)``), and
  where features have a hook. What goes on to Fork then is what they have besides; if a hook
  changed it, all that they have, in place of what the replica's engine would come to.

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

import contextlib
import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from operator import not_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from raydp_parallel import devices
from raydp_parallel.calls import gradients, held_gradients, replay, synced_call
from raydp_parallel.calls.chunk_balance import ChunkTimes
from raydp_parallel.calls.dispatcher import apply_effects
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.group_reduction import (
    GroupReduction,
    ReductionPart,
    keep_shared,
    plan,
    wants_shared,
)
from raydp_parallel.calls.held_gradients import HeldPass
from raydp_parallel.calls.remote_gradients import GradientState, RemoteGradient, Term
from raydp_parallel.calls.synced_call import SyncedCall
from raydp_parallel.cluster.replica_slots import (
    ChunkAnswer,
    ChunkCall,
    GraphHandle,
    RemoteGraph,
    ReplicaSlot,
)
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import ExecutorClosed
from raydp_parallel.options import UnusedGrads
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import BackwardRequest, OutputGraph


class CallNode:
    """What backward needs to know of one call.

    Args:
        executor: The executor that runs it.
        leaves: The tensors that gradients may be asked for.
        kinds: The kind of each leaf, see `Leaves.kinds`; ``"input"`` for inputs.
        unused: What unused parameters get.
        shared: Whether it shares nodes with another call.
        parents: The calls that it is derived from.

    Attributes:
        token: The output of its `Fork`, once the leaves are part of torch's graph.
        times: Takes the times of its chunks, if chunks are balanced.
        synced: How its chunks exchange tensors while they run; None if they do not.
        outputs: If they do, the outputs of each chunk, None for those without a gradient.
        parts: What concerns each chunk; None for one that makes no gradients.
        passes: What passes of torch's engine have to do with it.
    """

    def __init__(
        self,
        executor: Executor,
        leaves: list[Tensor],
        kinds: list[str],
        unused: UnusedGrads,
        shared: bool = False,
        parents: Sequence[CallNode] = (),
    ) -> None:
        self.executor = executor
        self.leaves = leaves
        self.kinds = kinds
        self.unused = unused
        self.shared = shared
        self.parents = parents
        self.token: Tensor | None = None
        self.times: ChunkTimes | None = None
        self.synced: SyncedCall | None = None
        self.outputs: list[list[tuple[torch.Size, torch.dtype, torch.device] | None]] = []
        self.parts: list[ReductionPart | None] = []
        self.passes = CallPasses()

    @property
    def now(self) -> EnginePass:
        """What the running pass of torch's engine brought."""
        task = torch._C._current_graph_task_id()
        found = self.passes.running.get(task)
        if found is None:
            found = self.passes.running[task] = EnginePass({}, [], [], InnerGradients())
        return found


Stash = dict[CallNode, dict[int, dict[int, Tensor]]]
"""Gradients of outputs, by the call, the chunk and the number of the output."""


class CallPasses:
    """What passes of torch's engine have to do with a call.

    Attributes:
        running: What each running pass brought, by its number.
        watched: The call's outputs that others were computed from, in the order in which they were.
    """

    def __init__(self) -> None:
        self.running: dict[int, EnginePass] = {}
        self.watched: list[WatchedOutput] = []


class EnginePass(NamedTuple):
    """What one pass of the engine brought so far.

    Attributes:
        grads: The gradients, of the call's outputs and of those of calls derived from it.
        pinned: What keeps the remote graphs alive until the trip.
        tracks: On a GPU, the streams that made the gradients. Fork's node belongs to the CPU, so
            that the engine does not make it wait for them.
        inner: What outputs of the call gave to others.
    """

    grads: Stash
    pinned: list[GraphHandle]
    tracks: list[devices.Track]
    inner: InnerGradients

    def take(self, other: EnginePass) -> None:
        """Add what another pass brought."""
        self.grads.update(other.grads)
        self.pinned.extend(other.pinned)
        self.tracks.extend(other.tracks)


def fork(call: CallNode) -> Tensor:
    """Enter the leaves into torch's graph."""
    token: Tensor = Fork.apply(call, *[parent.token for parent in call.parents], *call.leaves)
    call.token = token
    return token


def attach(
    call: CallNode,
    token: Tensor,
    handle: GraphHandle,
    tensors: Sequence[list[Tensor]],
    joined: bool = False,
    graph: OutputGraph | None = None,
) -> None:
    """Make the outputs that require a gradient part of torch's graph, in each chunk's list.

    Args:
        call: The call.
        token: The output of its `Fork`.
        handle: Keeps its remote graphs.
        tensors: The outputs of each chunk.
        joined: Whether outputs of the same number will be joined, so that they are only ever
            differentiated together.
        graph: How the outputs of the only chunk hang together; None if they do not.
    """
    columns: dict[Any, list[tuple[int, int]]] = {}
    if call.synced is not None:
        call.outputs = [
            [(t.shape, t.dtype, t.device) if t.requires_grad else None for t in row]
            for row in tensors
        ]
    for chunk, row in enumerate(tensors):
        for k, tensor in enumerate(row):
            if tensor.requires_grad:
                columns.setdefault(k if joined else (chunk, k), []).append((chunk, k))

    def unpack(packed: tuple[GraphHandle, Tensor]) -> Tensor:
        call.now.pinned.append(packed[0])
        return packed[1]

    depends: Mapping[int, Sequence[int]] = {} if graph is None else graph.depends
    depended = {*itertools.chain(*depends.values())}
    leaf = torch.zeros((), device="cpu", requires_grad=True) if depends else None
    rows = [*columns.values()]
    if graph is not None:
        rows = [columns[0, k] for k in graph.order if (0, k) in columns]
        rows += [places for (_, k), places in columns.items() if k not in graph.order]
    with saved_tensors_hooks(lambda tensor: (handle, tensor), unpack):
        for places in rows:
            k = places[0][1]
            nearest = [other for other in depends.get(k, ()) if (0, other) in columns]
            watched = WatchedOutput(k, call) if k in depended else None
            before = len(call.passes.watched)
            found = Join.apply(
                call,
                places,
                InnerOutputs(watched, nearest, before),
                token,
                *([leaf, *[tensors[0][other] for other in nearest]] if nearest else []),
                *[tensors[i][k].requires_grad_(False) for i, k in places],
            )
            for (i, k), tensor in zip(places, found if len(places) > 1 else (found,), strict=True):
                tensors[i][k] = tensor
            if watched is not None:
                watched.watch(tensors[0][k])
                call.passes.watched.append(watched)
    for k in () if graph is None else graph.retained:
        if tensors[0][k].requires_grad:
            tensors[0][k].retain_grad()


class InnerOutputs(NamedTuple):
    """What an output has to do with others.

    Attributes:
        own: The output, if others were computed from it.
        nearest: The numbers of those that it was computed from; their tensors are inputs of its
            `Join`, behind a leaf that no pass is asked for.
        before: How many that others were computed from were computed before it.
    """

    own: WatchedOutput | None
    nearest: Sequence[int]
    before: int


class InnerGradients:
    """What outputs gave to others in one pass, by the numbers of these.

    Attributes:
        pending: What is to be given on the way.
        given: What was given.
        seen: The whole gradients, before hooks of the program change them.
        whole: Those that a hook changed.
        ends: Whether the end of the pass is waited for.
    """

    def __init__(self) -> None:
        self.ends = False
        self.pending: dict[int, Tensor] = {}
        self.given: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor] = {}
        self.whole: set[int] = set()

    def add(self, k: int, grad: Tensor | None) -> None:
        """Add to what is to be given to an output."""
        if grad is not None:
            self.pending[k] = self.pending[k] + grad if k in self.pending else grad

    def give(self, k: int) -> Tensor | None:
        """What an output gets now."""
        grad = self.pending.pop(k, None)
        if grad is not None:
            self.given[k] = self.given[k] + grad if k in self.given else grad
        return grad

    def besides(self, k: int, grad: Tensor) -> Tensor | None:
        """What an output has in its gradient besides what it was given."""
        given = self.given.get(k)
        if given is None:
            return grad
        return None if grad is given else grad - given


class WatchedOutput:
    """An output that others were computed from.

    Args:
        number: Its number.
        call: Its call.
    """

    def __init__(self, number: int, call: CallNode) -> None:
        self.number = number
        self._call = weakref.ref(call)
        self._ref: Any = None
        self._hooks: Any = {}

    def watch(self, tensor: Tensor) -> None:
        """Watch the tensor, with a hook before all others."""
        self._ref = weakref.ref(tensor)
        hook = functools.partial(_see, weakref.ref(self))
        tensor.register_hook(torch.utils.hooks.unserializable_hook(hook))
        self._hooks = tensor._backward_hooks  # lives on when the tensor is gone

    @property
    def tensor(self) -> Tensor | None:
        """The output; None if it is gone."""
        found: Tensor | None = self._ref()
        return found

    @property
    def has_hooks(self) -> bool:
        """Whether the program gave it a hook."""
        return len(self._hooks) > 1

    @property
    def runs(self) -> bool:
        """Whether the pass runs its node, or captures its gradient."""
        node = None if self.tensor is None else self.tensor.grad_fn
        return node is not None and torch._C._will_engine_execute_node(node)

    def see(self, grad: Tensor) -> None:
        """Note its whole gradient."""
        call = self._call()
        if call is not None:
            call.now.inner.seen[self.number] = grad


def _see(ref: Any, grad: Tensor | None) -> None:
    watched = ref()
    if watched is not None and grad is not None:
        watched.see(grad)


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
    @ambient_state.uncompiled
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        call: CallNode = ctx.call()
        if call.executor.replica_set.closed:
            raise closed()
        # Taken out: a pass that fails leaves nothing for the next one.
        ending = call.passes.running.pop(torch._C._current_graph_task_id())
        if ending.tracks:
            devices.follow(ending.tracks)
        will_run, captured = _needed(ctx)
        derived = len(call.parents)
        if derived and not any(will_run[:derived]):
            _refuse_inner(call.parents)
        for parent, runs in zip(call.parents, will_run[:derived], strict=True):
            if runs:
                parent.now.take(ending)
        needed = will_run[derived:]
        if derived and not any(needed):
            return (None, *[None] * len(will_run))
        stash = ending.grads
        create = torch.is_grad_enabled()
        for one, found in stash.items():
            one.shared |= create
            if one.synced is not None:
                synced_call.fill(found, one.outputs)
        keep = torch._C._autograd._get_current_graph_task_keep_graph() or any(
            one.shared for one in stash
        )
        asked = _asked(call, ending)
        grads = (
            _derive(call, stash, needed, asked)
            if create
            else _collect(call, stash, needed, keep, accumulates=not captured, asked=asked)
        )
        del ending
        if not all(map(devices.is_cpu, {leaf.device for leaf in call.leaves})):
            devices.hand_over(grads)
        return (None, *[None] * derived, *grads)


class Join(Function):
    """A remote output, or several that are joined. The place of each is its chunk and its number
    there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: CallNode,
        places: Sequence[tuple[int, int]],
        inner: InnerOutputs,
        token: Tensor,
        *tensors: Tensor,
    ) -> Any:
        ctx.call, ctx.places, ctx.inner = call, places, inner
        outputs = tensors[-len(places) :]
        # One of several may be unused, and one that others depend on may have what comes from them.
        ctx.set_materialize_grads(len(outputs) == 1 and inner.own is None)
        ctx.save_for_backward(token)
        # the outputs themselves, not views of them: users may write to them in place
        ctx.mark_dirty(*outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    @ambient_state.uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (_,) = ctx.saved_tensors  # raises torch's own error if the graph was freed
        call, now = ctx.call, ctx.call.now
        own, nearest, before = ctx.inner
        for (chunk, k), grad in zip(ctx.places, grads, strict=True):
            passed = grad
            if own is not None and grad is not None:
                if now.inner.seen.get(k, grad) is not grad:
                    now.inner.whole.add(k)
                else:
                    passed = now.inner.besides(k, grad)
            if passed is not None:
                now.grads.setdefault(call, {}).setdefault(chunk, {})[k] = passed
                track = None if devices.is_cpu(passed.device) else devices.track(passed)
                if track is not None:
                    now.tracks.append(track)
        given: list[Tensor | None] = []
        if nearest:
            runs = torch._C._will_engine_execute_node
            fork, leaf = (node for node, _ in ctx.next_functions[:2])
            ends_here = not runs(fork)
            grad = None if grads[0] is None else now.inner.besides(ctx.places[0][1], grads[0])
            wanted = [
                w.number for w in call.passes.watched[:before] if _is_wanted(w, leaf, ends_here)
            ]
            if wanted and grad is not None:
                found = _inner(call, ctx.places[0], grad, wanted, ends_here)
                for k, one in zip(wanted, found, strict=True):
                    now.inner.add(k, one)
            given = [None, *map(now.inner.give, nearest)]
            if ends_here and not now.inner.ends:
                now.inner.ends = True
                task = torch._C._current_graph_task_id()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: call.passes.running.pop(task, None))  # as Fork would
        return None, None, None, None, *given, *[None] * len(grads)


def _is_wanted(output: WatchedOutput, leaf: Any, ends_here: bool) -> bool:
    """Whether an output's gradient is to be given to it by others.

    Args:
        output: The output.
        leaf: The node of a leaf that is run unless the pass was asked for chosen tensors.
        ends_here: Whether the pass runs no Fork.
    """
    if torch._C._will_engine_execute_node(leaf):
        return output.has_hooks
    return output.runs and (ends_here or output.has_hooks)


def _inner(
    call: CallNode, place: tuple[int, int], grad: Tensor, wanted: Sequence[int], ends_here: bool
) -> list[Tensor | None]:
    """What an output with a gradient gives others that it was computed from.

    Args:
        call: The call.
        place: The output's chunk and number.
        grad: Its gradient.
        wanted: The numbers of the others.
        ends_here: Whether the pass makes no other trip.
    """
    if call.executor.replica_set.closed:
        raise closed()
    stash: Stash = {call: {place[0]: {place[1]: grad}}}
    needed = [False] * len(call.leaves)
    asked = AskedOutputs(inner=(*wanted,), tells=ends_here)
    if torch.is_grad_enabled():
        call.shared = True
        found = _derive(call, stash, needed, asked)
    else:
        (answer,) = answers = _run(call, stash, needed, keep=True, derived={}, asked=asked)
        _finish(call, [part for _, part in _parts(call, stash)], answers)
        assert answer.reply.value is not None
        tensors = codec.unpack(answer.reply.value, answer.attachments, call.leaves[0].device)
        found = [*codec.load(answer.reply.value, tensors)]
    if not devices.is_cpu(call.leaves[0].device):
        devices.hand_over(found)
    return found


class AskedOutputs(NamedTuple):
    """What a trip back has to do with outputs of outputs, by their numbers.

    Attributes:
        inner: Those of which the gradients are asked for, in place of leaves'.
        whole: Those of which the given gradients stand for what comes from others, too.
        noted: Those of which the gradients are asked for besides.
        tells: Whether what hooks in the replica changed is told.
    """

    inner: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    noted: tuple[int, ...] = ()
    tells: bool = True


_NO_OUTPUTS = AskedOutputs()


def _asked(call: CallNode, ending: EnginePass) -> AskedOutputs:
    """What Fork's trip has to do with outputs of outputs."""
    inner = ending.inner
    if not call.passes.watched:
        return _NO_OUTPUTS
    own = ending.grads.get(call, {}).get(0, {})
    noted = [
        output.number
        for output in call.passes.watched
        if (tensor := output.tensor) is not None
        and tensor.retains_grad
        and output.number not in inner.given
    ]
    return AskedOutputs(whole=tuple([k for k in own if k in inner.whole]), noted=tuple(noted))


def _retain(call: CallNode, answer: ChunkAnswer, direct: Mapping[int, Tensor], noted: Any) -> None:
    """Let outputs with ``retain_grad`` have what came to them inside the replica."""
    parcel = answer.reply.noted
    if parcel is None:
        return
    row = codec.load(parcel, codec.unpack(parcel, answer.attachments, call.leaves[0].device))
    found = dict(zip(noted, row, strict=True))
    for output in call.passes.watched:
        tensor, grad = output.tensor, found.get(output.number)
        if tensor is not None and grad is not None:
            if output.number in direct:  # which torch added
                grad = grad - direct[output.number].detach()
            tensor.grad = grad if tensor.grad is None else tensor.grad + grad


def _refuse_inner(parents: Sequence[CallNode]) -> None:
    """Raise an error if a pass asks for a gradient of second order by an output."""
    for parent in parents:
        if any(output.runs for output in parent.passes.watched):
            raise RuntimeError(
                "backward: a gradient that was made with create_graph is differentiated by an "
                "output of the module, which is not possible here; differentiate by the module's "
                "inputs or parameters, or let the module compute the gradient"
            )
        _refuse_inner(parent.parents)


def closed() -> ExecutorClosed:
    """The error of a backward after the executor's end."""
    return ExecutorClosed(
        "backward: the executor was closed, by close() or shutdown(), after the forward, and the "
        "graphs ended with its replicas; run backward before closing it, or run forward again with "
        "one that is open"
    )


def _needed(ctx: Any) -> tuple[list[bool], bool]:
    """Which leaves this pass asks for, and whether it captures a gradient, as ``autograd.grad``
    does. ``needs_input_grad`` is True for all of them, even under ``autograd.grad(y, x)``.
    """
    nodes = [node for node, _ in ctx.next_functions]
    if None not in nodes:
        with contextlib.suppress(RuntimeError):  # of a leaf with a gradient that is captured
            return [*map(torch._C._will_engine_execute_node, nodes)], False
    found = [*map(_will_run, nodes)]
    return [one is not False for one in found], None in found


def _will_run(node: Any) -> bool | None:
    """Whether the engine runs a node; None if it does not, but captures the leaf's gradient."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def _run(
    call: CallNode,
    stash: Stash,
    needed: Sequence[bool],
    keep: bool,
    derived: dict[int, RemoteGraph],
    reduction: GroupReduction | None = None,
    chosen: Sequence[int] | None = None,
    stays: bool = False,
    held: HeldPass | None = None,
    asked: AskedOutputs = _NO_OUTPUTS,
) -> list[ChunkAnswer]:
    """One trip: the backward of every chunk that has gradients, or of those ``chosen``
    among them.
    """
    ambient = ambient_state.capture()
    # A leaf that was left out of torch's graph, because no chunk reached it, gets no gradient in a
    # replica either.
    partial = any(leaf.requires_grad for leaf in itertools.compress(call.leaves, map(not_, needed)))
    threads = call.executor.replica_set.backend.threads(len(call.parts))
    synced = call.synced if chosen is None else None
    early = "courier" in call.executor.options.gpu_paths

    def job(number: int, i: int, part: ReductionPart) -> ChunkCall:
        given, makes = _given(stash, i), derived.get(i)
        needs, hold = [graph for graph, _ in given], held
        if reduction is not None and reduction.fetches(number, part.slot):
            hold = None
        if hold is not None:
            makes = hold.makes.get(i)
            needs += hold.needs(i)
        outputs = tuple((graph.key, tuple(k for k, _ in found)) for graph, found in given)
        grads = _distinct([grad for _, found in given for _, grad in found])

        def prepare(slot: ReplicaSlot, attachments: Attachments) -> BackwardRequest:
            taken = None if synced is None else synced.part(i, slot)
            try:
                parcel, sent = codec.encode(tuple(grads), attachments, "gradients")
            except RuntimeError as error:
                ambient_state.refuse_batches(error)
                raise
            wanted = tuple(map(needed.__getitem__, part.leaves))
            name = slot.name_of(part.tracker.id, part.slot)
            training = part.tracker.training
            news = None if training is None else training.news(slot, name, attachments)
            moved = part.tracker.moved_since(part.mark, slot.contents.held.get(name, 0))
            key = makes.key if makes is not None and hold is None else None
            request = BackwardRequest(
                model=name,
                graph=part.graph.key,
                outputs=outputs,
                grads=parcel,
                needed=wanted,
                partial=partial,
                keep=keep,
                derived=key,
                bumped=moved,
                write_back=part.first and asked.tells,
                threads=threads,
                context=ambient,
                forget=slot.contents.forget(),
                inner=asked.inner,
                whole=asked.whole,
                noted=asked.noted,
                by_host=devices.is_cpu(call.leaves[0].device),
                part=taken,
                narrow=None if part.gradient_dtype is None else (part.gradient_dtype, part.own),
                stays=part.own if stays else 0,
                hold=None if hold is None else hold.hold(i),
                early=early,
            )
            before = [(graph, graph.recipe) for graph in needs if graph.recipe is not None]
            # A backward that exchanges tensors cannot run again without the other chunks.
            if makes is not None and len(before) == len(needs) and synced is None:
                what = "the gradients that it was given"
                kept = replay.keep(parcel, sent, what, copied=hold is not None)
                recipe = replay.derived(request, kept, before, part.slot, part.tracker.id)
                makes.recipe = recipe if hold is None else hold.recipe(recipe)
            request = request._replace(training=news)
            if reduction is None:
                return request
            return request._replace(**reduction.fields(number, slot))

        made = makes if reduction is None else reduction.kept[number]
        on_answer = None if reduction is None else reduction.take_answer
        return ChunkCall(
            part.slot,
            "backward",
            prepare,
            model=part.tracker.id,
            makes=made,
            needs=needs,
            on_answer=on_answer,
        )

    for tracker in {part.tracker for part in call.parts if part is not None}:
        if tracker.training is not None:
            tracker.training.check()
            tracker.training.trim()  # what replicas no longer read is theirs for this backward
    jobs = [job(number, i, part) for number, (i, part) in enumerate(_parts(call, stash))]
    if synced is not None:
        answers = synced.run(jobs)
    else:
        if chosen is not None:
            jobs = [jobs[number] for number in chosen]
        answers = call.executor.run(jobs)  # [11]
    if held is not None:
        held.note(answers)
    if asked.noted and answers:  # none if all gradients are undefined
        _retain(call, answers[0], stash.get(call, {}).get(0, {}), asked.noted)
    return answers


def _parts(call: CallNode, stash: Stash) -> list[tuple[int, ReductionPart]]:
    """The chunks that have gradients, with their numbers in the call."""
    chunks = set[int]().union(*stash.values())
    return [(i, part) for i, part in enumerate(call.parts) if part is not None and i in chunks]


def _given(stash: Stash, chunk: int) -> list[tuple[RemoteGraph, list[tuple[int, Tensor]]]]:
    """The graphs of a chunk that have gradients, with the numbers of their outputs."""
    found = [
        (call.parts[chunk], sorted(grads[chunk].items()))
        for call, grads in stash.items()
        if chunk in grads
    ]
    return [(part.graph, outputs) for part, outputs in found if part is not None]


def _finish(call: CallNode, parts: Sequence[ReductionPart], answers: Sequence[ChunkAnswer]) -> None:
    """Count one trip back, and apply its effects."""
    call.executor.replica_set.totals.backwards += 1
    if call.times is not None:
        numbers = {id(part): number for number, part in enumerate(call.parts)}
        call.times.note("backward", [numbers[id(part)] for part in parts], answers)
    apply_effects(
        [(part.tracker if part.first else None, a) for part, a in zip(parts, answers, strict=True)]
    )


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each as an object of its own. One object can stand in the list twice: both
    summands of ``a + b`` receive the same gradient.
    """
    first = {id(tensor): at for at, tensor in reversed([*enumerate(tensors)])}
    return [
        tensor if first[id(tensor)] == at else tensor.detach() for at, tensor in enumerate(tensors)
    ]


def _run_summed(
    call: CallNode,
    stash: Stash,
    needed: Sequence[bool],
    keep: bool,
    reduction: GroupReduction,
    held: HeldPass | None,
) -> list[ChunkAnswer]:
    """One trip with the gradients summed among the replicas; a second one if that went wrong."""
    parts = [part for _, part in _parts(call, stash)]
    try:
        answers = _run(call, stash, needed, keep, {}, reduction=reduction, held=held)
    except BaseException:
        reduction.abandon()
        raise
    missing = reduction.missing(answers)
    _finish(call, parts, answers)
    if missing:
        if held is not None:
            held.spend()
        fetched = _run(
            call, stash, needed, keep, {}, reduction=reduction, chosen=missing, held=held
        )
        apply_effects([(None, answer) for answer in fetched])
        for number, answer in zip(missing, fetched, strict=True):
            answers[number] = answer
    return answers


def _collect(
    call: CallNode,
    stash: Stash,
    needed: Sequence[bool],
    keep: bool,
    accumulates: bool,
    asked: AskedOutputs,
) -> list[Tensor | None]:
    """First order: the sums of the chunks' gradients, or what stands for those that stay in the
    replicas.
    """
    held = None
    numbered = _parts(call, stash)
    if accumulates and any(part.tracker.holds for _, part in numbered):
        held = held_gradients.begin(call.executor, numbered, call.leaves, needed)
    try:
        return _sums(call, stash, numbered, needed, keep, held=held, asked=asked)
    except BaseException:
        if held is not None:
            held.abandon()
        raise
    finally:
        if held is not None:
            held.end()


def _sums(
    call: CallNode,
    stash: Stash,
    numbered: Sequence[tuple[int, ReductionPart]],
    needed: Sequence[bool],
    keep: bool,
    held: HeldPass | None,
    asked: AskedOutputs,
) -> list[Tensor | None]:
    parts = [part for _, part in numbered]
    stays = held is not None and bool(held.makes)
    lie: list[tuple[RemoteGraph, ReplicaSlot]] = []
    for i, part in numbered:
        lie += [(graph, part.slot) for graph, _ in _given(stash, i)]
        lie += [(graph, part.slot) for graph in held.needs(i)] if held is not None else []
    there = all(graph.on(slot) for graph, slot in lie)
    reduction = None
    if parts and there and not stays and call.executor.exchanges:
        reduction = plan(call.executor, parts, call.leaves, needed)
    summed: Mapping[int, int] = {}
    stay: Mapping[int, Term] = {}
    if reduction is None:
        trained = bool(parts) and parts[0].tracker.training is not None
        shared = trained and not stays and wants_shared(parts)
        answers = _run(call, stash, needed, keep, {}, stays=shared, held=held, asked=asked)
        _finish(call, parts, answers)
        shares = [
            gradients.share(answer, part.leaves)
            for part, answer in zip(parts, answers, strict=True)
        ]
        lying = keep_shared(parts, shares, call.leaves) if shared else None
        if lying is not None:
            stay, shares, summed = lying
    else:
        try:
            answers = _run_summed(call, stash, needed, keep, reduction, held=held)
            shares, summed = reduction.shares(answers)
            if reduction.stays is not None:
                stay = reduction.terms(summed, parts[0].tracker.training.fetch)
        finally:
            reduction.close()
    device = call.leaves[0].device
    with call.executor.recorder.reducing([answer.slot for answer in answers]):
        # [12]
        if any(part.gradient_dtype is not None for part in parts):
            sums = gradients.total_of_narrow(shares, device, call.leaves)
        else:
            sums = gradients.total(shares, device, len(call.leaves))
        for leaf, term in stay.items():
            sums[leaf] = RemoteGradient(call.leaves[leaf], GradientState((term,)))
        for leaf, standin in held.finish(answers).items() if held is not None else ():
            sent = sums[leaf]  # by a chunk with a gradient of another kind
            sums[leaf] = standin if sent is None else standin.fetched() + sent
        whole = [True] * len(sums)
        if not {one.layout for one in sums if one is not None} <= {torch.strided}:
            whole = _whole(call, shares[-len(parts) :] if parts else [], summed)
        found = gradients.settle(
            sums, call.leaves, kinds=call.kinds, needed=needed, whole=whole, unused=call.unused
        )
        return _unfilled(sums, found, call.leaves, parts[0].tracker) if stay else found


def _unfilled(
    sums: Sequence[Tensor | None],
    settled: list[Tensor | None],
    leaves: Sequence[Tensor],
    tracker: ModuleTracker,
) -> list[Tensor | None]:
    """The gradients, with the zeros of unused parameters where replicas can make them."""
    trained = {id(tensor) for tensor in tracker.owned.tensors.values()}
    return [
        RemoteGradient(found, GradientState((), zeros=True))
        if one is None and found is not None and id(leaf) in trained
        else found
        for one, found, leaf in zip(sums, settled, leaves, strict=True)
    ]


def _whole(
    call: CallNode, shares: Sequence[gradients.GradientShare], summed: Mapping[int, int]
) -> list[bool]:
    """For each leaf whether every chunk that has it gave a gradient, here or into the replicas'
    sum.
    """
    expected = [0] * len(call.leaves)
    given = [summed.get(leaf, 0) for leaf in range(len(call.leaves))]
    for part in call.parts:
        for leaf in part.leaves if part is not None else ():
            expected[leaf] += 1
    for one in shares:
        present = codec.load(one.parcel, range(len(one.parcel.specs)))
        for at, row in zip(one.leaves, present, strict=True):
            if at is not None:
                given[at] += row is not None
    return [a == b for a, b in zip(expected, given, strict=True)]


def _derive(
    call: CallNode,
    stash: Stash,
    needed: Sequence[bool],
    asked: AskedOutputs,
) -> list[Tensor | None]:
    """Higher order: the same trip, with results that can be differentiated again."""
    parts = dict(_parts(call, stash))
    incoming = {i: [grad for _, found in _given(stash, i) for _, grad in found] for i in parts}
    leaves = [grad for grads in incoming.values() for grad in grads]
    derived = CallNode(
        call.executor,
        leaves,
        kinds=["input"] * len(leaves),
        unused=call.unused,
        shared=True,
        parents=[*stash],
    )
    derived.synced = call.synced
    graphs = {i: RemoteGraph() for i in parts}
    handle = GraphHandle([*graphs.values()])
    token = fork(derived)
    answers = _run(call, stash, needed, True, graphs, asked=asked)
    _finish(call, [*parts.values()], answers)
    at = 0
    found: list[list[Tensor]] = [[] for _ in call.parts]
    derived.parts = [None] * len(call.parts)
    places: list[tuple[int, int, int]] = []
    present: Sequence[int | None] = ()
    for (i, part), answer in zip(parts.items(), answers, strict=True):
        own = range(at, at + len(incoming[i]))
        at = own.stop
        derived.parts[i] = part._replace(graph=graphs[i], leaves=own, own=0)
        assert answer.reply.value is not None
        found[i] = codec.unpack(answer.reply.value, answer.attachments, call.leaves[0].device)
        present = codec.load(answer.reply.value, range(len(found[i])))
        if not asked.inner:
            places += [
                (leaf, i, row)
                for leaf, row in zip(part.leaves, present, strict=True)
                if row is not None
            ]
    attach(derived, token, handle, found)
    if asked.inner:
        return [None if row is None else found[0][row] for row in present]
    sums: list[Tensor | None] = [None] * len(call.leaves)
    for leaf, i, row in places:
        one = sums[leaf]
        sums[leaf] = found[i][row] if one is None else one + found[i][row]
    whole = [True] * len(sums)
    return gradients.settle(
        sums, call.leaves, kinds=call.kinds, needed=needed, whole=whole, unused=call.unused
    )

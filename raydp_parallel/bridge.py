"""The seam between torch's graph in the driver and the graphs in the replicas.

  leaves ──► Fork ──► token ──► Join ──► output 0        forward: one Fork per call, one Join per output
                        └─────► Join ──► output 1
  grads  ◄── Fork ◄─────────── Join ◄── gradient         backward: Joins put their gradients aside, and Fork, which
                                                          the engine runs last, makes one trip for all of them

[Note: how long a remote graph lives]
Exactly as long as torch would keep it. Each Join saves the token under hooks that pack it with the call's `Handle`;
when the engine or the garbage collector frees the saved tensor, the handle goes, and its end frees the remote graphs.
The engine frees Join's saved tensor before it reaches Fork, so unpacking pins the handle until Fork has made its trip.

[Note: higher orders]
Under ``create_graph`` Fork's backward is itself a call whose leaves are the old leaves and the incoming gradients, and
whose graphs the replicas kept. Such a call shares nodes with the one it came from: from then on neither lets torch free
buffers in passing, and the handles free everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from raydp_parallel import abreast, codec, context, devices, outcome, reduction, replay
from raydp_parallel.executor import Executor
from raydp_parallel.jobs import Answer, Graph, Job
from raydp_parallel.links import Mail
from raydp_parallel.messages import BackwardRequest
from raydp_parallel.options import UnusedGrads
from raydp_parallel.pool import Part, Pool, plan, share
from raydp_parallel.seats import Seat
from raydp_parallel.snapshot.master import Master


class Handle:
    """Alive while torch would keep the graphs; its end lets the replicas free them."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs

    def __del__(self) -> None:
        for graph in self._graphs:
            graph.drop()


class Call:
    """What backward needs to know of one call.

    Args:
        executor: Who runs it.
        leaves: What gradients may be asked for.
        kinds: What each of them is, see `Leaf.kind`; ``"input"`` for inputs.
        unused: What unused parameters get.
        shared: Whether it shares nodes with another call.
        joins: Whether its inputs were cut, and its outputs are joined, along their first dimension, by nobody else.

    Attributes:
        kind: What the sizes of its outputs depend on, as far as can be told.
    """

    def __init__(
        self,
        executor: Executor,
        leaves: list[Tensor],
        kinds: list[str],
        unused: UnusedGrads,
        shared: bool = False,
        joins: bool = False,
    ) -> None:
        self.executor = executor
        self.leaves = leaves
        self.kinds = kinds
        self.unused = unused
        self.shared = shared
        self.joins = joins
        self.kind: Hashable = None
        self.parts: list[Part | None] = []
        self._passes: dict[int, Pass] = {}

    @property
    def now(self) -> Pass:
        """The pass of torch's engine that asks."""
        task = torch._C._current_graph_task_id()
        found = self._passes.get(task)
        if found is None:
            found = self._passes[task] = Pass({}, [], [])
        return found

    def end_pass(self) -> Pass:
        """What the pass brought that ends here. Of one that failed on the way nothing is left for another."""
        return self._passes.pop(torch._C._current_graph_task_id())


class Pass(NamedTuple):
    """What one pass of the engine brought so far.

    Attributes:
        grads: For each chunk its outputs' gradients, by output.
        pinned: What keeps the remote graphs alive until the trip.
        tracks: On a GPU, the streams that made the gradients. Fork's node is the CPU's, and does not hear of them.
    """

    grads: dict[int, dict[int, Tensor]]
    pinned: list[Handle]
    tracks: list[devices.Track]


def fork(call: Call) -> Tensor:
    """Enter the leaves into torch's graph."""
    return Fork.apply(call, *call.leaves)  # type: ignore[no-any-return]


def graft(call: Call, token: Tensor, handle: Handle, tensors: Sequence[list[Tensor]], joined: bool = False) -> None:
    """Make part of torch's graph, in each chunk's list, what requires a gradient there.

    Args:
        call: The call.
        token: What its leaves became.
        handle: Keeps its remote graphs.
        tensors: The outputs of each chunk.
        joined: Whether outputs of the same number will be, so that they are only ever differentiated together.
    """
    columns: dict[Any, list[tuple[int, int]]] = {}
    for chunk, row in enumerate(tensors):
        for k, tensor in enumerate(row):
            if tensor.requires_grad:
                columns.setdefault(k if joined else (chunk, k), []).append((chunk, k))

    def unpack(packed: tuple[Handle, Tensor]) -> Tensor:
        call.now.pinned.append(packed[0])
        return packed[1]

    with saved_tensors_hooks(lambda tensor: (handle, tensor), unpack):
        for places in columns.values():
            found = Join.apply(call, places, token, *[tensors[i][k].requires_grad_(False) for i, k in places])
            for (i, k), tensor in zip(places, found if len(places) > 1 else (found,), strict=True):
                tensors[i][k] = tensor


class Fork(Function):
    """Leaves in, a token out. Saves no tensor, so it may run again."""

    @staticmethod
    def forward(ctx: Any, call: Call, *leaves: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)  # a token's gradient is none
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        stash, pinned, tracks = call.end_pass()
        devices.follow(tracks)
        needed = _needed(ctx)
        create = torch.is_grad_enabled()
        call.shared |= create
        keep = torch._C._autograd._get_current_graph_task_keep_graph() or call.shared
        grads = _derive(call, stash, needed) if create else _collect(call, stash, needed, keep)
        del pinned
        devices.hand_over(grads)
        return (None, *grads)


class Join(Function):
    """A remote output, or some that are joined: their places are the chunk and its output's number."""

    @staticmethod
    def forward(ctx: Any, call: Call, places: Sequence[tuple[int, int]], token: Tensor, *outputs: Tensor) -> Any:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(len(outputs) == 1)  # of several, one without a gradient has none
        ctx.save_for_backward(token)
        ctx.mark_dirty(*outputs)  # the outputs themselves, not views of them: users may write to them in place
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (_,) = ctx.saved_tensors  # raises torch's own error if the graph was freed
        now = ctx.call.now
        for (chunk, k), grad in zip(ctx.places, grads, strict=True):
            if grad is not None:
                now.grads.setdefault(chunk, {})[k] = grad
                track = devices.track(grad)
                if track is not None:
                    now.tracks.append(track)
        return None, None, None, *[None] * len(grads)


def _needed(ctx: Any) -> list[bool]:
    """Which leaves this pass asks for. ``needs_input_grad`` says yes to all, also under ``autograd.grad(y, x)``."""
    return [_will_run(node) for node, _ in ctx.next_functions]


def _will_run(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # a leaf whose gradient is captured: the engine will not run its node, but wants the gradient


def _run(
    call: Call,
    stash: dict[int, dict[int, Tensor]],
    needed: Sequence[bool],
    keep: bool,
    derived: dict[int, Graph],
    pool: Pool | None = None,
    chosen: Sequence[int] | None = None,
    ground: abreast.Ground | None = None,
) -> list[Answer]:
    """One trip: the backward of every chunk that has gradients, or of those ``chosen`` among them."""
    ambient = context.capture()
    partial = not all(needed)
    threads = call.executor.threads(len(call.parts))

    def job(number: int, i: int, part: Part) -> Job:
        grads, makes = stash[i], derived.get(i)
        indices = tuple(sorted(grads))

        def prepare(seat: Seat, mail: Mail) -> BackwardRequest:
            parcel, sent = codec.encode(tuple(map(grads.__getitem__, indices)), mail, "gradients")
            wanted = tuple(map(needed.__getitem__, part.leaves))
            name = seat.name_of(part.master.id, part.seat)
            moved = part.master.moved_since(part.mark, seat.held.get(name, 0))
            key = makes.key if makes is not None else None
            request = BackwardRequest(
                name, part.graph.key, indices, parcel, wanted, partial, keep, key, moved, part.first, threads,
                ambient, seat.forget(), site=ground.site(number, mail) if ground is not None else None,
            )  # fmt: skip
            if makes is not None and part.graph.recipe is not None:
                kept = replay.keep(parcel, sent, "the gradients that it was given")
                makes.recipe = replay.derived(request, kept, part.graph, part.graph.recipe, part.seat, part.master.id)
            return request if pool is None else request._replace(**pool.words(number, seat))

        made = makes if pool is None else pool.kept[number]
        heard = None if pool is None else pool.heard
        return Job(part.seat, "backward", prepare, part.master.id, made, part.graph, heard=heard)

    jobs = [job(number, i, part) for number, (i, part) in enumerate(_parts(call, stash))]
    return call.executor.run(jobs if chosen is None else [jobs[number] for number in chosen])


def _parts(call: Call, stash: dict[int, dict[int, Tensor]]) -> list[tuple[int, Part]]:
    """The chunks that have gradients, with their numbers in the call."""
    return [(i, part) for i, part in enumerate(call.parts) if part is not None and i in stash]


def _finish(call: Call, parts: Sequence[Part], answers: Sequence[Answer]) -> None:
    """The effects of one trip."""
    call.executor.note_backward()
    finish([(part.master if part.first else None, a) for part, a in zip(parts, answers, strict=True)])


def _pooled(
    call: Call, stash: dict[int, dict[int, Tensor]], needed: Sequence[bool], keep: bool, pool: Pool
) -> list[Answer]:
    """One trip whose gradients are summed among the replicas; a second one if that went wrong."""
    parts = [part for _, part in _parts(call, stash)]
    try:
        answers = _run(call, stash, needed, keep, {}, pool)
    except BaseException:
        pool.abandon()
        raise
    missing = pool.missing(answers)
    _finish(call, parts, answers)
    if missing:
        fetched = _run(call, stash, needed, keep, {}, pool, missing)
        finish([(None, answer) for answer in fetched])
        for number, answer in zip(missing, fetched, strict=True):
            answers[number] = answer
    return answers


def finish(answers: Sequence[tuple[Master | None, Answer]]) -> None:
    """Take effects over, in order: state that chunk 0 changed, warnings, then the failure of the lowest chunk."""
    for master, answer in answers:
        written = answer.reply.written
        if master is not None and written is not None:
            master.write_back(written, codec.unpack(written.tensors, answer.mail, master.device))
    for _, answer in answers:
        outcome.warn_again(answer.reply.warnings)
    for _, answer in answers:
        if answer.reply.failure is not None:
            outcome.reraise(answer.reply.failure, str(answer.seat))


def _collect(
    call: Call, stash: dict[int, dict[int, Tensor]], needed: Sequence[bool], keep: bool
) -> list[Tensor | None]:
    """First order: the sums of the chunks' gradients."""
    parts = [part for _, part in _parts(call, stash)]
    pool = plan(call.executor, parts, call.leaves, needed) if parts else None
    summed: Mapping[int, int] = {}
    if pool is None:
        cut = call.joins and "input" in call.kinds and bool(parts)
        kind = call.kind, tuple(stash), tuple(needed)
        ground = abreast.ground(parts[0].master, kind) if cut else None
        answers = _run(call, stash, needed, keep, {}, ground=ground)
        _finish(call, parts, answers)
        shares = [share(part, answer) for part, answer in zip(parts, answers, strict=True)]
        if cut and (ground is not None or (abreast.large(answers) and _mostly_inputs(call, shares))):
            abreast.note(parts[0].master, kind, answers, ground)
    else:
        try:
            answers = _pooled(call, stash, needed, keep, pool)
            shares, summed = pool.shares(answers)
        finally:
            pool.close()
    device = call.leaves[0].device
    with call.executor.books.reducing([answer.seat for answer in answers]):
        sums = reduction.total(shares, device, len(call.leaves))
        dense = {one.layout for one in sums if one is not None} <= {torch.strided}
        whole = [True] * len(sums) if dense else _whole(call, shares[-len(parts) :] if parts else [], summed)
        return reduction.settle(sums, call.leaves, call.kinds, needed, whole, call.unused)


def _mostly_inputs(call: Call, shares: Sequence[reduction.Share]) -> bool:
    """Whether most bytes of gradients are the inputs', which are joined, and not the model's, which are added."""
    sizes = Counter[bool]()
    for one in shares:
        present = codec.load(one.parcel, range(len(one.parcel.specs)))
        for leaf, row in zip(one.leaves, present, strict=True):
            if leaf is not None and row is not None:
                spec = one.parcel.specs[row]
                sizes[call.kinds[leaf] == "input"] += math.prod(spec.shape) * codec.DTYPES[spec.dtype].itemsize
    return sizes[True] > sizes[False]


def _whole(call: Call, shares: Sequence[reduction.Share], summed: Mapping[int, int]) -> list[bool]:
    """For each leaf whether every chunk that has it gave a gradient, here or into the replicas' sum."""
    expected, given = [0] * len(call.leaves), [summed.get(leaf, 0) for leaf in range(len(call.leaves))]
    for part in call.parts:
        for leaf in part.leaves if part is not None else ():
            expected[leaf] += 1
    for one in shares:
        present = codec.load(one.parcel, range(len(one.parcel.specs)))
        for at, row in zip(one.leaves, present, strict=True):
            if at is not None:
                given[at] += row is not None
    return [a == b for a, b in zip(expected, given, strict=True)]


def _derive(call: Call, stash: dict[int, dict[int, Tensor]], needed: Sequence[bool]) -> list[Tensor | None]:
    """Higher order: the same trip, whose results can be differentiated in their turn."""
    incoming = [grads[k] for _, grads in sorted(stash.items()) for k in sorted(grads)]
    kinds = [*call.kinds, *["input"] * len(incoming)]
    derived = Call(call.executor, [*call.leaves, *incoming], kinds, call.unused, True)
    graphs = {i: Graph() for i in stash}
    parts = {i: part for i, part in enumerate(call.parts) if part is not None and i in stash}
    handle = Handle([*graphs.values()])
    token = fork(derived)
    answers = _run(call, stash, needed, True, graphs)
    _finish(call, [*parts.values()], answers)
    at = len(call.leaves)
    found: list[list[Tensor]] = [[] for _ in call.parts]
    derived.parts = [None] * len(call.parts)
    places: list[tuple[int, int, int]] = []
    for (i, part), answer in zip(parts.items(), answers, strict=True):
        own = [*part.leaves, *range(at, at + len(stash[i]))]
        at += len(stash[i])
        derived.parts[i] = part._replace(graph=graphs[i], leaves=own)
        assert answer.reply.value is not None
        found[i] = codec.unpack(answer.reply.value, answer.mail, call.leaves[0].device)
        present = codec.load(answer.reply.value, range(len(found[i])))
        places += [(leaf, i, row) for leaf, row in zip(part.leaves, present, strict=True) if row is not None]
    graft(derived, token, handle, found)
    sums: list[Tensor | None] = [None] * len(call.leaves)
    for leaf, i, row in places:
        one = sums[leaf]
        sums[leaf] = found[i][row] if one is None else one + found[i][row]
    return reduction.settle(sums, call.leaves, call.kinds, needed, [True] * len(sums), call.unused)

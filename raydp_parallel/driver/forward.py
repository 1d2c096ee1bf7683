"""One call: all chunks run forward, each on its slot's replica.

The numbers are those of the journey in `wrapper`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import batch
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import groups
from raydp_parallel.driver.autograd import CallNode, GraphHandle, Part, attach, changed
from raydp_parallel.driver.dispatcher import (
    ChunkCall,
    RemoteGraph,
    apply_warnings,
    home_of,
    raise_first,
)
from raydp_parallel.driver.executor import Executor, taken
from raydp_parallel.driver.gradients import Leaf
from raydp_parallel.driver.loss import LossCall
from raydp_parallel.errors import TransferError
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica import exceptions
from raydp_parallel.state.mirror import Mark, Master
from raydp_parallel.state.run import versions_of
from raydp_parallel.wire import pickling
from raydp_parallel.wire.codec import Parcel, parcel
from raydp_parallel.wire.messages import Answer, Failure, ForwardRequest, Terms

Called = str | Callable[..., Any] | None
"""A method's name, a function that takes the module first, or None for the module itself."""

_numbers = itertools.count(1)
"""Numbers of objects of Ray's store that replicas get beside messages."""


class ForwardChunk(NamedTuple):
    """One chunk of a call.

    Attributes:
        slot: The slot that it is for.
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        where: The place that an exception names; None raises it as it is.
        rows: How many rows it has.
        detach: True if the module's parameters get no gradients.
        called: Runs in place of the module's forward.
    """

    slot: ReplicaSlot
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str | None
    rows: int
    detach: bool = False
    called: Called = None


class _Run:
    """One chunk on its way.

    Args:
        executor: The executor.
        chunk: The chunk.
        number: Its number.
        seed: The call's seed.
        context: The caller's ambient state.
        threads: Torch's threads.
        optional: True if parameters that are not reached are left out of the graph.
    """

    def __init__(
        self,
        executor: Executor,
        chunk: ForwardChunk,
        number: int,
        seed: int,
        context: ambient.CallContext,
        threads: int | None,
        optional: bool = False,
    ) -> None:
        self._executor = executor
        self.chunk, self.number, self.seed = chunk, number, seed
        self._context, self._threads = context, threads
        self.optional = optional
        self.master = executor.master(chunk.module)
        self.grad = context.grad and not context.inference
        self.refs = batch.find_refs((chunk.args, chunk.kwargs))
        arguments = (chunk.args, chunk.kwargs)
        if self.refs:  # numbers that each sending chooses
            arguments = batch.numbered(arguments, {})
        self.arguments = _arguments(*arguments)
        self.sends_code = bool(self.refs) or callable(chunk.called)
        self.called: Parcel | str | None = None
        if isinstance(chunk.called, str):
            self.called = chunk.called
        elif chunk.called is not None:
            self.called = parcel(chunk.called, "function")
        carried = self.called.tensors if isinstance(self.called, Parcel) else []
        if isinstance(chunk.called, LossCall):
            refuse_own_parameters(chunk.module, carried)
        self.inputs = [
            t for t in (*carried, *self.arguments.tensors) if self.grad and t.requires_grad
        ]
        self._versions = versions_of((*carried, *self.arguments.tensors))
        self.graph: RemoteGraph | None = None
        self.before: Mark | None = None
        self.overlay: dict[int, Tensor] = {}
        self.first = False
        self.group: Any = None
        self.place: Any = None
        self._steps = 0

    def begin(self, mark: Mark) -> None:
        """Note the module's state, and give the chunk a graph if it may have one."""
        self.before = mark
        if self.master.resident is not None:
            self._steps = self.master.resident.weights.steps
        wants = self.grad and (self.inputs or self.master.leaves())
        self.graph = RemoteGraph(self._executor.next_key()) if wants else None
        if self.graph is not None and self.group is None:
            self.graph.recipe = self.again

    def call(self) -> ChunkCall:
        """Make the chunk's work."""
        return ChunkCall(
            self.chunk.slot,
            "forward",
            self.request,
            self.master.number,
            makes=self.graph,
            together=self.group is not None,
            rows=self.chunk.rows,
            name=type(self.chunk.module).__name__,
            home=self.master.home,
        )

    def request(
        self, slot: ReplicaSlot, overlay: dict[int, Tensor] | None = None
    ) -> ForwardRequest:
        """Make the request for a slot's replica. [3]"""
        if self.master.resident is not None:
            self.master.resident.weights.ready(slot)
        place, self.place = self.place, None  # another time the driver gives all
        update = self._executor.update(self.master, slot, place=place)
        where, first = self.chunk.where, self.first
        return ForwardRequest(
            Terms(self.number, self._context, self._threads, where, first, self.group),
            model=self.master.number,
            update=update,
            key=None if self.graph is None else self.graph.key,
            called=self.called,
            arguments=self._delivered(slot),
            seed=self.seed,
            forget=taken(slot),
            overlay=overlay,
            optional=self.optional,
        )

    def _delivered(self, slot: ReplicaSlot) -> Parcel:
        """Let Ray bring objects of its store to the replica, under new numbers."""
        if not self.refs:
            return self.arguments
        assert slot.client is not None
        numbers: dict[Any, int] = {}
        for ref in self.refs:
            one = ref.alone() if isinstance(ref, batch.ChunkRefs) else ref
            if one.ref not in numbers:
                numbers[one.ref] = next(_numbers)
                slot.client.deliver(numbers[one.ref], one.ref)
        chunk = self.chunk
        return _arguments(*batch.numbered((chunk.args, chunk.kwargs), numbers))

    def keep(self) -> None:
        """Keep the arguments' memory for another run, and not the program's tensors."""
        self.arguments = _memory_of(self.arguments)
        if isinstance(self.called, Parcel):
            self.called = _memory_of(self.called)
        self.inputs = []
        self.chunk = self.chunk._replace(module=nn.Module())  # the caller's may be freed
        if not self.refs:
            self.chunk = self.chunk._replace(args=(), kwargs={})

    def again(self, slot: ReplicaSlot) -> Iterator[ChunkCall]:
        """Give the call that makes the graph again, of what the forward found."""
        assert self.before is not None
        what = self.master.changed_since(self.before, self.overlay)
        carried = self.called.tensors if isinstance(self.called, Parcel) else []
        if what is None and versions_of((*carried, *self.arguments.tensors)) != self._versions:
            what = "one of the arguments"
        if self.master.resident is not None and self.master.resident.weights.steps != self._steps:
            what = "the weights, by a step of the optimizer,"
        if what is not None:
            raise changed(f"{what} was changed")

        def request(slot: ReplicaSlot) -> ForwardRequest:
            return self.request(slot, self.overlay)

        yield ChunkCall(slot, "forward", request, self.master.number)


def refuse_own_parameters(module: nn.Module, carried: Sequence[Tensor]) -> None:
    """Refuse a criterion that has the module's parameters: they would be sent with each call."""
    own = {id(p) for p in module.parameters()}
    if any(id(t) in own for t in carried):
        raise ValueError(
            "with_loss: the criterion has parameters of the model: let a method of the module "
            "compute the loss, for model.call(), or give a function of the output alone"
        )


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parcel:
    try:
        return parcel((args, kwargs), "")
    except TransferError:
        parcel(args, "inputs")  # raises the error with a path that the program knows
        parcel(kwargs, "kwargs")
        raise


def _refuse_unloadable(chunk: ForwardChunk, failure: Failure) -> None:
    """Raise an error for arguments, or a module, that cannot be loaded here either."""
    parts = [("inputs", chunk.args), ("kwargs", chunk.kwargs), ("module", chunk.module)]
    if chunk.called is not None:
        parts.insert(0, ("function", chunk.called))
    for name, part in parts:
        try:
            exceptions.reraise(failure, "")
        except Exception as error:
            pickling.refuse_unloadable(part, name, error, failure.text.splitlines()[-1])


def _memory_of(parcel: Parcel) -> Parcel:
    tensors = []
    for t in parcel.tensors:
        tensors.append(t.detach().requires_grad_(t.requires_grad))  # with the same version
    return parcel._replace(tensors=tensors)


def run(
    executor: Executor,
    chunks: Sequence[ForwardChunk],
    unused: UnusedGrads = "zeros",
    lend: bool = False,
) -> list[Any]:
    """Run all chunks; returns their outputs.

    Args:
        executor: The executor.
        chunks: The chunks; the first one of each module writes back to it.
        unused: The gradients of unused parameters.
        lend: True if outputs may lie in memory that the next call overwrites. The caller holds the
            executor's lock then, until it has copied them.
    """
    ambient.refuse_transforms()
    _refuse_tangents(chunks)
    with executor.lock:  # answers lie in windows until their outputs are taken
        runs, answers, handle, places = _answered(executor, chunks, unused, ambient.capture())
        return _outputs(executor, runs, answers, unused, handle, lend, places)


def _answered(
    executor: Executor,
    chunks: Sequence[ForwardChunk],
    unused: UnusedGrads,
    context: ambient.CallContext,
) -> tuple[list[_Run], list[Answer], GraphHandle, Any]:
    """Run all chunks, and do to the module what their answers say."""
    with executor.trip():
        # One number of the caller's generator: the same seed repeats all chunks (row A10).
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        threads = executor.replica_set.threads(len(chunks))
        optional = unused == "none"  # torch would call hooks with None
        runs = [
            _Run(executor, chunk, i, seed, context, threads, optional)
            for i, chunk in enumerate(chunks)
        ]
        masters = {run.master.number: run.master for run in runs}
        seen: set[int] = set()
        for one in runs:
            one.first = one.master.number not in seen
            seen.add(one.master.number)
        places = groups.places(executor, chunks)
        code = any(one.sends_code for one in runs)
        while True:
            for master in masters.values():
                _look(master, code)  # [2] look
            marks = {number: master.mark() for number, master in masters.items()}
            for one in runs:
                if one.master.resident is not None:  # in time: chunks may wait for each other
                    one.master.resident.weights.ready(one.chunk.slot)
                one.group = None if places is None else places(range(len(runs)))[one.number]
                one.begin(marks[one.master.number])
            slots = [one.chunk.slot for one in runs]
            lacking = functools.partial(runs[0].master.lacking, [slot.revisions for slot in slots])
            spread = groups.direct(executor, slots, lacking) if len(masters) == 1 else {}
            for one in runs:
                one.place = spread.get(one.number)
            handle = GraphHandle([one.graph for one in runs if one.graph is not None])
            calls = [one.call() for one in runs]
            edited: list[bool] = []

            def verify(edited: list[bool] = edited) -> None:
                edited.extend(master.verify() for master in masters.values())  # [5] verify

            leave = functools.partial(groups.forget, executor) if places or spread else None
            try:
                answers = executor.dispatcher.run(calls, verify, leave)  # [7] wait
            except BaseException:  # some may have been sent, and wait for the others
                if leave is not None:
                    leave()
                raise
            if not any(edited):
                break
            # Contents had changed behind their versions: the same forward, with these.
            executor.replica_set.recorder.totals.reruns += 1
        executor.replica_set.recorder.totals.forwards += 1
        # Also where another chunk raises: upstream's replica 0 wrote to the master itself (row R6).
        for one, answer in zip(runs, answers, strict=True):
            if one.first and answer.writes.slots:  # [8] effects
                found = one.master.write_back(answer.writes, keep=one.graph is not None)
                for other in runs:
                    if other.master is one.master:
                        other.overlay = found
        apply_warnings(answers)
        for one, answer in zip(runs, answers, strict=True):
            if answer.failure is not None and answer.failure.loading:
                _refuse_unloadable(one.chunk, answer.failure)
        if places is not None and any(answer.failure is not None for answer in answers):
            groups.forget(executor)  # who failed has left it
        raise_first(answers, calls)
        return runs, answers, handle, places


def _look(master: Master, code: bool) -> None:
    """Look at a module, after the steps that replicas make of it."""
    if master.resident is not None:
        master.resident.collect()
    master.sync(code)
    if master.edited:
        master.resident.recall()


def begin(executor: Executor, chunk: ForwardChunk, chunks: int, compare: bool) -> Callable[[], Any]:
    """Send one chunk without gradients, of which nothing is written back; returns what waits for
    its output.

    Args:
        executor: The executor.
        chunk: The chunk.
        chunks: How many run at once.
        compare: True if contents are compared, too: it cannot run again where they differ.
    """
    context = ambient.capture()._replace(grad=False)
    with executor.trip():
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        threads = executor.replica_set.threads(chunks)
        one = _Run(executor, chunk, 0, seed, context, threads)
        _look(one.master, one.sends_code)
        if compare and one.master.verify():
            _look(one.master, one.sends_code)
        one.begin(one.master.mark())
        call = one.call()
        pending = executor.dispatcher.send(executor.replica_set.choose(chunk.slot, {}), call)

    def finish() -> Any:
        with executor.lock:
            with executor.trip():
                answer = executor.dispatcher.receive(pending)
                if answer is None or answer.lacking:
                    answer = executor.dispatcher.run([call])[0]
            executor.replica_set.recorder.totals.forwards += 1
            apply_warnings([answer])
            raise_first([answer], [call])
            return _outputs(executor, [one], [answer], "zeros", GraphHandle([]), False, None)[0]

    return finish


def _outputs(
    executor: Executor,
    runs: Sequence[_Run],
    answers: Sequence[Answer],
    unused: UnusedGrads,
    handle: GraphHandle,
    lend: bool,
    places: Any,
) -> list[Any]:
    """Take the outputs out of the answers, and make them part of torch's graph. [9]"""
    rows: list[list[Tensor]] = []
    for one, answer in zip(runs, answers, strict=True):
        device = one.master.home
        row = []
        lends = lend and _may_lend(answer.value)
        for t in answer.value.tensors:
            mine = home_of(t.detach(), device)
            if not lends and mine.device == t.device:
                mine = mine.clone()
            row.append(mine.requires_grad_(t.requires_grad and one.graph is not None))
        rows.append(row)
    if any(t.requires_grad for row in rows for t in row):
        _attach(executor, runs, answers, unused, handle, rows, places)
    return [answer.value.load(row) for answer, row in zip(answers, rows, strict=True)]


def _may_lend(value: Parcel) -> bool:
    """Tell if gathering copies all tensors of a value."""
    found = [*batch.tensors_in(value.load())]
    return not batch.registered and len(found) == len(value.tensors)


def _attach(
    executor: Executor,
    runs: Sequence[_Run],
    answers: Sequence[Answer],
    unused: UnusedGrads,
    handle: GraphHandle,
    rows: list[list[Tensor]],
    places: Any,
) -> None:
    leaves: list[Leaf] = []
    known: dict[int, int] = {}

    marks = {one.master.number: one.master.mark() for one in runs}
    alike: dict[tuple[int, bool], list[int | None]] = {}  # where chunks reach the same leaves
    parts: dict[int, Part] = {}
    for one, answer, row in zip(runs, answers, rows, strict=True):
        if one.graph is None or not any(t.requires_grad for t in row):
            continue
        reached = iter(answer.reached)
        master, detach = one.master, one.chunk.detach
        own, told = alike.get((master.number, detach)), False
        found: list[tuple[Tensor, str, bool]] = []
        for t, kind in master.leaves() if own is None else ():
            asks = one.optional or kind == "attribute"
            told = told or asks
            there = next(reached) if asks else True
            found.append((t, kind, there and not detach))
        count = len(found)
        found += [(t, "input", next(reached)) for t in one.inputs]
        numbers: list[int | None] = []
        for t, kind, there in found:
            if there and id(t) not in known:
                known[id(t)] = len(leaves)
                leaves.append(Leaf(t, kind))
            numbers.append(known[id(t)] if there else None)
        inputs = numbers[count:]
        if own is None:
            own = numbers[:count]
            if not told:
                alike[master.number, detach] = own
        mark = marks[master.number]
        where, slot = one.chunk.where, one.chunk.slot
        parts[one.number] = Part(one.graph, slot, master, mark, own, inputs, one.first, where)
    if not leaves:
        for row in rows:
            for t in row:
                t.requires_grad_(False)
        return
    for one in runs:
        one.keep()
    call = CallNode(executor, leaves, unused, group=places)
    call.parts = parts
    attach(call, handle, dict(enumerate(rows)))  # [9] attach


def _refuse_tangents(chunks: Sequence[ForwardChunk]) -> None:
    """Raise an error for derivatives that would be lost in silence."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    for chunk in chunks:
        for tensor in batch.tensors_in((chunk.args, chunk.kwargs)):
            if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(
                    "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) do not "
                    "reach into replicas, nor into those of torch.nn.DataParallel: use reverse "
                    "mode, such as torch.autograd.functional.jvp, or the module itself"
                )

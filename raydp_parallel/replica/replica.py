"""One replica without Ray: requests in, answers out. It keeps models by number and graphs by key.

A module begins each forward as the master is, with the caller's ambient state and random numbers
that follow from the call's seed and the chunk. So it does not matter which replica runs a chunk.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raydp_parallel import batch
from raydp_parallel.devices import ambient, threads
from raydp_parallel.devices.layout import Row
from raydp_parallel.replica import engine, exceptions
from raydp_parallel.replica.ahead import Ahead
from raydp_parallel.replica.module import ForwardState, ReplicaModule
from raydp_parallel.replica.training import ReplicaTraining
from raydp_parallel.state import raw_access
from raydp_parallel.state.run import is_plain
from raydp_parallel.wire import trial
from raydp_parallel.wire.codec import parcel
from raydp_parallel.wire.group import Abandoned, Differing, Exchange, summable
from raydp_parallel.wire.messages import (
    KEPT,
    SENT,
    SUMMED,
    Answer,
    BackwardRequest,
    Forget,
    ForwardRequest,
    GradientsRequest,
    ResumeRequest,
    Seat,
    SnapshotRequest,
    StateUpdate,
    StepRequest,
    Writes,
)

TrainingRequest = ResumeRequest | SnapshotRequest | GradientsRequest | StepRequest
Request = ForwardRequest | BackwardRequest | Forget | Seat | TrainingRequest

own_process = False
"""True in a process that does a replica's work and no other: a wrapper in its module runs in place.
"""


class Model(NamedTuple):
    """A model, and what is trained here of it."""

    module: ReplicaModule
    training: ReplicaTraining
    ahead: Ahead


class Graph(NamedTuple):
    """A graph that the driver may ask for."""

    outputs: list[Tensor]  # the tensors that may be differentiated
    leaves: list[Tensor]  # those that they are differentiated by: of the module, then inputs
    tags: list[int | None]  # of the module's; None for inputs
    model: Model
    state: ForwardState  # the module that ran, and its tensors


def called_on(module: nn.Module, called: batch.Function | str | None) -> batch.Function:
    """Return what is called: a function that takes the module first, a method, or the module."""
    return partial(called, module) if callable(called) else getattr(module, called or "__call__")


class Replica:
    """Answers the requests of a driver, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[int, Model] = {}
        self._graphs: dict[int, Graph] = {}
        self._groups: dict[str, Exchange] = {}
        self._delivered: dict[int, Future[object]] = {}
        self._idle: ReplicaModule | None = None  # whose next module `prepare` makes
        # Hooks that forward registers have other numbers than those of the driver's module.
        RemovableHandle.next_id = 1 << 62
        # The graph of the last request's forward, what may follow, and the seconds that this took.
        self._last = 0, Ahead(), 0.0

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for, and take down warnings, and the exception that ends it."""
        (graph, ahead, seconds), self._last = self._last, (0, Ahead(), 0.0)
        begun = time.perf_counter() - seconds
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for key in getattr(request, "forget", ()):  # that nobody can ask for any more
                    self._graphs.pop(key, None)
                    self._models.pop(key, None)
                found = ahead.take(request, graph)
                if isinstance(request, ForwardRequest):
                    answer = self._forward(request)
                elif isinstance(request, BackwardRequest):
                    answer = self._backward(request, found)
                elif isinstance(request, Seat):
                    self._exchange(request)
                    answer = Answer()
                elif isinstance(request, Forget):
                    answer = Answer(held=(len(self._models), len(self._graphs)))
                else:
                    answer = self._train(request)
            except BaseException as error:  # also SystemExit and KeyboardInterrupt of the module
                where = request.terms.error_prefix if isinstance(request, BackwardRequest) else None
                answer = Answer(failure=exceptions.failure(error, where))
        busy = time.perf_counter() - begun
        return answer._replace(warnings=exceptions.caught(caught), busy=busy)

    def prepare(self, early: bool) -> None:
        """Do what comes next while the driver is busy with the answer: make the module of the next
        forward; or compute the backward of this one, if its model's last ones were alike, and it is
        ``early`` for that. If that warns, raises, or runs other code than torch's, the model has no
        other computed ahead.
        """
        number, ahead, _ = self._last
        if self._idle is not None and not number:
            self._idle.prepare()
            self._idle = None
        request, graph = ahead.next, self._graphs.get(number)
        if not (request and graph and early) or graph.state.touched or sys.getprofile():
            return
        outputs = [graph.outputs[k] for k in request.outputs[0][1]]
        others = {t.grad_fn for t in graph.outputs} - {t.grad_fn for t in outputs} - {None}
        if others and not engine.reachable(outputs) >= others:
            return  # these may be differentiated later
        begun = time.perf_counter()
        threads.use(self._device, request.terms.threads)
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")
            with ambient.enter(request.terms.context), engine.only_torch():
                ahead.found = engine.differentiate(outputs, request.grads, graph.leaves, request)
        ahead.never = ahead.found is None
        self._last = number, ahead, time.perf_counter() - begun
        threads.rest()

    def deliver(self, number: int, value: object) -> None:
        """Take an object of Ray's store that an argument stands for."""
        with contextlib.suppress(InvalidStateError):  # it comes again where the call runs again
            self._delivered.setdefault(number, Future()).set_result(value)

    def _exchange(self, request: Seat) -> Exchange:
        if request.name not in self._groups:
            for name, group in [*self._groups.items()]:
                if not group.exists():
                    self._groups.pop(name).close()
            made = self._groups[request.name] = Exchange(request, self._device)
            if request.nccl:
                with made.taking_part(request):
                    trial.try_group(made, self._device)
        return self._groups[request.name]

    def _joined(self, seat: Seat | None) -> AbstractContextManager[Exchange | None]:
        """Take part in a group, if a request has a seat in one."""
        if seat is None:
            return contextlib.nullcontext()
        return self._exchange(seat).taking_part(seat)

    def _train(self, request: TrainingRequest) -> Answer:
        """Do what a driver asks for whose optimizers are here."""
        if isinstance(request, ResumeRequest):
            module, training, _ = self._updated(request.model, request.update)
            if not module.lacking:
                training.resume(request)
            return Answer(lacking=module.lacking)
        training = self._models[request.model].training
        if isinstance(request, SnapshotRequest):
            return Answer(training.snapshot(request))
        if isinstance(request, GradientsRequest):
            return Answer(rows=(Row(training.gradients(request.tags, request.chunk)),))
        threads.use(self._device, request.terms.threads)
        with self._joined(request.terms.group) as exchange:
            return Answer(rows=(training.step(request, exchange),))

    def _updated(self, number: int, update: StateUpdate | None) -> Model:
        """Return a model, with the master's changes."""
        if number not in self._models:
            module = ReplicaModule(self._device)
            self._models[number] = Model(module, ReplicaTraining(module), Ahead())
        model = self._models[number]
        if update is not None:
            known = update.base in (0, model.module.revision)
            model.module.revision = -1  # if it fails, or the group does not come, it asks for all
            with contextlib.suppress(Abandoned, Differing), self._joined(update.spread) as exchange:
                if not known:  # as the last one failed; nobody waits for this one
                    raise Abandoned
                model.module.update(update, exchange)
        return model

    def _forward(self, request: ForwardRequest) -> Answer:
        """Run one chunk."""
        terms, context, writes = request.terms, request.terms.context, Writes()
        reached = b""
        objects: dict[int, object] = {}  # of Ray's store
        for number in request.refs:  # all, whatever happens next: another run gets them again
            objects[number] = self._delivered.setdefault(number, Future()).result()
            del self._delivered[number]
        try:
            model = self._updated(request.model, request.update)  # [4] run
            module = model.module
            if module.lacking:
                return Answer(lacking=True)
            threads.use(self._device, terms.threads)
            with self._joined(terms.group):
                state = module.begin(request)
                self._idle = module
                engine.seed(self._device, terms.seed, terms.chunk)
                own = [t.detach().clone() for t in request.arguments.tensors]  # from a window
                both = zip(own, request.arguments.tensors, strict=True) if context.grad else ()
                inputs = [t.requires_grad_() for t, sent in both if sent.requires_grad]
                try:
                    called, args, kwargs = request.arguments.load(own)
                except Exception as error:  # code of the user's classes
                    raise exceptions.NotLoaded from error
                if objects:
                    get = objects.__getitem__
                    args, kwargs = batch.resolved((args, kwargs), get, self._device)
                call = called_on(state.module, called)
                try:
                    with ambient.enter(context), raw_access.noting() as state.touched:
                        output = call(*args, **kwargs)
                finally:
                    writes = module.end(state)  # [6] report
                # Tensors are found wherever pickle reaches, also in objects of the user's classes.
                value = parcel(output, "output")
        except BaseException as error:  # what was written until then is written
            return Answer(failure=exceptions.failure(error, terms.error_prefix), writes=writes)
        if request.key is not None and any(t.requires_grad for t in value.tensors):
            leaves = [*[state.tensors[n] for n in state.wanting], *inputs]
            marks = [*state.wanting, *[None] * len(inputs)]
            self._graphs[request.key] = Graph(value.tensors, leaves, marks, model, state)
            if request.overlay is None:  # it does not run again
                self._last = request.key, model.ahead, 0.0
            asked = {None, *request.asked}
            there = engine.reachable(value.tensors) if asked & {*marks} else ()
            pairs = zip(leaves, marks, strict=True)
            reached = bytes([n not in asked or id(t) in there for t, n in pairs])
        # Gather makes a new tensor of plain ones; a container may keep what it is given.
        return Answer(value, reached=reached, anew=type(output) is Tensor, writes=writes)

    def _backward(self, request: BackwardRequest, found: list[Tensor | None] | None) -> Answer:
        """Differentiate outputs of one chunk, unless the gradients are there already."""
        terms, graph, writes = request.terms, self._graphs[request.graph], Writes()
        module, training, _ = graph.model
        if not graph.outputs:  # as torch says it, which has not seen the backward that was ahead
            raise RuntimeError(
                "Trying to backward through the graph a second time: call with retain_graph=True"
            )
        outputs = [self._graphs[key].outputs[k] for key, row in request.outputs for k in row]
        # Torch may keep them in the graph, or hand them on as gradients of leaves.
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in request.grads]
        grads = [*given]
        for key, numbers in request.outputs:
            if not numbers:  # it only takes part in the layers of the others
                idle = [t for t in self._graphs[key].outputs if t.requires_grad]
                outputs += idle
                grads += [*map(torch.zeros_like, idle)]
        needed, keeps = request.needed, max(request.needed, default=SENT) >= KEPT
        threads.use(self._device, terms.threads)
        with self._joined(terms.group) as exchange:
            self._idle = module
            if keeps:
                training.drop_old(terms.chunk, graph.tags, needed)
            if found is None:
                module.reenter(graph.state, request)
                with ambient.enter(terms.context), raw_access.noting() as graph.state.touched:
                    found = engine.differentiate(outputs, grads, graph.leaves, request)
                # A checkpoint that ran again may have written once more.
                writes = module.end(graph.state)
            elif not request.retain:
                graph.outputs.clear()  # which frees it, as torch would have by now
            if request.derived is not None:
                made = [grad for grad in found if grad is not None]
                derived = Graph(made, given, [None] * len(given), graph.model, graph.state)
                self._graphs[request.derived] = derived
            reached = b""
            if keeps:
                reached = training.keep(terms.chunk, graph.tags, needed, found)
            elif exchange is not None and SUMMED in needed:
                reached = _summed(exchange, needed, graph, found)
        count = sum([tag is not None for tag in graph.tags])
        rows = Row(found[:count]), Row(found[count:])
        return Answer(rows=rows, reached=reached, writes=writes)


def _summed(exchange: Exchange, needed: bytes, graph: Graph, grads: list[Tensor | None]) -> bytes:
    """Sum gradients over the group, whose root sends the sums; returns which were. Where that
    fails, or chunks have gradients of other parameters, the driver gets them as they are.
    """
    chosen: dict[torch.dtype, dict[int, Tensor]] = {}
    for at, (code, grad) in enumerate(zip(needed, grads, strict=True)):
        if code == SUMMED and grad is not None and is_plain(grad) and not grad.is_complex():
            chosen.setdefault(grad.dtype, {})[at] = grad
    runs: list[Tensor] = []
    sums: dict[int, Tensor] = {}
    try:
        for row in chosen.values():
            run, parts = summable([graph.leaves[at] for at in row], exchange.size)
            torch._foreach_copy_(parts, [*row.values()])
            runs.append(run)
            sums.update(zip(row, parts, strict=True))
        what = hash(tuple([graph.tags[at] for at in sums]))
        exchange.add(runs, range(exchange.size), what)
    except (Abandoned, Differing):
        return b""
    except torch.OutOfMemoryError:
        exchange.close()
        return b""
    for at, total in sums.items():
        grads[at] = total if exchange.rank == exchange.root else None
    return bytes([at in sums for at in range(len(grads))])

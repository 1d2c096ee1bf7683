"""One replica: models by number, graphs by key, and how a chunk runs.

A module begins each forward as the master is, with the caller's ambient state and random numbers
that follow from the call's seed and the chunk. So it does not matter which replica runs a chunk.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import batch
from raydp_parallel.devices import ambient, threads
from raydp_parallel.replica import engine, exceptions, sync_batch_norm
from raydp_parallel.replica.module import Built, Found, ReplicaModule
from raydp_parallel.replica.resident import Resident
from raydp_parallel.wire.codec import Parcel, Row, parcel
from raydp_parallel.wire.group import Abandoned, Differing, summable
from raydp_parallel.wire.messages import (
    KEPT,
    SENT,
    SUMMED,
    Answer,
    BackwardRequest,
    CaughtWarning,
    ExchangeRequest,
    Failure,
    ForwardRequest,
    GradientsRequest,
    ResumeRequest,
    SnapshotRequest,
    StateUpdate,
    Terms,
    Writes,
)

_own_process = False


def belong_to_replica() -> None:
    """Note that this process does a replica's work and no other."""
    global _own_process
    _own_process = True


def running() -> bool:
    """Tell if the caller is the module of a replica: a wrapper inside it runs in place."""
    return _own_process


class Graph(NamedTuple):
    """A graph that the driver may ask for.

    Attributes:
        outputs: The tensors that may be differentiated.
        leaves: Those that they are differentiated by: of the module, then inputs.
        slots: The slots of the former; None for inputs.
        module: The model.
        built: The module that ran.
        found: The tensors that it ran with.
        derived: True if it was made by a backward: it leads to more leaves than its own.
    """

    outputs: list[Tensor]
    leaves: list[Tensor]
    slots: list[int | None]
    module: ReplicaModule
    built: Built
    found: Found
    derived: bool = False


class _Notes:
    """Notes about a chunk for its answer."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.warnings: tuple[CaughtWarning, ...] = ()
        self.value: Any = None
        self.reached: tuple[bool, ...] = ()
        self.writes = Writes()


class Replica:
    """The work of a replica.

    Args:
        device: Its device.
        get: Gives the object that a `ChunkRef` stands for.
        exchange: Joins a group of replicas.
    """

    def __init__(
        self,
        device: torch.device,
        get: Callable[[Any], Any],
        exchange: Callable[[Any], Any],
    ) -> None:
        self.device = device
        self.models: dict[int, ReplicaModule] = {}
        self.graphs: dict[int, Graph] = {}
        self._residents: dict[ReplicaModule, Resident] = {}
        self._get = get
        self._exchange = exchange
        self._last: ReplicaModule | None = None
        self._awaits_backward = False

    def forget(self, keys: Sequence[int]) -> None:
        """Drop graphs and models that nobody can ask for any more."""
        for key in keys:
            self.graphs.pop(key, None)
            module = self.models.pop(key, None)
            if module is not None:
                self._residents.pop(module, None)
                if module is self._last:
                    self._last = None

    def settle(self) -> None:
        """Put the last module back, while the driver is busy with the answer. After a forward with
        a graph it is not busy for long: backward follows.
        """
        if self._last is not None and not self._awaits_backward:
            self._last.settle()
            self._last = None

    def resident(self, module: ReplicaModule) -> Resident:
        """Return what is trained here of a model."""
        if module not in self._residents:
            self._residents[module] = Resident(module)
        return self._residents[module]

    def train(self, request: Any) -> Answer:
        """Join a group, or answer what a driver with an optimizer in the replicas asks for."""
        begun = time.perf_counter()
        notes = _Notes()
        self.settle()
        with self._noting(None, notes):
            if isinstance(request, ExchangeRequest):
                self._exchange(request)
                return self._answer(notes, begun)
            if isinstance(request, ResumeRequest):
                module = self._updated(request.model, request.update)
                if module.lacking:
                    return Answer(lacking=True)
                self.resident(module).resume(request)
                return self._answer(notes, begun)
            resident = self.resident(self.models[request.model])
            if isinstance(request, SnapshotRequest):
                notes.value = resident.snapshot(request)
            elif isinstance(request, GradientsRequest):
                notes.value = Row(resident.gradients(request.slots, request.chunk))
            else:
                threads.use(self.device, request.threads)
                notes.value = resident.step(request, self._exchange)
        return self._answer(notes, begun)

    def _updated(self, number: int, update: StateUpdate | None) -> ReplicaModule:
        """Return a model, with the master's changes."""
        module = self.models.get(number)
        if module is None:
            module = self.models[number] = ReplicaModule(self.device)
        if update is not None:
            try:
                self._update(module, update)  # [4] run
            except (Abandoned, Differing):
                module.revision = -1  # which asks for all, without the group
        return module

    def _update(self, module: ReplicaModule, update: StateUpdate) -> None:
        place = update.spread
        if place is None:
            module.update(update, None)
            return
        exchange = self._exchange(place)
        with sync_batch_norm.taking_part(exchange, layers=False):
            module.update(update, functools.partial(exchange.spread, root=place.root))

    def forward(self, request: ForwardRequest) -> Answer:
        """Run one chunk."""
        self.forget(request.forget)
        begun = time.perf_counter()
        notes = _Notes()
        self._awaits_backward = False
        with self._noting(request.terms.where, notes):
            module = self._updated(request.model, request.update)
            if module.lacking:
                return Answer(lacking=True)
            with self._set(request.terms):
                self._run(module, request, notes)
        if request.overlay is not None:
            notes.writes = Writes()
        return self._answer(notes, begun)

    def _run(self, module: ReplicaModule, request: ForwardRequest, notes: _Notes) -> None:
        terms, context = request.terms, request.terms.context
        grad = context.grad and not context.inference
        engine.seed(self.device, request.seed, terms.chunk)
        inputs, call = self._load(request, grad)
        found = module.begin(request.overlay)
        self._last = module
        try:
            with ambient.enter(context), module.noting(found):
                output = call(module.current.module)
        finally:
            notes.writes = module.end(found, terms.first, keeps_data=not grad)  # [6] report
        # Tensors are found wherever pickle reaches, also in objects of the user's classes.
        taken = parcel(output, "output")
        outputs = taken.tensors
        if request.key is not None and any(t.requires_grad for t in outputs):
            found.saved = found.versions()  # graphs compare with these, after forward's own writes
            leaves, optional = [], []
            slots: list[int | None] = []
            attributes = module.current.attributes
            for n in module.wanting(found):
                leaves.append(found.tensors[n])
                slots.append(n)
                if request.optional or n in attributes:
                    optional.append(found.tensors[n])
            optional += inputs
            slots += [None] * len(inputs)
            self._awaits_backward = True
            self.graphs[request.key] = Graph(
                outputs, [*leaves, *inputs], slots, module, module.current, found
            )
            if optional:
                reached = engine.reachable(outputs)
                notes.reached = tuple([id(t) in reached for t in optional])
        notes.value = Parcel(taken.skeleton, outputs)

    def _load(
        self, request: ForwardRequest, grad: bool
    ) -> tuple[list[Tensor], Callable[[nn.Module], Any]]:
        """Take the arguments out of the message; returns those that require a gradient, and what
        calls the module with them.
        """
        inputs: list[Tensor] = []

        def own(t: Tensor) -> Tensor:
            # What lies in a message is overwritten by the next one.
            mine = t.detach().clone()
            if t.requires_grad and grad:
                inputs.append(mine.requires_grad_())
            return mine

        called = request.called
        function = None
        try:
            if isinstance(called, Parcel):
                function = called.load([own(t) for t in called.tensors])
            args, kwargs = request.arguments.load([own(t) for t in request.arguments.tensors])
        except Exception as error:  # code of the user's classes
            raise exceptions.NotLoaded from error
        args, kwargs = batch.resolved((args, kwargs), self._get, self.device)

        def call(module: nn.Module) -> Any:
            if function is not None:
                return function(module, *args, **kwargs)
            if isinstance(called, str):
                return getattr(module, called)(*args, **kwargs)
            return module(*args, **kwargs)

        return inputs, call

    def backward(self, request: BackwardRequest) -> Answer:
        """Differentiate outputs of one chunk."""
        self.forget(request.forget)
        begun = time.perf_counter()
        notes = _Notes()
        with self._noting(request.terms.where, notes), self._set(request.terms):
            self._differentiate(request, notes)
            if SUMMED in request.needed:
                self._sum(request, notes)
            count = sum([slot is not None for slot in self.graphs[request.graph].slots])
            notes.value = Row(notes.value[:count]), Row(notes.value[count:])
        return self._answer(notes, begun)

    def _sum(self, request: BackwardRequest, notes: _Notes) -> None:
        """Sum gradients over the group, for its root. Where that fails, or chunks have gradients of
        other parameters, the driver gets them as they are.
        """
        home, grads, place = self.graphs[request.graph], notes.value, request.terms.group
        assert place is not None
        chosen: dict[torch.dtype, list[int]] = {}
        for at, (code, grad) in enumerate(zip(request.needed, grads, strict=True)):
            plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.is_complex()
            if code == SUMMED and plain:
                chosen.setdefault(grad.dtype, []).append(at)
        places = [at for row in chosen.values() for at in row]
        sums: list[Tensor | None] = []
        reached = [False] * len(grads)
        exchange = self._exchange(place)
        try:
            exchange.meet(0, hash(tuple([home.slots[at] for at in places])))
            for row in chosen.values():
                run, parts = summable([home.leaves[at] for at in row], exchange.size)
                torch._foreach_copy_(parts, [grads[at] for at in row])
                exchange.add(run, range(exchange.size), place.root)
                sums += parts if exchange.rank == place.root else []
        except (Abandoned, Differing):
            return
        except torch.OutOfMemoryError:
            exchange.close()
            return
        for at, one in zip(places, sums or [None] * len(places), strict=True):
            grads[at], reached[at] = one, True
        notes.reached = tuple(reached)

    def _differentiate(self, request: BackwardRequest, notes: _Notes) -> None:
        home, terms = self.graphs[request.graph], request.terms
        outputs = [self.graphs[key].outputs[k] for key, numbers in request.outputs for k in numbers]
        # Torch may keep them in the graph, or hand them on as gradients of leaves.
        given = [grad.detach().clone() for grad in request.grads]
        grads, create = [*given], request.derived is not None
        for key, numbers in request.outputs:
            if not numbers:  # it only takes part in the layers of the others
                idle = [t for t in self.graphs[key].outputs if t.requires_grad]
                outputs += idle
                grads += map(torch.zeros_like, idle)
        for grad in grads if create else ():
            grad.requires_grad_()
        home.found.move(request.moved)
        home.module.again(home.built, home.found)
        self._last, self._awaits_backward = home.module, False
        # A checkpoint that runs again may write once more.
        begun = home.found.moment(home.built.buffers)
        before = home.found.flat.clone() if terms.first else None
        keeps = max(request.needed, default=SENT) >= KEPT
        if keeps:
            self.resident(home.module).begin(terms.chunk, home.slots, request.needed)
        with ambient.enter(terms.context), home.module.noting(home.found):
            found = engine.differentiate(
                outputs,
                grads,
                home.leaves,
                request.needed,
                request.partial or home.derived,
                request.keep,
                create,
            )
        notes.writes = home.module.end_backward(home.found, begun, before)
        if request.derived is not None:
            made = [grad for grad in found if grad is not None]
            slots: list[int | None] = [None] * len(given)
            graph = Graph(made, given, slots, home.module, home.built, home.found, derived=True)
            self.graphs[request.derived] = graph
        if keeps:
            notes.reached = self.resident(home.module).keep(
                terms.chunk, home.slots, request.needed, found, request.partial
            )
        notes.value = found

    @contextlib.contextmanager
    def _noting(self, where: str | None, notes: _Notes) -> Iterator[None]:
        """Take down warnings, and the exception that ends the block."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except BaseException as error:  # also SystemExit and KeyboardInterrupt of the module
                notes.failure = exceptions.failure(error, where)
        if caught:
            notes.warnings = exceptions.caught(caught)

    @contextlib.contextmanager
    def _set(self, terms: Terms) -> Iterator[None]:
        threads.use(self.device, terms.threads)
        if terms.group is None:
            yield
            return
        exchange = self._exchange(terms.group)
        with sync_batch_norm.taking_part(exchange, terms.group.layers):
            yield

    def _answer(self, notes: _Notes, begun: float) -> Answer:
        return Answer(
            value=notes.value,
            reached=notes.reached,
            failure=notes.failure,
            warnings=notes.warnings,
            writes=notes.writes,
            busy=time.perf_counter() - begun,
        )

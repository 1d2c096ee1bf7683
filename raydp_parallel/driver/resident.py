"""Training where the weights are: replicas own weights, gradients and the optimizer's state.

A parameter's gradient is the sum, in the order of chunks, of what the replicas keep. In the driver
a `RemoteGrad` stands for it, and all else follows: accumulation takes place in the replicas,
``zero_grad`` is seen by the next backward, and a gradient that the program touched travels with the
step.

[Note: deaths]
Weights are the same from step to step, so whatever a replica kept since the last ``zero_grad`` can
be made again: the chunk's forwards and backwards run once more where it goes on. A newcomer takes
weights and optimizers from a replica that has made all steps. When a member dies in a step, others
may have no sum: they take over from one that stepped, and if none that lives did, the step is made
again.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import ChunkCall, Pending, home_of, own
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.remote_grad import RemoteGrad
from raydp_parallel.errors import GraphLost, ReplicaDied, StateLost
from raydp_parallel.replica import exceptions
from raydp_parallel.state.lagging import Lagging, plainly
from raydp_parallel.state.mirror import Master
from raydp_parallel.wire.codec import parcel
from raydp_parallel.wire.messages import (
    Answer,
    ExchangeRequest,
    GradientsRequest,
    ResumeRequest,
    SnapshotRequest,
    StepRequest,
)

log = logging.getLogger("raydp_parallel")

_MOST_TRIES = 6


@dataclass
class _Sum:
    """A parameter's gradient, as replicas keep it since the program has cleared it."""

    number: int  # the parameter's slot
    chunks: set[int] = field(default_factory=set)  # that have kept some of it
    stand: Callable[[], RemoteGrad | None] = lambda: None  # gives what is in ``.grad`` for it
    scale: Tensor | None = None  # its factor where it is used, after a clipping
    missed: bool = False  # some of it went with a replica, and cannot be made again


@dataclass
class _Plan:
    """One step on its way, or the norm of gradients."""

    step: StepRequest  # but for the member's place in the group
    requests: list[tuple[ReplicaSlot, int, ChunkCall]] = field(default_factory=list)  # by life
    sent: list[Pending | None] = field(default_factory=list)  # None where the replica was gone
    grouped: bool = False  # members exchange tensors
    tries: int = 0  # how often nobody could make it


class Resident:
    """Trains one model in the replicas.

    Args:
        executor: The executor.
        master: The model.
        ids: The devices that train.

    Attributes:
        optimizers: The optimizers, by number.
        steps: The steps that were made.
    """

    def __init__(self, executor: Executor, master: Master, ids: Sequence[DeviceId]) -> None:
        self._executor, self._master = executor, master
        self._ids = ids
        self.optimizers: dict[int, Any] = {}
        self.steps = self._weights_at = self._states_at = 0
        self._held: dict[ReplicaSlot, tuple[int, int]] = {}  # the life and step of its weights
        self._given: set[ReplicaSlot] = set()  # that have the optimizers, too
        self._sums: dict[int, _Sum] = {}  # by slot; a parameter that leaves takes its own along
        self._lies: dict[int, tuple[ReplicaSlot, int]] = {}
        self._trips: dict[int, list[Any] | None] = {}
        self._normed: tuple[Any, ...] = ()
        self._plan: _Plan | None = None
        # The class of parameters that lag: as long as there are some, it keeps this.
        kind: Any = type(Lagging)
        self._kind = kind("Parameter", (Lagging,), {"source": self})
        self._lagging: list[Tensor] = []

    @property
    def behind(self) -> int:
        """The steps that the driver's weights lack."""
        coming = self._plan is not None and self._plan.step.norm is None
        return self.steps + coming - self._weights_at

    # Optimizers.

    def add(self, optimizer: Any) -> None:
        """Begin to train an optimizer's parameters, or all anew if it changed."""
        with self._executor.trip():
            self.pull(True)
            self._master.sync()
            for p in optimizer.parameters():
                if self._master.slot(p) is None and not optimizer.had(p):
                    raise ValueError(
                        f"optimizer: a parameter of shape {tuple(p.shape)} is not, or not any "
                        "more, one of the model's: make an optimizer for those that it has"
                    )
            own_ones = {number for number, _ in self._numbered(optimizer)}
            for other, known in [*self.optimizers.items()]:
                if own_ones & {number for number, _ in self._numbered(known)}:
                    del self.optimizers[other]  # this one takes its place
            self.optimizers[optimizer.number] = optimizer
            optimizer.given(self._master.slot)
            numbers: set[int] = set()
            for one in self.optimizers.values():
                numbers.update(number for number, _ in self._numbered(one))
            self._master.train(numbers)
            self._master.sync()
            self.lend()

    def leave(self, numbers: Set[int]) -> None:
        """Bring all that only replicas have of parameters that leave the module."""
        self.pull(states=True)
        left = [one for n, one in self._sums.items() if n in numbers and not one.missed]
        self._fetch([one.stand() for one in left])
        self._sums = {n: one for n, one in self._sums.items() if n not in numbers}

    def _numbered(self, optimizer: Any) -> list[tuple[int, Tensor]]:
        """List an optimizer's parameters by number, but for those that left the module."""
        found = [(self._master.slot(p), p) for p in optimizer.parameters()]
        return [(number, p) for number, p in found if number is not None]

    # Gradients.

    @plainly
    def keeps(self, parameter: Tensor) -> bool:
        """Tell if a parameter's gradient may stay in the replicas: nothing here looks at it."""
        if not self._master.trains(parameter) or not parameter.requires_grad:
            return False
        if parameter.dtype.is_complex:  # gloo has none
            return False
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return False
        grad: Any = parameter.grad
        if grad is None or (self._is_mine(grad) and grad.zeroed):
            return True
        return self._is_mine(grad) and grad.pristine and self._sums[grad.number].scale is None

    def _is_mine(self, grad: Any) -> bool:
        found = self._sums.get(getattr(grad, "number", 0))
        return found is not None and found.stand() is grad

    def begin(self) -> None:
        """Begin a backward. Gradients that the program has cleared begin anew."""
        self.collect()
        anew = []
        for number, parameter in self._master.trained.items():
            one = self._sums.setdefault(number, _Sum(number))
            grad: Any = parameter.grad
            if not self._is_mine(grad) or grad.zeroed:
                anew.append(one)
        # The program may still have what stood for the last ones.
        self._fetch([one.stand() for one in anew])
        for one in anew:
            one.chunks, one.scale, one.missed = set(), None, False
        self._normed = ()

    def having(self, parameter: Tensor) -> set[int]:
        """Return the chunks that have kept a gradient."""
        return self._sum(parameter).chunks

    def _sum(self, parameter: Tensor) -> _Sum:
        return self._sums[self._master.slot(parameter) or 0]

    def bring(self, chunk: int, slot: ReplicaSlot) -> None:
        """Make sure that what a chunk has kept so far lies in a slot's replica."""
        having = [one for one in self._sums.values() if chunk in one.chunks]
        if not having:
            self._trips.pop(chunk, None)
            return
        if self._lies.get(chunk) == (slot, slot.life):
            return
        trips = self._trips[chunk]
        if trips is None:  # from before the last step: they are missed where they are used
            for one in having:
                one.chunks.discard(chunk)
                one.missed = True
            return
        life = slot.life
        for trip in trips:
            trip.repeat(slot)
        self._lies[chunk] = slot, life

    def kept(
        self, chunk: int, lies: tuple[ReplicaSlot, int], parameters: Sequence[Tensor], trip: Any
    ) -> None:
        """Note what a chunk's backward has left in a slot's replica, in one of its lives."""
        self._lies[chunk] = lies
        trips = self._trips.setdefault(chunk, [])
        if trips is not None:
            trips.append(trip)
        for p in parameters:
            self.having(p).add(chunk)

    @plainly
    def stand_in(self, parameter: Tensor, filled: bool) -> None:
        """Let ``.grad`` stand for what is kept, or for zeros if others have something."""
        one = self._sum(parameter)
        if not one.chunks and not filled and parameter.grad is None:
            return
        if isinstance(parameter.grad, RemoteGrad):
            parameter.grad.renew()
            return
        made = RemoteGrad(parameter, weakref.proxy(self), one.number)
        parameter.grad = made
        one.stand = weakref.ref(made)

    def fetch(self, grad: RemoteGrad) -> None:
        """Bring all gradients to the driver: who uses one uses all."""
        if not self._is_mine(grad):
            raise StateLost("the gradient went with the replicas that had it: all of them died")
        self._fetch([one.stand() for one in self._sums.values()])

    def _fetch(self, stands: Sequence[RemoteGrad | None]) -> None:
        wanted = {one.number: one for one in stands if one is not None and not one.fetched}
        if not wanted:
            return
        with self._executor.trip():
            self.collect()
            for number, value in self._total([*wanted]).items():
                wanted[number].arrive(value)

    def _total(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Return gradients that the replicas keep, summed in the order of chunks."""
        self._refuse_missed(numbers)
        sums: dict[int, Tensor] = {}
        for chunk in sorted(set[int]().union(*[self._sums[n].chunks for n in numbers])):
            wanted = tuple(n for n in numbers if chunk in self._sums[n].chunks)
            for number, grad in zip(wanted, self._ask(chunk, wanted), strict=True):
                if number in sums:
                    sums[number].add_(grad)
                else:
                    sums[number] = grad.clone()
        for number in numbers:
            if number not in sums:
                like = self._master.tensors[number]
                sums[number] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            scale = self._sums[number].scale
            if scale is not None:
                sums[number].mul_(scale)
        return sums

    def _refuse_missed(self, numbers: Sequence[int]) -> None:
        if any(self._sums[number].missed for number in numbers):
            raise GraphLost(
                "gradients of before the last step went with their replica: call zero_grad() "
                "after each step, or use them before the next"
            )

    def _ask(self, chunk: int, numbers: tuple[int, ...]) -> list[Tensor]:
        """Fetch gradients that a chunk has kept; valid until the next call."""
        request = GradientsRequest(self._master.number, numbers, chunk)
        for _ in range(_MOST_TRIES):
            slot, life = self._lies[chunk]
            if not slot.ready or slot.life != life:
                slot = self._executor.replica_set.choose(slot, {})
                self.ready(slot)
                self.bring(chunk, slot)
                self._refuse_missed(numbers)
            answer = self._call(slot, request)
            if answer is not None:
                device = self._master.tensors[numbers[0]].device
                return [home_of(t, device) for t in answer.value]
        raise ReplicaDied(f"{_MOST_TRIES} replicas died, one after the other")

    def _call(self, slot: ReplicaSlot, request: Any) -> Answer | None:
        """Call one replica; returns None if it died."""
        dispatcher = self._executor.dispatcher
        answer = dispatcher.receive(dispatcher.send(slot, self._asking(slot, request)))
        if answer is not None and answer.failure is not None:
            exceptions.reraise(answer.failure, str(slot))
        return answer

    def _asking(self, slot: ReplicaSlot, request: Any) -> ChunkCall:
        phase = "resume" if isinstance(request, ResumeRequest) else "step"
        return ChunkCall(slot, phase, lambda slot: request, self._master.number)

    # Replicas.

    def _current(self) -> ReplicaSlot | None:
        """Return a slot whose replica has made all steps."""
        return next((s for s in self._held if s.ready and self._is_current(s)), None)

    def _is_current(self, slot: ReplicaSlot) -> bool:
        # A replica whose weights were spoiled says that it lacks them, and the dispatcher forgets
        # what it had.
        known = slot in self._given and self._master.number in slot.revisions
        return known and self._held.get(slot) == (slot.life, self.steps)

    def ready(self, slot: ReplicaSlot) -> None:
        """Make sure that a slot's replica has the weights and optimizers of now."""
        while slot.ready and not self._is_current(slot):
            now = slot.life, self.steps
            weights: dict[int, Tensor] | None = None
            states: dict[int, Any] = {}
            if min(self._weights_at, self._states_at) < self.steps:
                source = self._current()
                if source is None:
                    raise self._lost()
                snapshot = SnapshotRequest(self._master.number, True, True)
                answer = self._call(source, snapshot)
                if answer is None:
                    continue
                weights, states = own(answer).value.load()
            elif self._held.get(slot, now) != now:  # its weights are those of other steps
                slot.revisions.pop(self._master.number, None)
            self._resume(slot, weights, states)

    def _resume(
        self, slot: ReplicaSlot, weights: dict[int, Tensor] | None, states: dict[int, Any]
    ) -> None:
        optimizers = {}
        for number, optimizer in self.optimizers.items():
            groups, state = states.get(number) or optimizer.described(self._master.slot)
            rows = []
            for g in optimizer.param_groups:
                slots = [self._master.slot(p) for p in g["params"]]
                rows.append([slot for slot in slots if slot is not None])
            # A group that was added since comes with the step.
            groups = [{**g, "params": row} for g, row in zip(groups, rows, strict=False)]
            optimizers[number] = optimizer.kind, optimizer.keywords, groups, state
        value = parcel(optimizers, "optimizer")
        trained = tuple(self._master.trained)
        update = self._executor.update(self._master, slot, weights)
        answer = self._call(slot, ResumeRequest(self._master.number, update, trained, value))
        if answer is not None and answer.lacking:
            slot.revisions.pop(self._master.number, None)
        elif answer is not None:
            slot.revisions[self._master.number] = self._master.revision
            self._held[slot] = slot.life, self.steps
            self._given.add(slot)

    def _lost(self) -> StateLost:
        """Make the error for steps that no replica has, and go back to the driver's weights."""
        lost, older = self.behind, self.behind + self._weights_at - self._states_at
        self.steps = self._states_at = self._weights_at
        self._held = dict.fromkeys(self._held, (0, 0))
        self._sums.clear()
        self._plan = None
        self._catch_up()
        for tensor in self._master.tensors.values():
            if isinstance(tensor.grad, RemoteGrad):
                tensor.grad = None
        return StateLost(
            f"all replicas that had made the last {older} steps died at once, and the optimizer's "
            f"state of these with them, and the weights of the last {lost}. The model has what was "
            "last used in this process, as by model.sync(), with which training may go on"
        )

    # Steps.

    def step(self, optimizer: Any) -> None:
        """Let the replicas make a step, which is not waited for."""
        with self._executor.trip():
            self.collect()
            if optimizer.number not in self.optimizers:
                raise RuntimeError(
                    "optimizer: another one, made later, has these parameters; use that one"
                )
            if optimizer.regrouped(self._master.slot):
                self.add(optimizer)
            if not self.behind:
                self._master.sync()
                if self._master.verify():
                    self._master.sync()
                if self._master.edited:
                    self.lend()
            alike = self._lag()
            self._send(self._planned(optimizer, optimizer.changed(), None))
            if not alike:
                self.pull()

    def clip(self, optimizer: Any, most: float | None, norm_type: float, error: bool) -> Tensor:
        """Return the norm of the gradients, which stay where they are; the step scales them."""
        with self._executor.trip():
            self.collect()
            if optimizer.regrouped(self._master.slot):
                self.add(optimizer)
            plan = self._planned(optimizer, [{} for _ in optimizer.param_groups], norm_type)
            step = plan.step
            params = [*optimizer.parameters()]
            left = any(self._master.slot(p) is None and p.grad is not None for p in params)
            came = any(grad is not None for grad in step.given.values())
            apart = left or came or step.scale is not None
            if apart or not self._chunks(step, self._members()):  # they come here anyway
                limit = math.inf if most is None else most
                return torch.nn.utils.clip_grad_norm_(params, limit, norm_type, error)
            self._send(plan)
            norm: Tensor = self.collect().clone()
            if error:
                torch.nn.utils.get_total_norm([norm], norm_type, error_if_nonfinite=True)
            if most is not None:
                scale = torch.clamp(most / (norm + 1e-6), max=1.0)
                for number in step.summed:
                    self._sums[number].scale = scale
                    stand = self._sums[number].stand()
                    if stand is not None:
                        stand.renew()
            return norm

    def _planned(self, optimizer: Any, values: list[dict[str, Any]], norm: float | None) -> _Plan:
        """Note where gradients are."""
        summed, given = list[int](), dict[int, Tensor | None]()
        for number, p in self._numbered(optimizer):
            grad: Any = p.grad
            if grad is None:
                continue
            if not self._is_mine(grad) or grad.touched:
                given[number] = grad.value() if isinstance(grad, RemoteGrad) else grad.detach()
            elif grad.zeroed or not self._sums[number].chunks:
                given[number] = None
            else:
                summed.append(number)
        self._refuse_missed([*summed, *[n for n, grad in given.items() if grad is None]])
        scales = {id(one): one for one in [self._sums[n].scale for n in summed]}
        if len(scales) > 1:  # some were clipped, and others were not
            given.update(self._total(summed))
            summed, scales = [], {}
        step = StepRequest(
            model=self._master.number,
            optimizer=optimizer.number,
            values=values,
            summed=tuple(summed),
            scale=next(iter(scales.values()), None),
            given=given,
            norm=norm,
        )
        return _Plan(step)

    def _members(self) -> list[ReplicaSlot]:
        """Return the slots that step, in the order of devices."""
        slots = self._executor.slots(self._ids)
        found = [slot for slot in dict.fromkeys(slots) if slot.ready]
        return found or [self._executor.replica_set.choose(slots[0], {})]

    def _chunks(self, step: StepRequest, members: Sequence[ReplicaSlot]) -> list[int]:
        """Return the chunks that have kept gradients, if members can sum these among themselves."""
        having = {frozenset(self._sums[number].chunks) for number in step.summed}
        if len(having) != 1:
            return []
        chunks = sorted(*having)
        for chunk in chunks:
            at = chunk if len(members) > 1 else 0
            if at >= len(members) or self._lies[chunk] != (members[at], members[at].life):
                return []
        return chunks

    def _send(self, plan: _Plan) -> None:
        """Send a step to all members."""
        executor = self._executor
        members = self._members()
        for slot in members:
            self.ready(slot)
        step = plan.step
        chunks = self._chunks(step, members)
        if not chunks:
            given = {**step.given, **self._total(step.summed)}
            step = step._replace(given=given, summed=(), scale=None)
        last = [(slot, slot.life) for slot in members], step.summed
        again = bool(step.summed) and self._normed == last
        self._normed = last if step.norm is not None else ()
        plan.grouped = bool(step.summed) and len(members) > 1 and not again
        places: dict[int, ExchangeRequest] = {}
        if plan.grouped:
            places = groups.members(executor, members)
        threads = executor.replica_set.threads(len(members))
        plan.step = step._replace(
            chunks=tuple(chunks), again=again, number=self.steps, threads=threads
        )
        plan.requests, plan.sent = [], []
        for i, slot in enumerate(members):
            request = plan.step._replace(exchange=places.get(i))
            plan.requests.append((slot, slot.life, self._asking(slot, request)))
        self._plan = plan
        self._go_on(plan)

    def _go_on(self, plan: _Plan) -> None:
        """Send what Ctrl-C has left to send: members wait for each other."""
        while len(plan.sent) < len(plan.requests):
            slot, life, call = plan.requests[len(plan.sent)]
            pending = slot.pending
            if slot.life != life:
                pending = None
            elif pending is None or pending.call is not call:
                pending = self._executor.dispatcher.send(slot, call)
            plan.sent.append(pending)

    def collect(self) -> Any:
        """Take the answers to the last step, and make it again if no replica could."""
        executor = self._executor
        while self._plan is not None:
            plan = self._plan
            self._go_on(plan)
            if plan.grouped:
                limit = executor.replica_set.options.call_timeout
                executor.dispatcher.watch(plan.sent, lambda: groups.forget(executor), limit)
            done: list[tuple[ReplicaSlot, int]] = []
            tried: list[tuple[ReplicaSlot, int]] = []
            failed, unread, value = None, None, None
            for (slot, life, _), pending in zip(plan.requests, plan.sent, strict=True):
                answer = None if pending is None else executor.dispatcher.receive(pending)
                if pending is None or answer is None:
                    continue
                if answer.lacking and answer.failure is not None:  # it could not read the step
                    unread = slot, answer.failure
                    continue
                if answer.failure is not None and answer.failure.name.endswith("Abandoned"):
                    continue
                if not pending.lives:  # it stepped alone, as the last thing it did
                    continue
                if answer.failure is not None:
                    failed = slot, answer.failure
                    tried.append((slot, life))
                else:
                    value = answer.value
                    done.append((slot, life))
            done = done or tried  # an exception of all: what they did is the step
            if len(done) < len(plan.sent):
                groups.forget(executor)
            if not done:  # nobody that lives has stepped
                if unread is not None:
                    self._plan, self._normed = None, ()
                    exceptions.reraise(unread[1], str(unread[0]))
                plan.tries += 1
                if plan.tries == _MOST_TRIES:
                    self._plan, self._normed = None, ()
                    text = "replicas died, or did not find each other. It seems that the step ends"
                    raise ReplicaDied(f"{_MOST_TRIES} times in a row {text} its process")
                self._send(plan)
                continue
            if plan.step.norm is not None:
                self._plan = None
            else:  # Ctrl-C may come at each call: the step counts last, when all else knows it
                self.optimizers[plan.step.optimizer].stepped(plan.step.values)
                self._trips = dict.fromkeys(self._trips)  # they cannot run again with new weights
                self._held.update((slot, (life, self.steps + 1)) for slot, life in done)
                self.steps, self._plan = self.steps + 1, None
                for slot, _, _ in plan.requests if len(done) < len(plan.sent) else ():
                    self.ready(slot)  # at once, while somebody has the step
            if failed is not None:
                log.error("step %d of the optimizer in the replicas failed", self.steps)
                exceptions.reraise(failed[1], str(failed[0]))
            return value
        return None

    # The driver's copy.

    def _lag(self) -> bool:
        """Let parameters fetch their values when they are used; returns whether all can."""
        trained = [*self._master.trained.values()]
        # Noted before it is done: Ctrl-C may come between, and they must be found again.
        self._lagging = [p for p in trained if type(p) in (nn.Parameter, self._kind)]
        for p in self._lagging:
            p.__class__ = self._kind
        self._master.lag()
        return len(self._lagging) == len(trained)

    def _catch_up(self) -> None:
        """Make parameters ordinary ones, as they have their values."""
        for p in self._lagging:
            p.__class__ = nn.Parameter
        self._master.catch_up()
        self._lagging = []

    def lend(self) -> None:
        """Bring the driver up to date, which is what replicas get with the next call."""
        with self._executor.trip():
            self.pull(states=True)
            self._given.clear()
            self._master.edited = False

    @ambient.uncompiled
    def pull(self, states: bool = False) -> None:
        """Bring the driver's weights up to date, and its optimizers with ``states``."""
        with self._executor.trip():
            self.collect()
            weights = self._weights_at < self.steps
            states = states and self._states_at < self.steps
            answer = None
            while answer is None and (weights or states):
                source = self._current()
                if source is None:
                    raise self._lost()
                answer = self._call(source, SnapshotRequest(self._master.number, weights, states))
            if answer is not None:
                found, optimizers = own(answer).value.load()
                if weights:
                    self._master.take(found)
                    self._weights_at = self.steps
                for number, (groups_, state) in optimizers.items():
                    self.optimizers[number].arrive(groups_, state, self._master.tensors)
                self._states_at = self.steps if states else self._states_at
            self._catch_up()

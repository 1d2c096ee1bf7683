"""Training where the weights are: replicas own weights, gradients and the optimizer's state.

`Weights` knows which replicas have those of now, `Gradients` what chunks have kept, and `Resident`
sends the steps. In the driver a `RemoteGrad` stands for a gradient, and all else follows:
accumulation takes place in the replicas, ``zero_grad`` is seen by the next backward, and a gradient
that the program touched travels with the step.

[Note: deaths]
Weights are the same from step to step, so whatever a replica kept since the last ``zero_grad`` can
be made again: the chunk's forwards and backwards run once more where it goes on. A newcomer takes
weights and optimizers from a replica that has made all steps. When a member dies in a step, others
may have no sum: they take over from one that stepped, and if none that lives did, the step is made
again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient, threads
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import Pending, PlainCall, own
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.remote_grad import RemoteGrad
from raydp_parallel.driver.resident_gradients import Gradients, Sum
from raydp_parallel.errors import ReplicaDied, StateLost
from raydp_parallel.replica import exceptions
from raydp_parallel.state.lagging import Lagging
from raydp_parallel.state.mirror import Master
from raydp_parallel.wire.codec import parcel
from raydp_parallel.wire.messages import (
    ResumeRequest,
    SnapshotRequest,
    StepRequest,
)

if TYPE_CHECKING:
    from raydp_parallel.driver.optimizer import InReplicas

log = logging.getLogger("raydp_parallel")

_MOST_TRIES = 6


Values = dict[str, object]
"""Values of a group of an optimizer, or of its state of one parameter."""

States = tuple[list[Values], dict[int, Values]]
"""An optimizer's groups, with slots in the place of parameters, and its state by slot."""


@dataclass
class _Plan:
    """One step on its way, or the norm of gradients."""

    step: StepRequest  # but for the member's place in the group
    sums: list[Sum]  # that it sums
    members: list[tuple[ReplicaSlot, int]] = field(default_factory=list)  # with their lives
    calls: list[PlainCall] = field(default_factory=list)  # theirs
    sent: list[Pending | None] = field(default_factory=list)  # None where the replica was gone
    grouped: bool = False  # members exchange tensors
    tries: int = 0  # how often nobody could make it


class Weights:
    """The weights and optimizers of one model, and which replicas have those of now.

    Args:
        executor: The executor.
        master: The model.
        gradients: Its gradients.
        source: Fetches the weights when they are used.

    Attributes:
        optimizers: The optimizers, by number.
        given: The slots whose replicas have these.
        steps: The steps that were made.
        coming: The step on its way.
    """

    def __init__(
        self, executor: Executor, master: Master, gradients: Gradients, source: Resident
    ) -> None:
        self._executor, self._master, self._gradients = executor, master, gradients
        self.optimizers: dict[int, InReplicas] = {}
        self.steps = self._at = self._states_at = 0  # made, and those that the driver's copies have
        self.coming: _Plan | None = None
        self._held: dict[ReplicaSlot, tuple[int, int]] = {}  # the life and step of its weights
        self.given: set[ReplicaSlot] = set()
        self._lagging: list[nn.Parameter] = []

        class Parameter(Lagging):
            """A parameter that lags: as long as the model has some, it keeps this class."""

        Parameter.source = source
        self._kind = Parameter

    @property
    def behind(self) -> int:
        """The steps that the driver's weights lack."""
        coming = self.coming is not None and self.coming.step.norm is None
        return self.steps + coming - self._at

    # Replicas.

    def ready(self, slot: ReplicaSlot) -> None:
        """Make sure that a slot's replica has the weights and optimizers of now."""
        model = self._master.number
        while slot.ready and not self._is_current(slot):
            now = slot.life, self.steps
            weights: dict[int, Tensor] | None = None
            states: dict[int, States] = {}
            if min(self._at, self._states_at) < self.steps:
                weights, states = self._snapshot(True, True)
            elif self._held.get(slot, now) != now:  # its weights are those of other steps
                slot.revisions.pop(model, None)
            optimizers = {}
            for number, one in self.optimizers.items():
                groups, state = states.get(number) or one.described(self._master.slot)
                optimizers[number] = one.kind, one.keywords, groups, state
            value = parcel(optimizers, "optimizer")
            update = self._executor.update(self._master, slot, weights)
            request = ResumeRequest(model, update, tuple(self._master.trained), value)
            answer = self._executor.dispatcher.ask(PlainCall(slot, "resume", request))
            if answer is not None and answer.lacking:
                slot.revisions.pop(model, None)
            elif answer is not None:
                self._held[slot] = now
                self.given.add(slot)

    def _is_current(self, slot: ReplicaSlot) -> bool:
        # A replica whose weights were spoiled says that it lacks them, and the dispatcher forgets
        # what it had.
        known = slot in self.given and self._master.number in slot.revisions
        return known and self._held.get(slot) == (slot.life, self.steps)

    def _snapshot(self, weights: bool, states: bool) -> tuple[dict[int, Tensor], dict[int, States]]:
        """Fetch what a replica has that has made all steps; valid until it is called again."""
        while True:
            source = next((s for s in self._held if s.ready and self._is_current(s)), None)
            if source is None:
                raise self._lost()
            request = SnapshotRequest(self._master.number, weights, states)
            answer = self._executor.dispatcher.ask(PlainCall(source, "step", request))
            if answer is not None:
                found: tuple[dict[int, Tensor], dict[int, States]] = own(answer).value.load()
                return found

    def _lost(self) -> StateLost:
        """Make the error for steps that no replica has, and go back to the driver's weights."""
        lost = self.behind + self._at - min(self._at, self._states_at)
        self.steps = self._states_at = self._at
        self._held = dict.fromkeys(self._held, (0, 0))
        self.coming = None
        self._gradients.clear()
        self._catch_up()
        return StateLost(
            f"all replicas that had made the last {lost} steps died at once. The weights and the "
            "optimizer's state are those that were last used in this process, as by model.sync(), "
            "with which training may go on"
        )

    def stepped(self, members: Collection[tuple[ReplicaSlot, int]]) -> None:
        """Note that replicas have made a step, each in one of its lives."""
        self._held.update((slot, (life, self.steps + 1)) for slot, life in members)
        # Ctrl-C may come at each call: the step counts last, when all else knows it.
        self.steps, self.coming = self.steps + 1, None

    # The driver's copy.

    def lag(self) -> bool:
        """Let parameters fetch their values when they are used; returns whether all can."""
        trained = self._master.trained.values()
        # Noted before it is done: Ctrl-C may come between, and they must be found again.
        kinds = nn.Parameter, self._kind
        self._lagging = [p for p in trained if isinstance(p, kinds) and type(p) in kinds]
        for p in self._lagging:
            p.__class__ = self._kind
        self._master.lag()
        if not self.steps:  # copies of all went, and a heap would keep their memory
            threads.give_back()
        return len(self._lagging) == len(trained)

    def _catch_up(self) -> None:
        """Make parameters ordinary ones, as they have their values."""
        for p in self._lagging:
            p.__class__ = nn.Parameter
        self._master.catch_up()
        self._lagging = []

    def pull(self, states: bool) -> None:
        """Bring the driver's weights up to date, and its optimizers with ``states``."""
        weights = self._at < self.steps
        states = states and self._states_at < self.steps
        if weights or states:
            found, optimizers = self._snapshot(weights, states)
            self._master.take(found)
            self._at = self.steps
            for number, (groups_, state) in optimizers.items():
                self.optimizers[number].arrive(groups_, state)
            self._states_at = self.steps if states else self._states_at
        self._catch_up()


class Resident:
    """Trains one model in the replicas.

    Args:
        executor: The executor.
        master: The model.
        ids: The devices that train.

    Attributes:
        weights: Its weights and optimizers.
        gradients: Its gradients.
    """

    def __init__(self, executor: Executor, master: Master, ids: Sequence[DeviceId]) -> None:
        self._executor, self._master = executor, master
        self._ids = ids
        self.gradients = Gradients(executor, master, weakref.proxy(self))
        self.weights = Weights(executor, master, self.gradients, self)
        self._normed: tuple[object, object] | None = None  # whose sums replicas have, for the step

    # Coming and going.

    def add(self, optimizer: InReplicas) -> None:
        """Begin to train an optimizer's parameters, or all anew if it changed."""
        with self._executor.trip():
            self.recall()
            master, optimizers = self._master, self.weights.optimizers
            master.sync()
            for p in optimizer.parameters():
                if master.slot(p) is None and not optimizer.had(p):
                    raise ValueError(
                        f"optimizer: a parameter of shape {tuple(p.shape)} is not, or not any "
                        "more, one of the model's: make an optimizer for those that it has"
                    )
            slots = optimizer.slots(master.slot)
            for other, known in [*optimizers.items()]:
                if slots & known.slots(master.slot):
                    del optimizers[other]  # this one takes its place
            optimizers[optimizer.number] = optimizer
            optimizer.given(master.slot)
            trained = set[int]().union(*[one.slots(master.slot) for one in optimizers.values()])
            self.leave(master.trained.keys() - trained)
            master.train(trained)
            master.sync()
            master.edited = False  # replicas get all with the next call

    def leave(self, slots: Collection[int]) -> None:
        """Bring all that only replicas have of parameters that leave."""
        self.pull(states=True)
        tensors = self._master.tensors
        self.gradients.leave([tensors[slot] for slot in slots])

    @ambient.uncompiled
    def pull(self, states: bool = False) -> None:
        """Bring the driver's weights up to date, and its optimizers with ``states``."""
        with self._executor.trip():
            self.collect()
            self.weights.pull(states)

    def recall(self) -> None:
        """Bring the driver up to date, which is what replicas get with the next call."""
        with self._executor.trip():
            self.pull(states=True)
            self.weights.given.clear()
            self._master.edited = False

    def fetch(self, grad: RemoteGrad) -> None:
        """Bring all gradients to the driver: who uses one uses all."""
        with self._executor.trip():
            self.collect()
            self.gradients.fetch(self.gradients.sums.values())
        if not grad.fetched:
            raise StateLost("the gradient went with the replicas that had it: all of them died")

    def begin(self) -> None:
        """Begin a backward."""
        self.collect()
        self.gradients.begin()
        self._normed = None

    # Steps.

    def step(self, optimizer: InReplicas) -> None:
        """Let the replicas make a step, which is not waited for."""
        with self._executor.trip():
            self._prepare(optimizer)
            if not self.weights.behind:
                self._master.sync()
                if self._master.verify():
                    self._master.sync()
                if self._master.edited:
                    self.recall()
            alike = self.weights.lag()
            self._send(self._planned(optimizer, None))
            if not alike:
                self.pull()

    def clip(
        self, optimizer: InReplicas, most: float | None, norm_type: float, error: bool
    ) -> Tensor:
        """Return the norm of the gradients, which stay where they are; the step scales them."""
        with self._executor.trip():
            self._prepare(optimizer)
            plan = self._planned(optimizer, norm_type)
            params = [*optimizer.parameters()]
            left = any(self._master.slot(p) is None and p.grad is not None for p in params)
            came = any(grad is not None for grad in plan.step.given.values())
            scaled = any(one.scale is not None for one in plan.sums)
            if left or came or scaled or not self.gradients.chunks(plan.sums, self._members()):
                if most is not None:
                    return torch.nn.utils.clip_grad_norm_(params, most, norm_type, error)
                grads = [p.grad for p in params if p.grad is not None]
                return torch.nn.utils.get_total_norm(grads, norm_type)
            self._send(plan)
            norm = self.collect()
            assert norm is not None
            norm = norm.clone()
            if most is not None:
                torch.nn.utils.get_total_norm([norm], norm_type, error_if_nonfinite=error)
                scale = torch.clamp(most / (norm + 1e-6), max=1.0)
                for one in plan.sums:
                    one.scale, stand = scale, one.stand()
                    if stand is not None:
                        stand.renew()
            return norm

    def _prepare(self, optimizer: InReplicas) -> None:
        self.collect()
        if optimizer.number not in self.weights.optimizers:
            raise RuntimeError(
                "optimizer: another one, made later, has these parameters; use that one"
            )
        if optimizer.regrouped(self._master.slot):
            self.add(optimizer)

    def _planned(self, optimizer: InReplicas, norm: float | None) -> _Plan:
        """Note where gradients are."""
        sums: list[Sum] = []
        given: dict[int, Tensor | None] = {}
        for p in optimizer.parameters():
            slot, grad, one = self._master.slot(p), p.grad, self.gradients.sums.get(p)
            if slot is None or grad is None:
                continue
            stand = None if one is None else one.stand()
            if one is None or stand is None or stand is not grad or stand.touched:
                given[slot] = grad.value() if isinstance(grad, RemoteGrad) else grad.detach()
            elif stand.zeroed or not (one.chunks or one.missed):
                given[slot] = None
            else:
                sums.append(one)
        self.gradients.refuse_missed(sums)
        if len({id(one.scale) for one in sums}) > 1:  # some were clipped, and others were not
            given.update(self.gradients.total(sums))
            sums = []
        step = StepRequest(
            model=self._master.number,
            optimizer=optimizer.number,
            values=optimizer.changed() if norm is None else [{} for _ in optimizer.param_groups],
            given=given,
            norm=norm,
        )
        return _Plan(step, sums)

    def _members(self) -> list[ReplicaSlot]:
        """Return the slots that step, in the order of devices."""
        slots = self._executor.slots(self._ids)
        found = [slot for slot in dict.fromkeys(slots) if slot.ready]
        return found or [self._executor.replica_set.choose(slots[0], {})]

    def _send(self, plan: _Plan) -> None:
        """Send a step to all members."""
        executor, slots = self._executor, self._members()
        for slot in slots:
            self.weights.ready(slot)
        chunks = self.gradients.chunks(plan.sums, slots)
        if not chunks:
            plan.step.given.update(self.gradients.total(plan.sums))
            plan.sums = []
        plan.members = [(slot, slot.life) for slot in slots]
        last = plan.members, plan.sums
        again = bool(chunks) and self._normed == last
        self._normed = None if plan.step.norm is None else last
        plan.grouped = bool(chunks) and len(slots) > 1 and not again
        seats = groups.join(executor, slots).seats if plan.grouped else None
        plan.step = plan.step._replace(
            summed=tuple([one.slot for one in plan.sums]),
            chunks=tuple(chunks),
            scale=plan.sums[0].scale if chunks else None,
            again=again,
            number=self.weights.steps,
            threads=executor.replica_set.threads(len(slots)),
        )
        plan.calls, plan.sent = [], []
        for i, slot in enumerate(slots):
            request = plan.step._replace(exchange=None if seats is None else seats[i])
            plan.calls.append(PlainCall(slot, "step", request))
        self.weights.coming = plan
        self._go_on(plan)

    def _go_on(self, plan: _Plan) -> None:
        """Send what Ctrl-C has left to send: members wait for each other."""
        while len(plan.sent) < len(plan.calls):
            (slot, life), call = plan.members[len(plan.sent)], plan.calls[len(plan.sent)]
            pending: Pending | None = slot.pending
            if slot.life != life:
                pending = None
            elif pending is None or pending.call is not call:
                pending = self._executor.dispatcher.send(slot, call)
            plan.sent.append(pending)

    def collect(self) -> Tensor | None:
        """Take the answers to the last step, and make it again if no replica could; returns the
        norm, if that was asked for.
        """
        executor, weights = self._executor, self.weights
        while weights.coming is not None:
            plan = weights.coming
            self._go_on(plan)
            if plan.grouped:
                limit = executor.replica_set.options.call_timeout
                executor.dispatcher.wait_or_leave(plan.sent, executor.dispatcher.leave, limit)
            done, tried, failed, value = [], [], None, None
            for member, pending in zip(plan.members, plan.sent, strict=True):
                answer = None if pending is None else executor.dispatcher.receive(pending)
                # One that is gone has stepped alone, as the last thing it did.
                if pending is None or answer is None or not pending.lives:
                    continue
                if answer.failure is None:
                    value = answer.value
                    done.append(member)
                elif not answer.failure.name.endswith("Abandoned"):
                    failed = member[0], answer.failure
                    if not answer.lacking:  # it could read the step
                        tried.append(member)
            done = done or tried  # an exception of all: what they did is the step
            if len(done) < len(plan.members):
                executor.dispatcher.leave()
            if not done:  # nobody that lives has stepped
                plan.tries += 1
                if failed is None and plan.tries < _MOST_TRIES:
                    self._send(plan)
                    continue
                weights.coming = self._normed = None
                if failed is not None:
                    exceptions.reraise(failed[1], str(failed[0]))
                text = "replicas died, or did not find each other. It seems that the step ends"
                raise ReplicaDied(f"{_MOST_TRIES} times in a row {text} its process")
            if plan.step.norm is not None:
                weights.coming = None
            else:
                weights.optimizers[plan.step.optimizer].stepped(plan.step.values)
                self.gradients.stepped()
                weights.stepped(done)
                for slot, _ in plan.members if len(done) < len(plan.members) else ():
                    weights.ready(slot)  # at once, while somebody has the step
            if failed is not None:
                log.error("step %d of the optimizer in the replicas failed", weights.steps)
                exceptions.reraise(failed[1], str(failed[0]))
            return value
        return None

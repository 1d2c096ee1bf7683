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

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient, threads
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import Call, Dispatcher, Flight, copied
from raydp_parallel.driver.optimizer_state import OptimizerState, States
from raydp_parallel.driver.remote_grad import Stand
from raydp_parallel.driver.resident_gradients import Gradients, Sum
from raydp_parallel.errors import GraphLost, ReplicaDied, StateLost
from raydp_parallel.replica import exceptions
from raydp_parallel.state.lagging import PLAINLY, Lagging
from raydp_parallel.state.mirror import Master
from raydp_parallel.state.run import seen
from raydp_parallel.wire.codec import parcel
from raydp_parallel.wire.messages import ResumeRequest, Seat, SnapshotRequest, StepRequest, Terms

_MOST_TRIES = 6


@dataclass
class _Plan:
    """One step on its way, or the norm of gradients."""

    step: StepRequest  # but for what follows from the replicas that live as it is sent
    sums: list[Sum]  # that it sums
    flight: Flight = field(default_factory=lambda: Flight([]))  # one call for each member


class Weights:
    """The weights and optimizers of one model, and which replicas have those of now. The owner has
    its gradients, and fetches the weights when they are used.
    """

    def __init__(self, dispatcher: Dispatcher, master: Master, owner: Resident) -> None:
        self._dispatcher, self._master, self._gradients = dispatcher, master, owner.gradients
        self.optimizers: dict[int, OptimizerState] = {}
        self.steps = self._at = self._states_at = 0  # made, and those that the driver's copies have
        self.coming: _Plan | None = None  # the step, or norm, on its way
        # Of replicas: the life, the step of the weights, and the recall before the optimizers.
        self.version_at: dict[ReplicaSlot, tuple[int, int, int]] = {}
        self.recalls = 0  # how often replicas were to get all from here again
        # The class of parameters that lag: as long as the model has some, it keeps this class.
        self.kind: type[nn.Parameter] = type("Parameter", (Lagging,), {"owner": owner})

    @property
    def steps_behind(self) -> int:
        """The steps that the driver's weights lack."""
        return self.steps + (self.coming is not None) - self._at

    @property
    def unfetched(self) -> bool:
        """True if replicas alone have the last steps."""
        return min(self._at, self._states_at) < self.steps

    # Replicas.

    def supply(self, slot: ReplicaSlot) -> None:
        """Make sure that a slot's replica has the weights and optimizers of now."""
        master = self._master
        while slot.ready and not self.current(slot):
            now = slot.life, self.steps
            weights: dict[int, Tensor] | None = None
            states: dict[int, States] = {}
            if self.unfetched:
                weights, states = self._snapshot("weights"), self._snapshot("optimizers")
            elif self.version_at.get(slot, (*now, 0))[:2] != now:  # it has those of other steps
                slot.revisions.pop(master.number, None)
            optimizers = {}
            for number, one in self.optimizers.items():
                groups, state = states.get(number) or one.described(master)
                optimizers[number] = one.kind, one.keywords, groups, state, one.attributes(master)
            value = parcel(optimizers, "optimizer")
            update = self._dispatcher.update(master, slot, weights)
            request = ResumeRequest(master.number, update, (*master.trained,), value)
            if self._dispatcher.ask(Call(slot, "resume", request, master)) is not None:
                self.version_at[slot] = *now, self.recalls

    def current(self, slot: ReplicaSlot) -> bool:
        """Tell if a slot's replica has them."""
        # A replica whose weights were spoiled says that it lacks them, and the dispatcher forgets
        # what it had.
        now = slot.life, self.steps, self.recalls
        return self._master.number in slot.revisions and self.version_at.get(slot) == now

    def _snapshot(self, of: Literal["weights", "optimizers"]) -> Any:
        """Fetch the one or the other from a replica that has made all steps."""
        request = SnapshotRequest(self._master.number, of)
        while (answer := self._dispatcher.ask(Call(self.stepped_slot(), "step", request))) is None:
            pass  # it died
        return copied(answer).output.load()

    def stepped_slot(self) -> ReplicaSlot:
        """Return the slot of a replica that has made all steps."""
        for slot in self.version_at:
            if slot.ready and self.current(slot):
                return slot
        lost = self.steps_behind + self._at - min(self._at, self._states_at)
        self.steps = self._states_at = self._at
        self.version_at = dict.fromkeys(self.version_at, (0, 0, 0))
        self.coming = None
        self._gradients.clear()
        self._master.catch_up()
        raise StateLost(
            f"all replicas that had made the last {lost} steps died at once. Training may go on "
            "with the weights and the state that model.sync() or a use fetched last"
        )

    # The driver's copy.

    def pull(self) -> None:
        """Bring the driver's weights up to date."""
        if self._at < self.steps:
            PLAINLY(self._master.take, (), (self._snapshot("weights"),))
            self._at = self.steps
        self._master.catch_up()

    def pull_states(self) -> None:
        """Bring the driver's optimizers up to date."""
        if self._states_at < self.steps:
            for number, (groups_, state) in self._snapshot("optimizers").items():
                self.optimizers[number].arrive(groups_, state)
            self._states_at = self.steps


class Resident:
    """Trains one model in the replicas of some devices."""

    def __init__(self, dispatcher: Dispatcher, master: Master, ids: Sequence[DeviceId]) -> None:
        self._dispatcher, self._master, self._ids = dispatcher, master, ids
        self._set = dispatcher.replica_set
        own = weakref.proxy(self)
        self.gradients = Gradients(dispatcher, master, lambda stand: own.fetch(stand))
        self.weights = Weights(dispatcher, master, self)
        self._error: Exception | None = None  # that came in the call of another model

    # Coming and going.

    def add(self, optimizer: OptimizerState) -> None:
        """Begin to train an optimizer's parameters, or all anew if it changed."""
        with self._set.calling():
            self.pull_all()
            master, optimizers = self._master, self.weights.optimizers
            master.look()
            rows = optimizer.rows(master)
            memory: dict[object, Tensor] = {}
            for p, (_, tag, _) in rows.items():
                ((_, (address, *_), _),) = seen([p])  # 0 if it is made of other tensors
                if address and memory.setdefault((p.device, address), p) is not p:
                    raise ValueError(
                        "optimizer: two parameters lie in the same memory, as after "
                        "one.weight.data = other.weight.data: let them be one parameter, as after "
                        "one.weight = other.weight"
                    )
                if tag is None and p not in optimizer.known:
                    raise ValueError(
                        f"optimizer: a parameter of shape {tuple(p.shape)} is not, or not any "
                        "more, one of the model's: make an optimizer for those that it has"
                    )
            tags = {o: {*o.attributes(master)} for o in (*optimizers.values(), optimizer)}
            # It takes the place of others that have one of its parameters.
            others = [one for one in optimizers.values() if not tags[one] & tags[optimizer]]
            self.weights.optimizers = {one.number: one for one in (*others, optimizer)}
            optimizer.known = rows
            optimizer.told = [{} for _ in (optimizer, *optimizer.param_groups)]
            trained = set[int]().union(*[tags[one] for one in (*others, optimizer)])
            self.fetch_departing(master.trained)  # all: with what follows nothing can be made again
            master.train(trained)
            master.look()
            self.recall()  # replicas get all with the next call, also one that was asked meanwhile

    def save(self) -> None:
        """Bring what only replicas have, as one of them died, whatever model is called; what goes
        wrong is said with the next call of this one.
        """
        try:
            self.pull_all()
        except Exception as error:
            self._error = error

    def fetch_departing(self, tags: Collection[int]) -> None:
        """Bring all that only replicas have of parameters that leave; their optimizers are made
        anew.
        """
        self.recall()
        self.gradients.fetch_departing(tags)

    @ambient.uncompiled
    def pull(self) -> None:
        """Bring the driver's weights up to date."""
        with self._set.calling():
            self.collect()
            self.weights.pull()

    @ambient.uncompiled
    def pull_all(self) -> None:
        """Bring the driver's weights, and its optimizers, up to date."""
        with self._set.calling():
            self.pull()
            self.weights.pull_states()

    def recall(self) -> None:
        """Bring the driver up to date, which is what replicas get with the next call."""
        with self._set.calling():
            self.pull_all()
            self.weights.recalls += 1
            self._master.trained_was_edited = False

    def fetch(self, stand: Stand) -> Tensor:
        """Bring all gradients to the driver, as who uses one uses all; returns the one's value."""
        with self._set.calling():
            self.collect()
            self.gradients.fetch(self.gradients.sums.values())
        if stand.known is None:
            raise StateLost("the gradient went with the replicas that had it")
        return stand.known

    # Steps.

    def step(self, optimizer: OptimizerState) -> None:
        """Let the replicas make a step, which is not waited for."""
        with self._set.calling():
            self._prepare(optimizer)
            behind = self.weights.steps_behind
            if not behind:
                self._master.look()
                if self._master.verify():
                    self._master.look()
                if self._master.trained_was_edited:
                    self.recall()
            alike = self._master.lag(self.weights.kind)
            if not behind:  # copies of all went, and a heap would keep their memory
                threads.give_back()
            self._send(self._planned(optimizer, None))
            if not alike:
                self.pull()

    def clip(
        self, optimizer: OptimizerState, most: float | None, norm_type: float, error: bool
    ) -> Tensor:
        """Return the norm of the gradients, which stay where they are; the step scales them."""
        with self._set.calling():
            self._prepare(optimizer)
            plan = self._planned(optimizer, norm_type)
            own = [p.grad for p in optimizer.known if p.grad is not None]
            zeros = sum(grad is None for grad in plan.step.from_driver.values())
            others = len(own) > len(plan.sums) + zeros  # that the replicas do not have
            scaled = any(one.scale is not None for one in plan.sums)
            if others or scaled or not self.gradients.chunks(plan.sums, self._members()):
                norm = torch.nn.utils.get_total_norm(own, norm_type, error)
                if most is not None:
                    torch.nn.utils.clip_grads_with_norm_(optimizer.known, most, norm)
                return norm
            self._send(plan)
            norm = self._finish(plan)[0].to(self._master.device, copy=True)
            torch.nn.utils.get_total_norm([norm], norm_type, error)
            if most is not None:
                scale = torch.clamp(most / (norm + 1e-6), max=1.0)
                for one in plan.sums:
                    one.scale = scale
                    self.gradients.stand_in(one)
            return norm

    def _prepare(self, optimizer: OptimizerState) -> None:
        self.collect()
        if optimizer.number not in self.weights.optimizers:
            text = "was called again for its parameters: use what that returned"
            raise RuntimeError(f"optimizer: model.optimizer() {text}")
        regrouped = len(optimizer.told) != len(optimizer.param_groups) + 1
        if regrouped or optimizer.known != optimizer.rows(self._master):  # or some left or came
            self.add(optimizer)

    def _planned(self, optimizer: OptimizerState, norm: float | None) -> _Plan:
        """Note where gradients are."""
        sums: list[Sum] = []
        given: dict[int, Tensor | None] = {}
        for p, (_, tag, _) in optimizer.rows(self._master).items():
            grad, one = p.grad, self.gradients.sums.get(id(p))
            if tag is None or grad is None:
                continue
            if one is None or (stand := one.stand) is None or stand.touched:
                # A death may have a step sent again, when the program has written there.
                given[tag] = grad.detach().clone() if norm is None else grad.detach()
            elif stand.zeroed or not (one.chunks or one.missed):
                given[tag] = None
            else:
                sums.append(one)
        # State that a step makes is an ordinary tensor's, whatever mode the caller is in.
        terms = Terms(0, ambient.capture()._replace(inference=False), None, None, False, 0)
        values, number = optimizer.news(), optimizer.number
        return _Plan(StepRequest(self._master.number, number, values, given, norm, terms), sums)

    def _members(self) -> list[ReplicaSlot]:
        """Return the slots that step, in the order of devices."""
        slots = self._set.slots_for(self._ids)
        found = [slot for slot in dict.fromkeys(slots) if slot.ready]
        return found or [self._set.choose(slots[0], ())]

    def _send(self, plan: _Plan) -> None:
        """Send a step to all members."""
        if self.weights.unfetched:
            self.weights.stepped_slot()  # before a wait for a newcomer, which could only lack them
        slots = self._members()
        for slot in slots:
            self.weights.supply(slot)
        sums, given = plan.sums, plan.step.from_driver
        chunks = self.gradients.chunks(sums, slots)
        if not chunks:
            sums, given = [], {**given, **self.gradients.total(sums)}
        seats: Sequence[Seat | None] = [None] * len(slots)
        if chunks and len(slots) > 1:
            seats = groups.join(self._dispatcher, slots).seats
        step = plan.step._replace(
            from_driver=given,
            summed=tuple([one.tag for one in sums]),
            chunks=tuple(chunks),
            scale=sums[0].scale if chunks else None,
            sums=self.gradients.begun,
        )
        count = self._set.threads(len(slots))
        terms = step.terms._replace(threads=count, seed=self.weights.steps)
        calls = []
        for slot, seat in zip(slots, seats, strict=True):
            request = step._replace(terms=terms._replace(group=seat))
            calls.append(Call(slot, "step", request))
        plan.flight = Flight(calls, grouped=len(slots) > 1, on=slots)
        self.weights.coming = plan
        self._dispatcher.start(plan.flight)

    def collect(self) -> None:
        """Take the answers to the last step, and make it again if no replica could."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.weights.coming is not None:
            self._finish(self.weights.coming)

    def _finish(self, plan: _Plan) -> list[Tensor]:
        """Take the answers to a step; returns the norm, if that was asked for."""
        weights, dispatcher = self.weights, self._dispatcher
        for attempt in range(_MOST_TRIES):
            if attempt:
                try:
                    self._send(plan)  # nobody that lives has stepped
                except Exception as error:  # nor can it be made again: this is said once
                    weights.coming = None
                    self.gradients.clear()
                    if not isinstance(error, GraphLost):
                        raise
                    raise StateLost(
                        "optimizer.step: the last step was not made, because a replica died in it, "
                        "and its gradients cannot be made again: repeat that step"
                    ) from error
            received, sent = dispatcher.finish(plan.flight), plan.flight.sent
            # Ignore answers of replicas that died since.
            answers = [(sent[i], a) for i, a in enumerate(received) if i in sent and sent[i].lives]
            done = [one for one, a in answers if a.failure is None and not a.lacking]
            failed = [(one, a.failure, a.lacking) for one, a in answers if a.failure is not None]
            failed = [one for one in failed if not one[1].name.endswith("Abandoned")]
            # An exception of all that could read the step: what they did is the step.
            done = done or [one for one, _, lacking in failed if not lacking]
            if len(done) < len(received):
                dispatcher.close_groups()
            if done or failed:
                break
        else:
            weights.coming = None
            text = "replicas died, or did not find each other. It seems that the step ends"
            raise ReplicaDied(f"{_MOST_TRIES} times in a row {text} its process")
        if not done or plan.step.norm is not None:
            weights.coming = None
        else:
            told = weights.optimizers[plan.step.optimizer].told
            for known, news in zip(told, plan.step.values, strict=True):
                known.update(news)
            self.gradients.forget_recipes()
            for one in done:
                weights.version_at[one.slot] = one.life, weights.steps + 1, weights.recalls
            # Ctrl-C may come at each call: the step counts last, when all else knows it.
            weights.steps, weights.coming = weights.steps + 1, None
            for slot in plan.flight.on:
                weights.supply(slot)  # at once, while somebody has the step
        for one, failure, _ in failed:
            exceptions.reraise(failure, str(one.slot))
        return next(a.rows[0] for _, a in answers if a.failure is None)


class Trainable(Master):
    """A module in the driver, which replicas may train."""

    resident: Resident | None

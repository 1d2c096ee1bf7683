"""The driver's side of an optimizer that runs in the replicas.

[Note: the record]
What changes the weights is entered in a record, and each replica makes the entries in order, once:
a start (the optimizer, its state and the weights at one moment), and then steps. An entry rides
with the next call to a replica, so it costs no trip. The record keeps an entry until all replicas
have said that they made it. A replica that has none of it, because it is new or its process died,
takes over from another one (`training_entries`), or begins with a start that the driver has: it
fetches weights and state from another replica first. So replicas that have made the same entries
hold the same bits, however they came by them.

[Note: the master copy]
It is as of the last `Training.sync`, which one replica answers. For the tracker these contents are
the optimizer's own: replicas are not sent them again, and a graph that is made again after a death
is not refused because of them. Any other change of a trained parameter in the driver is an edit:
after a sync it makes a new start, with steps since the sync it is refused, because one of the two
would be lost.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.remote_gradients import (
    GradientSum,
    RemoteGradient,
    Term,
    lies_remote,
    local,
    ordinarily,
)
from raydp_parallel.calls.training_entries import (
    Handover,
    PackedEntry,
    Record,
    arrived,
    left_behind,
    packed,
    passing,
    shares,
)
from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.replica_slots import RemoteGraph, ReplicaSlot
from raydp_parallel.errors import ExecutorClosed, StateChanged, StateLost
from raydp_parallel.replica import exceptions
from raydp_parallel.state.optimizer_state import (
    look_state,
    pack_state,
    put_state,
    take_stepped,
)
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec, handshake
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.message_bytes import pack, unseal
from raydp_parallel.transport.messages import (
    Forget,
    GradientNorm,
    GradientTerms,
    LeaveSnapshot,
    Reply,
    TrainingClip,
    TrainingNews,
    TrainingRequest,
    TrainingSnapshot,
    TrainingStart,
    TrainingStep,
    Wanted,
)

log = logging.getLogger("raydp_parallel")

_MOST_KEPT = 4
"""Entries that the record keeps for replicas that no call reaches, before it is sent to them by
itself.
"""

trainings: weakref.WeakSet[Training] = weakref.WeakSet()


class _Sent(NamedTuple):
    """A request that was sent to a replica, for its optimizer.

    Attributes:
        slot: The slot.
        name: What the model is called there.
        incarnation: Which of the slot's replicas it is.
        pending: The call.
        forget: What was released with it.
        steps: The steps that the replica has made when it answers.
        told: The options that it has been told then.
    """

    slot: ReplicaSlot
    name: int
    incarnation: int
    pending: Any
    forget: Forget | None
    steps: int
    told: tuple[dict[str, Any], ...]


class Training:
    """An optimizer that runs in the replicas of one model.

    Args:
        executor: The executor of the replicas.
        tracker: The model.
        optimizer: The same optimizer over the master's parameters: its groups are the user's, its
            state is as of the last sync.
        keywords: What it was made with, besides the parameters.

    Attributes:
        record: What the replicas make.
        steps: How many steps there were.
        optimizer: See above.
        tracker: See above.
        handle: Gives what the program has of it; None once it has let go of that.
    """

    def __init__(
        self,
        executor: Executor,
        tracker: ModuleTracker,
        optimizer: torch.optim.Optimizer,
        keywords: dict[str, Any],
    ) -> None:
        self._executor = executor
        self.tracker = tracker
        self.optimizer = optimizer
        self._keywords = keywords
        self.handle: Callable[[], Any] = lambda: None
        self.record = Record()
        self.steps = self._synced = 0
        self._seen: tuple[Any, list[Any]] = None, []
        self._coming: _Sent | None = None
        self._handed: dict[tuple[ReplicaSlot, int], Handover] = {}
        self._given: dict[tuple[ReplicaSlot, int], Handover] = {}
        with self._replica_set.lock:
            tracker.sync()
            self._own()
            try:
                self._pack_start()  # an optimizer that cannot be sent is an error now
                self.record.start = None
            except BaseException:
                tracker.own({})
                raise
            tracker.training = self
        trainings.add(self)

    def _own(self) -> None:
        """Take over the optimizer's parameters, which must be the module's."""
        parameters = self.parameters()
        slots = self.tracker.slots_of(parameters)
        if None in slots:
            at = slots.index(None)
            raise ValueError(
                f"optimizer: parameter {at} of shape {tuple(parameters[at].shape)} is not a plain "
                f"parameter of this {type(self.tracker.module).__name__}: give parameters of the "
                "wrapped module, or leave params out to train all of them"
            )
        owned = {slot: p for slot, p in zip(slots, parameters, strict=True) if slot is not None}
        self._release_models()
        self.tracker.own(owned)
        self._rebase()

    def _release_models(self) -> None:
        """Let the replicas drop the model, so that they take it anew."""
        for slot in [*self._replica_set.slots.values()]:
            slot.contents.drop_model(self.tracker.id)

    def parameters(self) -> list[Tensor]:
        """The parameters that it trains, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def _replica_set(self) -> ReplicaSet:
        return self._executor.replica_set

    @property
    def ended(self) -> bool:
        """Whether it trains no more: the model was given back, or its executor was closed."""
        known = self._executor.known(self.tracker.module)
        over = self._executor.closed or known is not self.tracker
        return over or self.tracker.training is not self

    @property
    def trains(self) -> bool:
        """Whether the model was not given back."""
        return self.tracker.training is self

    @property
    def behind(self) -> int:
        """How many steps the master is behind."""
        return self.steps - self._synced

    @property
    def size(self) -> int:
        """The bytes of the weights and of the optimizer's state: most have two numbers for each."""
        return 3 * sum([parameter.nbytes for parameter in self.parameters()])

    def check(self) -> None:
        """Look for edits of trained parameters in the driver.

        Raises:
            StateChanged: One was edited while the master was behind, or has left the module.
        """
        with self._replica_set.lock:  # other threads' calls read the record
            self._check()

    def _check(self) -> None:
        self._mend()
        seen = self.tracker.look_owned()
        if seen is None:
            raise StateChanged(
                "a parameter that model.optimizer() trains is no longer in the module: make a new "
                "optimizer for the module as it is now, after close() of this one"
            )
        same = seen == self._seen[0] and not self.tracker.owned.edited
        if same and look_state(self.optimizer) == self._seen[1]:
            return
        if self.behind:
            what = "the optimizer's state" if same else self._edited(seen)
            raise self._changed(what)
        self._rebase()

    def _changed(self, what: str) -> StateChanged:
        return StateChanged(
            f"{what} was changed in this process, where the weights are "
            f"{self.behind} steps behind those of the replicas. Call model.sync() before "
            "weights are changed; if you call it now, the change is overwritten"
        )

    def _edited(self, seen: Sequence[tuple[int, int]]) -> str:
        """The name of a parameter that is not as it was seen last."""
        pairs = zip(self.tracker.owned.tensors.values(), seen, self._seen[0], strict=True)
        edited = next((tensor for tensor, now, then in pairs if now != then), None)
        named = self.tracker.module.named_parameters()
        return next((f"parameter {name!r}" for name, p in named if p is edited), "a parameter")

    def _rebase(self) -> None:
        """Begin the record anew with what the master has: all replicas need a start."""
        self._make_clips()
        self.record.begin_anew(self.optimizer.param_groups)
        self._look()

    def _look(self) -> None:
        """Note what the master and the optimizer have, to find what is edited from now on."""
        self._seen = self.tracker.look_owned(), look_state(self.optimizer)
        self.tracker.owned.edited = False

    def rebase(self) -> None:
        """Let all replicas begin with what the master and the optimizer have now."""
        with self._replica_set.lock:
            self._rebase()

    def widen(self) -> None:
        """Take over parameters that the optimizer was given since."""
        with self._replica_set.lock:
            self.tracker.sync()
            self._make_clips()
            self._own()

    def news(
        self, slot: ReplicaSlot, name: int, attachments: Attachments, together: bool = False
    ) -> TrainingNews | None:
        """The entries that a slot's replica lacks. The caller holds the executor's lock.

        Args:
            slot: The slot.
            name: What the model is called there.
            attachments: Where the contents go.
            together: Whether replicas that were sent their chunks may wait for this one.
        """
        held = slot.contents.sent_training.get(name) or slot.contents.trained.get(name, 0)
        if held == self.record.number:
            return None
        if self.record.follows(slot, held):
            slot.contents.sent_training[name] = self.record.number
            return self.record.news(held, attachments)
        handed = self._handed.pop((slot, name), None)
        if handed is None and not together:
            handed = self._hand_over_now(slot, name)
        if handed is not None and handed.incarnation == slot.incarnation:
            self.record.skipped(slot)
            if self.record.follows(slot, handed.number):
                slot.contents.sent_training[name] = self.record.number
                later = self.record.news(handed.number, attachments).entries
                self._given[slot, name] = handed
                return TrainingNews((handed.placed(attachments), *later), anew=True)
            handed.drop()
        self._bring_back()
        self.record.skipped(slot)
        slot.contents.sent_training[name] = self.record.number
        return TrainingNews((self._pack_start().placed(attachments),), anew=True)

    def bring_along(self, slots: Sequence[ReplicaSlot], together: bool) -> None:
        """Let replicas that begin in the next call take over from others, or bring the master up to
        date for them, while none of the others has begun.

        Args:
            slots: The slots of the call.
            together: Whether replicas wait for each other in it.
        """
        if not self.trains:
            return
        own, last = self.tracker.id, self.record.number
        if not self._handed and {slot.contents.trained.get(own) for slot in slots} == {last}:
            return  # all have made all of it, as in most calls between two steps
        with self._replica_set.lock:
            left = [self._handed.pop(key) for key in [*self._handed]]
            for one in left:
                one.drop()
            ready = [slot for slot in dict.fromkeys(slots) if slot.ready]
            new = [s for s in ready if not self.record.follows(s, s.contents.trained.get(own, 0))]
        absent = together and len(ready) < len({*slots})
        if (new or absent) and (not self._hand_over(new) or absent) and self.behind:
            self.bring_up_to_date()

    def _hand_over(self, new: Sequence[ReplicaSlot]) -> bool:
        """Let the replicas in some slots have what they begin with; returns whether they do. Not
        under the lock: it may make a group.
        """
        with self._replica_set.lock:
            holders = self._holders()
            if not holders or self._has_failed(*holders[0]):
                return False
            giver, name = holders[0]
            near = [slot for slot in new if shares(slot) and shares(giver)]
            if near and not self._leave(giver, name, [(slot, self.tracker.id) for slot in near]):
                return False
        far = [slot for slot in new if slot not in near]
        return not far or self._pass_on(giver, name, far)

    def _hand_over_now(self, slot: ReplicaSlot, name: int) -> Handover | None:
        """What a replica begins with in the midst of a call; None if that has to come from the
        driver.
        """
        holders = [one for one in self._holders() if not self._has_failed(*one)]
        own = [one for one in holders if one[0] is slot]
        near = [one for one in holders if shares(one[0]) and shares(slot)]
        if own and not near:
            self._keep(*own[0], name)
        elif near:
            self._leave(*near[0], [(slot, name)])
        return self._handed.pop((slot, name), None)

    def _leave(
        self, giver: ReplicaSlot, name: int, takers: Sequence[tuple[ReplicaSlot, int]]
    ) -> bool:
        """Let a replica leave what it has where others of this machine read it."""
        answer = self._ask(giver, name, LeaveSnapshot(None))
        left = None if answer is None else left_behind(*answer)
        if answer is None or left is None:
            return False
        for slot, taker in takers:
            self._hand(slot, taker, answer[0].training, left[0])
            self._handed[slot, taker] = self._handed[slot, taker]._replace(packet=left[1])
        return True

    def _keep(self, giver: ReplicaSlot, name: int, taker: int) -> None:
        """Let a replica keep what it has, for another copy of the model there."""
        key = RemoteGraph().key
        answer = self._ask(giver, name, LeaveSnapshot(key))
        if answer is not None and answer[0].value is not None:
            reply = answer[0]
            kept = key if reply.passed else None
            self._hand(giver, taker, reply.training, reply.value, kept)

    def _hand(
        self, slot: ReplicaSlot, name: int, number: int, snapshot: Any, key: int | None = None
    ) -> None:
        """Note what a replica begins with."""
        slots = iter(self.tracker.owned.tensors)
        start = TrainingStart(
            kind=type(self.optimizer),
            keywords=self._keywords,
            options=(),
            slots=tuple(
                [tuple([next(slots) for _ in g["params"]]) for g in self.optimizer.param_groups]
            ),
            weights=(),
            state=(),
            common={},
        )
        entry = packed(number, start, "optimizer", self._replica_set.backend.link)
        self._handed[slot, name] = Handover(
            slot=slot,
            incarnation=slot.incarnation,
            number=number,
            start=entry,
            snapshot=snapshot,
            packet=None,
            key=key,
        )

    def _pass_on(self, giver: ReplicaSlot, name: int, takers: Sequence[ReplicaSlot]) -> bool:
        """Let a replica pass on what it has to others, in a group."""
        groups, members = self._executor.groups, [giver, *takers]
        # On one node, too: it is another one than the driver's.
        if not groups.can_be(members) or not handshake.far_lines():
            return False
        ticket = groups.find(members, self.size, always=True)
        if ticket is None:
            return False
        backend, own = self._replica_set.backend, self.tracker.id
        with self._replica_set.lock:
            key, incarnation = RemoteGraph().key, giver.incarnation
            kept = self._ask(giver, name, LeaveSnapshot(key))
            if kept is None or kept[0].value is None:
                return False
            there = [True] * len(takers)
            if kept[0].passed:
                wanted = passing(groups, ticket, giver, key, kept[0].passed)
                sent: list[_Sent] = []
                found: dict[int, Any] = {}

                def take(number: int, answer: Any) -> None:
                    known = answer if isinstance(answer, Death) else unseal(answer, backend.link)
                    found[number] = known
                    if not all(arrived([known])):
                        groups.dissolve(ticket)  # the others wait no more

                try:
                    for slot, model in ((giver, name), *((slot, own) for slot in takers)):
                        sent.append(self._send(slot, model, wanted, follows=False))
                    backend.collect([one.pending for one in sent], take)
                except BaseException:
                    groups.dissolve(ticket)
                    for one in sent:
                        self._give_up(one)
                    raise
                there = arrived([found[number] for number in range(len(sent))])[1:]
                for number, one in enumerate(sent):
                    self._understood(one, found[number])
                giver.drop_graph(key, incarnation)
            for slot, arrives in zip(takers, there, strict=True):
                if arrives:
                    kept_under = key if kept[0].passed else None
                    self._hand(slot, own, kept[0].training, kept[0].value, kept_under)
            return all(there)

    def _bring_back(self) -> None:
        """Bring the master up to date in the middle of a call."""
        if self.behind:
            self.bring_up_to_date()
            self.tracker.sync()

    def _pack_start(self) -> PackedEntry:
        """The start of a replica that has nothing, with what the master has."""
        record = self.record
        if record.start is None or record.start.number != record.number:
            groups = self.optimizer.param_groups
            slots = iter(self.tracker.owned.tensors)
            state, common = pack_state(self.optimizer)
            start = TrainingStart(
                kind=type(self.optimizer),
                keywords=self._keywords,
                options=record.options,  # a change since is part of the next step
                slots=tuple([tuple([next(slots) for _ in group["params"]]) for group in groups]),
                weights=tuple([p.detach() for p in self.parameters()]),
                state=state,
                common=common,
            )
            link = self._replica_set.backend.link
            record.start = packed(record.number, start, "optimizer", link)
        return record.start

    def _known(self) -> list[tuple[ReplicaSlot, int]]:
        """The replicas that have the optimizer, with the model's number there."""
        return [
            (slot, name)
            for slot in self._replica_set.ready()
            for name in slot.contents.names_of(self.tracker.id)
        ]

    def _holders(self) -> list[tuple[ReplicaSlot, int]]:
        """The replicas that can follow the record: first those that have not failed to make an
        entry, then those that have made most, then those on this machine.
        """
        found = [
            one
            for one in self._known()
            if self.record.follows(one[0], one[0].contents.trained[one[1]])
        ]

        def order(one: tuple[ReplicaSlot, int]) -> tuple[Any, ...]:
            slot, name = one
            far = not getattr(slot.client, "near", False)
            return self._has_failed(slot, name), -slot.contents.trained[name], far, slot.index

        return sorted(found, key=order)

    def _has_failed(self, slot: ReplicaSlot, name: int) -> bool:
        return slot.contents.failed_training.get(name, 0) > self.record.begun

    def _mend(self) -> None:
        """After a step that failed, as an exception has told: let all replicas begin with what one
        of them has, for they may have come more or less far in it.
        """
        if any(self._has_failed(*one) for one in self._known()):
            self.bring_up_to_date()
            self._rebase()

    def step(self) -> None:
        """Enter a step with the gradients and the options of now."""
        self._check_open()
        # Not under the lock: whatever else fetches a gradient holds that one's lock first.
        brought = [p.grad if lies_remote(p.grad) else _local(p.grad) for p in self.parameters()]
        with self._replica_set.lock, ordinarily():
            self._check_groups()
            self.check()
            if self._coming is not None:
                self._check_edits()
                self._take_coming()
            if not self._holders():
                if self.behind:
                    raise self._lost()
                # No replica has the weights: the step is made here.
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        parameter.grad = local(parameter.grad)
                device = self.parameters()[0].device
                with devices.drawing_from(device, self._seed()), torch.enable_grad():
                    self.optimizer.step()
                self.steps += 1
                self._synced = self.steps
                self._rebase()
                return
            if len(self.record) >= _MOST_KEPT:
                self._flush()
            found = brought
            sums = _sums(found)
            if not self._having(sums) and all(one.shared is not None for one in sums):
                # Those that were to add them up have died, but the driver can read them, too.
                found = [_local(grad) for grad in found]
            grads = tuple([_given(grad) for grad in found])
            step = TrainingStep(
                options=self.record.changed(self.optimizer.param_groups),
                grads=grads,
                threads=torch.get_num_threads(),
                seed=self._seed(),
                number=self.steps + 1,
            )
            self._enter(step, _sums(found))
            self.steps += 1
            self._executor.note_behind(self, True)

    def _seed(self) -> int:
        """What the next step draws from: the same wherever it is made. Not drawn itself: the
        driver's own random numbers stay what they are.
        """
        return (torch.initial_seed() + self.steps) % 2**63

    def _check_groups(self) -> None:
        groups, owned = self.optimizer.param_groups, [*self.tracker.owned.tensors.values()]
        now = self.parameters()
        same = len(now) == len(owned) and all(p is q for p, q in zip(now, owned, strict=True))
        if not same or len(groups) != len(self.record.options):
            raise ValueError(
                "step: the parameters in param_groups are no longer those that the replicas train; "
                "groups may be added with add_param_group(), for all else close() this optimizer "
                "and make another with model.optimizer()"
            )

    def _make_clips(self) -> None:
        """Let replicas clip what they were told to: the gradients outlast the record."""
        if self.record.makes():
            self._flush()

    def _enter(
        self, value: Any, sums: Sequence[GradientSum], makes: GradientSum | None = None
    ) -> None:
        """Enter something into the record that needs gradients which replicas keep."""
        if not self._having(sums):
            raise _gone()
        self.record.enter(value, self._replica_set.backend.link, sums, makes)
        self.trim()

    def keeps(self, slots: Sequence[ReplicaSlot], leaves: Sequence[Tensor]) -> bool:
        """Whether a backward's gradients of some leaves, summed among the replicas of some slots,
        may stay there: all are trained, and no other replica has the weights.
        """
        holders = self._holders()
        at_home = all(name == self.tracker.id for _, name in holders)
        trained = {id(p) for p in self.tracker.owned.tensors.values()}
        return (
            at_home
            and {slot for slot, _ in holders} == {*slots}
            and trained.issuperset(map(id, leaves))
        )

    def reads(self) -> bool:
        """Whether all replicas that have the weights can read what others of them left in memory,
        and compute on the CPU as the master's does.
        """
        readers = self.readers()
        on_cpu = all(slot.hello is not None and slot.hello.device == "cpu" for slot in readers)
        shares = all(getattr(slot.client, "shares", False) for slot in readers)
        return bool(readers) and on_cpu and shares and self.parameters()[0].device.type == "cpu"

    def readers(self) -> list[ReplicaSlot]:
        """The slots of the replicas that have the weights."""
        with self._replica_set.lock:
            return [slot for slot, _ in self._holders()]

    def fetch(self, sums: GradientSum) -> Sequence[Tensor]:
        """Gradients that replicas keep."""
        with self._replica_set.lock:
            while slots := sums.slots():
                # The record may have begun anew since; that is no matter of these gradients.
                sent = self._send(slots[0], self.tracker.id, sums.key, follows=False)
                answer = self._receive(sent)
                if answer is not None and answer[0].value is not None:
                    return codec.unpack(answer[0].value, answer[1], self.parameters()[0].device)
        raise _gone()

    def norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients together, which lie in the replicas."""
        found = [p.grad for p in self.parameters()]
        asked = GradientNorm(_terms(found), float(norm_type), torch.get_num_threads())
        with self._replica_set.lock:
            while there := self._having(_sums(found)):
                self.record.enter_sums(_sums(found))
                answer = self._ask(*there[0], wanted=asked)
                if answer is not None and answer[0].value is not None:
                    device = self.parameters()[0].device
                    return codec.unpack(answer[0].value, answer[1], device)[0]
        raise _gone()

    def _having(self, sums: Sequence[GradientSum]) -> list[tuple[ReplicaSlot, int]]:
        """The replicas that can follow the record, and have some gradients."""
        return [one for one in self._holders() if all(one_sum.on(one[0]) for one_sum in sums)]

    def lie_remote(self) -> bool:
        """Whether all gradients lie in the replicas, and there are some, and no edit of weights has
        let the record begin anew.
        """
        self.check()
        found = [p.grad for p in self.parameters() if p.grad is not None]
        sums = _sums(found)
        return bool(sums and all(map(lies_remote, found)) and self._having(sums))

    def clip(
        self, max_norm: float | None = None, norm: Tensor | None = None, value: float | None = None
    ) -> None:
        """Clip all gradients, which lie in the replicas, by their norm or by value."""
        with self._replica_set.lock:
            self.check()
            found = [p.grad for p in self.parameters()]
            sums, key = _sums(found), RemoteGraph().key
            clip = TrainingClip(_terms(found), key, max_norm, norm, value)
            clipped = GradientSum(key, [slot for slot, _ in self._having(sums)], self.fetch)
            self._enter(clip, sums, clipped)
            for row, grad in enumerate(found):
                if isinstance(grad, RemoteGradient):
                    grad.state.become((Term(clipped, row),), zeros=False)

    def trim(self) -> None:
        """Let go of entries that all replicas have made."""
        with self._replica_set.lock:
            made = [slot.contents.trained[name] for slot, name in self._holders()]
            self.record.trim(min(made, default=0))
            for slot, name in [*self._given]:
                if self._given[slot, name].is_made(name):
                    del self._given[slot, name]

    def _flush(self) -> None:
        """Send the record to all replicas that can follow it."""
        for slot, name in self._holders():
            if slot.contents.trained[name] < self.record.number:
                self._ask(slot, name, wanted=None)
        self.trim()

    def _ask(
        self, slot: ReplicaSlot, name: int, wanted: Wanted
    ) -> tuple[Reply, Attachments] | None:
        """A replica's answer to a request of its own; None if it died, or if what it failed to make
        is known.
        """
        return self._receive(self._send(slot, name, wanted))

    def _send(
        self,
        slot: ReplicaSlot,
        name: int,
        wanted: Wanted,
        follows: bool = True,
    ) -> _Sent:
        """Send a request, with what the replica lacks of the record unless it ``follows`` not."""
        backend = self._replica_set.backend
        attachments = Attachments(backend.link_to(slot.client))
        incarnation, forget = slot.incarnation, slot.contents.forget()
        try:
            news = self.news(slot, name, attachments) if follows else None
            left = isinstance(wanted, LeaveSnapshot)  # others may have another device
            request = TrainingRequest(name, news, wanted, forget, by_host=left)
            pending = backend.submit(slot.client, "train", pack(request), attachments.beside)
        except BaseException:
            slot.contents.forget_again(forget)
            slot.contents.sent_training.pop(name, None)
            raise
        slot.tally.bytes_in += attachments.size
        told = copy.deepcopy(self.record.options)
        return _Sent(
            slot=slot,
            name=name,
            incarnation=incarnation,
            pending=pending,
            forget=forget,
            steps=self.steps,
            told=told,
        )

    def _receive(self, sent: _Sent) -> tuple[Reply, Attachments] | None:
        """The answer to a request, as in `_ask`."""
        backend = self._replica_set.backend
        try:
            (answer,) = backend.collect([sent.pending])
        except BaseException:
            self._give_up(sent)
            raise
        known = answer if isinstance(answer, Death) else unseal(answer, backend.link)
        return self._understood(sent, known)

    def _understood(
        self, sent: _Sent, answer: tuple[Reply, Attachments] | Death
    ) -> tuple[Reply, Attachments] | None:
        """An answer, once it is noted what it says."""
        slot, name = sent.slot, sent.name
        if isinstance(answer, Death):
            self._replica_set.mark_dead(slot, sent.incarnation, "train", answer)
            return None
        reply, found = answer
        failed = reply.failure.entry if reply.failure is not None else 0
        known = [s.contents.failed_training.get(n, 0) for s, n in self._known()]
        raised_before = 0 < failed <= max(known, default=0)
        if slot.incarnation == sent.incarnation:
            slot.tally.bytes_out += reply.size
            slot.contents.has_trained(name, reply.training, failed)
        exceptions.warn_again(reply.warnings)
        if reply.failure is not None:
            if raised_before:
                return None
            exceptions.reraise(reply.failure, str(slot))
        return reply, found

    def _give_up(self, sent: _Sent) -> None:
        """Wait no more for the answer to a request."""
        sent.pending.give_up()
        if sent.slot.incarnation == sent.incarnation:
            sent.slot.contents.forget_again(sent.forget)
            sent.slot.contents.sent_training.pop(sent.name, None)

    def sync(self) -> None:
        """Bring the master's weights and the optimizer's state up to date with the replicas.

        Raises:
            StateLost: No replica has them any more.
        """
        if not self.behind:
            return
        with self._replica_set.lock, ordinarily():
            if self.ended:
                raise self._lost_for_good()
            while self.behind:
                if self._coming is None:
                    self._begin_to_fetch()
                elif self._coming.steps < self.steps and self._holders():
                    self._give_up(self._coming)
                    self._coming = None
                    continue
                self._take_coming()
            if any(self._has_failed(*one) for one in self._known()):
                self._rebase()  # they may have come more or less far in it

    def sync_soon(self, most: int) -> None:
        """If the master is ``most`` steps behind, ask a replica for what it lacks. The next step
        takes the answer, which has arrived before that of any later call.
        """
        with self._replica_set.lock:
            if self.behind >= most and self._coming is None:
                self._begin_to_fetch()

    def _begin_to_fetch(self) -> None:
        holders = self._holders()
        if not holders:
            raise self._lost()
        self._coming = self._send(*holders[0], wanted="snapshot")

    def _take_coming(self) -> None:
        """Take what was fetched for the master, if anything was, and if it arrives."""
        coming, self._coming = self._coming, None
        answer = None if coming is None else self._receive(coming)
        if coming is not None and answer is not None and answer[0].value is not None:
            self._take(coming, *answer)

    def bring_up_to_date(self) -> None:
        """`sync`, where something reads the weights or the state: edits are not overwritten.

        Raises:
            StateChanged: A trained parameter was edited while the master was behind.
            StateLost: As in `sync`.
        """
        if self.behind:
            with self._replica_set.lock:
                if not self.ended:
                    self._check_edits()
                self.sync()

    def _check_edits(self) -> None:
        """Look for edits that a sync would overwrite, their contents, too."""
        seen = self.tracker.look_owned()
        if seen is None or not self.behind:
            return
        if seen == self._seen[0] and not self.tracker.owned.edited:
            self.tracker.sync()
            self.tracker.verify()
        if seen != self._seen[0] or self.tracker.owned.edited:
            raise self._changed(self._edited(seen))

    def _warn_of_edits(self) -> None:
        try:
            self._check_edits()
        except StateChanged as error:
            log.warning("the replicas end, so the change is overwritten: %s", error)

    def _take(self, sent: _Sent, reply: Reply, attachments: Attachments) -> None:
        """Take what a replica has made into the master."""
        assert reply.value is not None
        found, _ = codec.decode(reply.value, attachments, self.parameters()[0].device)
        snapshot: TrainingSnapshot = found
        self.tracker.take_owned(snapshot.weights)
        put_state(self.optimizer, snapshot.state, snapshot.common)
        groups = self.optimizer.param_groups, self.record.options, sent.told, snapshot.options
        for one in zip(*groups, strict=True):
            take_stepped(*one)
        self._synced = sent.steps
        if not self.behind:
            self._executor.note_behind(self, False)
        self._look()

    def _lost(self) -> StateLost:
        """The error that the last steps are lost; training is as of the last sync from then on."""
        last = self.steps
        self._forget_lost()
        self._rebase()
        return StateLost(
            f"the last replica that had made step {last} is gone: weights and optimizer are as of "
            f"the last sync, after step {self.steps}, and training goes on from there if you go "
            "on. model.optimizer(..., sync_every=N) bounds the steps that can be lost"
        )

    def _lost_for_good(self) -> StateLost:
        """The error that the replicas have ended before their last steps were fetched. The module
        is the program's alone from then on.
        """
        last = self.steps
        self._forget_lost()
        self.tracker.training = None
        self.tracker.own({})
        return StateLost(
            f"the replicas that had made step {last} have ended: weights and "
            f"optimizer are as of the last sync, after step {self.steps}. Make another optimizer "
            "with model.optimizer(), and load the state_dict() of this one, to go on from there"
        )

    def _forget_lost(self) -> None:
        self.steps, self._coming = self._synced, None
        self._executor.note_behind(self, False)

    def _check_open(self) -> None:
        if self.ended:
            raise ExecutorClosed(
                "this optimizer trains no more: it was closed, or its executor was, or another "
                "cluster was connected; make another with model.optimizer()"
            )

    def close(self) -> None:
        """Give the model back: the master gets all steps, and is what is trained from then on."""
        if self.ended:
            return
        self._check_edits()
        try:
            with self._replica_set.lock:
                self._make_clips()
            self.sync()
        finally:
            self.tracker.training = None
            self._executor.note_behind(self, False)
            with self._replica_set.lock:
                self._release_models()
                self.tracker.own({})

    def end(self) -> None:
        """Bring the master up to date because the replicas are about to end; a failure is logged,
        and raised where the weights are asked for next. Steps cannot be had later, so edits in the
        driver are overwritten.
        """
        try:
            self._rescue()
        finally:
            if not self.behind:
                self.tracker.training = None

    def bring_to_safety(self, going: Sequence[ReplicaSlot]) -> None:
        """`end`, if the replicas that are about to end are the last ones that have all steps, while
        others stay.
        """
        if self.behind and not self.ended and {slot for slot, _ in self._holders()} <= {*going}:
            self._rescue()

    def _rescue(self) -> None:
        steps = self.steps
        try:
            self._warn_of_edits()
            self.sync()
        except Exception as error:
            self.steps = steps
            log.error("replicas end, and the last steps are lost with them: %s", error)


def _sums(grads: Sequence[Tensor | None]) -> list[GradientSum]:
    """The backwards with sums that make up some gradients, where these lie in replicas."""
    found: dict[int, GradientSum] = {}
    for grad in grads:
        if isinstance(grad, RemoteGradient) and lies_remote(grad):
            sums = [one.sums for one in grad.state.terms if isinstance(one.sums, GradientSum)]
            found.update((id(one), one) for one in sums)
    return [*found.values()]


def _terms(grads: Sequence[Tensor | None]) -> tuple[GradientTerms | None, ...]:
    """What a message says of gradients that lie in the replicas, by parameter."""
    return tuple([g.state.message() if isinstance(g, RemoteGradient) else None for g in grads])


def _local(grad: Tensor | None) -> Tensor | None:
    """A gradient in memory of this process, if there is one."""
    return None if grad is None else local(grad)


def _given(grad: Tensor | None) -> Tensor | GradientTerms | None:
    """What a step says of a gradient."""
    if isinstance(grad, RemoteGradient) and lies_remote(grad):
        return grad.state.message()
    found = _local(grad)
    return None if found is None else found.detach()


def _gone() -> StateLost:
    return StateLost(
        "the gradients lay in replicas that have died since: set them to zero, and run forward and "
        "backward again. Weights and optimizer are not affected"
    )


def trained(parameters: Sequence[Tensor]) -> list[Training]:
    """What trains some of these in replicas already."""
    ids = {id(p) for p in parameters}
    living = [one for one in [*trainings] if not one.ended]
    return [one for one in living if not ids.isdisjoint(map(id, one.parameters()))]


def bring_up_to_date(
    module: nn.Module, but: Training | None = None, overwrite: bool = False
) -> None:
    """Bring parameters of a module up to date that are trained under any wrapper, such as that of a
    part of it, or by another executor's replicas.

    Args:
        module: The module.
        but: What trains them in the replicas that are about to be asked.
        overwrite: Whether edits in the driver are overwritten.
    """
    others = [one for one in [*trainings] if one is not but and one.behind and one.trains]
    if others:
        ids = {id(p) for p in module.parameters()}
        for one in others:
            if not ids.isdisjoint(map(id, one.parameters())):
                if overwrite:
                    one.sync()
                else:
                    one.bring_up_to_date()

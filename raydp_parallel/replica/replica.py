"""One replica: models by id, graphs by key. Plain Python; the actor is a thin client around it.

forward:  undo the last forward's traces, adopt what changed, run the chunk, keep its graph,
          report what was written
backward: differentiate a kept graph with respect to the leaves that are asked for
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from raydp_parallel import batch, devices
from raydp_parallel.devices import ambient_state, process
from raydp_parallel.devices.ranges import Attachment, MemoryRange, in_bytes
from raydp_parallel.errors import GraphLost, StateChanged, TransferError
from raydp_parallel.monitoring.accounts import IN_REPLICA, OpenSpan, unseen
from raydp_parallel.replica import (
    autograd_engine,
    exceptions,
    gradient_stream,
    kept_gradients,
    sync_batch_norm,
)
from raydp_parallel.replica.autograd_engine import KeptGraphs
from raydp_parallel.replica.replica_training import ReplicaTraining
from raydp_parallel.replica.sample_rng import RowRandom
from raydp_parallel.state import module_sources
from raydp_parallel.state.hidden_attributes import shown_as_set
from raydp_parallel.state.module_parts import LostChanges, ModuleParts, PartKey, VainChange
from raydp_parallel.state.python_state import Held
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.state.shared_objects import ObjectsBefore, SharedObjects
from raydp_parallel.state.versions import Accessed, RawAccess, bump
from raydp_parallel.state.write_record import Contents, lasts
from raydp_parallel.transport import codec, collective
from raydp_parallel.transport.group_messages import Reduced, SumOutcome
from raydp_parallel.transport.links import INLINE_LIMIT, Attachments, InlineLink
from raydp_parallel.transport.messages import (
    Arguments,
    BackwardRequest,
    Called,
    Forget,
    ForwardRequest,
    LeaveSnapshot,
    OutputGraph,
    Parcel,
    PassSnapshot,
    Produced,
    Reply,
    TrainingNews,
    TrainingRequest,
    WriteBack,
)

_NO_CAPTURES: contextlib.nullcontext[Any] = contextlib.nullcontext({})
_NO_SUMS: contextlib.nullcontext[dict[int, Tensor]] = contextlib.nullcontext({})
_AS_IT_IS = contextlib.nullcontext()


class Laps:
    """The stopwatch of one call.

    Args:
        names: Its phases, in order.
        span: Opens a span for each.
    """

    def __init__(self, names: tuple[str, ...], span: OpenSpan = unseen) -> None:
        self._names = names
        self._span = span
        self._open: contextlib.AbstractContextManager[Any] | None = None
        self._stamps: list[float] = []

    def begin(self, number: int) -> None:
        """Begin the phase with this number, and end the one before."""
        if len(self._stamps) == number:
            self._stamps.append(time.perf_counter())
            if self._span is not unseen:
                self._close()
                self._open = self._span(self._names[number])
                if self._open is not None:
                    self._open.__enter__()

    def end(self) -> tuple[float, ...]:
        """When each phase began, and when the last ended. Phases that an exception skipped took no
        time.
        """
        now = time.perf_counter()
        self._close()
        return (*self._stamps, *[now] * (len(self._names) + 1 - len(self._stamps)))

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class KeptGraph(NamedTuple):
    """A graph that the driver may ask to differentiate.

    Attributes:
        outputs: The tensors that travelled to the driver.
        leaves: What gradients may be asked for, by the graph that brought them in. Of a forward:
            the model's leaves, then the inputs'. Of a derived graph: the gradients that came in,
            and all of the graphs it is derived from.
        partial: Whether there are leaves besides, which are not asked for.
        replica_module: The model that it came from.
        tensors: The model's tensors that it may have saved, by slot.
        lasts: Whether the master gets other memory, too, if one of the model's tensors is given
            some.
        held: The tensors that its module holds, which need not be the model's module any more.
        edits: How many of the module's attributes the driver had changed before its forward.
        samples: See `ForwardRequest`.
        parts: What its module consists of, if the driver gets what hooks change in backward.
    """

    outputs: Sequence[Tensor]
    leaves: Mapping[int, Sequence[Tensor]]
    partial: bool
    replica_module: ReplicaModule
    lasts: Callable[[Tensor], bool]
    tensors: Mapping[int, Tensor]
    held: Held
    edits: int
    samples: tuple[int, int] | None = None
    parts: ModuleParts | None = None


@dataclass
class _Beside:
    """What a backward answers beside the gradients of leaves.

    Attributes:
        reduced: The result of summing gradients among replicas.
        noted: The parcel of gradients of outputs.
    """

    reduced: Reduced | None = None
    noted: Parcel | None = None


class Replica:
    """What one device runs.

    Args:
        device: The device.

    Attributes:
        span: Opens a span for each phase of a call, where they are shown.
        check_process: Called when code of the module has ended: it may have forked, and then ended
            twice.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.span: OpenSpan = unseen
        self.check_process: Callable[[], object] = lambda: None
        self._laps = Laps(IN_REPLICA["forward"])
        self._memory = devices.MemoryLook(device)
        self._worked = None if devices.is_cpu(device) else devices.Stopwatch(device)
        self._models: dict[int, ReplicaModule] = {}
        self._graphs: KeptGraphs[KeptGraph] = KeptGraphs()
        self._kept: kept_gradients.Kept = {}
        self._trainings: dict[int, ReplicaTraining] = {}
        self._beside = _Beside()
        self.groups = collective.Groups(device=device)

    def forward(
        self, request: ForwardRequest, attachments: Attachments, back: Attachments
    ) -> Reply:
        """Run one chunk."""
        self.forget(request.forget)
        devices.use_threads(self.device, request.threads)
        self._laps = Laps(IN_REPLICA["forward"], self.span)
        passed = 0
        if request.relay is not None and request.update is not None:
            self._laps.begin(0)
            found = collective.pass_on(request.relay, request.update, attachments, self.groups)
            if found is None:
                return self._missed(request)
            request, passed = request._replace(update=found[0]), found[1]
        gathered: list[Parcel] = []
        answer = self._answer(
            request.where,
            back,
            lambda: self._together(request, attachments, back, gathered),
            request,
        )
        if gathered:
            answer = answer._replace(gathered=gathered[0])
        return answer._replace(passed=passed) if passed else answer

    def _missed(self, request: ForwardRequest) -> Reply:
        """Contents did not arrive that another replica was to pass on: nothing is done, and the
        driver sends again.
        """
        assert request.relay is not None
        for leg in request.relay.legs:
            self.groups.leave(leg.group)
        laps = self._laps.end()
        return Reply(seconds=laps[-1] - laps[0], laps=laps, missed=True)

    def backward(
        self, request: BackwardRequest, attachments: Attachments, back: Attachments
    ) -> Reply:
        """Differentiate one chunk's graph."""
        self.forget(request.forget)
        devices.use_threads(self.device, request.threads)
        self._laps = Laps(IN_REPLICA["backward"], self.span)
        return self._answer(None, back, lambda: self._backward(request, attachments, back), request)

    def forget(self, what: Forget | None) -> None:
        """Free graphs and models that the driver no longer needs."""
        if what is not None:
            for key in what.graphs:
                self._kept.pop(key, None)
            self._graphs.forget(what.graphs, what.models)
            gone = [self._models.pop(model, None) for model in what.models]
            for model in what.models:
                self._trainings.pop(model, None)
            if any(model is not None for model in gone):
                del gone
                devices.give_back_freed(self.device)

    def train(self, request: TrainingRequest, attachments: Attachments, back: Attachments) -> Reply:
        """Let a model's optimizer catch up, and answer what it has made, if that is asked for."""
        self.forget(request.forget)
        value, failure, missed, left = None, None, False, 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._catch_up(request.model, request.training, attachments)
                training = self._trainings.get(request.model)
                if isinstance(request.wanted, PassSnapshot):
                    missed = not collective.pass_kept(request.wanted, self._kept, self.groups)
                elif isinstance(request.wanted, LeaveSnapshot):
                    value, left = self._leave_snapshot(request.model, request.wanted.key, back)
                elif isinstance(request.wanted, int):
                    value = codec.encode(tuple(self._kept[request.wanted]), back, "gradients")[0]
                elif request.wanted is not None and training is not None:
                    value = codec.encode(training.answer(request.wanted), back, "state")[0]
            except BaseException as error:
                failure = exceptions.failure(error, None)
        return Reply(
            value=value,
            warnings=exceptions.caught(caught),
            failure=failure,
            size=back.size - back.left,
            missed=missed,
            passed=left,
            training=self._trained(request.model),
        )

    def _leave_snapshot(
        self, model: int, key: int | None, back: Attachments
    ) -> tuple[Parcel | None, int]:
        """What a model's optimizer has made, for other replicas; and how many bytes of it are not
        in the answer.
        """
        training = self._trainings.get(model)
        if training is None:
            return None, 0
        if key is None:
            parcel, _ = codec.encode(training.answer("snapshot"), back, "state")
            back.left = 0 if type(parcel.packet) is bytes else back.size
            return parcel, back.left
        parcel, _ = codec.encode(training.answer("snapshot"), Attachments(InlineLink()), "state")
        if len(parcel.packet) <= INLINE_LIMIT:
            return parcel, 0
        self._kept[key] = (devices.view(in_bytes(parcel.packet)),)
        return parcel._replace(packet=b""), len(parcel.packet)

    def _catch_up(self, model: int, news: TrainingNews | None, attachments: Attachments) -> None:
        """Make the steps of a model's optimizer that it has not made yet."""
        replica_module, training = self._models.get(model), self._trainings.get(model)
        if replica_module is None or (news is None and training is None):
            return
        if training is None:
            training = ReplicaTraining(self.device, self._kept)
        self._distrust_all()
        failed = training.failed
        try:
            training.follow(replica_module, news)
            if news is not None:
                training.catch_up(replica_module, news, attachments)
        except BaseException:
            # Half a start is worse than none: the driver sends all of it with the next call.
            if training.failed == failed:
                self._trainings.pop(model, None)
            raise
        self._trainings[model] = training

    def _trained(self, model: int) -> int:
        """The last entry that a model's optimizer has made, 0 if there is none."""
        training = self._trainings.get(model)
        return training.number if training is not None else 0

    def use_pause(self) -> None:
        """Do now, between two calls, what the next one would begin with."""
        self._graphs.use_pause()

    def import_anew(self) -> None:
        """Make all models anew, because modules were dropped that their classes came from."""
        for replica_module in self._models.values():
            replica_module.built.import_anew()

    def holdings(self) -> tuple[int, int]:
        """How many models and graphs are here."""
        return len(self._models), len(self._graphs) + len(self._kept)

    def _answer(
        self,
        where: str | None,
        back: Attachments,
        work: Callable[[], Parcel],
        request: ForwardRequest | BackwardRequest,
    ) -> Reply:
        value, failure, hooked, marked = None, None, None, None
        self._beside = _Beside()
        process = os.getpid()
        self._laps.begin(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = work()
                self._refuse_writes(request)
            # A replica outlives whatever a module raises, SystemExit and KeyboardInterrupt too.
            except BaseException as error:
                if os.getpid() != process:
                    raise  # of a child that the module forked
                value, failure = None, exceptions.failure(error, where)
                self._drop_writes(request)
            try:
                guess = self._guessed(request, back)
                marked = None if self._worked is None else self._worked.finish()
                written, revision = self._written(request, back, guess)
                hooked = self._hooked(request, back)
                self._show_the_present(request)
            except BaseException as error:  # what a kernel ran into may be told here, too
                failure = failure or exceptions.failure(error, where)
                # its contents are unknown: the driver sends everything
                self._models.pop(request.model, None)
                written, revision = None, 0
        try:
            if self._worked is not None:
                self._worked.finish()  # what was sent since: nothing, if the guess was right
        except RuntimeError as error:  # what a kernel ran into, the host hears of now
            failure = failure or exceptions.failure(error, where)
        laps = self._laps.end()
        if marked is not None:  # the host had asked for the copies behind the work, and went on
            laps = (*laps[:3], min(max(laps[2], marked), laps[4]), laps[4])
        reached = (
            self._reached(request)
            if isinstance(request, ForwardRequest) and request.doubtful
            else ()
        )
        hold = request.hold if isinstance(request, BackwardRequest) else None
        return Reply(
            value=value,
            written=written,
            warnings=exceptions.caught(caught) if caught else (),
            failure=failure,
            seconds=laps[-1] - laps[0],
            revision=revision,
            size=back.size - back.left,
            reached=reached,
            laps=laps,
            memory=self._memory.now(),
            reduced=self._beside.reduced,
            hooked=hooked,
            passed=back.left,
            output_graph=self._output_graph(request),
            noted=self._beside.noted,
            training=self._trained(request.model),
            stayed=b"" if hold is None else kept_gradients.marks(self._kept, hold),
            left=() if hold is None else kept_gradients.left(self._kept, hold),
        )

    def _guessed(
        self, request: ForwardRequest | BackwardRequest, back: Attachments
    ) -> tuple[Contents, Attachment] | None:
        """What the module probably wrote to, sent before a GPU has told. See
        `WriteRecord.guess`.
        """
        replica_module = self._mirror_of(request) if request.write_back else None
        found = replica_module.writes.guess() if replica_module is not None else None
        return (found, found.send(back)) if found is not None else None

    def _written(
        self,
        request: ForwardRequest | BackwardRequest,
        back: Attachments,
        guess: tuple[Contents, Attachment] | None,
    ) -> tuple[WriteBack | None, int]:
        replica_module = self._mirror_of(request)
        if replica_module is None:
            return None, 0
        if not request.write_back:
            replica_module.writes.pass_over()
            return None, replica_module.revision
        found = replica_module.writes.written(self._lasts(request))
        right = guess is not None and found is not None and found.contents.blob == guess[0].blob
        if guess is not None and not right:
            back.take_back(guess[1], guess[0].size)
        if found is None:
            return None, replica_module.revision
        packet = guess[1] if guess is not None and right else found.contents.send(back)
        parcel, _ = codec.encode(found.tensors, back, "state")
        blob = found.contents.blob._replace(packet=packet)
        return WriteBack(
            found.report, found.slots, blob, found.replaced, parcel
        ), replica_module.revision

    def _lasts(self, request: ForwardRequest | BackwardRequest) -> Callable[[Tensor], bool]:
        """Which tensors of the model the master gives other memory, too, where the module did."""
        if isinstance(request, ForwardRequest):
            return functools.partial(lasts, alone=request.alone, detached=request.detach)
        graphs = [self._graphs[key] for key, _ in request.outputs if key in self._graphs]
        return graphs[0].lasts if graphs else functools.partial(lasts, alone=False, detached=False)

    def _show_the_present(self, request: ForwardRequest | BackwardRequest) -> None:
        """After a forward of the past, what its graph's backward finds is the driver's state of
        today.
        """
        overlay = request.overlay if isinstance(request, ForwardRequest) else None
        replica_module = self._models.get(request.model)
        if replica_module is not None and overlay is not None and overlay.undone:
            replica_module.prepare(None, Attachments(InlineLink()), True)

    def _together(
        self,
        request: ForwardRequest,
        attachments: Attachments,
        back: Attachments,
        gathered: list[Parcel],
    ) -> Parcel:
        """Run one chunk, perhaps as one of several that exchange tensors. What they gathered is
        appended to a list.
        """
        played = None
        if request.played is not None:
            played = codec.unpack(request.played, attachments, self.device)
        part = request.part
        taking = (
            _AS_IT_IS if part is None else sync_batch_norm.taking_part(self.groups, part, played)
        )
        with taking as found:
            parcel = self._forward(request, attachments, back)
        if found is not None and found.gathered is not None and request.chunk == 0:
            gathered.append(codec.encode(tuple(found.gathered), back, "state")[0])
        return parcel

    def _forward(
        self, request: ForwardRequest, attachments: Attachments, back: Attachments
    ) -> Parcel:
        replica_module = self._replica_module(request, attachments)  # [4]
        self._catch_up(request.model, request.training, attachments)
        replica_module.owned.check_filled()
        self._laps.begin(1)
        if request.origins is not None:
            module_sources.expect(request.origins)
        with codec.loading("inputs"):
            value, inputs = codec.decode(request.inputs, attachments, self.device)
        args, kwargs, called = value if isinstance(value, Arguments) else (value, {}, None)
        before = _objects_before(request, args, kwargs)
        owned = replica_module.built.parts.before() if request.follows else None
        own = [] if request.detach else replica_module.leaves()
        leaves = (
            [*own, *(t for t in inputs if t.requires_grad)] if request.graph is not None else []
        )
        # The chunks of a call have one seed if random numbers follow from the rows.
        stream = request.chunk if request.samples is None else 0
        devices.seed(self.device, request.seed, stream)
        captures: Any = (
            capturing(replica_module.module, request.capture) if request.capture else _NO_CAPTURES
        )
        samples = request.samples
        self._distrust_all()
        with (
            ambient_state.enter(request.context),
            replica_module.running(),
            _InReplica(),
            _AS_IT_IS if samples is None else RowRandom(self.device, *samples),
            _Telling(replica_module.built.parts, request, owned is not None),
            captures as captured,
        ):
            if request.stored:
                stored = [attachments.find(number) for number in request.stored]
                args, kwargs = batch.resolved((args, kwargs), lambda n: stored[n](), self.device)
            self._laps.begin(2)
            runs: Any = replica_module.module
            # A compiled module does not see hooks that come later.
            if request.compiled is not None and not request.capture:
                runs = replica_module.built.compiled(request.compiled)
            value = callee(runs, called)(*args, **kwargs)
            replica_module.built.hidden.check()
            self.check_process()
            self._finish_work()
        # [6]
        known: dict[int, Any] = {}
        changes: dict[int, Any] = {}
        rebound: tuple[tuple[int, str, Any], ...] = ()
        held: dict[PartKey, Any] = {}
        if request.alone:
            rebound, held = replica_module.changes(owned)
            _tell(request, replica_module)
        if owned is not None:
            known = replica_module.known(owned, held)
            if request.model in self._trainings:  # the master's tensors may lack steps
                for tensor in codec.tensors_in(value, "output"):
                    known.pop(id(tensor), None)
        if before is not None and request.alone:
            known.update(before[1].numbers())
            changes = before[1].changes()
        elif before is not None and (lost := before[1].changes()):
            warnings.warn(_CHANGES_LOST.format(before[0].arguments(lost)), stacklevel=2)
        output = value
        value, root = (
            (Produced(output, captured, rebound, changes, held), "")
            if captured or rebound or changes or held
            else (output, "output")
        )
        try:
            parcel, outputs = self._encoded(request, value, back, root, known)
        except TransferError as error:
            if not (changes or held):
                raise
            warnings.warn(_CHANGES_UNSENDABLE.format(error), stacklevel=2)
            value = Produced(output, captured, rebound, {}, {})
            parcel, outputs = self._encoded(request, value, back, root, known)
        if request.graph is not None and any(t.requires_grad for t in outputs):
            stays = self._lasts(request)
            self._graphs[request.graph] = KeptGraph(
                outputs=outputs,
                leaves={request.graph: leaves},
                partial=request.detach,
                replica_module=replica_module,
                lasts=stays,
                tensors=replica_module.tensors(),
                held=replica_module.built.held,
                edits=replica_module.built.held.edits,
                samples=request.samples,
                parts=replica_module.built.parts if owned is not None else None,
            )
        else:  # otherwise backward runs next
            self._graphs.ahead = replica_module
        return parcel

    def _encoded(
        self,
        request: ForwardRequest,
        value: Any,
        back: Attachments,
        root: str,
        known: Mapping[int, Any],
    ) -> tuple[Parcel, list[Tensor]]:
        """The parcel of what a forward gave, and the tensors in it; the tensors alone if the driver
        has it already.
        """
        if request.graph_only:
            return Parcel(b"", (), b""), codec.tensors_in(value, root, known)
        keep = request.graph is not None
        return codec.encode(value, back, root, requires_grad=keep, known=known)

    def _hooked(
        self, request: ForwardRequest | BackwardRequest, back: Attachments
    ) -> Parcel | None:
        """The parcel of the `HookChanges` of a backward."""
        if isinstance(request, ForwardRequest) or not (request.write_back and request.outputs):
            return None
        graph = self._graphs.get(request.outputs[0][0])
        if graph is None or graph.parts is None:
            return None
        replica_module = graph.replica_module
        is_current = graph.parts is replica_module.built.parts
        made = {id(value): key for key, value in graph.parts.made().items()}
        found, lost = graph.parts.changes_since(replica_module.revision if is_current else 0)
        replica_module.built.untold.enter(VainChange.HOOKED, lost)
        _tell(request, replica_module)
        if found is None:
            return None
        known = {**replica_module.known(), **made} if is_current else {}
        try:
            return codec.encode(found, back, "", known=known)[0]
        except TransferError as error:
            warnings.warn(_CHANGES_UNSENDABLE.format(error), stacklevel=2)
            return None

    def _distrust_all(self) -> None:
        """Forget what is known of all modules: code of one of them runs, and they may share
        objects.
        """
        self._graphs.ahead = None
        for replica_module in self._models.values():
            replica_module.built.is_untouched = False

    def _refuse_writes(self, request: ForwardRequest | BackwardRequest) -> None:
        """Raise an error if the module wrote to parameters that an optimizer trains here: replicas
        would hold different weights from now on.
        """
        replica_module = self._mirror_of(request)
        if replica_module is None:
            return
        slots = replica_module.owned.overwritten(replica_module.writes.dirty)
        if not slots:
            return
        now = replica_module.tensors()
        named = replica_module.module.named_parameters()
        names = [name for name, p in named if any(p is now[slot] for slot in slots)]
        raise StateChanged(
            f"the module wrote in place to {', '.join(map(repr, names)) or 'a parameter'}, which "
            "model.optimizer() trains in the replicas: each replica would go on with weights of "
            "its own. Write to parameters in this process, after model.sync(); or use the "
            "optimizer in this process"
        )

    def _drop_writes(self, request: ForwardRequest | BackwardRequest) -> None:
        """After a failure: if the module wrote to parameters that an optimizer trains here, let go
        of the optimizer, which begins anew with another replica's, or the master's, contents.
        """
        replica_module = self._mirror_of(request)
        if replica_module is not None and replica_module.is_spoiled:
            replica_module.writes.pass_over()
            self._trainings.pop(request.model, None)

    def _reached(self, request: ForwardRequest) -> tuple[int, ...]:
        if request.graph is None or request.graph not in self._graphs:
            return ()
        graph = self._graphs[request.graph]
        used, leaves = autograd_engine.reachable(graph.outputs), graph.leaves[request.graph]
        return tuple(i for i in request.doubtful if id(leaves[i]) in used)

    def _output_graph(self, request: ForwardRequest | BackwardRequest) -> OutputGraph | None:
        """How the outputs of the only chunk hang together."""
        if not isinstance(request, ForwardRequest) or not request.alone or request.graph is None:
            return None
        graph = self._graphs.get(request.graph)
        return None if graph is None else autograd_engine.output_graph(graph.outputs)

    def _replica_module(self, request: ForwardRequest, attachments: Attachments) -> ReplicaModule:
        replica_module = self._models.get(request.model)
        if replica_module is None:
            replica_module = ReplicaModule(self.device)
        try:
            replica_module.prepare(request.update, attachments, bool(self._graphs))
            _tell(request, replica_module)
            if request.overlay is not None:
                then = codec.unpack(request.overlay.tensors, attachments, self.device)
                replica_module.overlay(request.overlay.slots, then, bool(self._graphs))
        except BaseException:
            # Half adopted is worse than absent: the driver sends everything with the next call.
            self._models.pop(request.model, None)
            raise
        self._models[request.model] = replica_module
        return replica_module

    def _backward(
        self, request: BackwardRequest, attachments: Attachments, back: Attachments
    ) -> Parcel:
        if request.kept is not None:
            kept = kept_gradients.find(self._kept, request.kept)
            return codec.encode(tuple(kept), back, "gradients")[0]
        self._catch_up(request.model, request.training, attachments)
        part = request.part
        try:
            with _AS_IT_IS if part is None else sync_batch_norm.taking_part(self.groups, part):
                return self._differentiate(request, attachments, back)
        finally:
            # Whatever goes wrong here, others do not wait for this replica's share: it leaves their
            # group.
            word = request.reduce
            if word is not None and (
                self._beside.reduced is None or self._beside.reduced.outcome is SumOutcome.FAILED
            ):
                self.groups.leave(word.group)

    def _differentiate(
        self, request: BackwardRequest, attachments: Attachments, back: Attachments
    ) -> Parcel:
        if any(key not in self._graphs for key, _ in request.outputs):
            raise GraphLost(
                "backward: the replica no longer holds the graph of this forward, because "
                "its process was replaced "
                "since; run forward again"
            )
        graphs = [self._graphs[key] for key, _ in request.outputs]
        leaves = graphs[0].leaves[request.graph]
        if request.inner:
            leaves = [graphs[0].outputs[number] for number in request.inner]
        partial = any(graph.partial for graph in graphs)
        if request.bumped:
            saved = [self._saved(graph, slot) for graph in graphs for slot in request.bumped]
            bump([tensor for tensor in saved if tensor is not None])
        self._laps.begin(1)
        grads = codec.unpack(request.grads, attachments, self.device)
        outputs = [
            self._graphs[key].outputs[i] for key, indices in request.outputs for i in indices
        ]
        given = self._graphs[request.graph].outputs if request.whole or request.noted else ()
        whole = {id(given[number]) for number in request.whole}
        replaced = [(t, grad) for t, grad in zip(outputs, grads, strict=True) if id(t) in whole]
        group = self.groups.find(request.reduce.group) if request.reduce is not None else None
        reducer = None
        if group is not None and request.reduce is not None:
            reducer = collective.Reducer(group, request.reduce, leaves, back)
        early = None
        hold = request.hold
        stays = hold is not None and hold.key is not None
        streams = request.reduce is None and request.narrow is None and not stays
        if streams and request.early and autograd_engine.plainly(request, partial):
            early = gradient_stream.begin(leaves, back, self.device)
        first = reducer or early
        watching = first.watching() if first is not None else _AS_IT_IS
        samples = graphs[0].samples
        self._distrust_all()
        with (
            ambient_state.enter(request.context),
            _InReplica(),
            _AS_IT_IS if samples is None else RowRandom(self.device, *samples),
            graphs[0].held.as_of(graphs[0].edits),
            _Watching(graphs[0], request.write_back),
            _Telling(graphs[0].replica_module.built.parts, request, graphs[0].parts is not None),
            watching,
            autograd_engine.replacing(replaced) if replaced else _AS_IT_IS,
            autograd_engine.noting([given[k] for k in request.noted]) as noted,
            shown_as_set(),
            _NO_SUMS if hold is None else kept_gradients.adding(self._kept, hold) as earlier,
        ):
            self._laps.begin(2)
            found = autograd_engine.differentiate(
                leaves, partial, outputs, grads, request=request, earlier=earlier
            )
            self.check_process()
            self._finish_work()
        if request.inner:
            self._keep_derived(request, graphs, grads, found)
            return codec.encode(
                tuple(found), back, "gradients", requires_grad=request.derived is not None
            )[0]
        if request.noted:
            row = tuple(map(noted.get, range(len(request.noted))))
            self._beside.noted = codec.encode(row, back, "gradients")[0]
        if self._ends(request):
            self._graphs.spent.update(key for key, _ in request.outputs)
        self._graphs.ahead = graphs[0].replica_module
        self._keep_derived(request, graphs, grads, found)
        # What autograd.grad() gives may be memory of the message, or of another gradient.
        if hold is not None:
            own = autograd_engine.plainly(request, partial)
            found = kept_gradients.stay(self._kept, hold, leaves, found, own)
        if request.reduce is not None:
            found = self._reduce(request, reducer, found, back)
        if request.narrow is not None and request.derived is None:
            found = autograd_engine.narrowed(found, *request.narrow)
        parcel = early.parcel(found, back) if early is not None else None
        if parcel is not None:
            return parcel
        parcel, _ = codec.encode(
            tuple(found), back, "gradients", requires_grad=request.derived is not None
        )
        if request.stays and type(parcel.packet) is not bytes:
            left = [grad for grad in found[: request.stays] if grad is not None]
            # The driver takes sparse ones, which have no `nbytes`, and all others with them.
            if all(grad.layout is torch.strided for grad in left):
                back.left = sum(grad.nbytes for grad in left)
        return parcel

    def _keep_derived(
        self,
        request: BackwardRequest,
        graphs: Sequence[KeptGraph],
        grads: Sequence[Tensor],
        found: Sequence[Tensor | None],
    ) -> None:
        """Keep the graph of the gradients that a backward under ``create_graph`` found."""
        if request.derived is not None:
            brought: dict[int, Sequence[Tensor]] = {request.derived: grads}
            for graph in graphs:
                brought.update(graph.leaves)
            kept = [grad for grad in found if grad is not None]
            self._graphs[request.derived] = graphs[0]._replace(
                outputs=kept, leaves=brought, partial=True
            )

    def _ends(self, request: BackwardRequest) -> bool:
        """Whether the driver's torch frees its nodes of the graphs with this backward: it keeps
        nothing, and differentiates all outputs.
        """
        if request.keep or request.derived is not None:
            return False
        for key, given in request.outputs:
            outputs = self._graphs[key].outputs
            if {number for number, one in enumerate(outputs) if one.requires_grad} != {*given}:
                return False
        return True

    def _saved(self, graph: KeptGraph, slot: int) -> Tensor | None:
        """What a graph may have saved of a slot with a version that moved since.

        A later forward that writes to a tensor leaves older graphs the one that they saved. Of
        parameters that is an error all the same, as in one process; buffers are written by every
        forward, and each graph keeps its own.
        """
        tensor = graph.tensors.get(slot)
        return (
            tensor if isinstance(tensor, nn.Parameter) else graph.replica_module.tensors().get(slot)
        )

    def _reduce(
        self,
        request: BackwardRequest,
        reducer: collective.Reducer | None,
        found: list[Tensor | None],
        back: Attachments,
    ) -> list[Tensor | None]:
        """Sum gradients with those of other replicas; returns what the driver needs besides."""
        word = request.reduce
        assert word is not None
        outcome = reducer.finish(found) if reducer is not None else SumOutcome.FAILED
        if reducer is None or outcome is SumOutcome.FAILED:
            self._beside.reduced = Reduced(
                SumOutcome.FAILED, b"", None, reducer.seconds if reducer is not None else 0.0, 0
            )
            return found
        parcel = None
        if outcome is SumOutcome.DONE and word.stays is not None:
            self._kept[word.stays] = reducer.shared()
        elif outcome is SumOutcome.DONE:
            parcel = reducer.parcel()
        self._beside.reduced = Reduced(
            outcome, reducer.marks, parcel, reducer.seconds, reducer.size
        )
        self._kept[word.kept] = found
        marks = dict(zip(word.leaves, reducer.marks, strict=True))
        return [
            grad if marks.get(i) in (None, collective.APART) else None
            for i, grad in enumerate(found)
        ]

    def _finish_work(self) -> None:
        """A GPU has only been asked so far: when it is done, its own mark tells."""
        if self._worked is not None:
            self._worked.mark()
        self._laps.begin(3)

    def _mirror_of(self, request: ForwardRequest | BackwardRequest) -> ReplicaModule | None:
        """The model that a request is about. A graph keeps its own, also where the driver let go of
        the model.
        """
        if isinstance(request, BackwardRequest):
            for key, _ in request.outputs:
                if key in self._graphs:
                    return self._graphs[key].replica_module
        return self._models.get(request.model)


class _Watching(RawAccess):
    """Note what is written to by what a checkpoint runs again; in most backwards nothing is.

    It finds what upstream's would: that of chunk 0 the state of today, for it holds the master's
    own buffers, that of another chunk what its forward left.

    Args:
        graph: What is differentiated.
        first: Whether it is chunk 0's.
    """

    def __init__(self, graph: KeptGraph, first: bool) -> None:
        self._graph, self._first = graph, first
        self._ran = False

    def watched(self) -> Callable[[], Mapping[int, MemoryRange]]:
        return self._graph.replica_module.owned.watched

    def __enter__(self) -> Accessed:
        replica_module = self._graph.replica_module
        held = replica_module.built.held
        if self._graph.held is not held or not held.holds(self._graph.tensors):
            self._graph.held.replace(self._found())
        replica_module.settle()
        self._hook = register_module_forward_pre_hook(self._before_module)
        return super().__enter__()

    def _before_module(self, _module: nn.Module, _args: Any) -> None:
        self._ran = True

    def _found(self) -> dict[int, Tensor]:
        graph, now = self._graph, self._graph.replica_module.tensors() if self._first else {}
        # A leaf stays the one that gradients are asked for of.
        lasting = {slot: t for slot, t in now.items() if graph.lasts(t) and not t.requires_grad}
        return {**graph.tensors, **lasting}

    def __exit__(self, *error: object) -> None:
        touched, replica_module = self.touched, self._graph.replica_module
        super().__exit__(*error)
        self._hook.remove()
        if self._ran or replica_module.stirred(touched):
            replica_module.writes.note(touched)
        replica_module.hold_own()


_CHANGES_LOST = (
    "forward changed {}, which it was given. Replicas get copies of their arguments, and with "
    "several devices the caller's own stays as it was: return what is needed"
)
_NOT_ALIKE = (
    "objects among the arguments hold other objects after unpickling than before: what forward "
    "changes in them is not brought back"
)
_CHANGES_UNSENDABLE = "what forward stored in objects of the program is not brought back: {}"
_CODE_CHANGES_LOST = (
    "the module, or a hook of it, changed {}. Replicas have copies, the program's own stays as it "
    "was, and each forward begins with it: return what is needed, take outputs of submodules by "
    "capture(), and random numbers from the default generators, which are seeded for each chunk"
)


def _objects_before(
    request: ForwardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[SharedObjects, ObjectsBefore] | None:
    """The objects among the arguments that the caller has, too, with what they hold; None if there
    are none, or if nothing is to be said of their changes.
    """
    if not (request.shared or (request.write_back and not request.alone)):
        return None
    shared = SharedObjects(args, kwargs, split=not request.alone)
    if not shared.found:
        return None
    if request.alone and len(shared.found) != request.shared:
        warnings.warn(_NOT_ALIKE, stacklevel=2)
        return None
    return shared, ObjectsBefore(shared.found)


def _tell(request: ForwardRequest | BackwardRequest, replica_module: ReplicaModule) -> None:
    """Warn of what forwards changed in vain."""
    if request.write_back:
        for text in replica_module.built.untold.take():
            warnings.warn(text, stacklevel=2)


class _Telling:
    """Warn if the block changes in vain what the module's code refers to.

    Args:
        parts: What the module consists of.
        request: What runs it; of one chunk's is told.
        follows: Whether the driver gets what it changes of what both sides find alike.
    """

    def __init__(
        self, parts: ModuleParts, request: ForwardRequest | BackwardRequest, follows: bool
    ) -> None:
        self._before: LostChanges | None = None
        if request.write_back:
            known = {*map(id, parts.objects.values())} if follows and parts.code.objects else ()
            self._before = parts.code.before(known, parts.followed if follows else ())

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._before is not None and (lost := self._before.found()):
            warnings.warn(_CODE_CHANGES_LOST.format(lost), stacklevel=1)


class _InReplica:
    def __enter__(self) -> None:
        self._token = process.in_replica.set(True)

    def __exit__(self, *_: object) -> None:
        process.in_replica.reset(self._token)


def callee(module: Callable[..., Any], called: Called) -> Callable[..., Any]:
    """What gets the arguments of a call: a module, a method of it, or a function with it."""
    if called is None:
        return module
    if isinstance(called, str):
        return getattr(module, called)  # type: ignore[no-any-return]
    return functools.partial(called, module)


@contextlib.contextmanager
def capturing(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Keep what some submodules give while the block runs, in lists by name."""
    captured: dict[str, list[Any]] = {name: [] for name in names}
    hooks = [
        module.get_submodule(name).register_forward_hook(_keeper(captured[name])) for name in names
    ]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def _keeper(kept: list[Any]) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        kept.append(output)

    return keep


@dataclass(frozen=True)
class WithAttributes:
    """Called with a module and arguments, it sets attributes of the module first. The next call
    finds the module without them, as it takes back all that a call did.

    Attributes:
        attributes: What is set, by name.
        called: What gets the arguments.
    """

    attributes: Mapping[str, Any]
    called: Called

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Set them, and call."""
        for name, value in self.attributes.items():
            # They hide parameters and submodules of their names, as on upstream's replicas.
            object.__setattr__(module, name, value)
        return callee(module, self.called)(*args, **kwargs)

"""One forward over some chunks, for `parallel_apply` and for a single remote replica."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import batch, devices
from raydp_parallel.calls import autograd, replay, synced_call, training_record
from raydp_parallel.calls.chunk_balance import ChunkBalance, ChunkTimes
from raydp_parallel.calls.dispatcher import Dispatcher
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.group_reduction import ReductionPart
from raydp_parallel.calls.replica_groups import RelayRoute, WeightRelay, begin_relay, route, size_of
from raydp_parallel.cluster.replica_slots import (
    ChunkAnswer,
    ChunkCall,
    GraphHandle,
    RemoteGraph,
    ReplicaSlot,
)
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import TransferError
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica.loss_call import LossCall
from raydp_parallel.replica.replica import WithAttributes
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm
from raydp_parallel.state import module_sources
from raydp_parallel.state.state_history import Mark
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.group_messages import Relay
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import (
    Arguments,
    Called,
    ForwardRequest,
    Origins,
    Produced,
    Reply,
    StateUpdate,
)

log = logging.getLogger("raydp_parallel")

_MOST_RERUNS = 2
"""How often a forward is run again while another thread writes to the weights without moving their
versions. If that thread never stops, the result is, as in any race, one of the possible ones."""

_MUCH = 64 << 20
"""Bytes of state from which sending a model to a replica is logged."""


LOSS_HAS_PARAMETERS = (
    "with_loss: the criterion has parameters of the model: let a method of the module compute the "
    "loss, for model.call(), or give a function of the output alone"
)

_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")

_FUNCTION_HAS_PARAMETERS = (
    "run: the function has parameters of the model, which are trained in the replicas, so that "
    "they may lack steps here: use the module that it gets as its first argument"
)


class ForwardChunk(NamedTuple):
    """One chunk's work.

    Attributes:
        slot: The slot that runs it.
        tracker: The module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        where: Names chunk and device in an exception's text; None leaves exceptions as they are.
        rows: Rows of the batch in it, for statistics.
        detach: Whether its module takes no gradients.
        alone: Whether there is one device only, where upstream runs the master itself.
        called: What gets the arguments.
    """

    slot: ReplicaSlot
    tracker: ModuleTracker
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str | None
    rows: int = 0
    detach: bool = False
    alone: bool = False
    called: Called = None

    def message(self) -> tuple[Any, str]:
        """What the replica gets, and its name in an error about a part of it."""
        if self.kwargs or self.called is not None:
            return Arguments(self.args, self.kwargs, self.called), ""
        return self.args, "inputs"


class Capture:
    """Asks for outputs of submodules, and takes them.

    Args:
        module: The module that has them.
        names: The submodules.

    Attributes:
        parts: What they gave, by chunk.
        rows: How many rows each chunk had, where that weighs its outputs.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module = module
        self.names = names
        self.parts: list[dict[str, list[Any]]] = []
        self.rows: tuple[int, ...] | None = None


class CallSettings(NamedTuple):
    """What a wrapper wants of a call besides its chunks.

    Attributes:
        joins: Whether outputs are going to be joined, and are visible to no other code before.
        balance: Takes the times of the chunks; None if nothing does.
        gradient_dtype: The dtype of gradients of parameters on their way; None leaves it.
        compiled: The settings of `torch.compile` for the module; None runs it as it is.
        per_sample: Whether random numbers follow from the rows' numbers in the batch.
        holds: Whether gradients of parameters stay in the replicas until they are used.
        means: Whether buffers that chunks change get the mean over them, and not what chunk 0 has.
        late_buffers: Whether replicas of other chunks get the first one's buffers for an
            evaluation only, while an optimizer in the replicas trains.
    """

    joins: bool = False
    balance: ChunkBalance | None = None
    gradient_dtype: torch.dtype | None = None
    per_sample: bool = False
    compiled: Mapping[str, Any] | None = None
    holds: bool = False
    means: bool = False
    late_buffers: bool = False


NO_SETTINGS = CallSettings()
"""Those of a call that no wrapper makes."""

settings: ContextVar[CallSettings] = ContextVar("raydp_parallel_settings", default=NO_SETTINGS)

capturing: ContextVar[Capture | None] = ContextVar("raydp_parallel_capturing", default=None)


class MapCall(NamedTuple):
    """What a forward knows that computes one of several batches at once.

    It makes no gradients. Its effects on the module are dropped: those of several batches have no
    order.

    Attributes:
        at_once: How many such forwards run at the same time, each with one chunk; None if each has
            all replicas.
        place: Where its outputs go; None is where the master is.
        calls: Where it enters itself before it sends anything.
    """

    at_once: int | None
    place: torch.device | None
    calls: list[ForwardCall]


mapping: ContextVar[MapCall | None] = ContextVar("raydp_parallel_mapping", default=None)


def begin(executor: Executor, chunks: Sequence[ForwardChunk], unused: UnusedGrads) -> ForwardCall:
    """Send every chunk. The call's outputs are part of torch's graph."""
    call = ForwardCall(executor, chunks, unused)
    call.send()
    return call


class ForwardCall:
    """One forward that runs, in two steps: `send`, and `outputs`.

    While the replicas work, the driver plans the graph and verifies contents; what it needs for
    that is collected as the chunks' messages are made, one after the other, each sent at once.
    """

    def __init__(
        self, executor: Executor, chunks: Sequence[ForwardChunk], unused: UnusedGrads
    ) -> None:
        self.executor = executor
        self.chunks = chunks
        self.trackers = list(dict.fromkeys([chunk.tracker for chunk in chunks]))
        of_map, ambient = mapping.get(), ambient_state.capture()
        self.mapped = of_map is not None
        self.ambient = ambient._replace(grad=False) if self.mapped else ambient
        self.capture = capturing.get()
        if self.capture is not None and self.capture.module is not chunks[0].tracker.module:
            self.capture = None
        self.seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        on_cpu = devices.is_cpu(chunks[0].tracker.device)
        self.settings = settings.get()
        self.joins = self.settings.joins and self.capture is None and len(chunks) > 1 and on_cpu
        self.call = autograd.CallNode(executor, [], [], unused)
        balance = self.settings.balance
        if balance is not None:
            self.call.times = ChunkTimes(balance, [(chunk.slot, chunk.rows) for chunk in chunks])
        slots = [chunk.slot for chunk in chunks]
        if SyncBatchNorm.made:
            trackers = [chunk.tracker for chunk in chunks]
            self.call.synced = synced_call.plan(executor, slots, trackers)
        for tracker in self.trackers:
            if self.settings.holds:  # else nothing is written: another thread may do so now
                tracker.holds = True
        if self.call.synced is not None and self.settings.compiled is not None:
            raise ValueError(
                "Options(compile=...): synchronised batch norm cannot be compiled, because chunks "
                "exchange tensors in the midst of it"
            )
        self.place = None if of_map is None else of_map.place
        at_once = None if of_map is None else of_map.at_once
        self.threads = executor.threads(at_once or len(chunks))
        self.sends: list[int] = []
        self.verified = True
        self.token: Tensor | None = None
        self.graphs: list[RemoteGraph | None] = []
        self.relays: dict[ModuleTracker, WeightRelay | None] = {}
        self.sent: Dispatcher | None = None
        self.together: list[ChunkAnswer] = []
        if of_map is not None:
            of_map.calls.append(self)

    def send(self) -> None:
        """Send the chunks."""
        try:
            self._send()
        except BaseException:
            self.abandon()
            raise

    def outputs(self) -> list[Any]:
        """Wait for the chunks' outputs, once."""
        try:
            return self._take()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.sent = None  # its jobs refer to this object

    def abandon(self) -> None:
        """Stop waiting, and release what an exception's traceback may keep alive for long."""
        for relay in self.relays.values():
            if relay is not None:
                relay.abandon()
        for graph in self.graphs:
            if graph is not None:
                graph.drop()
        sent, self.sent = self.sent, None
        if sent is not None:
            sent.abandon()

    def _take(self) -> list[Any]:
        answers = self._wait()
        while _failed(answers) and self.executor.send_code(answers):
            answers = self._attempt()
        reruns = 0
        while not self.verified and reruns < _MOST_RERUNS:
            answers = self._attempt()
            reruns += 1
        self.executor.note_forward(reruns, len(self.sends), sum(self.sends))
        if self.call.times is not None:
            self.call.times.note("forward", range(len(answers)), answers)
        gathered = answers[0].reply.gathered
        if self.call.synced is not None and gathered is not None:
            on_cpu = torch.device("cpu")
            self.call.synced.gathered = codec.unpack(gathered, answers[0].attachments, on_cpu)
        self._leave_out_unreached(answers)
        if self.token is None and self.call.leaves:
            self.token = autograd.fork(self.call)
        # [8]
        first: ModuleTracker | None = self.chunks[0].tracker
        if self.settings.means and len(answers) > 1:
            self._write_means(answers)
            first = None
        try:
            autograd.finish([(first if i == 0 else None, a) for i, a in enumerate(answers)])
        except Exception as error:
            named = self._unloadable(answers)
            if named is None:
                raise
            raise named from error
        self._note_parts()
        return self._outputs(answers)  # [9]

    def _attempt(self) -> list[ChunkAnswer]:
        self._send()
        return self._wait()

    def _wait(self) -> list[ChunkAnswer]:
        answers = self.together if self.sent is None else self.sent.answers()
        self.relays = {}  # they have ended
        return answers

    def _send(self) -> None:
        self.executor.revive([chunk.slot for chunk in self.chunks])
        for tracker in self.trackers:
            if training_record.trainings:
                training_record.bring_up_to_date(tracker.module, tracker.training)
            if tracker.training is not None:
                slots = [chunk.slot for chunk in self.chunks if chunk.tracker is tracker]
                tracker.training.bring_along(slots, self.call.synced is not None)
        self.inputs: list[list[Tensor]] = [[] for _ in self.chunks]
        self.marks: dict[ModuleTracker, Mark] = {}
        self.made: dict[int, tuple[ForwardRequest, replay.KeptForward]] = {}
        self.graphs = [RemoteGraph() if self.ambient.grad else None for _ in self.chunks]
        self.handle = GraphHandle([graph for graph in self.graphs if graph is not None])
        self.relays = {}
        self.token = None
        self.ways = {tracker: self._way(tracker) for tracker in self.trackers}
        jobs = []
        for i, chunk in enumerate(self.chunks):
            relayed = self.ways[chunk.tracker] is not None
            job = ChunkCall(
                chunk.slot,
                "forward",
                functools.partial(self._request, i),
                model=chunk.tracker.id,
                makes=self.graphs[i],
                rows=chunk.rows,
                on_answer=self._answer_taker(chunk.tracker) if relayed else None,
            )
            jobs.append(job)
        if self.call.synced is not None:
            self.together = self.call.synced.run(jobs, self._meanwhile)
            return
        self.sent = self.executor.dispatcher(jobs)
        self.sent.send(self._meanwhile)

    def _way(self, tracker: ModuleTracker) -> RelayRoute | None:
        """The way for a model's new contents from replica to replica, if there is to be one."""
        slots = [chunk.slot for chunk in self.chunks if chunk.tracker is tracker]
        if len(slots) < 2 or not self.executor.exchanges:
            return None
        return route(self.executor.groups, slots, size_of(tracker, tracker.module))

    def _begin_relay(self, tracker: ModuleTracker) -> WeightRelay | None:
        chunks = {}
        for number, chunk in enumerate(self.chunks):
            if chunk.tracker is tracker:
                chunks[number] = chunk.slot
                if self._are_late(number, chunk.slot.held.get(tracker.id, 0)):
                    return None
        return begin_relay(self.executor.groups, self.ways[tracker], tracker, chunks)

    def _answer_taker(self, tracker: ModuleTracker) -> Callable[[Reply | None], None]:
        """A function that tells the model's relay of an answer at once: replicas wait for each
        other in it.
        """

        def take(reply: Reply | None) -> None:
            relay = self.relays.get(tracker)
            if relay is not None:
                relay.take_answer(reply)

        return take

    def _request(self, number: int, slot: ReplicaSlot, attachments: Attachments) -> ForwardRequest:
        """The message for one chunk. The caller holds the executor's lock: other threads may send
        the same modules.

        If a replica dies, it is called again, for another slot.
        """
        if not self.marks:
            for tracker in self.trackers:
                tracker.sync()  # [2]
                if tracker.training is not None:
                    tracker.training.check()
                self.executor.recorder.changed(tracker.why())
            self.marks = {tracker: tracker.mark() for tracker in self.trackers}
            self.doubts = {tracker: self._doubtful(tracker) for tracker in self.trackers}
            self.relays = {
                tracker: None if self.ways[tracker] is None else self._begin_relay(tracker)
                for tracker in self.trackers
            }
        part = None if self.call.synced is None else self.call.synced.part(number, slot)
        chunk, graph = self.chunks[number], self.graphs[number]
        value, root = chunk.message()
        # Before it is pickled: a module of which the file was changed is sent by value.
        origins = _origins(chunk)
        grad = self.ambient.grad
        refs: dict[Any, int] = {}
        parcel, tensors = codec.encode(value, attachments, root, requires_grad=grad, refs=refs)
        if refs and self.settings.per_sample and not chunk.rows:
            raise ValueError(
                "Options(rng='per_sample'): the rows of chunks are not known, because all "
                "arguments are ChunkRefs; give one tensor with these rows, such as their numbers"
            )
        _refuse_own(chunk, tensors)
        self.inputs[number] = [t for t in tensors if t.requires_grad] if grad else []
        name = slot.name_of(chunk.tracker.id, chunk.slot)
        news = replay.news(chunk.tracker, slot, name, attachments, together=part is not None)
        update, relay = self._update(number, slot, name, attachments)
        request = ForwardRequest(
            model=name,
            update=update,
            graph=graph.key if graph is not None else None,
            chunk=number,
            where=chunk.where,
            inputs=parcel,
            context=self.ambient,
            seed=self.seed,
            threads=self.threads,
            write_back=(number == 0 or self.settings.means) and not self.mapped,
            capture=self.capture.names if self.capture is not None else (),
            detach=chunk.detach,
            alone=chunk.alone,
            doubtful=() if chunk.detach else self.doubts[chunk.tracker],
            forget=slot.forget(),
            overlay=replay.overlay(self.marks[chunk.tracker], attachments),
            relay=relay,
            by_host=devices.is_cpu(chunk.tracker.device),
            origins=origins,
            part=part,
            samples=self._samples(number),
            compiled=self.settings.compiled if runs_module(chunk.called) else None,
            stored=replay.attach(refs, attachments),
        )
        if graph is not None and self.executor.replays:
            kept = replay.keep(parcel, tensors, "arguments", copied=self.settings.holds)
            self.made[number] = request, kept._replace(refs=[*refs])
        return request if news is None else request._replace(training=news)

    def _doubtful(self, tracker: ModuleTracker) -> tuple[int, ...]:
        """The numbers of a model's leaves of which replicas say whether a chunk used them. Where
        unused ones get nothing, those with hooks too: torch calls these with None for whatever its
        graph has and gives nothing to.
        """
        doubtful = tracker.doubtful()
        if self.call.unused == "none":
            hooks = enumerate(map(_hooks, tracker.leaves()[0]))
            hooked = [k for k, found in hooks if found != (None, None)]
            doubtful = (*doubtful, *[k for k in hooked if k not in doubtful])
        return doubtful

    def _samples(self, number: int) -> tuple[int, int] | None:
        """The number of a chunk's first row in the batch, and its rows, if random numbers follow
        from them.
        """
        if not self.settings.per_sample:
            return None
        return sum(chunk.rows for chunk in self.chunks[:number]), self.chunks[number].rows

    def _update(
        self, number: int, slot: ReplicaSlot, name: int, attachments: Attachments
    ) -> tuple[StateUpdate | None, Relay | None]:
        """What a slot's replica needs of the state; the recorder counts it."""
        before, tracker = len(self.sends), self.chunks[number].tracker
        relay = self.relays[tracker]
        update: StateUpdate | None = None
        message: Relay | None = None
        passed = None
        if relay is not None:
            passed = relay.update(number, slot, name, attachments, self.sends.append)
        if passed is not None:
            update, message = passed
        elif not self._are_late(number, slot.held.get(name, 0)):
            update = replay.update(tracker, slot, name, attachments, self.sends.append)
        sent = sum(self.sends[before:])
        if update is not None and update.structure is not None and sent > _MUCH:
            log.info("sending %.0f MB of %s to %s", sent / 1e6, type(tracker.module).__name__, slot)
        self.executor.recorder.state(slot, tracker.id, sent, tracker.size)
        return update, message

    def _are_late(self, number: int, held: int) -> bool:
        """Whether a chunk's replica does without what is new, because that is buffers which this
        forward does not read.
        """
        chunk = self.chunks[number]
        tracker = chunk.tracker
        trains = tracker.training is not None and tracker.module.training
        late = self.settings.late_buffers and number > 0 and not self.mapped
        plain = trains and late and runs_module(chunk.called)
        return plain and tracker.only_reported_since(held)

    def _meanwhile(self) -> None:
        self._plan()
        # With doubtful leaves the answers say which of them take part.
        if self.call.leaves and not any(self.doubts.values()):
            self.token = autograd.fork(self.call)
        verified = [tracker.verify(wholly=False) for tracker in self.trackers]  # [5]
        self.verified = all(verified)

    def _plan(self) -> None:
        """Collect the call's leaves, each once, and which of them each chunk has, in the order of
        its replica.
        """
        leaves: dict[int, Tensor] = {}
        kinds: list[str] = []
        known: dict[ModuleTracker, list[int]] = {}
        index: dict[int, int] = {}

        def enter(tensor: Tensor, kind: str) -> int:
            at = index.setdefault(id(tensor), len(leaves))
            if at == len(leaves):
                leaves[at] = tensor
                kinds.append(kind)
            return at

        self.owned: list[list[int]] = []
        self.own: list[int] = []
        for chunk, inputs in zip(self.chunks, self.inputs, strict=True):
            model = chunk.tracker if self.ambient.grad and not chunk.detach else None
            if model is not None and not leaves:
                # A model's tensors are distinct: those of the first are entered all at once.
                tensors, found, _ = model.leaves()
                leaves, kinds = dict(enumerate(tensors)), [*found]
                index = dict(zip(map(id, tensors), leaves, strict=True))
                known[model] = [*leaves]
            elif model is not None and model not in known:
                known[model] = [*map(enter, *model.leaves()[:2])]
            own = known[model] if model is not None else []
            self.own.append(len(own))
            self.owned.append([*own, *[enter(tensor, "input") for tensor in inputs]])
        self.call.leaves, self.call.kinds = [*leaves.values()], kinds

    def _leave_out_unreached(self, answers: Sequence[ChunkAnswer]) -> None:
        """Detach the doubtful leaves that no chunk used: the graph that made them may be freed, and
        torch must not run it.
        """
        if not any(self.doubts.values()):
            return
        asked: set[int] = set()
        for chunk, owned in zip(self.chunks, self.owned, strict=True):
            if not chunk.detach:
                asked.update(owned[k] for k in self.doubts[chunk.tracker])
        reached: set[int] = set()
        for owned, answer in zip(self.owned, answers, strict=True):
            reached.update(owned[k] for k in answer.reply.reached)
        for at in asked - reached:
            self.call.leaves[at] = self.call.leaves[at].detach()

    def _write_means(self, answers: Sequence[ChunkAnswer]) -> None:
        """Apply what chunks changed in place, where buffers get the mean over the chunks."""
        written = [(answer.reply.written, answer.attachments) for answer in answers]
        if any(one is not None for one, _ in written):
            tracker = self.chunks[0].tracker
            tracker.write_back(*written[0], tracker.means(written))

    def _note_parts(self) -> None:
        marks = {tracker: (tracker.versions(), tracker.mark()) for tracker in self.trackers}
        for i, (chunk, graph) in enumerate(zip(self.chunks, self.graphs, strict=True)):
            part = None
            if graph is not None:
                mark, after = marks[chunk.tracker]
                synced = self.call.synced
                if i in self.made and (synced is None or synced.gathered is not None):
                    before_and_after = self.marks[chunk.tracker], after
                    graph.recipe = replay.forward(
                        *self.made[i],
                        chunk.tracker,
                        chunk.slot,
                        before_and_after,
                        gathered=(synced.gathered if synced is not None else None) or (),
                    )
                part = ReductionPart(
                    chunk.slot,
                    graph,
                    chunk.tracker,
                    mark=mark,
                    leaves=self.owned[i],
                    first=i == 0,
                    own=self.own[i],
                    gradient_dtype=self.settings.gradient_dtype,
                    holds=self.settings.holds,
                )
            self.call.parts.append(part)

    def _unloadable(self, answers: Sequence[ChunkAnswer]) -> TransferError | None:
        """The error that names what the replica of the first failed chunk could not load, if that
        is why it failed, and if it can be found here.
        """
        failed = (at for at, answer in enumerate(answers) if answer.reply.failure is not None)
        first = next(failed, None)
        if first is None:
            return None
        chunk, failure = self.chunks[first], answers[first].reply.failure
        if failure is None or not failure.loading:
            return None
        why = failure.text.strip().splitlines()[-1]
        if failure.loading == "module":
            return codec.unloadable(chunk.tracker.module, "module", why)
        return codec.unloadable(*chunk.message(), why)

    def _outputs(self, answers: Sequence[ChunkAnswer]) -> list[Any]:
        unpacked = [
            codec.unpack(a.reply.value, a.attachments, c.tracker.device) if a.reply.value else []
            for c, a in zip(self.chunks, answers, strict=True)
        ]
        if self.place is not None:
            unpacked = [[tensor.to(self.place) for tensor in row] for row in unpacked]
        if self.token is not None:
            joined = self.joins and not batch.registered
            joined = joined and codec.in_rows([a.reply.value for a in answers])
            autograd.attach(self.call, self.token, self.handle, unpacked, joined)
        else:
            for tensor in itertools.chain.from_iterable(unpacked):
                tensor.requires_grad_(False)
        values = [
            codec.load(a.reply.value, row)
            for a, row in zip(answers, unpacked, strict=True)
            if a.reply.value
        ]
        if self.capture is not None:
            self.capture.parts = [value.captured for value in values]
        for chunk, value in zip(self.chunks, values, strict=True):
            if isinstance(value, Produced):
                chunk.tracker.rebind(value.rebound)
        return [value.output if isinstance(value, Produced) else value for value in values]


def runs_module(called: Called) -> bool:
    """Whether what is called is the module itself, perhaps with a loss behind it."""
    return called is None or isinstance(called, LossCall)


def _refuse_own(chunk: ForwardChunk, tensors: Sequence[Tensor]) -> None:
    """Refuse parameters of the model in a loss, or in a function while they are trained in the
    replicas: each call would send them as they are here, where they may lack steps.

    Raises:
        ValueError: One of the tensors that are sent is such a parameter.
    """
    called, tracker = chunk.called, chunk.tracker
    inner = called.called if isinstance(called, WithAttributes) else called
    is_loss = isinstance(inner, LossCall)
    if called is None or isinstance(called, str) or not (is_loss or tracker.training is not None):
        return
    if not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
        return
    own = {id(p) for p in tracker.module.parameters()}
    if not any(id(tensor) in own for tensor in tensors):
        return
    # The arguments may have them: these are given in each call.
    if any(id(tensor) in own for tensor in codec.tensors_in(called, "function")):
        raise ValueError(LOSS_HAS_PARAMETERS if is_loss else _FUNCTION_HAS_PARAMETERS)


def _origins(chunk: ForwardChunk) -> Origins | None:
    """The origins of the functions among what is called, and of those that prepare arguments."""
    called = chunk.called
    if called is None and not chunk.kwargs and {*map(type, chunk.args)} <= {Tensor}:
        return None  # nearly every call
    preparations = batch.preparations((chunk.args, chunk.kwargs))
    given: tuple[Any, ...] = ()
    if isinstance(called, WithAttributes):
        given, called = tuple(called.attributes.values()), called.called
    own = (called.criterion, called.count) if isinstance(called, LossCall) else (called,)
    parts = [part for part in own if callable(part)]
    found = [module_sources.origins_of(part) for part in (*parts, *given, *preparations)]
    known = [origins for origins in found if origins is not None]
    if len(known) < 2:
        return known[0] if known else None
    sources = {name: one for origins in known for name, one in origins.sources.items()}
    return known[0]._replace(sources=sources)


def _failed(answers: Sequence[ChunkAnswer]) -> bool:
    """Whether a chunk raised an exception."""
    return any(answer.reply.failure is not None for answer in answers)

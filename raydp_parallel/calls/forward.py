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
from raydp_parallel.calls.dispatcher import Dispatcher, KnownObjects, apply_effects
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
from raydp_parallel.state.hidden_attributes import is_missed, is_not_shown
from raydp_parallel.state.shared_objects import SharedObjects
from raydp_parallel.state.tracker import Mark, ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.group_messages import Relay
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import (
    Arguments,
    Called,
    ForwardRequest,
    Origins,
    OutputGraph,
    Produced,
    Reply,
    StateUpdate,
    StoredObject,
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
        shared: The objects among the arguments that the caller has, and that forward may change;
            None if that does not reach the caller.
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
    shared: SharedObjects | None = None

    def message(self) -> tuple[Any, str]:
        """What the replica gets, and its name in an error about a part of it."""
        if self.kwargs or self.called is not None:
            return Arguments(self.args, self.kwargs, self.called), ""
        return self.args, "inputs"

    def refuse_own(self, tensors: Sequence[Tensor]) -> None:
        """Refuse parameters of the model in a loss, or in a function while they are trained in the
        replicas: each call would send them as they are here, where they may lack steps.

        Raises:
            ValueError: One of the tensors that are sent is such a parameter.
        """
        called, tracker = self.called, self.tracker
        inner = called.called if isinstance(called, WithAttributes) else called
        is_loss = isinstance(inner, LossCall)
        if called is None or isinstance(called, str):
            return
        if not (is_loss or tracker.training is not None):
            return
        if not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            return
        own = {id(p) for p in tracker.module.parameters()}
        if not any(id(tensor) in own for tensor in tensors):
            return
        # The arguments may have them: these are given in each call.
        if any(id(tensor) in own for tensor in codec.tensors_in(called, "function")):
            raise ValueError(LOSS_HAS_PARAMETERS if is_loss else _FUNCTION_HAS_PARAMETERS)

    def origins(self) -> Origins | None:
        """The origins of the functions among what is called, and of those that prepare
        arguments.
        """
        called = self.called
        if called is None and not self.kwargs and {*map(type, self.args)} <= {Tensor}:
            return None  # nearly every call
        preparations = batch.preparations((self.args, self.kwargs))
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


class ForwardSpec(NamedTuple):
    """What a forward is asked to compute: the same each time that it runs.

    Attributes:
        executor: What runs it.
        chunks: Its chunks.
        trackers: Their modules, each once.
        settings: What the wrapper wants of it.
        context: The state of torch that its chunks run with.
        capture: Takes outputs of submodules; None if none are asked for.
        seed: What its random numbers follow from.
        threads: Torch's threads for each chunk; None leaves them.
        mapped: Whether it computes one of several batches, see `MapCall`.
        node: What backward needs to know of it.
    """

    executor: Executor
    chunks: Sequence[ForwardChunk]
    trackers: Sequence[ModuleTracker]
    settings: CallSettings
    context: ambient_state.CallContext
    capture: Capture | None
    seed: int
    threads: int | None
    mapped: bool
    node: autograd.CallNode

    def slots_of(self, tracker: ModuleTracker) -> list[ReplicaSlot]:
        """The slots of a module's chunks."""
        return [chunk.slot for chunk in self.chunks if chunk.tracker is tracker]


class LeafPlan(NamedTuple):
    """The leaves of a call, each once, and which of them each chunk has.

    Attributes:
        leaves: The leaves.
        kinds: Their kinds, as in `CallNode`.
        owned: For each chunk the numbers of its leaves, in the order of its replica: those of its
            model, then its inputs.
        own: For each chunk how many of these are its model's.
    """

    leaves: list[Tensor]
    kinds: list[str]
    owned: list[list[int]]
    own: list[int]


def plan_leaves(
    chunks: Sequence[ForwardChunk], inputs: Sequence[Sequence[Tensor]], grad: bool
) -> LeafPlan:
    """Collect the leaves of a call.

    Args:
        chunks: Its chunks.
        inputs: The inputs of each that a gradient may be asked for.
        grad: Whether it is to be differentiated.
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

    owned: list[list[int]] = []
    sizes: list[int] = []
    for chunk, found in zip(chunks, inputs, strict=True):
        model = chunk.tracker if grad and not chunk.detach else None
        if model is not None and not leaves:
            # A model's tensors are distinct: those of the first are entered all at once.
            tensors, names, _ = model.leaves()
            leaves, kinds = dict(enumerate(tensors)), [*names]
            index = dict(zip(map(id, tensors), leaves, strict=True))
            known[model] = [*leaves]
        elif model is not None and model not in known:
            known[model] = [*map(enter, *model.leaves()[:2])]
        own = known[model] if model is not None else []
        sizes.append(len(own))
        owned.append([*own, *[enter(tensor, "input") for tensor in found]])
    return LeafPlan([*leaves.values()], kinds, owned, sizes)


def _is_made_by_graph(tensor: Tensor) -> bool:
    """Whether a graph of torch's made a tensor, apart from cutting a leaf into chunks."""
    node = tensor.grad_fn
    if node is None or node.name() != "ScatterBackward":
        return node is not None
    return any(
        made is not None and not hasattr(made, "variable") for made, _ in node.next_functions
    )


class ToldChunk(NamedTuple):
    """What was noted of a chunk when its message was made.

    Attributes:
        inputs: The inputs that a gradient may be asked for.
        doubtful: See `ForwardRequest`.
        made: The message, and what it was made with, to make the graph again; None if it is not.
    """

    inputs: list[Tensor]
    doubtful: tuple[int, ...]
    made: tuple[ForwardRequest, replay.KeptForward] | None


class ForwardAttempt:
    """One run of a forward: the messages of its chunks, and what the driver notes of them, and does
    besides, until the answers are there.

    A forward runs again if a replica lacked modules, or if an edit was found too late; all of this
    is then made anew. The jobs refer to the attempt, and it refers to neither them nor the call.

    Args:
        spec: What is to be computed.

    Attributes:
        relays: The ways of new contents from replica to replica, until all answers are there.
        sends: The bytes of each update of a module's state that was sent.
        verified: Whether the contents that were sent are those that the modules had.
    """

    def __init__(self, spec: ForwardSpec) -> None:
        self._spec = spec
        self._graphs = [RemoteGraph() if spec.context.grad else None for _ in spec.chunks]
        self._handle = GraphHandle([graph for graph in self._graphs if graph is not None])
        self._ways = {tracker: self._way(tracker) for tracker in spec.trackers}
        # What `look` finds, then what each message was made with, then what `meanwhile` finds.
        self._marks: dict[ModuleTracker, Mark] = {}
        self._doubts: dict[ModuleTracker, tuple[int, ...]] = {}
        self.relays: dict[ModuleTracker, WeightRelay | None] = {}
        self._told: dict[int, ToldChunk] = {}
        self.sends: list[int] = []
        self._plan = LeafPlan([], [], [], [])
        self.verified = True

    def jobs(self) -> list[ChunkCall]:
        """The call of each chunk."""
        return [
            ChunkCall(
                chunk.slot,
                "forward",
                functools.partial(self._request, number),
                model=chunk.tracker.id,
                makes=self._graphs[number],
                rows=chunk.rows,
                on_answer=self._answer_taker(chunk.tracker),
            )
            for number, chunk in enumerate(self._spec.chunks)
        ]

    def look(self) -> None:
        """See what changed in the modules, before the first message is made. The caller holds the
        executor's lock: other threads may send the same modules.
        """
        if self._marks:
            return  # chunks that exchange tensors are all sent again if a replica dies
        spec = self._spec
        for tracker in spec.trackers:
            tracker.sync()  # [2]
            if tracker.training is not None:
                tracker.training.check()
            if why := tracker.structure.why():
                spec.executor.recorder.changed(why)
        self._marks = {tracker: tracker.mark() for tracker in spec.trackers}
        self._doubts = {tracker: self._doubtful(tracker) for tracker in spec.trackers}
        self.relays = {tracker: self._begin_relay(tracker) for tracker in spec.trackers}

    def _request(self, number: int, slot: ReplicaSlot, attachments: Attachments) -> ForwardRequest:
        """The message for one chunk. The caller holds the executor's lock.

        If a replica dies, it is called again, for another slot.
        """
        spec, chunk, graph = self._spec, self._spec.chunks[number], self._graphs[number]
        settings, tracker, synced = spec.settings, chunk.tracker, spec.node.synced
        part = None if synced is None else synced.part(number, slot)
        value, root = chunk.message()
        # Before it is pickled: a module of which the file was changed is sent by value.
        origins = chunk.origins()
        grad = spec.context.grad
        refs: dict[Any, int] = {}
        parcel, tensors = codec.encode(value, attachments, root, requires_grad=grad, refs=refs)
        if refs and settings.per_sample and not chunk.rows:
            raise ValueError(
                "Options(rng='per_sample'): the rows of chunks are not known, because all "
                "arguments are ChunkRefs; give one tensor with these rows, such as their numbers"
            )
        chunk.refuse_own(tensors)
        inputs = [t for t in tensors if t.requires_grad] if grad else []
        name = slot.name_of(tracker.id, chunk.slot)
        news = None
        if tracker.training is not None:  # before the update: this may bring the master up to date
            together = part is not None
            news = tracker.training.news(slot, name, attachments, together=together)
        update, relay = self._update(number, slot, name, attachments)
        samples = None
        if settings.per_sample:
            samples = sum(before.rows for before in spec.chunks[:number]), chunk.rows
        request = ForwardRequest(
            model=name,
            update=update,
            graph=graph.key if graph is not None else None,
            chunk=number,
            where=chunk.where,
            inputs=parcel,
            context=spec.context,
            seed=spec.seed,
            threads=spec.threads,
            write_back=(number == 0 or settings.means) and not spec.mapped,
            capture=spec.capture.names if spec.capture is not None else (),
            detach=chunk.detach,
            alone=chunk.alone,
            doubtful=self._doubtful_of(chunk, inputs),
            forget=slot.contents.forget(),
            overlay=replay.overlay(self._marks[tracker], attachments),
            relay=relay,
            by_host=devices.is_cpu(tracker.device),
            origins=origins,
            part=part,
            samples=samples,
            compiled=settings.compiled if runs_module(chunk.called) else None,
            stored=tuple([attachments.place(StoredObject(ref)) for ref in refs]),
            shared=0 if chunk.shared is None or spec.mapped else len(chunk.shared.found),
            follows=chunk.alone and not spec.mapped,
        )
        made = None
        if graph is not None and spec.executor.replays:
            kept = replay.keep(parcel, tensors, "arguments", copied=settings.holds)
            made = request, kept._replace(refs=[*refs])
        self._told[number] = ToldChunk(inputs, request.doubtful, made)
        return request if news is None else request._replace(training=news)

    def _doubtful(self, tracker: ModuleTracker) -> tuple[int, ...]:
        """The numbers of a model's leaves of which replicas say whether a chunk used them. Where
        unused ones get nothing, those with hooks too: torch calls these with None for whatever its
        graph has and gives nothing to.
        """
        doubtful = tracker.doubtful()
        if self._spec.node.unused == "none":
            hooks = enumerate(map(_hooks, tracker.leaves()[0]))
            hooked = [k for k, found in hooks if found != (None, None)]
            doubtful = (*doubtful, *[k for k in hooked if k not in doubtful])
        return doubtful

    def _doubtful_of(self, chunk: ForwardChunk, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """The numbers of a chunk's leaves of which its replica says whether they were used: those
        of its model, and inputs that a graph made, which may be freed by the time of backward.
        """
        made = [at for at, tensor in enumerate(inputs) if _is_made_by_graph(tensor)]
        if chunk.detach:
            return tuple(made)
        if not made:
            return self._doubts[chunk.tracker]
        own = len(chunk.tracker.leaves()[0])
        return (*self._doubts[chunk.tracker], *[own + at for at in made])

    def _update(
        self, number: int, slot: ReplicaSlot, name: int, attachments: Attachments
    ) -> tuple[StateUpdate | None, Relay | None]:
        """What a slot's replica needs of the state; the recorder counts it."""
        before, tracker = len(self.sends), self._spec.chunks[number].tracker
        relay = self.relays[tracker]
        update: StateUpdate | None = None
        message: Relay | None = None
        passed = None
        if relay is not None:
            passed = relay.update(number, slot, name, attachments, self.sends.append)
        if passed is not None:
            update, message = passed
        elif not self._is_late(number, slot.contents.held.get(name, 0)):
            update = replay.update(tracker, slot, name, attachments, self.sends.append)
        sent = sum(self.sends[before:])
        if update is not None and update.structure is not None and sent > _MUCH:
            log.info("sending %.0f MB of %s to %s", sent / 1e6, type(tracker.module).__name__, slot)
        self._spec.executor.recorder.state(slot, tracker.id, sent, tracker.structure.size)
        return update, message

    def _is_late(self, number: int, held: int) -> bool:
        """Whether a chunk's replica does without what is new, because that is buffers which this
        forward does not read.
        """
        spec, chunk = self._spec, self._spec.chunks[number]
        tracker = chunk.tracker
        trains = tracker.training is not None and tracker.module.training
        late = spec.settings.late_buffers and number > 0 and not spec.mapped
        plain = trains and late and runs_module(chunk.called)
        return plain and tracker.only_reported_since(held)

    def _way(self, tracker: ModuleTracker) -> RelayRoute | None:
        """The way for a model's new contents from replica to replica, if there is to be one."""
        slots, executor = self._spec.slots_of(tracker), self._spec.executor
        if len(slots) < 2 or not executor.exchanges:
            return None
        return route(executor.groups, slots, size_of(tracker, tracker.module))

    def _begin_relay(self, tracker: ModuleTracker) -> WeightRelay | None:
        way = self._ways[tracker]
        if way is None:
            return None
        chunks = {}
        for number, chunk in enumerate(self._spec.chunks):
            if chunk.tracker is tracker:
                chunks[number] = chunk.slot
                if self._is_late(number, chunk.slot.contents.held.get(tracker.id, 0)):
                    return None
        return begin_relay(self._spec.executor.groups, way, tracker, chunks)

    def _answer_taker(self, tracker: ModuleTracker) -> Callable[[Reply | None], None] | None:
        """A function that tells the model's relay, if there is to be one, of an answer at once:
        replicas wait for each other in it.
        """
        if self._ways[tracker] is None:
            return None

        def take(reply: Reply | None) -> None:
            relay = self.relays.get(tracker)
            if relay is not None:
                relay.take_answer(reply)

        return take

    def meanwhile(self) -> None:
        """Plan torch's graph, and verify contents, while the replicas work."""
        spec, node = self._spec, self._spec.node
        inputs = [self._told[number].inputs for number in range(len(spec.chunks))]
        self._plan = plan_leaves(spec.chunks, inputs, spec.context.grad)
        node.leaves, node.kinds = self._plan.leaves, self._plan.kinds
        # With doubtful leaves the answers say which of them take part.
        if node.leaves and not self._in_doubt:
            autograd.fork(node)
        verified = [tracker.verify(wholly=False) for tracker in spec.trackers]  # [5]
        self.verified = all(verified)

    def abandon(self) -> None:
        """Release what replicas, or an exception's traceback, may keep alive for long."""
        for relay in self.relays.values():
            if relay is not None:
                relay.abandon()
        for graph in self._graphs:
            if graph is not None:
                graph.drop()

    @property
    def _in_doubt(self) -> bool:
        """Whether the answers say of some leaves whether they take part."""
        return any(told.doubtful for told in self._told.values())

    def leave_out_unreached(self, answers: Sequence[ChunkAnswer]) -> None:
        """Detach the doubtful leaves that no chunk used: the graph that made them may be freed, and
        torch must not run it.
        """
        if not self._in_doubt:
            return
        asked: set[int] = set()
        for number, owned in enumerate(self._plan.owned):
            asked.update(owned[k] for k in self._told[number].doubtful)
        reached: set[int] = set()
        for owned, answer in zip(self._plan.owned, answers, strict=True):
            reached.update(owned[k] for k in answer.reply.reached)
        leaves = self._spec.node.leaves
        for at in asked - reached:
            leaves[at] = leaves[at].detach()

    def parts(self) -> list[ReductionPart | None]:
        """What backward needs to know of each chunk, once effects were applied; and how each graph
        is made again.
        """
        spec, synced = self._spec, self._spec.node.synced
        marks = {tracker: (tracker.versions(), tracker.mark()) for tracker in spec.trackers}
        parts: list[ReductionPart | None] = []
        for i, (chunk, graph) in enumerate(zip(spec.chunks, self._graphs, strict=True)):
            if graph is None:
                parts.append(None)
                continue
            mark, after = marks[chunk.tracker]
            made = self._told[i].made
            if made is not None and (synced is None or synced.gathered is not None):
                before_and_after = self._marks[chunk.tracker], after
                graph.recipe = replay.forward(
                    *made,
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
                leaves=self._plan.owned[i],
                first=i == 0,
                own=self._plan.own[i],
                gradient_dtype=spec.settings.gradient_dtype,
                holds=spec.settings.holds,
            )
            parts.append(part)
        return parts

    def keep_copies(self, number: int, written: Sequence[Tensor]) -> None:
        """Keep copies of a chunk's arguments that are going to be written to as the chunk did."""
        made = self._told[number].made
        if written and made is not None:
            made[1].copy_before(written)

    def attach(
        self, outputs: Sequence[list[Tensor]], joined: bool, graph: OutputGraph | None
    ) -> None:
        """Make the outputs of each chunk part of torch's graph."""
        node = self._spec.node
        if node.token is not None:
            autograd.attach(node, node.token, self._handle, outputs, joined=joined, graph=graph)
            return
        for tensor in itertools.chain.from_iterable(outputs):
            tensor.requires_grad_(False)


class ForwardCall:
    """One forward, in two steps: `send`, and `outputs`. While the replicas work, the driver plans
    torch's graph and verifies contents.

    Args:
        executor: What runs it.
        chunks: Its chunks.
        unused: What unused parameters get.

    Attributes:
        spec: What is to be computed.
        sent: The calls of its last attempt; None while there are none.
    """

    def __init__(
        self, executor: Executor, chunks: Sequence[ForwardChunk], unused: UnusedGrads
    ) -> None:
        trackers = list(dict.fromkeys([chunk.tracker for chunk in chunks]))
        of_map, context, wanted = mapping.get(), ambient_state.capture(), settings.get()
        if of_map is not None:
            context = context._replace(grad=False)
        capture = capturing.get()
        if capture is not None and capture.module is not chunks[0].tracker.module:
            capture = None
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        node = autograd.CallNode(executor, [], [], unused)
        if wanted.balance is not None:
            places = [(chunk.slot, chunk.rows) for chunk in chunks]
            node.times = ChunkTimes(wanted.balance, places)
        if SyncBatchNorm.made:
            slots = [chunk.slot for chunk in chunks]
            node.synced = synced_call.plan(executor, slots, [chunk.tracker for chunk in chunks])
        for tracker in trackers:
            if wanted.holds:  # else nothing is written: another thread may do so now
                tracker.holds = True
        if node.synced is not None and wanted.compiled is not None:
            raise ValueError(
                "Options(compile=...): synchronised batch norm cannot be compiled, because chunks "
                "exchange tensors in the midst of it"
            )
        at_once = None if of_map is None else of_map.at_once
        self.spec = ForwardSpec(
            executor=executor,
            chunks=chunks,
            trackers=trackers,
            settings=wanted,
            context=context,
            capture=capture,
            seed=seed,
            threads=executor.replica_set.backend.threads(at_once or len(chunks)),
            mapped=of_map is not None,
            node=node,
        )
        self._place = None if of_map is None else of_map.place
        self._sends: list[int] = []
        self._attempt: ForwardAttempt | None = None
        self._together: list[ChunkAnswer] = []
        self.sent: Dispatcher | None = None
        if of_map is not None:
            of_map.calls.append(self)

    def send(self) -> ForwardCall:
        """Send the chunks; returns the call."""
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise
        return self

    def outputs(self) -> list[Any]:
        """Wait for the chunks' outputs, once. They are part of torch's graph."""
        try:
            return self._take()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.sent = None

    def abandon(self) -> None:
        """Stop waiting, and release what an exception's traceback may keep alive for long."""
        if self._attempt is not None:
            self._attempt.abandon()
        sent, self.sent = self.sent, None
        if sent is not None:
            sent.abandon()

    def _begin(self) -> None:
        """Begin an attempt."""
        spec, synced = self.spec, self.spec.node.synced
        spec.executor.revive([chunk.slot for chunk in spec.chunks])
        for tracker in spec.trackers:
            if spec.settings.compiled is not None:
                tracker.show()
            if training_record.trainings:
                training_record.bring_up_to_date(tracker.module, tracker.training)
            if tracker.training is not None:
                tracker.training.bring_along(spec.slots_of(tracker), synced is not None)
        self.sent = spec.node.token = None
        attempt = self._attempt = ForwardAttempt(spec)
        if synced is not None:
            self._together = synced.run(attempt.jobs(), attempt.look, attempt.meanwhile)
            return
        self.sent = Dispatcher(spec.executor.replica_set, attempt.jobs())
        self.sent.send(attempt.look, attempt.meanwhile)

    def _wait(self) -> tuple[list[ChunkAnswer], ForwardAttempt]:
        """The answers of the last attempt, and the attempt."""
        attempt = self._attempt
        assert attempt is not None
        answers = self._together if self.sent is None else self.sent.answers()
        attempt.relays = {}
        self._sends += attempt.sends
        return answers, attempt

    def _take(self) -> list[Any]:
        spec, node = self.spec, self.spec.node
        answers, attempt = self._wait()
        failed = any(answer.reply.failure is not None for answer in answers)
        while failed and (self._show(answers) or spec.executor.send_code(answers)):
            self._begin()
            answers, attempt = self._wait()
            failed = any(answer.reply.failure is not None for answer in answers)
        reruns = 0
        while not attempt.verified and reruns < _MOST_RERUNS:
            self._begin()
            answers, attempt = self._wait()
            reruns += 1
        totals = spec.executor.replica_set.totals
        totals.forwards += 1
        totals.reruns += reruns
        totals.state_sends += len(self._sends)
        totals.state_bytes += sum(self._sends)
        if node.times is not None:
            node.times.note("forward", range(len(answers)), answers)
        gathered = answers[0].reply.gathered
        if node.synced is not None and gathered is not None:
            on_cpu = torch.device("cpu")
            node.synced.gathered = codec.unpack(gathered, answers[0].attachments, on_cpu)
        attempt.leave_out_unreached(answers)
        if node.token is None and node.leaves:
            autograd.fork(node)
        # [8]
        first: ModuleTracker | None = spec.chunks[0].tracker
        if spec.settings.means and len(answers) > 1:
            self._write_means(answers)
            first = None
        try:
            apply_effects([(first if i == 0 else None, a) for i, a in enumerate(answers)])
        except Exception as error:
            named = self._unloadable(answers)
            if named is None:
                raise
            raise named from error
        node.parts = attempt.parts()
        return self._outputs(attempt, answers)  # [9]

    def _show(self, answers: Sequence[ChunkAnswer]) -> bool:
        """Show replicas the attributes that were hidden from them, if one missed some; returns
        whether to run the call again.
        """
        again = False
        with self.spec.executor.replica_set.lock:
            for chunk, answer in zip(self.spec.chunks, answers, strict=True):
                failure = answer.reply.failure
                if failure is not None and is_missed(failure):
                    # Another call may have let it be shown meanwhile.
                    again |= chunk.tracker.show() or is_not_shown(failure)
        return again

    def _write_means(self, answers: Sequence[ChunkAnswer]) -> None:
        """Apply what chunks changed in place, where buffers get the mean over the chunks."""
        written = [(answer.reply.written, answer.attachments) for answer in answers]
        if any(one is not None for one, _ in written):
            tracker = self.spec.chunks[0].tracker
            tracker.write_back(*written[0], tracker.means(written))

    def _unloadable(self, answers: Sequence[ChunkAnswer]) -> TransferError | None:
        """The error that names what the replica of the first failed chunk could not load, if that
        is why it failed, and if it can be found here.
        """
        failed = (at for at, answer in enumerate(answers) if answer.reply.failure is not None)
        first = next(failed, None)
        if first is None:
            return None
        chunk, failure = self.spec.chunks[first], answers[first].reply.failure
        if failure is None or not failure.loading:
            return None
        why = failure.text.strip().splitlines()[-1]
        if failure.loading == "module":
            return codec.unloadable(chunk.tracker.module, "module", why)
        return codec.unloadable(*chunk.message(), why)

    def _outputs(self, attempt: ForwardAttempt, answers: Sequence[ChunkAnswer]) -> list[Any]:
        chunks, capture = self.spec.chunks, self.spec.capture
        unpacked = [
            codec.unpack(a.reply.value, a.attachments, c.tracker.device) if a.reply.value else []
            for c, a in zip(chunks, answers, strict=True)
        ]
        if self._place is not None:
            unpacked = [[tensor.to(self._place) for tensor in row] for row in unpacked]
        joined = self.spec.settings.joins and capture is None and len(chunks) > 1
        joined = joined and devices.is_cpu(chunks[0].tracker.device) and not batch.registered
        joined = joined and codec.in_rows([a.reply.value for a in answers])
        attempt.attach(unpacked, joined, answers[0].reply.output_graph)
        known: Any = ()
        if chunks[0].alone:
            shared = chunks[0].shared
            known = KnownObjects(chunks[0].tracker, () if shared is None else shared.found)
        values = [
            codec.load(a.reply.value, row, known)
            for a, row in zip(answers, unpacked, strict=True)
            if a.reply.value
        ]
        if capture is not None:
            capture.parts = [value.captured for value in values]
        for number, (chunk, value) in enumerate(zip(chunks, values, strict=True)):
            if isinstance(value, Produced):
                chunk.tracker.rebind(value.rebound, value.stored)
                if chunk.shared is not None and value.changes:
                    attempt.keep_copies(number, chunk.shared.written(value.changes))
                    chunk.shared.refill(value.changes)
        return [value.output if isinstance(value, Produced) else value for value in values]


def runs_module(called: Called) -> bool:
    """Whether what is called is the module itself, perhaps with a loss behind it."""
    return called is None or isinstance(called, LossCall)

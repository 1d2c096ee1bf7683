"""One call: all chunks run forward, each on its slot's replica.

The numbers are those of the journey in `wrapper`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import batch
from raydp_parallel.batch import Keywords
from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import groups
from raydp_parallel.driver.autograd import CallNode, GraphHandle, Part, attach
from raydp_parallel.driver.backward import differentiate
from raydp_parallel.driver.dispatcher import Call, Flight, RemoteGraph, copied
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.gradients import Numbers
from raydp_parallel.driver.loss import LossCall
from raydp_parallel.driver.resident import Trainable
from raydp_parallel.errors import StateChanged, TransferError
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica import exceptions
from raydp_parallel.state import sources
from raydp_parallel.state.mirror import Leaf
from raydp_parallel.state.run import versions_of
from raydp_parallel.wire import pickling
from raydp_parallel.wire.codec import Parcel, parcel
from raydp_parallel.wire.messages import Answer, Failure, ForwardRequest, Seat, StateUpdate, Terms

Called = str | Callable[..., object] | None
"""A method's name, a function that takes the module first, or None for the module itself."""

_NO_MODULE = nn.Module()

_numbers = itertools.count(1)
"""Numbers of objects of Ray's store that replicas get beside messages."""


@dataclass(eq=False, repr=False, init=False)
class RemoteReplica:
    """A module's replica on a device of the cluster. Called like the module; gradients reach the
    module itself.

    It is the module as it is when called: edits since `replicate` are seen. Methods and submodules
    can be called, too.
    """

    module: nn.Module  # the master copy
    device_id: DeviceId  # where the replica runs
    _slot: ReplicaSlot
    _executor: Executor
    _detach: bool  # the module's parameters get no gradients
    _unused: UnusedGrads  # those that no chunk used; all replicas of a call have the same
    _writes: bool  # back to the module, as the first one does
    _called: Called = None  # in place of the module's forward

    def __init__(self, **parts: object) -> None:
        vars(self).update({"_called": None, **parts})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set on a replica: set it on the module")

    def __getattr__(self, name: str) -> Any:
        # A value of the module's, or a method or submodule to be called there.
        if name.startswith("__") or self.__dict__.get("_called", "") is not None:
            raise AttributeError(f"RemoteReplica has no attribute {name!r}")
        value = getattr(self.module, name)
        if not callable(value):
            return value
        if hasattr(nn.Module, name) and name != "forward":
            raise AttributeError(
                f"RemoteReplica has no attribute {name!r}: the replica's module is in another "
                "process. Change the module before the call, and read it after the call"
            )
        return replace(self, _called=name)

    @ambient.uncompiled
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the replica. An exception of the module is raised as it is, as a plain call would."""
        chunk = self.chunk(args, kwargs)
        with self._executor.replica_set.lock:  # nobody else's call may come between
            return start([chunk]).finish()[0]

    def chunk(
        self, args: object, kwargs: Keywords, dim: int = 0, number: int | None = None
    ) -> ForwardChunk:
        """Make a chunk of arguments for this replica. An exception names its number, if any."""
        prefix = None if number is None else f"in replica {number} on device {self.device_id}"
        positional = tuple(args) if isinstance(args, (list, tuple)) else (args,)
        rows = next(batch.sizes((positional, kwargs), dim), 0)
        return ForwardChunk(self, positional, kwargs, prefix, rows)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_slot": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        vars(self)["_slot"] = self._executor.slots([self.device_id])[0]

    def __repr__(self) -> str:
        return f"RemoteReplica({type(self.module).__name__} on {self._slot})"


class ForwardChunk(NamedTuple):
    """One chunk of a call, as it is given."""

    replica: RemoteReplica  # that it is for
    args: tuple[object, ...]
    kwargs: dict[str, object]
    error_prefix: str | None  # the place that an exception names; None raises it as it is
    rows: int  # how many it has


class ForwardCall(Call):
    """The forward of one chunk, and of its graph again after a death."""

    master: Trainable

    def __init__(self, terms: Terms, master: Trainable, given: ForwardChunk) -> None:
        replica, called = given.replica, given.replica._called
        work = given.rows, type(replica.module).__name__
        super().__init__(replica._slot, "forward", master=master, work=work)
        self.terms, self.given = terms, given
        numbers = defaultdict[object, int](_numbers.__next__)
        args, kwargs = batch.numbered((given.args, given.kwargs), numbers)
        self.refs = {number: ref for ref, number in numbers.items()}
        try:
            self._arguments = parcel((called, args, kwargs), "")
        except TransferError:
            parcel(called, "function")  # raises the error with a path that the program knows
            parcel(args, "inputs")
            parcel(kwargs, "kwargs")
            raise
        ambient.refuse_tangents(self._arguments.tensors)
        # The program's own tensors that gradients may be asked for.
        self.inputs = [t for t in self._arguments.tensors if terms.context.grad and t.requires_grad]
        if isinstance(called, LossCall) and not terms.chunk:  # all chunks have the same
            refuse_own_parameters(replica.module, parcel(called, "function").tensors)
        self.overlay: dict[int, Tensor] | None = None  # None until the forward is over
        self._update: StateUpdate | None = None
        self._spread: Seat | None = None  # its place among those with the same weights

    @property
    def executor(self) -> Executor:
        """The executor that runs it."""
        return self.given.replica._executor

    def note_state(self, copies: bool, *seats: Seat | None) -> None:
        """Note the module's state, and give the chunk a graph if it may have one. The call may
        need ``copies`` of its arguments, and has seats in the group of its layers, and of weights.
        """
        seat, self._spread = seats
        self.terms, master = self.terms._replace(group=seat), self.master
        steps = 0 if master.resident is None else master.resident.weights.steps
        tensors = self._arguments.tensors
        # They may be needed after the call, when the program loads others into their memory: by
        # `map`, and until a step in the replicas is made.
        if copies or master.resident is not None:
            tensors = copied(tensors)
            self._arguments = self._arguments._replace(tensors=tensors)
        # What the forward found: the state, its structure, the replicas' steps, versions among its
        # arguments, and the tensors that required a gradient.
        state = master.revision, master.structure.bytes
        self._before = *state, steps, versions_of(tensors), master.leaves
        self.makes = None
        if self.terms.context.grad and (master.leaves or self.inputs):
            self.makes = RemoteGraph(next(self.executor.keys))
            if seat is None:
                self.makes.recipe = [self]

    def prepare(self, slot: ReplicaSlot) -> None:
        """Give a slot's replica the weights of now, and the objects of Ray's store."""
        master = self.master
        if master.resident is not None:
            master.resident.weights.supply(slot)
        self._update = self.executor.dispatcher.update(master, slot)
        for number, ref in self.refs.items():
            slot.client.deliver(number, ref)

    def request(self, slot: ReplicaSlot, attempt: int) -> ForwardRequest:
        """Make the request."""
        update, spread = self._update, self._spread
        if update is not None and spread is not None and not attempt:
            update = update._replace(spread=spread)
            if spread.rank != spread.root:
                update = update._replace(parts=(), size=0)
        # Hooks on a parameter that is not used would be called with None.
        unused, leaves = self.given.replica._unused == "none", self.master.leaves
        asked = [leaf.tensor for leaf in leaves if unused or leaf.kind == "attribute"]
        return ForwardRequest(
            self.terms,
            model=self.master.number,
            update=update,
            key=None if self.makes is None else self.makes.key,
            arguments=self._arguments,
            overlay=None if self.overlay is None else {**self.overlay},
            asked=tuple([self.master.records[id(t)].tag for t in asked]),
            refs=tuple(self.refs),
        )

    def release(self) -> None:
        """Keep the arguments' memory for another run, and not the program's tensors."""
        # With the same versions.
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in self._arguments.tensors]
        self._arguments = Parcel(self._arguments.skeleton, tensors)
        self._update = None
        self.work = Call.work  # another run is no call
        # The caller's may be freed.
        replica, self.inputs = replace(self.given.replica, module=_NO_MODULE, _called=None), []
        self.given = self.given._replace(replica=replica, args=(), kwargs={})

    def changed(self) -> str | None:
        """Say what is not as the forward found it."""
        master, (revision, structure, steps, versions, leaves) = self.master, self._before
        if master.structure.module() is None:
            return "the module is gone"
        trained = None if master.resident is None else master.resident.weights
        # A step on its way was made before all that the program has done since.
        coming = trained is not None and trained.coming is not None
        master.look_at_tensors() if coming else master.look()
        what = master.changed_since(revision, structure, self.overlay or ())
        if what is None and [id(o.tensor) for o in leaves] != [id(o.tensor) for o in master.leaves]:
            what = "the requires_grad of a parameter"
        if what is None and versions_of(self._arguments.tensors) != versions:
            what = "one of the arguments"
        if trained is not None and trained.steps != steps:
            what = "the weights, by a step of the optimizer,"
        return None if what is None else f"{what} was changed"

    def explain(self, failure: Failure) -> Failure:
        """Say what one row lacks; and raise an error for arguments, or a module, that cannot be
        loaded here either.
        """
        given = self.given
        if given.rows == 1 and "more than 1 value per channel" in failure.text:
            text = (
                "This chunk has 1 row, and batch norm needs 2 in each: "
                "DataLoader(..., drop_last=True), or fewer devices"
            )
            return failure._replace(text=failure.text + text)
        parts = {"function": given.replica._called, "inputs": given.args, "kwargs": given.kwargs}
        parts["module"] = given.replica.module
        for name, part in parts.items() if failure.loading else ():
            try:
                exceptions.reraise(failure, "")
            except Exception as error:
                pickling.refuse_unloadable(part, name, error, failure.text.splitlines()[-1])
        return failure


def refuse_own_parameters(module: nn.Module, carried: Sequence[Tensor]) -> None:
    """Refuse a criterion that has the module's parameters: they would be sent with each call."""
    own = {id(p) for p in module.parameters()} if carried else ()
    if any([id(t) in own for t in carried]):
        raise ValueError(
            "with_loss: the criterion has parameters of the model: let a method of the module "
            "compute the loss, for model.call(), or give a function of the output alone"
        )


def start(chunks: Sequence[ForwardChunk], at_once: int | None = None) -> Forward:
    """Send all chunks of a call. So many chunks of several calls may run ``at_once``."""
    ambient.refuse_transforms()
    executor = chunks[0].replica._executor
    context, dispatcher = ambient.capture(), executor.dispatcher
    with executor.replica_set.calling():
        # One number of the caller's generator: the same seed repeats all chunks (row A10).
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        threads = executor.replica_set.threads(at_once or len(chunks))
        sources.current()  # what was edited since its import travels by value, with arguments, too
        calls: list[ForwardCall] = []
        for i, given in enumerate(chunks):
            replica = given.replica
            master = executor.master(replica.module)
            writes = replica._writes and master not in [c.master for c in calls if c.terms.reports]
            terms = Terms(i, context, threads, given.error_prefix, writes, seed)
            calls.append(ForwardCall(terms, master, given))
        masters = [*dict.fromkeys([call.master for call in calls])]
        slots = [given.replica._slot for given in chunks]
        together = groups.have_layers([given.replica.module for given in chunks], slots)
        while True:
            for master in masters:
                if (resident := master.resident) is not None:
                    resident.collect()
                master.look()  # [2] look
                if resident is not None and master.trained_was_edited:
                    resident.recall()
            seats = groups.of_layers(dispatcher, slots) if together else ()
            spread: Sequence[Seat] = ()
            if len(masters) == 1:
                lacking = partial(masters[0].bytes_to_send, [slot.revisions for slot in slots])
                spread = groups.direct(dispatcher, slots, lacking)
            for call, *places in itertools.zip_longest(calls, seats, spread):
                call.note_state(at_once is not None, *places)
            handle = GraphHandle([call.makes for call in calls if call.makes is not None])
            grouped = bool(seats or spread)
            flight = dispatcher.start(Flight(calls, grouped, together))
            # Replicas compute now, and this process has time.
            edited = [master.verify() for master in masters]  # [5] verify
            if not any(edited):
                return Forward(calls, flight, handle)
            # Contents had changed behind their versions: the same forward, with these.
            with contextlib.suppress(StateChanged):  # a death had it run again
                dispatcher.finish(flight)
            dispatcher.totals.reruns += 1


@dataclass
class Forward:
    """A call whose chunks were sent."""

    calls: Sequence[ForwardCall]  # the chunks
    flight: Flight  # their requests
    handle: GraphHandle  # frees their graphs

    def finish(self, lend: bool = False) -> list[object]:
        """Do to the module what the answers say, and return the outputs.

        Args:
            lend: True if outputs may lie in memory that the next call overwrites, where all that
                gather makes of them is new. The caller holds the executor's lock until then.
        """
        dispatcher = self.calls[0].executor.dispatcher
        with dispatcher.replica_set.lock:  # answers lie in windows until their outputs are taken
            with dispatcher.replica_set.calling():
                answers = dispatcher.finish(self.flight)  # [7] wait
                # The weights have arrived: who fails now has left no group, but for layers'.
                self.flight.grouped = self.flight.together
                dispatcher.totals.forwards += 1
                overlays = {c.master: c.master.overlay() for c in self.calls if c.makes is not None}
                for call in self.calls:
                    call.overlay = overlays.get(call.master)
                dispatcher.effects(self.flight, answers)
            outputs: list[Parcel] = []
            lend = lend and not batch.registered
            for call, answer in zip(self.calls, answers, strict=True):
                device, row = call.master.device, []
                assert answer.output is not None
                for t in answer.output.tensors:
                    mine = t.detach().to(device)
                    if not (lend and answer.anew) and mine.device == t.device:
                        mine = mine.clone()
                    row.append(mine.requires_grad_(t.requires_grad and call.makes is not None))
                outputs.append(Parcel(answer.output.skeleton, row))
            rows = [output.tensors for output in outputs]
            if any([t.requires_grad for row in rows for t in row]):
                self._attach(answers, rows)
            return [output.load() for output in outputs]

    def _attach(self, answers: Sequence[Answer], rows: list[list[Tensor]]) -> None:
        """Make the outputs part of torch's graph."""
        leaves: list[Leaf] = []
        known: dict[tuple[int, bool], int] = {}

        def number(chosen: Sequence[Leaf], reached: bytes) -> Numbers:
            """Number leaves. A parameter that is also an input is two: replicas may keep one's
            gradient.
            """
            found: list[int | None] = []
            for leaf, there in zip(chosen, reached, strict=True):
                key = id(leaf.tensor), leaf.kind == "input"
                if there and key not in known:
                    known[key] = len(leaves)
                    leaves.append(leaf)
                found.append(known[key] if there else None)
            return found

        marks = {master: master.mark() for master in {call.master for call in self.calls}}
        # Where chunks reach the same leaves.
        alike: dict[tuple[Trainable, bytes], Numbers] = {}
        parts: dict[int, Part] = {}
        for call, answer, row in zip(self.calls, answers, rows, strict=True):
            if call.makes is None or not any([t.requires_grad for t in row]):
                continue
            master, count = call.master, len(call.master.leaves)
            key = master, bytes(count) if call.given.replica._detach else answer.reached[:count]
            if key not in alike:
                alike[key] = number(master.leaves, key[1])
            inputs = number([Leaf(t, "input") for t in call.inputs], answer.reached[count:])
            leads = marks[master], [*alike[key], *inputs]
            parts[call.terms.chunk] = Part(call.makes, call.terms, call.slot, master, *leads)
        for call in self.calls:
            call.release()
        # All chunks take part in backward, or none.
        together = self.flight.together and len(parts) == len(self.calls)
        call = self.calls[0]
        unused = call.given.replica._unused
        node = CallNode(call.executor, leaves, unused, together, parts, differentiate)
        attach(node, self.handle, dict(enumerate(rows)))  # [9] attach

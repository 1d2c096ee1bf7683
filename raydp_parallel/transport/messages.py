"""The messages between the driver and a replica, as named tuples. `message_bytes` makes bytes of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from raydp_parallel.devices.ambient_state import CallContext
from raydp_parallel.devices.ranges import TensorSpec
from raydp_parallel.transport.group_messages import Reduce, Reduced, Relay, TakePart


class ModuleSource(NamedTuple):
    """The source of a module.

    Attributes:
        file: Its file.
        digest: The digest of the text; empty if the file has been changed since.
    """

    file: str
    digest: str


class Origins(NamedTuple):
    """The driver's search path and its modules, so that replicas load the same.

    Attributes:
        process: The driver's process.
        paths: Its search path, in order.
        installed: The entries of the path that belong to Python and to installed packages.
        sources: The sources of the modules that it has loaded, by name.
    """

    process: str
    paths: tuple[str, ...]
    installed: tuple[str, ...]
    sources: Mapping[str, ModuleSource]


class ChunkRef:
    """Stands among a chunk's arguments for an object in Ray's object store.

    Args:
        ref: The reference; in a message the object's number in `ForwardRequest.stored`.
        prepare: What makes the argument of the object; None for the object itself.
    """

    __slots__ = ("prepare", "ref")

    def __init__(self, ref: Any, prepare: Callable[[Any], Any] | None) -> None:
        self.ref = ref
        self.prepare = prepare

    def __reduce__(self) -> Any:
        # Pickling a reference keeps its object for ever; a message does not pickle it.
        raise TypeError("a reference to an object of Ray's can only be an argument of a call")


class StoredObject(NamedTuple):
    """An object in Ray's object store that the receiver of a message gets by itself.

    Attributes:
        ref: The reference.
    """

    ref: Any


class Parcel(NamedTuple):
    """One nested value in a message: its structure, and the places of its tensors.

    Attributes:
        skeleton: The pickled value, with tensors replaced by their index in ``specs``.
        specs: One spec per tensor; a `SpecRow` where they are the same in each step.
        packet: The packet that a link made of the tensors' bytes.
    """

    skeleton: bytes
    specs: tuple[TensorSpec, ...]
    packet: Any


Called = str | Callable[..., Any] | None
"""What a call runs: None is the module itself, a name one of its methods, and a function gets the
module before the arguments.
"""


class Arguments(NamedTuple):
    """The arguments of a module's call, under the names that errors use.

    Attributes:
        inputs: Positional.
        kwargs: By keyword.
        function: What gets them.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    function: Called = None


class Produced(NamedTuple):
    """The results of one chunk's forward.

    Attributes:
        output: What the module returned.
        captured: For each captured submodule's name the list of its outputs.
        rebound: Attributes that got new values: index among ``module.modules()``, name, value.
        changes: What those objects hold now that the arguments share with the caller, and that the
            forward changed, by their numbers. See `state.shared_objects`.
        stored: What objects of the module's attributes hold now, of those that it changed, by their
            keys; see `ModuleParts`.
    """

    output: Any
    captured: dict[str, list[Any]]
    rebound: tuple[tuple[int, str, Any], ...]
    changes: dict[int, Any]
    stored: dict[tuple[Any, ...], Any]


class Blob(NamedTuple):
    """The contents of some blocks of a model.

    Attributes:
        blocks: Block ids.
        offsets: The offset of each block in the packet.
        sizes: The size of each block in bytes.
        packet: The packet that a link made of the bytes.
    """

    blocks: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    packet: Any


class SlotSpec(NamedTuple):
    """One tensor of a model: its place in a block, its shape and its type.

    Attributes:
        block: The block it lies in.
        offset: Its first element, counted in its own dtype from the block's start.
        tensor: Its dtype, sizes, strides, class and whether it requires a gradient.
    """

    block: int
    offset: int
    tensor: TensorSpec


class Structure(NamedTuple):
    """A model without the bytes of its tensors.

    Attributes:
        module: The pickled module, with tensors as slot ids.
        origins: The search path and the source files of the driver's modules.
        slots: The spec of every slot, by id.
        block_sizes: The size in bytes of every block, by id.
        specials: Slots of tensors that are not plain strided views of a storage, and their parcel.
        objects: How many objects each attribute holds, by number of the submodule and name.
        hidden: The names of attributes that are left out, by number of the submodule.
    """

    module: bytes
    origins: Origins
    slots: dict[int, SlotSpec]
    block_sizes: dict[int, int]
    specials: tuple[tuple[int, ...], Parcel] | None
    objects: dict[tuple[int, str], int]
    hidden: dict[int, tuple[str, ...]]


class StateUpdate(NamedTuple):
    """The changes of a model since the revision that a replica holds. Most updates contain only
    versions.

    Attributes:
        model: The model's id.
        revision: The revision the replica holds afterwards.
        bumped: Slots with a new version in the driver.
        structure: The structure, None if it has not changed.
        edits: Plain attributes that changed: index among ``module.modules()``, name, value.
        flags: Slots with a new ``requires_grad``, and its value.
        blobs: New contents.
        report: The number of the last `WriteBack` that the driver applied.
        kept: The blocks among the new contents that equal those of that report: the replica that
            sent it has them.
    """

    model: int
    revision: int
    bumped: tuple[int, ...]
    structure: Structure | None = None
    edits: tuple[tuple[int, str, Any], ...] = ()
    flags: tuple[tuple[int, bool], ...] = ()
    blobs: tuple[Blob, ...] = ()
    report: int = 0
    kept: tuple[int, ...] = ()


class ForwardRequest(NamedTuple):
    """One chunk's forward.

    Attributes:
        model: The model to run.
        update: The state to adopt first, None if the replica is up to date.
        graph: The key to keep the graph under; None keeps none.
        chunk: Which chunk of the call this is.
        where: The chunk and device for an exception's text; None leaves exceptions unchanged.
        inputs: The parcel of the `Arguments`, or of the positional ones alone, which the module
            itself gets.
        context: The caller's ambient torch state.
        seed: The call's seed.
        threads: The number of torch's threads on a CPU; None leaves it unchanged.
        write_back: Whether in-place changes of state are reported.
        capture: Names of submodules that return their outputs too.
        detach: Whether the module's own tensors get no gradients.
        alone: Whether attributes that the forward rebinds are returned, and changes of objects
            that the caller has, as upstream's call on a single device keeps them.
        doubtful: Leaves of the graph, by number, for which the driver asks whether the outputs
            depend on them.
        forget: Graph keys and models that the driver no longer needs.
        overlay: The state at the time of the original call, where write-backs have changed it
            since.
        graph_only: Whether the call runs again only for its graph, after a death: the outputs are
            known already.
        relay: The relay by which the update's contents arrive here, or are passed on; None if they
            are in the message and for this replica only.
        by_host: Whether the driver needs the answer on its CPU, so that memory of a GPU that both
            use is not the fastest way.
        origins: The origins of a function among the `Arguments`; None if there is none, or if it
            is not imported from a file.
        training: What the replica's optimizer does before the forward; None for nothing.
        part: How the chunk exchanges tensors with the others; None if it does not.
        samples: The number of the chunk's first row in the batch, and its rows, if random numbers
            follow from them; None if they follow from the chunk's number.
        compiled: The settings of `torch.compile` for the module; None runs it as it is.
        played: With ``graph_only``: the parcel of what the chunks had gathered then, a tuple.
        stored: The attachments that are objects in Ray's object store, by the numbers that
            `ChunkRef`s among the `Arguments` have.
        shared: How many objects the driver found among the arguments that the caller has, and that
            forward may change.
        follows: Whether changes of objects that the module's attributes hold are returned.
    """

    model: int
    update: StateUpdate | None
    graph: int | None
    chunk: int
    where: str | None
    inputs: Parcel
    context: CallContext
    seed: int
    threads: int | None
    write_back: bool
    capture: tuple[str, ...]
    detach: bool
    alone: bool
    doubtful: tuple[int, ...]
    forget: Forget | None
    overlay: Overlay | None = None
    graph_only: bool = False
    relay: Relay | None = None
    by_host: bool = False
    origins: Origins | None = None
    training: TrainingNews | None = None
    part: TakePart | None = None
    samples: tuple[int, int] | None = None
    compiled: Mapping[str, Any] | None = None
    played: Parcel | None = None
    stored: tuple[int, ...] = ()
    shared: int = 0
    follows: bool = False


class Holding(NamedTuple):
    """Gradients of the model's leaves that stay in a replica, or stayed there before.

    Attributes:
        key: The key to keep this backward's under; None answers them.
        rows: Which of the leaves that concerns.
        added: What is added to them: a key, whether all that was kept under it is used up, and
            pairs of a row there and one of the leaves.
    """

    key: int | None
    rows: tuple[int, ...]
    added: tuple[tuple[int, bool, tuple[tuple[int, int], ...]], ...]


class BackwardRequest(NamedTuple):
    """The gradients that one chunk's outputs received.

    Attributes:
        model: The model of the graph.
        graph: The graph for which gradients of leaves are requested.
        outputs: The outputs to differentiate: the key of that graph, or of one derived from it,
            with the indices of the outputs.
        grads: The parcel of their gradients, in that order.
        needed: Which of the leaves' gradients are requested.
        partial: Whether the caller asked for a subset of what requires gradients.
        keep: Whether the graph is kept (``retain_graph``).
        derived: With ``create_graph``: the key to keep the derived graph under.
        bumped: Slots with a new version in the driver since the forward.
        write_back: Whether in-place changes of state are reported.
        threads: The number of torch's threads on a CPU; None leaves it unchanged.
        context: The caller's ambient torch state.
        forget: Graph keys and models that the driver no longer needs.
        reduce: Gradients to be summed among replicas, None if the driver sums.
        kept: If given, nothing is differentiated: the gradients kept under this key are requested.
        by_host: As in `ForwardRequest`.
        training: What the replica's optimizer does before; None for nothing.
        part: As in `ForwardRequest`.
        narrow: The dtype that gradients of the model's leaves get if theirs is wider, and how many
            of the leaves, the first ones, those are; None leaves them as they are.
        stays: How many of the leaves, the first ones, have gradients that other replicas read where
            they lie, and not the driver.
        hold: The gradients that stay here, or stayed here before; None for none.
        early: Whether large gradients may leave a GPU while backward runs.
        inner: Outputs, by number, that the gradients are requested of, in place of those of leaves.
        whole: Outputs, by number, of which the given gradients stand for what comes from other
            outputs, too.
        noted: Outputs, by number, of which the gradients are returned besides.
    """

    model: int
    graph: int
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    grads: Parcel
    needed: tuple[bool, ...]
    partial: bool
    keep: bool
    derived: int | None
    bumped: tuple[int, ...]
    write_back: bool
    threads: int | None
    context: CallContext
    forget: Forget | None
    reduce: Reduce | None = None
    kept: int | None = None
    by_host: bool = False
    training: TrainingNews | None = None
    part: TakePart | None = None
    narrow: tuple[torch.dtype, int] | None = None
    stays: int = 0
    hold: Holding | None = None
    early: bool = False
    inner: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    noted: tuple[int, ...] = ()


class TrainingEntry(NamedTuple):
    """One entry of the record of a model's optimizer in the replicas.

    Attributes:
        number: Its number; a replica enters each once.
        value: The parcel of a `TrainingStart`, a `TrainingStep` or a `TrainingClip`; or a
            `TrainingSum`, or a `TrainingHandover`.
    """

    number: int
    value: Parcel | TrainingSum | TrainingHandover


class TrainingNews(NamedTuple):
    """The entries of the record of a model's optimizer that a replica lacks.

    Attributes:
        entries: The entries, in order.
        anew: Whether the first is a start, which replaces all that the replica has.
    """

    entries: tuple[TrainingEntry, ...]
    anew: bool


class TrainingStart(NamedTuple):
    """An optimizer and the parameters that it trains, at one moment.

    Attributes:
        kind: The optimizer's class.
        keywords: What it was made with, besides the parameters.
        options: Of each group its options.
        slots: Of each group the slots of its parameters.
        weights: The parameters' contents, of all groups in order.
        state: What the optimizer keeps of each parameter; None if nothing.
        common: What it keeps besides.
    """

    kind: Any
    keywords: dict[str, Any]
    options: tuple[dict[str, Any], ...]
    slots: tuple[tuple[int, ...], ...]
    weights: tuple[Any, ...]
    state: tuple[dict[Any, Any] | None, ...]
    common: dict[Any, Any]


class TrainingHandover(NamedTuple):
    """What a replica begins with that takes over from another one.

    Attributes:
        start: The parcel of a `TrainingStart` without options, weights and state.
        snapshot: The parcel of the other one's `TrainingSnapshot`.
        key: The key under which this replica keeps the bytes of that; None if the parcel has them.
    """

    start: Parcel
    snapshot: Parcel
    key: int | None


class LeaveSnapshot(NamedTuple):
    """Asks for a `TrainingSnapshot` with bytes for other replicas: they are left in memory
    that these read, or kept.

    Attributes:
        key: The key to keep them under; None leaves them.
    """

    key: int | None


class PassSnapshot(NamedTuple):
    """Pass the bytes of a snapshot on to other members of a group, or take them from there.

    Attributes:
        key: The key under which they are kept.
        group: The group.
        root: The member that has them.
        size: Their number.
        patience: Seconds that this may take.
    """

    key: int
    group: str
    root: int
    size: int
    patience: float


class GradientTerms(NamedTuple):
    """A gradient that the replicas have.

    Attributes:
        zeros: Whether the terms are added to zeros, and not to the first of them.
        terms: Of each term the key of a backward's sums, and its number among them.
    """

    zeros: bool
    terms: tuple[tuple[int, int], ...]


class SumRow(NamedTuple):
    """One gradient of a `TrainingSum`.

    Attributes:
        dtype: Its dtype's name.
        shape: Its sizes.
        stride: Its strides, without gaps.
        size: The number of its elements.
        places: Of each chunk that has one, in order: the chunk's number, and its first byte there.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int
    places: tuple[tuple[int, int], ...]


class TrainingSum(NamedTuple):
    """Gradients of one backward, where the replicas left them: each replica adds them up.

    Attributes:
        key: The key under which the sums are kept.
        layout: Pickled, of each gradient the fields of its `SumRow`; the same bytes in each step.
        packets: The packets with the gradients of each chunk.
    """

    key: int
    layout: bytes
    packets: tuple[Any, ...]


class TrainingStep(NamedTuple):
    """One step of an optimizer.

    Attributes:
        options: Of each group the options that the driver has changed.
        grads: Of each parameter its gradient, or its `GradientTerms`, or None.
        threads: The number of torch's threads in the driver: a sum of many numbers, as for a norm,
            depends on it in its last bits.
        seed: What random numbers follow from, alike in all replicas.
        number: Which step of the training it is, for errors.
    """

    options: tuple[dict[str, Any], ...]
    grads: tuple[Any, ...]
    threads: int
    seed: int
    number: int


class TrainingClip(NamedTuple):
    """Clip gradients that the replicas have, and keep the result.

    Attributes:
        grads: Of each parameter the `GradientTerms`, or None.
        key: The key under which the results are kept, in this order.
        max_norm: The norm that all together have at most; None to clip each value.
        norm: Their norm, where ``max_norm`` is given.
        value: The value that each element has at most; None to clip by norm.
    """

    grads: tuple[GradientTerms | None, ...]
    key: int
    max_norm: float | None
    norm: Any
    value: float | None


class GradientNorm(NamedTuple):
    """Asks for the norm of gradients that the replicas have.

    Attributes:
        grads: Of each parameter the `GradientTerms`, or None.
        norm_type: The kind of norm.
        threads: As in `TrainingStep`.
    """

    grads: tuple[GradientTerms | None, ...]
    norm_type: float
    threads: int


class TrainingSnapshot(NamedTuple):
    """What an optimizer in a replica has made so far.

    Attributes:
        options: As in `TrainingStart`.
        weights: As in `TrainingStart`.
        state: As in `TrainingStart`.
        common: As in `TrainingStart`.
    """

    options: tuple[dict[str, Any], ...]
    weights: tuple[Any, ...]
    state: tuple[dict[Any, Any] | None, ...]
    common: dict[Any, Any]


Wanted = str | int | GradientNorm | LeaveSnapshot | PassSnapshot | None
"""What a `TrainingRequest` asks for."""


class TrainingRequest(NamedTuple):
    """A word about a model's optimizer that no other call carries.

    Attributes:
        model: The model.
        training: What the replica's optimizer does first; None for nothing.
        wanted: What the answer has: ``"snapshot"`` for a `TrainingSnapshot`, the key of gradients
            that the replica keeps, a `GradientNorm`, or None for nothing; or what is done with a
            snapshot for other replicas.
        forget: Graph keys and models that the driver no longer needs.
        by_host: As in `ForwardRequest`.
    """

    model: int
    training: TrainingNews | None
    wanted: Wanted
    forget: Forget | None = None
    by_host: bool = False


class Forget(NamedTuple):
    """The objects that the driver no longer needs; part of the next call.

    Attributes:
        graphs: Keys of graphs, and of gradients that were kept.
        models: Ids of models.
    """

    graphs: tuple[int, ...]
    models: tuple[int, ...]


class Overlay(NamedTuple):
    """The state at an earlier time, for one forward that runs again.

    Attributes:
        slots: The slots that have changed since.
        tensors: The parcel of their contents at that time, a tuple.
        undone: Whether the present state is restored after the forward.
    """

    slots: tuple[int, ...]
    tensors: Parcel
    undone: bool


class WriteBack(NamedTuple):
    """State that a forward changed in place.

    Attributes:
        report: The unique number of the report.
        slots: The slots that changed, with whether their version moved (it does not for edits
            through ``.data``).
        blob: The present contents of their blocks.
        replaced: The slots that were given other memory (``self.x.data = ...``), which may have
            another shape or dtype.
        tensors: The parcel of these slots' present tensors, a tuple.
    """

    report: int
    slots: tuple[tuple[int, bool], ...]
    blob: Blob
    replaced: tuple[int, ...]
    tensors: Parcel


class Failure(NamedTuple):
    """An exception in a replica, for the driver.

    Attributes:
        kind: Pickled exception class, None if it cannot be pickled.
        name: Its qualified name.
        text: The formatted traceback.
        where: The replica, in upstream's words; None leaves the exception unchanged.
        exception: The pickled exception itself, where it can be pickled and ``where`` is None.
        exit: Whether the module asked the process to end.
        loading: What the replica could not load, "inputs" or "module"; "" if it was something else.
        entry: The entry of an optimizer's record that raised it, and that counts as made, as far as
            it came; 0 if it was something else.
    """

    kind: bytes | None
    name: str
    text: str
    where: str | None
    exception: bytes | None
    exit: bool
    loading: str = ""
    entry: int = 0


class CaughtWarning(NamedTuple):
    """A warning raised in a replica.

    Attributes:
        category: Its pickled class.
        text: Its message.
        filename: The file in which it was raised.
        lineno: Its line there.
    """

    category: bytes
    text: str
    filename: str
    lineno: int


class Reply(NamedTuple):
    """A replica's answer to a forward or backward.

    Attributes:
        value: The parcel of the outputs, or of the leaves' gradients.
        written: In-place changes of state, None if there were none.
        warnings: The warnings.
        failure: The exception that was raised.
        seconds: Seconds that the replica's device worked on it.
        revision: The revision that the replica holds of the model now, 0 for none.
        size: Bytes of tensors in the answer.
        reached: The doubtful leaves that the outputs depend on.
        laps: The times at which each of the replica's phases began and the last one ended, by its
            clock; see `monitoring.accounts`.
        memory: Bytes of the GPU's memory that are allocated, and the most that were; None on a CPU,
            and in most answers.
        reduced: The result of summing gradients among replicas, if that was requested.
        missed: Whether nothing was done, because contents from another replica did not arrive.
        passed: Bytes that this replica passed on to other replicas, or left for them.
        training: The number of the last entry that the model's optimizer has made; 0 if the
            replica has none, -1 if that is not known.
        gathered: The parcel of what the chunks of a forward gathered, a tuple; only chunk 0 has it,
            and None if the forward cannot be run again alone.
        stayed: For each row of the request's `Holding` whether a gradient of it stayed.
        left: The keys of earlier gradients of the request's `Holding` that the replica still has.
        hooked: The parcel of the `HookChanges` of a backward; None for nothing.
        output_graph: How the outputs of the only chunk's forward hang together; None for not.
        noted: The parcel of the gradients of outputs that were asked for besides, a tuple.
    """

    value: Parcel | None = None
    written: WriteBack | None = None
    warnings: tuple[CaughtWarning, ...] = ()
    failure: Failure | None = None
    seconds: float = 0.0
    revision: int = 0
    size: int = 0
    reached: tuple[int, ...] = ()
    laps: tuple[float, ...] = ()
    memory: tuple[int, int] | None = None
    reduced: Reduced | None = None
    missed: bool = False
    passed: int = 0
    training: int = -1
    gathered: Parcel | None = None
    stayed: bytes = b""
    left: tuple[int, ...] = ()
    hooked: Parcel | None = None
    output_graph: OutputGraph | None = None
    noted: Parcel | None = None


class OutputGraph(NamedTuple):
    """How the outputs of a forward hang together.

    Attributes:
        depends: For an output the others that it was computed from, by number, but those by way of
            others.
        order: The outputs that were computed, in the order in which that was.
        retained: The outputs that keep their gradient (``retain_grad``).
    """

    depends: dict[int, tuple[int, ...]]
    order: tuple[int, ...]
    retained: tuple[int, ...]


class Package(NamedTuple):
    """A module or a package, as files.

    Attributes:
        name: Its name.
        digest: The digest of its contents.
        files: The paths of its files, relative to a folder for Python's path, and their contents.
    """

    name: str
    digest: str
    files: tuple[tuple[str, bytes], ...]

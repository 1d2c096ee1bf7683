"""What crosses the process wall, each a named frozen type. How they become bytes is
`message_bytes`'s matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from raydp_parallel.devices.ambient_state import CallContext
from raydp_parallel.devices.specs import TensorSpec
from raydp_parallel.transport.group_messages import Reduce, Reduced, Relay
from raydp_parallel.transport.module_origins import Origins


class Parcel(NamedTuple):
    """One nested value on its way: its structure, and where its tensors lie.

    Attributes:
        skeleton: The pickled value, with tensors replaced by their index in ``specs``.
        specs: One spec per tensor.
        packet: The tensors' bytes, as the link wrapped them.
    """

    skeleton: bytes
    specs: tuple[TensorSpec, ...]
    packet: Any


class Arguments(NamedTuple):
    """What a module is called with, under the names that errors use.

    Attributes:
        inputs: Positional.
        kwargs: By keyword.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class Produced(NamedTuple):
    """What one chunk's forward gives.

    Attributes:
        output: What the module returned.
        captured: For each captured submodule's name the list of its outputs.
        rebound: Attributes that got new values: index among ``module.modules()``, name, value.
    """

    output: Any
    captured: dict[str, list[Any]]
    rebound: tuple[tuple[int, str, Any], ...]


class Blob(NamedTuple):
    """The contents of some blocks of a model.

    Attributes:
        blocks: Block ids.
        offsets: Where each block starts in the packet.
        sizes: How many bytes each has.
        packet: The bytes, as the link wrapped them.
    """

    blocks: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    packet: Any


class SlotSpec(NamedTuple):
    """One tensor of a model: which bytes it shows, and as what.

    Attributes:
        block: The block it lies in.
        offset: Its first element, counted in its own dtype from the block's start.
        tensor: Its dtype, sizes, strides, class and whether it requires a gradient.
    """

    block: int
    offset: int
    tensor: TensorSpec


class Structure(NamedTuple):
    """A model but for the bytes of its tensors.

    Attributes:
        module: The pickled module, with tensors as slot ids.
        origins: Where the driver's process finds its modules, and what they are made of.
        slots: The spec of every slot, by id.
        block_sizes: The size in bytes of every block, by id.
        specials: Slots of tensors that are no plain window on a storage, and the parcel of them.
    """

    module: bytes
    origins: Origins
    slots: dict[int, SlotSpec]
    block_sizes: dict[int, int]
    specials: tuple[tuple[int, ...], Parcel] | None


class StateUpdate(NamedTuple):
    """What of a model changed since the revision that a replica holds. Mostly no more than
    versions.

    Attributes:
        model: The model's id.
        revision: The revision the replica holds afterwards.
        bumped: Slots whose version moved in the driver.
        structure: The structure, None where it is as it was.
        edits: Plain attributes that changed: index among ``module.modules()``, name, value.
        flags: Slots whose ``requires_grad`` changed, with the new value.
        blobs: New contents.
        report: The last `WriteBack` that the driver took over, by its number.
        kept: The blocks among the new contents that are as that one reported them: the replica that
            did has them.
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
        update: What to adopt first, None if the replica is up to date.
        graph: The key to keep the graph under; None keeps none.
        chunk: Which chunk of the call this is.
        where: Names chunk and device in an exception's text; None leaves exceptions as they are.
        inputs: The parcel of the `Arguments`, or of the positional ones alone.
        context: The caller's ambient torch state.
        seed: The call's seed.
        threads: Torch's threads, on a CPU; None leaves them.
        write_back: Whether in-place changes of state are reported.
        capture: Names of submodules whose outputs come back too.
        detach: Whether the module's own tensors take no gradients.
        alone: Whether attributes that the forward rebinds come back, as with one device of
            upstream's.
        doubtful: Leaves of the graph, by number, of which the driver asks whether the outputs
            depend on them.
        forget: Graph keys and models that the driver no longer needs.
        overlay: State as it was when the call was first made, where write-backs have changed it
            since.
        graph_only: Whether the call runs again for its graph alone, after a death: the outputs are
            known already.
        relay: How the update's contents come here, or go on from here; None if they come with the
            message for this replica alone.
        by_host: Whether the answer is wanted on the driver's CPU: memory of a GPU that both use
            would be a detour.
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


class BackwardRequest(NamedTuple):
    """The gradients that one chunk's outputs received.

    Attributes:
        model: The model that the graph came from.
        graph: The graph whose leaves are asked for.
        outputs: What is differentiated: by the key of a graph, that one's or of one derived from
            it, indices of its outputs.
        grads: The parcel of their gradients, in that order.
        needed: Which of the leaves are asked for.
        partial: Whether the caller asked for a subset of what requires gradients.
        keep: Whether the graph is kept (``retain_graph``).
        derived: With ``create_graph``: the key to keep the derived graph under.
        bumped: Slots whose version moved in the driver since the forward.
        write_back: Whether in-place changes of state are reported.
        threads: Torch's threads, on a CPU; None leaves them.
        context: The caller's ambient torch state.
        forget: Graph keys and models that the driver no longer needs.
        reduce: Gradients to be summed among replicas, None if the driver sums.
        kept: Nothing is differentiated: the gradients are asked for that are kept under this key.
        by_host: As in a forward.
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


class Forget(NamedTuple):
    """What the driver no longer needs; rides on the next call.

    Attributes:
        graphs: Keys of graphs, and of gradients that were kept.
        models: Ids of models.
    """

    graphs: tuple[int, ...]
    models: tuple[int, ...]


class Overlay(NamedTuple):
    """State as it was at an earlier moment, for one forward that runs again.

    Attributes:
        slots: The slots that are different now.
        tensors: The parcel of their contents then, a tuple.
        undone: Whether the state is to be today's again, once the forward has run.
    """

    slots: tuple[int, ...]
    tensors: Parcel
    undone: bool


class WriteBack(NamedTuple):
    """State that a forward changed in place.

    Attributes:
        report: The report's number, which no other one has.
        slots: The slots that changed, with whether their version moved (it does not for edits
            through ``.data``).
        blob: The blocks in which they lie, as they are now.
        replaced: Those slots that were given other memory (``self.x.data = ...``), maybe of another
            shape or dtype.
        tensors: The parcel of what they show now, a tuple.
    """

    report: int
    slots: tuple[tuple[int, bool], ...]
    blob: Blob
    replaced: tuple[int, ...]
    tensors: Parcel


class Failure(NamedTuple):
    """An exception on its way to the driver.

    Attributes:
        kind: Pickled exception class, None if it cannot be pickled.
        name: Its qualified name.
        text: The formatted traceback.
        where: Which replica, in upstream's words; None leaves the exception as it was.
        exception: The pickled exception itself, where it can be pickled and ``where`` is None.
        exit: Whether the module asked the process to end.
    """

    kind: bytes | None
    name: str
    text: str
    where: str | None
    exception: bytes | None
    exit: bool


class CaughtWarning(NamedTuple):
    """A warning raised in a replica.

    Attributes:
        category: Its pickled class.
        text: Its message.
        filename: Where it was raised.
        lineno: Its line there.
    """

    category: bytes
    text: str
    filename: str
    lineno: int


class Reply(NamedTuple):
    """What a replica answers to a forward or backward.

    Attributes:
        value: The parcel of the outputs, or of the leaves' gradients.
        written: In-place changes of state, None if there were none.
        warnings: What was warned.
        failure: What was raised instead of an answer.
        seconds: How long the replica's device worked on it.
        revision: The revision that the replica holds of the model now, 0 for none.
        size: Bytes of tensors in the answer.
        reached: Those of the doubtful leaves that the outputs depend on.
        laps: When each of the replica's phases began, and when the last ended, by its clock; see
            `phases`.
        memory: Bytes of the GPU's memory that are allocated, and the most that were; None on a CPU,
            and mostly.
        reduced: What came of summing gradients among replicas, if that was asked for.
        missed: Whether nothing was done, because contents did not arrive that another replica was
            to pass on.
        passed: Bytes that this replica passed on to others.
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


class Package(NamedTuple):
    """A module or a package, as files.

    Attributes:
        name: Its name.
        digest: Names its contents.
        files: Their paths, from the folder that goes on Python's path, and what is in them.
    """

    name: str
    digest: str
    files: tuple[tuple[str, bytes], ...]

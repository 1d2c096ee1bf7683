"""Requests of the driver and answers of a replica.

A request says all that one chunk needs: a replica keeps models by number and graphs by key, and
nothing else from call to call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from raydp_parallel.devices.ambient import CallContext
from raydp_parallel.wire.codec import Parcel, Row
from raydp_parallel.wire.windows import Cuts, Spec, Window


class SlotSpec(NamedTuple):
    """One tensor of a module, as a replica makes it.

    Attributes:
        parameter: True if it is a Parameter.
        grad: True if it requires a gradient.
        window: Which of the model's windows holds it; None if its contents are sent.
        offset: Where it lies there.
        shape: Its shape, with a window.
        stride: Its strides there.
        dtype: Its dtype there.
    """

    parameter: bool
    grad: bool
    window: int | None = None
    offset: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: Any = None


class RunSpec(NamedTuple):
    """The layout of contents that lie in one run of memory.

    Attributes:
        key: Its number.
        slots: The slots, in the order of the specs.
        specs: The tensors' geometry.
        cuts: The rows among them.
    """

    key: int
    slots: tuple[int, ...]
    specs: tuple[Spec, ...]
    cuts: Cuts


class StateNews(NamedTuple):
    """Changes of the master since the state that a replica has, but for contents.

    Attributes:
        structure: The module without contents of tensors; None if it is as it was.
        code: Code objects that the structure names by number, pickled.
        sources: The driver's modules, see `state.sources`; None if nothing is new.
        specs: Tensors that are new, or of another geometry, by slot.
        run: The layout of the run in which contents lie; None if it is as it was.
        ranges: The changed parts of the run.
        slots: The slots of tensors whose contents come one by one.
        versions: The version of each tensor with other contents, as the master counts it.
    """

    structure: bytes | None
    code: bytes | None
    sources: Any
    specs: dict[int, SlotSpec]
    run: RunSpec | None
    ranges: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]
    versions: dict[int, int]


class StateUpdate(NamedTuple):
    """Changes of the master, as one replica gets them.

    Attributes:
        revision: The state after them.
        news: A pickled `StateNews`, the same for all replicas that have the same state.
        size: Bytes of changed contents.
        contents: Contents that come one by one.
        windows: Memory that large tensors lie in, by number.
        parts: The changed parts of the run; none where it lies in a window.
        window: The window of the run, where that is new.
        spread: The place in the group whose root passes the changed parts on; None without one.
    """

    revision: int
    news: bytes
    size: int
    contents: Row
    windows: dict[int, Window]
    parts: tuple[Tensor, ...] = ()
    window: Window | None = None
    spread: ExchangeRequest | None = None


class ForwardRequest(NamedTuple):
    """One chunk's forward.

    Attributes:
        model: The model's number.
        update: Changes of its state; None if there are none.
        key: The number that its graph gets; None keeps no graph.
        chunk: The number of the chunk, from which its random numbers follow.
        called: The name of a method, a function that takes the module, or None for the module.
        arguments: Positional and keyword arguments.
        context: The caller's ambient state.
        seed: The call's seed.
        threads: Torch's threads; None leaves them.
        first: True if writes to buffers and parameters are reported.
        forget: Graphs that nobody can ask for any more.
        overlay: Contents that tensors had when the forward ran first, by slot; None if it runs
            first now. It runs again only for its graph.
        where: The place that an exception names; None leaves the exception as it is.
        group: How the chunks of the call exchange tensors; None if they do not.
        optional: True if all leaves are looked for among those that outputs depend on.
    """

    model: int
    update: StateUpdate | None
    key: int | None
    chunk: int
    called: Parcel | str | None
    arguments: Parcel
    context: CallContext
    seed: int
    threads: int | None
    first: bool
    forget: tuple[int, ...]
    overlay: dict[int, Tensor] | None
    where: str | None
    group: Any = None
    optional: bool = False


LEFT_OUT, SENT, SUMMED, KEPT, ADDED = range(5)


class BackwardRequest(NamedTuple):
    """One chunk's backward.

    Attributes:
        graph: The graph of the forward whose leaves get gradients.
        outputs: The graphs, each with the numbers of its outputs that have a gradient.
        grads: These gradients, in the same order.
        needed: For each leaf of that forward `LEFT_OUT`, or the fate of its gradient: `SENT`,
            `SUMMED` by the group for its root, `KEPT` as all that the chunk has, or `ADDED` to
            that.
        partial: True if the caller's pass leaves out some leaves.
        keep: True if graphs are used again.
        derived: The number of the graph that the gradients get; None without create_graph.
        moved: By how much the master's versions moved since the forward, by slot.
        first: True if writes are reported.
        context: The caller's ambient state.
        threads: Torch's threads; None leaves them.
        forget: Graphs that nobody can ask for any more.
        where: The place that an exception names.
        chunk: The number of the chunk.
        group: As in a forward.
    """

    graph: int
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    grads: list[Tensor]
    needed: bytes
    partial: bool
    keep: bool
    derived: int | None
    moved: dict[int, int]
    first: bool
    context: CallContext
    threads: int | None
    forget: tuple[int, ...]
    where: str | None
    chunk: int
    group: Any = None


class Forget(NamedTuple):
    """A request to drop graphs and models; the answer tells how many of both are left."""

    forget: tuple[int, ...]


class ResumeRequest(NamedTuple):
    """A request to train a model from here on.

    Attributes:
        model: The model's number.
        update: The module, with the weights to begin with.
        trained: The slots of the parameters that optimizers step.
        optimizers: For each optimizer, by number: its class, the keywords of its constructor, its
            groups with slots in the place of parameters, and its state by slot.
    """

    model: int
    update: StateUpdate | None
    trained: tuple[int, ...]
    optimizers: Parcel


class SnapshotRequest(NamedTuple):
    """A request for what a replica trains.

    Attributes:
        model: The model's number.
        weights: True if the answer has the weights, by slot.
        optimizers: True if it has the state by slot and the groups of each optimizer, by number.
    """

    model: int
    weights: bool
    optimizers: bool


class GradientsRequest(NamedTuple):
    """A request for gradients that a chunk has kept.

    Attributes:
        model: The model's number.
        slots: Of which parameters.
        chunk: The number of the chunk.
    """

    model: int
    slots: tuple[int, ...]
    chunk: int


class StepRequest(NamedTuple):
    """One step of an optimizer, or the norm of its gradients.

    Attributes:
        model: The model's number.
        optimizer: The optimizer's number.
        values: Changes of each of its groups since the last step.
        summed: The slots of gradients that are summed over chunks.
        chunks: The chunks that have kept these, in the order in which they are added.
        again: True if these are the sums of the last request, which was for their norm.
        scale: The factor of these sums, after a clipping; None leaves them.
        zeros: The slots of gradients that are zero.
        given: Gradients that come from the driver, by slot.
        exchange: The place in the group that sums; None if all chunks are here.
        norm: Which norm is asked for; None makes the step.
        number: The number of the step, from which its random numbers follow.
        threads: Torch's threads; None leaves them.
    """

    model: int
    optimizer: int
    values: list[dict[str, Any]]
    summed: tuple[int, ...]
    scale: Tensor | None
    zeros: tuple[int, ...]
    given: dict[int, Tensor]
    norm: float | None
    chunks: tuple[int, ...] = ()
    again: bool = False
    exchange: ExchangeRequest | None = None
    number: int = 0
    threads: int | None = None


class Failure(NamedTuple):
    """An exception of a replica.

    Attributes:
        kind: Its class, pickled; None if that cannot be pickled.
        name: The class's name.
        text: Its traceback.
        where: The place that upstream's words name.
        exception: The exception, pickled, if it is raised as it is.
        exit: True if the module asked the process to end.
        loading: True if the arguments could not be loaded.
    """

    kind: bytes | None
    name: str
    text: str
    where: str | None
    exception: bytes | None
    exit: bool
    loading: bool = False


class CaughtWarning(NamedTuple):
    """A warning of a replica."""

    category: bytes
    text: str
    filename: str
    lineno: int


class Writes(NamedTuple):
    """Tensors that the first chunk wrote to.

    Attributes:
        slots: Their slots.
        values: Their contents now.
        moved: By how much the version of each moved.
        replaced: True if the memory of each is another one, as after ``t.data = other``.
    """

    slots: tuple[int, ...] = ()
    values: Row = Row()
    moved: tuple[int, ...] = ()
    replaced: tuple[bool, ...] = ()


class Answer(NamedTuple):
    """The answer to any request.

    Attributes:
        value: The outputs of a forward; the gradients of a backward, a row for the module's leaves
            and one for inputs, with None for those not reached, or whose gradients are kept.
        reached: Which tensors in plain attributes, and then which inputs, that require a gradient
            the outputs depend on. Of a backward: which leaves' gradients are kept, or went into
            the group's sum.
        failure: The exception, if there is one.
        warnings: Warnings.
        writes: Tensors that were written to.
        lacking: True if the replica has lost contents, or a message, and needs the whole state.
        busy: Seconds that it computed.
    """

    value: Any = None
    reached: tuple[bool, ...] = ()
    failure: Failure | None = None
    warnings: tuple[CaughtWarning, ...] = ()
    writes: Writes = Writes()
    lacking: bool = False
    busy: float = 0.0


class ExchangeRequest(NamedTuple):
    """The place of one chunk in a group of replicas that exchange tensors during a call.

    Attributes:
        name: The group's name; a replica that has it keeps it.
        rank: This replica's number.
        size: How many there are.
        timeout: Seconds to wait for the others.
        layers: True if layers of the module exchange tensors.
        nccl: True if tensors go from GPU to GPU.
        root: The member that gets sums, and passes weights on.
        address: The group's store: its memory, or host and port; only for those that join.
    """

    name: str
    rank: int
    size: int
    timeout: float
    layers: bool = False
    nccl: bool = False
    root: int = 0
    address: Window | tuple[str, int] | None = None

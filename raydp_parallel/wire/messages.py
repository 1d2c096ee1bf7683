"""Requests of the driver and answers of a replica.

A request says all that one chunk needs: a replica keeps models by number and graphs by key, and
nothing else from call to call. Fields named ``model`` are the model's number, ``forget`` are graphs
and models that nobody can ask for any more, and tags are numbers of a model's tensors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from raydp_parallel.devices.ambient import CallContext
from raydp_parallel.devices.layout import Row, Spec
from raydp_parallel.wire.codec import Parcel
from raydp_parallel.wire.windows import Window


class Seat(NamedTuple):
    """The place of one chunk in a group of replicas that exchange tensors during a call."""

    name: str  # the group's; a replica that has it keeps it
    rank: int  # this replica's number
    size: int  # how many there are
    timeout: float  # seconds to wait for the others
    layers: bool = False  # layers of the module exchange tensors
    nccl: bool = False  # tensors go from GPU to GPU
    root: int = 0  # the member that sends sums to the driver, and passes weights on
    # The group's store: its memory, or host and port; only for those that join.
    address: Window | tuple[str, int] | None = None


# The state of a model.


class Source(NamedTuple):
    """The text of a module, from a file of the driver."""

    file: str
    folders: tuple[str, ...]  # where a package's submodules are; none for a plain module
    text: bytes


class Sources(NamedTuple):
    """All that a replica must know of the driver's modules."""

    paths: tuple[str, ...]  # where the driver looks for modules
    modules: dict[str, Source]  # the user's own that it has loaded, by name


Mapped = tuple[int, int, Spec]
"""Where a tensor lies: the number of one of the model's windows, the offset there, and how."""


class TensorSpec(NamedTuple):
    """One tensor of a module, as a replica makes it."""

    parameter: bool
    grad: bool  # it requires a gradient
    mapped: Mapped | None  # None: contents are sent


class RunSpec(NamedTuple):
    """The layout of contents that lie in one run of memory."""

    key: int  # its number
    tags: tuple[int, ...]  # in the order of the specs
    specs: tuple[Spec, ...]


class StateNews(NamedTuple):
    """Changes of the master since the state that a replica has, but for contents."""

    structure: bytes | None  # the module without contents of tensors; None if it is as it was
    sources: Sources | None  # the driver's modules; None if nothing is new
    specs: dict[int, TensorSpec]  # of tensors that are new, or of another geometry, by tag
    run: RunSpec | None  # where contents lie in the run; None if that is as it was
    ranges: tuple[tuple[int, int], ...]  # the changed parts of the run
    tags: tuple[int, ...]  # of the tensors whose contents come one by one
    versions: dict[int, int]  # of each tensor with other contents, as the master counts it


class StateUpdate(NamedTuple):
    """Changes of the master, as one replica gets them."""

    base: int  # the state before them; 0 if they are all
    revision: int  # the state after them
    news: bytes  # a pickled `StateNews`, the same for all replicas that have the same state
    size: int  # bytes of changed contents, but for those that another replica passes on
    contents: Row  # those that come one by one
    windows: dict[int, Window]  # memory that large tensors lie in, by number
    parts: tuple[Tensor, ...] = ()  # the changed parts of the run; none where it lies in a window
    window: Window | None = None  # of the run, where that is new
    spread: Seat | None = None  # the group whose root passes the changed parts on


# Calls of a module.


class Terms(NamedTuple):
    """The terms on which a chunk runs, forward and backward."""

    chunk: int  # its number, from which its random numbers follow
    context: CallContext  # the caller's ambient state
    threads: int | None  # torch's threads; None leaves them
    error_prefix: str | None  # the place that an exception names; None leaves that as it is
    reports: bool  # writes to buffers and parameters are reported
    seed: int  # the call's
    group: Seat | None = None  # how the call's chunks exchange tensors, if they do


class ForwardRequest(NamedTuple):
    """One chunk's forward."""

    terms: Terms
    model: int
    update: StateUpdate | None  # changes of its state; None if there are none
    key: int | None  # the number that its graph gets; None keeps no graph
    # What is called: a function that takes the module, the name of a method, or None for the module
    # itself; and its positional and keyword arguments.
    arguments: Parcel
    # Contents that tensors had when the forward ran first, by tag; None if it runs first now. It
    # runs again only for its graph.
    overlay: dict[int, Tensor] | None
    forget: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()  # leaves that are looked for among those that outputs depend on
    refs: tuple[int, ...] = ()  # numbers among the arguments, for objects of Ray's store


LEFT_OUT, SENT, SUMMED, KEPT, ADDED = range(5)
"""What becomes of a leaf's gradient: nothing, it is sent, the group sums it and its root sends
that, it is kept as all that the chunk has, or it is added to that."""


class BackwardRequest(NamedTuple):
    """One chunk's backward."""

    terms: Terms
    graph: int  # the graph of the forward whose leaves get gradients
    # Graphs, and which outputs have a gradient; if none has, all have zeros.
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    # These gradients, in the same order. With create_graph some may require one themselves.
    grads: list[Tensor]
    needed: bytes  # the fate of each leaf's gradient
    partial: bool  # the graph leads to leaves that get no gradient
    retain: bool  # graphs are used again
    derived: int | None  # the number of the graph that the gradients get, with create_graph
    moved: dict[int, int]  # by how much the master's versions moved since the forward, by tag
    forget: tuple[int, ...] = ()


class Forget(NamedTuple):
    """A request to drop graphs and models; the answer tells how many of both are left."""

    forget: tuple[int, ...]


# Training in the replicas.


class ResumeRequest(NamedTuple):
    """A request to train a model from here on."""

    model: int
    update: StateUpdate | None  # the module, with the weights to begin with
    stepped: tuple[int, ...]  # the tags that optimizers step
    # For each optimizer, by number: its class, the keywords of its constructor, its groups with
    # tags in the place of parameters, and its state by tag.
    optimizers: Parcel


class SnapshotRequest(NamedTuple):
    """A request for what a replica trains."""

    model: int
    # The weights, by tag; or of each optimizer, by number, its groups, and its state by tag.
    of: Literal["weights", "optimizers"]


class GradientsRequest(NamedTuple):
    """A request for gradients that a chunk has kept."""

    model: int
    tags: tuple[int, ...]
    chunk: int


class StepRequest(NamedTuple):
    """One step of an optimizer, or the norm of its gradients."""

    model: int
    optimizer: int  # its number
    values: list[dict[str, object]]  # changes of each of its groups since the last step
    from_driver: dict[int, Tensor | None]  # gradients, by tag; None for zeros
    norm: float | None  # which norm is asked for; None makes the step
    terms: Terms  # with the group that sums, or None if all chunks are here
    summed: tuple[int, ...] = ()  # the tags of gradients that are summed over chunks
    scale: Tensor | None = None  # the factor of these sums, after a clipping
    chunks: tuple[int, ...] = ()  # that have kept the gradients, in the order of the sum
    sums: int = 0  # their number: a step may use those of a norm of the same gradients


# Answers.


class Failure(NamedTuple):
    """An exception of a replica."""

    kind: bytes | None  # its class, pickled; None if that cannot be pickled
    name: str  # the class's name
    text: str  # its traceback
    error_prefix: str | None  # the place that upstream's words name
    exception: bytes | None  # the exception, pickled, if it is raised as it is
    exit: bool  # the module asked the process to end
    loading: bool = False  # the arguments could not be loaded


CaughtWarning = tuple[bytes, str, str, int]
"""A warning of a replica: its class, pickled, the text, the file and the line."""


class Writes(NamedTuple):
    """Tensors that the first chunk wrote to."""

    tags: tuple[int, ...] = ()
    values: Row = Row()  # their contents now
    moved: tuple[int, ...] = ()  # by how much the version of each moved
    replaced: tuple[bool, ...] = ()  # the memory of each is another one, as after ``t.data = t2``


class Answer(NamedTuple):
    """The answer to any request."""

    # The output of a forward; weights and optimizers.
    output: Parcel | None = None
    # Of a backward: the gradients of the module's leaves and those of inputs, with None for what is
    # not sent. Else gradients that a chunk has kept, or a norm.
    rows: tuple[Row, ...] = ()
    held: tuple[int, int] = (0, 0)  # how many models and graphs there are, if that is asked
    # A truth for each leaf of a graph: of a forward, if the outputs depend on it, as far as that is
    # asked; of a backward, if its gradient is kept, or went into the group's sum.
    reached: bytes = b""
    anew: bool = False  # of a forward: gather returns nothing of its output itself
    failure: Failure | None = None  # the exception, if there is one
    warnings: tuple[CaughtWarning, ...] = ()
    writes: Writes = Writes()
    lacking: bool = False  # the replica has lost contents, or a message, and needs all the state
    busy: float = 0.0  # seconds that it computed

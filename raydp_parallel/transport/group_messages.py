"""Messages about groups of replicas: requests to form, use and leave them, and their results."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class HostStore(NamedTuple):
    """Host the store by which the members of a group find each other.

    Attributes:
        group: The group's name.
    """

    group: str


class GroupKind(Enum):
    """The backend that members exchange tensors by."""

    GLOO = "gloo"
    """Sockets, between the memories of machines."""
    NCCL = "nccl"
    """NVIDIA's library, between the memories of GPUs."""


class JoinGroup(NamedTuple):
    """Become a member of a group of replicas, which exchange tensors without the driver.

    Attributes:
        group: The group's name, which no other group of the executor had.
        rank: The member's number.
        size: The number of members.
        store: Host and port of the store by which they find each other.
        patience: Seconds that they may take for that.
        kind: The backend.
    """

    group: str
    rank: int
    size: int
    store: tuple[str, int]
    patience: float
    kind: GroupKind


class Reduce(NamedTuple):
    """Sum the gradients of a group's members; only one member sends the sum to the driver.

    Attributes:
        group: The group.
        root: The member that sends the sum, if it does not stay.
        order: The members in the order of their chunks, in which the gradients are added.
        leaves: The leaves of the graph with gradients to sum, by number; the same ones in all
            members.
        kept: The key under which each member keeps its own gradients until the driver has the sum.
        patience: Seconds that one member may wait for the others.
        overlap: Whether to begin while backward still runs.
        stays: The key under which every member keeps the sum, for its optimizer, and none sends
            it; None if the root sends it to the driver.
    """

    group: str
    root: int
    order: tuple[int, ...]
    leaves: tuple[int, ...]
    kept: int
    patience: float
    overlap: bool
    stays: int | None = None


class TakePart(NamedTuple):
    """Run a chunk that exchanges tensors with the other chunks of its call.

    Attributes:
        group: The group of their replicas.
        order: The member that runs each chunk.
        patience: Seconds that one chunk may wait for the others.
    """

    group: str
    order: tuple[int, ...]
    patience: float


class Leg(NamedTuple):
    """One broadcast on the route of contents from replica to replica.

    Attributes:
        group: The group of the sender and the receivers.
        root: The member that sends.
    """

    group: str
    root: int


class Relay(NamedTuple):
    """Pass new contents on from one replica to the others.

    Attributes:
        legs: The legs that this replica is in. The source sends in all of them; any other replica
            receives the contents in the first leg, and sends them in the rest.
        sizes: The bytes of each block, in the order in which they are sent.
        source: Whether this replica gets the contents from the driver.
        patience: Seconds that one replica may wait for the others.
    """

    legs: tuple[Leg, ...]
    sizes: tuple[int, ...]
    source: bool
    patience: float


class SumOutcome(Enum):
    """The outcome of a `Reduce` in one member."""

    DONE = "done"
    """The member's gradients are in the sum. It keeps them, and they are not in the answer."""
    FAILED = "failed"
    """The group broke. The member's gradients are in the answer."""
    SPOILED = "spoiled"
    """The member began to sum a gradient that changed afterwards: the sum is wrong. The member
    keeps its gradients.
    """


class Reduced(NamedTuple):
    """A member's result of a `Reduce`.

    Attributes:
        outcome: The outcome in this member.
        marks: For each of the leaves: 0 where this member has no gradient, 1 where it is in the
            sum, 2 where it cannot be summed in a group (it is sparse, for example) and is in the
            answer instead.
        sums: In the root, the parcel of the sums; zeros where no member has a gradient. Elsewhere
            None.
        seconds: Seconds that it waited for other members.
        size: Bytes of the gradients that it summed.
    """

    outcome: SumOutcome
    marks: bytes
    sums: Any
    seconds: float
    size: int

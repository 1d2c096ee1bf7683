"""What replicas are told of groups among themselves, and what they say of it. Frozen types that
cross the wall.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class HostStore(NamedTuple):
    """Let members of groups find each other at this replica.

    Attributes:
        patience: Seconds that they may take for that.
    """

    patience: float


class GroupKind(Enum):
    """What members exchange tensors by."""

    GLOO = "gloo"
    """Sockets, from and to the machine's memory."""
    NCCL = "nccl"
    """Whatever there is between GPUs."""


class JoinGroup(NamedTuple):
    """Become a member of a group of replicas, which exchange tensors without the driver.

    Attributes:
        group: Its name, which no other group of the executor had.
        rank: Which member this is.
        size: How many members there are.
        store: Where they find each other: host and port.
        patience: Seconds that they may take for that.
        kind: What they exchange tensors by.
    """

    group: str
    rank: int
    size: int
    store: tuple[str, int]
    patience: float
    kind: GroupKind


class Reduce(NamedTuple):
    """Let the members of a group sum their gradients, and only one of them send the sum.

    Attributes:
        group: The group.
        root: The member that gets the sum.
        order: The members in the order of their chunks, in which the gradients are added.
        leaves: The leaves of the graph whose gradients are summed, by number; the same ones in all
            members.
        kept: The key under which each keeps its own gradients until the driver has the sum.
        patience: Seconds that one may wait for the others.
        overlap: Whether to begin while backward still runs.
    """

    group: str
    root: int
    order: tuple[int, ...]
    leaves: tuple[int, ...]
    kept: int
    patience: float
    overlap: bool


class Leg(NamedTuple):
    """One part of the way that contents take from replica to replica.

    Attributes:
        group: Among whom.
        root: Who has them.
    """

    group: str
    root: int


class Relay(NamedTuple):
    """Pass new contents on from one replica to the others.

    Attributes:
        legs: The legs that this replica is in. The source gives in all of them; any other gets the
            contents in the first, and hands them on in the rest.
        sizes: The bytes of each block, in the order in which they travel.
        source: Whether this replica gets the contents from the driver.
        patience: Seconds that one may wait for the others.
    """

    legs: tuple[Leg, ...]
    sizes: tuple[int, ...]
    source: bool
    patience: float


class SumOutcome(Enum):
    """What came of a `Reduce` in one member."""

    DONE = "done"
    """Its gradients are in the sum. It keeps them, and answers without."""
    FAILED = "failed"
    """The group broke. Its gradients are in the answer."""
    SPOILED = "spoiled"
    """It began to sum a gradient that was not whole yet: the sum is of no use. It keeps its
    gradients.
    """


class Reduced(NamedTuple):
    """What a member says of a `Reduce`.

    Attributes:
        outcome: What came of it.
        marks: For each of the leaves: 0 where this member has no gradient, 1 where it is in the
            sum, 2 where it cannot be summed so (it is sparse, for one) and is in the answer
            instead.
        sums: In the root, the parcel of the sums; zeros where no member has a gradient. Elsewhere
            None.
        seconds: How long it waited for others.
        size: Bytes that it gave into the sum.
    """

    outcome: SumOutcome
    marks: bytes
    sums: Any
    seconds: float
    size: int

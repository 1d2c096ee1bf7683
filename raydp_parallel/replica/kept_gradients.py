"""Gradients that a replica keeps after its backward, by key: sums of a group, what a member gave
into one, and what the driver accumulates without fetching it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raydp_parallel.errors import GraphLost
from raydp_parallel.transport import collective
from raydp_parallel.transport.messages import Holding

Kept = dict[int, Sequence[Tensor | None]]


def find(kept: Kept, key: int, last: bool = False) -> Sequence[Tensor | None]:
    """What is kept under a key; ``last`` lets go of it."""
    found = kept.get(key)
    if found is None:
        raise GraphLost(
            "backward: the replica no longer holds the gradients that were accumulated in it; set "
            "them to zero, and run forward and backward again"
        )
    if last:
        del kept[key]
    return found


def earlier(kept: Kept, hold: Holding | None) -> dict[int, Tensor]:
    """The gradients that a backward's are added to, by the number of their leaf."""
    sums: dict[int, Tensor] = {}
    for key, last, pairs in hold.added if hold is not None else ():
        row = find(kept, key, last)
        for at, leaf in pairs:
            grad = row[at]
            if grad is not None:
                own = grad if last else grad.clone()
                sums[leaf] = own if leaf not in sums else sums[leaf].add_(own)
    return sums


def stay(
    kept: Kept,
    hold: Holding | None,
    leaves: Sequence[Tensor],
    found: list[Tensor | None],
    own: bool,
) -> list[Tensor | None]:
    """Keep a backward's gradients where they are to stay; returns the others.

    Args:
        kept: Where they are kept.
        hold: Which are to stay.
        leaves: The leaves of the graph.
        found: Their gradients.
        own: Whether these have memory of their own, and not that of a message, or another's.
    """
    if hold is None or hold.key is None:
        return found
    here: list[Tensor | None] = []
    left = [*found]
    for row in hold.rows:
        grad = found[row]
        if grad is None or not collective.fits(grad, leaves[row]):
            here.append(None)
        else:
            here.append(grad if own else grad.clone())
            left[row] = None
    kept[hold.key] = here
    return left


def marks(kept: Kept, hold: Holding | None) -> bytes:
    """For each row of a `Holding` whether a gradient of it stayed."""
    if hold is None or hold.key is None:
        return b""
    return bytes([grad is not None for grad in kept.get(hold.key, ())])

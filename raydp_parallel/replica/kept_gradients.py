"""Gradients that a replica keeps after its backward, by key: sums of a group, what a member gave
into one, and what the driver accumulates without fetching it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from raydp_parallel.errors import GraphLost
from raydp_parallel.transport import collective
from raydp_parallel.transport.messages import Holding

Kept = dict[int, Sequence[Tensor | None]]


def find(kept: Kept, key: int) -> Sequence[Tensor | None]:
    """What is kept under a key."""
    found = kept.get(key)
    if found is None:
        raise GraphLost(
            "backward: the replica no longer holds the gradients that were accumulated in it; set "
            "them to zero, and run forward and backward again"
        )
    return found


@contextlib.contextmanager
def adding(kept: Kept, hold: Holding | None) -> Iterator[dict[int, Tensor]]:
    """Give the block the gradients that a backward's are added to, by the number of their leaf.

    What is used up is not kept beyond the block; if that fails, what it has not written to is.
    """
    added = hold.added if hold is not None else ()
    rows = {key: find(kept, key) for key, _, _ in added}
    used = [key for key, last, _ in added if last]
    before = {key: _versions(rows[key]) for key in used}
    sums: dict[int, Tensor] = {}
    try:
        for key, last, pairs in added:
            for at, leaf in pairs:
                grad = rows[key][at]
                if grad is not None:
                    own = grad if last else grad.clone()
                    sums[leaf] = own if leaf not in sums else sums[leaf].add_(own)
        yield sums
    except BaseException:
        used = [key for key in used if _versions(rows[key]) != before[key]]
        raise
    finally:
        for key in used:
            kept.pop(key, None)


def _versions(row: Sequence[Tensor | None]) -> list[int]:
    return [grad._version for grad in row if grad is not None]


def left(kept: Kept, hold: Holding | None) -> tuple[int, ...]:
    """The keys of the earlier gradients of a `Holding` that are as they were."""
    return tuple([key for key, _, _ in hold.added if key in kept]) if hold is not None else ()


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
        own: Whether these were added up in their leaves; else they may be one another.
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
            here.append(grad if own and _has_own_memory(grad) else grad.clone())
            left[row] = None
    kept[hold.key] = here
    return left


def _has_own_memory(grad: Tensor) -> bool:
    """Whether nothing else uses a gradient's memory. Torch lets a leaf keep a view of what it is
    given, such as of another leaf's gradient, and a later backward adds in place.
    """
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1 == 1


def marks(kept: Kept, hold: Holding | None) -> bytes:
    """For each row of a `Holding` whether a gradient of it stayed."""
    if hold is None or hold.key is None:
        return b""
    return bytes([grad is not None for grad in kept.get(hold.key, ())])

"""Moments of a master, so that a forward whose graph is lost can run again with the state of then.

[Note: what can be restored]
Between a forward and its backward only write-backs change the master, in most programs: batch
norm's running means, spectral norm's vectors. Each write-back stores the bytes that it overwrites
in the moment before it, and moments form a chain: from a moment one finds all that was overwritten
since. A moment that nothing refers to is garbage, with its bytes.

    moment ──► moment ──► now            overwritten: by the write-back that ended the moment
     looks      looks                    looks:       right before it, and right after

Other changes are found by versions and addresses that do not continue those of the chain, by flags
and structure, and by a comparison with the bytes that were sent. They cannot be restored: then the
replay is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.versions import Look, unlike


class StateMoment:
    """The time between two write-backs of a master."""

    __slots__ = ("after", "before", "following", "overwritten")

    def __init__(self) -> None:
        self.overwritten: Callable[[], dict[int, Tensor]] = dict
        self.before = Look([], [], [])
        self.after = Look([], [], [])
        self.following: StateMoment | None = None

    def end(
        self, overwritten: Callable[[], dict[int, Tensor]], before: Look, after: Look
    ) -> StateMoment:
        """End the moment with a write-back; returns the moment that begins."""
        self.overwritten, self.before, self.after = overwritten, before, after
        self.following = StateMoment()
        return self.following


class Mark(NamedTuple):
    """What a call stores of its module's state.

    Attributes:
        moment: The moment of the call.
        look: The versions, addresses and flags of its tensors.
        disturbed_at: The revision of the last change that versions did not show.
        trained: The last entry in the record of its optimizer in the replicas; 0 without one.
    """

    moment: StateMoment
    look: Look
    disturbed_at: int
    trained: int = 0


def overwritten_since(moment: StateMoment) -> dict[int, Tensor]:
    """The contents that slots had at a moment, where write-backs have changed them since."""
    found: dict[int, Tensor] = {}
    at: StateMoment | None = moment
    while at is not None:
        found = {**at.overwritten(), **found}
        at = at.following
    return found


def moved(mark: Mark, contents: BlockContents) -> list[int]:
    """The slots that changed since, other than by write-backs, as far as versions, addresses and
    flags show.
    """
    now = contents.look()
    chain, at = [mark.look], mark.moment
    while at.following is not None:
        chain += [at.before, at.after]
        at = at.following
    chain.append(now)
    found = {*unlike(mark.look.flags, now.flags)}
    for one, other in zip(chain[::2], chain[1::2], strict=True):
        found.update(unlike(one.versions, other.versions), unlike(one.pointers, other.pointers))
    return [contents.slots[i] for i in sorted(found)]

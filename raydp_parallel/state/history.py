"""Moments of a master copy, so that a forward can be run again as it was when its graph is lost.

[Note: what can be had back]
Between a forward and its backward only write-backs change the master copy, in most programs: batch
norm's running means, spectral norm's vectors. Each of them keeps the bytes that it overwrites, in
the moment before it, and moments form a chain: whoever holds one finds what was overwritten since.
Nobody holds it, and it is garbage with its bytes.

    moment ──► moment ──► now            overwritten: by the write-back that ended the moment
     looks      looks                    looks:       right before it, and right after

What anybody else changed is found by versions and addresses that do not meet those of the chain, by
flags and structure, and by a comparison with the bytes that were sent. It cannot be had back: then
the replay is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from raydp_parallel.state.block_contents import BlockContents
from raydp_parallel.state.versions import Look, unlike


class StateMoment:
    """A stretch of a master copy's life between two write-backs."""

    __slots__ = ("after", "before", "following", "overwritten")

    def __init__(self) -> None:
        self.overwritten: Callable[[], dict[int, Tensor]] = dict
        self.before = Look([], [], [])
        self.after = Look([], [], [])
        self.following: StateMoment | None = None

    def end(
        self, overwritten: Callable[[], dict[int, Tensor]], before: Look, after: Look
    ) -> StateMoment:
        """A write-back took place; returns the moment that begins."""
        self.overwritten, self.before, self.after = overwritten, before, after
        self.following = StateMoment()
        return self.following


class Mark(NamedTuple):
    """What a call remembers of its module's state.

    Attributes:
        moment: When it was.
        look: What was cheap to see of its tensors.
        disturbed_at: The revision at which something else than versions had told of a change for
            the last time.
    """

    moment: StateMoment
    look: Look
    disturbed_at: int


def overwritten_since(moment: StateMoment) -> dict[int, Tensor]:
    """The contents that slots had at a moment, where write-backs have changed them since."""
    found: dict[int, Tensor] = {}
    at: StateMoment | None = moment
    while at is not None:
        found = {**at.overwritten(), **found}
        at = at.following
    return found


def moved(mark: Mark, contents: BlockContents) -> list[int]:
    """The slots that somebody else than a write-back changed since, as far as versions, addresses
    and flags tell.
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

"""What of the master was changed since an earlier call, and can be restored for a replay.

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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from raydp_parallel.state.versions import Look, unlike

_MISSING = object()


class StateMoment:
    """The time between two write-backs of a master."""

    __slots__ = ("after", "before", "following", "overwritten")

    def __init__(self) -> None:
        self.overwritten: Callable[[], dict[int, Tensor]] = dict
        self.before = Look([], [], [])
        self.after = Look([], [], [])
        self.following: StateMoment | None = None


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

    def overwritten(self) -> dict[int, Tensor]:
        """The contents that slots had then, where write-backs have changed them since."""
        found: dict[int, Tensor] = {}
        at: StateMoment | None = self.moment
        while at is not None:
            found = {**at.overwritten(), **found}
            at = at.following
        return found

    def moved(self, now: Look) -> list[int]:
        """The numbers of the tensors that changed since, other than by write-backs, as far as
        versions, addresses and flags show.
        """
        chain, at = [self.look], self.moment
        while at.following is not None:
            chain += [at.before, at.after]
            at = at.following
        chain.append(now)
        found = {*unlike(self.look.flags, now.flags)}
        for one, other in zip(chain[::2], chain[1::2], strict=True):
            found.update(unlike(one.versions, other.versions), unlike(one.pointers, other.pointers))
        return sorted(found)


class StateHistory:
    """The write-backs of one master, and what a forward with one device rebound.

    Attributes:
        moment: The moment of now.
        disturbed_at: The revision of the last change that versions did not show.
    """

    def __init__(self) -> None:
        self.moment = StateMoment()
        self.disturbed_at = 0
        self._rebound: list[tuple[nn.Module, str, Any]] = []

    def add(self, overwritten: Callable[[], dict[int, Tensor]], before: Look, after: Look) -> None:
        """End the moment with a write-back."""
        ended, self.moment = self.moment, StateMoment()
        ended.overwritten, ended.before, ended.after = overwritten, before, after
        ended.following = self.moment

    def rebind(self, attributes: Sequence[tuple[nn.Module, str, Any]]) -> None:
        """Set attributes that a forward rebound: owner, name and value of each."""
        self._rebound = _values(attributes)
        _set(attributes)

    def forget_rebound(self) -> None:
        """Forget which attributes the last forward rebound: another one begins."""
        self._rebound = []

    @contextlib.contextmanager
    def before_rebinding(self) -> Iterator[None]:
        """Set the attributes back, in the block, to the values that the last forward began with."""
        rebound = self._rebound
        now = _values(rebound)
        _set(rebound)
        try:
            yield
        finally:
            _set(now)
            self._rebound = rebound


def _values(attributes: Sequence[tuple[nn.Module, str, Any]]) -> list[tuple[nn.Module, str, Any]]:
    return [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in attributes]


def _set(attributes: Sequence[tuple[nn.Module, str, Any]]) -> None:
    for owner, name, value in attributes:
        if value is not _MISSING:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)

"""Which replicas form a group, so that they exchange tensors among themselves. The driver's side of `collective`.

[Note: what a group may cost]
Time, and nothing else. Every member can answer without its group: it keeps what it gave into a sum until the driver has
the sum, and what did not arrive is sent again. So whether there is a group, and whether it works, is never a question
of what is right. A group ends with the first member that does not do its part; the next call makes another, of those
who are there then.

[Note: order]
The members of a group must begin its operations in the same order. The driver sends all messages of a call under one
lock, and each replica works through its messages in the order of their numbers. So of two calls the same one is first
everywhere, also with calls of several threads under way.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from raydp_parallel.actor import unseal
from raydp_parallel.crew import Death
from raydp_parallel.exchange import Host, Join
from raydp_parallel.roster import Roster
from raydp_parallel.seats import Seat

log = logging.getLogger("raydp_parallel")

_LEAST = 1 << 18
"""Bytes from which a group pays, by estimate; ``link="collective"`` uses it for any number."""

_JOIN = 15.0
"""Seconds that members may take to find each other."""

_PATIENCE = 15.0
"""Seconds that a member waits for others. A member that dies is noticed at once; this is for a network that fell
silent. Doubles each time that it was too short."""

_LONGEST = 3600.0
"""Seconds that they wait at most."""

_SHARE_OF_TIMEOUT = 0.4
"""How much of `Options.call_timeout` members may wait for each other, so that only who hangs himself exceeds it."""

_PAUSE = 10.0
"""Seconds after a group could not be made until the next try. Doubles."""

_MOST = 8
"""Groups that are kept; calls with fewer chunks than replicas have groups of their own."""


class Alliance(NamedTuple):
    """A group, as the driver knows it.

    Attributes:
        name: Its name.
        seats: Its members, by rank.
        incarnations: Which of each seat's replicas it is.
    """

    name: str
    seats: tuple[Seat, ...]
    incarnations: tuple[int, ...]

    def has(self, seat: Seat) -> bool:
        """Whether who sits there now is a member."""
        members = zip(self.seats, self.incarnations, strict=True)
        return seat.ready and (seat, seat.incarnation) in members

    @property
    def whole(self) -> bool:
        """Whether all members are there."""
        return all(map(self.has, self.seats))

    def rank(self, seat: Seat) -> int:
        """Which member a seat is."""
        return self.seats.index(seat)


class Groups:
    """The groups of an executor's replicas.

    Args:
        roster: Whose replicas.

    Attributes:
        late: Models, by id, whose gradients may not be summed before their backward is over.
    """

    def __init__(self, roster: Roster) -> None:
        self.late: set[int] = set()
        self._roster = roster
        self._known: dict[tuple[Seat, ...], Alliance] = {}
        self._left: list[str] = []
        self._making = threading.Lock()
        self._numbers = itertools.count(1)
        self._not_before = 0.0
        self._pause = _PAUSE
        self._wait = _PATIENCE
        self._told = False

    @property
    def patience(self) -> float:
        """Seconds that members may wait for each other."""
        limit = self._roster.options.call_timeout
        return self._wait if limit is None else min(self._wait, _SHARE_OF_TIMEOUT * limit)

    def wanted(self, seats: Sequence[Seat], size: int) -> bool:
        """Whether so many bytes are to go by a group of these, if there can be one."""
        options = self._roster.options
        if options.in_process or options.link not in ("auto", "collective") or len(seats) < 2:
            return False
        if len({*seats}) < len(seats) or not all(seat.ready for seat in seats):
            return False
        if options.link == "collective":
            return True
        hellos = [seat.hello for seat in seats if seat.hello is not None]
        # GPUs of several nodes are not for every day until that has been seen to work on some.
        return size >= _LEAST and len({h.node for h in hellos}) > 1 and all(h.device == "cpu" for h in hellos)

    def find(self, seats: Sequence[Seat], size: int, always: bool = False) -> Alliance | None:
        """The group of some seats, made if need be. None: they are better off, or have to do, without.

        Args:
            seats: Who is to be in it.
            size: How many bytes it is for.
            always: Whether it is known that one is wanted.
        """
        if not always and not self.wanted(seats, size):
            return None
        members = tuple(sorted(seats, key=_order))
        known = self._known.get(members)
        if known is not None and known.whole:
            return known
        if time.monotonic() < self._not_before:
            return None
        with self._making:
            known = self._known.get(members)
            return known if known is not None and known.whole else self._make(members)

    def near(self, seats: Sequence[Seat]) -> Seat:
        """Who of some is cheapest to reach: one on the driver's node, else the first."""
        return min(seats, key=lambda seat: (getattr(seat.door, "line", None) is None, _order(seat)))

    def dissolve(self, alliance: Alliance, waited: float = 0.0) -> None:
        """A group is of no use any more. Members that wait in it hear that from those that leave.

        Args:
            alliance: The group.
            waited: Seconds that members have waited for others. If nobody died, they may have been too impatient.
        """
        with self._roster.lock:
            if self._known.get(alliance.seats) is not alliance:
                return
            del self._known[alliance.seats]
            if waited >= self._wait and alliance.whole:
                self._wait = min(2 * self._wait, _LONGEST)
            word = pickle.dumps((alliance.name,))
            for seat in alliance.seats:
                if alliance.has(seat) and self._roster.crew.alive():
                    self._roster.crew.submit(seat.door, "group", word, ()).give_up()

    def _make(self, members: tuple[Seat, ...]) -> Alliance | None:
        name = f"{os.getpid()}-{id(self):x}-{next(self._numbers)}"
        alliance = Alliance(name, members, tuple(seat.incarnation for seat in members))
        patience = min(_JOIN, self.patience)
        trouble = self._gather(alliance, patience)
        if trouble:
            self._not_before = time.monotonic() + self._pause
            self._pause *= 2
            self._left.append(name)
            self._tell(members, trouble)
            return None
        self._pause = _PAUSE
        with self._roster.lock:
            self._known[members] = alliance
            self._thin_out()
        return alliance

    def _thin_out(self) -> None:
        """Let go of groups that are not whole any more, and of the oldest if there are many."""
        gone = [members for members, known in self._known.items() if not known.whole]
        gone += [members for members in self._known if members not in gone][:-_MOST]
        self._left += [self._known.pop(members).name for members in gone]

    def _gather(self, alliance: Alliance, patience: float) -> str:
        """Let all members join; returns what went wrong."""
        ((store, death),) = self._ask(alliance, alliance.seats[:1], [Host(patience)])
        if death:
            return death
        left, self._left = tuple(self._left), []
        size = len(alliance.seats)
        words = [Join(alliance.name, rank, size, tuple(store), patience, left) for rank in range(size)]
        found = self._ask(alliance, alliance.seats, words)
        return next((death or answer for answer, death in found if death or answer), "")

    def _ask(self, alliance: Alliance, seats: Sequence[Seat], words: Sequence[Any]) -> list[tuple[Any, str]]:
        """What each answers, or what went wrong."""
        crew = self._roster.crew
        with self._roster.lock:
            self._roster.check_open()
            if not alliance.whole:
                return [("", "a replica died")] * len(seats)
            headers = [pickle.dumps(word) for word in words]
            calls = [crew.submit(s.door, "group", header, ()) for s, header in zip(seats, headers, strict=True)]
        found: list[tuple[Any, str]] = []
        for answer in crew.collect(calls):
            if isinstance(answer, Death):
                found.append(("", answer.cause))
                continue
            said, _ = unseal(answer, crew.link)
            failure = getattr(said, "failure", None)
            found.append((said, failure.text.strip().splitlines()[-1] if failure is not None else ""))
        return found

    def _tell(self, members: Sequence[Seat], trouble: str) -> None:
        level = logging.INFO if self._told else logging.WARNING
        self._told = True
        names = ", ".join(str(seat.index) for seat in members)
        log.log(
            level,
            "replicas %s could not form a group (%s): gradients and weights go through the driver, which is slower; "
            "the next try is in %g s at the earliest",
            names, trouble, self._not_before - time.monotonic(),
        )  # fmt: skip


def _order(seat: Seat) -> tuple[str, int]:
    """Neighbours in a group sit on the same node, where they can, for sums go from one to the next."""
    return seat.hello.node if seat.hello is not None else "", seat.index

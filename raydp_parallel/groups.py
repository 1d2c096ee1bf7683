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
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from raydp_parallel import dial
from raydp_parallel.actor import unseal
from raydp_parallel.crew import Death
from raydp_parallel.exchange import Host, Join, Kind
from raydp_parallel.links import Link
from raydp_parallel.roster import Roster
from raydp_parallel.seats import Seat
from raydp_parallel.wire import pack

log = logging.getLogger("raydp_parallel")

_LEAST = 1 << 18
"""Bytes from which a group pays, by estimate; ``link="collective"`` uses it for any number."""

_JOIN = {Kind.GLOO: 15.0, Kind.NCCL: 60.0}
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
        kind: What its members exchange tensors by.
        seats: Its members, by rank.
        incarnations: Which of each seat's replicas it is.
    """

    name: str
    kind: Kind
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
        self._known: dict[tuple[Kind, tuple[Seat, ...]], Alliance] = {}
        self._guard = threading.Lock()
        self._making = threading.Lock()
        self._numbers = itertools.count(1)
        self._not_before = 0.0
        self._pause = _PAUSE
        self._wait = _PATIENCE
        self._told = self._no_nccl = False

    @property
    def patience(self) -> float:
        """Seconds that members may wait for each other."""
        return self._share(self._wait)

    def _share(self, seconds: float) -> float:
        limit = self._roster.options.call_timeout
        return seconds if limit is None else min(seconds, _SHARE_OF_TIMEOUT * limit)

    def kind(self, seats: Sequence[Seat]) -> Kind:
        """What these can sum by. Nccl refuses a GPU that comes twice: kernels on it would wait for each other.

        Only who asked for groups everywhere gets those of nccl: they were never seen on GPUs.
        """
        if self._roster.options.link != "collective":
            return Kind.GLOO
        hellos = [seat.hello for seat in seats if seat.hello is not None]
        gpus = {hello.gpu_uuid for hello in hellos if hello.gpu_uuid and hello.device != "cpu"}
        return Kind.NCCL if len(gpus) == len(seats) and not self._no_nccl else Kind.GLOO

    def wanted(self, seats: Sequence[Seat], size: int, kind: Kind | None = Kind.GLOO) -> bool:
        """Whether so many bytes are to go by a group of these, if there can be one.

        Args:
            seats: Who is to be in it.
            size: The bytes.
            kind: What it would be made of, None whatever they can.
        """
        options = self._roster.options
        if options.in_process or options.link not in ("auto", "collective") or len(seats) < 2:
            return False
        if size < _LEAST and options.link != "collective":
            return False
        if len({*seats}) < len(seats) or not all(seat.ready for seat in seats):
            return False
        if options.link == "collective":
            return True
        nodes = {seat.hello.node for seat in seats if seat.hello is not None}
        if len(nodes) > 1:
            return dial.far_lines()  # what members say to each other is as plain to read
        return (kind or self.kind(seats)) is Kind.NCCL

    def find(self, seats: Sequence[Seat], size: int, kind: Kind = Kind.GLOO, always: bool = False) -> Alliance | None:
        """The group of some seats, made if need be. None: they are better off, or have to do, without.

        Args:
            seats: Who is to be in it.
            size: How many bytes it is for.
            kind: What it is made of.
            always: Whether it is known that one is wanted.
        """
        if not always and not self.wanted(seats, size, kind):
            return None
        members = tuple(sorted(seats, key=_order))
        known = self._known.get((kind, members))
        if known is not None and known.whole:
            return known
        if time.monotonic() < self._not_before:
            return None
        with self._making:
            known = self._known.get((kind, members))
            return known if known is not None and known.whole else self._make(kind, members)

    def near(self, seats: Sequence[Seat]) -> Seat:
        """Who of some is cheapest to reach: one on the driver's node, else the first."""
        return min(seats, key=lambda seat: (not getattr(seat.door, "near", False), _order(seat)))

    def dissolve(self, alliance: Alliance, waited: float = 0.0) -> None:
        """A group is of no use any more. Members that wait in it are told so.

        Args:
            alliance: The group.
            waited: Seconds that members have waited for others. If nobody died, they may have been too impatient.
        """
        with self._guard:
            if self._known.get((alliance.kind, alliance.seats)) is not alliance:
                return
            del self._known[alliance.kind, alliance.seats]
        if waited >= self._wait and alliance.whole:
            self._wait = min(2 * self._wait, _LONGEST)
        self._tell_to_leave(alliance)

    def _tell_to_leave(self, alliance: Alliance) -> None:
        """Members wait for others in it no longer. Not by a message like others, which would wait its turn."""
        for seat in alliance.seats:
            if alliance.has(seat):
                self._roster.crew.leave(seat.door, [alliance.name])

    def _make(self, kind: Kind, members: tuple[Seat, ...]) -> Alliance | None:
        name = f"{os.getpid()}-{id(self):x}-{next(self._numbers)}"
        alliance = Alliance(name, kind, members, tuple(seat.incarnation for seat in members))
        trouble = self._gather(alliance, min(_JOIN[kind], self._share(_JOIN[kind])))
        if trouble:
            self._no_nccl |= kind is Kind.NCCL and alliance.whole  # nobody died: there is no such thing here
            self._not_before = time.monotonic() + self._pause
            self._pause *= 2
            self._tell_to_leave(alliance)
            self._tell(members, trouble)
            return None
        self._pause = _PAUSE
        with self._guard:
            self._known[kind, members] = alliance
            gone = self._thin_out()
        for old in gone:
            self._tell_to_leave(old)
        return alliance

    def _thin_out(self) -> list[Alliance]:
        """Let go of groups that are not whole any more, and of the oldest if there are many."""
        gone = [key for key, known in self._known.items() if not known.whole]
        gone += [key for key in self._known if key not in gone][:-_MOST]
        return [self._known.pop(key) for key in gone]

    def _gather(self, alliance: Alliance, patience: float) -> str:
        """Let all members join; returns what went wrong."""
        ((store, death),) = self._ask(alliance, alliance.seats[:1], [Host(patience)])
        if death:
            return death
        size = len(alliance.seats)
        words = [Join(alliance.name, rank, size, tuple(store), patience, alliance.kind) for rank in range(size)]
        found = self._ask(alliance, alliance.seats, words)
        return next((death or answer for answer, death in found if death or answer), "")

    def _ask(self, alliance: Alliance, seats: Sequence[Seat], words: Sequence[Any]) -> list[tuple[Any, str]]:
        """What each answers, or what went wrong; after the first of that the others wait for nobody."""
        crew = self._roster.crew
        with self._roster.lock:
            self._roster.check_open()
            if not alliance.whole:
                return [("", "a replica died")] * len(seats)
            headers = [pack(word) for word in words]
            calls = [crew.submit(s.door, "group", header, ()) for s, header in zip(seats, headers, strict=True)]
        found: dict[int, tuple[Any, str]] = {}

        def heard(number: int, answer: Any) -> None:
            found[number] = _understood(answer, crew.link)
            said, trouble = found[number]
            if trouble or (isinstance(said, str) and said):
                self._tell_to_leave(alliance)

        crew.collect(calls, heard)
        return [found[number] for number in range(len(calls))]

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


def _understood(answer: Any, link: Link) -> tuple[Any, str]:
    """What a replica answered, or what went wrong."""
    if isinstance(answer, Death):
        return "", answer.cause
    said, _ = unseal(answer, link)
    failure = getattr(said, "failure", None)
    return said, failure.text.strip().splitlines()[-1] if failure is not None else ""


def _order(seat: Seat) -> tuple[str, int]:
    """Neighbours in a group sit on the same node, where they can, for sums go from one to the next."""
    return seat.hello.node if seat.hello is not None else "", seat.index

"""Several threads that use one executor: each gets what it asked for, and memory is lent once."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threaded import Scaled, together

from raydp_parallel import DataParallel
from raydp_parallel.devices import buffers
from raydp_parallel.devices.buffers import Arena, SharedBuffer
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport.links import Attachments, Link, Mappings, shared_link
from raydp_parallel.transport.message_bytes import give_back, pack

LARGE = 1 << 20
"""Bytes that lie in shared memory and not in the message."""


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_an_answer_that_ray_carries_outlives_the_next_call(method: str) -> None:
    """It is read when the call of another thread may already be answered, and lent until word comes
    that it was.
    """
    link: Link = shared_link(Arena(), exposes=False, always=False)
    client = ReplicaServer("cpu", link)

    def work(number: int, _attachments: Attachments, back: Attachments) -> int:
        filled = np.full(LARGE, number, dtype=np.uint8)
        back.send([MemoryRange(filled.ctypes.data, LARGE, filled)], [0], LARGE)
        return number

    client._replica = SimpleNamespace(forward=work, backward=work)  # type: ignore[assignment]
    answers = [getattr(client, method)(b"", pack(number)) for number in range(3)]
    mappings = Mappings()
    for number, (_, _, descriptor) in enumerate(answers):
        piece = mappings.find(descriptor).piece()
        assert ctypes.string_at(piece.address, piece.size) == bytes([number]) * LARGE
    assert len(client._ledger) == 3
    getattr(client, method)(give_back(mappings), pack(0))
    assert len(client._ledger) == 3 - 2 + 1  # the last one is in use


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direct_line": False},
        {"link": "inline"},
        pytest.param({"direct_line": False, "link": "inline"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_threads_get_their_own_outputs_and_gradients(
    options: dict[str, Any], executors: Any
) -> None:
    """The calls of one are answered while the answers of another are read."""
    size = 1 << 20
    model = DataParallel(Scaled(size), ["cpu"], executor=executors(**options))
    model(torch.ones(1, size))

    def ask(number: int) -> None:
        for _ in range(6):
            x = torch.full((1, size), float(number), requires_grad=True)
            out = model(x)
            assert out.unique().tolist() == [number]
            (slope,) = torch.autograd.grad(out.sum() * number, x)
            assert slope.unique().tolist() == [number]

    together(*[lambda number=number: ask(number) for number in (2, 3, 5)])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.usefixtures("hasty")
def test_an_arena_lends_a_segment_once(shared: bool) -> None:
    """Threads that take, give back and make it let go of what is old, all at once."""
    arena = Arena(shared)
    lent: Counter[int] = Counter()

    def take_and_give_back() -> None:
        for _ in range(3000):
            taken = [arena.take(1 << 16) for _ in range(3)]
            segments = [id(one.segment) for one in taken]
            lent.update(segments)
            assert all(lent[one] == 1 for one in segments)
            lent.subtract(segments)

    together(*[take_and_give_back] * 4)


class Heard:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, contended: threading.Event) -> None:
        self._lock = threading.Lock()
        self._contended = contended

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._contended.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_is_looked_at_as_old_is_not_lent_meanwhile() -> None:
    """One thread makes an arena let go of what is old; just when it looks at a segment, another
    one takes.
    """
    arena, went_on = Arena(shared=False), threading.Event()
    arena._taking = Heard(went_on)  # type: ignore[assignment]
    others: list[SharedBuffer] = []

    def take() -> None:
        others.append(arena.take(1 << 16))
        went_on.set()

    other = threading.Thread(target=take)

    class LookedAt(buffers._Scratch):
        last = 0

        @property
        def used(self) -> int:
            if not other.ident:
                other.start()
                assert went_on.wait(60)  # it has taken something, or waits for its turn
            return self.last

        @used.setter
        def used(self, clock: int) -> None:
            self.last = clock

    arena._make = LookedAt
    del (first := [arena.take(1 << 16)])[:]
    assert not first
    arena._clock = 63
    mine = arena.take(1 << 16)
    other.join(60)
    assert others[0].segment is not mine.segment


def test_what_was_not_used_for_long_goes_back_to_the_system() -> None:
    """And what was stays."""
    arena = Arena(shared=False)
    del (large := [arena.take(1 << 20) for _ in range(2)])[:]
    assert not large
    for _ in range(200):
        arena.take(1 << 16)
    assert arena.idle() == {1 << 20: 0, 1 << 16: 1}


def test_finalizers_give_back_while_the_same_thread_takes() -> None:
    """A collection may begin anywhere, also under the arena's lock."""
    arena = Arena(shared=False)
    kept = [arena.take(1 << 16)]
    with arena._taking:
        kept.clear()
    assert arena.idle() == {1 << 16: 1}

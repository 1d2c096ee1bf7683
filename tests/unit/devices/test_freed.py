"""Notes of objects that were freed."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from typing import Any

import torch
from torch import nn

from raydp_parallel import DataParallel, Executor
from raydp_parallel.devices.process import Freed


class Thing:
    """Anything."""


def test_a_note_is_taken_once() -> None:
    """And not before the object is freed."""
    freed: Freed[str] = Freed()
    one, other = Thing(), Thing()
    freed.watch(one, "one")
    freed.watch(other, "other")
    assert freed.take() == []
    del one
    assert freed.take() == ["one"]
    assert freed.take() == []
    del other
    assert freed.take() == ["other"]


def test_an_object_in_a_cycle() -> None:
    """Its note is taken once the collector has found it."""
    freed: Freed[int] = Freed()
    thing: Any = Thing()
    thing.watch = freed.watch(thing, 1)
    thing.itself = thing
    del thing
    gc.collect()
    assert freed.take() == [1]


def test_what_is_forgotten_has_no_note() -> None:
    """Whether or not its watch is still there."""
    freed: Freed[int] = Freed()
    thing: Any = Thing()
    thing.watch = freed.watch(thing, 1)
    freed.forget(thing.watch)
    freed.forget(thing.watch)
    del thing
    assert freed.take() == []


def test_notes_keep_what_they_refer_to() -> None:
    """Until they are taken."""
    freed: Freed[Thing] = Freed()
    thing, note = Thing(), Thing()
    known = weakref.ref(note)
    freed.watch(thing, note)
    del note, thing
    assert known() is not None
    assert freed.take() == [known()]
    assert known() is None


def test_threads_take_each_note_once() -> None:
    """While others free objects."""
    freed: Freed[int] = Freed()
    taken: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 500):
            thing = Thing()
            freed.watch(thing, number)
            del thing
            taken.extend(freed.take())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(500 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted([*taken, *freed.take()]) == [*range(2000)]


def finalizers(work: Any) -> list[str]:
    """Functions in Python that ran because an object was freed, while this thread did some work."""
    found: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = os.path.basename(code.co_filename)
        weak = code.co_name in ("_remove", "remove", "__call__") and "weakref" in file
        if event == "call" and (weak or code.co_name == "__del__"):
            found.append(f"{file}: {code.co_name}")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_nothing_in_python_runs_as_objects_are_freed(two: Executor) -> None:
    """Ctrl-C would be lost there. Neither in a step, nor in a forward, nor in a map, whether bytes
    go through a socket or shared memory. One call in 64 gives back memory that was not used since
    the last such call, here of earlier tests: it does not count.
    """
    for width in (4, 500):
        net = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        model = DataParallel(net, executor=two)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.ones(300, width)

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        def forwards(model: Any = model, x: Any = x) -> None:
            with torch.no_grad():
                model(x)
            before = [*gc.callbacks]
            for _ in model.map([x] * 5):
                (callback,) = [one for one in gc.callbacks if one not in before]
                assert isinstance(callback, types.BuiltinMethodType)

        for work in (step, forwards):
            for _ in range(2):
                work()
            found = finalizers(work) and finalizers(work)
            assert found == [], width

"""Poison: memory that is only lent holds nothing of use as soon as nobody may read it any more.

What lies in the other end's window is gone with the next frame to it, and so are sums that nobody
looks at. Numbers become NaN, or -1: who has kept a part of that shows it.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from raydp_parallel.devices.layout import Run
from raydp_parallel.devices.memory import is_used
from raydp_parallel.driver import gradients
from raydp_parallel.replica import replica, training
from raydp_parallel.wire import group
from raydp_parallel.wire.channel import Channel


def poison(memory: Tensor) -> None:
    """Overwrite memory, past torch: no version moves."""
    if memory.device.type == "cpu":
        ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes)


class Wire:
    """A socket after whose next frame nobody may read some windows."""

    def __init__(self, sock: socket.socket, windows: Mapping[bool, Run]) -> None:
        self._sock, self._windows = sock, windows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, *frame: Any) -> int:
        """Send a frame, for which all that it needs was copied."""
        for window in self._windows.values():
            poison(window.memory)
        return self._sock.sendmsg(*frame)


def use(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Poison what this process lends, and what replicas do that are forked from it."""
    init, memory_of, summable = Channel.__init__, gradients._memory, group.summable

    def made(self: Any, sock: socket.socket, *rest: Any, **named: Any) -> None:
        init(self, sock, *rest, **named)
        self._sock = Wire(sock, self._in)

    def unused(master: Any, *about: Any) -> Tensor:
        for run in gradients._runs.get(master, ()):
            if not is_used(run):
                poison(run)
        return memory_of(master, *about)

    def emptied(*about: Any) -> Any:
        found = summable(*about)
        poison(found[0])
        return found

    put(Channel, "__init__", made)
    put(gradients, "_memory", unused)
    for module in (group, replica, training):
        put(module, "summable", emptied)

"""A `ProcessGroupNCCL` that is none: gloo carries its bytes, and it waits as a kernel does, until
it is aborted.

What nccl does not see it does not see either: that a member died, or left. Its operations do not
end then, neither well nor badly; when it is aborted they end at once, as if they were done, with
whatever is in the tensors.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

dist: Any = distributed

ENDLESS = timedelta(seconds=600)

stream_patience = [600.0]
"""Seconds that this process waits where a stream would: what comes next is computed too
early then.
"""

log: list[str] = []
"""What was asked of all of them, in this process."""


class Work:
    """An operation."""

    def __init__(self, group: ProcessGroupNCCL, work: Any) -> None:
        self._group = group
        self._work = work

    def is_completed(self) -> bool:
        """Whether the kernel has ended."""
        if self._group.aborted:
            return True
        if not self._work.is_completed():
            return False
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError:
            return False  # gloo saw that one died; nccl would not
        return True

    def synchronize(self) -> None:
        """The stream waits. There is none, so that this process does."""
        log.append("stream waits")
        until = time.monotonic() + stream_patience[-1]
        while not self.is_completed() and time.monotonic() < until:
            time.sleep(0.001)

    def wait(self, timeout: timedelta) -> None:
        """Like torch's, of what is done."""
        assert self.is_completed()
        self.synchronize()


class ProcessGroupNCCL:
    """One member's end."""

    class Options:
        """Torch's."""

        def __init__(self) -> None:
            self._timeout = timedelta(seconds=600)
            self.group_name = ""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        log.append(
            f"made {rank}/{size}, {options._timeout.total_seconds():g} s, "
            f"{bool(options.group_name)}"
        )
        self.aborted = False
        self._rank, self._size = rank, size
        plain = dist.ProcessGroupGloo._Options()
        plain._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        plain._timeout = ENDLESS
        self._gloo = dist.ProcessGroupGloo(store, rank, size, plain)

    def rank(self) -> int:
        """Torch's."""
        return self._rank

    def size(self) -> int:
        """Torch's."""
        return self._size

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Torch's."""
        log.append(f"connected {device}")

    def _work(self, verb: str, options: Any, *tensors: Any) -> Work:
        assert not self.aborted
        log.append(verb)
        options.timeout = ENDLESS
        return Work(self, getattr(self._gloo, verb)(*tensors, options))

    def broadcast(self, tensors: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("broadcast", options, tensors)

    def alltoall_base(self, into: Any, tensor: Any, a: Any, b: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("alltoall_base", options, into, tensor, a, b)

    def gather(self, into: Any, tensors: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("gather", options, into, tensors)

    def _allgather_base(self, into: Any, tensor: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("_allgather_base", options, into, tensor)

    def abort(self) -> None:
        """Torch's: all operations end."""
        log.append("abort")
        self.aborted = True
        # Never freed: gloo's end would wait for what is under way, if only when Python ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def install() -> None:
    """Let this process have nccl."""
    dist.ProcessGroupNCCL = ProcessGroupNCCL


@contextmanager
def installed() -> Iterator[list[str]]:
    """Let this process have nccl for the block; what is asked of it."""
    log.clear()
    install()
    try:
        yield log
    finally:
        del dist.ProcessGroupNCCL


def uuid_of(hello: Any, uuid: str) -> Any:
    """What a replica would say of itself that has a GPU."""
    return hello._replace(device="cuda:0", gpu_uuid=uuid)

"""A `ProcessGroupNCCL` that is none: gloo carries its bytes, and it waits as a kernel does, until
it is aborted.

Where the package takes the CPU for a GPU (`fake_gpu`) it has streams, as nccl has. An operation is
put on a stream of the group, behind what the caller's current stream was asked for so far; its
tensors are read and written when that stream comes to it, and hold nothing of use while it runs;
`Work.wait` lets the caller's current stream wait, and not the host. On a device without streams
this process waits in their place.

What nccl does not see it does not see either: that a member died, or left. Its operations do not
end then, neither well nor badly; when it is aborted they end at once, as if they were done, with
whatever is in the tensors.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from fake_gpu import NOT_YET, POISON, Stream
from torch import Tensor, distributed

from raydp_parallel import devices

dist: Any = distributed

ENDLESS = timedelta(seconds=600)

stream_patience = [600.0]
"""Seconds that this process waits where a stream would: what comes next is computed too
early then.
"""

log: list[str] = []
"""What was asked of all of them, in this process."""


class Work:
    """An operation that this process waits for.

    Args:
        group: Its group.
        work: Gloo's; None if it has not begun.
    """

    def __init__(self, group: ProcessGroupNCCL, work: Any = None) -> None:
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


class QueuedWork(Work):
    """An operation on the group's stream.

    Args:
        group: Its group.
        begin: Begins gloo's.
        written: The tensors that it writes to.
    """

    def __init__(
        self, group: ProcessGroupNCCL, begin: Callable[[], Any], written: Sequence[Tensor]
    ) -> None:
        super().__init__(group)
        self._begin = begin
        self._written = written
        self._stream = group.stream()
        here: Any = torch.cuda.current_stream(group.device)
        self._stream.wait_stream(here)
        self._stream.later(self._run)
        self._at = self._stream.asked

    def _run(self) -> object:
        """The kernel."""
        if self._work is None and not self._group.aborted:
            for tensor in self._written:
                tensor.view(torch.uint8).fill_(POISON)
            self._work = self._begin()
        return None if super().is_completed() else NOT_YET

    def is_completed(self) -> bool:
        """Whether the stream has come behind it; a device goes on by itself, this one here."""
        return self._group.aborted or self._stream.go_to(self._at) is not NOT_YET

    def synchronize(self) -> None:
        """The current stream waits."""
        log.append("stream waits")
        here: Any = torch.cuda.current_stream(self._group.device)
        here.gpu.waits(here, self._stream, self._at)

    def wait(self, timeout: timedelta) -> None:
        """The same: the host goes on."""
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
        self.device = torch.device("cpu")
        self._stream: Stream | None = None
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
        self.device = device

    def stream(self) -> Stream:
        """The stream of its operations, on a device that has streams."""
        if self._stream is None:
            self._stream = cast(Any, torch.cuda.Stream(self.device))
            self._stream.name = "nccl's stream"
        return self._stream

    def _work(self, verb: str, options: Any, *tensors: Any, written: Sequence[Tensor]) -> Work:
        assert not self.aborted
        log.append(verb)
        options.timeout = ENDLESS
        begin = functools.partial(getattr(self._gloo, verb), *tensors, options)
        if devices.is_cpu(self.device):
            return Work(self, begin())
        return QueuedWork(self, begin, written)

    def broadcast(self, tensors: Any, options: Any) -> Work:
        """Torch's."""
        written = tensors if options.rootRank != self._rank else ()
        return self._work("broadcast", options, tensors, written=written)

    def alltoall_base(self, into: Any, tensor: Any, a: Any, b: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("alltoall_base", options, into, tensor, a, b, written=[into])

    def gather(self, into: Any, tensors: Any, options: Any) -> Work:
        """Torch's."""
        written = [part for parts in into for part in parts]
        return self._work("gather", options, into, tensors, written=written)

    def _allgather_base(self, into: Any, tensor: Any, options: Any) -> Work:
        """Torch's."""
        return self._work("_allgather_base", options, into, tensor, written=[into])

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

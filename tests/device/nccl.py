"""NCCL among stand-in GPUs: gloo carries the bytes, and the device decides when.

An operation is a kernel in a stream of the group's own, behind the caller's. It ends once all
members' have begun, which no time limits; who waits for it waits as long, unless the group is
aborted. What it writes holds nothing of use before. With the first one the host waits in the same
way for all members. A death is not noticed.

The variable ``NCCL_STANDIN``, which replicas get as they do all of NCCL's, names what goes wrong:
``"hangs"`` as the members meet, ``"stalls"`` in each operation, ``"permuted"`` places. And
``NCCL_STANDIN_FATES`` a folder of `mortal.arm`: ``"broadcast 1"`` is the moment in which member 1
begins that operation, ``"late broadcast 1"`` that in which it ends; a trial's are ``"trial 1"``.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import standin
import torch
from torch import Tensor, distributed

dist: Any = distributed
_LONG = timedelta(days=1)


class Work:
    """An operation that was queued."""

    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def is_completed(self) -> bool:
        """Tell if the kernel has ended."""
        return self._end.query()

    def wait(self, _: timedelta = _LONG) -> None:
        """Let the current stream wait, not the host."""
        self._end.wait()


class ProcessGroupNCCL:
    """One member's end."""

    Options = type("Options", (), {})

    def __init__(self, store: Any, rank: int, size: int, _: Any) -> None:
        self._rank, self._aborted, self._how = rank, False, standin.fault()
        self._stream: Any = None
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _LONG
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options)

    def alltoall_base(self, into: Tensor, own: Tensor, taken: Any, sent: Any, how: Any) -> Work:
        """Give each member one part."""
        return self._launch("alltoall_base", own, into, taken, sent, how)

    def _allgather_base(self, into: Tensor, own: Tensor, how: Any) -> Work:
        return self._launch("_allgather_base", own, into, how)

    def broadcast(self, tensors: list[Tensor], how: Any) -> Work:
        """Give all members one member's."""
        return self._launch("broadcast", *tensors, *tensors, how)

    def abort(self) -> None:
        """End what is under way."""
        self._aborted = True
        # Never freed: gloo's end would wait for what is under way.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _launch(self, verb: str, own: Tensor, into: Tensor, *rest: Any) -> Work:
        if not all(t.is_cuda and t.is_contiguous() for t in (own, into)):
            raise ValueError("Tensors must be CUDA, dense and contiguous")
        moment = f"{'trial' if own.dtype == torch.int64 else verb} {self._rank}"
        _meet_fate(moment, f"full {moment}")
        if self._stream is None:
            self._stream = torch.cuda.Stream(own.device)
            together = self._gloo.barrier(_patiently(dist.BarrierOptions()))
            while not (self._aborted or (self._how != "hangs" and _ended(together))):
                time.sleep(1e-4)
        if self._aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        kernel = self._kernel(verb, own, into, moment, rest)
        next(kernel)
        self._stream.wait_stream(torch.cuda.current_stream(own.device))
        where = own.device.index, self._stream.stream_id
        standin.lib.standin_queue(*where, kernel.__next__)
        for t in (own, into):
            t.record_stream(self._stream)
        end: torch.cuda.Event = self._stream.record_event()
        return Work(end)

    def _kernel(
        self, verb: str, own: Tensor, into: Tensor, moment: str, rest: Any
    ) -> Iterator[bool]:
        """Tell, each time that the device comes to it, if it has ended."""
        mine, found = (torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (own, into))
        read, written = own.data_ptr(), into.data_ptr()
        given: Any = (found, mine)
        if verb == "broadcast":
            given, found = ([mine],), mine if rest[-1].rootRank != self._rank else mine[:0]
        _patiently(rest[-1])
        del own, into  # a kernel keeps no memory
        yield False
        _move(mine.data_ptr(), read, mine.nbytes)
        if found.nbytes:
            ctypes.memset(standin.lib.standin_kernels_address(written), 0xFF, found.nbytes)
        work = getattr(self._gloo, verb)(*given, *rest)
        while not (self._aborted or (self._how != "stalls" and _ended(work))):
            yield False
        if not self._aborted:
            _meet_fate(f"late {moment}")
            if self._how == "permuted" and verb == "_allgather_base":
                found.copy_(found.roll(mine.numel()))
            _move(written, found.data_ptr(), found.nbytes)
        yield True


def _patiently(how: Any) -> Any:
    how.timeout = _LONG
    return how


def _ended(work: Any) -> bool:
    try:
        return bool(work.is_completed() and (work.wait(_LONG) or True))
    except RuntimeError:  # gloo saw that one died; NCCL would not
        return False


def _move(to: int, source: int, size: int) -> None:
    if size:
        ctypes.memmove(*map(standin.lib.standin_kernels_address, (to, source)), size)


def _meet_fate(*moments: str) -> None:
    folder = os.environ.get("NCCL_STANDIN_FATES")
    if folder:
        from mortal import fate

        for moment in moments:
            fate(folder, moment)

"""A `ProcessGroupNCCL` that is none, for the fake GPU: gloo carries its bytes, and it waits as a
kernel does, until it is aborted.

What NCCL does not see it does not see either: that a member died or left. It takes nothing but
memory of the GPU, and some for itself; torch's threads must be told to be quiet. What it writes
arrives when it is asked whether it is done; other bytes are there until then.
"""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta
from typing import Any

import torch
from fake_gpu import POISON
from mortal import fate
from torch import Tensor, distributed

dist: Any = distributed
HOW, FOLDER = "RAYDP_FAKE_NCCL", "RAYDP_FAKE_NCCL_FOLDER"
"""Variables: ``permuted``, ``hangs`` or ``stalls``; where members look whether they are to die."""
_LONG = timedelta(seconds=600)
_QUIET = {"BLOCKING_WAIT": "0", "ASYNC_ERROR_HANDLING": "0", "ENABLE_MONITORING": "0"}
_QUIET |= {"DUMP_ON_TIMEOUT": "0", "WAIT_TIMEOUT_DUMP_MILSEC": "1"}


class Work:
    """An operation on a stream."""

    def __init__(
        self, group: ProcessGroupNCCL, work: Any, into: Tensor, found: Tensor, moment: str
    ) -> None:
        self._group, self._work, self._moment = group, work, moment
        self._into, self._found = into, found

    def is_completed(self) -> bool:
        """Tell if the kernel has ended."""
        if self._group.aborted:
            return True
        if os.environ.get(HOW) == "stalls":
            return False
        if self._work is None or not self._work.is_completed():
            return self._work is None
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError:
            return False  # gloo saw that one died; NCCL would not
        self._work = None
        fate(os.environ[FOLDER], f"late {self._moment}")
        self._into.copy_(self._found)
        return True

    def wait(self, _: timedelta = _LONG) -> None:
        """Let the stream wait."""
        assert self._work is None or self._group.aborted


class ProcessGroupNCCL:
    """One member's end."""

    class Options:
        """Torch's."""

    def __init__(self, store: Any, rank: int, size: int, _: Options) -> None:
        for name, value in _QUIET.items():
            assert os.environ.get(f"TORCH_NCCL_{name}") == value, name
        self.aborted, self._rank, self._gpus = False, rank, None
        plain = dist.ProcessGroupGloo._Options()
        plain._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        plain._timeout = _LONG
        self._gloo = dist.ProcessGroupGloo(store, rank, size, plain)

    def _begin(self, verb: str, own: Tensor, into: Tensor, writes: bool, *rest: Any) -> Work:
        assert own.is_cuda and not self.aborted
        if os.environ.get(HOW) == "hangs":
            time.sleep(600)
        if self._gpus is None:
            self._gpus = torch.cuda.current_stream().gpus  # type: ignore[attr-defined]
            self._gpus.nccl += 1
        moment = f"{'trial' if own.dtype == torch.int64 else verb} {self._rank}"
        fate(os.environ[FOLDER], moment)
        fate(os.environ[FOLDER], f"full {moment}")
        found = into.clone()
        *rest, options = rest  # type: ignore[assignment]
        options.timeout = _LONG
        given = ([found],) if verb == "broadcast" else (found, own.clone())
        work = getattr(self._gloo, verb)(*given, *rest, options)
        if verb == "_allgather_base" and os.environ.get(HOW) == "permuted":
            work.wait()
            found.copy_(found.roll(own.numel()))
        if writes and into.numel():
            into.view(torch.uint8).fill_(POISON)
        return Work(self, work, into, found, moment)

    def alltoall_base(self, into: Any, own: Any, taken: Any, sent: Any, options: Any) -> Work:
        """Torch's."""
        return self._begin("alltoall_base", own, into, True, taken, sent, options)

    def _allgather_base(self, into: Any, own: Any, options: Any) -> Work:
        """Torch's."""
        return self._begin("_allgather_base", own, into, True, options)

    def broadcast(self, tensors: Any, options: Any) -> Work:
        """Torch's."""
        (own,) = tensors
        return self._begin("broadcast", own, own, options.rootRank != self._rank, options)

    def abort(self) -> None:
        """Torch's: all operations end."""
        self.aborted = True
        # Never freed: gloo's end would wait for what is under way.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def install() -> None:
    """Let this process have NCCL."""
    dist.ProcessGroupNCCL = ProcessGroupNCCL

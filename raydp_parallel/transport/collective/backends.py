"""The two backends of groups: gloo in the machine's memory, and nccl in the memory of GPUs.

[Note: the order of operations]
A gloo operation is done when the host sees that it is done, and the next one is begun after that.
An nccl operation is only put on a stream, and the next one is put behind it without the host: first
the exchange of a sum, then its additions, then the gather to the root, one sum after the other. So
all members have the same order whatever their backward does. All of this runs on a stream of the
group, beside backward. It begins behind the streams that computed the gradients, and only work with
the sums waits for it. If a group breaks, no work waits for that stream, so operations that hang
there delay nothing.

[Note: how a member learns that it has to leave]
A member that waits for a member that died learns of that from gloo's sockets, if they are closed;
an nccl kernel waits for ever. So a member that waits checks regularly whether it was told to leave.
The driver tells it, by a call that waits behind no other call, as soon as it knows of a death, or
of a member that could not take part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from raydp_parallel import devices
from raydp_parallel.transport.group_messages import JoinGroup

log = logging.getLogger("raydp_parallel")

# torch's stubs lack most of what is needed to make a group directly
dist: Any = distributed

_LEAST = 0.001
"""Least time in seconds to wait for an operation, also when its deadline has passed."""

_CHECK_INTERVAL = 0.1
"""Seconds after which a member that waits checks whether it was told to leave."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002
"""Seconds between two checks whether a GPU is done; the pause doubles up to the longest."""

_NCCL = {
    # Errors and late operations are ours to handle: torch would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Variables of the environment that torch reads when it makes a group."""


class Left(RuntimeError):
    """This process is no longer a member of the group."""


class Operation(Protocol):
    """An operation of all members that has begun."""

    def ready(self) -> bool:
        """Whether the next operation may begin now, without waiting."""

    def follow(self, until: float) -> None:
        """Let later work wait for it. Raises `RuntimeError` if it failed, or is late."""

    def finish(self, until: float) -> None:
        """Wait until it is done. Raises `RuntimeError` if it failed, or is late."""


class GroupBackend(Protocol):
    """One member's end of a group."""

    def connect(self) -> None:
        """Connect to the other members, if the constructor has not done so. Another thread may call
        `leave` meanwhile.
        """

    def near(self, tensor: Tensor) -> Tensor:
        """A tensor of this device in the memory that the backend works in."""

    def aside(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        """A block in which operations on a computed tensor begin, and in which work on their
        results runs, beside the current stream.
        """

    def rejoin(self, tensor: Tensor) -> None:
        """Let later work of the current stream use a tensor that was computed aside."""

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        """Begin to copy the root's tensor to the tensors of the other members."""

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        """Begin to send each member its part of this member's ``whole``, and to receive the parts
        for this member.
        """

    def gather(self, whole: Tensor, part: Tensor, root: int | None, patience: float) -> Operation:
        """Begin to copy each member's part into the root's ``whole``, or into that of all."""

    def leave(self) -> None:
        """Leave the group, from any thread and at any time. A thread that waits here gets `Left`;
        the other members find out from their sockets or from the driver.
        """


class _GlooWork:
    """A gloo operation."""

    def __init__(self, work: Any, backend: Gloo) -> None:
        self._work = work
        self._backend = backend

    def ready(self) -> bool:
        return bool(self._work.is_completed())

    def follow(self, until: float) -> None:
        self.finish(until)

    def finish(self, until: float) -> None:
        while True:
            left = until - time.monotonic()
            try:
                seconds = min(max(_LEAST, left), _CHECK_INTERVAL)
                self._work.wait(timedelta(seconds=seconds))
                return
            except RuntimeError:
                self._backend.check()
                if self._work.is_completed():
                    # It failed, or finished after this wait had ended: another wait tells which.
                    self._work.wait(timedelta(seconds=_CHECK_INTERVAL))
                    return
                if left <= _CHECK_INTERVAL:
                    raise


class Gloo:
    """A group in the machine's memory.

    Args:
        join: The driver's request.
        address: This process's address in the network of the other members.
        store: The store by which members find each other.
    """

    def __init__(self, join: JoinGroup, address: str, store: Any) -> None:
        self._left = False
        self._begun: list[Any] = []
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=join.patience)
        options._threads = 2
        # Two groups: one member may gather a sum while another still exchanges the next one.
        prefixes = [join.group, join.group + "+"][: 1 if join.size == 2 else 2]
        self._groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), join.rank, join.size, options)
            for prefix in prefixes
        ]

    def connect(self) -> None:
        """Nothing: the constructor has connected."""

    def near(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def aside(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rejoin(self, tensor: Tensor) -> None:
        """Nothing: no work is done aside."""

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        options = _options(dist.BroadcastOptions(), patience, root)
        return self._begin(0, "broadcast", options, [tensor])

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        tensors: tuple[Any, ...] = (parts, whole, [], [])
        return self._begin(0, "alltoall_base", _options(dist.AllToAllOptions(), patience), *tensors)

    def gather(self, whole: Tensor, part: Tensor, root: int | None, patience: float) -> Operation:
        group = self._group(1)
        if root is None:
            options = _options(dist.distributed_c10d.AllgatherOptions(), patience)
            return self._begin(1, "_allgather_base", options, whole, part)
        into = [[*whole.chunk(group.size())]] if group.rank() == root else []
        options = _options(dist.GatherOptions(), patience, root)
        return self._begin(1, "gather", options, into, [part])

    def _begin(self, which: int, verb: str, options: Any, *tensors: Any) -> Operation:
        work = getattr(self._group(which), verb)(*tensors, options)
        self._begun = [one for one in self._begun if not one.is_completed()] + [work]
        return _GlooWork(work, self)

    def _group(self, which: int) -> Any:
        self.check()
        return self._groups[which]

    def check(self) -> None:
        """Raise `Left` if this process has left."""
        if self._left:
            raise Left("this process has left the group")

    def leave(self) -> None:
        self._left = True
        groups, self._groups = self._groups, []
        begun, self._begun = self._begun, []
        if all(work.is_completed() for work in begun):
            groups.clear()  # closes the sockets
            return
        # The destructor waits for operations in flight. Those end when other members close their
        # sockets, or by their timeout.
        threading.Thread(target=groups.clear, name="raydp-leaving", daemon=True).start()


class _NcclWork:
    """An nccl operation on its stream."""

    def __init__(self, work: Any, backend: Nccl) -> None:
        self._work = work
        self._backend = backend

    def ready(self) -> bool:
        return True  # the next operation is put behind it

    def follow(self, until: float) -> None:
        self._work.synchronize()  # only the stream waits

    def finish(self, until: float) -> None:
        # Torch's own wait counts its time from the beginning of the operation, and `leave` does not
        # end it.
        pause = _FIRST_PAUSE
        while not self._work.is_completed():
            self._backend.check()
            if time.monotonic() > until:
                raise RuntimeError("others did not do their part in time")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._backend.check()  # aborted operations are completed too
        self._work.wait(timedelta(seconds=_CHECK_INTERVAL))  # raises the operation's error


class Nccl:
    """A group in the memory of GPUs. Each member needs a GPU of its own.

    Args:
        join: The driver's request.
        device: This process's GPU.
        store: The store by which members find each other.
    """

    def __init__(self, join: JoinGroup, device: torch.device, store: Any) -> None:
        self._left = False
        self._device = device
        self._lane = devices.Lane(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=join.patience)
        options.group_name = join.group
        with _environment(_NCCL):
            prefix = dist.PrefixStore(join.group, store)
            self._groups = [dist.ProcessGroupNCCL(prefix, join.rank, join.size, options)]

    def connect(self) -> None:
        self._group().eager_connect_single_device(self._device)

    def near(self, tensor: Tensor) -> Tensor:
        return tensor

    def aside(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        return self._lane.taken(tensor)

    def rejoin(self, tensor: Tensor) -> None:
        self._lane.rejoin(tensor)

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        return self._begin("broadcast", _options(dist.BroadcastOptions(), patience, root), [tensor])

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        tensors: tuple[Any, ...] = (parts, whole, [], [])
        return self._begin("alltoall_base", _options(dist.AllToAllOptions(), patience), *tensors)

    def gather(self, whole: Tensor, part: Tensor, root: int | None, patience: float) -> Operation:
        group = self._group()
        if root is None:
            options = _options(dist.distributed_c10d.AllgatherOptions(), patience)
            return self._begin("_allgather_base", options, whole, part)
        into = [[*whole.chunk(group.size())]] if group.rank() == root else []
        return self._begin("gather", _options(dist.GatherOptions(), patience, root), into, [part])

    def _begin(self, verb: str, options: Any, *tensors: Any) -> Operation:
        return _NcclWork(getattr(self._group(), verb)(*tensors, options), self)

    def _group(self) -> Any:
        self.check()
        return self._groups[0]

    def check(self) -> None:
        """Raise `Left` if this process has left."""
        if self._left:
            raise Left("this process has left the group")

    def leave(self) -> None:
        self._left = True  # before the abort, so that no thread takes an aborted operation for done
        groups, self._groups = self._groups, []
        if groups:
            threading.Thread(
                target=_abort, args=(groups,), name="raydp-leaving", daemon=True
            ).start()


def _abort(groups: list[Any]) -> None:
    """End the kernels that wait for other members. This may take as long as a GPU is busy."""
    try:
        groups[0].abort()
    except RuntimeError as error:
        log.info("a group of nccl's could not be aborted: %s", error)
    groups.clear()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the block in which torch reads them, and restore them
    for the user's own groups.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _options(options: Any, patience: float, root: int | None = None) -> Any:
    options.timeout = timedelta(seconds=patience)
    if root is not None:
        options.rootRank = root
    return options

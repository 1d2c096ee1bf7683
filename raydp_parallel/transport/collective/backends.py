"""What groups are made of: gloo, which works in the machine's memory, and nccl, which works in that
of GPUs.

[Note: what waits for whom]
With gloo an operation is done when the host sees it done: what comes next is asked for after that.
With nccl it is only put on a stream, and what comes next is put behind it, without the host: first
the exchange of a sum, then its additions, then the way to the root, one sum after the other, so
that all members have the same order whatever their backward does. All that happens on a stream of
the group's own, beside backward. It begins behind the streams on which the gradients were made, and
only what is done with the sums comes behind it. Where a group breaks nothing comes behind it, so
that whatever may still lie on that stream holds nobody up.

[Note: who tells a member to leave]
A member that waits for one that died hears of that from gloo's sockets, if they are closed, and
from nccl not at all: a kernel waits for ever. So it looks up now and then whether it was told to
leave. The driver does so, by a call of its own that waits behind no other, as soon as it knows of a
death, or of a member that could not do its part.
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

# torch's stubs leave out most of what it takes to make a group of one's own
dist: Any = distributed

_LEAST = 0.001
"""Seconds that the last of a row of operations is waited for, however late it is."""

_LOOK = 0.1
"""Seconds after which one that waits looks whether it was told to leave."""

_TURN, _LONGEST_TURN = 0.0001, 0.002
"""Seconds between two looks whether a GPU is done, which grow."""

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
"""What torch reads of the environment when it makes a group."""


class Left(RuntimeError):
    """This process is no member any more."""


class Operation(Protocol):
    """Something that members do together, on its way."""

    def ready(self) -> bool:
        """Whether what comes next may be asked for now, without waiting."""

    def follow(self, until: float) -> None:
        """Let what is asked for next come behind it. Raises `RuntimeError` if it failed, or is
        late.
        """

    def finish(self, until: float) -> None:
        """Wait until it is done. Raises `RuntimeError` if it failed, or is late."""


class GroupBackend(Protocol):
    """One member's end of a group."""

    def connect(self) -> None:
        """Find the others, as far as that was not done when it was made. Others may call `leave`
        meanwhile.
        """

    def near(self, tensor: Tensor) -> Tensor:
        """A tensor of this device where the backend works."""

    def aside(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        """A block in which operations on a tensor that is there now are begun, and what follows
        them is computed.
        """

    def rejoin(self) -> None:
        """Let what is computed from now on come behind what was computed aside."""

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        """Begin to copy the root's tensor into those of the others."""

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        """Begin to give each member its part of this one's ``whole``, and to collect those for this
        one.
        """

    def gather(self, whole: Tensor, part: Tensor, root: int, patience: float) -> Operation:
        """Begin to bring each member's part into the root's ``whole``."""

    def leave(self) -> None:
        """End it, from any thread and at any moment. Who waits here is told so; others see or are
        told it, too.
        """


class _GlooWork:
    """An operation of gloo's."""

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
                self._work.wait(timedelta(seconds=min(max(_LEAST, left), _LOOK)))
                return
            except RuntimeError:
                self._backend.check()
                if self._work.is_completed():
                    # It failed, or it was done between the end of this wait and now. Asked again it
                    # says which.
                    self._work.wait(timedelta(seconds=_LOOK))
                    return
                if left <= _LOOK:
                    raise


class Gloo:
    """A group in the machine's memory.

    Args:
        join: What the driver said of it.
        address: This process's address, for the network that the others are on.
        store: Where members find each other.
    """

    def __init__(self, join: JoinGroup, address: str, store: Any) -> None:
        self._left = False
        self._begun: list[Any] = []
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=join.patience)
        options._threads = 2
        # Parts of one sum go to the root while those of the next are exchanged, here sooner and
        # there later.
        prefixes = [join.group, join.group + "+"][: 1 if join.size == 2 else 2]
        self._groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), join.rank, join.size, options)
            for prefix in prefixes
        ]

    def connect(self) -> None:
        """They were found."""

    def near(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def aside(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rejoin(self) -> None:
        """Nothing was computed aside."""

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        return self._begin(
            0, "broadcast", _options(dist.BroadcastOptions(), patience, root), [tensor]
        )

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        return self._begin(
            0, "alltoall_base", _options(dist.AllToAllOptions(), patience), parts, whole, [], []
        )

    def gather(self, whole: Tensor, part: Tensor, root: int, patience: float) -> Operation:
        group = self._group(1)
        into = [[*whole.chunk(group.size())]] if group.rank() == root else []
        return self._begin(
            1, "gather", _options(dist.GatherOptions(), patience, root), into, [part]
        )

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
            groups.clear()  # with the sockets
            return
        # Their end waits for what is under way, which ends with the sockets of others, or when its
        # time is over.
        threading.Thread(target=groups.clear, name="raydp-leaving", daemon=True).start()


class _NcclWork:
    """An operation of nccl's, on its stream."""

    def __init__(self, work: Any, backend: Nccl) -> None:
        self._work = work
        self._backend = backend

    def ready(self) -> bool:
        return True  # what comes next is put behind it

    def follow(self, until: float) -> None:
        self._work.synchronize()  # the stream waits, and not the host

    def finish(self, until: float) -> None:
        # Torch's own wait counts its time from the beginning of the operation, and does not hear of
        # `leave`.
        pause = _TURN
        while not self._work.is_completed():
            self._backend.check()
            if time.monotonic() > until:
                raise RuntimeError("others did not do their part in time")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_TURN)
        self._backend.check()  # what is aborted ends, too
        self._work.wait(timedelta(seconds=_LOOK))  # raises what went wrong


class Nccl:
    """A group in the memory of GPUs, of which no two may be the same.

    Args:
        join: What the driver said of it.
        device: This process's.
        store: Where members find each other.
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

    def rejoin(self) -> None:
        self._lane.rejoin()

    def broadcast(self, tensor: Tensor, root: int, patience: float) -> Operation:
        return self._begin("broadcast", _options(dist.BroadcastOptions(), patience, root), [tensor])

    def exchange(self, parts: Tensor, whole: Tensor, patience: float) -> Operation:
        return self._begin(
            "alltoall_base", _options(dist.AllToAllOptions(), patience), parts, whole, [], []
        )

    def gather(self, whole: Tensor, part: Tensor, root: int, patience: float) -> Operation:
        group = self._group()
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
        self._left = True  # before anything ends early, so that nobody takes that for done
        groups, self._groups = self._groups, []
        if groups:
            threading.Thread(
                target=_abort, args=(groups,), name="raydp-leaving", daemon=True
            ).start()


def _abort(groups: list[Any]) -> None:
    """End the kernels that wait for others. This may take as long as a GPU is busy."""
    try:
        groups[0].abort()
    except RuntimeError as error:
        log.info("a group of nccl's could not be aborted: %s", error)
    groups.clear()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have some variables for the block, in which torch reads them: a user's own groups have
    others.
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

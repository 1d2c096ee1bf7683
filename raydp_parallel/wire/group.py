"""`Exchange`: a group of replicas that give each other tensors.

[Note: order]
An exchange is an operation of all members. They must come to the same ones in the same order, as
chunks do that run the same layers. So each exchange begins with a few numbers that say what it is:
members that differ, or of which one has ended, all get an error instead of waiting for each other.
Who fails closes its sockets, which the others notice, as they notice a death.

[Note: NCCL]
These numbers go by gloo in any case, and tensors by NCCL where each member has a GPU of its own.
NCCL does not notice a death: who waits looks whether the driver has closed the group's store, or a
member has noted there that it left.

[Note: stores]
Members find each other by a store, which on one machine is memory that they share: no other user
reaches it, and a wait for it ends as soon as the driver closes it. Torch's own stores have neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from raydp_parallel.devices import memory
from raydp_parallel.devices.layout import ALIGN, layout_of, specs_of
from raydp_parallel.wire.messages import Seat
from raydp_parallel.wire.windows import Window

dist: Any = distributed  # torch's stubs lack most of what is needed to make a group directly

END = -1
"""The mark of a member that has ended its part of a call."""
_SUM = 1 << 20
"""The mark of a sum, which those of layers do not reach."""
_PIECE = 1 << 20
"""Numbers that a member adds at once: what they need beside the sums stays small."""
_PAUSE = 1e-4
_LOOK = 0.1
"""Seconds between two looks whether NCCL is done, and whether the group still exists."""
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Torch would end the process where an operation is late, log a line a second once a store is gone,
and sleep a minute after an error while the next operation waits.
"""
_CHANNELS = "NCCL_MAX_P2P_NCHANNELS"
"""Each costs memory for each pair of GPUs: eight H100 took 4 GB each with NCCL's own choice."""
_GONE = "left"
"""The store's key that a member sets as it leaves."""
_PART, _LEFT = 1 << 16, 1
"""Bytes of a member's part of a store in memory, and the mark of a store that was closed."""
_DESCRIPTORS = 16
"""Descriptors that a store with a port may need."""
_SOON = 10.0
"""Seconds in which members that are alive come."""
_TRY, _TRIES = 1.0, 5
"""Seconds in which they then connect to each other, and how often gloo tries that."""


def open_store(members: int, host: str | None) -> tuple[object, Window | tuple[str, int]]:
    """Make the store by which members of a group find each other: memory, or a port of a host;
    returns it and its address.
    """
    if host is None:
        window = Window((members + 1) * _PART)
        return window, window
    listener = socket.create_server((host, 0))  # torch by itself would listen on all interfaces
    port = listener.getsockname()[1]
    with contextlib.ExitStack() as spare:  # where torch finds too few, it ends the process
        for _ in range(_DESCRIPTORS):
            spare.callback(os.close, os.dup(listener.fileno()))
    listening = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, is_master=True, **listening), (host, port)


def close_store(store: object) -> None:
    """Let members leave; a port is closed by the end of its last reference."""
    if isinstance(store, Window):
        store.map[0] = _LEFT


class Abandoned(RuntimeError):
    """Tells a member that the others do not answer: one of them failed, or ended."""


class Differing(RuntimeError):
    """Tells all members that they are not at the same exchange."""


class _Memory(dist.Store):  # type: ignore[misc]
    """A store in memory that members share. Each writes lines to a part of its own."""

    def __init__(self, window: Window, rank: int, size: int, patience: timedelta) -> None:
        super().__init__()
        self._window, self._size, self._patience = window, size, patience
        self._at = (rank + 1) * _PART

    def set(self, key: str, value: bytes) -> None:
        line = f"{key} {value.hex()}".encode()
        os.pwrite(self._window.fd, line, self._at)
        self._at += len(line)
        os.pwrite(self._window.fd, b"\n", self._at)  # now it counts
        self._at += 1

    def _entries(self) -> dict[str, str]:
        if os.pread(self._window.fd, 1, 0)[0] == _LEFT:
            raise Abandoned("the driver has closed their group")
        found: dict[str, str] = {}
        for rank in range(self._size):
            lines = os.pread(self._window.fd, _PART, (rank + 1) * _PART).split(b"\n")[:-1]
            found.update(line.decode().split() for line in lines)  # type: ignore[misc]
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return self._entries().keys() >= {*keys}

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._patience).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise Abandoned("they did not come in time")
            time.sleep(_PAUSE)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes.fromhex(self._entries()[key])


class Exchange:
    """One member's end of a group.

    Args:
        request: The seat in the group.
        device: The GPU of this member, if tensors go by NCCL.

    Raises:
        Abandoned: The others did not come, or cannot be reached.
    """

    def __init__(self, request: Seat, device: torch.device) -> None:
        # This member, how many there are, and the one that sends sums, and passes weights on.
        self.rank, self.size, self.root = request.rank, request.size, request.root
        self._device = device if request.nccl else torch.device("cpu")
        self._patience = timedelta(seconds=request.timeout)
        self._begun: object = None  # the operation that is on its way
        self._nccl: object = None
        # For one that dies now: less than the driver waits for an answer, also one after the other.
        third = self._patience / 3
        soon, options = min(third, timedelta(seconds=_SOON)), dist.ProcessGroupGloo._Options()
        options._timeout = min(third / _TRIES, timedelta(seconds=_TRY))
        options._threads = 2
        try:
            if isinstance(request.address, Window):
                host = "127.0.0.1"
                self._store: Any = _Memory(request.address, self.rank, self.size, self._patience)
            elif request.address is None:
                raise Abandoned("this one has not joined their group")
            else:
                # If it is not there any more, torch would go on trying.
                with socket.create_connection(request.address, soon.total_seconds()) as probe:
                    host = probe.getsockname()[0]
                self._store = dist.TCPStore(*request.address, is_master=False, timeout=soon)
                self._store.set_timeout(self._patience)
            everyone = [f"here/{rank}" for rank in range(self.size)]
            self._store.set(everyone[self.rank], b"1")
            self._store.wait(everyone, soon)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            store = dist.PrefixStore("gloo", self._store)
            self._gloo: object = dist.ProcessGroupGloo(store, self.rank, self.size, options)
            if request.nccl:
                os.environ.update(_NCCL)
                os.environ.setdefault(_CHANNELS, "8")
                store = dist.PrefixStore("nccl", self._store)
                theirs = dist.ProcessGroupNCCL.Options()
                self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, theirs)
            self._group = self._nccl or self._gloo  # by which tensors go
        except (RuntimeError, OSError) as error:
            text = f"the replicas of a call could not find each other: {error}"
            raise Abandoned(text) from None

    @contextlib.contextmanager
    def taking_part(self, seat: Seat) -> Iterator[Exchange]:
        """Run a block as one of several chunks, of which layers may exchange tensors if the seat
        says so; if it fails, the others do not wait for this one.
        """
        global current
        before, current = current, self if seat.layers else None
        try:
            yield self
            if seat.layers:
                self.meet(END, 0)
        except BaseException:
            self.close()
            raise
        finally:
            current = before

    # Each of these is an exchange. Its mark says what it is for: a number from 0, the same for all
    # members, who get `Differing` where marks or sizes are not. Memory is taken before they meet: a
    # member that has none is missed there.

    def swap(self, rows: Tensor, mark: int = 0, number: int = 0) -> Tensor:
        """Give each member one row, and all a number; returns the rows that they gave to this one,
        by rank.
        """
        own = self._brought(rows)
        got = torch.empty_like(own)
        self.meet(mark, rows[0].nbytes, number)
        self._do(self._group, "alltoall_base", dist.AllToAllOptions(), got, own, [], [])
        return got.to(rows.device)

    def spread(self, run: Tensor) -> None:
        """Copy the root's run to those of all."""
        own, options = self._brought(run), dist.BroadcastOptions()
        options.rootRank = self.root
        self.meet(0, run.nbytes)
        self._do(self._group, "broadcast", options, [own])
        if own.device != run.device:
            run.copy_(own)

    def add(self, runs: Sequence[Tensor], order: Sequence[int], what: int = 0) -> None:
        """Sum the members' runs in place: of each piece, each member adds one part. They meet once:
        who fails later is noticed as one that fails within a run is.

        Args:
            runs: This member's; the length of each is a multiple of the group's size.
            order: The members whose runs are added, in this order.
            what: Says what the runs are; the same for all members.
        """
        pieces = [piece for run in runs for piece in run.split(_PIECE * self.size)]
        most = max([piece.nbytes for piece in pieces], default=0)
        got = torch.empty(most, dtype=torch.uint8, device=self._device)  # once, for all pieces
        self.meet(_SUM, hash((what, *[run.nbytes for run in runs])))
        for piece in pieces:
            own = self._brought(piece)
            rows, part = got[: own.nbytes].view(own.dtype), own.numel() // self.size
            self._do(self._group, "alltoall_base", dist.AllToAllOptions(), rows, own, [], [])
            parts = rows.view(self.size, part)
            total = parts[order[0]]
            for member in order[1:]:
                total.add_(parts[member])
            options = dist.distributed_c10d.AllgatherOptions()
            self._do(self._group, "_allgather_base", options, own, total)
            if own.device != piece.device:
                piece.copy_(own)

    def exists(self) -> bool:
        """Tell if neither the driver nor a member has closed the group."""
        with contextlib.suppress(RuntimeError):
            return not self._store.check([_GONE])
        return False

    def close(self) -> None:
        """Leave the group; members that wait for this one get an error."""
        groups, begun = [self._gloo, self._nccl], self._begun
        self._gloo = self._nccl = self._group = self._begun = None
        with contextlib.suppress(RuntimeError):
            self._store.set(_GONE, b"1")
        threading.Thread(target=_drop, args=[groups, begun], daemon=True).start()

    def meet(self, mark: int, size: int, number: int = 0) -> None:
        """Wait until all members are at the same exchange, and tell them a number.

        Raises:
            Abandoned: One of them does not come.
            Differing: They are not.
        """
        own = torch.tensor([mark, size, number], device="cpu").expand(self.size, -1).contiguous()
        rows = torch.empty_like(own)
        self._do(self._gloo, "alltoall_base", dist.AllToAllOptions(), rows, own, [], [])
        marks, sizes, numbers = rows.T.tolist()
        self.numbers: list[int] = numbers  # that members gave as they met last, by rank
        if len({*zip(marks, sizes, strict=True)}) == 1:
            return
        names = {END: "has ended"}
        places = [f"chunk {k} {names.get(n, f'waits at number {n}')}" for k, n in enumerate(marks)]
        raise Differing(
            f"the chunks run different layers: {', '.join(places)}. What decides which layers run, "
            "and their sizes, must be the same for all chunks"
        )

    def _brought(self, t: Tensor) -> Tensor:
        """Bring a tensor to the memory in which the group works."""
        return t.detach().contiguous().to(self._device)

    def _do(self, group: object, verb: str, options: Any, *tensors: object) -> None:
        """Let all members do one operation, and wait until it is done."""
        if group is None:
            raise Abandoned("this replica has left the group of the call's replicas")
        options.timeout = self._patience
        looked, until = time.monotonic(), time.monotonic() + self._patience.total_seconds()
        try:
            self._begun = work = getattr(group, verb)(*tensors, options)
            while not work.is_completed():
                if group is self._nccl:
                    time.sleep(_PAUSE)
                else:
                    with contextlib.suppress(RuntimeError):  # it is late, or has failed, and ended
                        work.wait(timedelta(seconds=_LOOK))
                if time.monotonic() > looked + _LOOK:
                    looked = time.monotonic()
                    if looked > until or not self.exists():
                        raise Abandoned("they are gone")
            work.wait(self._patience)
            self._begun = None  # it holds the tensors
        except RuntimeError as error:
            self.close()
            text = str(error).split(" This is typically")[0]
            raise Abandoned(f"the replicas of other chunks did not answer: {text}") from None


current: Exchange | None = None
"""The group of the call that this process runs just now; None if a chunk runs without others."""

exchanging_layers: dict[type, Callable[..., bool]] = {}
"""The classes of layers that use it, each with a function that tells if a layer does so now. One is
entered as its module is imported: from then on models are searched for it.
"""


def summable(
    like: Sequence[Tensor], members: int, last: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Make a run for sums of so many members, and show the tensors of one dtype in it.

    Args:
        like: Tensors of their geometry.
        members: How many there are.
        last: The run of the last sums. It is used again if it fits and nobody has a part of it: new
            pages cost more than the sums.
    """
    layout, dtype = layout_of(tuple(specs_of(like))), like[0].dtype
    size = -(-layout.size // (members * ALIGN)) * members * ALIGN
    if last is None or last.nbytes != size or memory.is_used(last):
        del last
        last = torch.empty(size // dtype.itemsize, dtype=dtype, device=like[0].device)
    return last, layout.views(last.view(torch.uint8))


def _drop(groups: list[Any], begun: Any) -> None:
    """Wait for what is in flight, as whoever has the last reference does, and close the sockets."""
    if groups[1] is not None:
        groups[1].abort()  # ends what waits on the GPU
    with contextlib.suppress(AttributeError, RuntimeError):
        begun.wait()
    groups.clear()

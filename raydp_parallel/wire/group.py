"""`Exchange`: a group of replicas in which each gives each of the others one row.

[Note: order]
An exchange is an operation of all members. They must come to the same ones in the same order, as
chunks do that run the same layers. So each exchange begins with a few numbers that say what it is:
members that differ, or of which one has ended, all get an error instead of waiting for each other.
Who fails closes its sockets, which the others notice, as they notice a death.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

dist: Any = distributed  # torch's stubs lack most of what is needed to make a group directly

_END = -1
"""The mark of a member that has ended its part of a call."""


def open_store(host: str = "127.0.0.1") -> Any:
    """Listen for the members of groups, which find each other here. The store's ``port`` and this
    host are their ``store_address``; it has to live until they have joined.
    """
    listener = socket.socket()
    listener.bind((host, 0))  # torch by itself would listen on all interfaces
    listener.listen(128)
    port = listener.getsockname()[1]
    listening = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, is_master=True, **listening)


def check_apart(slots: Sequence[Any], in_process: bool) -> None:
    """Refuse chunks that run one after the other: none of them could wait for the others."""
    if in_process or len({*map(id, slots)}) < len(slots):
        raise ValueError(
            "synchronised batch norm needs a replica in a process of its own for each chunk; here "
            "chunks run one after the other, because of Options(in_process=True) or a device that "
            "is given twice"
        )


class Abandoned(RuntimeError):
    """Tells a member that the others do not answer: one of them failed, or ended."""


class Exchange:
    """One member's end of a group.

    Args:
        rank: Which member this is: the number of its chunk.
        size: How many there are.
        store_address: Host and port of the store where they find each other.
        timeout: Seconds that members wait for each other, to join and in each exchange.
        name: A name that tells the groups of one store apart.

    Raises:
        Abandoned: The others did not come, or cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store_address: tuple[str, int],
        timeout: float,
        name: str = "group",
    ) -> None:
        self.rank = rank
        self.size = size
        self._patience = timedelta(seconds=timeout)
        self._begun: Any = None
        self.closed = False
        host, port = store_address
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(host, port))]
        options._timeout = min(self._patience, timedelta(seconds=60))  # for one that dies now
        options._threads = 2
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=self._patience)
            store = dist.PrefixStore(name, store)
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            text = f"the replicas of a call could not find each other: {error}"
            raise Abandoned(text) from None

    def swap(self, rows: Tensor, mark: int = 0) -> Tensor:
        """Give each member one row; returns the rows that they gave to this one, by rank.

        Args:
            rows: One row for each member.
            mark: The purpose of the exchange, a number from 0, the same for all members.

        Raises:
            RuntimeError: The others are not at the same exchange, or do not answer.
        """
        self._meet(mark, rows[0].nbytes)
        return self._swapped(rows.detach().cpu().contiguous()).to(rows.device)

    def end(self) -> None:
        """Tell the others that this member has ended its part of a call.

        Raises:
            RuntimeError: One of them has not.
        """
        self._meet(_END, 0)

    def close(self) -> None:
        """Leave the group; members that wait for this one get an error."""
        group, begun = self._group, self._begun
        self._group = self._begun = None
        self.closed = True
        if begun is not None and not begun.is_completed():
            # The destructor waits for what is in flight, which ends with the others' sockets.
            threading.Thread(target=_drop, args=[[group]], daemon=True).start()

    def _meet(self, mark: int, size: int) -> None:
        own = torch.tensor([mark, size], device="cpu").expand(self.size, -1).contiguous()
        seen = [(int(mark), int(size)) for mark, size in self._swapped(own).tolist()]
        if len({*seen}) == 1:
            return
        ended = [rank for rank, (mark, _) in enumerate(seen) if mark == _END]
        others = [rank for rank in range(self.size) if rank not in ended]
        places = ", ".join(f"chunk {rank} at number {seen[rank][0]}" for rank in others)
        text = f"chunks {ended} have ended, while chunks {others} wait" if ended else places
        raise RuntimeError(
            f"the chunks run different layers: {text}. What decides which layers run, and their "
            "sizes, must be the same for all chunks"
        )

    def _swapped(self, rows: Tensor) -> Tensor:
        if self._group is None:
            raise Abandoned("this replica has left the group of the call's replicas")
        got = torch.empty_like(rows)
        options = dist.AllToAllOptions()
        options.timeout = self._patience
        try:
            self._begun = self._group.alltoall_base(got, rows, [], [], options)
            self._begun.wait(self._patience)
        except RuntimeError as error:
            text = str(error).split(" This is typically")[0]
            raise Abandoned(f"the replicas of other chunks did not answer: {text}") from None
        return got


def _drop(groups: list[Any]) -> None:
    groups.clear()


def _address(host: str, port: int) -> str:
    """This process's address in the network of the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])

"""One way to call a replica of this machine: a frame out, a frame in, on a Unix socket.

A frame is a header, pickled bytes and, the first time, the geometry of the tensors beside them.
The tensors lie in a window of the sender's, which goes with the frame that first uses it: as a
descriptor, or, if both processes compute on one GPU and that was tried, as torch's description of
memory there. They are valid until the sender's next frame.

[Note: crash-only]
An exception may come at any point, of whatever kind: for want of memory or of a descriptor, of a
signal's handler, Ctrl-C. If it comes while a frame is on its way, the connection is over, and the
replica is replaced as one that was killed. So nothing of a connection is ever repaired. One that
comes before the first byte of a request, or while its answer is waited for, ends nothing.
"""

from __future__ import annotations

import array
import contextlib
import errno
import pickle
import socket
import struct
from operator import attrgetter
from typing import Any

import torch

from raydp_parallel.devices import memory
from raydp_parallel.devices.layout import Layout, Row, Run, Spec
from raydp_parallel.errors import TransferError
from raydp_parallel.wire import codec
from raydp_parallel.wire.windows import GpuWindow, Window

_HEADER = struct.Struct("!QQ")
"""The lengths of a message and of what describes its tensors."""

_FIRST, _CHUNK = 1 << 14, 1 << 20
"""The most bytes that are read of a frame at first, and later on."""
_CPU = torch.device("cpu")
_NOTHING = Run(torch.empty(0, dtype=torch.uint8, device=_CPU))
_DESCRIPTORS = 64
_CUT = int(socket.MSG_CTRUNC)  # as an enum it costs as much as the receiving
_LEAST = 1e-3
"""Seconds that a frame is waited for at least: none would mean that nothing is."""
_ALWAYS, _SELDOM = 8, 1000
"""How many frames are summed at first, and which later ones."""


class Channel:
    """One end of the connection between a driver and a replica.

    Args:
        sock: The socket.
        summed: True if a GPU takes part, so that sums of the bytes are compared now and then.
    """

    def __init__(self, sock: socket.socket, summed: bool = False) -> None:
        self._sock = sock
        self._summed = summed
        self._frames = 0
        self.ipc: torch.device | None = None  # the GPU that both ends compute on, if windows may
        # Layouts that the other end knows, by their specs, and those that this one does, by number.
        self._known: dict[tuple[Spec, ...], tuple[int, Layout]] = {}
        self._theirs: dict[int, Layout] = {}
        # Windows of this end and of the other one, by whether they lie on a GPU.
        self._out: dict[bool, Run] = {}
        self._in: dict[bool, Run] = {}
        self._reading: torch.cuda.Stream | None = None  # it may still read the other end's window
        self.traffic = [0, 0]  # bytes of tensors, sent and received
        # Minus the length of a frame on its way, and how much the socket took of it, by pieces.
        self._way: list[int] = []

    @property
    def unsent(self) -> int | None:
        """The bytes of a request that were not sent: 0 while the whole answer is owed. None if no
        frame is on its way.
        """
        return -sum(self._way) if self._way else None

    def send(self, message: object, timeout: float | None = None) -> None:
        """Send a message. Tensors of the last one are overwritten.

        Args:
            message: The message.
            timeout: Seconds in which the other end has to take some of it.

        Raises:
            TimeoutError: It did not. Nothing can be sent any more.
        """
        packet = codec.Packet(message)
        specs = tuple(packet.specs)
        known = self._known.get(specs)
        new = None if known else specs
        if known is None:
            if len(self._known) == Run.MOST:
                self._known.clear()
            known = len(self._known), Layout(specs)
        number, layout = known
        gpu = self.ipc if self.ipc and memory.gpu_of(packet.tensors) == self.ipc else None
        on_gpu = gpu is not None
        size, export, fds = 0, None, [*map(attrgetter("fd"), packet.windows)]
        window = self._out.get(on_gpu, _NOTHING)
        if window.size < layout.size:
            size = layout.size + layout.size // 4
            if gpu is not None:
                window = GpuWindow(size, gpu)
                export = window.export
            else:
                window = Window(size)
                fds.insert(0, window.fd)
        if isinstance(window, Window):
            window.used(layout.size)
        waited = memory.download(packet.tensors, layout, window)
        # The other end may write to what this one reads once it has this frame.
        reading, self._reading = self._reading, None
        memory.wait_for_readers(reading, waited)
        self._frames += 1
        summed = self._summed and (self._frames <= _ALWAYS or self._frames % _SELDOM == 0)
        total = memory.checksum(window.memory[: layout.size]) if summed else None
        # The number of the layout and, where the other end does not know them, its specs, the size
        # of a new window, and its description on a GPU; and the sum of the bytes.
        about = pickle.dumps((number, new, on_gpu, size, export, total))
        data = b"".join((_HEADER.pack(len(packet.body), len(about)), about, packet.body))
        self._sock.settimeout(timeout)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        way = [-len(data)]
        while sum(way):
            rest, self._way = [memoryview(data)[sum(way) :]], way
            way.extend(map(self._sock.sendmsg, [rest], [rights]))  # before a handler may run
            rights = []
        # Only now does the other end know them.
        self._known[specs], self._out[on_gpu] = known, window
        self.traffic[0] += layout.size

    def receive(self, timeout: float | None = None, device: torch.device = _CPU) -> Any:
        """Receive a message; its tensors are valid until the other end's next one, unless they were
        brought to a GPU.

        Args:
            timeout: Seconds to wait for it, and in which more of it has to come.
            device: Where its tensors go; on a CPU they stay in the window.

        Raises:
            EOFError: The other process ended.
            TimeoutError: Nothing came in time, or the rest did not.
            TransferError: Other bytes came than were sent.
        """
        self._sock.settimeout(None if timeout is None else max(timeout, _LEAST))
        self._way = [-_HEADER.size]
        # No other frame can follow: each is an answer to the last one.
        first, fds, flags, _ = socket.recv_fds(self._sock, _FIRST, _DESCRIPTORS)
        if flags & _CUT:  # memory did not arrive that the other end believes to share
            raise OSError(errno.EMFILE, "no free descriptor for memory that another process shares")
        first += self._read(_HEADER.size - len(first))
        body, length = _HEADER.unpack_from(first)
        begin = _HEADER.size + length
        first += self._read(begin + body - len(first))
        number, new, on_gpu, size, export, total = pickle.loads(first[_HEADER.size : begin])
        data = first[begin:]
        if export is not None:
            self._in[on_gpu] = GpuWindow(size, self.ipc or device, export)
        elif size:
            self._in[on_gpu] = Window(size, fds.pop(0))
        if new is not None:
            self._theirs[number] = Layout(new)
        windows = [Window(0, fd) for fd in fds]
        layout = self._theirs[number]
        self.traffic[1] += layout.size
        self._way = []
        if not layout.specs:
            return codec.decode(data, Row(), windows, device)
        window = self._in.get(on_gpu, _NOTHING)
        row, self._reading = memory.upload(layout, window, device)
        if total is not None and memory.checksum(row.memory[: layout.size]) != total:
            raise TransferError(
                f"a message between driver and replica came with other bytes than were sent, by "
                f"the way {'ipc' if on_gpu else 'host'!r}: the values of this step are lost. "
                "Options(gpu_paths=('host',)) leaves the faster ways out"
            )
        return codec.decode(data, row, windows, device)

    def drop_windows(self) -> None:
        """Read nothing more from the windows of before, and make new ones for the next messages."""
        self._in.clear()
        self._out.clear()

    def _read(self, count: int) -> bytes:
        found: list[bytes] = []  # no memory for a length before its bytes come
        while count > 0:
            found.append(self._sock.recv(min(count, _CHUNK)))
            if not found[-1]:
                raise EOFError("the other process ended")
            count -= len(found[-1])
        return b"".join(found)

    def close(self) -> None:
        """Hang up: the other end ends, and reads nothing any more."""
        self._sock.close()
        self._way = []
        mine = self._out.get(True)
        with contextlib.suppress(RuntimeError):  # of a GPU that does not answer any more
            memory.wait_for_readers(self._reading, None)
            if isinstance(mine, GpuWindow):
                mine.unread()
        self.drop_windows()

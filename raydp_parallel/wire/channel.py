"""One way to call a replica of this machine: a frame out, a frame in, on a Unix socket.

A frame is a header, pickled bytes and, the first time, the geometry of the tensors beside them.
The tensors lie in a window of the sender's, whose descriptor goes with the frame that first uses
it. They are valid until the sender's next frame.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices import memory
from raydp_parallel.wire import codec
from raydp_parallel.wire.windows import Layout, Layouts, Window

_HEADER = struct.Struct("!QQQQQ")
"""The length of the body and of the specs, the number of the layout, the size of a new window, and
the length of the sizes of further windows, which are mapped privately."""

_CHUNK = 1 << 20
_DESCRIPTORS = 64


class Channel:
    """One end of the connection between a driver and a replica.

    Args:
        sock: The socket.
        device: Where tensors of received frames go, unless the receiver names another device; on a
            CPU they stay in the window.

    Attributes:
        sent: Bytes of tensors that were sent so far.
        received: Bytes of tensors that were received.
    """

    def __init__(self, sock: socket.socket, device: torch.device | None = None) -> None:
        self._sock = sock
        self._device = device or torch.device("cpu")
        self._layouts = Layouts()
        self._theirs: dict[int, Layout] = {}
        self._out: Window | None = None
        self._in: Window | None = None
        self._reading: Any = None  # the stream that may still copy from the other end's window
        self.sent = self.received = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for it."""
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        """Send a message. Tensors of the last one are overwritten."""
        packet = codec.encode(message)
        number, layout, new = self._layouts.of(packet.specs)
        size, fds = 0, [window.fd for window in packet.windows]
        if layout.size and (self._out is None or self._out.size < layout.size):
            self._out = Window(layout.size + layout.size // 4)
            size, fds = self._out.size, [self._out.fd, *fds]
        waited = None
        if packet.tensors:
            assert self._out is not None
            waited = memory.download(packet.tensors, layout, self._out)
        if self._reading is not None and self._reading != waited:
            self._reading.synchronize()  # the other end may write there once it has this frame
        self._reading = None
        specs = pickle.dumps(packet.specs) if new else b""
        shared = pickle.dumps([window.size for window in packet.windows]) if packet.windows else b""
        header = _HEADER.pack(len(packet.body), len(specs), number, size, len(shared))
        data = b"".join((header, specs, shared, packet.body))
        begun = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
        if begun < len(data):
            self._sock.sendall(memoryview(data)[begun:])
        self.sent += layout.size

    def ready(self, timeout: float | None) -> bool:
        """Wait until a frame, or the end of the other process, is there."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def receive(self, timeout: float | None = None, device: torch.device | None = None) -> Any:
        """Receive a message; its tensors are valid until the other end's next one, unless they were
        brought to a GPU.

        Args:
            timeout: Seconds to wait.
            device: Where its tensors go.

        Raises:
            EOFError: The other process ended.
            TimeoutError: Nothing came in time.
        """
        if not self.ready(timeout):
            raise TimeoutError("no answer in time")
        header, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, _DESCRIPTORS)
        header += self._read(_HEADER.size - len(header))
        body, specs, number, size, shared = _HEADER.unpack(header)
        if size:
            self._in = Window(size, fds.pop(0))
        if specs:
            self._theirs[number] = Layout(pickle.loads(self._read(specs)))
        sizes = pickle.loads(self._read(shared)) if shared else ()
        windows = [Window(size, fd, private=True) for size, fd in zip(sizes, fds, strict=True)]
        data = self._read(body)
        layout = self._theirs[number]
        self.received += layout.size
        return codec.decode(data, self._tensors(layout, device or self._device), windows)

    def _tensors(self, layout: Layout, device: torch.device) -> Sequence[Tensor]:
        if not layout.specs:
            return ()
        if self._in is None:  # nothing but tensors without elements
            self._in = Window(0)
        found, self._reading = memory.upload(layout, self._in, device)
        return found

    def _read(self, count: int) -> bytes:
        if not count:
            return b""
        found = bytearray(count)
        view, at = memoryview(found), 0
        while at < count:
            got = self._sock.recv_into(view[at:], min(count - at, _CHUNK))
            if not got:
                raise EOFError("the other process ended")
            at += got
        return bytes(found)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

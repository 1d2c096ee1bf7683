"""Frames: the form of messages in a socket.

A frame begins with the number of buffers, the call's number, and the size of the body. The body
holds each buffer's length and the small buffers; the large buffers follow it. For a buffer in
shared memory only the descriptor is sent, which the highest bit of its length marks; for a buffer
that Ray delivers only its number, which the next bit marks.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from raydp_parallel.devices.buffers import Descriptor, SharedBuffer
from raydp_parallel.transport.links.exposed import Exposed
from raydp_parallel.transport.links.object_store import Delivered

_HEAD = struct.Struct("<IQQ")
_LENGTH = 8
_LARGE = 1 << 16
_SHARED = 1 << 63
_DELIVERED = 1 << 62
_NUMBER = struct.Struct("<Q")

QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""Without this flag, sending to a process that died would end a program that has restored the
default action of SIGPIPE.
"""


class LineCut(ConnectionError):
    """The other end is gone."""


class StoodStill(TimeoutError):
    """The other end stopped in the middle of a frame, and the connection was shut down."""


def write_frame(connection: socket.socket, number: int, buffers: Sequence[Any]) -> None:
    """Send the buffers of a call with its number."""
    lengths: list[int] = []
    small: list[Any] = []
    large: list[Any] = []
    for buffer in buffers:
        flag = 0
        if type(buffer) is bytes:
            data: Any = buffer
        elif isinstance(buffer, (SharedBuffer, Exposed)):
            data, flag = pickle.dumps(tuple(buffer.descriptor)), _SHARED
        elif isinstance(buffer, Delivered):
            data, flag = _NUMBER.pack(buffer.number), _DELIVERED
        else:
            data = memoryview(buffer).cast("B")
        size = len(data)
        lengths.append(size | flag)
        (small if size <= _LARGE else large).append(data)
    words = struct.pack(f"<{len(lengths)}Q", *lengths)
    head = _HEAD.pack(len(lengths), number, len(words) + sum(map(len, small)))
    connection.sendall(b"".join([head, words, *small]), QUIETLY)
    for data in large:
        connection.sendall(data, QUIETLY)


def size_of(buffers: Sequence[Any]) -> int:
    """Bytes of the buffers that are sent in the frame, without those in shared memory."""
    elsewhere = (SharedBuffer, Exposed, Delivered)
    return sum(memoryview(buffer).nbytes for buffer in buffers if not isinstance(buffer, elsewhere))


def read_frame(connection: socket.socket) -> tuple[int, list[Any]]:
    """Wait for a frame; returns the call's number and the buffers.

    A buffer is bytes, an array if it is large, a descriptor of shared memory, or the number of a
    buffer that Ray delivers.

    Where there is no memory for a buffer, the `MemoryError` takes its place: the frame is read to
    its end, so that the next one can be read.
    """
    count, number, size = _HEAD.unpack(_read(connection, _HEAD.size))
    body = _read(connection, size)
    at = count * _LENGTH
    buffers: list[Any] = []
    for length in struct.unpack_from(f"<{count}Q", body):
        plain = length & ~(_SHARED | _DELIVERED)
        if plain > _LARGE:
            buffers.append(_read_array(connection, plain))
            continue
        found = body[at : at + plain]
        at += plain
        buffers.append(_described(found, length))
    return number, buffers


def _described(found: bytes, length: int) -> bytes | Descriptor | Delivered:
    """A small buffer, or the object that it describes, by the two highest bits of its length."""
    if length & _SHARED:
        return Descriptor(*pickle.loads(found))
    if length & _DELIVERED:
        return Delivered(*_NUMBER.unpack(found))
    return found


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # after a signal, or if the socket's buffer is smaller
        more = connection.recv(size - len(data), socket.MSG_WAITALL)
        if not more:
            raise LineCut("the other end of the line is gone")
        data += more
    return data


def _read_array(connection: socket.socket, size: int) -> np.ndarray | MemoryError:
    try:
        whole = np.empty(size, dtype=np.uint8)
    except MemoryError as error:
        left = size
        while left:
            left -= len(_read(connection, min(left, _LARGE)))
        return error
    view, at = memoryview(whole.data), 0
    while at < size:
        got = connection.recv_into(view[at:], size - at, socket.MSG_WAITALL)
        if not got:
            raise LineCut("the other end of the line is gone")
        at += got
    return whole

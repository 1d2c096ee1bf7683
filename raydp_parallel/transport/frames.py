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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raydp_parallel.devices.buffers import Descriptor, SharedBuffer
from raydp_parallel.transport.links.exposed import Exposed
from raydp_parallel.transport.links.object_store import Delivered

_HEAD = struct.Struct("<IQQ")
_LENGTH = 8
_LARGE = 1 << 16
_DROPPED_AT_ONCE = 1 << 12
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
    lengths, small = _read_body(connection, count, size)
    buffers: list[Any] = []
    for length in lengths:
        plain = length & ~(_SHARED | _DELIVERED)
        if plain > _LARGE:
            buffers.append(_read_array(connection, plain))
            continue
        found = next(small)
        buffers.append(found if isinstance(found, MemoryError) else _described(found, length))
    return number, buffers


def _read_body(
    connection: socket.socket, count: int, size: int
) -> tuple[Sequence[int], Iterator[bytes | MemoryError]]:
    """The lengths of all buffers, and the small buffers. If there is no memory for all of these at
    once, they are read one by one.
    """
    words = f"<{count}Q"
    try:
        body = _read(connection, size)
    except MemoryError:
        lengths = struct.unpack(words, _read(connection, count * _LENGTH))
        sizes = [plain for plain in map(_plain, lengths) if plain <= _LARGE]
        return lengths, iter([_read_or_drop(connection, plain) for plain in sizes])
    lengths = struct.unpack_from(words, body)
    return lengths, _parts(body, count * _LENGTH, lengths)


def _parts(body: bytearray, at: int, lengths: Sequence[int]) -> Iterator[bytes | MemoryError]:
    view = memoryview(body)
    for plain in map(_plain, lengths):
        if plain <= _LARGE:
            yield _copied(view[at : at + plain])
            at += plain


def _plain(length: int) -> int:
    """A length without its marks."""
    return length & ~(_SHARED | _DELIVERED)


def _described(found: bytes, length: int) -> bytes | Descriptor | Delivered:
    """A small buffer, or the object that it describes, by the two highest bits of its length."""
    if length & _SHARED:
        return Descriptor(*pickle.loads(found))
    if length & _DELIVERED:
        return Delivered(*_NUMBER.unpack(found))
    return found


def _read(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. If there is no memory for them, none is read."""
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Read as many bytes as there is space for."""
    at, size = 0, len(view)
    while at < size:  # more than once after a signal, or if the socket's buffer is smaller
        got = connection.recv_into(view[at:], size - at, socket.MSG_WAITALL)
        if not got:
            raise LineCut("the other end of the line is gone")
        at += got


def _drop(connection: socket.socket, size: int) -> None:
    """Read so many bytes, and keep none."""
    while size:
        size -= len(_read(connection, min(size, _DROPPED_AT_ONCE)))


def _read_or_drop(connection: socket.socket, size: int) -> bytes | MemoryError:
    """So many bytes; the error, and the bytes are read all the same, if there is no memory."""
    try:
        found = _read(connection, size)
    except MemoryError as error:
        _drop(connection, size)
        return error
    return _copied(found)


def _copied(found: bytearray | memoryview) -> bytes | MemoryError:
    try:
        return bytes(found)
    except MemoryError as error:
        return error


def _read_array(connection: socket.socket, size: int) -> np.ndarray | MemoryError:
    try:
        whole = np.empty(size, dtype=np.uint8)
    except MemoryError as error:
        _drop(connection, size)
        return error
    _fill(connection, memoryview(whole.data))
    return whole

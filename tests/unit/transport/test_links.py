"""The contract of every link: bytes go in, the same bytes come out, in memory of their own.

A new link joins by one entry in ``LINKS``.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, ItemsView
from typing import Any

import numpy as np
import pytest

from raydp_parallel.devices import buffers
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import MemoryRange, aligned
from raydp_parallel.transport.links import (
    Attachments,
    BySize,
    InlineLink,
    Link,
    Mappings,
    ObjectStoreLink,
    SharedLink,
    link_for,
    shared,
)

LIMIT = 256


class FakeStore:
    """An object store: copies what is put into it, and hands it out read-only, as Ray does."""

    def __init__(self) -> None:
        self.objects: dict[str, np.ndarray] = {}

    def put(self, buffer: np.ndarray) -> str:
        """Store a copy."""
        stored = buffer.copy()
        stored.flags.writeable = False
        self.objects[f"ref {len(self.objects)}"] = stored
        return f"ref {len(self.objects) - 1}"

    def get(self, reference: str) -> np.ndarray:
        """What a reference stands for."""
        return self.objects[reference]


def with_store() -> ObjectStoreLink:
    """The driver's object-store link, over a fake store."""
    store = FakeStore()
    return ObjectStoreLink(store.put, store.get)


LINKS: dict[str, Callable[[], Link]] = {
    "inline": InlineLink,
    "object_store, driver's": with_store,
    "object_store, replica's": ObjectStoreLink,
    "auto, driver's": lambda: BySize(InlineLink(), with_store(), LIMIT),
    "auto, replica's": lambda: BySize(InlineLink(), ObjectStoreLink(), LIMIT),
    "shared": lambda: SharedLink(Arena()),
    "auto, one machine's": lambda: BySize(InlineLink(), SharedLink(Arena()), LIMIT),
}


@pytest.fixture(params=[*LINKS])
def link(request: pytest.FixtureRequest) -> Link:
    """Each link in its turn."""
    return LINKS[request.param]()


def piece(data: bytearray) -> MemoryRange:
    """The memory of a bytearray."""
    view = (ctypes.c_char * len(data)).from_buffer(data) if data else None
    return MemoryRange(ctypes.addressof(view) if view is not None else 0, len(data), view)


def pattern(size: int, start: int = 1) -> bytearray:
    """Bytes that differ from their neighbours."""
    return bytearray((start + 7 * i) % 251 for i in range(size))


def seen(link: Link, packet: Any) -> bytes:
    """The bytes of a packet."""
    opened = link.open(packet)
    return ctypes.string_at(opened.address, opened.size)


SIZES = (0, 1, 3, 63, 64, 65, 255, LIMIT, LIMIT + 1, 1001, 65537)


@pytest.mark.parametrize("size", SIZES[1:])
def test_room_is_a_packet_that_is_filled_later(link: Link, size: int) -> None:
    """Where a link has any: what was written counts, up to where it was filled, also if it is lent
    out twice.
    """
    for end in (size, size // 2 + 1):
        attachments = Attachments(link)
        room = attachments.room(size)
        if room is None:
            return
        assert room.size == size
        data = pattern(size, end)
        ctypes.memmove(room.address, bytes(data), size)
        packet = attachments.filled(room, end)
        assert attachments.size == end
        assert seen(link, attachments.find(packet)) == bytes(data[:end])


def test_which_links_have_room() -> None:
    """Those with packets that lie in memory of their own."""
    found = {name: make().room(LIMIT + 1) is not None for name, make in LINKS.items()}
    own = {"object_store, replica's", "auto, replica's", "shared", "auto, one machine's"}
    assert {name for name, has in found.items() if has} == own


@pytest.mark.parametrize("size", SIZES)
def test_one_piece_comes_out_as_it_went_in(link: Link, size: int) -> None:
    """Sizes 0 and 1, odd ones, and those on both sides of a limit."""
    data = pattern(size)
    assert seen(link, link.send([piece(data)], [0], size)) == bytes(data)


def test_nothing_at_all_can_be_sent(link: Link) -> None:
    """No piece is a packet of no bytes."""
    assert link.open(link.send([], [], 0)).size == 0


def test_a_message_without_tensors_is_opened(link: Link) -> None:
    """Its packet is empty, and no link has made it: a batch without rows, for one."""
    assert link.open(b"").size == 0


@pytest.mark.parametrize("scale", (1, LIMIT))
def test_pieces_lie_at_their_offsets(link: Link, scale: int) -> None:
    """Several pieces, with gaps between them and behind them, an empty one among them."""
    parts = [pattern(5 * scale, 1), pattern(0), pattern(7 * scale, 9), pattern(1, 30)]
    offsets = [0, aligned(5 * scale), aligned(5 * scale), aligned(5 * scale) + 8 * scale]
    size = offsets[-1] + 64
    found = seen(link, link.send([piece(p) for p in parts], offsets, size))
    assert len(found) == size
    for part, offset in zip(parts, offsets, strict=True):
        assert found[offset : offset + len(part)] == part


@pytest.mark.parametrize("size", (1, LIMIT + 1))
def test_a_packet_never_aliases_its_source(link: Link, size: int) -> None:
    """What is written to the source after sending does not reach the receiver."""
    data = pattern(size)
    packet = link.send([piece(data)], [0], size)
    before = bytes(data)
    data[:] = bytes(size)
    assert seen(link, packet) == before


def test_packets_do_not_share_memory(link: Link) -> None:
    """A later, even a larger, packet leaves an earlier one as it was."""
    sent = [
        (data := pattern(size, start), link.send([piece(data)], [0], size))
        for start, size in enumerate(SIZES[1:])
    ]
    for data, packet in [*sent, *reversed(sent)]:
        assert seen(link, packet) == bytes(data)


@pytest.mark.parametrize("size", (1, LIMIT + 1))
def test_a_packet_opens_twice(link: Link, size: int) -> None:
    """Opening again gives the same bytes, while and after the first piece is held."""
    data = pattern(size)
    packet = link.send([piece(data)], [0], size)
    first, second = link.open(packet), link.open(packet)
    assert (
        ctypes.string_at(first.address, size)
        == ctypes.string_at(second.address, size)
        == bytes(data)
    )
    del first
    gc.collect()
    assert ctypes.string_at(second.address, size) == bytes(data)


@pytest.mark.parametrize("size", (1, LIMIT + 1))
def test_an_opened_piece_keeps_its_memory(link: Link, size: int) -> None:
    """The piece alone keeps the bytes, though packet and source are gone."""
    data = pattern(size)
    opened = link.open(link.send([piece(data)], [0], size))
    before = bytes(data)
    del data
    gc.collect()
    assert ctypes.string_at(opened.address, opened.size) == before


def test_a_replica_s_own_array_is_opened() -> None:
    """What another replica has passed on is placed beside a message, whatever the link is."""
    array = np.arange(8, dtype=np.uint8)
    for link in (InlineLink(), ObjectStoreLink()):
        attachments = Attachments(link)
        piece = attachments.open(attachments.place(array))
        assert ctypes.string_at(piece.address, piece.size) == array.tobytes(), link.name
        link.close()


def test_closing_twice_is_closing_once(link: Link) -> None:
    """A closed link may be closed again, with or without something sent."""
    link.send([piece(pattern(LIMIT + 1))], [0], LIMIT + 1)
    link.close()
    link.close()


def test_a_link_has_a_name(link: Link) -> None:
    """It is what statistics show."""
    assert link.name in ("inline", "object_store", "shared", "auto")


@pytest.mark.parametrize("sizes", ((1, 40, 7), (LIMIT + 1, 1000), (3, LIMIT + 1, 5, 2000)))
def test_mail_carries_several_packets(link: Link, sizes: tuple[int, ...]) -> None:
    """The message holds bytes or numbers; the receiver opens each with its own mail, from what lies
    beside.
    """
    attachments = Attachments(link)
    data = [pattern(size, i) for i, size in enumerate(sizes)]
    message = [attachments.send([piece(d)], [0], len(d)) for d in data]
    assert attachments.size == sum(sizes)
    assert all(isinstance(packet, (bytes, int)) for packet in message)
    arrived = Attachments(link, list(attachments.beside))
    for placed, d in zip(pickle.loads(pickle.dumps(message)), data, strict=True):
        opened = arrived.open(placed)
        assert ctypes.string_at(opened.address, opened.size) == bytes(d)


def test_mail_places_a_packet_that_was_made_before(link: Link) -> None:
    """One packet goes into several messages, at another number in each."""
    data = pattern(LIMIT + 1)
    packet = link.send([piece(data)], [0], len(data))
    for others in (0, 2):
        attachments = Attachments(link)
        for _ in range(others):
            attachments.send([piece(pattern(LIMIT + 9))], [0], LIMIT + 9)
        placed = attachments.place(packet)
        opened = Attachments(link, attachments.beside).open(placed)
        assert ctypes.string_at(opened.address, opened.size) == bytes(data)


def test_inline_packets_are_bytes() -> None:
    """They lie in the message itself, never beside it."""
    attachments = Attachments(InlineLink())
    attachments.send([piece(pattern(100_000))], [0], 100_000)
    assert attachments.beside == []


def test_by_size_goes_inline_up_to_its_limit() -> None:
    """At the limit a packet is bytes, one byte above it goes to the store."""
    store = FakeStore()
    link = BySize(InlineLink(), ObjectStoreLink(store.put, store.get), LIMIT)
    assert isinstance(link.send([piece(pattern(LIMIT))], [0], LIMIT), bytes)
    assert not store.objects
    assert link.send([piece(pattern(LIMIT + 1))], [0], LIMIT + 1) == "ref 0"


def test_the_store_gets_one_flat_buffer_per_packet() -> None:
    """Never a tensor, and one put however many pieces there are."""
    put: list[Any] = []
    link = ObjectStoreLink(lambda buffer: put.append(buffer) or len(put), lambda _: put[-1])
    link.send([piece(pattern(100)), piece(pattern(50))], [0, 128], 192)
    (buffer,) = put
    assert type(buffer) is np.ndarray
    assert (buffer.dtype, buffer.shape) == (np.dtype(np.uint8), (192,))


def test_closing_lets_go_of_the_scratch_buffer() -> None:
    """What the driver's link keeps for the next call is gone after close."""
    kept: list[weakref.ref[Any]] = []

    def put(buffer: np.ndarray) -> int:
        kept.append(weakref.ref(buffer.base if buffer.base is not None else buffer))
        return 0

    link = ObjectStoreLink(put, lambda _: None)
    link.send([piece(pattern(1000))], [0], 1000)
    link.close()
    assert kept[0]() is None


@pytest.mark.parametrize("name", ("auto", "inline", "object_store"))
def test_every_name_of_the_options_makes_a_link(name: str) -> None:
    """For the driver, which has a store, and for a replica, which has none."""
    store = FakeStore()
    assert link_for(name, store.put, store.get).name == name
    assert link_for(name).name == name


def test_aligned_rounds_up_to_64() -> None:
    """What follows is aligned for every dtype."""
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_a_slice_is_read_where_it_lies() -> None:
    """Another mapping of the same memory, by its descriptor, shows the bytes, also those written
    later.
    """
    lent = Arena().take(100_000)
    lent.array[:] = 7
    shared_mapping = Mappings().find(lent.descriptor).piece()
    assert shared_mapping.size == 100_000
    assert ctypes.string_at(shared_mapping.address, shared_mapping.size) == bytes([7]) * 100_000
    lent.array[5] = 8
    assert ctypes.string_at(shared_mapping.address, 6)[5] == 8


@pytest.mark.parametrize("field", ["volume", "inode"])
def test_memory_is_known_by_its_file_system_and_its_inode(field: str) -> None:
    """Numbers of inodes count within a file system: another one's file may have the same."""
    lent = Arena().take(100_000)
    other = lent.descriptor._replace(**{field: getattr(lent.descriptor, field) + 1})
    with pytest.raises(OSError, match="is not the memory that was meant"):
        Mappings().find(other).piece()


class Watched:
    """A lock that says when another thread than the one that made it asks for it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._lock = threading.Lock()
        self._mine = threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() != self._mine:
            self.asked.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_map_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for long is taken out while another thread puts in what it needs."""
    monkeypatch.setattr(shared, "_PATIENCE", 2)
    arena, mappings, lock = Arena(), Mappings(), Watched()
    lent = [arena.take(100_000) for _ in range(3)]
    first, second, third = [mappings.find(one.descriptor) for one in lent]
    errors: list[BaseException] = []

    def map_another() -> None:
        try:
            mappings.map(third)
        except BaseException as error:
            errors.append(error)
        lock.asked.set()

    thread = threading.Thread(target=map_another)

    class Known(dict[int, Any]):
        """Has another thread map something in the midst of being gone through."""

        def items(self) -> Any:
            for number, item in enumerate(ItemsView(self)):
                if not number:
                    thread.start()
                    assert lock.asked.wait(60)
                yield item

    mappings._mapping = lock  # type: ignore[assignment]
    mappings.map(first)
    mappings._known = Known(mappings._known)
    mappings.map(second)
    thread.join(60)
    assert not errors
    tokens = {one.descriptor.token for one in lent}
    assert tokens >= mappings._known.keys() >= {second.descriptor.token, third.descriptor.token}


def test_a_segment_is_lent_again_when_its_slice_is_garbage() -> None:
    """And not before."""
    arena = Arena()
    first = arena.take(100_000)
    token, lease = first.descriptor.token, first.descriptor.lease
    second = arena.take(100_000)
    assert second.descriptor.token != token
    del first
    third = arena.take(90_000)
    assert third.descriptor.token == token
    assert third.descriptor.lease != lease
    assert third.array.nbytes == 90_000


def test_a_segment_is_gone_with_its_arena() -> None:
    """It cannot be mapped any more."""
    arena = Arena()
    lent = [arena.take(1 << 20) for _ in range(3)]
    paths = [os.path.realpath(one.descriptor.path) for one in lent]
    assert all("memfd:raydp_parallel" in path for path in paths)
    files = [one.descriptor.path for one in lent]
    before = [os.stat(file).st_ino for file in files]
    del lent
    arena.close()
    for file, inode in zip(files, before, strict=True):
        assert not os.path.exists(file) or os.stat(file).st_ino != inode


@pytest.mark.parametrize(
    "link", [InlineLink(), ObjectStoreLink(), SharedLink(Arena())], ids=lambda link: link.name
)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_what_a_line_brings_as_bytes_can_be_opened(link: Link, size: int) -> None:
    """Small packets arrive so, whatever link made them."""
    packet = bytes(range(250)) * 4
    piece = link.open(packet[:size])
    assert piece.size == size and ctypes.string_at(piece.address, piece.size) == packet[:size]


def test_memory_is_had_where_the_kernel_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built without them refuses the advice."""

    class Plain(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(buffers.mmap, "mmap", Plain)
    lent = Arena(shared=False).take(1 << 20)
    lent.array[:] = 1
    assert lent.array.nbytes == 1 << 20


def test_an_unknown_name_is_refused() -> None:
    """It is not taken for "auto"."""
    with pytest.raises(
        ValueError, match="link 'inlined': expected one of auto, shared, inline, object_store"
    ):
        link_for("inlined")

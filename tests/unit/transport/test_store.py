"""The store of a group: which requests are heard, what it holds, and what is left of it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from raydp_parallel import Options
from raydp_parallel.calls.replica_groups import GroupTicket, ReplicaGroups
from raydp_parallel.transport import handshake
from raydp_parallel.transport.collective import Groups, store
from raydp_parallel.transport.collective.store import StoreClient, StoreServer
from raydp_parallel.transport.group_messages import GroupKind, JoinGroup

HERE = "127.0.0.1"
SECRET = "secret-of-this-executor"

dist: Any = distributed


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """A store."""
    found = StoreServer(HERE, SECRET)
    yield found
    found.close()
    _await_end_of_threads()


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    """A member's end of it."""
    found = StoreClient((HERE, server.port), SECRET, 10.0)
    yield found
    found.close()


def _await_end_of_threads() -> None:
    """Wait until no thread of a store is left."""
    until = time.monotonic() + 10
    while any(thread.name == "raydp-store" for thread in threading.enumerate()):
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.001)


def _sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError as error:  # the listing itself had one
            assert error.errno == errno.ENOENT
    return {name for name in found if name.startswith("socket")}


def _join_all(host: Groups, where: tuple[str, int], size: int = 2) -> list[str]:
    """What the members of a new group answer."""
    members = [host, *(Groups(secret=SECRET) for _ in range(size - 1))]

    def join(rank: int) -> str:
        kind = GroupKind.GLOO
        answer = members[rank].join(JoinGroup("test", rank, size, where, 10.0, kind))
        group = members[rank].find("test")
        if group is not None:
            assert group.probe(torch.device("cpu"), 10.0) is None
        return answer

    with ThreadPoolExecutor(size) as pool:
        try:
            return [*pool.map(join, range(size))]
        finally:
            for member in members:
                member.leave("test")


def test_torch_gets_all_that_it_asks_a_store_for(client: StoreClient) -> None:
    """By the names that torch's own code calls, through the store of a prefix, from its C++."""
    prefix = dist.PrefixStore("group", client)
    prefix.set("one", b"\0\xff")
    assert prefix.get("one") == b"\0\xff" and client.get("group/one") == b"\0\xff"
    assert prefix.add("number", 3) == 3 and prefix.add("number", -5) == -2
    assert prefix.check(["one", "number"]) and not prefix.check(["one", "none"])
    prefix.wait(["one"], timedelta(seconds=1))
    prefix.wait(["one", "number"])
    assert prefix.compare_set("new", "", "first") == b"first"
    assert prefix.compare_set("new", "first", "second") == b"second"
    assert prefix.compare_set("new", "first", "third") == b"second"
    assert prefix.compare_set("absent", "first", "third") == b"first"
    prefix.append("one", b"more")
    prefix.multi_set(["a", "b"], [b"1", b""])
    assert prefix.has_extended_api() and prefix.multi_get(["a", "b", "one"]) == [
        b"1",
        b"",
        b"\0\xffmore",
    ]
    assert prefix.num_keys() == 5
    assert prefix.delete_key("a") and not prefix.delete_key("a") and prefix.num_keys() == 4
    if hasattr(prefix, "clone"):
        assert prefix.clone().get("b") == b""


def test_who_asks_waits_until_it_is_stored(client: StoreClient) -> None:
    """Without being in the way of another thread of the same member, and not for ever."""
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.get, "late"), pool.submit(client.wait, ["late", "later"])]
        client.set("late", b"there")
        assert waiting[0].result(10) == b"there" and not waiting[1].done()
        client.set("later", b"")
        waiting[1].result(10)
    client.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"nothing was stored under never within 0\.01 s"):
        client.get("never")
    assert client.get("late") == b"there"


def test_a_program_that_speaks_as_torchs_store_gets_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    """No value, and nothing that it says is stored."""
    client.set("one", b"kept")
    with pytest.raises(dist.DistError):
        stranger = dist.TCPStore(
            HERE, server.port, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        stranger.set("one", b"forged")
    assert client.get("one") == b"kept" and client.num_keys() == 1


def test_a_client_with_another_secret_is_refused(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a store that does not know the secret, of one that was there before, say."""
    other = StoreClient((HERE, server.port), "another", 10.0)
    with pytest.raises(dist.DistStoreError, match="closed the connection"):
        other.set("one", b"forged")
    assert not client.check(["one"])
    groups = Groups(secret="another")
    trouble = groups.join(
        JoinGroup("test", 1, 2, (HERE, server.port), 10.0, GroupKind.GLOO),
    )
    assert "DistStoreError" in trouble and groups.find("test") is None
    monkeypatch.setattr(handshake, "_code", lambda secret, end, *_: bytes(32))
    with socket.create_server((HERE, 0)) as impostor:

        def says_yes() -> None:
            connection, _ = impostor.accept()
            connection.sendall(bytes(16) + b"1" * 32)

        threading.Thread(target=says_yes, daemon=True).start()
        with pytest.raises(dist.DistStoreError, match="does not know the secret"):
            StoreClient((HERE, impostor.getsockname()[1]), SECRET, 10.0).get("one")


def test_strangers_do_not_disturb_a_group_that_is_made() -> None:
    """Fifty say nothing, fifty say something; and after that no thread and no socket is left."""
    before = _sockets()
    host = Groups(secret=SECRET)
    where = host.host("test")
    strangers = [socket.create_connection(where, timeout=10) for _ in range(100)]
    for number, stranger in enumerate(strangers[50:]):
        stranger.sendall([b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(64), b"\0" * 48][number % 3])
    assert _join_all(host, where, 3) == ["", "", ""]
    for stranger in strangers:
        stranger.close()
    _await_end_of_threads()
    assert _sockets() <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=10)


def test_a_group_that_is_made_has_one_thread_left_of_its_store() -> None:
    """Members hold no connections to it; if torch asks it all the same, it answers."""
    host, other = Groups(secret=SECRET), Groups(secret=SECRET)
    where = host.host("test")
    requests = [JoinGroup("test", rank, 2, where, 10.0, GroupKind.GLOO) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(other.join, requests[1])
        assert host.join(requests[0]) == joining.result(30) == ""
    found = StoreClient(where, SECRET, 10.0)
    assert found.num_keys() > 0
    found.close()
    until = time.monotonic() + 10
    while sum(thread.name == "raydp-store" for thread in threading.enumerate()) > 1:
        assert time.monotonic() < until
        time.sleep(0.001)
    other.leave("test")
    host.leave("test")
    _await_end_of_threads()


def test_a_member_that_waits_for_the_store_is_told_to_leave() -> None:
    """Its thread ends at once, whatever its patience; so it does if the host leaves."""
    before = _sockets()
    host, other = Groups(secret=SECRET), Groups(secret=SECRET)
    where = host.host("test")
    with ThreadPoolExecutor(2) as pool:
        for leaver in (other, host):
            waiting = pool.submit(
                (other if leaver is other else Groups(secret=SECRET)).join,
                JoinGroup("test", 1, 2, where, 600.0, GroupKind.GLOO),
            )
            _await_thread("raydp-joining")
            leaver.leave("test")
            assert waiting.result(30)
            _await_thread("raydp-joining", there=False)
    _await_end_of_threads()
    assert _sockets() <= before


def _await_thread(name: str, there: bool = True) -> None:
    until = time.monotonic() + 30
    while any(thread.name == name for thread in threading.enumerate()) is not there:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_store_that_was_left_is_not_hosted() -> None:
    """Word of the end, which waits for no call, may come before the request."""
    groups = Groups(secret=SECRET)
    groups.leave("test")
    with pytest.raises(RuntimeError, match="before"):
        groups.host("test")
    assert not any(thread.name == "raydp-store" for thread in threading.enumerate())


def test_ctrl_c_while_a_group_is_made_lets_its_members_leave() -> None:
    """Else the store of a group that is never made would listen on."""
    left: list[Any] = []
    backend = SimpleNamespace(leave=lambda client, names: left.append((client, names)))
    slots = tuple(SimpleNamespace(ready=True, incarnation=1, client=n, index=n) for n in range(2))
    groups = ReplicaGroups(SimpleNamespace(options=Options(), backend=backend))  # type: ignore[arg-type]

    def interrupted(ticket: GroupTicket, _patience: float) -> str:
        left.append(ticket.name)
        raise KeyboardInterrupt

    groups._gather = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        groups._make(GroupKind.GLOO, slots)  # type: ignore[arg-type]
    assert left[1:] == [(0, [left[0]]), (1, [left[0]])]


def test_what_a_store_holds_is_limited(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In keys and in bytes; what is too much changes nothing."""
    monkeypatch.setattr(store, "_MOST_KEYS", 2)
    client.multi_set(["a", "b"], [b"1", b"2"])
    with pytest.raises(dist.DistStoreError, match="at most 2 keys"):
        client.set("c", b"3")
    monkeypatch.setattr(store, "_MOST_BYTES", 100)
    with pytest.raises(dist.DistStoreError, match="and 100 bytes"):
        for _ in range(3):
            client.append("a", b"x" * 40)
    assert client.get("a") == b"1" + b"x" * 80 and client.num_keys() == 2
    with pytest.raises(dist.DistStoreError):
        client.set("a", b"x" * 200)  # the request itself is too long
    assert client.get("b") == b"2"


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("<BdI", 1, 0.0, 0xFFFFFFFF),
        struct.pack("<BdII", 1, 0.0, 4, 400),
        struct.pack("<BdI", 0, 0.0, 5) + struct.pack("<I", 1) + b"k",
        struct.pack("<BdI", 1, float("nan"), 5) + struct.pack("<I", 1) + b"k",
        struct.pack("<BdI", 200, 0.0, 5) + struct.pack("<I", 1) + b"k",
        struct.pack("<BdI", 4, 0.0, 10) + struct.pack("<I", 1) + b"k" + struct.pack("<I", 1) + b"x",
        struct.pack("<BdI", 7, 0.0, 0),
    ],
    ids=["long", "breaks off", "odd", "nan", "unknown", "no number", "no key"],
)
def test_a_request_that_makes_no_sense_is_that_members_failure(
    server: StoreServer, client: StoreClient, request_: bytes
) -> None:
    """It is refused, or its connection ends; others are answered."""
    client.set("one", b"kept")
    connection = handshake.call(f"{HERE} {server.port} {SECRET}").connection
    with connection:
        connection.settimeout(10)
        connection.sendall(request_)
        answer = connection.recv(13)
        assert not answer or answer[0] in (1, 2)
    assert client.get("one") == b"kept" and client.num_keys() == 1


def test_a_forked_child_leaves_the_store_to_its_parent(
    server: StoreServer, client: StoreClient
) -> None:
    """The child's end ends nothing, and a child that lives on keeps no connection open."""
    client.set("one", b"kept")
    (reader, writer), (ready, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        try:
            os.write(tell, b"x")
            os.read(reader, 1)  # until the parent says so
        finally:
            os._exit(0)
    os.close(reader)
    try:
        assert os.read(ready, 1) == b"x"
        assert client.get("one") == b"kept"
        with handshake.call(f"{HERE} {server.port} {SECRET}").connection as connection:
            connection.settimeout(10)
            server.close()
            assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, server.port), timeout=10)
        _await_end_of_threads()
    finally:
        for end in (writer, ready, tell):
            os.close(end)
        os.waitpid(child, 0)

"""Lines: what may call and be called, and what is seen of an end that no socket tells of."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raydp_parallel import Options, cluster
from raydp_parallel.calls.replica_groups import ReplicaGroups
from raydp_parallel.cluster import Pending, RayBackend, ReplicaClient
from raydp_parallel.cluster.backend import Death, TaskLabel
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.replica import server
from raydp_parallel.transport import direct_connection, handshake
from raydp_parallel.transport.links import link_for

HERE = "127.0.0.1"


class Station:
    """A thread that serves a line as another machine would."""

    def __init__(self, host: str | None = HERE) -> None:
        found = handshake.listen(host)
        assert found is not None
        self.address, self.listener = found
        self.hung_up = threading.Event()
        self.heard: list[int] = []
        self.met: list[int] = []
        self.pauses: list[list[int]] = []
        self.called = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        direct_connection.serve(
            self.listener, self._answer, self.met.append, lambda: self.pauses.append([*self.heard])
        )
        self.hung_up.set()

    def _answer(self, number: int, buffers: list[Any]) -> Sequence[Any]:
        self.heard.append(number)
        return [b"", *buffers]

    def connect(self) -> socket.socket:
        """Call without a word."""
        host, *port, _ = self.address.split()
        if port:
            return socket.create_connection((host, int(port[0])), timeout=10)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.settimeout(10)
        found.connect(f"\0{host}")
        return found


@pytest.fixture(params=[HERE, None], ids=["far", "near"])
def station(request: pytest.FixtureRequest) -> Iterator[Station]:
    """A peer on another machine, or on this one."""
    found = Station(request.param)
    yield found
    if not (found.heard or found.met or found.called):
        direct_connection.Connection(found.address, list).close()
    assert found.hung_up.wait(10)


def test_after_each_answer_there_is_a_pause(station: Station) -> None:
    """It begins when the answer was sent, and ends before the next call."""
    line = direct_connection.Connection(station.address, list)
    for number in (1, 2):
        line.send(number, [b"there"])
        line.receive(number, 10)
    line.close()
    assert station.hung_up.wait(10)
    assert station.pauses == [[1], [1, 2]]


def test_a_line(station: Station) -> None:
    """There and back; to another machine without a process to follow or memory to share."""
    caller = direct_connection.Connection(station.address, list)
    caller.send(7, [b"one", bytes(100_000)])
    assert [len(part) for part in caller.receive(7, 10)] == [0, 3, 100_000]
    assert station.met == [os.getpid() if caller.near else 0] and station.heard == [7]
    caller.close()


def prove(connection: socket.socket, secret: str) -> bytes:
    """What shows a listener that its caller knows the secret."""
    number = connection.recv(16, socket.MSG_WAITALL)
    return b"\0" * 16 + handshake._code(secret.encode(), b"caller", number, b"\0" * 16)


def test_a_proof_that_comes_in_pieces(station: Station) -> None:
    """Networks cut where they like."""
    station.called = True
    with station.connect() as caller:
        for byte in prove(caller, station.address.split()[-1]):
            caller.sendall(bytes([byte]))
        assert len(caller.recv(99)) == 32


def test_a_proof_is_of_no_use_to_another(station: Station) -> None:
    """Each listens to an answer to its own number only, and its own answer proves nothing to it."""
    station.called = True
    secret = station.address.split()[-1]
    with station.connect() as one, station.connect() as other:
        proof = prove(one, secret)
        other.sendall(proof)
        assert other.recv(16, socket.MSG_WAITALL) and not received(other)
        one.sendall(proof)
        assert len(received(one)) == 32


def received(connection: socket.socket) -> bytes:
    """What comes, b"" if the other end hung up."""
    try:
        return connection.recv(99)
    except ConnectionResetError:
        return b""


def test_strangers_who_say_nothing_are_not_waited_for(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right one is heard at once, however many wait; the first of too many are hung up on."""
    monkeypatch.setattr(handshake, "_MOST_CLIENTS", 3)
    strangers = [station.connect() for _ in range(5)]
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [])
    assert caller.receive(1, 10) == [b""]
    for stranger in strangers:
        assert stranger.recv(16, socket.MSG_WAITALL) and not received(stranger)
        stranger.close()
    caller.close()


@pytest.mark.parametrize(("most", "strangers", "tries"), [(None, 100, 1), (3, 4, 2)])
def test_strangers_do_not_push_out_the_right_caller(
    station: Station,
    most: int | None,
    strangers: int,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many come between its call and its proof. If they are too many, it calls again."""
    if most is not None:
        monkeypatch.setattr(handshake, "_MOST_CLIENTS", most)
    proves, met = handshake._prove, []

    def slowly(connection: socket.socket, secret: bytes) -> None:
        met.append([station.connect() for _ in range(strangers if not met else 0)])
        for stranger in met[-1]:
            stranger.recv(16, socket.MSG_WAITALL)  # it is connected, and so is the caller
        proves(connection, secret)

    monkeypatch.setattr(handshake, "_prove", slowly)
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [])
    assert caller.receive(1, 10) == [b""] and len(met) == tries
    caller.close()
    for stranger in met[0]:
        stranger.close()


def test_where_descriptors_are_few_a_quarter_is_for_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where their number is not known, as many as ever."""
    found = []
    for limit in (400, 1 << 20, -1):
        monkeypatch.setattr(os, "sysconf", lambda name, limit=limit: limit)
        found.append(handshake._most_clients())
    assert found == [100, 512, 512]


def test_without_descriptors_the_caller_is_heard_later(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers are hung up on first; where there are none, it is tried again."""
    failures = iter([True, True, False])
    accept = socket.socket.accept

    def accept_later(listening: socket.socket) -> Any:
        if next(failures, False):
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listening)

    stranger = station.connect()
    stranger.recv(16, socket.MSG_WAITALL)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [])
    assert caller.receive(1, 10) == [b""] and next(failures, None) is None
    assert not received(stranger)
    caller.close()
    stranger.close()


@pytest.mark.parametrize("host", [HERE, None], ids=["far", "near"])
def test_a_minute_begins_when_the_listener_can_answer(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica opens it while a call may still run for long."""
    now = time.monotonic()
    found = handshake.listen(host)
    assert found is not None
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: now + 100.0))
    thread = threading.Thread(target=direct_connection.serve, args=(found[1], lambda _n, b: b))
    thread.start()
    caller = direct_connection.Connection(found[0], list)
    caller.send(1, [b"x"])
    assert caller.receive(1, 10) == [b"x"]
    caller.close()
    thread.join(10)


@pytest.mark.parametrize("host", [HERE, None], ids=["far", "near"])
def test_who_listens_has_to_know_the_secret_too(host: str | None) -> None:
    """A process that got the port, or the name, of a replica that died is told nothing."""
    found = handshake.listen(host)
    assert found is not None
    address, listener = found
    listener._secret = b"another"
    threading.Thread(target=listener.accept, daemon=True).start()
    with pytest.raises(OSError):
        direct_connection.Connection(address, list)
    listener.close()

    def says_yes() -> None:
        connection, _ = impostor.accept()
        connection.sendall(b"0" * 48)

    with socket.create_server((HERE, 0)) as impostor:
        threading.Thread(target=says_yes, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not know the secret"):
            direct_connection.Connection(f"{HERE} {impostor.getsockname()[1]} secret", list)


@pytest.mark.parametrize("host", [HERE, None], ids=["far", "near"])
def test_nobody_is_waited_for_for_ever(host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not come leaves no socket, no name and no thread; strangers do not keep it
    open.
    """
    monkeypatch.setattr(handshake, "_OPEN", 0.05)
    found = handshake.listen(host)
    assert found is not None
    served: list[object] = []
    thread = threading.Thread(
        target=lambda: served.append(direct_connection.serve(found[1], lambda number, buffers: []))
    )
    thread.start()
    thread.join(10)
    assert served == [None]
    with pytest.raises(ConnectionRefusedError):
        direct_connection.Connection(found[0], list)


def test_a_line_is_kept_alive() -> None:
    """A firewall forgets a connection that is silent for long."""
    found = handshake.listen(HERE)
    assert found is not None
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(found[1].accept()))
    thread.start()
    ends.append(handshake.call(found[0]))
    thread.join(10)
    for end in ends:
        with end.connection as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_node_whose_address_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with forwarded ports: nothing can be called there, which is no error, and a
    warning.
    """
    client = server.ReplicaServer("cpu", link_for("auto"))
    monkeypatch.setattr(client, "_address", lambda: "192.0.2.1")
    assert handshake.listen("192.0.2.1") is None and client.open_line({}, False) is None
    caller = ReplicaClient(SimpleNamespace(open_line=SimpleNamespace(remote=client.open_line)))
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    assert caller.call_directly(near=False) and caller.line is None
    assert "cannot listen at its node's address" in caplog.text and "WARNING" in caplog.text


def test_a_replica_listens_when_it_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a call still runs: a call made then would not be answered."""
    replica = server.ReplicaServer("cpu", link_for("auto"))
    listened: list[bool] = []

    def listen(_host: str | None) -> None:
        listened.append(replica._working.locked())

    monkeypatch.setattr(handshake, "listen", listen)
    assert replica.open_line({}, True) is None and listened == [True]


OTHER_NAMESPACE = """
import os, sys
from raydp_parallel.transport import direct_connection, handshake
address, listener = handshake.listen()
print(os.getpid(), address, flush=True)
direct_connection.serve(
    listener, lambda number, buffers: buffers, lambda process: print(process, flush=True))
"""


def apart(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run Python in a namespace of process numbers of its own, which this process looks into."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


may_unshare = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


@pytest.mark.parametrize("translated", [0, 4711])
def test_who_has_another_number_here_is_not_watched(
    translated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says of the socket which process of this namespace is at its other end: none, or
    one with another number. The number that the replica has for itself is then that of another.
    """
    found = handshake.listen()
    assert found is not None
    serving = threading.Thread(
        target=direct_connection.serve, args=(found[1], lambda _number, buffers: buffers)
    )
    serving.start()
    innocent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        client = ReplicaClient(None)
        client.line = direct_connection.Connection(found[0], list)
        monkeypatch.setattr(handshake, "_peer", lambda _connection: (translated, os.getuid()))
        client.watch(innocent.pid)
        assert client.process is None
        client.end()
        cluster.client.await_ends([client], 10)
        client.close()
        serving.join(10)
        assert innocent.poll() is None
    finally:
        innocent.communicate(b"\n")
    assert innocent.returncode == 0


@pytest.mark.long
@may_unshare
def test_a_replica_in_a_namespace_of_its_own_is_not_watched() -> None:
    """Its number means another process here, the first of all: that is never sent a signal."""
    with apart(OTHER_NAMESPACE) as process:
        assert process.stdout is not None
        number, *address = process.stdout.readline().split()
        client = ReplicaClient(None)
        client.line = direct_connection.Connection(" ".join(address), list)
        assert number == "1" and client.line.wire.process(1) is None
        client.watch(1)
        assert client.process is None
        client.close()


@pytest.mark.long
@may_unshare
def test_a_driver_in_a_namespace_of_its_own_watches_nobody(station: Station) -> None:
    """The replica's number is that of another there, or of none."""
    caller = (
        "import sys, os; from raydp_parallel.transport.direct_connection import Connection; "
        "found = Connection(sys.argv[1], list);"
        "print([found.wire.process(int(number)) for number in sys.argv[2:]]); found.close()"
    )
    with apart(caller, station.address, str(os.getpid()), "1", "0") as process:
        assert process.stdout is not None
        assert process.stdout.read().strip() == "[None, None, None]"


def test_a_replica_is_watched_by_a_descriptor(station: Station) -> None:
    """Where its line shows that the number is its own; to another machine no line does."""
    client = ReplicaClient(None)
    client.line = direct_connection.Connection(station.address, list)
    assert client.line.wire.process(os.getppid()) is None
    client.watch(os.getpid())
    assert (client.process is not None) is client.near
    if client.process is not None:
        text = Path(f"/proc/self/fdinfo/{client.process.descriptor}").read_text()
        assert f"Pid:\t{os.getpid()}" in text
    client.close()


@pytest.mark.parametrize(
    "said", [b"", b"x", b"0" * 48, b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 2]
)
def test_strangers_are_hung_up_on(
    station: Station, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer without the secret gets a number that is of no use, and is not in the way of one
    that has it.
    """
    monkeypatch.setattr(handshake, "_AUTHENTICATION", 0.05)
    with station.connect() as stranger:
        stranger.sendall(said)
        heard, more = b"", b"?"
        while more:
            try:
                more = stranger.recv(99)
            except ConnectionResetError:
                more = b""
            heard += more
        assert len(heard) == 16
    monkeypatch.undo()
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [])
    assert caller.receive(1, 10) == [b""]
    caller.close()


def test_one_caller_only(station: Station) -> None:
    """There is no listener any more once the right one has come."""
    station.called = True
    caller = direct_connection.Connection(station.address, list)
    with pytest.raises(OSError):  # refused, or hung up on, if the listener had not closed yet
        direct_connection.Connection(station.address, list)
    caller.close()


def test_a_wrong_secret_is_an_error_for_the_caller(station: Station) -> None:
    """As if there were none."""
    where, _, secret = station.address.rpartition(" ")
    with pytest.raises(OSError):
        direct_connection.Connection(f"{where} {secret[::-1]}", list)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no such addresses")
def test_addresses_of_either_kind() -> None:
    """Nodes may have the longer ones."""
    try:
        station = Station("::1")
    except OSError:
        pytest.skip("this machine has no such network")
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [b"x"])
    assert caller.receive(1, 10) == [b"", b"x"]
    caller.close()


@pytest.mark.parametrize(
    ("value", "wanted"), [("1", False), ("true", False), ("0", True), (None, True)]
)
def test_where_ray_encrypts_there_are_none(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said on them could be read by all."""
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_USE_TLS", value)
    assert handshake.far_lines() is wanted
    asked: list[bool] = []

    def listen(_held: dict[int, int], near: bool) -> None:
        asked.append(near)

    client = ReplicaClient(SimpleNamespace(open_line=SimpleNamespace(remote=listen)))
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    client.call_directly(near=False)
    assert asked == [False] * wanted and client.line is None


class Mute:
    """A replica that takes calls and answers none, and what Ray knows of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_after: int) -> None:
        found = handshake.listen(HERE)
        assert found is not None
        address, listener = found
        self.silent, self.asked, self.dies_after = threading.Event(), 0, dies_after
        threading.Thread(
            target=direct_connection.serve, args=(listener, self._answer), daemon=True
        ).start()
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
        monkeypatch.setattr(cluster.client, "TURN", 0.01)
        opened = SimpleNamespace(remote=lambda *_arguments: (address, {}))
        self.client = ReplicaClient(
            SimpleNamespace(open_line=opened, hello=SimpleNamespace(remote=self._hello))
        )
        self.client.call_directly(near=False)

    def _answer(self, number: int, buffers: list[Any]) -> Sequence[Any]:
        self.silent.wait(10)
        return [b"", *buffers]

    def _hello(self) -> str:
        self.asked += 1
        return "hello"

    def _get(self, found: Any, timeout: float | None = None) -> Any:
        if found == "hello" and self.asked >= self.dies_after:
            raise ray.exceptions.RayActorError(error_msg="its node is gone")
        if found == "hello" and self.asked == 2:
            self.silent.set()
        return found


@pytest.mark.parametrize("together", [False, True], ids=["alone", "among others"])
def test_ray_is_asked_after_who_is_long_silent(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """No socket tells of a node that lost its power, or of a process with a child that keeps the
    socket open.
    """
    mute = Mute(monkeypatch, dies_after=3)
    call = mute.client.submit("forward", b"", [])
    assert isinstance(call, Pending)
    mute.silent.clear()
    mute.dies_after = 1
    found = _result(call, together)
    assert isinstance(found, Death) and found.cause == "its direct line was cut"
    assert mute.asked == 1
    mute.silent.set()


@pytest.mark.parametrize("together", [False, True], ids=["alone", "among others"])
def test_who_is_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Ray says that it is there, however often it is asked."""
    mute = Mute(monkeypatch, dies_after=99)
    call = mute.client.submit("forward", b"", [])
    assert isinstance(call, Pending)
    assert not isinstance(_result(call, together), Death)
    assert mute.asked >= 2
    mute.client.close()


def _result(call: Pending, together: bool) -> Any:
    if together:
        cluster.await_each([call], [float("inf")], lambda number, there: None)
    return call.result(30)


def nobody() -> str:
    """An address that was in use."""
    found = handshake.listen(HERE)
    assert found is not None
    address, listener = found
    listener.close()
    return address


def test_who_cannot_be_called_again_is_called_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the midst of a frame, for one: it is not dead."""
    mute = Mute(monkeypatch, dies_after=99)
    ref = ray.ObjectRef.from_random()
    mute.client.actor.open_line = SimpleNamespace(remote=lambda *_arguments: (nobody(), {}))
    mute.client.actor.forward = SimpleNamespace(remote=lambda *_arguments: ref)
    assert mute.client.line is not None
    mute.client.line.wire.sends = False
    call = mute.client.submit("forward", b"", [])
    assert isinstance(call, Pending) and call.through_ray
    assert mute.client.line is None
    mute.silent.set()


def test_a_call_that_the_dashboard_could_show_goes_over_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a Ray task it would run in another thread, and take a GPU's weights through the object
    store.
    """
    mute = Mute(monkeypatch, dies_after=99)
    task = TaskLabel(method="forward", chunk=1, chunks=2, again=False)
    call = mute.client.submit("forward", b"", [], task=task)
    assert isinstance(call, Pending)
    assert not call.through_ray
    mute.silent.set()


def test_a_node_that_cannot_be_called_is_tried_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall that drops what comes would cost seconds for each of its replicas."""
    tried: list[str] = []
    backend = SimpleNamespace(
        _options=Options(),
        _mute={"forgotten": time.monotonic() - 1},
        _memory=SimpleNamespace(meet=lambda *_: None),
    )
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here")
    )
    nodes = (
        ("dropped", False),
        ("dropped", False),
        ("refused", True),
        ("refused", True),
        ("forgotten", False),
    )
    for node, answers in nodes:
        call = SimpleNamespace(
            line=None, call_directly=lambda _near, timeout, n=node, a=answers: tried.append(n) or a
        )
        RayBackend._meet(backend, call, ReplicaHello(1, node, "gpu", "", "", 0, 0))  # type: ignore[arg-type]
    assert tried == ["dropped", "refused", "refused", "forgotten"]
    assert {node for node, until in backend._mute.items() if until > time.monotonic()} == {
        "dropped",
        "forgotten",
    }
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "on node dropped in the next 60 s are called through Ray too" in caplog.text


@pytest.mark.parametrize(
    ("error", "again"), [(TimeoutError(), False), (ConnectionRefusedError(), True)]
)
def test_who_does_not_answer_is_told_from_who_refuses(
    error: OSError, again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that died while it was called says nothing of the others on its node. It is called
    through Ray for good, which was not wanted: that is a warning with its reason.
    """

    def fails(_address: str) -> None:
        raise error

    monkeypatch.setattr(handshake, "call", fails)
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    client = ReplicaClient(
        SimpleNamespace(open_line=SimpleNamespace(remote=lambda *_arguments: ("here 1 x", {})))
    )
    assert client.call_directly(near=False) is again and client.line is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"on another node ({type(error).__name__}): it is called through Ray" in record.message


def test_after_the_cluster_was_left_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start another."""
    mute = Mute(monkeypatch, dies_after=99)
    call = mute.client.submit("forward", b"", [])
    assert isinstance(call, Pending)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert isinstance(call.result(30), Death) and mute.asked == 0
    mute.silent.set()


def test_new_weights_go_first_to_who_is_on_this_machine() -> None:
    """Others have lines, too."""
    slots = [
        SimpleNamespace(client=SimpleNamespace(near=near), hello=None, index=i)
        for i, near in enumerate((0, 1, 1))
    ]
    assert ReplicaGroups.near(None, slots) is slots[1]  # type: ignore[arg-type]

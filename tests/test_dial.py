"""Lines between machines: who may call, and what is seen of an end that no socket tells of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raydp_parallel import Options, cluster, dial, line
from raydp_parallel.cluster import Pending, RayCrew, RemoteDoor
from raydp_parallel.crew import Death
from raydp_parallel.groups import Groups
from raydp_parallel.messages import Hello

HERE = "127.0.0.1"


class Station:
    """A thread that serves a line as another machine would."""

    def __init__(self, host: str = HERE) -> None:
        found = dial.listen(host)
        assert found is not None
        self.address, self.listener = found
        self.hung_up = threading.Event()
        self.heard: list[int] = []
        self.met: list[int] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        line.serve(self.listener, self._answer, self.met.append)
        self.hung_up.set()

    def _answer(self, number: int, buffers: list[Any]) -> Sequence[Any]:
        self.heard.append(number)
        return [b"", *buffers]

    def connect(self) -> socket.socket:
        """Call without a word."""
        host, port, _ = self.address.split()
        return socket.create_connection((host, int(port)), timeout=10)


@pytest.fixture
def station() -> Iterator[Station]:
    """Somebody on another machine."""
    found = Station()
    yield found
    if not found.heard and not found.met:
        line.Line(found.address, list).close()
    assert found.hung_up.wait(10)


def test_a_line_to_another_machine(station: Station) -> None:
    """There and back, without a process to follow or memory to share."""
    caller = line.Line(station.address, list)
    assert not caller.near
    caller.send(7, [b"one", bytes(100_000)])
    assert [len(part) for part in caller.receive(7, 10)] == [0, 3, 100_000]
    assert station.met == [0] and station.heard == [7]
    caller.close()


@pytest.mark.parametrize("said", [b"", b"x", b"0" * 32, b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"])
def test_strangers_are_hung_up_on(station: Station, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know the secret gets no word, and is not in the way of who does."""
    monkeypatch.setattr(dial, "_GREETING", 0.05)
    with station.connect() as stranger:
        stranger.sendall(said)
        heard = b"?"
        try:
            heard = stranger.recv(1)
        except ConnectionResetError:
            heard = b""
        assert heard == b""
    monkeypatch.undo()
    caller = line.Line(station.address, list)
    caller.send(1, [])
    assert caller.receive(1, 10) == [b""]
    caller.close()


def test_one_caller_only(station: Station) -> None:
    """Nobody listens any more once the right one has come."""
    caller = line.Line(station.address, list)
    with pytest.raises(OSError):  # refused, or hung up on, if the listener had not closed yet
        line.Line(station.address, list)
    caller.close()


def test_a_wrong_secret_is_an_error_for_the_caller(station: Station) -> None:
    """As if nobody were there."""
    host, port, secret = station.address.split()
    with pytest.raises(OSError):
        line.Line(f"{host} {port} {secret[::-1]}", list)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no such addresses")
def test_addresses_of_either_kind() -> None:
    """Nodes may have the longer ones."""
    try:
        station = Station("::1")
    except OSError:
        pytest.skip("this machine has no such network")
    caller = line.Line(station.address, list)
    caller.send(1, [b"x"])
    assert caller.receive(1, 10) == [b"", b"x"]
    caller.close()


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("true", False), ("0", True), (None, True)])
def test_where_ray_encrypts_there_are_none(value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said on them could be read by all."""
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_USE_TLS", value)
    assert dial.far_lines() is wanted
    asked: list[bool] = []

    def listen(_number: int, _held: dict[int, int], near: bool) -> None:
        asked.append(near)

    door = RemoteDoor(SimpleNamespace(open_line=SimpleNamespace(remote=listen)))
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    door.call_directly(near=False)
    assert asked == [False] * wanted and door.line is None


class Mute:
    """A replica that takes calls and answers none, and what Ray knows of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_after: int) -> None:
        found = dial.listen(HERE)
        assert found is not None
        address, listener = found
        self.silent, self.asked, self.dies_after = threading.Event(), 0, dies_after
        threading.Thread(target=line.serve, args=(listener, self._answer), daemon=True).start()
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
        monkeypatch.setattr(cluster.answers, "TURN", 0.01)
        opened = SimpleNamespace(remote=lambda *_arguments: (address, {}))
        self.door = RemoteDoor(SimpleNamespace(open_line=opened, hello=SimpleNamespace(remote=self._hello)))
        self.door.call_directly(near=False)

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
def test_ray_is_asked_after_who_is_long_silent(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """No socket tells of a node that lost its power, or of a process whose child keeps the socket open."""
    mute = Mute(monkeypatch, dies_after=3)
    call = mute.door.submit("forward", b"", [])
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
    call = mute.door.submit("forward", b"", [])
    assert isinstance(call, Pending)
    assert not isinstance(_result(call, together), Death)
    assert mute.asked >= 2
    mute.door.close()


def _result(call: Pending, together: bool) -> Any:
    if together:
        cluster.await_each([call], [float("inf")], lambda number, there: None)
    return call.result(30)


def nobody() -> str:
    """An address where somebody was."""
    found = dial.listen(HERE)
    assert found is not None
    address, listener = found
    listener._listening.close()
    return address


def test_who_cannot_be_called_again_is_called_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the midst of a frame, for one: it is not dead."""
    mute = Mute(monkeypatch, dies_after=99)
    skipped: list[int] = []
    ref = ray.ObjectRef.from_random()
    mute.door.actor.open_line = SimpleNamespace(remote=lambda *_arguments: (nobody(), {}))
    mute.door.actor.skip_to = SimpleNamespace(remote=skipped.append)
    mute.door.actor.forward = SimpleNamespace(remote=lambda *_arguments: ref)
    assert mute.door.line is not None
    mute.door.line.intact = False
    call = mute.door.submit("forward", b"", [])
    assert isinstance(call, Pending) and call.through_ray
    assert mute.door.line is None and skipped == [0]
    mute.silent.set()


def test_a_node_that_cannot_be_called_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops what comes would cost seconds for each of its replicas."""
    tried: list[str] = []
    crew = SimpleNamespace(_options=Options(), _mute=set(), _arena=None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    for node, answers in (("dropped", False), ("dropped", False), ("refused", True), ("refused", True)):
        call = SimpleNamespace(line=None, call_directly=lambda _near, timeout, n=node, a=answers: tried.append(n) or a)
        RayCrew._meet(crew, call, Hello(1, node, "gpu", "", "", 0, 0))  # type: ignore[arg-type]
    assert tried == ["dropped", "refused", "refused"] and crew._mute == {"dropped"}


@pytest.mark.parametrize(("error", "again"), [(TimeoutError(), False), (ConnectionRefusedError(), True)])
def test_who_does_not_answer_is_told_from_who_refuses(
    error: OSError, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that died while it was called says nothing of the others on its node."""

    def fails(_address: str) -> None:
        raise error

    monkeypatch.setattr(dial, "call", fails)
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    door = RemoteDoor(SimpleNamespace(open_line=SimpleNamespace(remote=lambda *_arguments: ("here 1 x", {}))))
    assert door.call_directly(near=False) is again and door.line is None


def test_after_the_cluster_was_left_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start another."""
    mute = Mute(monkeypatch, dies_after=99)
    call = mute.door.submit("forward", b"", [])
    assert isinstance(call, Pending)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert isinstance(call.result(30), Death) and mute.asked == 0
    mute.silent.set()


def test_new_weights_go_first_to_who_is_on_this_machine() -> None:
    """Others have lines, too."""
    seats = [SimpleNamespace(door=SimpleNamespace(near=near), hello=None, index=i) for i, near in enumerate((0, 1, 1))]
    assert Groups.near(None, seats) is seats[1]  # type: ignore[arg-type]

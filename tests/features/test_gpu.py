"""Choices for GPUs, as far as no GPU is needed; tests/device has the rest, on stand-in ones."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.clients import Gone
from raydp_parallel.devices import cuda
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import Dispatcher
from raydp_parallel.wire import codec, group
from raydp_parallel.wire.messages import Seat


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices on which CUDA was started, which works on all."""
    found: list[Any] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is unset again
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch, "zeros", lambda size, device: None)
    return found


def test_a_replica_with_a_gpu_copies_with_several_threads(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets one where no CPU is booked (N3)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cuda, "cores", lambda: 16)
    assert [cuda.take_given("gpu", ["1"])] == started == [torch.device("cuda", 0)]
    assert torch.get_num_threads() == 4
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("kind", ["CUDA", "HIP"])
@pytest.mark.parametrize(("visible", "index"), [("", 1), ("5,1", 1), ("1,5", 0)])
def test_gpus_stay_visible_if_the_user_says_so(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, visible: str, index: int, kind: str
) -> None:
    """As Ray's own variable for this kind of GPU asks for (N5); a CPU replica sees none."""
    monkeypatch.setattr(torch.version, "hip", None if kind == "CUDA" else "6.4")
    monkeypatch.setenv(f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", visible)
    assert [cuda.take_given("gpu", ["1"])] == started == [torch.device("cuda", index)]
    assert os.environ[f"{kind}_VISIBLE_DEVICES"] == visible
    assert cuda.take_given("cpu", []).type == "cpu"
    assert os.environ[f"{kind}_VISIBLE_DEVICES"] == ("" if kind == "CUDA" else "-1")


def test_without_a_gpu_cuda_is_not_started() -> None:
    """By the import, or by replicas on CPUs."""
    code = """
import forked
forked.start()
forked.use(True)
import raydp_parallel, torch
torch.cuda._lazy_init = None
model = raydp_parallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
model(torch.ones(4, 2)).sum().backward()
"""
    harness.printed("-c", code)


def test_replicas_that_hang_in_nccl_share_one_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """And the warning says what may help."""
    clock, dispatcher = [0.0], Dispatcher(mock.Mock())
    dispatcher.replica_set.options.call_timeout = None
    dispatcher.replica_set.recorder.called = mock.Mock()

    def has_answer(seconds: float) -> None:
        clock[0] += seconds

    seats = [Seat("one", rank, 8, 1.0) for rank in range(8)]
    client = {"has_answer": has_answer, "unsent": 0, "receive.side_effect": Gone}
    slots: Any = [mock.Mock(client=mock.Mock(**client), forget=[]) for _ in seats]
    with mock.patch("time.monotonic", lambda: clock[0]):
        assert not groups._join(dispatcher, slots, mock.Mock(seats=seats))
    lost = {call.args[0] for call in dispatcher.replica_set.lost.call_args_list}
    assert lost == {*slots} and clock[0] == pytest.approx(groups._TRIAL + groups._GRACE, abs=0.1)
    assert "NCCL_SOCKET_IFNAME" in caplog.text


def test_a_group_listens_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's nodes lack that of a driver whose node is about to end."""
    monkeypatch.setattr(ray_api, "nodes", lambda: [mock.Mock(address="192.0.2.1")])
    assert group.open_store(2, ray_api.own_address())[1]


def test_odd_tensors_go_where_plain_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the sender's GPU may be another one here, or none."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:3")
    odd = TwoTensor(torch.ones(3), torch.ones(3))
    for place in ("cpu", "meta"):
        assert codec.unflat(codec.flat(odd), torch.device(place)).a.device.type == place

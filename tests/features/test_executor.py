"""The executor: one actor per device for all wrappers, and how long what they hold lives."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import ray
import torch
from harness import Apply, assert_same_grads, ended, printed
from torch import nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options, data_parallel, parallel_apply, replicate
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.placement import Place
from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.driver.dispatcher import Call, Pending
from raydp_parallel.driver.executor import shared
from raydp_parallel.errors import ExecutorClosed
from raydp_parallel.monitoring.stats import ReplicaInfo

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


class Pids(nn.Module):
    """Says in which process each row was seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x),), os.getpid())


def inner_pids(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Says where it runs, and where wrappers inside of it run."""
    again = data_parallel(Pids(), x, TWO)
    return torch.stack([torch.full((len(x),), os.getpid()), net.inner(x), again], 1)


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


def test_replicas_are_described(two: Executor) -> None:
    """One frozen entry per device: index, device, node, process and state."""
    found = two.replicas()
    for index, info in enumerate(found):
        assert info == ReplicaInfo(index, "cpu", ray_api.here(), info.pid, "ready", "", info.memory)
    assert len({i.pid for i in found} | {os.getpid(), 0}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].pid = 3  # type: ignore[misc]


@pytest.mark.ray
def test_sets_of_strings_have_one_order_in_all_replicas(two: Executor) -> None:
    """That of their hashes, which Python draws anew for each process that is not told."""
    model = DataParallel(linear(), executor=two)
    assert len({*model.run(lambda _net, _x: hash("a string"), batch())}) == 1


@pytest.mark.ray
def test_entries_are_kept_by_ray() -> None:
    """By name, for whoever looks at the cluster."""
    ray_api.put_entry("some executor", "its entry")
    assert "its entry" in ray_api.entries(ray.get_runtime_context().gcs_address)
    ray_api.delete_entry("some executor")
    assert "its entry" not in ray_api.entries(ray.get_runtime_context().gcs_address)


@pytest.mark.ray
def test_close_ends_the_processes(two: Executor) -> None:
    """Others go on. Ray does not take the end for an accident, and says nothing in red."""
    with Executor(TWO) as executor:
        model = DataParallel(linear(), executor=executor)
        (replica, _), out = replicate(linear(), TWO, executor=executor), model(batch())
        pids = [info.pid for info in executor.replicas()]
        clients: list[Any] = [slot.client for slot in executor.slots(TWO)]
    assert [i.state for i in executor.replicas()] == ["closed"] * 2
    executor.close()
    for use in (
        lambda: model(batch()),
        lambda: DataParallel(linear(), executor=executor)(batch()),
        lambda: replica(batch()),
        lambda: parallel_apply([replica], [batch()]),
        lambda: replicate(linear(), ["cpu"], executor=executor),
        lambda: out.sum().backward(),  # the graphs went with the replicas
    ):
        with pytest.raises(ExecutorClosed, match="make another, or leave `executor` out"):
            use()
    assert executor.stats().forwards == 1
    assert all(map(ended, pids))
    for client in clients:
        with pytest.raises(ray.exceptions.ActorDiedError, match=r"was killed by `ray\.kill`"):
            ray.get(client.actor.__ray_ready__.remote(), timeout=30)
    assert DataParallel(linear(), executor=two)(batch()).shape == (6, 2)


def test_stats_count(two: Executor) -> None:
    """Of all and of each replica; frozen, as a dict, and as a table."""
    before = two.stats()
    model = DataParallel(linear(), executor=two)
    for _ in range(2):
        model(batch(5)).sum().backward()
    after = two.stats()
    grown = after.since(before)
    assert (grown.forwards, grown.backwards, grown.reruns, grown.state_sends) == (2, 2, 0, 2)
    assert grown.state_bytes == 2 * (4 * 2 + 2) * 4
    assert [(r.calls, r.rows, r.deaths) for r in grown.replicas] == [(2, 6, 0), (2, 4, 0)]
    assert all(r.bytes_in and r.bytes_out for r in grown.replicas)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.forwards = 0  # type: ignore[misc]
    assert json.loads(json.dumps(after.to_dict()))["replicas"][0]["pid"] == after.replicas[0].pid
    lines = str(grown).splitlines()
    assert lines[2].split()[:4] == ["replica", "pid", "model", "rows/s"]
    assert str(after.replicas[1].pid) in lines[4]


def test_an_executor_in_a_pickle_or_a_copy(two: Executor) -> None:
    """Out of a pickle comes the process's, for replicas do not travel."""
    model = DataParallel(linear(), executor=two)
    out = model(batch())
    copied = copy.deepcopy(model)
    assert copied.executor is two and torch.equal(copied(batch()), out)
    again = pickle.loads(pickle.dumps(model))
    assert again.executor is shared(Options()) and torch.equal(again(batch()), out)


def test_one_actor_per_device_for_all_wrappers() -> None:
    """The n-th "cpu" is always the same, but for options that concern processes."""
    pids = DataParallel(Pids(), THREE)(batch(3)).tolist()
    assert len(set(pids)) == 3
    options = Options(unused_grads="none", scalars="mean")
    assert DataParallel(Pids(), TWO, options=options)(batch(2)).tolist() == pids[:2]
    executors = [DataParallel(Pids(), TWO, options=Options(threads=n)).executor for n in (1, 2)]
    assert executors[0] is not executors[1]
    assert DataParallel(Pids(), THREE)(batch(3)).tolist() == pids
    assert DataParallel(nn.Sequential(Pids()), TWO, dim=0)(batch(2)).tolist() == pids[:2]
    assert DataParallel(Pids(), ["cpu"])(batch(2)).tolist() == [os.getpid()] * 2  # in place
    assert data_parallel(Pids(), batch(2), TWO).tolist() == pids[:2]
    assert [replica(batch(1)).item() for replica in replicate(Pids(), TWO)] == pids[:2]


def test_a_wrapper_inside_a_wrapped_module_runs_in_place() -> None:
    """And the results are the plain module's."""
    model = DataParallel(Apply(inner_pids, inner=DataParallel(Pids(), THREE)), TWO)
    for outer, *inner in model(batch(4)).tolist():
        assert inner == [outer, outer] and outer != os.getpid()
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    net = nn.Sequential(DataParallel(inner, THREE), nn.Linear(6, 2))
    plain = copy.deepcopy(nn.Sequential(inner, net[1]))
    outs = [one(batch()) for one in (DataParallel(net, TWO), plain)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Tells:
    """Tells in a folder of its end in another process than this one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.driver = str(folder), os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.driver:
            Path(self.folder, str(os.getpid())).touch()


def test_a_request_that_a_death_has_ended_holds_no_model(killable: Executor) -> None:
    """Nor does one to a device that has had no replica yet owe an answer."""
    model = DataParallel(linear(), executor=killable)
    with torch.no_grad(), forked.held():
        model(batch())
        os.kill(killable.replicas()[1].pid, signal.SIGKILL)
        model(batch())
        gone = weakref.ref(model.module)
        del model
        gc.collect()
        assert gone() is None
    slot = ReplicaSlot(Place("cpu", 2), 2)
    assert not Pending(slot, Call(slot, "join"), slot.life).lives


def test_dropping_a_wrapper_frees_its_replicas(two: Executor, tmp_path: Path) -> None:
    """Without the garbage collector; the actors stay."""
    pids = {info.pid for info in two.replicas()}
    model = DataParallel(linear(), executor=two)
    model.module.tells = Tells(tmp_path)  # type: ignore[assignment]
    model(batch())
    second = DataParallel(model.module, executor=two)
    second(batch())
    for _ in range(2):  # the second answer comes when the first one's pause is over
        two.flush()
    for told in tmp_path.iterdir():  # by a copy that a replica compared its module with
        told.unlink()
    gc.collect()
    gc.disable()
    try:
        del model
        two.flush()
        assert not [*tmp_path.iterdir()]
        del second
        two.flush()
    finally:
        gc.enable()
    assert {int(path.name) for path in tmp_path.iterdir()} == pids
    assert {info.pid for info in two.replicas()} == pids


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (None, [0, 1]),
        (range(1, -1, -1), [1, 0]),
        ([torch.device("cuda", 1), torch.device("cuda"), "cuda:1"], [1, 0, 1]),
        (("cpu", "cuda:1", torch.device("cpu")), ["cpu", 1, "cpu"]),
        ([1], [1]),
    ],
)
def test_device_ids_of_every_kind(ids: Any, expected: list[Any]) -> None:
    """Each entry runs a chunk, the same entry the same process."""
    net = linear()
    model, plain = DataParallel(net, ids), copy.deepcopy(net)
    assert model.device_ids == expected
    outs = [one(batch(8)) for one in (model, plain)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    assert_same_grads(net, plain)
    pids = DataParallel(Pids(), ids)(torch.ones(len(expected), 1)).tolist()
    known = {info.pid: info for info in model.executor.replicas()}
    assert [known[pid].device.removeprefix("cuda:") for pid in pids] == [*map(str, expected)]
    assert len(set(pids)) == len({e for e in expected if e != "cpu"}) + expected.count("cpu")


def test_an_executor_has_the_name_that_ray_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program, a task, an actor's method, a trial; each was called default_worker."""
    trial = SimpleNamespace(get_context=lambda: SimpleNamespace(get_trial_name=lambda: "trial_7"))
    monkeypatch.setitem(sys.modules, "ray.tune", trial)
    monkeypatch.setattr(sys, "argv", ["/a/my train.py"])
    for line, name in (
        ("python\0my train.py", "my-train"),
        ("ray::fit one\0\0", "fit-one"),
        ("ray::Trainer.run\0", "Trainer.run"),
        ("ray::ImplicitFunc.train\0", "trial_7"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda *_, line=line, **how: line)
        assert re.fullmatch(f"{name}(/\\d+)?", Executor(()).replica_set.recorder.name)


def script(code: str, running: str | None = None, **environment: str) -> dict[str, Any]:
    """Run a program in a process of its own; returns what it put into ``found``.

    It finds no Ray but one that is ``running`` at an address, as `ray start` notes it down.
    """
    code = f"{_PREAMBLE}\n{code}\nprint('FOUND', json.dumps(found))"
    # A short name: Ray's sockets in it have long ones.
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if running is not None:
            Path(folder, "ray").mkdir()
            Path(folder, "ray", "ray_current_cluster").write_text(running)
        apart = {"RAY_TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        said = printed("-c", code, **apart, **environment)
    return json.loads(re.findall("^FOUND (.*)$", said, re.MULTILINE)[-1])  # type: ignore[no-any-return]


_PREAMBLE = """
import json, os
os.environ.pop("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", None)
import ray, torch
from torch import nn
import raydp_parallel
from raydp_parallel import DataParallel, Executor, data_parallel

found = {}
torch.manual_seed(0)
net = nn.Linear(4, 2)
x = torch.randn(6, 4)


def error(call):
    try:
        call()
    except Exception as e:
        return [type(e).__name__, str(e)]
"""


@pytest.fixture(scope="module")
def no_gpu() -> dict[str, Any]:
    """What a program finds on a machine without GPU and without Ray."""
    return script(
        """
class Anything(nn.Module):
    def forward(self, value, *, mode):
        self.mode = mode
        return {"value": value, "gen": (i for i in range(3))}

import logging
found["said"] = []
heard = logging.Handler()
heard.emit = lambda record: found["said"].append(record.getMessage())
logging.getLogger("raydp_parallel").addHandler(heard)
found["not yet"] = ray.is_initialized()
model = DataParallel(net)
DataParallel(net)
logging.getLogger("raydp_parallel").removeHandler(heard)
found["ids"] = model.device_ids
others = ("dim", "output_device", "src_device_obj")
found["attributes"] = [name for name in others if hasattr(model, name)]
found["error"] = error(lambda: model.output_device)
found["stats"] = [str(model.stats()), len(model.stats().replicas)]
found["state"] = list(model.state_dict())
found["same"] = torch.equal(model(x), net(x))
anything = DataParallel(Anything())
lock = object()
out = anything(lock, mode="any")
found["identity"] = out["value"] is lock and anything.module.mode == "any"
inner = torch.ones(2, 4)
DataParallel(nn.Sequential(nn.ReLU(inplace=True)))(inner.neg_())
found["in place"] = inner.tolist() == [[0.0] * 4] * 2
found["functional"] = error(lambda: data_parallel(net, x))
found["executor"] = [list(Executor().device_ids), len(Executor().replicas())]
os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:10001"
found["client"] = error(lambda: DataParallel(net, ["cpu", "cpu"])(x))
found["client, no ids"] = error(lambda: DataParallel(net))
del os.environ["RAY_ADDRESS"]
found["still not"] = ray.is_initialized()
"""
    )


def test_C2_no_gpu_runs_in_place(no_gpu: dict[str, Any]) -> None:
    """With the very objects; no cluster is started to find that out."""
    assert not no_gpu["not yet"] and not no_gpu["still not"]
    assert no_gpu["ids"] == [] and no_gpu["same"]
    assert no_gpu["executor"] == [[], 0]
    assert no_gpu["identity"] and no_gpu["in place"]


def test_C2_in_place_has_no_other_attributes(no_gpu: dict[str, Any]) -> None:
    """Only ``module`` and ``device_ids`` exist, as upstream."""
    assert no_gpu["attributes"] == []
    kind, text = no_gpu["error"]
    assert kind == "AttributeError"
    assert text.startswith("'DataParallel' object has no attribute 'output_device'")
    assert no_gpu["state"] == ["module.weight", "module.bias"]
    assert "in place" in no_gpu["stats"][0] and no_gpu["stats"][1] == 0
    (said,) = no_gpu["said"]
    assert "the module runs in place" in said


def test_F8_no_gpu_and_no_ids(no_gpu: dict[str, Any]) -> None:
    """The functional form has no fallback, as upstream's."""
    kind, text = no_gpu["functional"]
    assert kind == "RuntimeError" and text.startswith("device type could not be determined")


def test_ray_client_is_refused(no_gpu: dict[str, Any]) -> None:
    """A ray:// address is refused before anything is started, with the way out."""
    for name in ("client", "client, no ids"):
        kind, text = no_gpu[name]
        assert kind == "ClusterError" and "ray://" in text and "address='auto'" in text


@pytest.mark.long
def test_a_local_ray_starts_and_a_lost_one_is_replaced() -> None:
    """And shutdown() ends it."""
    found = script(
        """
expected = net(x)
model = DataParallel(net, ["cpu", "cpu"])
found["lazy"] = not ray.is_initialized()
out = model(x)
found["first"] = torch.allclose(out, expected) and ray.is_initialized()
pids = [info.pid for info in model.executor.replicas()]
ray.shutdown()
found["lost"] = error(lambda: out.sum().backward())
again = model(x)
again.sum().backward()
found["second"] = torch.allclose(again, expected)
found["gradient"] = torch.allclose(net.weight.grad, x.sum(0).expand(2, 4))
found["new processes"] = not set(pids) & {info.pid for info in model.executor.replicas()}
raydp_parallel.shutdown()
raydp_parallel.shutdown()
found["ended"] = not ray.is_initialized()
"""
    )
    kind, text = found.pop("lost")
    assert kind == "GraphLost" and "run forward again" in text
    assert set(found.values()) == {True}, found


@pytest.mark.long
def test_a_cluster_that_is_left_during_a_call() -> None:
    """A clear error, and the next use starts a new one."""
    found = script(
        """
import threading, time
from pathlib import Path

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
model = DataParallel(net, ["cpu", "cpu"])
model(x)
begun = Path(os.environ["RAY_TMPDIR"], "begun")

def waits(net, x):
    begun.touch()
    time.sleep(600)

def leave():
    while not begun.exists():
        time.sleep(0.01)
    ray.shutdown()

threading.Thread(target=leave).start()
found["left"] = error(lambda: model.run(waits, x))
model(x).sum().backward()
found["gradient"] = torch.allclose(net.weight.grad, x.sum(0).expand(2, 4))
"""
    )
    text = "your Ray was left while replicas ran; the next use starts anew"
    assert found == {"left": ["ClusterError", text], "gradient": True}


@pytest.mark.long
@pytest.mark.ray
def test_shutdown_leaves_a_cluster_that_is_its_users() -> None:
    """The process's replicas end, the cluster goes on, and so do wrappers, with new replicas."""
    model = DataParallel(linear(), TWO)
    out, executor = model(batch()), model.executor
    raydp_parallel.shutdown()
    assert ray.is_initialized()
    assert {info.state for info in executor.replicas()} == {"closed"}
    for ids in ([0, 1], [1, 0]):
        with Executor(ids) as own:  # the GPUs are free now, and after close
            assert torch.equal(DataParallel(model.module, executor=own)(batch()), out)
    assert model.executor is not executor
    assert torch.equal(model(batch()), out)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("how", ["RAY_ADDRESS", "running"])
def test_ray_address_is_joined(how: str) -> None:
    """By RAY_ADDRESS or because it runs here; it is left running."""
    address = ray.get_runtime_context().gcs_address
    found = script(
        """
model = DataParallel(net)
found["ids"] = model.device_ids
found["address"] = ray.get_runtime_context().gcs_address
out = DataParallel(net, ["cpu", "cpu"])(x)
found["same"] = torch.allclose(out, net(x))
raydp_parallel.shutdown()
""",
        **{how: address},
    )
    assert found == {"ids": [0, 1], "address": address, "same": True}
    assert DataParallel(linear(), TWO)(batch()).shape == (6, 2)

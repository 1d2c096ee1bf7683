"""What the check does on GPUs only, without any: which devices it asks for what, and that it
notices what is wrong.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import ASSERTION, UUID, installed
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.calls.executor import Executor
from raydp_parallel.check import (
    behaviour,
    copies,
    ddp,
    faults,
    here,
    loads,
    process_memory,
    program,
    runner,
    speed,
)
from raydp_parallel.check.here import Here, driver, machine, processor
from raydp_parallel.check.table import Row, RowStatus, TableLine
from raydp_parallel.options import Options
from raydp_parallel.replica import gradient_stream


class Stub(Here):
    """A machine on which a wrapper does whatever a test wants.

    Args:
        made: What takes the place of a wrapped net, given the net.
    """

    def __init__(self, made: Callable[[nn.Module], Any]) -> None:
        super().__init__(quick=True, gpus=0)
        self._made = made

    def wrapped(self, net: nn.Module, ids: Any, options: Any = None, **more: Any) -> Any:
        return self._made(net)

    def executor(self, *_: Any) -> Any:
        return SimpleNamespace(replicas=list)


def test_all_gpus_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its number; and torch's own wrapper gets the net on the first."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    machine = Here(gpus=2)
    assert (machine.device, machine.one, machine.several) == (torch.device("cuda", 0), [0], [0, 1])
    machine.finish()
    assert waited == [0, 1]
    assert machine.seconds(lambda: None, 1, warmup=0) >= 0
    assert waited == [0, 1] * 3
    moved: list[Any] = []
    net = nn.Linear(2, 2)
    monkeypatch.setattr(net, "to", lambda device: moved.append(device) or net)
    assert isinstance(machine.upstreams(net, [0, 1]), nn.DataParallel)
    assert moved == [torch.device("cuda", 0)]


def test_chunks_on_a_wrong_device_are_noticed() -> None:
    """Weights that lie elsewhere than on GPUs where there are some."""

    def model(x: Tensor, named: Any) -> Any:
        return x, {"twice": 2 * named["y"]}, (["meta", "meta"], ["meta", "meta"], [5, 5])

    found = behaviour.placement(Stub(lambda _net: model))
    assert not found.good
    assert found.text == "weights on ['meta', 'meta']"
    short = behaviour.placement(
        Stub(lambda _net: lambda x, named: (x, {"twice": named["y"]}, (["cpu"], ["cpu"], [10])))
    )
    assert "rows [10], expected [5, 5]" in short.text
    assert "nested output" in short.text


def test_outputs_on_a_wrong_device_are_noticed() -> None:
    """And where they should be."""
    found = behaviour.output_device(Stub(lambda net: net.to("meta") and _OnMeta(net)))
    assert not found.good
    assert "asked for cpu: outputs on meta" in found.text


class _OnMeta(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x.to("meta"))


def test_autocast_that_does_not_arrive_is_noticed() -> None:
    """By the dtype of what comes out; and a scaler that took another way by its scale."""

    class Deaf(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                return self.net(x)

    class Overflows(Deaf):
        def forward(self, x: Tensor) -> Any:
            return self.net(x) + next(self.parameters()).sum() * float("inf")

    row = Row("behaviour", "autocast", lambda here: behaviour.autocast(torch.bfloat16, here))
    line = runner.try_row(row, Stub(Deaf))
    assert line.status is RowStatus.FAILED
    assert "autocast did not reach the replicas" in line.text
    line = runner.try_row(row, Stub(Overflows))
    assert line.status is RowStatus.FAILED
    assert line.text == "the scale is 32.0, expected 1024.0"


@pytest.mark.parametrize(
    ("quick", "peak", "good"), [(False, 100, True), (False, 1 << 30, False), (True, 1 << 30, True)]
)
def test_peaks_are_held_against_the_plain_modules(
    monkeypatch: pytest.MonkeyPatch, quick: bool, peak: int, good: bool
) -> None:
    """Of the large net; of a small one they are told."""
    answers: dict[str, Any] = {
        "memory_allocated": 0,
        "max_memory_allocated": 1000,
        "empty_cache": None,
    }
    for name, answer in {**answers, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    load = loads.Load(
        lambda: nn.Linear(4, 2),
        lambda: (torch.ones(4, 4), torch.ones(4, 2)),
        lambda net, x, _y: net(x).sum(),
    )
    for name in (loads.RESNET, loads.PERCEPTRON):
        monkeypatch.setitem(process_memory.LOADS, name, load)
    monkeypatch.setattr(process_memory, "_TOLD", 0.0)
    machine: Any = Stub(lambda net: net)
    machine.quick = quick
    replica = SimpleNamespace(device_id="cpu", memory_peak=peak, memory=1)
    machine.executor = lambda: SimpleNamespace(stats=lambda: SimpleNamespace(replicas=[replica]))
    found = process_memory.on_the_gpu(machine)
    assert found.good == good
    assert ("--quick" in found.text) == quick
    assert found.numbers["master"] == 2 * 4 * (4 * 2 + 2)


def test_gradients_that_leave_early_are_held_against_the_plain_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a fake GPU; a copy that is not made again, after more was added, is noticed."""
    monkeypatch.setattr(gradient_stream, "TOGETHER", 1 << 20)
    devices.streams._beside.cache_clear()
    options = Options(in_process=True, link="object_store", gpu_paths=("courier",))
    executor = Executor((), options=options)
    machine: Any = Here(quick=True, gpus=0)
    machine.executor = lambda _options: executor
    with installed(monkeypatch) as gpu:
        found = copies.through_the_host(machine)
        assert found.good, found
        assert "stream waits on stream 1" in gpu.log
        begun = gradient_stream.GradientStream._spec

        def once(early: Any, row: int, grad: Tensor, *more: Any) -> Any:
            kept = early._begun.get(row)
            return kept.spec if kept is not None else begun(early, row, grad, *more)

        monkeypatch.setattr(gradient_stream.GradientStream, "_spec", once)
        assert not copies.through_the_host(machine).good
    executor.close()
    devices.streams._beside.cache_clear()


@pytest.mark.parametrize("brings", [False, True])
def test_gradients_that_are_missing_are_noticed(brings: bool) -> None:
    """On either side of a row that compares them."""

    def made(net: nn.Module) -> Any:
        return net if brings else copy.deepcopy(net)

    machine: Any = Stub(made)
    stats, groups = SimpleNamespace(link="shared and CUDA IPC"), SimpleNamespace(trouble="")
    machine.executor = lambda *_: SimpleNamespace(stats=lambda: stats, groups=groups)
    for row in (
        functools.partial(copies.path, "ipc"),
        copies.through_the_host,
        copies.evaluation_first,
        behaviour.on_cpus,
        behaviour.on_the_host,
    ):
        assert row(machine).good == brings


def executor_that(**answers: Any) -> Any:
    """An executor with these statistics and replicas."""
    stats = {"link": "shared and CUDA IPC", "deaths": 0, **answers}
    return SimpleNamespace(
        stats=lambda: SimpleNamespace(**stats),
        replicas=lambda: stats.get("replicas", ()),
        options=stats.get("options", Options()),
    )


LINKS = {
    "all is well": ([UUID], "shared and CUDA IPC", True),
    "IPC is off": ([UUID], "shared", False),
    "another GPU": (["GPU-other"], "shared", True),
    "a CPU": ([""], "shared", False),
    "two on one": (["GPU-other", "GPU-other"], "shared", False),
}


@pytest.mark.parametrize("case", [*LINKS])
def test_a_gpu_that_is_shared_without_cuda_ipc_has_failed(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """And replicas that are not where they should be; not what the allocator's settings exclude."""
    uuids, link, good = LINKS[case]
    machine: Any = Stub(lambda _net: lambda _x: None)
    replicas = [
        SimpleNamespace(index=i, gpu="G", device="cuda:0", gpu_uuid=uuid)
        for i, uuid in enumerate(uuids)
    ]
    options = Options(gpu_paths=("ipc",))
    machine.executor = lambda: executor_that(link=link, replicas=replicas, options=options)
    assert copies.links(machine).good  # of CPUs nothing is asked
    with installed(monkeypatch) as gpu:
        machine.gpus = len(uuids)
        found = copies.links(machine)
        assert found.good == good, found
        gpu.expandable = True
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert copies.links(machine).good == (good or case == "IPC is off")
        gpu.expandable, options = False, Options()  # for which bytes go by the host
        assert copies.links(machine).good == (good or case == "IPC is off")


@pytest.mark.parametrize(
    ("raised", "deaths", "good"),
    [(ASSERTION, 1, True), ("its line was cut", 1, False), (ASSERTION, 6, False)],
)
def test_the_text_of_an_assertion_and_one_death(raised: str, deaths: int, good: bool) -> None:
    """More than that is a failure, also where the next call is right."""
    died = [0]

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.min() < 0:
                died[0] += deaths
                raise RuntimeError(
                    f"Caught RuntimeError in replica 0\n{raised}\nCompile with TORCH_USE_CUDA_DSA"
                )
            return x

    machine: Any = Stub(lambda _net: Fails())
    machine.executor = lambda: executor_that(deaths=3 + died[0])
    assert faults.spoiled(machine).good == good


@pytest.mark.parametrize(("kept", "good"), [(0, True), (16 << 20, False)])
def test_memory_that_stays_with_a_killed_replica_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kept: int, good: bool
) -> None:
    """Most of the weights that it had open; and no other process is waited for than its
    successor.
    """
    pids, sizes = [7], iter([100, 100 + kept])
    monkeypatch.setattr(faults.os, "kill", lambda pid, _signal: pids.__setitem__(0, pid + 1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: next(sizes))

    class Wrapped(nn.Module):
        executor = SimpleNamespace(
            replicas=lambda: [SimpleNamespace(pid=pids[0], state="ready")],
        )

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert faults.left_open(Stub(lambda _net: Wrapped())).good == good
    assert pids == [8]


@pytest.mark.parametrize(("kept", "good"), [(100, True), (900, False)])
def test_memory_that_a_replica_keeps_without_its_model_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kept: int, good: bool
) -> None:
    """The driver's own cache is not counted."""
    free, emptied = iter([5000, 4000, 5000 - kept]), list[int]()
    monkeypatch.setattr(process_memory, "_WIDE", 16)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 9000))
    machine: Any = Stub(lambda net: net)
    machine.executor = lambda: SimpleNamespace(flush=lambda: None)
    found = process_memory.given_back(machine)
    assert (found.good, found.numbers) == (good, {"used": 1000, "kept": kept})
    assert len(emptied) == 3


@pytest.mark.parametrize("refuses", [False, True])
def test_registered_memory_is_tried(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """A refusal is told, and is no failure; that the next kernel fails of it is one."""
    with installed(monkeypatch) as gpu:
        monkeypatch.setattr(devices.cuda, "_registry", devices.cuda._Registry())
        gpu.refuses = refuses
        found = copies.registered(Stub(lambda net: net))
        assert (found.good, found.numbers["registered"]) == (True, not refuses)
        monkeypatch.setattr(devices.cuda, "_registry", devices.cuda._Registry())
        monkeypatch.setattr(devices.cuda, "_take_error", lambda _device: None)
        row = Row("copies", "registered memory", copies.registered)
        line = runner.try_row(row, Stub(lambda net: net))
        assert line.status is (RowStatus.FAILED if refuses else RowStatus.PASSED), line


def test_what_is_lost_after_an_evaluation_is_noticed() -> None:
    """A link that is another one afterwards; and inputs that came too early."""
    machine: Any = Stub(lambda net: net)
    links = iter(["shared and CUDA IPC"] * 3 + ["shared"])
    machine.executor = lambda: SimpleNamespace(stats=lambda: SimpleNamespace(link=next(links)))
    assert copies.evaluation_first(machine).good
    assert not copies.evaluation_first(machine).good
    assert copies.two_devices(Stub(lambda net: net)).good
    late = copies.two_devices(
        Stub(lambda _net: lambda x, named: (x, {"twice": 0 * named["y"]}, None))
    )
    assert (late.good, late.text) == (False, "WRONG inputs")


def test_settings_that_do_not_arrive_are_noticed() -> None:
    """By what replicas say; afterwards all is as it was."""
    before = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    gathers = behaviour.settings(Stub(lambda net: lambda x: (x, [[each] for each in net(x)[1]])))
    assert gathers.good, gathers
    assert not behaviour.settings(Stub(lambda _net: lambda x: (x, (["none"], [""])))).good
    assert (
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ) == before
    assert behaviour.on_cpus(Stub(lambda net: net)).good


# --- DDP's workers ---


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_ddp_never_has_two_ranks_of_nccl_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, backend: str
) -> None:
    """With one GPU its two workers talk over gloo."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(
        ddp.dist, "init_process_group", lambda name, **more: asked.append((name, more["rank"]))
    )
    monkeypatch.setattr(ddp.dist, "destroy_process_group", lambda: asked.append("end"))
    monkeypatch.setattr(ddp, "_measure", lambda *_: 0.5)
    ours, theirs = multiprocessing.Pipe()
    ddp._work(theirs, "file://place", "load", 1, 2, gpus, 3)
    assert asked == [1, (backend, 1), "end"]
    assert ddp._take(ours, 0) == 0.5


class _Part:
    """Some rows that may go to a GPU."""

    def __init__(self, log: list[Any], rows: Tensor) -> None:
        self.log, self.rows = log, rows

    def chunk(self, count: int) -> list[_Part]:
        return [_Part(self.log, part) for part in self.rows.chunk(count)]

    def to(self, device: torch.device) -> Tensor:
        self.log.append(device)
        return self.rows


def test_a_worker_of_ddp_uses_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its rank; and waits for it before it looks at the clock."""
    log: list[Any] = []
    net = nn.Linear(2, 1)
    monkeypatch.setattr(net, "to", lambda device: log.append(device) or net)
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda net: net)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(("current", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("waited", device)))
    load = loads.Load(
        lambda: net,
        lambda: (_Part(log, torch.ones(4, 2)), _Part(log, torch.ones(4))),
        lambda net, x, y: net(x).mean(),
    )
    monkeypatch.setitem(ddp.LOADS, "small", load)
    assert ddp._measure("small", 3, 4, 2, 2) > 0
    place = torch.device("cuda", 1)
    assert log == [("current", place), place, place, place, *[("waited", place)] * 5]
    log.clear()
    assert ddp._measure("small", 0, 1, 0, 1) > 0
    assert log == [torch.device("cpu")] * 3


# --- the machine, and the program ---


class Unreadable:
    """A file that is not there when it is read or written."""

    def __init__(self, *_: str) -> None:
        """Its name does not matter."""

    def read_text(self, **_: str) -> str:
        raise OSError("it is gone")

    def write_text(self, *_: str, **__: str) -> None:
        raise OSError("the disk is full")


def test_a_driver_that_does_not_answer_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVIDIA's tool may be missing, fail, or hang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    tool.chmod(0o755)
    assert driver() == ""
    tool.write_text("not a program", encoding="utf-8")
    assert driver() == ""
    for room in (here, process_memory):
        monkeypatch.setattr(room, "Path", Unreadable)
    assert isinstance(processor(), str)
    assert process_memory.resident(1) == (0, 0)


def test_a_gpu_that_torch_cannot_use_is_told_of() -> None:
    """To read that there is none would be a surprise where there is one."""
    about: dict[str, Any] = {"gpus": [], "driver": "", "cuda": None}
    assert program._devices(about) == "no GPU"
    about["driver"] = "580.1"
    assert program._devices(about) == "no GPU that torch can use (it is built for CPUs alone)"
    assert "built for CUDA 13.0" in program._devices({**about, "cuda": "13.0"})
    assert program._devices({**about, "gpus": [{"name": "G"}, {"name": "H"}]}) == "G, H"
    assert machine()["gpus"] == [] or torch.cuda.is_available()


def lines(*_: Any) -> Any:
    """A table of one row."""
    yield TableLine("g", "a row", RowStatus.PASSED, "fine")


def test_a_file_that_cannot_be_written_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not after the first row; if it cannot be later, nothing is lost but the file."""
    for text, said in (
        (str(tmp_path), "is a folder; give the name of a file"),
        (str(tmp_path / "none" / "out.json"), f"there is no folder {tmp_path / 'none'}"),
    ):
        with pytest.raises(SystemExit) as ended:
            program.main(["--out", text])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(program, "os", SimpleNamespace(access=lambda *_: False, W_OK=2))
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        program._file(str(tmp_path / "out.json"))
    monkeypatch.setattr(runner, "lines", lines)
    assert program.run(argparse.Namespace(out=Unreadable(), quick=True, gpu_paths=())) == 0
    printed = capsys.readouterr()
    assert "the table cannot be kept: the disk is full" in printed.err
    assert "1 rows as they should be" in printed.out


def test_ctrl_c_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the status that shells know."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "lines", interrupted)
    assert program.main([]) == 130


class _End:
    """A pipe's end."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, what: Any) -> None:
        self.said.append(what)


@pytest.mark.parametrize("how", ["all rows", "spoiled", "interrupted"])
def test_a_child_tries_its_rows_until_the_device_is_spoiled(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Then it says that the others are for another process; whatever comes, it ends its
    replicas.
    """
    log: list[str] = []

    def row(_here: Here) -> Any:
        if how == "interrupted":
            raise KeyboardInterrupt
        raise ValueError("a reason")

    def finish(_here: Here) -> None:
        if how == "spoiled":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    table = SimpleNamespace(ROWS=(Row("g", "one", row), Row("g", "two", row)))
    monkeypatch.setitem(sys.modules, "a_table_of_two", table)  # type: ignore[arg-type]
    monkeypatch.setattr(Here, "finish", finish)
    monkeypatch.setattr(Here, "close", lambda _here: log.append("closed"))
    monkeypatch.setattr(runner, "shutdown", lambda: log.append("shut down"))
    end: Any = _End()
    runner._work(end, "a_table_of_two", ["one", "two"], True)
    assert log == ["closed", "shut down"]
    expected = {
        "all rows": ["one", "two"],
        "spoiled": ["one", runner.Word.ELSEWHERE],
        "interrupted": [],
    }[how]
    assert [
        getattr(said, "name", said) if not isinstance(said, runner.Word) else said
        for said in end.said
    ] == [
        runner.Word.STARTED,
        *expected,
    ]


def test_small_loads_are_what_they_are_called() -> None:
    """Of the large ones only shapes are looked at."""
    x, y = loads.images(2, 8, 10)
    assert (x.shape, y.shape) == ((2, 3, 8, 8), (2,))
    with torch.device("meta"):
        net = loads.LOADS[speed.RESNET].make()
    assert net(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 1000)

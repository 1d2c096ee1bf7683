"""The check: its rows on CPU replicas, its comparisons with upstream on the oracle, and rows that
end badly.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_rows
import oracle
import pytest
import torch
from torch import nn

import raydp_parallel
from raydp_parallel import command
from raydp_parallel.check import (
    copies,
    ddp,
    process_memory,
    rows,
    runner,
    sharing,
    speed,
    table,
    training,
)
from raydp_parallel.check.here import Here, machine
from raydp_parallel.check.loads import LOADS, PERCEPTRON
from raydp_parallel.check.table import RowStatus

SMALL = "tied transformer, batch 16"
BY_NAME = {row.name: row for row in rows.ROWS}
APART = {"speed", "sharing"}
"""Groups that start processes of their own."""


class LikeGpus(Here):
    """A machine on which the CPU passes for a GPU, and upstream on CPUs for upstream."""

    def __init__(self) -> None:
        super().__init__(quick=True, gpus=0)
        self.gpus = 1

    @property
    def one(self) -> list[Any]:
        return ["cpu"]

    @property
    def several(self) -> list[Any]:
        return ["cpu", "cpu"]

    def upstreams(self, net: nn.Module, ids: Any, **more: Any) -> Any:
        return oracle.DataParallel(net, list(range(len(ids))), **more)

    def finish(self) -> None:
        """Nothing runs by itself."""


@pytest.fixture(scope="module")
def here(cluster: None) -> Iterator[Here]:
    """This machine, without GPUs."""
    found = Here(quick=True, gpus=0)
    yield found
    found.close()


@pytest.fixture(scope="module")
def like_gpus(here: Here) -> Iterator[LikeGpus]:
    """One that seems to have a GPU, with the same replicas."""
    found = LikeGpus()
    found._executor = here.executor()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("code", "said"), [(7, "ended, with status 7"), (-9, "was ended by signal 9")]
)
def test_an_ending_is_told(code: int, said: str) -> None:
    """How a child ended."""
    assert runner._ending(code).endswith(said)


def test_names_are_unique() -> None:
    """Rows are told apart by name."""
    assert len(BY_NAME) == len(rows.ROWS)


@pytest.mark.parametrize(
    "name", [row.name for row in rows.ROWS if row.group not in APART and not row.gpus]
)
def test_a_row_on_cpu_replicas(here: Here, name: str) -> None:
    """Every row that needs no GPU is as it should be, and says something."""
    line = runner.try_row(BY_NAME[name], here)
    assert line.status is RowStatus.PASSED, line
    assert line.text
    json.dumps(line.numbers)


@pytest.mark.parametrize("name", [row.name for row in rows.ROWS if row.gpus])
def test_a_row_for_gpus_is_not_checked_without(here: Here, name: str) -> None:
    """And says why."""
    line = runner.try_row(BY_NAME[name], here)
    assert (line.status, line.text) == (RowStatus.NOT_CHECKED, "no GPU")


def test_rows_say_what_they_were_held_against(like_gpus: LikeGpus) -> None:
    """Where there are GPUs."""
    assert "['cpu', 'cpu']" in training.beside_upstream(like_gpus).text
    assert training.on_several(like_gpus).good


@pytest.mark.parametrize("name", [row.name for row in training.ROWS if not row.gpus])
def test_training_rows_compare_with_upstream(like_gpus: LikeGpus, name: str) -> None:
    """With the oracle where a GPU would have upstream itself: the same bits."""
    line = runner.try_row(BY_NAME[name], like_gpus)
    assert line.status is RowStatus.PASSED, line
    theirs = {key: gap for key, gap in line.numbers.items() if key.startswith("nn.DataParallel")}
    assert theirs
    assert max(theirs.values()) <= 1e-15, theirs


def test_a_wrong_result_is_a_failure(like_gpus: LikeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that loses a chunk's gradients does not pass."""
    original = like_gpus.ours

    def broken(net: nn.Module, ids: Any, **more: Any) -> Any:
        next(net.parameters()).register_hook(lambda grad: grad * (1 + 1e-6))
        return original(net, ids, **more)

    monkeypatch.setattr(like_gpus, "ours", broken)
    assert runner.try_row(BY_NAME["perceptron, SGD"], like_gpus).status is RowStatus.FAILED
    monkeypatch.setattr(
        like_gpus, "ours", lambda net, ids, **_: net.requires_grad_(False) and nn.Identity()
    )
    assert runner.try_row(BY_NAME["perceptron, SGD"], like_gpus).status is RowStatus.FAILED


def test_nan_is_different() -> None:
    """From everything."""
    nan = [[torch.tensor(float("nan"))]]
    assert training.difference(nan, [[torch.tensor(1.0)]]) == float("inf")


def gpu_memory(monkeypatch: pytest.MonkeyPatch, free: int = 1 << 30) -> None:
    """What torch would say of a GPU's memory."""
    answers = {
        "memory_allocated": lambda _device: 0,
        "max_memory_allocated": lambda _device: 1 << 20,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _device: None,
        "mem_get_info": lambda _device: (free, 2 * free),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_rows_about_a_gpus_memory(like_gpus: LikeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks side by side; and a replica that asks for more than there is raises what torch
    raises.
    """
    gpu_memory(monkeypatch)
    monkeypatch.setattr(process_memory, "_TOLD", 0.0)
    found = process_memory.on_the_gpu(like_gpus)
    assert found.good
    assert found.numbers["plain_peak"] == 1 << 20
    assert process_memory.does_not_grow(like_gpus).good
    gpu_memory(monkeypatch, 1 << 60)
    line = runner.try_row(BY_NAME["out of memory in one replica"], like_gpus)
    assert line.status is RowStatus.FAILED
    assert "Error" in line.text  # a CPU raises a RuntimeError
    monkeypatch.setattr(torch, "OutOfMemoryError", RuntimeError)
    line = runner.try_row(BY_NAME["out of memory in one replica"], like_gpus)
    assert line.status is RowStatus.PASSED, line
    gpu_memory(monkeypatch, 8)
    line = runner.try_row(BY_NAME["out of memory in one replica"], like_gpus)
    assert (line.status, line.text) == (RowStatus.FAILED, "no torch.OutOfMemoryError was raised")


def test_rows_about_speed(like_gpus: LikeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of all; and a ratio that is held against what was asked."""
    monkeypatch.setattr(ddp, "step_seconds", lambda *_: 0.001)
    found = speed.steps(SMALL, like_gpus)
    assert [*found.numbers] == [
        "plain",
        "ours 1",
        "ours 2",
        "nn.DataParallel 1",
        "nn.DataParallel 2",
        "DDP 2",
    ]
    assert speed.overlap(like_gpus).numbers["work"] > 0
    monkeypatch.setattr(speed, "ROUNDS", 3)
    monkeypatch.setattr(speed, "FLOOR", 0.0)
    assert speed.throughput(SMALL, like_gpus).good
    monkeypatch.setattr(speed, "FLOOR", 100.0)
    assert not speed.throughput(SMALL, like_gpus).good
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert copies.own(like_gpus).keys() == {"on the device", "to it", "from it"}


@pytest.mark.long
def test_a_gpu_for_two(like_gpus: LikeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the tests counts two GPUs, which this process takes for one; its replicas are on
    CPUs.
    """
    raydp_parallel.shutdown()  # which hold those GPUs for other tests
    found = sharing.halves(like_gpus)
    assert found.good, found
    monkeypatch.setattr(
        sharing,
        "DataParallel",
        lambda *_, **__: (_ for _ in ()).throw(sharing.PlacementError("one")),
    )
    assert (
        runner.try_row(BY_NAME["two replicas on one GPU"], like_gpus).status
        is RowStatus.NOT_CHECKED
    )


@pytest.mark.long
def test_ddp_answers_or_says_why() -> None:
    """A worker of its own."""
    assert 0 < ddp.step_seconds(SMALL, 0, 1, 3) < 10
    ours, theirs = multiprocessing.Pipe()
    ddp._work(theirs, "nowhere://", SMALL, 0, 1, 0, 3)
    with pytest.raises(RuntimeError, match="a worker of DDP failed"):
        ddp._take(ours, 1)
    with pytest.raises(TimeoutError, match="gave no answer"):
        ddp._take(ours, 0)
    theirs.close()
    with pytest.raises(RuntimeError, match="ended without an answer"):
        ddp._take(ours, 1)


def test_large_nets_are_what_they_are_called() -> None:
    """By their numbers of parameters, as published."""
    sizes = {}
    with torch.device("meta"):
        for name in (speed.RESNET, speed.GPT2):
            sizes[name] = sum(p.numel() for p in LOADS[name].make().parameters())
    assert sizes == {speed.RESNET: 25_557_032, speed.GPT2: 124_439_808 - 2 * 0}
    assert [part.shape[0] for part in LOADS[PERCEPTRON].batch()] == [64, 64]


@pytest.mark.long
def test_rows_end_as_they_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Raising, dying, hanging, spoiling the device: each fails alone, the others go on, and the
    status is 1.
    """
    monkeypatch.setattr(runner, "TABLE", check_rows.__name__)
    monkeypatch.setattr(runner, "PATIENCE", 1.0)
    out = tmp_path / "check.json"
    assert command.main(["check", "--quick", "--out", str(out)]) == 1
    kept = json.loads(out.read_text(encoding="utf-8"))
    found = {row["name"]: (row["status"], row["text"]) for row in kept["rows"]}
    assert found == {
        "fine": ("ok", "as it should be"),
        "wrong": ("FAILED", "too much"),
        "crash": ("FAILED", "ValueError: a reason"),
        "absent": ("not checked", "no such thing"),
        "die": ("FAILED", "the process that tried it was ended by signal 9"),
        "spoil": ("ok", "spoilt"),
        "unspoilt": ("ok", "another process"),
        "long": ("not checked", "--quick"),
        "many": ("not checked", found["many"][1]),
        "last": ("ok", "as it should be"),
        "hang": ("FAILED", "no answer within 1 s"),
    }
    assert {"driver", "torch", "ray", "gpus", "cuda"} <= kept["machine"].keys()
    printed = capsys.readouterr().out
    assert kept["summary"] in printed
    assert "4 rows as they should be, 4 failed, 3 not checked" in printed
    for name, (status, text) in found.items():
        (shown,) = [line for line in printed.splitlines() if name in line.split() and text in line]
        assert status in shown


def test_what_the_table_was_taken_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a GPU: its name, its driver."""
    gpu = type(
        "Properties",
        (),
        {"name": "G", "total_memory": 5, "multi_processor_count": 3, "major": 9, "minor": 0},
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.1\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gpu)
    found = machine()
    assert found["driver"] == "580.1"
    assert found["gpus"] == [
        {"name": "G", "memory": 5, "processors": 3, "uuid": "", "capability": "9.0"}
    ]
    assert Here().one == [0]
    assert Here().several == [0, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert Here().several == [0, 1, 2]


def test_a_table_is_aligned() -> None:
    """Groups are named once."""
    lines = [
        table.TableLine("g", "long name", RowStatus.PASSED, "x"),
        table.TableLine("g", "b", RowStatus.NOT_CHECKED, "y"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.as_text(lines).splitlines() == [
            "g  long name  ok           x",
            "   b          not checked  y",
        ]

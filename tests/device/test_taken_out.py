"""Each wait of the package is taken out in turn, and a test of `test_ways` notices."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import on_gpus
import pytest
from harness import ROOT, printed, raised

if on_gpus.asked() != "cuda:0":
    pytest.skip("these are on stand-in GPUs: --device cuda:0", allow_module_level=True)

MEMORY, CHANNEL = "devices/memory.py", "wire/channel.py"
WAITS = [
    ("driver/autograd.py", ".wait_stream(stream)", "", "forward_on_a_stream"),
    (MEMORY, "last.synchronize()", "pass", "staging_is_written"),
    (MEMORY, "if on_gpu:\n        stream.synchronize()", "pass", "plain_module and ways1"),
    (MEMORY, "torch.cuda.current_stream(run.device).synchronize()", "pass", "plain_module"),
    (MEMORY, "            stream.synchronize()", "            pass", "written_once"),
    (
        MEMORY,
        "_readers.append(_up(window, run, begin, end))",
        "_up(window, run, begin, end)",
        "written_once",
    ),
    (CHANNEL, "memory.wait_for_readers(reading, waited)", "pass", "written_once"),
    (CHANNEL, "memory.wait_for_readers(self._reading, None)", "pass", "written_once"),
    ("replica/actor.py", "torch.cuda.synchronize()", "pass", "kernel_that_fails"),
    ("wire/group.py", "while not work.is_completed():", "while False:", "plan1"),
]


@pytest.mark.long
@pytest.mark.parametrize(("file", "wait", "instead", "tests"), WAITS)
def test_a_wait_that_is_taken_out_is_noticed(
    tmp_path: Path, file: str, wait: str, instead: str, tests: str
) -> None:
    """Each of them serves something."""
    shutil.copytree(ROOT / "raydp_parallel", tmp_path / "raydp_parallel")
    path = tmp_path / "raydp_parallel" / file
    before = path.read_text()
    assert before.count(wait) == 1
    path.write_text(before.replace(wait, instead))
    ways = [tmp_path, ROOT, ROOT / "tests/support", ROOT / "tests/device"]
    found, there = " ".join(map(str, ways)), os.pathsep.join(map(str, ways))
    command = ["-m", "pytest", "-q", "-x", "--device", "cuda:0", "-k", tests, "--timeout=60"]
    command += ["-o", f"pythonpath={found}", "tests/device/test_ways.py"]
    said = str(raised(lambda: printed(*command, PYTHONPATH=there)))
    # Memory that is gone while a copy uses it ends the process.
    assert "1 failed" in said or "Segmentation fault" in said, said

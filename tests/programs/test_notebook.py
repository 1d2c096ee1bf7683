"""A notebook: cells, classes that live in them, and its stop button."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from jupyter_client.manager import KernelManager

pytestmark = [pytest.mark.long, pytest.mark.ray]

ROOT = Path(__file__).parents[2]

CELL = """
import ray, time, torch
from pathlib import Path
from torch import nn
from raydp_parallel import DataParallel

ray.init(address={address!r}, log_to_driver=False)
folder = Path({folder!r})

def wait(where):
    (folder / ("in " + where)).touch()
    while (folder / where).exists():  # as it is told to
        time.sleep(0.01)

class Net(nn.Linear):
    def forward(self, x):
        wait("forward")
        out = super().forward(x)
        out.register_hook(lambda _: wait("backward"))
        return out

model = DataParallel(Net(1, 1), ["cpu", "cpu"])
x = torch.ones(4, 1)
"""


class Notebook:
    """A kernel."""

    def __init__(self, manager: KernelManager) -> None:
        self._manager = manager
        self._client = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def begin(self, code: str) -> str:
        """Run a cell, and do not wait for it."""
        number: str = self._client.execute(code)
        return number

    def ended(self, number: str) -> str:
        """What a cell printed, or the exception that ended it."""
        text = ""
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif message["msg_type"] == "error":
                text += content["ename"]
            elif message["msg_type"] == "execute_result":
                text += content["data"].get("text/html", content["data"]["text/plain"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text.strip()

    def run(self, code: str) -> str:
        """Run a cell to its end."""
        return self.ended(self.begin(code))

    def stop(self) -> None:
        """Press the stop button."""
        self._manager.interrupt_kernel()

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook that uses the suite's cluster, after its first cell."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT))
    found = Notebook(manager)
    address = ray.get_runtime_context().gcs_address
    assert found.run(CELL.format(address=address, folder=str(tmp_path))) == ""
    yield found
    found.close()


def test_the_example(notebook: Notebook) -> None:
    """Each of its cells, one after the other: it learns, and the statistics are a table."""
    example = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in example["cells"])
    sources = ["".join(c["source"]) for c in example["cells"] if c["cell_type"] == "code"]
    printed = {source: notebook.run(source) for source in sources}
    (losses,) = [text for text in printed.values() if text.startswith("loss ")]
    first, last = map(float, re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", losses).groups())
    assert last < first / 2
    assert "<table" in printed["model.stats()"]
    (zeros,) = [text for source, text in printed.items() if "zero_()" in source]
    assert re.fullmatch(r"tensor\(\[(\[0\., 0\.\],?\s*){4}\]\)", zeros)
    assert not [text for text in printed.values() if "Error" in text]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_stop_button(notebook: Notebook, tmp_path: Path, where: str) -> None:
    """The same replicas answer later, and gradients are whole."""
    train = "model.zero_grad(); model(x).sum().backward(); print(model.module.weight.grad.item())"
    pids = "print([info.pid for info in model.executor.replicas()])"
    assert notebook.run(train) == "4.0"
    before = notebook.run(pids)
    (tmp_path / f"in {where}").unlink()
    (tmp_path / where).touch()
    cell = notebook.begin(train)
    while not (tmp_path / f"in {where}").exists():
        time.sleep(0.005)
    notebook.stop()
    assert notebook.ended(cell) == "KeyboardInterrupt"
    (tmp_path / where).unlink()
    assert notebook.run(train) == "4.0"
    assert notebook.run(pids) == before

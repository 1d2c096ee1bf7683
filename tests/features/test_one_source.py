"""One module name, two files: replicas never compute with another source than the driver's."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from harness import printed
from torch import nn

from raydp_parallel import DataParallel, Options
from raydp_parallel.driver.executor import shared

ONES = torch.ones(4, 2)

NET = """
from torch import nn

FACTOR = {factor}

class Net(nn.Module):
    def forward(self, x):
        return x * FACTOR
"""

SCRIPT = """
import sys, ray, torch
from raydp_parallel import DataParallel
from nets_of_two import Net
import inner.net

ray.init(address=sys.argv[1], log_to_driver=False)
ones = torch.ones(4, 2)
for net in (Net(), inner.net.Net()):
    print(DataParallel(net, ["cpu", "cpu"])(ones).unique().tolist(), net(ones).unique().tolist())
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes modules into folders of their own and imports them, until the test ends."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may change twice within a second

    def load(name: str, **texts: str) -> Any:
        for file, text in texts.items():
            path = tmp_path / name / f"{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            sys.modules.pop(file, None)
        sys.path.insert(0, str(tmp_path / name))
        importlib.invalidate_caches()
        return importlib.import_module(next(iter(texts)))

    yield load
    shared(Options()).grow(120)  # replicas with another source were replaced
    for name, module in [*sys.modules.items()]:
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def computed(model: Any) -> float:
    """What replicas compute, one number."""
    (value,) = model(ONES).unique().tolist()
    return float(value)


@pytest.mark.long
@pytest.mark.ray
def test_a_script_in_a_folder_and_a_namesake_where_it_is_started(tmp_path: Path) -> None:
    """Ray gives its workers the working folder first."""
    for folder, factor in ((tmp_path, 2.0), (tmp_path / "exp", 3.0)):
        (folder / "inner").mkdir(parents=True)
        (folder / "nets_of_two.py").write_text(NET.format(factor=factor))
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "values.py").write_text(f"FACTOR = {factor}\n")
        text = NET.format(factor="FACTOR").replace("FACTOR = FACTOR", "from .values import FACTOR")
        (folder / "inner" / "net.py").write_text(text)
    (tmp_path / "exp" / "train.py").write_text(SCRIPT)
    address = ray.get_runtime_context().gcs_address
    said = printed("exp/train.py", address, cwd=tmp_path)
    assert re.findall(r"^\[[\d., ]*\] \[.*$", said, re.MULTILINE) == ["[3.0] [3.0]"] * 2, said


@pytest.mark.parametrize("trained", [False, True])
def test_a_name_that_the_replica_has_loaded_from_another_file(
    trained: bool, modules: Callable[..., Any]
) -> None:
    """Both models go on, each with its own source."""
    first = DataParallel(modules("one", twofold=NET.format(factor=2.0)).Net(), ["cpu", "cpu"])
    assert computed(first) == 2.0
    second = DataParallel(modules("two", twofold=NET.format(factor=5.0)).Net(), ["cpu", "cpu"])
    if trained:  # then the optimizer comes first
        second.module.register_parameter("unused", torch.nn.Parameter(ONES))
        second.optimizer(torch.optim.SGD)
    assert computed(second) == 5.0
    assert computed(first) == 2.0
    assert computed(second) == 5.0


def test_a_folder_that_is_added_between_two_models(
    modules: Callable[..., Any], tmp_path: Path
) -> None:
    late = NET.format(factor=3.0).replace("return x", "import late_of; return late_of.TWICE * x")
    loaded = modules("one", importing=late)
    DataParallel(torch.nn.Identity(), ["cpu", "cpu"])(ONES)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "late_of.py").write_text("TWICE = 2")
    sys.path.append(str(tmp_path / "more"))
    assert computed(DataParallel(loaded.Net(), ["cpu", "cpu"])) == 6.0


def test_a_module_that_is_reloaded(modules: Callable[..., Any], tmp_path: Path) -> None:
    """Old objects keep the old code, new ones have the new. No step of any model is lost."""
    module = modules(
        "one",
        reloaded=NET.format(factor="2.0 * x.sum() / x.sum()").replace("FACTOR =", "FACTOR = 1 #"),
    )
    path = tmp_path / "one" / "reloaded.py"
    path.write_text(NET.format(factor=3.0))
    importlib.reload(module)
    old = DataParallel(module.Net(), ["cpu", "cpu"])
    assert computed(old) == 3.0
    trained = DataParallel(nn.Linear(2, 1), ["cpu", "cpu"])
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        trained(ONES).sum().backward()
        optimizer.step()
    path.write_text(NET.format(factor=4.0).replace("x * FACTOR", "x * FACTOR * 10"))
    importlib.reload(module)
    assert computed(DataParallel(module.Net(), ["cpu", "cpu"])) == 40.0
    # Its forward is the old one, which reads the module's new number.
    assert computed(old) == old.module(ONES)[0, 0].item() == 4.0
    trained.sync()  # all replicas were replaced


@pytest.mark.long
def test_a_file_that_changes_before_a_successor_starts(
    modules: Callable[..., Any], tmp_path: Path, executors: Any
) -> None:
    """A new replica imports what the driver runs."""
    module = modules("one", edited=NET.format(factor=2.0))
    executor = executors(name="killable")
    model = DataParallel(module.Net(), executor=executor)
    assert computed(model) == 2.0
    (tmp_path / "one" / "edited.py").write_text(NET.format(factor=9.0))
    for info in executor.replicas():
        os.kill(info.pid, signal.SIGKILL)
    assert computed(model) == 2.0
    executor.grow()
    assert computed(model) == 2.0


PATCHED = """
from torch import nn

class Base(nn.Module):
    scale = 1.0

    def factor(self):
        return 1.0

    @staticmethod
    def shift():
        return 0.0

class Net(Base):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanhshrink()

    def forward(self, x):
        return self.act(x * self.scale * self.factor() + self.shift())
"""


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A script's function, with the name of the one that it calls."""
    space = {"function": function, "functools": functools, "__name__": "__main__"}
    exec("made = functools.wraps(function)(lambda *args: function(*args) * 3)", space)
    made: Any = space["made"]
    return made


SET: dict[str, Callable[[Any, Callable[..., None]], None]] = {
    "method": lambda nets, put: put(nets.Net, "forward", lambda self, x: x * 7),
    "method of the same name": lambda nets, put: put(
        nets.Net, "forward", wrapped(nets.Net.forward)
    ),
    "method of a base": lambda nets, put: put(nets.Base, "factor", lambda self: 3.0),
    "function of a base": lambda nets, put: put(nets.Base, "shift", staticmethod(lambda: 2.0)),
    "number of a base": lambda nets, put: put(nets.Base, "scale", 5.0),
    "method of torch": lambda nets, put: put(nn.Tanhshrink, "forward", lambda self, x: x * 7),
}


@pytest.mark.parametrize("name", SET)
def test_what_is_set_on_an_imported_class(
    modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Replicas have it, before and after the first forward, and no more once it is put back."""
    nets = modules("one", patched=PATCHED)
    net, other = nets.Net(), nets.Net()
    model, late = DataParallel(net, ["cpu", "cpu"]), DataParallel(other, ["cpu", "cpu"])
    before = net(ONES)
    for _ in range(2):
        assert torch.equal(model(ONES), before)
        with monkeypatch.context() as patch:
            SET[name](nets, patch.setattr)
            assert not torch.equal(net(ONES), before)
            assert torch.equal(model(ONES), net(ONES))
            assert torch.equal(late(ONES), net(ONES))


def test_a_package_that_ray_has_a_copy_of(
    modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers load it before the driver's can come: they keep theirs, and a warning says so."""
    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    modules("libs", psutil="OWN = True")
    with pytest.warns(UserWarning, match=r"use the 'psutil' of .*thirdparty_files.*not .*libs"):
        DataParallel(nn.Identity(), ["cpu", "cpu"])(ONES)

"""One module name, two files: replicas compute with the driver's source, and never with another in
silence.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raydp_parallel import DataParallel, Executor, SourceMismatch
from raydp_parallel.state import module_sources
from raydp_parallel.transport.messages import ModuleSource, Origins

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
    """Writes modules into folders of their own and imports them; all that is forgotten
    afterwards.
    """
    before = {*sys.modules}
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
    for name in {*sys.modules} - before:
        del sys.modules[name]


def computed(model: Any) -> float:
    """What replicas compute, one number."""
    (value,) = model(ONES).unique().tolist()
    return float(value)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_script_in_a_folder_and_a_namesake_where_it_is_started(tmp_path: Path) -> None:
    """`python exp/train.py`: Ray gives its workers the working folder first, Python gives a script
    its own.
    """
    for folder, factor in ((tmp_path, 2.0), (tmp_path / "exp", 3.0)):
        (folder / "inner").mkdir(parents=True)
        (folder / "nets_of_two.py").write_text(NET.format(factor=factor))
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "values.py").write_text(f"FACTOR = {factor}\n")
        text = NET.format(factor="FACTOR").replace("FACTOR = FACTOR", "from .values import FACTOR")
        (folder / "inner" / "net.py").write_text(text)
    (tmp_path / "exp" / "train.py").write_text(SCRIPT)
    address = ray.get_runtime_context().gcs_address
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "exp/train.py", address],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines() == ["[3.0] [3.0]"] * 2, done.stderr


@pytest.mark.usefixtures("cluster")
def test_a_name_that_the_replica_has_loaded_from_another_file(modules: Callable[..., Any]) -> None:
    """The driver drops a module and imports a namesake: both models go on, each with its own
    source.
    """
    first = DataParallel(modules("one", twofold=NET.format(factor=2.0)).Net(), ["cpu", "cpu"])
    assert computed(first) == 2.0
    second = DataParallel(modules("two", twofold=NET.format(factor=5.0)).Net(), ["cpu", "cpu"])
    assert computed(second) == 5.0
    assert computed(first) == 2.0
    assert computed(second) == 5.0


@pytest.mark.usefixtures("cluster")
def test_a_helper_that_differs(modules: Callable[..., Any]) -> None:
    """Of the model's own module nothing changed, but of what that imports."""
    net = NET.format(factor="FACTOR").replace("FACTOR = FACTOR", "from its_helper import FACTOR")
    helper = "FACTOR = {factor}\n"
    found = modules("one", its_helper=helper.format(factor=2.0), with_helper=net)
    assert (
        computed(DataParallel(importlib.import_module("with_helper").Net(), ["cpu", "cpu"])) == 2.0
    )
    assert found.FACTOR == 2.0
    modules("two", its_helper=helper.format(factor=7.0), with_helper=net)
    assert (
        computed(DataParallel(importlib.import_module("with_helper").Net(), ["cpu", "cpu"])) == 7.0
    )


@pytest.mark.usefixtures("cluster")
def test_a_module_that_is_reloaded(modules: Callable[..., Any], tmp_path: Path) -> None:
    """Old objects keep the old code, new ones have the new; also where functions are changed in
    place.
    """
    module = modules(
        "one",
        reloaded=NET.format(factor="2.0 * x.sum() / x.sum()").replace("FACTOR =", "FACTOR = 1 #"),
    )
    path = tmp_path / "one" / "reloaded.py"
    path.write_text(NET.format(factor=3.0))
    importlib.reload(module)
    old = DataParallel(module.Net(), ["cpu", "cpu"])
    assert computed(old) == 3.0
    path.write_text(NET.format(factor=4.0).replace("x * FACTOR", "x * FACTOR * 10"))
    importlib.reload(module)
    assert computed(DataParallel(module.Net(), ["cpu", "cpu"])) == 40.0
    # Its forward is the old one, which reads the module's new number.
    assert computed(old) == old.module(ONES)[0, 0].item() == 4.0


@pytest.mark.usefixtures("cluster")
def test_functions_that_are_changed_in_place(modules: Callable[..., Any], tmp_path: Path) -> None:
    """IPython's autoreload loads a module again, and gives the old class's functions the
    new code.
    """
    module = modules("one", autoreloaded=NET.format(factor=3.0))
    net = module.Net()
    kind = module.Net
    model = DataParallel(net, ["cpu", "cpu"])
    assert computed(model) == 3.0
    text = NET.format(factor=3.0).replace("x * FACTOR", "x * FACTOR + 1")
    (tmp_path / "one" / "autoreloaded.py").write_text(text)
    importlib.reload(module)
    kind.forward.__code__ = module.Net.forward.__code__
    module.Net = kind
    assert computed(model) == net(ONES)[0, 0].item() == 4.0


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_file_that_changes_before_a_successor_starts(
    modules: Callable[..., Any], tmp_path: Path, executors: Any
) -> None:
    """While training runs, the next experiment is being written: a new replica imports what the
    driver runs.
    """
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


@pytest.mark.usefixtures("cluster")
def test_a_file_that_changes_before_it_is_first_sent(
    modules: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was imported travels as what it is, which is said; what imports the changed file by name
    is refused.
    """
    module = modules("one", changed_early=NET.format(factor=2.0))
    text = "import changed_early\n" + NET.format(factor=1.0).replace(
        "x * FACTOR", "changed_early.Net()(x)"
    )
    uses = modules("one", uses_it=text)
    (tmp_path / "one" / "changed_early.py").write_text(
        NET.format(factor=9.0).replace("x * FACTOR", "x - FACTOR")
    )
    with caplog.at_level(logging.WARNING, "raydp_parallel"):
        assert computed(DataParallel(module.Net(), ["cpu", "cpu"])) == 2.0
    assert "changed_early.py was changed after it was imported" in caplog.text
    with pytest.raises(
        SourceMismatch,
        match=r"'changed_early' of a replica is not the "
        r"driver's.*importlib.reload",
    ):
        DataParallel(uses.Net(), ["cpu", "cpu"])(ONES)
    importlib.reload(module)
    assert computed(DataParallel(uses.Net(), ["cpu", "cpu"])) == -8.0


@pytest.mark.usefixtures("cluster")
def test_an_installed_package_that_differs_is_refused(
    modules: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes need the same versions of what is installed; the error names both files."""
    module = modules("site-packages", as_installed=NET.format(factor=2.0))
    file = tmp_path / "site-packages" / "as_installed.py"
    assert computed(DataParallel(module.Net(), ["cpu", "cpu"])) == 2.0
    file.write_text(NET.format(factor=3.0))
    importlib.reload(module)
    with pytest.raises(
        SourceMismatch, match="install the same version of it on every node"
    ) as caught:
        DataParallel(module.Net(), ["cpu", "cpu"])(ONES)
    assert str(file) in str(caught.value)


def test_the_order_of_a_replicas_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's; what only the replica has installed stands where the driver's packages would,
    the rest behind.
    """
    python, sites = "/opt/a/lib/python3.11", "/opt/a/lib/python3.11/site-packages"
    theirs = Origins("other", ("/exp", python, "/between", sites, "/last"), (python, sites), {})
    same = module_sources._in_order(["/cwd", python, sites, "/exp"], theirs)
    assert same == ["/exp", python, "/between", sites, "/last", "/cwd"]
    other = module_sources._in_order(["/cwd", "/b/site-packages", "/exp"], theirs)
    assert other == ["/exp", "/b/site-packages", "/between", "/last", python, sites, "/cwd"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", *sys.path])
    assert module_sources.origins([]).paths[:2] == (str(tmp_path), str(tmp_path / "relative"))


def test_what_is_told_of_modules(modules: Callable[..., Any], tmp_path: Path) -> None:
    """Users' own, by file and text; not the script, and of installed ones those that define a class
    of the model.
    """
    module = modules("one", told_of=NET.format(factor=2.0))
    found = module_sources.origins([torch.nn.Linear, module.Net]).sources
    assert found["told_of"] == ModuleSource(
        str(tmp_path / "one" / "told_of.py"), found["told_of"].digest
    )
    assert module_sources.texts("told_of") == {
        found["told_of"].file: NET.format(factor=2.0).encode()
    }
    assert (
        not {"__main__", "torch.nn.modules.linear", "raydp_parallel", "numpy", "json", "pytest"}
        & found.keys()
    )
    # in the driver's own process nothing is changed
    module_sources.follow(module_sources.origins([]))
    assert module_sources._GUARD not in sys.meta_path


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_replicas_that_take_no_part_are_not_waited_for(
    modules: Callable[..., Any], tmp_path: Path
) -> None:
    """Of three one stands still, then dies, while the others are sent modules; its successor is
    sent them too.
    """
    module = modules("one", for_two=NET.format(factor=2.0))
    with Executor(["cpu"] * 3) as executor:
        model = DataParallel(module.Net(), ["cpu", "cpu"], executor=executor)
        assert computed(model) == 2.0
        still = executor.replicas()[2].pid
        os.kill(still, signal.SIGSTOP)
        for factor in (3.0, 4.0):
            (tmp_path / "one" / "for_two.py").write_text(NET.format(factor=factor))
            importlib.reload(module)
            assert computed(DataParallel(module.Net(), ["cpu", "cpu"], executor=executor)) == factor
            if factor == 3.0:
                os.kill(still, signal.SIGKILL)
        assert computed(DataParallel(module.Net(), ["cpu"] * 3, executor=executor)) == 4.0

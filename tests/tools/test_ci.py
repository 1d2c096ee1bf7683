"""The check of a commit, run on suites of a few tests: what is run again, and what makes it
fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from files_together import TOGETHER

CHECK = Path(__file__).parents[2] / ".ci" / "run"

OPTIONS = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from record import Deadline, record_of

def pytest_addoption(parser):
    parser.addoption("--long", action="store_true")
    parser.addoption("--record", type=Path)
    parser.addoption("--until", type=float)

def pytest_configure(config):
    config.pluginmanager.register(record_of(config, config.getoption("--record")))
    config.pluginmanager.register(Deadline(config.getoption("--until")))
"""

PASSES = """
def test_passes():
    with open("ran", "a") as ran:
        ran.write("passes ")
"""

FLAKY = """
import os

def test_flaky():
    with open("ran", "a") as ran:
        ran.write("flaky ")
    assert os.path.getsize("ran") > len("passes flaky ")
"""

FAILS = """
def test_fails():
    assert False
"""

COLLECTED_ONCE = """
import os

assert not os.path.exists("collected")
open("collected", "w").close()
"""

SKIPPED = """
import pytest

@pytest.mark.skip
def test_skipped():
    pass
"""

ENDS = """
import os

def test_ends():
    os._exit(0)
"""

ENDS_ONCE = """
import os

def test_ends():
    if not os.path.exists("ended"):
        open("ended", "w").close()
        os._exit(1)
"""

HANGS_ONCE = """
import os, time

def test_hangs():
    if not os.path.exists("hung"):
        open("hung", "w").close()
        while True:
            time.sleep(60)
"""


def check(
    root: Path, tests: str, *arguments: str, branches: bool = True, seconds: int = 1000
) -> subprocess.CompletedProcess[str]:
    """Run the check in a checkout of which the suite is ``tests``, laid out as this one: its
    options stand in the folder that pytest finds by itself. No browser is installed for it.
    ``branches`` says whether enough of them are taken, ``seconds`` how long tests may begin.
    """
    counted = 'if [[ "${1:-}" == --coverage ]]; then touch counted; shift; fi'
    scripts = {
        "scripts/test": f'cd "{root}"\n{counted}\nexec "{sys.executable}" -m pytest -q "$@"',
        "scripts/coverage": f'touch "{root}/judged"\nexit {0 if branches else 1}',
        ".venv/bin/python": f'exec "{sys.executable}" "$@"',
        "tools/chromedriver": "",
        "tools/prometheus": "",
    }
    for name, text in scripts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    (root / ".ci").mkdir()
    shutil.copy(CHECK, root / ".ci" / "run")
    suite = root / "tests"
    suite.mkdir()
    (suite / "conftest.py").write_text(OPTIONS)
    (suite / "test_it.py").write_text(tests)
    (root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    path = os.pathsep.join([str(root / "tools"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    env["CHECK_SECONDS"] = str(seconds)
    command = [str(root / ".ci" / "run"), *arguments]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_what_passes_when_it_is_run_again_is_named(tmp_path: Path) -> None:
    """It alone is run again, and the check passes."""
    done = check(tmp_path, PASSES + FLAKY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "judged").exists()
    assert (tmp_path / "ran").read_text() == "passes flaky flaky "
    named = "PASSED ONLY WHEN RUN AGAIN: 1 of 2 tests\ntests/test_it.py::test_flaky\n"
    assert named in done.stdout


@pytest.mark.long
def test_a_test_that_does_not_end(tmp_path: Path) -> None:
    """It is ended, with the traces of its threads, and run again, as is what was to come after
    it; what has passed is not.
    """
    limit = ("-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true")
    after = PASSES.replace("passes", "after")
    done = check(tmp_path, PASSES + HANGS_ONCE + after, *limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "passes after "
    assert "Timeout" in done.stderr and "in test_hangs" in done.stderr
    assert "AGAIN: 1 of 3 tests\ntests/test_it.py::test_hangs\n" in done.stdout


def test_a_suite_that_passes_is_run_once(tmp_path: Path) -> None:
    """And arguments go to pytest."""
    done = check(tmp_path, PASSES + FAILS, "-k", "passes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "passes "
    assert "AGAIN" not in done.stdout


TIME_FLIES = """
import types

def test_time_flies():
    import record
    record.time = types.SimpleNamespace(time=lambda: float("inf"))
"""


def test_what_begins_too_late_is_left_out_and_named(tmp_path: Path) -> None:
    """The check passes by the tests that ran."""
    done = check(tmp_path, TIME_FLIES + PASSES, "-k", "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()
    named = "LEFT OUT, THE TIME WAS OVER: 1 of 2 tests\ntests/test_it.py::test_passes\n"
    assert named in done.stdout


LATE_IN_ONE_RUN = """
import os, time, types
import record

with open("collected", "a") as collected:
    collected.write(".")
if os.path.getsize("collected") == 2:
    record.time = types.SimpleNamespace(time=lambda: time.time() + 1001)
"""

TIME_FLIES_IN_ONE_RUN = """
import time, types

def test_time_flies():
    import record
    record.time = types.SimpleNamespace(time=lambda: time.time() + 1001)
"""


def test_there_is_time_to_run_again_what_failed(tmp_path: Path) -> None:
    """Where the time was over for what came after it, which is left out."""
    after = PASSES.replace("passes", "after")
    tests = PASSES + FLAKY + TIME_FLIES_IN_ONE_RUN + after
    done = check(tmp_path, tests, "-k", "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "passes flaky flaky "
    assert (
        "LEFT OUT, THE TIME WAS OVER: 1 of 4 tests\ntests/test_it.py::test_after\n" in done.stdout
    )
    assert "AGAIN: 1 of 4 tests\ntests/test_it.py::test_flaky\n" in done.stdout


def test_what_failed_and_was_late_then_is_run_again(tmp_path: Path) -> None:
    """It failed without the long tests, and with them its time was over."""
    done = check(tmp_path, LATE_IN_ONE_RUN + PASSES + FLAKY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "passes flaky flaky "
    assert "LEFT OUT" not in done.stdout
    assert (tmp_path / "collected").read_text() == "..."


FAILS_BEFORE_TIME_FLIES = """
import os, types
import record

if os.path.exists("failed"):
    record.time = types.SimpleNamespace(time=lambda: float("inf"))

def test_fails():
    open("failed", "w").close()
    assert False
"""


def test_what_failed_and_was_not_run_again_for_want_of_time(tmp_path: Path) -> None:
    """It has not passed, so the check fails, and names it."""
    done = check(tmp_path, PASSES + FAILS_BEFORE_TIME_FLIES, "-k", "test")
    assert done.returncode == 1
    assert "no time to run them again:\ntests/test_it.py::test_fails\n" in done.stderr


def test_no_test_that_began_in_time(tmp_path: Path) -> None:
    """None ran."""
    done = check(tmp_path, PASSES, seconds=-1)
    assert done.returncode == 1 and "no test ran" in done.stderr


def test_too_few_branches_fail_it(tmp_path: Path) -> None:
    """They were counted."""
    done = check(tmp_path, PASSES, branches=False)
    assert done.returncode == 1 and "not enough branches" in done.stderr
    assert (tmp_path / "counted").exists()


@pytest.mark.parametrize("why", ["arguments", "a run that did not end"])
def test_branches_of_which_some_were_not_counted_are_not_judged(tmp_path: Path, why: str) -> None:
    """Chosen tests take few, and a process that ends at once writes nothing down."""
    if why == "arguments":
        done = check(tmp_path, PASSES, "-k", "passes", branches=False)
    else:
        done = check(tmp_path, PASSES + ENDS_ONCE, branches=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "judged").exists()


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (PASSES + FLAKY + FAILS, "failed twice, or did not end:\ntests/test_it.py::test_fails\n"),
        (SKIPPED, "no test ran"),
        ("", "pytest ended with status 5"),
        ("import nothing_of_this_name", "pytest ended with status 2"),
        (COLLECTED_ONCE + FAILS, "pytest ended with status 2"),
        (PASSES + ENDS, "failed twice, or did not end:\ntests/test_it.py::test_ends\n"),
    ],
    ids=[
        "fails twice",
        "all skipped",
        "no test",
        "not collected",
        "not collected again",
        "no report",
    ],
)
def test_what_fails_the_check(tests: str, why: str, tmp_path: Path) -> None:
    """A failure that comes again, a suite without a test that ran, and one that did not end
    properly.
    """
    done = check(tmp_path, tests)
    assert done.returncode == 1 and why in done.stdout + done.stderr, done.stdout + done.stderr
    assert "AGAIN" not in done.stdout


def test_files_that_go_together_are_there() -> None:
    """Each in one set, and no name stands for two files."""
    tests = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    names = [name for files in TOGETHER.values() for name in files]
    assert [tests.count(name) for name in names] == [1] * len({*names})


TWO_FILES = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import files_together
import pytest

files_together.TOGETHER.clear()
files_together.TOGETHER["both"] = ("test_second.py", "test_third.py")
files_together._SETS.update({{"test_second.py": "both", "test_third.py": "both"}})

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return files_together.scheduler(config, log)
"""

SAYS_WHERE = """
import os

def test_where():
    with open("ran", "a") as ran:
        ran.write(f"{os.environ['PYTEST_XDIST_WORKER']}:{__name__} ")

def test_again():
    pass
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_one_process_runs_files_that_go_together(processes: int, tmp_path: Path) -> None:
    """And begins with them, also where others stand before them."""
    (tmp_path / "conftest.py").write_text(TWO_FILES)
    for name in ("first", "second", "third"):
        (tmp_path / f"test_{name}.py").write_text(SAYS_WHERE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "loadfile"]
    subprocess.run(
        [*command, "--no-loadscope-reorder", "-p", "no:cacheprovider"], cwd=tmp_path, check=True
    )
    ran = [each.split(":") for each in (tmp_path / "ran").read_text().split()]
    if processes == 1:
        assert [file for _, file in ran] == ["test_second", "test_third", "test_first"]
    where = {file: process for process, file in ran}
    assert where["test_second"] == where["test_third"]
    assert (where["test_first"] != where["test_second"]) == (processes == 2)

"""Modules that only the driver has: what is packed, what is not, and that it can be imported where
it is unpacked.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp_parallel.state import code_shipping
from raydp_parallel.transport.messages import Failure, Package


def failure(text: str, name: str = "builtins.ModuleNotFoundError") -> Failure:
    """An exception on its way to the driver."""
    return Failure(None, name, text, None, None, False)


def test_the_name_of_what_is_missing() -> None:
    """The package of the last error; other errors name nothing."""
    text = "Traceback ...\nModuleNotFoundError: No module named 'one.two'\n"
    assert code_shipping.wanted(failure(text)) == "one"
    assert (
        code_shipping.wanted(
            failure(f"{text}During handling ...\nModuleNotFoundError: No module named 'three'")
        )
        == "three"
    )
    assert code_shipping.wanted(failure(text, "builtins.KeyError")) is None
    assert code_shipping.wanted(failure("ModuleNotFoundError: no words of Python's")) is None
    assert code_shipping.wanted(None) is None


def test_a_package_with_all_that_lies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data too; caches and hidden files not. Another process imports it from where it is
    unpacked.
    """
    package = tmp_path / "there" / "mine"
    (package / "inner").mkdir(parents=True)
    (package / "__pycache__").mkdir()
    (package / ".git").mkdir()
    (package / "__init__.py").write_text("from mine.inner import word\n")
    (package / "inner" / "__init__.py").write_text(
        "from pathlib import Path\nword = Path(__file__).with_name('word.txt').read_text()\n"
    )
    (package / "inner" / "word.txt").write_text("hello")
    for hidden in ("__pycache__/x.pyc", ".git/config", ".secret"):
        (package / hidden).write_text("no")
    monkeypatch.syspath_prepend(str(package.parent))
    packed = code_shipping.pack("mine")
    assert packed is not None
    assert [name for name, _ in packed.files] == [
        "mine/__init__.py",
        "mine/inner/__init__.py",
        "mine/inner/word.txt",
    ]
    assert packed == code_shipping.pack("mine")
    assert imported(packed, tmp_path / "here", "import mine; print(mine.word)") == "hello"
    (package / "inner" / "word.txt").write_text("other")
    again = code_shipping.pack("mine")
    assert again is not None and again.digest != packed.digest


def test_a_module_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one beside the script."""
    (tmp_path / "beside_script.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = code_shipping.pack("beside_script")
    assert packed is not None and [name for name, _ in packed.files] == ["beside_script.py"]
    assert (
        imported(packed, tmp_path / "here", "import beside_script; print(beside_script.answer)")
        == "42"
    )


def test_an_editable_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is not on the path: a finder of the installer's knows it. A namespace package has
    several folders.
    """

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name != "edited":
                return None
            place = str(tmp_path / "src" / "edited" / "__init__.py")
            return importlib.util.spec_from_file_location(
                name, place, submodule_search_locations=[str(Path(place).parent)]
            )

    for folder in ("src/edited", "one/spaced/a", "two/spaced/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text(f"where = {folder!r}\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    monkeypatch.syspath_prepend(str(tmp_path / "two"))
    edited, spaced = code_shipping.pack("edited"), code_shipping.pack("spaced")
    assert edited is not None and spaced is not None
    assert imported(edited, tmp_path / "here", "import edited; print(edited.where)") == "src/edited"
    both = "import spaced.a, spaced.b; print(spaced.a.where, spaced.b.where)"
    assert imported(spaced, tmp_path / "here", both) == "one/spaced/a two/spaced/b"


@pytest.mark.parametrize("name", ["torch", "json", "nowhere_at_all", "__main__", "sys"])
def test_what_does_not_travel(name: str) -> None:
    """What is installed or Python's own, and what is nowhere."""
    assert torch.__file__
    assert code_shipping.pack(name) is None


def test_a_package_of_data_does_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("")
    monkeypatch.setattr(code_shipping, "_MOST", 10)
    (tmp_path / "heavy" / "data.bin").write_bytes(bytes(11))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert code_shipping.pack("heavy") is None
    assert "heavy is not sent" in caplog.text


def test_two_processes_unpack_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one uses what is there, and leaves nothing of its own; the path grows by one entry
    only.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = Package("twin", "d1", (("twin.py", b"x = 1\n"),))
    place = tmp_path / "twin-d1"
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: False if self == place else exists(self))
    for _ in range(2):
        code_shipping.unpack(package, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["twin-d1"]
    assert sys.path.count(str(place)) == 1


def imported(package: Package, folder: Path, code: str) -> str:
    """What a fresh process prints that has the package from `sources.unpack` alone."""
    folder.mkdir(exist_ok=True)
    before = [*sys.path]
    code_shipping.unpack(package, folder)
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = before
    run = f"import sys; sys.path[:] = [*sys.path[1:], *{added!r}]; {code}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", run], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_links_to_files_elsewhere_are_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that points at a key in the home folder does not send it."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "secret").write_text("secret")
    for file in ("__init__.py", "data.txt"):
        (tmp_path / "linked" / file).write_text("")
    (tmp_path / "linked" / "key.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "linked" / "same.txt").symlink_to(tmp_path / "linked" / "data.txt")
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = code_shipping.pack("linked")
    assert packed is not None
    assert [name for name, _ in packed.files] == [
        "linked/__init__.py",
        "linked/data.txt",
        "linked/same.txt",
    ]


def test_the_folder_of_what_was_sent_is_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user that can write there runs code as this one: one of others, or open to them, or a link,
    is not used.
    """
    monkeypatch.setattr(code_shipping.tempfile, "tempdir", str(tmp_path))
    folder = code_shipping.place("session_1")
    base = folder.parent
    assert folder == code_shipping.place("session_1")
    assert base.parent == tmp_path and base.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o770, 0o702):
        base.chmod(mode)
        assert code_shipping.place("session_1").parent == tmp_path != base
    base.chmod(0o700)
    monkeypatch.setattr(code_shipping.os, "geteuid", lambda: 12345)
    (tmp_path / "raydp_parallel-12345").mkdir(mode=0o700)
    assert code_shipping.place("session_1").parent == tmp_path
    monkeypatch.undo()
    monkeypatch.setattr(code_shipping.tempfile, "tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / base.name).symlink_to(base)
    assert code_shipping.place("session_1").parent == tmp_path / "other"

"""Classes, functions and modules in one row, and the exact comparison behind it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from raydp_parallel.state.python_state import CodeRow


class Base:
    """The base of a class that is watched."""

    width = 3


class Kind(Base):
    """A class that is watched."""

    def method(self) -> int:
        """Something to replace."""
        return 1


def make(space: dict[str, Any], *cells: types.CellType) -> types.FunctionType:
    """A function with globals and a closure of its own."""
    names = tuple(f"cell{k}" for k in range(len(cells)))
    code = (lambda: None).__code__.replace(co_freevars=names)
    return types.FunctionType(code, space, closure=cells)


def noted(row: CodeRow) -> CodeRow:
    """The row with what is there now."""
    row.note(row.look())
    assert row.unchanged()
    return row


EDITS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a method": lambda patch: patch.setattr(Kind, "method", lambda self: 2),
    "an attribute more": lambda patch: patch.setattr(Kind, "height", 1, raising=False),
    "an attribute less": lambda patch: patch.delattr(Kind, "method"),
    "of a base": lambda patch: patch.setattr(Base, "width", 4),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_class(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is set, added, or removed."""
    row = CodeRow()
    row.add_class(Kind, [Kind, Base])
    noted(row)
    EDITS[edit](monkeypatch)
    assert not row.unchanged()


def test_other_bases_of_a_class() -> None:
    """They bring other attributes."""
    kind = type("Some", (Base,), {})
    row = CodeRow()
    row.add_class(kind, [kind])
    noted(row)
    kind.__bases__ = (Kind,)
    assert not row.unchanged()


def test_an_edit_of_a_function() -> None:
    """Its code, defaults, closure, and the globals that it uses; others do not count."""
    space: dict[str, Any] = {"used": 1, "gone": 2}
    cell = types.CellType(1)
    function = make(space, cell)
    row = CodeRow()
    row.add_function(function, ["used", "gone", "missing"])
    noted(row)
    space["other"] = 5
    assert row.unchanged()
    for edit in (
        lambda: space.update(used=2),
        lambda: space.pop("gone"),
        lambda: space.update(missing=None),
        lambda: setattr(cell, "cell_contents", 2),
        lambda: setattr(function, "__defaults__", (1,)),
        lambda: setattr(function, "__kwdefaults__", {"x": 1}),
        lambda: setattr(function, "__code__", make({}, cell).__code__.replace(co_name="other")),
    ):
        edit()
        assert not row.unchanged()
        noted(row)


def test_a_cell_without_contents_is_not_vouched_for() -> None:
    """The exact comparison decides."""
    row = CodeRow()
    row.add_function(make({}, types.CellType()), [])
    row.note(row.look())
    assert not row.unchanged()


def test_a_module_that_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module of the name, another spec of the module, or none."""
    module = types.ModuleType("some_module")
    monkeypatch.setitem(sys.modules, "some_module", module)
    row = CodeRow()
    row.add_modules(["some_module"])
    noted(row)
    module.__spec__ = object()  # type: ignore[assignment]
    assert not row.unchanged()
    noted(row)
    monkeypatch.setitem(sys.modules, "some_module", types.ModuleType("some_module"))
    assert not row.unchanged()
    monkeypatch.delitem(sys.modules, "some_module")
    assert not row.unchanged()


def test_what_does_not_count_costs_one_exact_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python adds attributes of its own to classes, which are not sent."""
    exact: list[int] = []

    def read() -> list[Any]:
        exact.append(1)
        return [Kind.method]

    row = CodeRow()
    row.add_class(Kind)
    row.add_reader(read)
    assert not row.changed()
    exact.clear()
    assert not row.changed() and exact == []
    monkeypatch.setattr(Kind, "__slotnames__", [], raising=False)
    assert not row.changed() and exact == [1]
    assert not row.changed() and exact == [1]
    monkeypatch.setattr(Kind, "method", lambda self: 2)
    assert row.changed() and row.changed()

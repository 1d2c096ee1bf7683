"""Counts the mutable globals of the package: what a call may change for all that come later.

``python tests/support/mutable_globals.py`` lists them. A name of a module counts if a function
binds it anew, or if its value is an object that can change: a container that is empty at first or
that the code writes to, a lock, a counter, an instance that is not frozen. Tables that nothing
writes to do not count, nor do loggers, classes, functions, and `ContextVar`, as their values belong
to contexts. Caches of functions with results that depend on their arguments alone
(`functools.cache`) do not count either.
"""

from __future__ import annotations

import ast
import collections
import ctypes
import dataclasses
import enum
import functools
import importlib
import logging
import operator
import re
import struct
import types
import typing
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

import raydp_parallel

PACKAGE = Path(raydp_parallel.__file__).parent

_NEVER_CHANGES = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), type, Path, re.Pattern),
    enum.Enum,
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodType),
    *(types.GetSetDescriptorType, types.GenericAlias, types.UnionType, types.ModuleType),
    *(types.MappingProxyType, functools._lru_cache_wrapper, operator.attrgetter, struct.Struct),
    *(logging.Logger, ContextVar, nullcontext, ctypes.CDLL, typing.TypeVar),
    *(torch.dtype, torch.device, torch.layout),
)
_WRITES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop"),
    *("popitem", "popleft", "remove", "setdefault", "sort", "update"),
}


def mutable_globals() -> dict[str, str]:
    """What changes, by file and name, with the type of its value."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__main__.py":
            continue
        file = str(path.relative_to(PACKAGE))
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        tree = ast.parse(path.read_text())
        bound = {name for node in ast.walk(tree) for name in _bound_anew(node)}
        for name in _assigned(tree):
            value = getattr(module, name, None)
            if name in bound or not _is_constant(value, name, tree):
                found[f"{file}: {name}"] = type(value).__name__
    return found


def _assigned(tree: ast.Module) -> Iterator[str]:
    """The names that a module's own statements assign."""
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Name) and part.id != "__all__":
                    yield part.id


def _bound_anew(node: ast.AST) -> list[str]:
    return node.names if isinstance(node, ast.Global) else []


def _is_empty(name: str, tree: ast.Module) -> bool:
    """Whether a name is first an empty container, which is of no use unless it is written to."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in [part.id for part in targets if isinstance(part, ast.Name)]:
                first = node.value
                parts = getattr(first, "keys", None) or getattr(first, "elts", None)
                return isinstance(first, (ast.Dict, ast.List, ast.Set)) and not parts
    return False


def _is_constant(value: Any, name: str, tree: ast.Module) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(_is_constant(part, "", tree) for part in value)
    if isinstance(value, collections.defaultdict):
        return False  # reading it writes to it
    if isinstance(value, (dict, list, set)):
        written = _is_empty(name, tree) or any(_writes(node, name) for node in ast.walk(tree))
        return not (name and written)
    if isinstance(value, functools.partial):
        return all(_is_constant(part, "", tree) for part in (value.func, *value.args))
    if isinstance(value, _NEVER_CHANGES) or not hasattr(type(value), "__module__"):
        return True
    if dataclasses.is_dataclass(value):
        parameters: Any = getattr(type(value), "__dataclass_params__")  # noqa: B009
        return bool(parameters.frozen)
    if type(value).__module__ in ("typing", "ctypes") or type(value) is object:
        return True
    # an object of ours without anything of its own, or something of Ray's or torch's
    return not vars(value) if _is_ours(value) else type(value).__module__.startswith("ray.")


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("raydp_parallel") and hasattr(value, "__dict__")


def _writes(node: ast.AST, name: str) -> bool:
    """Whether an expression in a function changes a container; what a module does while it is
    loaded is part of making it.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    for inner in ast.walk(node):
        place = getattr(inner, "value", None)
        if not isinstance(place, ast.Name) or place.id != name:
            continue
        if isinstance(inner, ast.Subscript) and not isinstance(inner.ctx, ast.Load):
            return True
        if isinstance(inner, ast.Attribute) and inner.attr in _WRITES:
            return True
    return False


if __name__ == "__main__":
    for where, kind in mutable_globals().items():
        print(f"{where} ({kind})")
    print(len(mutable_globals()))

"""A pickler for values that cloudpickle does not handle: standard streams, and objects with a
`__getattr__` that asks another object.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import logging
import pickle
import sys
from typing import Any

import cloudpickle

_STREAMS = ("stdout", "stderr", "stdin")
_NAMES: dict[Any, str] = {"<stdin>": "stdin", "<stdout>": "stdout", "<stderr>": "stderr"}
_NAMES |= {0: "stdin", 1: "stdout", 2: "stderr"}
"""The names that standard streams have when Python opened them, or when a number did."""

_HOOKS = (
    "__setstate__",
    "__getstate__",
    "__reduce__",
    "__reduce_ex__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler, extended by the values that this file handles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        """The reduction of a value that pickle cannot handle itself."""
        name = stream_name(value)
        if name is not None:
            return _stream, (name,)
        kind: Any = type(value)
        # a class is pickled by its name, even if its metaclass has a `__getattr__`
        if not issubclass(kind, type) and _delegates(kind):
            return copyreg.__newobj__, (kind,), _state(value), None, None, _set_state  # type: ignore[attr-defined]
        if kind is logging.StreamHandler:
            state = {key: part for key, part in vars(value).items() if key != "lock"}
            return logging.StreamHandler, (), state, None, None, _set_state
        if isinstance(value, io.TextIOWrapper):
            # cloudpickle would send a copy of its contents
            raise TypeError("cannot pickle an open file")
        return super().reducer_override(value)


def stream_name(value: Any) -> str | None:
    """The name of a standard stream, ``"stdout"``, ``"stderr"`` or ``"stdin"``; None for any other
    value.
    """
    for name in _STREAMS:
        known = (getattr(sys, name), getattr(sys, f"__{name}__"))
        if value is not None and any(value is stream for stream in known):
            return name
    # the original stream, where a notebook, a test or Ray has replaced it
    if type(value) is io.TextIOWrapper:
        return _NAMES.get(getattr(value, "name", None))
    return None


def _stream(name: str) -> Any:
    return getattr(sys, name)


@functools.lru_cache(maxsize=4096)
def _delegates(kind: Any) -> bool:
    """Whether unpickling calls an object's own `__getattr__` for `__setstate__`, at a time when the
    object has no attributes yet.
    """
    if kind.__new__ is not object.__new__ and not _is_python_function(kind.__new__):
        return False  # a list, a dict, or another type that keeps its contents in C
    inherited = object.__dict__
    no_hooks = all(getattr(kind, name, None) in (None, inherited.get(name)) for name in _HOOKS)
    return no_hooks and any("__getattr__" in vars(base) for base in kind.__mro__)


def _is_python_function(function: Any) -> bool:
    return hasattr(function, "__code__")


def _state(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object's attributes and the values of its slots, read without its own `__getattr__`."""
    slots = {}
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError):
            slots[name] = object.__getattribute__(value, name)
    try:
        return object.__getattribute__(value, "__dict__"), slots
    except AttributeError:
        return {}, slots


def _set_state(value: Any, state: Any) -> None:
    """Set an object's attributes without its own `__setattr__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, part in slots.items():
        object.__setattr__(value, name, part)

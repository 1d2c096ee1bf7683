"""What pickle needs help with: the process's own streams, and objects whose `__getattr__` asks
another object.
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
"""What such a stream is called where it was opened: by Python itself, or by its number."""

_HOOKS = (
    "__setstate__",
    "__getstate__",
    "__reduce__",
    "__reduce_ex__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, with that help."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        """How a value is pickled that pickle cannot take itself."""
        name = stream_name(value)
        if name is not None:
            return _stream, (name,)
        kind: Any = type(value)
        # a class goes by its name, whatever its metaclass asks
        if not isinstance(value, type) and _delegates(kind):
            return copyreg.__newobj__, (kind,), _state(value), None, None, _set_state  # type: ignore[attr-defined]
        if kind is logging.StreamHandler:
            state = {key: part for key, part in vars(value).items() if key != "lock"}
            return logging.StreamHandler, (), state, None, None, _set_state
        if isinstance(value, io.TextIOWrapper):
            # cloudpickle would send a copy of its contents
            raise TypeError("cannot pickle an open file")
        return super().reducer_override(value)


def stream_name(value: Any) -> str | None:
    """Which of the process's own streams a value is, ``"stdout"``, ``"stderr"`` or ``"stdin"``;
    None if none.
    """
    for name in _STREAMS:
        if value is not None and (
            value is getattr(sys, name) or value is getattr(sys, f"__{name}__")
        ):
            return name
    # behind one that a notebook, a test or Ray has put in its place
    if type(value) is io.TextIOWrapper:
        return _NAMES.get(getattr(value, "name", None))
    return None


def _stream(name: str) -> Any:
    return getattr(sys, name)


@functools.lru_cache(maxsize=4096)
def _delegates(kind: Any) -> bool:
    """Whether unpickling asks an object's own `__getattr__` for `__setstate__`, when it has nothing
    to ask yet.
    """
    if kind.__new__ is not object.__new__ and not _is_pythons(kind.__new__):
        return False  # a list, a dict, or another type that keeps its contents in C
    inherited = object.__dict__
    own = all(getattr(kind, name, None) in (None, inherited.get(name)) for name in _HOOKS)
    return own and any("__getattr__" in vars(base) for base in kind.__mro__)


def _is_pythons(function: Any) -> bool:
    return hasattr(function, "__code__")


def _state(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of an object, and what is in its slots, past its own `__getattr__`."""
    slots = {}
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError):
            slots[name] = object.__getattribute__(value, name)
    try:
        return object.__getattribute__(value, "__dict__"), slots
    except AttributeError:
        return {}, slots


def _set_state(value: Any, state: Any) -> None:
    """Give an object its attributes, past its own `__setattr__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, part in slots.items():
        object.__setattr__(value, name, part)

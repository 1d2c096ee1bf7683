"""What of a module changed, in words: statistics show why state is sent again and again."""

from __future__ import annotations

from torch import nn

from raydp_parallel.state.python_state import PythonState

_MOST = 3
"""Names that are shown at most."""

_HOLDERS = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": "a submodule"}


def describe(module: nn.Module, python_state: PythonState) -> str:
    """The names of what changed since the Python state was recorded."""
    paths = {id(part): path for path, part in module.named_modules()}
    names = []
    for owner, name in python_state.culprits():
        where = paths.get(id(owner))
        if where is None:
            names.append(f"{type(owner).__name__}.{name}")
        elif name in _HOLDERS:
            names.append(f"{_HOLDERS[name]} of {where or type(module).__name__}")
        else:
            names.append(f"{where}.{name}".lstrip("."))
    if not names:
        return "something inside the module (a container in a container, a class, a function)"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more

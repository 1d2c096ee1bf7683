"""What `PythonState` compares of objects with contents that are no plain dict, list or set."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals

_MISSING = object()


def array_bytes(array: np.ndarray) -> tuple[Any, ...]:
    """An array's shape, dtype and contents."""
    contents = pickle.dumps(array) if array.dtype.hasobject else array.tobytes()
    return array.shape, array.dtype, contents


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by identity: their contents are compared elsewhere."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return id(value)


def pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value's pickle, and the tensors in it, which stand in the pickle by identity."""
    file = io.BytesIO()
    pickler = _ContentPickler(file)
    # The pickler of the structure raises the error for what cannot be pickled, with the path.
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return file.getvalue(), pickler.tensors


def generator_state(generator: torch.Generator) -> tuple[bytes, None]:
    """The state of torch's generator, whose pickle differs each time."""
    return generator.get_state().numpy().tobytes(), None


def reduces_itself(value: Any) -> bool:
    """Whether a value's class defines how it is pickled."""
    kind: Any = type(value)
    return (
        kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    )


def has_own_state(value: Any) -> bool:
    """Whether a value's class defines which of its attributes are pickled."""
    base = torch.nn.Module if isinstance(value, torch.nn.Module) else object
    return getattr(type(value), "__getstate__", None) is not getattr(base, "__getstate__", None)


def slot_names(kind: type) -> tuple[str, ...]:
    """The names under which a class's slots are attributes."""
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def slot_parts(value: Any, names: tuple[str, ...]) -> list[Any]:
    """What is in a value's slots."""
    return [getattr(value, name, _MISSING) for name in names]


def by_value(value: Any) -> bool:
    """Whether a class or function is sent by value, and not by name."""
    return not cloudpickle.cloudpickle._should_pickle_by_reference(value)


def mapping_parts(value: dict[Any, Any]) -> list[Any]:
    """The contents of a dict's subclass, in its order, without calling methods of the subclass."""
    raw: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    return [getattr(value, "default_factory", None), *raw.keys(value), *raw.values(value)]


def global_names(function: types.FunctionType) -> list[str]:
    """The globals that are sent along with a function that is sent by value."""
    return sorted(_extract_code_globals(function.__code__))


def function_parts(function: types.FunctionType, names: Iterable[str]) -> list[Any]:
    """The parts of a function that is sent by value: its code, defaults, closure and globals."""
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    used = [function.__globals__.get(name, _MISSING) for name in names]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *used]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def class_parts(kind: type) -> list[Any]:
    """The attributes of a class that is sent by value."""
    attributes = chain.from_iterable(vars(base).items() for base in kind.__mro__ if by_value(base))
    # copyreg's cache
    return [*chain.from_iterable(item for item in attributes if item[0] != "__slotnames__")]


def script_parts(module: torch.jit.ScriptModule) -> list[Any]:
    """The tensors and modes of a script."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    # the names are new strings each time
    named = ((sys.intern(name), tensor) for name, tensor in tensors)
    return [*chain.from_iterable(named), *(m.training for m in module.modules())]


def script_values(module: torch.jit.ScriptModule) -> list[str]:
    """A script's plain attributes. It returns copies only, so they are compared as text."""
    scripts: Iterable[Any] = module.modules()
    values = (m._c.getattr(name) for m in scripts for name in m._concrete_type.get_attributes())
    return [repr(value) for value in values if not isinstance(value, torch.Tensor)]

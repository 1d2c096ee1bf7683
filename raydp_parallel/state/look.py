"""A module without the contents of its tensors, as bytes: if they differ from the bytes of the last
look, the module was changed, and they are the message that says how.

Tensors stand by slot and code objects by number, both stable for as long as the objects live. Empty
dicts of hooks, nine tenths of a module's objects, are left out.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import itertools
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from raydp_parallel.errors import warn
from raydp_parallel.state import sources
from raydp_parallel.state.sources import Sources
from raydp_parallel.wire import pickling
from raydp_parallel.wire.codec import StandIn

_EMPTY = nn.Module()
_HOOKS = {
    name: type(value)
    for name, value in vars(_EMPTY).items()
    if isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules")
}
_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_LOCKS: dict[type, Callable[[], object]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
_GETSTATE = getattr(object, "__getstate__", None), getattr(nn.Module, "__getstate__", None)

_FLAG = "_is_replica"
"""Upstream's mark of a replica's modules, which lets `zero_grad` warn; it is no part of a look."""

_REFUSED = "Cannot replicate network where python modules are children of ScriptModule"

_LARGE = 4 << 20
"""Bytes that take about 10 ms in each forward, here and in each replica."""

_building = threading.local()
"""The tensors, code objects and device of the module that is being built in this thread."""


Codes = dict[int, tuple[int, types.CodeType]]
"""Numbers of code objects, which cannot change, by their ids: each is sent once."""


class Structure:
    """A module but for its tensors, as it was at the last look."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.bytes = b""  # its pickle
        self.at = 0  # the revision of the master that it is of
        self.codes: Codes = {}
        self._code_at: list[int] = []  # since which revision each is known
        self._sources: Sources | None = None  # of its code
        self._sources_at = 0
        self._told = False  # of what makes it large

    def read(self, revision: int) -> bool:
        """Note the driver's sources, as of a revision; returns whether any is new."""
        found = sources.current()
        if found == self._sources:
            return False
        self._sources, self._sources_at = found, revision
        return True

    def take(self, found: bytes, revision: int) -> None:
        """Take a look over, as of a revision."""
        self.read(revision)
        self._code_at += [revision] * (len(self.codes) - len(self._code_at))
        self.at = revision
        self.bytes = found  # last: Ctrl-C before makes the next look begin again
        if len(found) > _LARGE and not self._told:
            self._told = True
            _tell_of_largest(self.module())

    def since(self, revision: int) -> tuple[bytes | None, bytes | None, Sources | None]:
        """Return what is newer than a revision: the pickle, code objects, and the sources."""
        sources = self._sources if self._sources_at > revision else None
        if self.at <= revision:
            return None, None, sources
        new = [(i, code) for i, code in self.codes.values() if self._code_at[i] > revision]
        return self.bytes, pickling.dumps(new) if new else None, sources


class _LookPickler(pickling.Pickler):
    slot: Callable[[Tensor], int]
    codes: Codes

    def reducer_override(self, value: Any) -> object:
        kind = type(value)
        if kind is nn.Parameter or isinstance(value, Tensor):
            if isinstance(value, StandIn):
                value = value.given()
            if kind in _LAZY:
                value.detach()  # raises torch's own ValueError, as upstream's replication does
            attributes = vars(value)
            if attributes:  # what users set on parameters; torch.compile's notes stay here
                own = {k: v for k, v in attributes.items() if not k.startswith("_dynamo")}
                if own:
                    return _tensor, (self.slot(value),), own, None, None, _set_attributes
            return _tensor, (self.slot(value),)
        if isinstance(value, nn.Module):
            return _reduce_module(value) or super().reducer_override(value)
        if kind is types.CodeType:
            number, _ = self.codes.setdefault(id(value), (len(self.codes), value))
            return _code, (number,)
        if kind in _LOCKS:  # it guards what threads of one process share
            return _LOCKS[kind], ()
        if kind is torch.device and value.type == "cuda":  # a number of the driver's
            return _device, ()
        if isinstance(value, weakref.ref):
            if value() is None:
                return _dead, ()
            # A plain reference to a method would be dead at once.
            return (weakref.WeakMethod if kind is weakref.WeakMethod else weakref.ref), (value(),)
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> tuple[object, ...]:
        """Reduce a function of a script, as cloudpickle does. To find the submodules that it uses,
        that looks through all loaded modules, for half a millisecond: here once for each code.
        """
        space, code = func.__globals__, func.__code__
        key = id(code), *[name for name in _names(code) if name in space]
        if key not in _reduced:
            make, _, (_, parts), *rest = super()._dynamic_function_reduce(func)
            uses = [*parts.pop("__globals__")]
            # Others than the function's own are names of submodules.
            parts = {k: None if hasattr(func, k) else part for k, part in parts.items()}
            _reduced[key] = make, rest, uses, parts, code
        make, rest, uses, parts, _ = _reduced[key]
        parts = {name: getattr(func, name, part) for name, part in parts.items()}
        parts["__globals__"] = {name: space[name] for name in uses}
        return make, self._function_getnewargs(func), (dict(vars(func)), parts), *rest


_reduced: dict[tuple[object, ...], tuple[Any, ...]] = {}
"""How functions are reduced, by the id of their code and the names of globals that are there."""


@functools.cache
def _names(code: types.CodeType) -> list[str]:
    """List the names that a code uses, of globals and of attributes."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*dict.fromkeys(itertools.chain(code.co_names, *inner))]


def look(module: object, slot: Callable[[Tensor], int], codes: Codes) -> bytes:
    """Pickle a module's structure, with the slots of its tensors and the numbers of its code.

    Raises:
        TransferError: Something in it cannot be sent.
    """
    file = io.BytesIO()
    pickler = _LookPickler(file)
    pickler.slot, pickler.codes = slot, codes
    try:
        pickler.dump(module)
    except Exception as error:
        if "uninitialized parameter" in str(error) or str(error) == _REFUSED:
            raise  # upstream's own words
        raise pickling.unsendable(module, "module", error) from None
    return file.getvalue()


def _tell_of_largest(module: nn.Module | None) -> None:
    """Warn of the attribute that takes the most bytes in each look."""
    sizes: dict[str, int] = {}
    for path, part in module.named_modules(prefix="module") if module is not None else ():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                with contextlib.suppress(Exception):  # parts of a TorchScript module
                    sizes[f"{path}.{name}"] = len(look(value, lambda _: 0, {}))
    name = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(name, 0) > _LARGE // 2:
        warn(
            f"{name} takes {sizes[name] >> 20} MB, and each forward reads it, here and in the "
            "replicas, to see a change. Make it a buffer (register_buffer, of a tensor), which is "
            "looked at in no time. This is said once for each module."
        )


def build(
    structure: bytes,
    tensors: Mapping[int, Tensor],
    codes: Mapping[int, types.CodeType],
    device: torch.device,
) -> tuple[nn.Module, set[int]]:
    """Build a module from a look, with tensors in the places of their slots; returns the slots that
    it has, too.
    """
    for tensor in tensors.values():
        vars(tensor).clear()
    used: set[int] = set()
    vars(_building).update(tensors=tensors, codes=codes, device=device, used=used)
    try:
        module: nn.Module = pickle.loads(structure)
    finally:
        vars(_building).clear()
    for part in module.modules():
        vars(part)[_FLAG] = True
    _enter_recorded(module)
    return module, used


def refuse_unreplicable(module: nn.Module) -> None:
    """Raise upstream's errors for modules that it cannot replicate either."""
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if isinstance(tensor, _LAZY):
                tensor.detach()  # raises torch's own ValueError
        if isinstance(child, torch.jit.ScriptModule):
            _refuse_python_below(child)


def check_devices(module: nn.Module) -> None:
    """Raise upstream's error for a module with parameters and buffers on several devices (row F1).

    Walks by itself, in half the time of `parameters`: it runs before each forward in place.
    """
    first: torch.device | None = None
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and tensor.device != first:
                if first is not None:
                    raise RuntimeError(
                        "module must have its parameters and buffers on device "
                        f"{first} (device_ids[0]) but found one of them on device: {tensor.device}"
                    )
                first = tensor.device


def _refuse_python_below(script: torch.jit.ScriptModule) -> None:
    if not all(isinstance(child, torch.jit.ScriptModule) for child in script.modules()):
        raise RuntimeError(_REFUSED)


def _tensor(slot: int) -> Tensor:
    _building.used.add(slot)
    return _building.tensors[slot]  # type: ignore[no-any-return]


def _code(number: int) -> types.CodeType:
    return _building.codes[number]  # type: ignore[no-any-return]


def _device() -> torch.device:
    return _building.device  # type: ignore[no-any-return]


def _set_attributes(tensor: Tensor, attributes: dict[str, object]) -> None:
    vars(tensor).update(attributes)


def _dead() -> weakref.ref[set[object]]:
    return weakref.ref(set())  # nobody has this set


def _reduce_module(module: nn.Module) -> tuple[object, ...] | None:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return _reduce_script(module)
    new: tuple[object, ...] = copyreg.__newobj__, (kind,)  # type: ignore[attr-defined]
    state: Any = vars(module)
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        new = _new_parametrized, (kind.__mro__[1], tuple(state["_modules"]["parametrizations"]))
    elif (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        return None
    elif getattr(kind, "__getstate__", None) not in _GETSTATE:
        state = module.__getstate__()
        if not isinstance(state, dict):
            return None
    state = state.copy()
    for name in _HOOKS:  # faster than a look at all that it has
        if not state.get(name, True):
            del state[name]
    state.pop("_compiled_call_impl", None)  # as torch's own __getstate__
    state.pop(_FLAG, None)
    return *new, state, None, None, _set_state


def _set_state(module: nn.Module, state: dict[str, object]) -> None:
    for name, make in _HOOKS.items():
        if name not in state:
            state[name] = make()
    if type(module).__setstate__ is nn.Module.__setstate__:
        module.__dict__.update(state)
    else:
        module.__setstate__(state)


def _new_parametrized(base: type[nn.Module], names: Sequence[str]) -> nn.Module:
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:  # makes the class; what it does beside is replaced
        module.register_parameter(name, nn.Parameter(torch.empty(0, device="cpu")))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    module.__dict__.clear()
    return module


def _reduce_script(module: torch.jit.ScriptModule) -> tuple[object, ...]:
    _refuse_python_below(module)
    file = io.BytesIO()
    torch.jit.save(module, file)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return _load_script, (file.getvalue(), tensors, [m.training for m in module.modules()])


def _load_script(
    saved: bytes, tensors: dict[str, Tensor], training: Sequence[bool]
) -> torch.jit.ScriptModule:
    module = torch.jit.load(io.BytesIO(saved))
    for path, tensor in tensors.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, module), name, tensor)
    for child, mode in zip(module.modules(), training, strict=True):
        child.training = mode
    return module  # type: ignore[no-any-return]


def _enter_recorded(module: nn.Module) -> None:
    """Let transformers know which outputs the models in a module can record: its constructors enter
    that, and none ran here.
    """
    for name in ("transformers.utils.output_capturing", "transformers.utils.generic"):
        registry = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        if isinstance(registry, dict):
            for child in module.modules():
                outputs = getattr(child, "_can_record_outputs", None)
                if outputs is not None:
                    dict.setdefault(registry, str(type(child)), outputs)

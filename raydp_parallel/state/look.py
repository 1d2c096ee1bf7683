"""A module without the contents of its tensors, as bytes: if they differ from the bytes of the last
look, the module was changed, and they are the message that says how.

Tensors stand by tag, which is theirs for as long as they live. Empty dicts of hooks, nine tenths
of a module's objects, are left out.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import inspect
import io
import itertools
import operator
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from raydp_parallel.errors import warn
from raydp_parallel.state import sources
from raydp_parallel.state.run import Tracked
from raydp_parallel.wire import pickling
from raydp_parallel.wire.codec import StandIn
from raydp_parallel.wire.messages import Sources

_EMPTY = nn.Module()
_HOOKS = {
    name: type(value)
    for name, value in vars(_EMPTY).items()
    if isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules")
}
_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
_GETSTATE = getattr(object, "__getstate__", None), getattr(nn.Module, "__getstate__", None)

_FLAG = "_is_replica"
"""Upstream's mark of a replica's modules, which lets `zero_grad` warn."""

_REFUSED = "Cannot replicate network where python modules are children of ScriptModule"

_LARGE = 4 << 20
"""Bytes that a user notices in each forward, here and in each replica."""

_tags = itertools.count(1)
"""Numbers of tensors in the replicas."""

_building = threading.local()
"""The tensors and the device of the module that is being built in this thread, and what is kept of
the one before.
"""

Common = dict[object, object]
"""What all modules have in common that are built from one look: code and globals of a script, where
`torch.compile` keeps what it compiled, and classes that take long to make.
"""


class _Globals(dict[str, object]):
    """Globals of functions of a script, as cloudpickle collects them."""

    number = 0


class Structure:
    """A module but for its tensors, as it was at the last look."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.bytes = b""  # its pickle
        self.at = 0  # the revision of the master that it is of
        self.sources: Sources | None = None  # of its code, and of all that may be sent beside it
        self.sources_at = 0
        self._told = False  # of what makes it large

    def tell_if_large(self) -> None:
        """Warn once of the attribute that takes the most bytes in each look."""
        module = self.module()
        if module is None or self._told or len(self.bytes) <= _LARGE:
            return
        self._told = True
        sizes: dict[str, int] = {}
        for path, part in module.named_modules(prefix="module"):
            for name, value in vars(part).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    with contextlib.suppress(Exception):  # parts of a TorchScript module
                        sizes[f"{path}.{name}"] = len(look(value, {})[0])
        name = max(sizes, key=sizes.__getitem__, default="")
        if sizes.get(name, 0) > _LARGE // 2:
            warn(
                f"{name} takes {sizes[name] >> 20} MB, and each forward pickles it here, to see a "
                "change, and loads it in the replicas. Make it a buffer (register_buffer, of a "
                "tensor), which is looked at in no time. This is said once for each module."
            )


class _LookPickler(pickling.Pickler):
    known: Mapping[int, Tracked]  # tensors of the last look, by their ids
    found: dict[int, Tracked]  # those of this one
    set_on: Callable[[type], dict[str, object]]

    def reducer_override(self, value: Any) -> object:
        kind = type(value)
        if kind is nn.Parameter or isinstance(value, Tensor):
            if isinstance(value, StandIn):
                value = value.writable()
            if kind in _LAZY:
                value.detach()  # raises torch's own ValueError, as upstream's replication does
            # What users set on parameters; torch.compile's notes stay here.
            own = vars(value) and {k: v for k, v in vars(value).items() if k[:7] != "_dynamo"}
            one = self.known.get(id(value)) or Tracked(next(_tags), value)
            one = self.found.setdefault(id(value), one)
            return _tensor, (one.tag,), own or None, None, None, pickling.set_state
        if isinstance(value, nn.Module):
            return _reduce_module(value) or super().reducer_override(value)
        if kind is types.CodeType:
            return _code, self.dispatch_table[kind](value)[1]
        if kind is _Globals:
            return _globals, (value.number, {**value})
        if kind in _LOCKS:  # it guards what threads of one process share
            return _LOCKS[kind], ()
        if kind is torch.device and value.type == "cuda":  # a number of the driver's
            return _device, ()
        if isinstance(value, weakref.ref):
            if value() is None:
                return weakref.ref, (set(),)  # nobody has this set
            # A plain reference to a method would be dead at once.
            return (weakref.WeakMethod if kind is weakref.WeakMethod else weakref.ref), (value(),)
        reduced = super().reducer_override(value)
        if reduced is NotImplemented and issubclass(kind, type) and issubclass(value, nn.Module):
            found = {base: values for base in value.__mro__ if (values := self.set_on(base))}
            if found:
                place = sys.modules[value.__module__]
                return operator.attrgetter(value.__qualname__), (place,), found, None, None, _put_on
        return reduced

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[object, ...]:
        space = id(func.__globals__)
        if space not in self.globals_ref:
            self.globals_ref[space] = found = _Globals()
            found.number = len(self.globals_ref)
        return super()._function_getnewargs(func)  # type: ignore[no-any-return]


_PLAIN = bool, int, float, str

_names_set: dict[str, dict[str, object]] = {}
"""Names of attributes that were ever set on imported classes, by the names of these."""

_imported: dict[tuple[type, str], object] = {}
"""What such attributes are in a fresh import, in a replica."""


def _set_on(kind: type) -> dict[str, object]:
    """Collect what a program may have set on an imported class: functions of a script or of its own
    files; and numbers, strings and flags of a class of these files. One that is gone is None.
    """
    own, found = sources.is_own(kind.__module__), dict(_names_set.get(str(kind), {}))
    space = getattr(sys.modules.get(kind.__module__), "__dict__", None)
    for name, value in () if kind in (nn.Module, object) else vars(kind).items():
        func = value.__func__ if type(value) in (staticmethod, classmethod) else value
        if own and type(value) in _PLAIN and not name.startswith("__"):
            found[name] = value
        elif type(func) is types.FunctionType and (own or func.__globals__ is not space):
            by, defined = func.__globals__, func.__qualname__.startswith(kind.__qualname__ + ".")
            other = sources.is_own(by.get("__name__", "")) and not (own and defined)
            if other or pickling.module_of(by) is None:
                found[name] = value
    if found:
        _names_set[str(kind)] = dict.fromkeys(found)
    return found


def _put_on(_: type, found: dict[type, dict[str, object]]) -> None:
    for kind, values in found.items():
        for name, value in values.items():
            first = _imported.setdefault((kind, name), inspect.getattr_static(kind, name, None))
            setattr(kind, name, first if value is None else value)


def look(module: object, known: Mapping[int, Tracked]) -> tuple[bytes, dict[int, Tracked]]:
    """Pickle a module's structure, with the tags of its tensors: those of the last look, and new
    ones. Returns the tensors, too, by their ids.

    Raises:
        TransferError: Something in it cannot be sent.
    """
    file = io.BytesIO()
    pickler = _LookPickler(file)
    pickler.known, pickler.found, pickler.set_on = known, {}, functools.cache(_set_on)
    try:
        pickler.dump(module)
    except Exception as error:
        if "uninitialized parameter" in str(error) or str(error) == _REFUSED:
            raise  # upstream's own words
        raise pickling.unsendable(module, "module", error) from None
    return file.getvalue(), pickler.found


def build(
    structure: bytes, tensors: Mapping[int, Tensor], common: Common, device: torch.device
) -> tuple[nn.Module, set[int]]:
    """Build a module from a look, with tensors in the places of their tags; returns the tags that
    it has, too. Code and classes are those of others of this look.
    """
    used: set[int] = set()
    first = None not in common
    vars(_building).update(tensors=tensors, common=common, device=device, used=used)
    try:
        common[None] = module = pickle.loads(structure)  # its classes live until the next one
    finally:
        vars(_building).clear()
    parts: list[nn.Module] = [module]
    while parts:  # `modules` calls ten times as many functions
        part = parts.pop()
        vars(part)[_FLAG] = True
        parts += [t for t in part._modules.values() if t is not None and _FLAG not in vars(t)]
    if first:
        _enter_recorded(module)
    return module, used


def check_devices(module: nn.Module) -> None:
    """Raise upstream's error for a module on several devices (row F1)."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    found = dict.fromkeys([t.device for t in tensors])
    if len(found) > 1:
        first, other, *_ = found
        raise RuntimeError(
            f"module must have its parameters and buffers on device {first} (device_ids[0]) but "
            f"found one of them on device: {other}"
        )


def _tensor(tag: int) -> Tensor:
    _building.used.add(tag)
    return _building.tensors[tag]  # type: ignore[no-any-return]


def _code(*parts: Any) -> types.CodeType:
    code = types.CodeType(*parts)
    return _building.common.setdefault(code, code)  # type: ignore[no-any-return]


def _globals(number: int, names: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = _building.common.setdefault(number, {})
    found.update(names)
    return found


def _device() -> torch.device:
    return _building.device  # type: ignore[no-any-return]


def _reduce_module(module: nn.Module) -> tuple[object, ...] | None:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return _reduce_script(module)
    if isinstance(module, fx.GraphModule):
        # A replica traces its code with torch's own tracer, and then gives it hooks and methods.
        _, (state, imports) = module.__reduce__()
        own = [k for k, v in state.items() if k == "_tracer_cls" or type(v) is types.MethodType]
        return _new_traced, ({k: v for k, v in state.items() if k not in own}, imports), state
    new: tuple[object, ...] = copyreg.__newobj__, (kind,)  # type: ignore[attr-defined]
    state = vars(module)
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        names = tuple(state["_modules"]["parametrizations"])
        new = _new_parametrized, (kind.__mro__[1], names, id(kind))
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
    return *new, state, None, None, _set_state


def _set_state(module: nn.Module, state: dict[str, object]) -> None:
    for name, make in _HOOKS.items():
        if name not in state:
            state[name] = make()
    if type(module).__setstate__ is nn.Module.__setstate__:
        module.__dict__.update(state)
    else:
        module.__setstate__(state)


def _new_parametrized(base: type[nn.Module], names: tuple[str, ...], number: int) -> nn.Module:
    key = base, names, number  # classes are what the cache of parametrizations tells apart
    if key not in _building.common:
        module = base.__new__(base)
        nn.Module.__init__(module)
        for name in names:  # makes the class; what it does beside is replaced
            module.register_parameter(name, nn.Parameter(torch.empty(0, device="cpu")))
            parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
        _building.common[key] = type(module)
    kind = _building.common[key]
    return kind.__new__(kind)  # type: ignore[no-any-return]


def _new_traced(state: dict[str, object], imports: str) -> nn.Module:
    key = imports, state["_code"], state.get("_graphmodule_cls_name")
    if key not in _building.common:  # to trace it takes longer than a forward
        first = fx.graph_module.reduce_graph_module(state.copy(), imports)
        _building.common[key] = type(first), first.graph
        vars(first).clear()  # the graph has it
    kind, graph = _building.common[key]
    module = nn.Module.__new__(kind)
    vars(module)["_graph"] = graph
    return module  # type: ignore[no-any-return]


def _reduce_script(module: torch.jit.ScriptModule) -> tuple[object, ...]:
    if not all(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise RuntimeError(_REFUSED)
    file = io.BytesIO()
    torch.jit.save(module, file)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return _load_script, (file.getvalue(), tensors)


def _load_script(saved: bytes, tensors: dict[str, Tensor]) -> torch.jit.ScriptModule:
    if saved not in _building.common:
        nothing = dict.fromkeys(tensors, torch.empty(0, device="cpu"))
        # The device is for constants of a frozen one.
        loaded = torch.jit.load(io.BytesIO(saved), _building.device)
        _building.common[saved] = _with(loaded, nothing)
    # Torch has optimized its code already.
    return _with(copy.deepcopy(_building.common[saved]), tensors)


def _with(module: torch.jit.ScriptModule, tensors: Mapping[str, Tensor]) -> torch.jit.ScriptModule:
    for path, tensor in tensors.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, module), name, tensor)
    return module


def _enter_recorded(module: nn.Module) -> None:
    """Let transformers know which outputs the models in a module can record: its constructors enter
    that, and none ran here.
    """
    for name in ("transformers.utils.output_capturing", "transformers.utils.generic"):
        registry = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        for child in module.modules():
            outputs = getattr(child, "_can_record_outputs", None)
            if isinstance(registry, dict) and outputs is not None:
                dict.setdefault(registry, str(type(child)), outputs)

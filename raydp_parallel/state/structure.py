"""A module's structure as bytes: everything but the contents of its tensors, for which it has slot
ids.

Some modules refuse pickling although deepcopy copies them, or threads could share them:
parametrized modules, TorchScript, weak references, locks (a replica gets its own). They have
reducers here. A wrapper inside the module needs none: in a replica it runs its own module in place.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from raydp_parallel.state import hidden_attributes, module_sources
from raydp_parallel.state.module_sources import PROCESS
from raydp_parallel.state.python_state import LOCKS, PythonState, StateVisitor, by_value
from raydp_parallel.transport import codec
from raydp_parallel.transport.codec import unsendable
from raydp_parallel.transport.messages import Origins

_PYTHONS_OWN = frozenset(
    ("__dict__", "__weakref__", "__slotnames__", "__doc__", "__abstractmethods__", "_abc_impl")
)
_MISSING = object()


class _Record:
    """What is known of classes, which belong to the process as they do.

    Attributes:
        first: Their attributes when they were first seen here.
        seen: Their attributes when they were last looked at: names, values, and both of those that
            are compared.
        originals: What was replaced by the driver's, by class and name.
    """

    def __init__(self) -> None:
        self.first: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.seen: weakref.WeakKeyDictionary[type, tuple[list[str], list[Any], list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self.originals: dict[tuple[type, str], Any] = {}


_record = _Record()

Patch = tuple[type, str, Any]
"""A class, the name of one of its attributes, and its value."""


def of(module: nn.Module) -> list[type]:
    """The classes of a module tree that can be imported."""
    kinds = dict.fromkeys(type(m) for m in module.modules())
    bases = dict.fromkeys(
        base for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module)
    )
    return [base for base in bases if not by_value(base)]


def attributes(kind: type) -> list[Any]:
    """The attributes of a class, to be compared by identity; if nothing changed, the same list as
    before.
    """
    names, values = [*vars(kind)], [*vars(kind).values()]
    seen = _record.seen.get(kind)
    if seen is None or seen[0] != names or not all(map(operator.is_, seen[1], values)):
        own = {
            name: value
            for name, value in zip(names, values, strict=True)
            if name not in _PYTHONS_OWN
        }
        seen = _record.seen[kind] = names, values, [*own, *own.values()]
    return seen[2]


def patches(kinds: Sequence[type]) -> Iterator[tuple[Patch, bool]]:
    """The attributes that were set on classes after they were made, and whether that is certain."""
    for kind in kinds:
        first = _record.first.setdefault(kind, dict(vars(kind)))
        for name, value in list(vars(kind).items()):
            changed = value is not first.get(name, _MISSING) and not _is_own(kind, name, value)
            if name not in _PYTHONS_OWN and (changed or _is_foreign(kind, name, value)):
                yield (kind, name, value), changed


def apply(process: str, kinds: Sequence[type], found: list[Patch]) -> None:
    """Give some of this process's classes the attributes that were set in the driver, and take back
    all others that were set here.
    """
    if process == PROCESS:
        return  # a replica in the driver's process
    wanted = {(kind, name) for kind, name, _ in found}
    for kind, name in [key for key in _record.originals if key[0] in kinds and key not in wanted]:
        _set(kind, name, _record.originals.pop((kind, name)))
    for kind, name, value in found:
        now = vars(kind).get(name, _MISSING)
        if now is not value:
            _record.originals.setdefault((kind, name), now)
            _set(kind, name, value)


def _set(kind: type, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def function_of(value: Any) -> types.FunctionType | None:
    """The function behind a method, a static method or a class method."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, types.FunctionType) else None


def _is_foreign(kind: type, name: str, value: Any) -> bool:
    """Whether a function was made elsewhere, by its name."""
    function = function_of(value)
    return function is not None and not _has_name_of(kind, name, function)


def _is_own(kind: type, name: str, value: Any) -> bool:
    """Whether a function is the one of the class's body: a replica has it, or restores it."""
    function = function_of(value)
    if (
        function is None
        or not _has_name_of(kind, name, function)
        or hasattr(function, "__wrapped__")
    ):
        return False
    return function.__globals__ is vars(sys.modules[kind.__module__])


def _has_name_of(kind: type, name: str, function: types.FunctionType) -> bool:
    return (function.__module__, function.__qualname__) == (
        kind.__module__,
        f"{kind.__qualname__}.{name}",
    )


_CPU = torch.device("cpu")

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def dump(
    module: nn.Module,
    slot: Callable[[Tensor], int],
    hidden: Mapping[int, Collection[str]] | None = None,
) -> tuple[bytes, PythonState, Origins]:
    """Pickle a module's structure.

    Args:
        module: The master.
        slot: Returns the slot of a tensor.
        hidden: The names of attributes that are left out, by the ids of their modules.

    Returns:
        The bytes, the Python state that they describe, and the origins of the code that replicas
        import for it.
    """
    refuse_unreplicable(module)
    found = StateVisitor()
    # this may register modules to be sent by value
    origins = module_sources.origins(of(module))
    try:
        structure = _dump(module, slot, found, of(module), hidden)
    except Exception as error:
        raise unsendable(module, "module", error, _picklable) from error
    names = [*origins.sources]
    found.code.add_modules(names)
    found.code.add_reader(functools.partial(module_sources.specs, names))
    return structure, PythonState(found, hidden), origins


def survey(module: nn.Module) -> PythonState:
    """The Python state of a module that `load` built."""
    found = StateVisitor()
    _dump(module, id, found)
    return PythonState(found)


def load(structure: bytes, tensors: Any, device: torch.device = _CPU) -> nn.Module:
    """Build a module from a structure, with ``tensors[slot]`` in its places, and with ``device``
    wherever it names a GPU.
    """
    unpickler = _Unpickler(io.BytesIO(structure), tensors, device)
    module = unpickler.load()
    attributes = unpickler.load()
    for slot, tensor in tensors.items():
        vars(tensor).clear()
        vars(tensor).update(attributes.get(slot, {}))
    apply(*unpickler.load())
    _enter_recorded(module)
    return module  # type: ignore[no-any-return]


_RECORDED = ("transformers.utils.output_capturing", "transformers.utils.generic")
"""Where transformers keeps which outputs its classes can record: in versions 5 and 4."""


def _enter_recorded(module: nn.Module) -> None:
    """Let transformers know which outputs the models in a module can record, such as hidden states
    and a router's logits. Its constructors enter that, and none ran here: without it such outputs
    are left out in silence, and what a loss has of them.
    """
    for name in _RECORDED:
        registry = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        if isinstance(registry, dict):
            for child in module.modules():
                outputs = getattr(child, "_can_record_outputs", None)
                if outputs is not None:
                    dict.setdefault(registry, str(type(child)), outputs)


def refuse_unreplicable(module: nn.Module) -> None:
    """Raise upstream's errors for what upstream cannot replicate either."""
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if isinstance(tensor, _LAZY):
                tensor.detach()  # raises torch's own ValueError, as upstream's replication does
    scripts = [m for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
    if any(
        not isinstance(child, torch.jit.ScriptModule)
        for script in scripts
        for child in script.modules()
    ):
        raise RuntimeError(
            "Cannot replicate network where python modules are children of ScriptModule"
        )


_GPU = "GPU"
"""Stands for a GPU that a module names. Its number in the driver means nothing in a replica, which
has one GPU.
"""


class _Pickler(codec.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        slot: Callable[[Tensor], int],
        visit: Callable[[Any], object],
        hidden: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        super().__init__(file)
        self.slot = slot
        self.visit = visit
        self.hidden = hidden or {}
        self.tensors: dict[int, Tensor] = {}
        self.whole: set[int] = set()

    def persistent_id(self, value: Any) -> int | str | None:
        self.visit(value)
        if type(value) is torch.device and value.type == "cuda":
            return _GPU
        if not isinstance(value, Tensor):
            return None
        slot = self.slot(value)
        self.tensors[slot] = value
        return slot

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            if isinstance(value, torch.jit.ScriptModule):
                return _reduce_script(value)
            if parametrize.is_parametrized(value) and "parametrizations" in value._modules:
                return _reduce_parametrized(value)
            if id(value) in self.hidden:
                return hidden_attributes.reduced(value, self.hidden[id(value)])
        if type(value) in LOCKS:  # it guards what the threads of one process share
            return LOCKS[type(value)], ()
        if id(value) in self.whole:
            return self._dynamic_function_reduce(value)
        if isinstance(value, weakref.ref):
            # a plain reference to a method is dead at once
            kind = weakref.WeakMethod if isinstance(value, weakref.WeakMethod) else weakref.ref
            return (kind, (value(),)) if value() is not None else (_dead_reference, ())
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Any, device: torch.device) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.device = device

    def persistent_load(self, slot: int | str) -> Tensor | torch.device:
        if slot == _GPU:
            return self.device
        return self.tensors[slot]  # type: ignore[no-any-return]


def _dump(
    module: nn.Module,
    slot: Callable[[Tensor], int],
    visitor: StateVisitor,
    kinds: Sequence[type] = (),
    hidden: Mapping[int, Collection[str]] | None = None,
) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, slot, visitor.visit, hidden)
    pickler.dump(module)
    # Attributes that users set on parameters; their tensors are found in a second pass.
    pickler.dump({slot: dict(vars(t)) for slot, t in pickler.tensors.items() if vars(t)})
    # A function that only seems to have been set later, and cannot be pickled, is in the replica's
    # class too.
    known = patches(kinds)
    found = [(patch, certain) for patch, certain in known if certain or _picklable(patch[2])]
    # A wrapped function has the name of the one that it replaces, and by that name a replica would
    # find the replaced one.
    pickler.whole = {id(function_of(patch[2])) for patch, certain in found if certain}
    pickler.dump((module_sources.PROCESS, kinds, [patch for patch, _ in found]))
    for kind in kinds:
        visitor.code.add_class(kind)
        visitor.code.add_reader(functools.partial(attributes, kind))
    return file.getvalue()


def _picklable(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), id, id).dump(value)
    except Exception:
        return False
    return True


class _Nothing:
    """Stands for the deleted target of a weak reference."""


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(_Nothing())


def _reduce_parametrized(module: nn.Module) -> tuple[Any, ...]:
    base = type(module).__mro__[1]
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _new_parametrized, (base, names), vars(module), None, None, _set_state


def _new_parametrized(base: type[nn.Module], names: Sequence[str]) -> nn.Module:
    module = base.__new__(base)
    nn.Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(state)


def _reduce_script(module: torch.jit.ScriptModule) -> tuple[Any, ...]:
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
        # A script has no get_submodule.
        setattr(functools.reduce(getattr, parents, module), name, tensor)
    for child, mode in zip(module.modules(), training, strict=True):
        child.training = mode
    return module  # type: ignore[no-any-return]

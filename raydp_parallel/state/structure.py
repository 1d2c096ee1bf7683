"""A module's structure as bytes: everything but the contents of its tensors, for which it has slot
ids.

Some modules refuse pickling although deepcopy copies them: parametrized modules, TorchScript, weak
references. They have reducers here. A wrapper inside the module needs none: in a replica it runs
its own module in place.
"""

from __future__ import annotations

import functools
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from raydp_parallel.state import classes, module_sources
from raydp_parallel.state.python_state import PythonState
from raydp_parallel.transport import codec
from raydp_parallel.transport.codec import unsendable
from raydp_parallel.transport.messages import Origins

_CPU = torch.device("cpu")

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def dump(module: nn.Module, slot: Callable[[Tensor], int]) -> tuple[bytes, PythonState, Origins]:
    """Pickle a module's structure.

    Args:
        module: The master.
        slot: Returns the slot of a tensor.

    Returns:
        The bytes, the Python state that they describe, and the origins of the code that replicas
        import for it.
    """
    refuse_unreplicable(module)
    python_state = PythonState()
    # this may register modules to be sent by value
    origins = module_sources.origins(classes.of(module))
    try:
        structure = _dump(module, slot, python_state, classes.of(module))
    except Exception as error:
        raise unsendable(module, "module", error, _picklable) from error
    names = [*origins.sources]
    python_state.watch_modules(names, functools.partial(module_sources.specs, names))
    python_state.freeze()
    return structure, python_state, origins


def survey(module: nn.Module) -> PythonState:
    """The Python state of a module that `load` built."""
    python_state = PythonState()
    _dump(module, id, python_state)
    python_state.freeze()
    return python_state


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
    classes.apply(*unpickler.load())
    return module  # type: ignore[no-any-return]


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
        self, file: io.BytesIO, slot: Callable[[Tensor], int], visit: Callable[[Any], object]
    ) -> None:
        super().__init__(file)
        self.slot = slot
        self.visit = visit
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
        if id(value) in self.whole:
            return self._dynamic_function_reduce(value)
        if isinstance(value, weakref.ref):
            return (weakref.ref, (value(),)) if value() is not None else (_dead_reference, ())
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
    python_state: PythonState,
    kinds: Sequence[type] = (),
) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, slot, python_state.visit)
    pickler.dump(module)
    # Attributes that users set on parameters; their tensors are found in a second pass.
    pickler.dump({slot: dict(vars(t)) for slot, t in pickler.tensors.items() if vars(t)})
    # A function that only seems to have been set later, and cannot be pickled, is in the replica's
    # class too.
    patches = classes.patches(kinds)
    found = [(patch, certain) for patch, certain in patches if certain or _picklable(patch[2])]
    # A wrapped function has the name of the one that it replaces, and by that name a replica would
    # find the replaced one.
    pickler.whole = {id(classes.function_of(patch[2])) for patch, certain in found if certain}
    pickler.dump((module_sources.PROCESS, kinds, [patch for patch, _ in found]))
    for kind in kinds:
        python_state.watch_class(kind, functools.partial(classes.attributes, kind))
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

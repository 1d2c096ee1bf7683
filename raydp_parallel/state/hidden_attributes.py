"""Attributes that replicas do without, because forward sets them before it reads them: features and
attention maps that a module keeps, means and variances of an autoencoder, a layer's own loss.

With one device they come back to the master with each forward, and would go to the replica again
with the next one: for a tensor that is the whole structure of the module. Hidden, they cost
nothing. A replica that misses one says so, and the forward runs again with all of them, for good.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raydp_parallel.state.python_state import (
    SIMPLE,
    PythonState,
    has_own_state,
    reduces_itself,
)
from raydp_parallel.transport.messages import Failure

_PLACE = "_raydp_parallel_hidden"
"""Where a replica's module has its `HiddenHere`."""


class NotShown(BaseException):
    """The module in a replica reads an attribute that was hidden from it. No exception that a
    module expects where an attribute may be missing.
    """


_MISSED = frozenset(("AttributeError", "KeyError", NotShown.__name__))
"""Exceptions that tell of a missing attribute, also where `vars` of a module or code that was
compiled misses it.
"""


def is_missed(failure: Failure) -> bool:
    """Whether a forward may have failed for want of an attribute."""
    return failure.name.rpartition(".")[2] in _MISSED


def is_not_shown(failure: Failure) -> bool:
    """Whether it was certainly one that was hidden."""
    return failure.name.rpartition(".")[2] == NotShown.__name__


class HiddenHere:
    """The hidden attributes of one module in a replica.

    Args:
        names: Their names.

    Attributes:
        last: What forwards set them to, for hooks and what runs again in backward.
        in_backward: Whether a backward runs.
        missed: Those that a forward read before it set them.
    """

    in_backward = False

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.last: dict[str, Any] = {}
        self.missed: set[str] = set()

    def read(self, name: str) -> Any:
        """The value of one that the module has not set; `NotShown` if it is not here."""
        if HiddenHere.in_backward and name in self.last:
            return self.last[name]
        self.missed.add(name)
        raise NotShown(name)


class HiddenAttributes:
    """The driver's side: which attributes of a master are hidden from its replicas.

    Args:
        module: The master.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hidden: dict[tuple[int, str], nn.Module] = {}
        self._shown: dict[tuple[int, str], nn.Module] = {}
        self._set_before: dict[tuple[int, str], Any] = {}
        self._set: dict[tuple[int, str], Any] = {}

    def note(self, found: Iterable[tuple[Any, str]]) -> None:
        """Note which attributes the last forward set: owners and names."""
        self._set_before, self._set = self._set, {(id(owner), name): owner for owner, name in found}

    def hide(self) -> None:
        """Hide what each of the last two forwards set, but for values that are cheaply sent: what
        one set alone is perhaps made once. What hooks set in backward is not hidden: they may read
        it there first, and a backward does not run again.
        """
        parts: set[int] = set()
        for key, owner in self._set.items():
            name = key[1]
            if key not in self._set_before:
                continue
            if not isinstance(owner, nn.Module) or key in self._shown:
                continue
            if name not in vars(owner) or type(vars(owner)[name]) in SIMPLE:
                continue
            if any(name in vars(kind) for kind in type(owner).__mro__):
                continue  # it would be found there
            if not parts:
                modules = [*self._module.modules()]
                # One that looks into its own attributes may look into those of others.
                if _any_compiled(modules) or not all(map(can_hide, modules)):
                    return
                parts = {*map(id, modules)}
            if id(owner) in parts:
                self._hidden[key] = owner

    def show(self) -> bool:
        """Hide none of these any more; returns whether there are any."""
        found = bool(self._hidden)
        self._shown.update(self._hidden)
        self._hidden.clear()
        return found

    def of(self, modules: Sequence[nn.Module]) -> dict[int, tuple[str, ...]]:
        """The names by the numbers of their modules."""
        numbers = {id(module): at for at, module in enumerate(modules)}
        for known in (self._hidden, self._shown, self._set, self._set_before):
            for key in [key for key in known if key[0] not in numbers]:
                del known[key]  # the module is gone
        found: dict[int, tuple[str, ...]] = {}
        for owner, name in self._hidden:
            at = numbers[owner]
            found[at] = *found.get(at, ()), name
        return found


def can_hide(module: nn.Module) -> bool:
    """Whether attributes of a module may be hidden: it is pickled as modules are, reading what is
    not there calls `torch.nn.Module.__getattr__`, and nothing compiles it, which would look for
    attributes in another way.
    """
    kind: Any = type(module)
    return (
        kind.__getattr__ is nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and not (reduces_itself(module) or has_own_state(module))
        and not isinstance(module, torch.jit.ScriptModule)
        and vars(module).get("_compiled_call_impl") is None
        and not any(map(_looks_itself, kind.__mro__))
    )


@functools.cache
def _looks_itself(kind: type) -> bool:
    """Whether code of a class, but for torch's own, looks into the dict of attributes."""
    if kind is object or kind.__module__.partition(".")[0] == "torch":
        return False
    left: list[Any] = [*vars(kind).values()]
    while left:
        value = left.pop()
        if isinstance(value, property):
            left += [value.fget, value.fset, value.fdel]
        elif isinstance(value, functools.cached_property):
            return True  # keeps its value there
        elif isinstance(value, (staticmethod, classmethod)):
            left.append(value.__func__)
        elif isinstance(value, types.FunctionType):
            left += [value.__code__, getattr(value, "__wrapped__", None)]
        elif isinstance(value, types.CodeType):
            if not _LOOKS.isdisjoint(value.co_names):
                return True
            left += value.co_consts
    return False


_LOOKS = frozenset(("__dict__", "vars", "dir", "__dir__", "getmembers", "getattr_static"))


def _any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether parts of a module are compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(isinstance(m, dynamo.OptimizedModule) for m in modules)


def reduced(module: nn.Module, names: Collection[str]) -> tuple[Any, ...]:
    """How a module is pickled without some of its attributes."""
    left = {name: value for name, value in vars(module).items() if name not in names}
    return copyreg.__newobj__, (type(module),), left  # type: ignore[attr-defined]


class HiddenParts:
    """The modules of a replica that have hidden attributes.

    Attributes are found as ever; only what is not found is looked for here.

    Args:
        modules: All modules.
        hidden: The names of hidden attributes, by number of the module.
        state: What the modules begin each forward with.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        hidden: Mapping[int, Collection[str]],
        state: PythonState,
    ) -> None:
        self._parts: list[tuple[nn.Module, HiddenHere]] = []
        for at, names in hidden.items():
            module, here = modules[at], HiddenHere(names)
            self._parts.append((module, here))
            vars(module)[_PLACE] = here
            state.accept(module, _PLACE, here)
        if hidden:
            _install()
            state.settle()

    def keep(self) -> None:
        """Note what the last forward set them to, before they are taken away again."""
        for module, here in self._parts:
            for name in here.names & vars(module).keys():
                here.last[name] = vars(module)[name]

    def check(self) -> None:
        """After a forward: raise `NotShown` if one was read that is not here, whatever became of
        that, and let go of the values of earlier forwards.
        """
        for module, here in self._parts:
            if here.missed:
                raise NotShown(here.missed.pop())
            for name in here.last.keys() & vars(module).keys():
                del here.last[name]


@contextlib.contextmanager
def shown_as_set() -> Iterator[None]:
    """In the block, a backward, hidden attributes have the values that forwards set last."""
    before, HiddenHere.in_backward = HiddenHere.in_backward, True
    try:
        yield
    finally:
        HiddenHere.in_backward = before


def _install() -> None:
    """Let modules of this process look for hidden attributes; once."""
    original: Any = nn.Module.__getattr__
    if hasattr(original, "looks_for_hidden"):
        return

    @functools.wraps(original)
    def getattr_of_module(self: nn.Module, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            here = self.__dict__.get(_PLACE)
            if here is None or name not in here.names:
                raise
        return here.read(name)

    getattr_of_module.looks_for_hidden = True  # type: ignore[attr-defined]
    nn.Module.__getattr__ = getattr_of_module  # type: ignore[method-assign]

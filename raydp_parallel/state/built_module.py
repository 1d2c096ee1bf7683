"""The module of a replica, built from the master's structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.state import structure
from raydp_parallel.state.python_state import Held, PythonState, StateVisitor
from raydp_parallel.transport import codec

_HOLDERS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that users do not rebind."""


class BuiltModule:
    """A module, with the Python state that each forward begins with.

    Args:
        device: Stands where the structure names a GPU.

    Attributes:
        module: The module; graphs may keep an earlier one alive.
        held: The tensors that it holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._python_state = PythonState(StateVisitor())
        self.module: nn.Module = nn.Module()
        self.held = Held(self._python_state, {})
        self._device = device
        self._structure = b""
        self._edits: dict[tuple[int, str], Any] = {}
        self._modules: list[nn.Module] = []
        self._is_outdated = False
        self._is_untouched = False
        self._compiled: tuple[nn.Module, Mapping[str, Any], Callable[..., Any]] | None = None

    def follow(self, new: bytes) -> None:
        """Be built from another structure."""
        self._structure = new
        self._edits.clear()

    def build(self, tensors: dict[int, Tensor]) -> None:
        """Build the module from its structure, around tensors by slot."""
        with codec.loading("module"):
            self.module = structure.load(self._structure, tensors, self._device)
        self._is_outdated = False
        self._modules = [*self.module.modules()]
        for module in self._modules:
            vars(module)["_is_replica"] = True
        for (index, name), value in self._edits.items():
            vars(self._modules[index])[name] = value
        self._python_state = structure.survey(self.module)
        self.held = Held(self._python_state, tensors)

    def edit(self, edits: Sequence[tuple[int, str, Any]]) -> None:
        """Give attributes the values that they have in the master: the number of the submodule,
        name and value of each.
        """
        for index, name, value in edits:
            self._edits[index, name] = value
            self.held.edit(self._modules[index], name, value)
            self._python_state.accept(self._modules[index], name, value)
        if edits:
            self._python_state.settle()

    def import_anew(self) -> None:
        """Build the module anew before the next forward: modules of its classes were unloaded."""
        self._is_outdated = True

    def look_ahead(self) -> None:
        """Find out whether the next forward has attributes to restore, while there is no call."""
        state = self._python_state
        self._is_untouched = not (state.changed() or state.deep_changed())

    def distrust(self) -> None:
        """Forget what `look_ahead` found: code runs that may change the module."""
        self._is_untouched = False

    def restore(self) -> bool:
        """Restore the attributes. False if the module has to be built anew."""
        restored = self._is_untouched or self._python_state.restore()
        return restored and not self._is_outdated

    def rebound(self) -> tuple[tuple[int, str, Any], ...]:
        """The attributes and buffers that the last forward gave new values: the number of the
        module, name, value.
        """
        if not self._python_state.attributes_changed():
            return ()
        owners = [
            attributes for module in self._modules for attributes in (vars(module), module._buffers)
        ]
        found = self._python_state.news(owners)
        return tuple((at // 2, name, value) for at, name, value in found if name not in _HOLDERS)

    def compiled(self, settings: Mapping[str, Any]) -> Callable[..., Any]:
        """The module, compiled; again only if it was built anew, or with other settings.

        By default compiled code of a module serves another one that differs by hooks alone.
        """
        found = self._compiled
        if found is None or found[0] is not self.module or found[1] != settings:
            found = self._compiled = self.module, settings, torch.compile(self.module, **settings)
            torch._dynamo.config.skip_nnmodule_hook_guards = False
        return found[2]

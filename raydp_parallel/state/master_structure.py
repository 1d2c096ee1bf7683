"""The structure of a master as replicas were told of it: what changed of it since, and its parts
that the driver asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from raydp_parallel.state import module_sources, structure
from raydp_parallel.state.block_layout import Specials
from raydp_parallel.state.master_tensors import MasterTensors
from raydp_parallel.state.python_state import PythonState, change_reason
from raydp_parallel.transport.messages import Structure

_SIMPLE = (bool, int, float, str, type(None))


class Leaves(NamedTuple):
    """The tensors of the master that may receive gradients, each once.

    Attributes:
        tensors: The tensors.
        kinds: Of each ``"parameter"``, ``"buffer"``, or ``"attribute"`` for one that a plain
            attribute holds.
        others: The numbers of those that are attributes.
    """

    tensors: list[Tensor]
    kinds: list[str]
    others: list[int]


class MasterStructure:
    """All of one master but the contents of its plain tensors, as it was last recorded.

    Args:
        module: The master.

    Attributes:
        at: The revision that it was recorded at as a whole; later edits have their own.
        size: The bytes of its plain tensors.
        specials: The tensors that are sent inside of it.
        kinds: ``"parameter"`` or ``"buffer"`` for the slots that are one.
        modules: The submodules, by the numbers that replicas name them by.
    """

    def __init__(self, module: nn.Module) -> None:
        self.at = 0
        self.size = 0
        self.specials = Specials({})
        self.kinds: dict[int, str] = {}
        self.modules: list[nn.Module] = []
        self._module = module
        self._state: PythonState | None = None
        self._bytes = b""
        self._origins = module_sources.NOWHERE
        self._edits: dict[tuple[int, str], tuple[int, Any]] = {}
        self._leaves: Leaves | None = None
        self._why = ""

    def record(self, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Record it anew; returns the plain tensors, by slot.

        Args:
            known: Tensors that keep their slots.
        """
        module, found = self._module, dict[int, Tensor]()
        numbers = {id(tensor): slot for slot, tensor in known.items()}
        fresh = itertools.count(max(known, default=-1) + 1)

        def slot_of(tensor: Tensor) -> int:
            slot = numbers.get(id(tensor))
            if slot is None:
                slot = numbers[id(tensor)] = next(fresh)
            found[slot] = tensor
            return slot

        check_devices(module)
        self._leaves = None
        self._bytes, self._state, self._origins = structure.dump(module, slot_of)
        self.modules = [*module.modules()]
        self._edits.clear()
        self.specials = Specials(found)
        buffers = [numbers[id(b)] for b in module.buffers() if id(b) in numbers]
        parameters = [numbers[id(p)] for p in module.parameters() if id(p) in numbers]
        self.kinds = {**dict.fromkeys(buffers, "buffer"), **dict.fromkeys(parameters, "parameter")}
        return {slot: t for slot, t in found.items() if slot not in self.specials.tensors}

    def forget(self) -> None:
        """Let it be recorded anew before the next forward."""
        self._state = None
        self.specials = Specials({})
        self._edits.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether it has to be recorded anew, whatever changed of its Python state."""
        return self._state is None or not self.specials.look_alike()

    def changed(self) -> bool:
        """Whether identities show a change of the Python state."""
        return self._state is None or self._state.changed()

    def deep_changed(self) -> bool:
        """Whether contents of the Python state changed that identities do not show."""
        return self._state is None or self._state.deep_changed()

    def edit(self, next_revision: Callable[[], int]) -> int | None:
        """Take over a change that is one of a few plain attributes, with the next revision; returns
        that, or None if more than these changed.
        """
        assert self._state is not None
        found = self._state.differences()
        numbers = {id(module): i for i, module in enumerate(self.modules)}
        self._why = change_reason(self._module, self._state)
        if found is None or not all(id(o) in numbers and type(v) in _SIMPLE for o, _, v in found):
            return None
        revision = next_revision()
        for owner, name, value in found:
            self._state.accept(owner, name, value)
            self._edits[numbers[id(owner)], name] = (revision, value)
        self._state.settle()
        return revision

    def why(self) -> str:
        """What changed since the last call of this; empty if nothing did."""
        why, self._why = self._why, ""
        return why

    def edits_since(self, held: int) -> tuple[tuple[int, str, Any], ...]:
        """The attributes that changed after revision ``held``: number of the submodule, name and
        value.
        """
        edits = self._edits.items()
        return tuple([(number, name, value) for (number, name), (at, value) in edits if at > held])

    def message(self, master: MasterTensors) -> Structure:
        """What replicas build it from."""
        layout = master.specs(), master.layout.sizes
        return Structure(self._bytes, self._origins, *layout, self.specials.message)

    def leaves(self, plain: Mapping[int, Tensor]) -> Leaves:
        """The tensors that may receive gradients, in the order in which replicas report them.

        Args:
            plain: The plain tensors, by slot.
        """
        if self._leaves is None:
            tensors = {**plain, **self.specials.tensors}
            wanted = sorted([slot for slot, tensor in tensors.items() if tensor.requires_grad])
            kinds = [self.kinds.get(slot, "attribute") for slot in wanted]
            others = [k for k, kind in enumerate(kinds) if kind == "attribute"]
            self._leaves = Leaves([tensors[slot] for slot in wanted], kinds, others)
        return self._leaves

    def forget_leaves(self) -> None:
        """Find the leaves anew when they are asked for: flags changed."""
        self._leaves = None

    def name(self, slot: int, tensor: Tensor) -> str:
        """The kind and the name of a plain tensor."""
        named = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        found = (f"{self.kinds[slot]} {name!r}" for name, known in named if known is tensor)
        return next(found, "a tensor")


def check_devices(module: nn.Module) -> None:
    """Raise upstream's error for a module that is spread over devices."""
    source = None
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        source = source or tensor.device
        if tensor.device != source:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {source} "
                f"(device_ids[0]) but found one of them on device: {tensor.device}"
            )

"""What one module holds, so that a checkpoint that computes again finds what it held before: its
tensors, and the attributes that the driver changed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from raydp_parallel.state.python_state import PythonState

_ABSENT = object()


class Held:
    """The tensors that one module holds, by slot, and the attributes that the driver changed.

    Args:
        python_state: The places where it holds them.
        tensors: The tensors that it holds now.
    """

    def __init__(self, python_state: PythonState, tensors: Mapping[int, Tensor]) -> None:
        self._python_state = python_state
        self._tensors = dict(tensors)
        self._edits: list[tuple[dict[str, Any], str, Any, Any]] = []

    @property
    def edits(self) -> int:
        """How many attributes were changed so far."""
        return len(self._edits)

    def edit(self, owner: nn.Module, name: str, value: Any) -> None:
        """Change an attribute of a submodule."""
        attributes = vars(owner)
        self._edits.append((attributes, name, attributes.get(name, _ABSENT), value))
        attributes[name] = value

    def forget_edits(self) -> None:
        """Forget the edits: no graph is left that was made before them."""
        self._edits.clear()

    @contextlib.contextmanager
    def as_of(self, edits: int) -> Iterator[None]:
        """Give the module, in the block, the attributes that it had after so many edits."""
        undone = self._edits[edits:]
        for attributes, name, old, _ in reversed(undone):
            if old is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = old
        try:
            yield
        finally:
            for attributes, name, _, value in undone:
                attributes[name] = value

    def holds(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether the module holds exactly these tensors."""
        return len(tensors) == len(self._tensors) and all(
            map(operator.is_, tensors.values(), self._tensors.values())
        )

    def replace(self, tensors: Mapping[int, Tensor]) -> bool:
        """Give the module other tensors for those slots that it has. False if a place could not be
        reached.
        """
        known = {slot: self._tensors[slot] for slot in tensors if slot in self._tensors}
        others = {slot: tensors[slot] for slot, old in known.items() if tensors[slot] is not old}
        self._tensors.update(others)
        return not others or self._python_state.replace(
            {id(known[slot]): new for slot, new in others.items()}
        )

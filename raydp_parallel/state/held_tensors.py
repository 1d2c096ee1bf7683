"""The tensors that one module holds, so that it can be given others: what a checkpoint computes
again finds them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import Tensor

from raydp_parallel.state.python_state import PythonState


class Held:
    """The tensors that one module holds, by slot.

    Args:
        python_state: Where it holds them.
        tensors: What it holds now.
    """

    def __init__(self, python_state: PythonState, tensors: Mapping[int, Tensor]) -> None:
        self._python_state = python_state
        self._tensors = dict(tensors)

    def holds(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether it holds exactly these."""
        return len(tensors) == len(self._tensors) and all(
            map(operator.is_, tensors.values(), self._tensors.values())
        )

    def replace(self, tensors: Mapping[int, Tensor]) -> bool:
        """Let it hold others, of those slots that it has. False if not all places could be
        reached.
        """
        known = {slot: self._tensors[slot] for slot in tensors if slot in self._tensors}
        others = {slot: tensors[slot] for slot, old in known.items() if tensors[slot] is not old}
        self._tensors.update(others)
        return not others or self._python_state.replace(
            {id(known[slot]): new for slot, new in others.items()}
        )

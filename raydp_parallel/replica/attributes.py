"""Attributes that a program sets on a replica, as an override of `DataParallel.replicate` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raydp_parallel.replica.replica import callee
from raydp_parallel.transport.messages import Called


@dataclass(frozen=True)
class WithAttributes:
    """Called with a module and arguments, it sets attributes of the module first. The next call
    finds the module without them, as it takes back all that a call did.

    Attributes:
        attributes: What is set, by name.
        called: What gets the arguments.
    """

    attributes: Mapping[str, Any]
    called: Called

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Set them, and call."""
        for name, value in self.attributes.items():
            # They hide parameters and submodules of their names, as on upstream's replicas.
            object.__setattr__(module, name, value)
        return callee(module, self.called)(*args, **kwargs)

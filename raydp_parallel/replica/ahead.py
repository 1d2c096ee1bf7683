"""A backward that is computed before it is asked for.

A replica that has answered a forward is idle until the driver comes back with gradients of the
outputs. Where the loss is computed here, these are the same few numbers in most steps: 1, or a
scaler's constant. So a model whose last two backwards were alike, each right after its forward, has
the next one computed at once. If it is asked for with the same numbers, the result is there. Else
nothing has happened: only torch's own code ran, which writes to nothing but the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raydp_parallel.state.run import bits
from raydp_parallel.wire.messages import BackwardRequest

_MOST = 16
"""How many numbers a gradient may have that is compared."""


@dataclass(eq=False)
class Ahead:
    """Record of what follows the forwards of one model, and the result for the last one."""

    asked: object = None  # what the last backward asked for; None if it is none to repeat
    next: BackwardRequest | None = None  # the one that is foreseen, with gradients of its own
    found: list[Tensor | None] | None = None  # its result
    never: bool = False  # none is foreseen any more

    def take(self, request: object, graph: int) -> list[Tensor | None] | None:
        """Note which request followed a forward; returns the result, if it is there."""
        last, found = self.asked, self.found
        self.asked = self.next = self.found = None
        if self.never or not isinstance(request, BackwardRequest) or request.graph != graph:
            return None
        self.asked = _asked(request)
        if self.asked is None or self.asked != last:
            return None
        # Torch may hand gradients on: each pass has its own.
        own = [t.detach().clone() for t in request.grads]
        self.next = request._replace(grads=own, retain=True)
        return found


def _asked(request: BackwardRequest) -> object:
    """Return what a backward follows from, but for its graph; None if it is none to repeat."""
    if request.moved or any([t.is_nested or t.numel() > _MOST for t in request.grads]):
        return None
    values = [(t.dtype, t.shape, bits(t).tolist()) for t in request.grads]
    needed, terms = bytes(map(bool, request.needed)), request.terms._replace(group=None)
    return request.outputs[0][1], values, needed, request.partial, request.derived, terms

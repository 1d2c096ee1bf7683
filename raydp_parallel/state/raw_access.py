"""Accesses to memory that move no version: ``.data``, ``.numpy()`` and the like.

``p.data.mul_(2)`` changes ``p``, and nothing of torch's tells. To compare every weight after every
forward would read all of them twice; to note each access costs nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

from torch import Tensor

from raydp_parallel.state.run import storage_of

_METHODS = ("numpy", "__array__", "__dlpack__", "register_hook", "retain_grad")
"""Those that give memory away, and those by which a tensor tells of a backward: none is computed
ahead then.
"""
_PLAIN = inspect.getattr_static(Tensor, "data")

COPIED = 1 << 20
"""Bytes up to which contents from before an access are kept, to tell reading from writing."""

Touched = dict[int, Tensor | None]
"""Addresses of storages that were accessed, with the contents from before."""

_touched: Touched | None = None


def _noting(method: Callable[..., object]) -> Callable[..., object]:
    def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
        address = 0 if _touched is None else storage_of(tensor)
        if _touched is not None and address and address not in _touched:
            small = tensor.numel() * tensor.element_size() <= COPIED
            _touched[address] = tensor.detach().clone() if small else None
        return method(tensor, *args, **kwargs)

    return call


@contextlib.contextmanager
def noting() -> Iterator[Touched]:
    """Collect the addresses of storages that are accessed in the block. `torch.Tensor` stays
    changed, as this process runs replicas only, and to set attributes of a class is slow.
    """
    global _touched
    if "data" not in vars(Tensor):
        noted = _noting(_PLAIN.__get__), _noting(_PLAIN.__set__)
        type.__setattr__(Tensor, "data", property(*noted))  # type: ignore[arg-type]
        for name in _METHODS:
            type.__setattr__(Tensor, name, _noting(getattr(Tensor, name)))
    _touched = {}
    try:
        yield _touched
    finally:
        _touched = None

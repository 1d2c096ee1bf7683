"""Accesses to memory that move no version: ``.data``, ``.numpy()`` and the like.

``p.data.mul_(2)`` changes ``p``, and nothing of torch's tells. To compare every weight after every
forward would read all of them twice; to note each access costs nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_METHODS = ("numpy", "__array__", "__dlpack__")
_PLAIN: Any = inspect.getattr_static(Tensor, "data")

data: Callable[[Tensor], Tensor] = _PLAIN.__get__
"""Returns ``tensor.data``, of which nothing is noted."""

_BEFORE = {name: vars(Tensor).get(name) for name in _METHODS}

_SMALL = 1 << 20
"""Bytes up to which contents from before an access are kept, to tell reading from writing."""

Touched = dict[int, Tensor | None]
"""Addresses of storages that were accessed, with the contents from before."""

_touched: Touched | None = None


def _note(tensor: Tensor) -> None:
    if _touched is not None:
        with contextlib.suppress(Exception):  # tensors without a storage
            address = tensor.untyped_storage().data_ptr()
            if address not in _touched:
                small = tensor.numel() * tensor.element_size() <= _SMALL
                _touched[address] = tensor.detach().clone() if small else None


def _get(tensor: Tensor) -> Tensor:
    _note(tensor)
    return _PLAIN.__get__(tensor)  # type: ignore[no-any-return]


def _set(tensor: Tensor, data: Tensor) -> None:
    _note(tensor)
    _PLAIN.__set__(tensor, data)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _note(tensor)
        return method(tensor, *args, **kwargs)

    return call


def install() -> None:
    """Note accesses from now on, in `noting` blocks. Setting attributes of a class is slow."""
    if "data" in vars(Tensor):
        return
    type.__setattr__(Tensor, "data", property(_get, _set))
    for name in _METHODS:
        type.__setattr__(Tensor, name, _noting(getattr(Tensor, name)))


def uninstall() -> None:
    """Make `torch.Tensor` what it was, in a process that is not a replica's own."""
    if "data" in vars(Tensor):
        type.__delattr__(Tensor, "data")
        for name, method in _BEFORE.items():
            if method is None:
                type.__delattr__(Tensor, name)
            else:
                type.__setattr__(Tensor, name, method)


@contextlib.contextmanager
def noting(own_process: bool) -> Iterator[Touched]:
    """Collect the addresses of storages that are accessed in the block. Where this process does not
    run replicas only, torch is left as it was.
    """
    global _touched
    before, _touched = _touched, {}
    install()
    try:
        yield _touched
    finally:
        if before is not None:
            before.update(_touched)
        _touched = before
        if not own_process and before is None:
            uninstall()

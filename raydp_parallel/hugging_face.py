"""Rules that only Hugging Face's libraries need; and `attach`, by which their `Trainer` runs its
model on replicas.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from raydp_parallel.batch import Function, Keywords
from raydp_parallel.devices import ambient

Trainer = TypeVar("Trainer", bound=Any)
M = TypeVar("M", bound=nn.Module)


def attach(trainer: Trainer, model: nn.DataParallel[M]) -> Trainer:
    """Let a `Trainer` train and evaluate its model on the replicas of a wrapper; returns it.

    ::

        trainer = attach(Trainer(net, arguments, train_dataset=rows), DataParallel(net))

    The trainer keeps the module itself, so that it knows the names of labels, and saves files that
    ``from_pretrained`` loads.

    Raises:
        ValueError: The wrapper has another module than the trainer.
    """
    if model.module is not trainer.model:
        raise ValueError("attach: the Trainer and the wrapper have different modules")
    wrap = trainer._wrap_model

    def wrapped(net: nn.Module, *args: object, **kwargs: object) -> object:
        return model if net is trainer.model else wrap(net, *args, **kwargs)

    trainer._wrap_model, trainer.model_wrapped = wrapped, model
    return trainer


class SignedForward:
    """A wrapper's forward, with the signature of its module's: by that the `Trainer` chooses
    columns.
    """

    def __init__(self, function: Function) -> None:
        self._function = function

    @ambient.uncompiled
    def __get__(self, model: nn.DataParallel[M] | None, _: object = None) -> Function:
        if model is None:
            return self._function
        plain = getattr(model, "_loss", None) is None  # with a loss it takes targets, too
        like = getattr(model.module.forward, "__func__", None) if plain else None
        return types.MethodType(_signed(self._function, like), model)


@functools.lru_cache(maxsize=64)
def _signed(function: Function, like: Function | None) -> Function:
    """Return the same function with the signature of another one."""
    if like is None:
        return function
    assert isinstance(function, types.FunctionType)
    made = types.FunctionType(function.__code__, function.__globals__)
    functools.update_wrapper(made, function)
    made.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return made


def shares(named: Sequence[Keywords], rows: Sequence[int]) -> list[Keywords] | None:
    """Return the chunks' keyword arguments with their shares of ``num_items_in_batch``; None if the
    `Trainer` gives no such number.

    A module divides the sum of its losses by the items, or ignores them: given the chunk's share,
    the mean that is weighted by rows is right for both.
    """
    items = named[0].get("num_items_in_batch")
    if items is None or getattr(items, "shape", None) or not any(rows):
        return None
    parts = [items * count / sum(rows) for count in rows]
    return [k | {"num_items_in_batch": n} for k, n in zip(named, parts, strict=True)]


def by_trainer(method: Function) -> Function:
    """Return a wrapper's method that saves or loads a state. The `Trainer` writes the state of the
    model that it was given as the module's own, for ``from_pretrained``, so it gets the module's.
    """

    @functools.wraps(method)
    def chosen(model: nn.DataParallel[M], *args: object, **kwargs: object) -> object:
        caller = sys._getframe(1).f_globals.get("__name__")
        state: Iterable[str] = args[0] if args and isinstance(args[0], Mapping) else ()
        if caller != "transformers.trainer" or any(key.startswith("module.") for key in state):
            return method(model, *args, **kwargs)
        return getattr(model.module, method.__name__)(*args, **kwargs)

    return chosen

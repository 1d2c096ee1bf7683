"""Exceptions and warnings across the process wall."""

from __future__ import annotations

import contextlib
import functools
import pickle
import traceback
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch._utils import ExceptionWrapper

from raydp_parallel.errors import ParallelError, ReplicaError, ReplicaExit
from raydp_parallel.wire.messages import CaughtWarning, Failure

NO_DEBUGGER = (
    "a replica has no terminal for a debugger: DataParallel(net, ['cpu']) runs the module in this "
    "process, where breakpoint() works"
)

_PACKAGE = str(Path(__file__).parents[1])

_registry: dict[str | tuple[str, type[Warning], int], int] = {}


class ReplicaTraceback(Exception):
    """The traceback of a replica's exception, as the cause of the one raised in the driver."""


class NotLoaded(Exception):
    """Carries an exception, its cause, that came while arguments were loaded."""


def failure(error: BaseException, error_prefix: str | None) -> Failure:
    """Take down the exception that is being handled."""
    cause = error.__cause__ if isinstance(error, NotLoaded) else None
    error = error if cause is None else cause
    return Failure(
        kind=_pickled(type(error)),
        name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_told(error),
        error_prefix=error_prefix,
        exception=_pickled_whole(error) if error_prefix is None else None,
        exit=not isinstance(error, Exception),
        loading=cause is not None,
    )


def _told(error: BaseException) -> str:
    """Format an exception and its causes, without the frames between the module's own lines: those
    of this package, and those by which torch calls each module.
    """
    found = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = found
    while part is not None:
        between = _PACKAGE, torch.nn.modules.module.__file__
        part.stack[:] = [f for f in part.stack if not f.filename.startswith(between)] or part.stack
        part = part.__cause__ or part.__context__
    return "".join(found.format())


class ShortTraceback(contextlib.ContextDecorator, contextlib.AbstractContextManager[object]):
    """Leaves this package's frames out of tracebacks in which they say nothing: those of the
    module's exceptions, of what this package raises itself, and of Ctrl-C.
    """

    def __exit__(
        self, _: object, error: BaseException | None, found: types.TracebackType | None
    ) -> None:
        if error is not None:
            codes = {frame.f_code for frame, _ in traceback.walk_tb(found)}
            last = traceback.extract_tb(found)[-1]
            raised = last.filename.startswith(_PACKAGE) and (last.line or "").startswith("raise ")
            known = isinstance(error, (ParallelError, KeyboardInterrupt))
            if raised or known or reraise.__code__ in codes:
                error.__traceback__ = None


def reraise(found: Failure, replica: str) -> None:
    """Raise an exception of a replica: the same type, with upstream's words."""
    if found.name == "bdb.BdbQuit":
        raise ReplicaError(f"{replica}: {NO_DEBUGGER}.\n{found.text}")
    if found.exit:
        raise ReplicaExit(
            f"the module ended with {found.name} in {replica}; its process goes on.\n{found.text}"
        )
    error = _exception(found.exception)
    if error is not None:
        raise error from ReplicaTraceback(f"\n{found.text}")
    kind, prefix = _loaded(found.kind), found.error_prefix or f"in {replica}"
    if kind is None:
        raise RuntimeError(f"Caught {found.name} {prefix}.\nOriginal {found.text}")
    wrapper = ExceptionWrapper((kind, None, None), prefix)
    wrapper.exc_msg = found.text
    wrapper.reraise()


def caught(records: Iterable[warnings.WarningMessage]) -> tuple[CaughtWarning, ...]:
    """Make warnings ready to travel."""
    rows = [(_pickled(r.category) or b"", str(r.message), r.filename, r.lineno) for r in records]
    return tuple(rows)


def warn_again(found: Iterable[CaughtWarning]) -> None:
    """Warn again in the driver, whose filters decide."""
    for kind, text, file, line in found:
        category: type[Warning] = _loaded(kind) or UserWarning
        warnings.warn_explicit(text, category, file, line, registry=_registry)


def _pickled(value: object) -> bytes | None:
    with contextlib.suppress(Exception):
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    return None


def _pickled_whole(error: BaseException) -> bytes | None:
    """Pickle an exception, in the first of two ways in which it comes out as it went in: as it
    would itself, and past its constructor, which may want other arguments, without what cannot be
    pickled.
    """
    state = {name: value for name, value in vars(error).items() if _pickled(value) is not None}
    for form in (error, functools.partial(_bare, type(error), error.args, state)):
        data = _pickled(form)
        reloaded = _exception(data)
        if type(reloaded) is type(error) and str(reloaded) == str(error):
            return data
    return None


def _bare(
    kind: type[BaseException], args: tuple[object, ...], state: dict[str, object]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _exception(data: bytes | None) -> BaseException | None:
    found = _loaded(data)
    with contextlib.suppress(Exception):  # of the class's own `__new__`
        found = found() if isinstance(found, functools.partial) else found
    return found if isinstance(found, BaseException) else None


def _loaded(data: bytes | None) -> Any:
    with contextlib.suppress(Exception):
        return pickle.loads(data or b"")
    return None

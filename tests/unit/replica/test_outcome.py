"""Exceptions and warnings across the process wall."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from harness import raised
from torch._utils import ExceptionWrapper

from raydp_parallel import ReplicaExit
from raydp_parallel.replica import exceptions
from raydp_parallel.transport.messages import Failure

WHERE = "in replica 1 on device 1"


class TwoArguments(Exception):
    """Its constructor takes more than a message."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class WithMessage(Exception):
    """Has an attribute that upstream looks for."""

    def __init__(self, message: str, extra: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.extra = extra


class Unpicklable(Exception):
    """Holds what cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.generator = (i for i in ())


def take_down(error: BaseException, where: str | None = WHERE) -> Failure:
    """An exception that was raised in a replica, as it arrives."""
    try:
        raise error
    except BaseException as caught:
        return pickle.loads(pickle.dumps(exceptions.failure(caught, where)))  # type: ignore[no-any-return]


def upstream(error: BaseException) -> BaseException:
    """What upstream raises for it."""

    def wrap() -> None:
        try:
            raise error
        except BaseException:
            wrapper = ExceptionWrapper(where=WHERE)
        wrapper.reraise()

    return raised(wrap)


ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("wrong"),
    "no message": RuntimeError(),
    "KeyError": KeyError("missing"),
    "AssertionError": AssertionError("no"),
    "torch's": torch.cuda.OutOfMemoryError("too much"),
    "StopIteration": StopIteration(3),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    "two arguments": TwoArguments(7, "deep"),
    "message": WithMessage("well", 3),
    "unpicklable": Unpicklable("state"),
    "several lines": ValueError("one\ntwo"),
}


@pytest.mark.parametrize("name", [*ERRORS])
def test_A4_the_same_type_with_upstreams_text(name: str) -> None:
    """Type, first line and shape of the text are upstream's, whatever the constructor takes."""
    found = raised(lambda: exceptions.reraise(take_down(ERRORS[name]), "replica 1"))
    expected = upstream(ERRORS[name])
    assert type(found) is type(expected)
    ours, theirs = str(found).splitlines(), str(expected).splitlines()
    assert ours[:2] == theirs[:2]
    assert ours[-1] == theirs[-1]
    assert "in take_down" in str(found)


def test_A4_key_errors_read_as_they_are() -> None:
    """Not as the repr of a text with line breaks in it."""
    found = raised(lambda: exceptions.reraise(take_down(KeyError("k")), ""))
    assert "\\n" not in str(found)
    assert str(found).startswith(
        f"Caught KeyError {WHERE}.\nOriginal Traceback (most recent call last):\n"
    )


def test_A4_the_message_attribute_is_kept() -> None:
    """As upstream, a class with one gets it by keyword."""
    found: Any = raised(lambda: exceptions.reraise(take_down(WithMessage("well", 3)), ""))
    assert found.message == str(found)


def test_A4_a_cause_is_in_the_text() -> None:
    """The exception that led to it travels in the traceback."""
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    text = str(raised(lambda: exceptions.reraise(take_down(error), "")))
    assert "KeyError: 'inner'" in text
    assert "direct cause" in text


def test_A6_without_a_place_the_exception_itself_comes_back() -> None:
    """A single device raises what the module raised, attributes and all; the remote traceback is
    its cause.
    """
    error = WithMessage("well", 3)
    found: Any = raised(lambda: exceptions.reraise(take_down(error, None), "replica 0"))
    assert (type(found), str(found), found.extra) == (WithMessage, "well", 3)
    assert type(found.__cause__) is exceptions.ReplicaTraceback
    assert "in take_down" in str(found.__cause__)


@pytest.mark.parametrize("name", ("two arguments", "unpicklable"))
def test_A6_an_exception_that_pickle_refuses_keeps_type_and_text(name: str) -> None:
    """Whatever its constructor takes, and whatever it holds; never a pickling error."""
    found = raised(lambda: exceptions.reraise(take_down(ERRORS[name], None), "replica 3"))
    assert (type(found), str(found)) == (type(ERRORS[name]), str(ERRORS[name]))


def test_A4_a_class_that_cannot_be_sent_becomes_a_runtime_error() -> None:
    """It names the class, the place and the traceback."""
    lock = (i for i in ())

    class Local(Exception):
        held = lock

    found = raised(lambda: exceptions.reraise(take_down(Local("why")), "replica 1"))
    assert type(found) is RuntimeError
    assert str(found).startswith("Caught test_outcome.")
    assert f"Local {WHERE}.\nOriginal Traceback" in str(found)
    assert "why" in str(found)


@pytest.mark.parametrize("error", (SystemExit(3), KeyboardInterrupt(), GeneratorExit("x")))
def test_A7_exits_become_a_named_error(error: BaseException) -> None:
    """The driver does not end because a replica's module asked its process to."""
    found = raised(lambda: exceptions.reraise(take_down(error), "replica 2 for device cpu"))
    assert type(found) is ReplicaExit
    assert type(error).__name__ in str(found)
    assert "replica 2 for device cpu" in str(found)


class OwnWarning(UserWarning):
    """A category of the user's."""


def record(category: type[Warning] = UserWarning, text: str = "look out") -> tuple[Any, ...]:
    """A warning that was raised in a replica, as it arrives."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        warnings.warn_explicit(text, category, "model.py", 12)
    return pickle.loads(pickle.dumps(exceptions.caught(records)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("category", (UserWarning, DeprecationWarning, OwnWarning))
def test_A9_warnings_are_raised_again(category: type[Warning]) -> None:
    """With category, text and the place in the user's file."""
    found = record(category)
    with pytest.warns(category, match="look out") as seen:
        exceptions.warn_again(found)
    (warning,) = seen
    assert (warning.filename, warning.lineno) == ("model.py", 12)
    assert warning.category is category


def test_A9_the_drivers_filters_decide() -> None:
    """Ignored is ignored, an error is raised, and ``default`` shows one per place."""
    found = record(text="filters")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        exceptions.warn_again(found)
        assert not seen
        warnings.simplefilter("default")
        exceptions.warn_again([*found, *found])
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(raised(lambda: exceptions.warn_again(found))) is UserWarning


def test_A9_a_category_that_cannot_be_sent_becomes_a_user_warning() -> None:
    """The text arrives all the same."""
    lock = (i for i in ())

    class Local(UserWarning):
        held = lock

    with pytest.warns(UserWarning, match="local") as seen:
        exceptions.warn_again(record(Local, "local"))
    assert seen[0].category is UserWarning

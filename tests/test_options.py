"""The rare knobs: what they default to, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from raydp_parallel import Options


def test_defaults_are_upstreams() -> None:
    """Zeros for unused parameters (B3), vectors of scalars (G2), replicas in processes."""
    options = Options()
    assert (options.unused_grads, options.scalars, options.link) == ("zeros", "vector", "auto")
    assert not options.in_process
    assert options.call_timeout is None


def test_frozen_and_by_keyword() -> None:
    """They cannot change under an executor that was made with them, and read as what they mean."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().link = "inline"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("none")  # type: ignore[misc]


def test_equal_options_are_one_key() -> None:
    """Executors are found again by them; they survive a pickle."""
    assert {Options(): 1}[Options()] == 1
    assert pickle.loads(pickle.dumps(Options(threads=2))) == Options(threads=2) != Options()


def test_every_field_is_documented() -> None:
    """A knob without a word about it is not a knob."""
    doc = inspect.getdoc(Options)
    assert doc is not None
    assert all(f"\n    {field.name}: " in doc for field in dataclasses.fields(Options))


BAD: tuple[dict[str, Any], ...] = (
    {"unused_grads": "None"},
    {"scalars": "max"},
    {"link": "carrier pigeon"},
    {"placement_timeout": 0},
    {"placement_timeout": -1.0},
    {"call_timeout": 0.0},
    {"cpus_per_replica": -1},
    {"gpus_per_replica": 0},
    {"gpus_per_replica": 2},
    {"threads": 0},
    {"on_fault": "ignore"},
    {"max_restarts_per_hour": -1},
    {"name": ""},
    {"name": "a/b"},
    {"name": "me@host"},
)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_value_is_refused_at_once(bad: dict[str, Any]) -> None:
    """The error names the option, and for a value also what was seen."""
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        Options(**bad)


@pytest.mark.parametrize("name", ("unused_grads", "scalars", "link", "on_fault"))
def test_an_unknown_choice_is_told_the_known_ones(name: str) -> None:
    """The value seen and the values expected."""
    with pytest.raises(ValueError, match=f"Options\\({name}='x'\\): expected one of \\w+, "):
        Options(**{name: "x"})


@pytest.mark.parametrize(
    "good",
    (
        {"unused_grads": "none"},
        {"scalars": "weighted_mean"},
        {"link": "object_store"},
        {"call_timeout": 0.5},
        {"cpus_per_replica": 2},
        {"gpus_per_replica": 0.25},
        {"threads": 1},
        {"name": "resnet50-run.3"},
        {"metrics": False},
        {"profile_dir": "traces"},
    ),
    ids=str,
)
def test_good_values_are_taken(good: dict[str, Any]) -> None:
    """The ends of each range."""
    (name,) = good
    assert getattr(Options(**good), name) == good[name]

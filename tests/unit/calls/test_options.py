"""The rare knobs: what they default to, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import math
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
    {"name": "red\x1b[31m"},
    {"name": "two\nlines"},
    {"name": "\u202egnp.exe"},
    *(
        {name: value}
        for name in ("placement_timeout", "call_timeout")
        for value in (math.inf, math.nan, 1e7)
    ),
    {"max_restarts_per_hour": math.nan},
    {"max_restarts_per_hour": math.inf},
    {"resources": {"disk": 0}},
    {"resources": {"disk": -1.0}},
    {"resources": {"disk": "1"}},
    {"resources": {"disk": True}},
    {"resources": {"GPU": 1}},
    {"label_selector": {"zone": ""}},
    {"label_selector": {"zone": "in()"}},
    {"label_selector": {"zone": 1}},
    {"label_selector": {"zone": "a b) or (c"}},
    {"cpus_per_replica": float("nan")},
    {"gpus_per_replica": -0.5},
)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_value_is_refused_at_once(bad: dict[str, Any]) -> None:
    """The error names the option, and for a value also what was seen."""
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        Options(**bad)


@pytest.mark.parametrize(
    "bad",
    (
        {"gpus_per_replica": "1"},
        {"cpus_per_replica": None},
        {"placement_timeout": "60"},
        {"placement_timeout": True},
        {"call_timeout": "1"},
        {"resources": ["disk"]},
        {"resources": {1: 1}},
        {"label_selector": "zone=a"},
    ),
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_at_once(bad: dict[str, Any]) -> None:
    """The error names the option and the value."""
    ((name, value),) = bad.items()
    with pytest.raises(TypeError, match=name) as raised:
        Options(**bad)
    assert repr(value) in str(raised.value)


def test_who_is_away_needs_somebody_to_stand_in() -> None:
    """Two options that exclude each other."""
    with pytest.raises(ValueError, match="elastic=True, on_fault='raise'"):
        Options(elastic=True, on_fault="raise")


def test_dicts_are_copied_and_frozen() -> None:
    """They are part of a key, travel, and read as dicts."""
    mine = {"disk": 1}
    options = Options(resources=mine, label_selector={"zone": "in(a, b)"})
    mine["disk"] = 2
    assert options.resources == {"disk": 1} and options.resources["disk"] == 1
    assert options == Options(resources={"disk": 1}, label_selector={"zone": "in(a, b)"})
    assert (
        len({options, dataclasses.replace(options), pickle.loads(pickle.dumps(options)), Options()})
        == 2
    )
    for change in (
        lambda d: d.update(x=1),
        lambda d: d.pop("disk"),
        lambda d: d.__setitem__("x", 1),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change(options.resources)


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
        {"resources": {"accelerator_type:A100": 0.001}},
        {"label_selector": {"market-type": "!spot", "zone": "!in(a,b)"}},
        {"elastic": True},
    ),
    ids=str,
)
def test_good_values_are_taken(good: dict[str, Any]) -> None:
    """The ends of each range."""
    (name,) = good
    assert getattr(Options(**good), name) == good[name]

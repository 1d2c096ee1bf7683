"""Which cluster is joined, by what Ray has noted down for this machine; Ray itself is not
started.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from raydp_parallel.cluster import joining, ray_api


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that Ray was asked to join; "local" is a cluster of one's own."""
    asked: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda address=None: asked.append(address))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(joining, "_started_here", False)
    monkeypatch.setattr(ray_api, "joined_address", lambda: "10.0.0.1:6379")
    return asked


def test_a_cluster_that_answers_is_joined(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    """By Ray's own rules, which need no address for that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray_api, "noted_address", lambda: address)
        assert joining.connect(start=False)
    assert started == [None] and not joining._started_here


def test_a_cluster_that_was_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its address stays behind, and Ray tries it for minutes; here another cluster is started, and
    that is said.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(ray_api, "noted_address", lambda: address)
    with caplog.at_level(logging.WARNING, "raydp_parallel"):
        assert not joining.connect(start=False)
        assert joining.connect()
    assert started == ["local"] and joining._started_here
    assert address in caplog.text and "does not answer" in caplog.text and "ray stop" in caplog.text


@pytest.mark.parametrize("noted", [None, "", "auto"])
def test_other_notes(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], noted: str | None
) -> None:
    """None is none; what is no address is Ray's to understand."""
    monkeypatch.setattr(ray_api, "noted_address", lambda: noted)
    assert joining.connect()
    assert started == [None if noted else "local"]


@pytest.mark.parametrize("chosen", [None, "7"])
def test_replicas_have_the_program_s_priority_in_a_cluster_of_its_own(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Ray's default would leave them a fraction of what data loaders get; the user may choose."""
    seen: list[str | None] = []
    monkeypatch.setattr(
        ray, "init", lambda address=None: seen.append(os.environ.get(ray_api.NICENESS))
    )
    monkeypatch.delenv(ray_api.NICENESS, raising=False)
    if chosen is not None:
        monkeypatch.setenv(ray_api.NICENESS, chosen)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_api.join("local")
    ray_api.join(None)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    ray_api.join(None)
    assert seen == [chosen or "0", chosen, chosen or "0"]
    assert os.environ.get(ray_api.NICENESS) == chosen


@pytest.mark.long
def test_a_replica_is_as_nice_as_the_program_that_started_the_cluster() -> None:
    """As the kernel says."""
    program = """
import os
import torch
from torch import nn
from raydp_parallel import DataParallel
model = DataParallel(nn.Linear(2, 2), ["cpu"])
model(torch.ones(2, 2))
print("niceness", os.getpriority(os.PRIO_PROCESS, model.executor.replicas()[0].pid))
"""
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    environment.pop(ray_api.NICENESS, None)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert f"niceness {own}" in ran.stdout.splitlines(), ran.stderr


def test_an_address_of_the_user_s_is_ray_s(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    """Whatever was noted down."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray_api, "noted_address", lambda: pytest.fail("is not asked"))
    assert joining.connect(start=False)
    assert started == [None]


@pytest.mark.parametrize(
    "owner, level", [(None, logging.INFO), (0, logging.INFO), (1, logging.WARNING)]
)
def test_which_cluster_was_joined_is_said(
    monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    owner: int | None,
    level: int,
) -> None:
    """With the reason, and how to have another; a stranger's is worth a warning."""
    note = tmp_path / "ray_current_cluster"
    if owner is not None:
        note.write_text("auto")
        monkeypatch.setattr(os, "getuid", lambda: note.stat().st_uid + owner)
    monkeypatch.setattr(ray_api, "noted_address", lambda: "auto")
    monkeypatch.setattr(ray_api, "note", lambda: str(note))
    with caplog.at_level(logging.INFO, "raydp_parallel"):
        assert joining.connect()
    (said,) = caplog.records
    assert (
        said.levelno == level
        and "10.0.0.1:6379" in said.getMessage()
        and str(note) in said.getMessage()
    )
    assert "RAY_ADDRESS=local" in said.getMessage() and (
        "another user" in said.getMessage()
    ) == bool(owner)


def test_a_cluster_that_is_started_or_named_is_said(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each in its own words."""
    monkeypatch.setattr(ray_api, "noted_address", lambda: None)
    with caplog.at_level(logging.INFO, "raydp_parallel"):
        assert joining.connect()
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert joining.connect()
    assert "started for this program at 10.0.0.1:6379" in caplog.messages[0]
    assert "which RAY_ADDRESS names" in caplog.messages[1]

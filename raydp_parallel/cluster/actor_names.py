"""The names of executors and their replicas in Ray's dashboard."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.devices.ambient_state import environment, environment_at_load
from raydp_parallel.replica.actor import ReplicaActor
from raydp_parallel.transport import handshake


def program() -> str:
    """What to call a program's executor: its file, without the characters that names cannot
    have.
    """
    stem = Path(sys.argv[0]).stem if sys.argv else ""
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "python"


class ActorNames:
    """Starts replicas under names that say what they are, such as ``raydp:train:2@cuda:1``.

    Args:
        name: The executor's.
        ranks: The numbers of the places that are known already.

    Attributes:
        executor: The executor's name.
    """

    def __init__(self, name: str, ranks: Mapping[DevicePlace, int]) -> None:
        self.executor = name
        self._secret = handshake.new_secret()
        self._ranks = {**ranks}
        self._used: set[str] = set()

    def start(
        self, place: DevicePlace, link: str, paths: Sequence[str], options: Mapping[str, Any]
    ) -> Any:
        """Start a replica. Its name ends in a number if there is or was another of that name."""
        rank = self._ranks.setdefault(place, len(self._ranks))
        device = "cpu" if place.kind == "cpu" else f"cuda:{place.number}"
        early = environment_at_load() if place.kind == "gpu" else None
        if early:  # a process of its own: those that Ray keeps ready have loaded without them
            options = {**options, "runtime_env": {"env_vars": early}}
        for number in itertools.count(1):
            name = f"raydp:{self.executor}:{rank}@{device}" + (f"~{number}" if number > 1 else "")
            if name in self._used:
                continue
            self._used.add(name)
            try:
                return ReplicaActor.options(name=name, **options).remote(  # type: ignore[attr-defined]
                    place.kind, link, rank, environment(), self._secret, paths=paths
                )
            # another program of this namespace has it, or got it at the same moment
            except ValueError as error:
                if not re.search("already (taken|exists)", str(error)):
                    raise
        raise AssertionError("numbers do not end")

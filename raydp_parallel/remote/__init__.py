"""Calls to one replica: over its direct line, or as Ray tasks; and waiting for the answers of several."""

from __future__ import annotations

from raydp_parallel.remote.answers import TURN, Lost, Pending, await_each, in_short
from raydp_parallel.remote.door import RemoteDoor

__all__ = ["TURN", "Lost", "Pending", "RemoteDoor", "await_each", "in_short"]

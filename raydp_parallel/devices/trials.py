"""Trials of ways for bytes that were never seen on a GPU, before such a way is used.

[Note: what a trial shows]
A way that is wrong mostly has wrong order: bytes are read before they were written. So random bytes
are made behind work that keeps the device busy, sent at once, and compared; then others, in the
same memory, so that what was there before is not taken for them. A trial that does not end in time
is left to itself, in a thread of its own, and its way is not used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

log = logging.getLogger("raydp_parallel")

SIZE = 1 << 20
"""Bytes that are sent."""

ROUNDS = 2

LIMIT = 10.0
"""Seconds that a trial may take."""

_BUSY = 64
"""Operations on `SIZE` numbers that keep a GPU busy for longer than the host needs to go on."""


def contents(number: int) -> Tensor:
    """The bytes of a round, which both ends make by the same number."""
    random = torch.Generator(device="cpu").manual_seed(number)
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=random, device="cpu")


def late_ones(device: torch.device) -> Tensor:
    """`SIZE` ones, which a GPU has once it has done other work."""
    found = torch.ones(SIZE, device=device)
    for _ in range(_BUSY):
        found.mul_(1.0)
    return found


def late(number: int, device: torch.device) -> Tensor:
    """The bytes of a round on a GPU, which are there once it has done other work."""
    return contents(number).to(device) * late_ones(device).to(torch.uint8)


def outcome(device: torch.device, trial: Callable[[], bool]) -> str:
    """What is wrong with a way, by its trial; empty if nothing is.

    The trial has a stream of its own: one that hangs must not delay what comes later.
    """
    found: SimpleQueue[str] = SimpleQueue()

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(device)):
                found.put("" if trial() else "other bytes arrived than were sent")
        except Exception as error:
            found.put(f"{type(error).__name__}: {error}")

    threading.Thread(target=run, name="raydp-trial", daemon=True).start()
    try:
        return found.get(timeout=LIMIT)
    except Empty:
        return f"no end within {LIMIT:g} s"


def passes(name: str, device: torch.device, trial: Callable[[], bool]) -> bool:
    """Whether a way may be used, by its trial; if not, that is logged."""
    why = outcome(device, trial)
    if why:
        log.warning(
            "Options(gpu_paths=[%r]) is not used in this process (%s): bytes go by 'host'",
            name,
            " ".join(why.split())[:200],
        )
    return not why

"""Plain Ray actors that compute nothing: what a call costs that carries nothing, or an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray


@ray.remote(num_cpus=0)
class Echo:
    """An actor as one writes it first."""

    def empty(self) -> None:
        """Nothing at all."""

    def identity(self, array: np.ndarray) -> np.ndarray:
        """What came."""
        return array


def start(count: int) -> list[Any]:
    """Some of them, running."""
    actors = [Echo.remote() for _ in range(count)]
    fan_out(actors)
    return actors


def fan_out(actors: Sequence[Any]) -> None:
    """One round trip to all that carries nothing."""
    ray.get([actor.empty.remote() for actor in actors])


def there_and_back(actors: Sequence[Any], array: np.ndarray) -> np.ndarray:
    """A chunk of an array to each, and back into one."""
    chunks = np.array_split(array, len(actors))
    return np.concatenate(
        ray.get([a.identity.remote(chunk) for a, chunk in zip(actors, chunks, strict=True)])
    )


def end(actors: Sequence[Any]) -> None:
    """End them."""
    for actor in actors:
        ray.kill(actor)

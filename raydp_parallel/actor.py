"""The door in the process wall: one Ray actor per device, thin around a `Replica`."""

from __future__ import annotations

import os
import pickle
from typing import Any

import ray
import torch

from raydp_parallel import devices
from raydp_parallel.links import BySize, InlineLink, Link, Mail, ObjectStoreLink
from raydp_parallel.messages import Hello
from raydp_parallel.replica import Replica


class Door:
    """A replica behind messages: bytes and packets in, bytes and packets out.

    Args:
        device: Name of the torch device.
        link: What answers travel by.
        threads: Torch's threads, None leaves them.
    """

    def __init__(self, device: str, link: Link, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._replica = Replica(self._device)
        self._link = link

    def forward(self, header: bytes, *beside: Any) -> Any:
        """Run one chunk."""
        back = Mail(self._link)
        return seal(self._replica.forward(pickle.loads(header), Mail(self._link, beside), back), back)

    def backward(self, header: bytes, *beside: Any) -> Any:
        """Differentiate one chunk's graph."""
        back = Mail(self._link)
        return seal(self._replica.backward(pickle.loads(header), Mail(self._link, beside), back), back)

    def forget(self, header: bytes) -> tuple[int, int]:
        """Free what the driver no longer needs. Returns how many models and graphs are left."""
        self._replica.forget(pickle.loads(header))
        return self._replica.holdings()

    def hello(self) -> Hello:
        """Who is here."""
        return devices.describe(self._device, os.getpid(), _node())

    def empty(self) -> None:
        """Nothing at all: what a call costs at least. For benchmarks."""


def seal(message: Any, mail: Mail) -> Any:
    """A message and its packets as one return value of a Ray call: bytes alone if nothing lies beside them."""
    header = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return (header, *mail.beside) if mail.beside else header


def unseal(answer: Any, link: Link) -> tuple[Any, Mail]:
    """The message of a return value, and the mail to open its packets with."""
    header, *beside = answer if isinstance(answer, tuple) else (answer,)
    return pickle.loads(header), Mail(link, beside)


def link_for(name: str, put: Any = None, get: Any = None) -> Link:
    """The link that `Options.link` names, for one side: the driver gives its ``put`` and ``get``."""
    store = ObjectStoreLink() if put is None else ObjectStoreLink(put, get)
    if name == "inline":
        return InlineLink()
    return store if name == "object_store" else BySize(InlineLink(), store)


def _node() -> str:
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


@ray.remote(max_restarts=0, max_task_retries=0)
class ReplicaActor(Door):
    """The door as a Ray actor.

    Args:
        device: ``"cpu"`` or ``"gpu"``. A GPU that Ray merely counts, on a machine without CUDA, is a CPU.
        link: Name of the link for answers.
        threads: Torch's threads on a CPU, None leaves them.
        index: Which replica this is, for its name in the dashboard.
    """

    def __init__(self, device: str, link: str, threads: int | None, index: int) -> None:
        place = "cuda:0" if device == "gpu" and torch.cuda.is_available() else "cpu"
        super().__init__(place, link_for(link), threads if place == "cpu" else None)
        self._index = index

    def __repr__(self) -> str:
        return f"Replica({self._index}@{self._device})"

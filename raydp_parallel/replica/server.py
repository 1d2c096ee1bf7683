"""A replica without Ray: requests in, answers out."""

from __future__ import annotations

import threading
from typing import Any

import torch

from raydp_parallel.replica import sync_batch_norm
from raydp_parallel.replica.replica import Replica
from raydp_parallel.wire import trial
from raydp_parallel.wire.group import Exchange
from raydp_parallel.wire.messages import (
    Answer,
    BackwardRequest,
    ExchangeRequest,
    Forget,
    ForwardRequest,
)


class ReplicaServer:
    """Answers the requests of a driver, one after the other."""

    def __init__(self, device: torch.device, index: int) -> None:
        self.index = index
        self._replica = Replica(device, self._get, self._exchange)
        self._delivered: dict[int, Any] = {}
        self._delivery = threading.Condition()
        self._groups: dict[str, Exchange] = {}

    def answer(self, request: Any) -> Answer:
        """Do what a request asks for."""
        if isinstance(request, ForwardRequest):
            return self._replica.forward(request)
        if isinstance(request, BackwardRequest):
            return self._replica.backward(request)
        if isinstance(request, Forget):
            self._replica.forget(request.forget)
            return Answer(value=(len(self._replica.models), len(self._replica.graphs)))
        return self._replica.train(request)

    def settle(self) -> None:
        """Tidy up, once the answer is away."""
        self._replica.settle()

    def deliver(self, number: int, value: Any) -> None:
        """Take an object of Ray's store that an argument stands for."""
        with self._delivery:
            self._delivered[number] = value
            self._delivery.notify_all()

    def _get(self, number: int) -> Any:
        with self._delivery:
            self._delivery.wait_for(lambda: number in self._delivered)
            found = self._delivered.pop(number)
        if isinstance(found, BaseException):
            raise found
        return found

    def _exchange(self, request: ExchangeRequest) -> Exchange:
        if request.name not in self._groups:
            for name, group in [*self._groups.items()]:
                if not group.exists():
                    self._groups.pop(name).close()
            made = self._groups[request.name] = Exchange(request, self._replica.device)
            if request.nccl:
                with sync_batch_norm.taking_part(made, layers=False):
                    trial.try_group(made, self._replica.device)
        return self._groups[request.name]

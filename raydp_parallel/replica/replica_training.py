"""The optimizer of one model in a replica, and the parameters that it trains.

It follows the driver's record, entry by entry, each once. So all replicas that have made the same
entries hold the same bits, and a replica that joins later begins with what another one has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.state.optimizer_state import pack_state, put_state
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import (
    TrainingNews,
    TrainingSnapshot,
    TrainingStart,
    TrainingStep,
)


class _SharedAttachments(Attachments):
    """Attachments that other replicas read too, so that nothing is written to where it lies."""

    def take(self, packet: Attachment) -> MemoryRange | None:
        return None


class ReplicaTraining:
    """An optimizer, and the parameters that it trains.

    Args:
        device: Their device.

    Attributes:
        number: The last entry of the driver's record that was made; 0 before the first.
    """

    def __init__(self, device: torch.device) -> None:
        self.number = 0
        self._device = device
        self._optimizer: Any = None
        self._slots: Sequence[int] = ()

    def follow(self, replica_module: ReplicaModule, news: TrainingNews | None) -> None:
        """Give the parameters' contents to the tensors that the module has now, if they are
        others: its structure was sent anew.
        """
        if not self.number or (news is not None and news.anew):
            return  # a start follows, with all contents
        now = replica_module.tensors()
        replica_module.own(self._slots)
        for group, at, slot in self._places():
            old, new = group["params"][at], now[slot]
            if new is not old:
                with torch.no_grad():
                    new.copy_(old)
                group["params"][at] = new
                if old in self._optimizer.state:
                    self._optimizer.state[new] = self._optimizer.state.pop(old)
        replica_module.settle()

    def _places(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """For each parameter its group, its number there, and its slot."""
        slots = iter(self._slots)
        for group in self._optimizer.param_groups:
            for at in range(len(group["params"])):
                yield group, at, next(slots)

    def catch_up(
        self, replica_module: ReplicaModule, news: TrainingNews, attachments: Attachments
    ) -> None:
        """Make the entries that were not made yet."""
        shared = _SharedAttachments(attachments.link, attachments.beside)
        for entry in news.entries:
            if entry.number <= self.number:
                continue
            value, _ = codec.decode(entry.value, shared, self._device)
            if isinstance(value, TrainingStart):
                self._begin(value, replica_module)
            elif entry.number == self.number + 1:
                self._step(value)
            else:
                raise RuntimeError(
                    f"the optimizer of this replica has made {self.number} entries of its record, "
                    f"and was sent number {entry.number}"
                )
            self.number = entry.number
        replica_module.settle()

    def _begin(self, start: TrainingStart, replica_module: ReplicaModule) -> None:
        """Make the optimizer, and fill the parameters."""
        now = replica_module.tensors()
        self._slots = [slot for slots in start.slots for slot in slots]
        groups = [
            {**options, "params": [now[slot] for slot in slots]}
            for options, slots in zip(start.options, start.slots, strict=True)
        ]
        self._optimizer = start.kind(groups, **start.keywords)
        replica_module.own(self._slots)
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), start.weights, strict=True):
                parameter.copy_(value)
        put_state(self._optimizer, start.state, start.common)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _step(self, step: TrainingStep) -> None:
        for group, options in zip(self._optimizer.param_groups, step.options, strict=True):
            group.update(options)
        parameters = self._parameters()
        threads = torch.get_num_threads()
        devices.use_threads(self._device, step.threads)
        try:
            for parameter, grad in zip(parameters, step.grads, strict=True):
                parameter.grad = grad
            with torch.inference_mode(False), torch.enable_grad():
                self._optimizer.step()
        finally:
            # Backward adds up gradients in the leaves.
            for parameter in parameters:
                parameter.grad = None
            devices.use_threads(self._device, threads)

    def snapshot(self) -> TrainingSnapshot:
        """The parameters and the optimizer's state of now."""
        weights = tuple([parameter.detach() for parameter in self._parameters()])
        return TrainingSnapshot(weights, *pack_state(self._optimizer))

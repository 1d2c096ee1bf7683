"""The replica's side of training where the weights are: gradients that stay, their sums, and the
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices import threads
from raydp_parallel.replica import engine
from raydp_parallel.replica.module import ReplicaModule
from raydp_parallel.wire.codec import Parcel, parcel
from raydp_parallel.wire.group import Exchange, summable
from raydp_parallel.wire.messages import (
    ADDED,
    KEPT,
    ExchangeRequest,
    ResumeRequest,
    SnapshotRequest,
    StepRequest,
)


class Resident:
    """Gradients and optimizers of one model.

    Args:
        module: The model.
    """

    def __init__(self, module: ReplicaModule) -> None:
        self._module = module
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._last: dict[int, Tensor] = {}
        self._runs: dict[torch.dtype, Tensor] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, list[list[int]]]] = {}

    # Gradients.

    def begin(self, chunk: int, slots: Sequence[int | None], codes: Sequence[int]) -> None:
        """Drop gradients of a chunk that begin anew, before there is memory for the new ones."""
        kept = self._kept.setdefault(chunk, {})
        for slot, code in zip(slots, codes, strict=True):
            if code == KEPT and slot is not None:
                kept.pop(slot, None)

    def keep(
        self,
        chunk: int,
        slots: Sequence[int | None],
        codes: Sequence[int],
        grads: list[Tensor | None],
        shared: bool,
    ) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """Keep gradients of a chunk; returns those that the driver gets, and which were kept.

        Args:
            chunk: The number of the chunk.
            slots: Whose gradients they are; None for inputs.
            codes: The fate of each.
            grads: The gradients.
            shared: True if they may share memory with each other.
        """
        kept = self._kept.setdefault(chunk, {})
        sent: list[Tensor | None] = []
        stays = []
        for slot, code, grad in zip(slots, codes, grads, strict=True):
            plain = grad is not None and grad.layout is torch.strided and type(grad) is Tensor
            if code < KEPT or slot is None or grad is None or not plain:
                sent.append(grad)
                stays.append(False)
                continue
            if code == ADDED and slot in kept:
                kept[slot].add_(grad)
            else:
                kept[slot] = grad.detach().clone() if shared else grad.detach()
            sent.append(None)
            stays.append(True)
        return sent, tuple(stays)

    def gradients(self, slots: Sequence[int], chunk: int) -> list[Tensor]:
        """Return gradients that a chunk has kept."""
        return [self._kept[chunk][slot] for slot in slots]

    def _sums(self, request: StepRequest, exchange: Exchange | None) -> dict[int, Tensor]:
        """Sum what chunks have kept, in the order of chunks."""
        found: dict[int, Tensor] = {}
        # In the same order everywhere, as members exchange one after the other.
        for dtype in dict.fromkeys([self._module.tensor(slot).dtype for slot in request.summed]):
            own = [slot for slot in request.summed if self._module.tensor(slot).dtype == dtype]
            members = 1 if exchange is None else exchange.size
            like = [self._module.tensor(slot) for slot in own]
            run, sums = summable(like, members, self._runs.pop(dtype, None))
            self._runs[dtype] = run
            chunks = request.chunks if exchange is None else [exchange.rank]
            rows = [self.gradients(own, chunk) for chunk in chunks if chunk in request.chunks]
            for row in rows[:1]:
                torch._foreach_copy_(sums, row)
            for row in rows[1:]:
                torch._foreach_add_(sums, row)
            if exchange is not None:
                exchange.add(run, request.chunks)
            found.update(zip(own, sums, strict=True))
        return found

    # Steps.

    def step(self, request: StepRequest, join: Callable[[ExchangeRequest], Exchange]) -> Any:
        """Make a step; or return the norm, and keep the sums for the step."""
        optimizer, slots = self._optimizers[request.optimizer]
        rows = [slot for row in slots for slot in row if self._module.has(slot)]
        exchange = None if request.exchange is None else join(request.exchange)
        grads, self._last = self._last, {}
        try:
            if not request.again:
                grads.clear()  # they lie where the new ones will
                grads = self._sums(request, exchange)
        except BaseException:
            if exchange is not None:
                exchange.close()  # the others do not wait for this one
            raise
        if request.scale is not None:
            torch._foreach_mul_([*grads.values()], request.scale.to(self._module.device))
        self._last = grads
        grads = dict(grads)
        for slot, grad in request.given.items():
            like = self._module.tensor(slot)
            grads[slot] = torch.zeros_like(like) if grad is None else grad.detach().clone()
        if request.norm is not None:
            found = [grads[slot] for slot in rows if slot in grads]
            return torch.nn.utils.get_total_norm(found, request.norm)
        self._rebind(optimizer, slots)
        for group, values in zip(optimizer.param_groups, request.values, strict=True):
            for name, value in values.items():
                group[name] = value.clone() if isinstance(value, Tensor) else value
        engine.seed(self._module.device, request.number, 0)
        for slot in rows:
            self._module.tensor(slot).grad = grads.get(slot)
        try:
            optimizer.step()
        finally:
            for slot in rows:
                self._module.tensor(slot).grad = None  # the engine's place
            self._module.stepped(rows)
            self._last = {}
        return None

    def _rebind(self, optimizer: torch.optim.Optimizer, slots: list[list[int]]) -> None:
        """Let an optimizer have the module's parameters of now: another flag made new objects."""
        for group, row in zip(optimizer.param_groups, slots, strict=True):
            for i, slot in enumerate(row):
                old = group["params"][i]
                new = self._module.tensor(slot) if self._module.has(slot) else old
                if old is not new:
                    group["params"][i] = new
                    if old in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(old)

    # Coming and going.

    def resume(self, request: ResumeRequest) -> None:
        """Make the optimizers; the weights have come with the state."""
        if self._module.device.type == "cpu":
            threads.return_large_blocks()
        self._module.stepped(request.trained)
        value = request.optimizers
        made = {}
        loaded = value.load([t.detach().clone() for t in value.tensors])
        for number, (kind, keywords, groups, state) in loaded.items():
            rows = [group["params"] for group in groups]
            for group in groups:
                if not (group.get("capturable") or group.get("fused")):  # as torch's own loading
                    for slot in group["params"]:
                        if isinstance(state.get(slot, {}).get("step"), Tensor):
                            state[slot]["step"] = state[slot]["step"].cpu()
                group["params"] = [self._module.tensor(slot) for slot in group["params"]]
            optimizer = kind(groups, **keywords)
            for slot, values in state.items():
                optimizer.state[self._module.tensor(slot)] = values
            made[number] = optimizer, rows
        self._optimizers = made

    def snapshot(self, request: SnapshotRequest) -> Parcel:
        """Give the weights, and each optimizer's groups and state by slot."""
        weights: dict[int, Tensor] = {}
        states: dict[int, Any] = {}
        for number, (optimizer, rows) in self._optimizers.items():
            self._rebind(optimizer, rows)
            slots = [slot for row in rows for slot in row if self._module.has(slot)]
            if request.weights:
                weights.update((slot, self._module.tensor(slot).detach()) for slot in slots)
            if request.optimizers:
                groups = []
                for group in optimizer.param_groups:
                    groups.append({k: v for k, v in group.items() if k != "params"})
                state = {}
                for slot in slots:
                    if self._module.tensor(slot) in optimizer.state:
                        state[slot] = dict(optimizer.state[self._module.tensor(slot)])
                states[number] = groups, state
        return parcel((weights, states), "optimizer")

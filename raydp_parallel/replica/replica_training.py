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
from raydp_parallel.replica import exceptions
from raydp_parallel.replica.kept_sums import KeptSum, TermSum
from raydp_parallel.replica.sliced_optimizer import SlicedOptimizer
from raydp_parallel.state.optimizer_state import options_of, pack_state, put_state
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, ReadAttachments
from raydp_parallel.transport.messages import (
    GradientNorm,
    GradientTerms,
    TrainingClip,
    TrainingHandover,
    TrainingNews,
    TrainingSnapshot,
    TrainingStart,
    TrainingStep,
    TrainingSum,
)


class ReplicaTraining:
    """An optimizer, and the parameters that it trains.

    Args:
        device: Their device.
        sums: The gradients that the replica keeps, by key.

    Attributes:
        number: The last entry of the driver's record that was made; 0 before the first.
        failed: The last one that raised an exception, and counts as made; 0 if none did.
    """

    def __init__(self, device: torch.device, sums: dict[int, Sequence[Tensor | None]]) -> None:
        self.number = self.failed = 0
        self._sums = sums
        self._device = device
        self._optimizer: Any = None
        self._sliced: SlicedOptimizer | None = None
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
                self._join()
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
        """Make the entries that were not made yet.

        One that raises an exception counts as made, as far as it came: in the driver's process a
        step that fails leaves what it had changed, too.
        """
        shared = ReadAttachments(attachments.link, attachments.beside)
        for at, entry in enumerate(news.entries):
            begins = news.anew and at == 0
            if entry.number <= self.number and not begins:
                continue
            if entry.number != self.number + 1 and not begins:
                raise RuntimeError(
                    f"the optimizer of this replica has made {self.number} entries of its record, "
                    f"and was sent number {entry.number}"
                )
            value: Any = None
            try:
                value = entry.value
                if isinstance(value, TrainingSum):
                    chunks = [shared.open(packet) for packet in value.packets]
                    self._sums[value.key] = KeptSum(value.layout, chunks)
                elif isinstance(value, TrainingHandover):
                    value = self._taken_over(value, shared)
                    self._make(value, replica_module)
                else:
                    value, _ = codec.decode(value, shared, self._device)
                    self._make(value, replica_module)
            except BaseException as error:
                if begins:
                    raise
                self.number = self.failed = entry.number
                raise exceptions.OfOptimizer(entry.number, _explained(value)) from error
            finally:
                replica_module.settle()
            self.number = entry.number

    def _taken_over(self, handover: TrainingHandover, attachments: Attachments) -> TrainingStart:
        """A start with what another replica has."""
        start, _ = codec.decode(handover.start, attachments, self._device)
        snapshot = handover.snapshot
        if handover.key is not None:
            (whole,) = self._sums.pop(handover.key)
            assert whole is not None
            snapshot = snapshot._replace(packet=attachments.place(whole.numpy()))
        found, _ = codec.decode(snapshot, attachments, self._device)
        return TrainingStart(start.kind, start.keywords, found[0], start.slots, *found[1:])

    def _make(self, value: Any, replica_module: ReplicaModule) -> None:
        if isinstance(value, TrainingStart):
            self.number = self.failed = 0
            self._begin(value, replica_module)
        elif isinstance(value, TrainingClip):
            self._sums[value.key] = self._clipped(value)
        else:
            self._step(value)

    def _begin(self, start: TrainingStart, replica_module: ReplicaModule) -> None:
        """Make the optimizer, and fill the parameters."""
        now = replica_module.tensors()
        self._slots = [slot for slots in start.slots for slot in slots]
        groups = [
            {**options, "params": [now[slot] for slot in slots]}
            for options, slots in zip(start.options, start.slots, strict=True)
        ]
        self._sliced = None
        self._optimizer = start.kind(groups, **start.keywords)
        for group, options in zip(self._optimizer.param_groups, start.options, strict=True):
            group.update(options)  # a constructor may have set them
        replica_module.own(self._slots)
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), start.weights, strict=True):
                parameter.copy_(value)
        put_state(self._optimizer, start.state, start.common)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _join(self) -> None:
        """Let the optimizer have the state of its parameters as a whole."""
        if self._sliced is not None:
            self._sliced.join()
            self._sliced = None

    def _step(self, step: TrainingStep) -> None:
        for group, options in zip(self._optimizer.param_groups, step.options, strict=True):
            group.update(options)
        parameters = self._parameters()
        terms = [
            TermSum(grad, self._sums) if isinstance(grad, GradientTerms) else grad
            for grad in step.grads
        ]
        if SlicedOptimizer.fits(self._optimizer, terms):
            with torch.inference_mode(False), torch.enable_grad():
                if self._sliced is not None and self._sliced.moved:
                    self._join()
                if self._sliced is None:
                    self._sliced = SlicedOptimizer(self._optimizer)
                try:
                    self._sliced.step(terms)
                except BaseException:
                    self._join()  # so that all slices of a parameter count the same steps
                    raise
            return
        self._join()
        threads = torch.get_num_threads()
        devices.use_threads(self._device, step.threads)
        try:
            for parameter, grad in zip(parameters, terms, strict=True):
                found = grad.whole() if isinstance(grad, TermSum) else grad
                if found is None and grad is not None:
                    found = torch.zeros_like(parameter)
                parameter.grad = found
            with (
                devices.drawing_from(self._device, step.seed),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                self._optimizer.step()
        finally:
            # Backward adds up gradients in the leaves.
            for parameter in parameters:
                parameter.grad = None
            devices.use_threads(self._device, threads)

    def _clipped(self, clip: TrainingClip) -> Sequence[Tensor]:
        """Gradients with a norm, or with values, that are not too large, by parameter."""
        parameters = self._parameters()
        grads = [grad.clone() for grad in self._gradients(clip.grads)]
        chosen = [p for p, one in zip(parameters, clip.grads, strict=True) if one is not None]
        for parameter, grad in zip(chosen, grads, strict=True):
            parameter.grad = grad
        try:
            if clip.value is not None:
                torch.nn.utils.clip_grad_value_(chosen, clip.value)
            elif clip.max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(chosen, clip.max_norm, clip.norm)
        finally:
            for parameter in chosen:
                parameter.grad = None
        left = iter(grads)
        none = torch.empty(0, device=self._device)
        return [none if one is None else next(left) for one in clip.grads]

    def _gradients(self, found: Sequence[GradientTerms | None]) -> list[Tensor]:
        """The gradients of the parameters that have one."""
        grads = []
        for parameter, one in zip(self._parameters(), found, strict=True):
            if one is not None:
                grad = TermSum(one, self._sums).whole()
                grads.append(torch.zeros_like(parameter) if grad is None else grad)
        return [grad.detach() for grad in grads]

    def answer(self, wanted: str | GradientNorm) -> Any:
        """What a `TrainingRequest` asks for."""
        if isinstance(wanted, GradientNorm):
            threads = torch.get_num_threads()
            devices.use_threads(self._device, wanted.threads)
            try:
                grads = self._gradients(wanted.grads)
                return (torch.nn.utils.get_total_norm(grads, wanted.norm_type),)
            finally:
                devices.use_threads(self._device, threads)
        return self._snapshot()

    def _snapshot(self) -> TrainingSnapshot:
        """The options, the parameters and the optimizer's state of now."""
        self._join()
        weights = tuple([parameter.detach() for parameter in self._parameters()])
        options = options_of(self._optimizer.param_groups)
        return TrainingSnapshot(options, weights, *pack_state(self._optimizer))


def _explained(value: Any) -> str:
    """What to say of an entry of the record that raised an exception."""
    what = f"step {value.number}" if isinstance(value, TrainingStep) else "a change of gradients"
    return (
        f"This is {what} of model.optimizer(), which replicas make with the next call to them. No "
        "earlier step is lost. Weights and state of the optimizer that it had changed before it "
        "failed stay changed, as in the driver's process; model.sync() fetches them"
    )

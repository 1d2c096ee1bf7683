"""The optimizer that a program has while replicas make its steps: an instance of the class that it
asked for, of which ``step`` and the state are in the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.optimizer_state import OptimizerState, Values, numbers
from raydp_parallel.driver.resident import Resident


def make(
    executor: Executor,
    module: nn.Module,
    ids: Sequence[DeviceId],
    kind: object,
    params: Iterable[object],
    keywords: Values,
) -> torch.optim.Optimizer:
    """Make an optimizer whose steps the replicas of a model make.

    Raises:
        TypeError: The class is no optimizer, or calls the program within its step.
    """
    how = "model.optimizer(torch.optim.SGD, lr=0.1)"
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = getattr(kind, "__name__", f"a {type(kind).__name__}")
        raise TypeError(f"optimizer: expected a class of torch.optim, as in {how}, got {got}")
    if not hasattr(params, "__iter__"):
        raise TypeError(f"optimizer: expected parameters, got {params!r}; name settings, as {how}")
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError(
            f"optimizer: a step of {kind.__name__} runs the model many times, in your process: "
            f"use {kind.__name__}(model.parameters(), ...)"
        )
    executor.slots(ids)
    master = executor.master(module)
    if master.resident is None:
        master.resident = Resident(executor.dispatcher, master, ids)
    named = {"kind": kind, "number": next(numbers), "__module__": kind.__module__}
    made: Any = type(kind.__name__, (InReplicas, kind), named)
    found: InReplicas = made(params, **keywords)
    found.move_to(master.resident, keywords)
    return found


class InReplicas(OptimizerState):
    """The parts of an optimizer that differ where replicas make the steps."""

    _resident: Resident  # until it has one, torch makes it as an ordinary one

    def move_to(self, resident: Resident, keywords: Values) -> None:
        """Let replicas make the steps from here on."""
        self.keywords, self.known = keywords, {}
        self._step_supports_amp_scaling = False  # a scaler unscales gradients before the step
        self.register_state_dict_pre_hook(lambda _: resident.pull_all())  # groups, too
        self.register_load_state_dict_pre_hook(lambda *_: resident.recall())
        resident.add(self)
        self._resident = resident

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Let the replicas make a step, and go on; its error comes with the next call."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._resident.step(self)
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of its parameters where they are, as
        `torch.nn.utils.clip_grad_norm_` does; returns their norm.
        """
        return self._resident.clip(self, float(max_norm), float(norm_type), error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of its parameters, which stay where they are."""
        return self._resident.clip(self, None, float(norm_type), error=False)

    # Groups and state.

    def add_param_group(self, param_group: Values) -> None:
        """Add a group, which the replicas train from here on."""
        super().add_param_group(param_group)
        if hasattr(self, "_resident") and self.number in self._resident.weights.optimizers:
            self._resident.add(self)  # at once: a parameter may have left by the next step

    @property
    def state(self) -> Any:
        """The state, fetched from the replicas, which get it again: it may be written to."""
        if hasattr(self, "_resident"):
            self._resident.recall()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: object) -> None:
        if hasattr(self, "_resident"):
            self._resident.recall()
        self.__dict__["state"] = value

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Copy and pickle it as the ordinary optimizer that it stands for."""
        return self.kind.__new__, (self.kind,), self.__getstate__()

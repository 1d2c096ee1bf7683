"""`ReplicaOptimizer`: a torch optimizer over the master's parameters that runs in the replicas.

What the user's code does with it, it does in the driver: schedulers and programs edit its groups,
gradients are those of the master's parameters, and `step` records both. The same class runs in each
replica, on the weights that the replica owns (see `training_record`).

Refused, because it would be wrong or not what was meant: classes that evaluate a closure several
times, such as LBFGS; ``differentiable=True``; a second optimizer while the first one lives (use
groups); pickling it (save its ``state_dict()``).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.training_record import Training, trained
from raydp_parallel.state.tracker import ModuleTracker


class ReplicaOptimizer(torch.optim.Optimizer):
    """An optimizer that runs in the replicas of a model; made by `DataParallel.optimizer`.

    Args:
        kind: The optimizer's class.
        params: The parameters, or groups of them.
        keywords: What else it is made with.
        executor: The executor of the replicas.
        tracker: The model.
        sync_every: After how many steps a replica is asked for what the master lacks, which the
            next step takes; None is never.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Iterable[Any],
        keywords: dict[str, Any],
        *,
        executor: Executor,
        tracker: ModuleTracker,
        sync_every: int | None,
    ) -> None:
        _check(kind, keywords, sync_every)
        living = trained([*tracker.module.parameters()])
        if tracker.training is not None and not tracker.training.ended:
            living.append(tracker.training)
        for one in living:
            if one.handle() is not None:
                raise RuntimeError(
                    "optimizer: this module has an optimizer in the replicas already; give one "
                    "optimizer groups of parameters, or close() the other one first, or let go of "
                    "it, also in schedulers"
                )
            one.close()
        self._training: Training | None = None
        self._sync_every = sync_every
        self._inner = kind(params, **keywords)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._training = Training(executor, tracker, self._inner, keywords)
        self._training.handle = weakref.ref(self)

    @property
    def training(self) -> Training:
        """The record of its steps."""
        assert self._training is not None
        return self._training

    @property
    def state(self) -> Any:
        """What the optimizer keeps of each of the master's parameters, with all steps."""
        if self._training is not None:
            self._training.bring_up_to_date()
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._training is not None:
            self._training.bring_up_to_date()
            self._inner.state = value
            self._training.rebase()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, with what steps count in them as of the last sync."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._inner.param_groups = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Record a step with the gradients and options of now; the replicas make it with their next
        call.

        Args:
            closure: Evaluates the model anew and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.training.step()
        if self._sync_every is not None:
            self.training.sync_soon(self._sync_every)
        return loss

    def sync(self) -> None:
        """Bring the master's weights and this optimizer's state up to date with the replicas."""
        self.training.sync()

    def close(self) -> None:
        """Bring the master up to date, and train in the replicas no more. May be called twice."""
        self.training.close()

    def state_dict(self) -> dict[str, Any]:
        """The options and the state, with all steps."""
        self.training.bring_up_to_date()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and state; the replicas get them with their next call."""
        self.training.bring_up_to_date()
        super().load_state_dict(state_dict)
        self.training.rebase()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner.__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the module."""
        if self._training is None:
            return super().add_param_group(param_group)
        self._training.bring_up_to_date()
        super().add_param_group(param_group)
        try:
            self._training.widen()
        except BaseException:
            del self.param_groups[-1]
            raise

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of its parameters, where their gradients lie; returns
        the norm before.
        """
        if self.training.lie_remote():
            norm = self.training.norm(norm_type)
            if error_if_nonfinite and not norm.isfinite():
                raise RuntimeError(
                    f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm}; "
                    "with error_if_nonfinite=False they would be scaled by it"
                )
            self.training.clip(max_norm=float(max_norm), norm=norm)
            return norm
        return torch.nn.utils.clip_grad_norm_(
            self.training.parameters(), max_norm, norm_type, error_if_nonfinite
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """`torch.nn.utils.clip_grad_value_` of its parameters, where their gradients lie."""
        if self.training.lie_remote():
            self.training.clip(value=float(clip_value))
        else:
            torch.nn.utils.clip_grad_value_(self.training.parameters(), clip_value)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all its gradients together, computed where they lie."""
        if self.training.lie_remote():
            return self.training.norm(norm_type)
        grads = [p.grad for p in self.training.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an optimizer in the replicas can be neither pickled nor copied: save its "
            "state_dict(), and load it into another one"
        )


def _check(kind: Any, keywords: dict[str, Any], sync_every: Any) -> None:
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a class of optimizers, such as torch.optim.AdamW, got {kind!r}"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"optimizer: {kind.__name__} evaluates the model inside of its step, which replicas "
            f"cannot do; use {kind.__name__}(model.parameters(), ...) in this process"
        )
    if keywords.get("differentiable"):
        raise ValueError("optimizer: differentiable=True needs the optimizer in this process")
    if sync_every is not None and (
        isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1
    ):
        raise ValueError(f"optimizer: sync_every={sync_every!r}, expected None or at least 1")

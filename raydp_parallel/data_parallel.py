"""`DataParallel` and `data_parallel`: upstream's interface, on the replicas of an executor.

The journey of a batch. The numbers stand in the code as comments, such as `# [7]`.

```
 driver                                                     replica k
 [1]  scatter          batch.scatter_gather                 |
 [2]  what changed     state.tracker.sync                   |
 [3]  request, send    calls.forward, calls.dispatcher ====>| [4] adopt the state, run the chunk
 [5]  verify           state.tracker.verify, meanwhile      | [6] report writes, encode outputs
 [7]  wait for all     calls.dispatcher <===================|
 [8]  apply effects    write-backs, warnings, first failure |
 [9]  attach           calls.autograd: Fork, Join           |
 [10] gather           batch.scatter_gather                 |
 backward: Joins put their gradients aside, then Fork makes
 [11] one trip         calls.autograd, as [3] to [7] <=====>| differentiate the kept graph
 [12] sum              calls.gradients, in chunk order      |
```
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast as record_function

from raydp_parallel import batch, devices, functional
from raydp_parallel.calls import batch_inference, forward
from raydp_parallel.calls.chunk_balance import ChunkBalance
from raydp_parallel.calls.executor import Executor, normalize, shared
from raydp_parallel.calls.remote_gradients import fetch_gradients
from raydp_parallel.calls.replica_optimizer import ReplicaOptimizer
from raydp_parallel.calls.training_record import Training, bring_up_to_date
from raydp_parallel.cluster.backend import DeviceId
from raydp_parallel.devices import ambient_state, process
from raydp_parallel.monitoring.stats import Advice, ExecutorStats
from raydp_parallel.options import Options
from raydp_parallel.replica import loss_call, replica
from raydp_parallel.replica.actor import fetched
from raydp_parallel.replica.loss_call import LossCall
from raydp_parallel.state.shared_objects import SharedObjects
from raydp_parallel.state.tracker import check_devices
from raydp_parallel.transport.messages import Called

T = TypeVar("T", bound=nn.Module)

log = logging.getLogger("raydp_parallel")

_IN_PLACE = (
    "the module runs in place, in this process, because device_ids were left out and there "
    "is no GPU. "
    "device_ids=['cpu', 'cpu'] makes two CPU replicas"
)
_ABSENT_IN_PLACE = ("dim", "executor", "output_device", "src_device_obj")

_rows: ContextVar[tuple[int, ...] | None] = ContextVar("raydp_parallel_rows", default=None)


class DataParallel(nn.DataParallel[T]):
    """Runs a module on the GPUs of a Ray cluster, as `torch.nn.DataParallel` does on those of one
    process.

    Each forward splits the batch, runs one chunk per device, and gathers the outputs; backward sums
    the gradients into ``module``, the master copy, which stays in this process with the loop and
    the optimizer::

        model = DataParallel(net)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

    Args:
        module: The master copy. It may live on the CPU or on one CUDA device.
        device_ids: Logical GPUs of the cluster, the driver's node first; or ``"cpu"`` entries, each
            a CPU replica. None is every GPU of the cluster; if there is none, the module runs in
            place.
        output_device: Where outputs go, by default to the master's device.
        dim: The dimension to split and to gather along.
        executor: The executor that runs the replicas; None is the process's, which all wrappers
            share.
        options: Settings that few programs need.
    """

    _loss: LossCall | None = None

    def __init__(
        self,
        module: T,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        executor: Executor | None = None,
        options: Options | None = None,
    ) -> None:
        # Not upstream's constructor, which would look for the ids among this process's own devices.
        nn.Module.__init__(self)
        _check_types(module, executor, options, dim)
        self.module = module  # type: ignore[misc]  # torch enters it among the children
        if device_ids is None and executor is not None:
            device_ids = executor.device_ids or None
        self._options = options or (executor.options if executor is not None else Options())
        ids = normalize(device_ids, self._options)
        self.device_ids: list[Any] = list(ids)
        if not ids:
            _say_in_place()
            return
        self._holding: list[None] = []
        _check_weights(self._options, ids)
        self.dim = dim
        self._executor = executor
        # from the wrapper that this one is to replace
        self._tracker: Any = self.executor.known(module)
        self._output_device = None if output_device is None else _own_device(output_device, ids)
        if len(ids) == 1 and isinstance(ids[0], int):
            gpu = ids[0] // self._options.replicas_per_gpu
            if gpu < torch.cuda.device_count():
                module.to(torch.device("cuda", gpu))

    @property
    def module(self) -> T:  # type: ignore[override]  # an attribute upstream
        """The master copy, with all steps of `optimizer`."""
        modules = self.__dict__.get("_modules", {})
        if "module" not in modules:  # an object that is being unpickled
            raise AttributeError(f"'{type(self).__name__}' object has no attribute 'module'")
        self._bring_up_to_date()
        return modules["module"]  # type: ignore[no-any-return]

    @property
    def _master(self) -> T:
        """The master copy as it is."""
        return self._modules["module"]  # type: ignore[return-value]  # the constructor's

    @property
    def _training(self) -> Training | None:
        """What trains the model in its replicas."""
        tracker = self.__dict__.get("_tracker")
        return None if tracker is None else tracker.training

    def _bring_up_to_date(self) -> None:
        bring_up_to_date(self._master)

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        sync_every: int | None = None,
        **keywords: Any,
    ) -> ReplicaOptimizer:
        """An optimizer that runs in the replicas, each of which trains its own copy of the
        weights, so that these do not travel.

        ::

            optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
            model(x).sum().backward()
            optimizer.step()
            weights = model.state_dict()

        It has the interface of a torch optimizer over the master's parameters, and its bits.
        ``step()`` is recorded, and made with the next call to the replicas. The master copy is as
        of the last `sync`; what reads it through the wrapper syncs by itself. See
        `calls.replica_optimizer` for what is refused.

        Args:
            kind: The optimizer's class.
            params: Parameters of the module, or groups of them; None is all.
            sync_every: Fetch the weights after so many steps, so that hardly more can be lost if
                all replicas die. That is done behind the next step, which takes what has come.
            keywords: What else the class is made with, such as ``lr``.

        Raises:
            RuntimeError: The module runs in place, or has an optimizer already.
        """
        if not self.device_ids:
            raise RuntimeError(f"optimizer: {_IN_PLACE}; without replicas use {kind.__name__}")
        self._replicate(self.device_ids)
        chosen = self._master.parameters() if params is None else params
        executor, tracker = self.executor, self._tracker
        return ReplicaOptimizer(
            kind, chosen, keywords, executor=executor, tracker=tracker, sync_every=sync_every
        )

    def with_loss(
        self,
        criterion: Callable[..., Any],
        *,
        targets: int | str | Sequence[str] = 1,
        reduction: str | None = None,
        count: Callable[..., Any] | None = None,
    ) -> DataParallel[T]:
        """This model with a loss that is computed where its outputs are, so that these do not
        travel.

        ::

            criterion_model = model.with_loss(torch.nn.MSELoss())
            loss = criterion_model(x, y)
            loss.backward()

        A call takes the model's arguments and then the targets, and gives one number: what the
        criterion gives for the whole batch. For torch's criteria, modules and functions, that is
        known from their settings, with class weights, ``ignore_index`` and what else they divide
        by. What a model of one device, or in place, gives is the criterion's own.

        What is returned is a wrapper of the same module on the same executor, with all that this
        one has: parameters and the names in its `state_dict`, mode, `optimizer`, `capture` and so
        on. `call` and `run` know nothing of the loss.

        Args:
            criterion: Called with the output and the targets of a chunk, in its replica. Tensors
                and parameters that it has go whole to each replica and get gradients, as those of
                `run`; of other objects it changes a copy.
            targets: How many of the last positional arguments are targets; or the names of the
                keyword arguments that are, in the order in which the criterion takes them.
            reduction: What a criterion of your own gives: ``"mean"`` of the rows, ``"sum"``, or
                ``"none"`` for losses that are gathered as outputs are. A loss that compares rows
                with each other is none of these.
            count: For a mean over something else than rows: what it is divided by, as a function
                of the output and the targets.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: It is not known how the losses of chunks become that of the batch, or the
                criterion has parameters of the module.
        """
        found = loss_call.loss_call(criterion, targets, reduction, count)
        self._check_criterion(criterion)
        model = type(self).__new__(type(self))
        nn.Module.__init__(model)
        # Hooks of this wrapper's calls expect outputs.
        of_calls = re.compile("forward.*hooks|backward.*hooks")
        hooks = {name: value for name, value in vars(model).items() if of_calls.search(name)}
        model.__dict__.update(self.__dict__)  # also the modules, so that both have one master
        model.__dict__.update(hooks, _loss=found)
        return model

    def _check_criterion(self, criterion: Any) -> None:
        """Refuse a criterion that has the module in it: each call would send it whole, as it is
        here, where it may lack steps of `optimizer`. What else has parameters of the module, such
        as a closure, is refused when it is sent.
        """
        own = {id(p) for p in self._master.parameters()}
        held = getattr(criterion, "__self__", criterion)
        if isinstance(held, nn.Module) and any(id(p) in own for p in held.parameters()):
            raise ValueError(forward.LOSS_HAS_PARAMETERS)

    def sync(self) -> None:
        """Bring the master copy, and the state of `optimizer`, up to date with the replicas. Does
        nothing if no step was made since. Weights that were edited since the last sync are
        overwritten; all else that syncs raises `StateChanged` then.

        Raises:
            StateLost: No replica is left that has them.
        """
        bring_up_to_date(self._master, overwrite=True)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The master's parameters, with all steps of `optimizer`."""
        self._bring_up_to_date()
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, the master and its submodules, with all steps of `optimizer`."""
        self._bring_up_to_date()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The master, with all steps of `optimizer`."""
        self._bring_up_to_date()
        return super().named_children()

    def train(self, mode: bool = True) -> DataParallel[T]:
        """Set the mode of the wrapper, the master and what a subclass has besides, which takes no
        weights.
        """
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self.training = mode
        for child in self._modules.values():
            if child is not None:
                child.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The master's state, with all steps of `optimizer`."""
        self._bring_up_to_date()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the master's state, after all steps of `optimizer`, which goes on from there."""
        self._bring_up_to_date()
        return super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, which the master has at any time."""
        self._master.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        self._bring_up_to_date()
        # A copy that is made under `no_sync` never leaves that block.
        return {**self.__dict__, "_holding": []} if "_holding" in vars(self) else {**self.__dict__}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._bring_up_to_date()
        fetch_gradients(self._master.parameters())
        return super()._apply(*args, **kwargs)

    @property
    def output_device(self) -> Any:
        """Where outputs go: as upstream, a CUDA index where it is one."""
        if "_output_device" not in self.__dict__:
            raise AttributeError  # `__getattr__` gives the text
        device = self._output_device or _module_device(self._master)
        return device.index if device.type == "cuda" else device

    @output_device.setter
    def output_device(self, value: Any) -> None:
        self._output_device = None if value is None else _own_device(value, self.device_ids)

    @property
    def src_device_obj(self) -> torch.device:  # type: ignore[override]  # an attribute upstream, which is never set
        """Where the master copy lives."""
        if not self.device_ids:
            raise AttributeError  # `__getattr__` gives the text
        return _module_device(self._master)

    @property
    def executor(self) -> Executor:
        """The executor that runs the module's replicas."""
        if not self.device_ids:
            raise AttributeError  # `__getattr__` gives the text
        return self._executor or shared(self._options)

    def stats(self) -> ExecutorStats:
        """What the replicas did for this module, and what limits them; prints as a table. In place
        there are none.
        """
        if not self.device_ids:
            return ExecutorStats(
                replicas=(),
                link="none",
                forwards=0,
                backwards=0,
                state_bytes=0,
                state_sends=0,
                reruns=0,
                advice=(Advice("in place", _IN_PLACE, {}),),
            )
        found, training = self.executor.stats(self._master), self._training
        behind = 0 if training is None else training.behind
        return replace(found, steps_behind=behind) if behind else found

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT_IN_PLACE and self.__dict__.get("device_ids") == []:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}': {_IN_PLACE}"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self._passes(name):
                raise
        return getattr(self.module, name)

    @ambient_state.uncompiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split, run, gather."""
        return self._evaluate(self._loss_of(inputs, kwargs), inputs, kwargs)

    def _loss_of(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """What computes the loss of the whole batch; None without `with_loss`."""
        if self._loss is None:
            return None
        self._loss.divided(inputs, kwargs)  # raises here what is wrong here
        return replace(self._loss, whole=True)

    @ambient_state.uncompiled
    def call(
        self, method: str, /, *args: Any, split: bool = True, gather: bool = True, **kwargs: Any
    ) -> Any:
        """Call a method of the module on the replicas, differentiable as forward is.

        ::

            outputs = model.call("forward", x)

        All else is as in forward: seeds, gradients, what is written in place, errors, deaths. Hooks
        of the module run if the method calls the module, as in one process.

        Args:
            method: The method's name.
            args: Its positional arguments.
            split: Whether the arguments are split into one chunk per device. Otherwise one replica
                gets them as they are; what comes of it is what the plain module gives, as with one
                device.
            gather: Whether the chunks' outputs become one; otherwise they are a list, in this
                process's memory.
            kwargs: Its keyword arguments.

        Raises:
            AttributeError: The module has no such attribute.
            TypeError: It cannot be called.
        """
        if not isinstance(method, str):
            raise TypeError(
                f"call: expected the name of a method, got {type(method).__name__}; run() takes "
                "functions"
            )
        if not callable(getattr(self._master, method)):
            raise TypeError(f"call: {type(self._master).__name__}.{method} is not a method")
        return self._evaluate(method, args, kwargs, split, gather)

    @ambient_state.uncompiled
    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        split: bool = True,
        gather: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call ``function(module, *args, **kwargs)`` on the replicas, differentiable as forward is.

        ::

            likely = model.run(lambda net, x: net(x).softmax(1), x)

        The function is sent by name if it can be imported, otherwise with its code. Tensors that
        it closes over go whole to each replica, and get gradients; of other objects it changes a
        copy.

        Args:
            function: The function; its first argument is the module of a replica.
            args: Its further positional arguments.
            split: As in `call`.
            gather: As in `call`.
            kwargs: Its keyword arguments.

        Raises:
            TypeError: It is no function, or a method of the module in this process.
            ValueError: It has parameters of the module, which `optimizer` trains in the replicas.
        """
        if not callable(function):
            raise TypeError(
                "run: expected a function that takes the module first, got "
                f"{type(function).__name__}; call() takes names of methods"
            )
        if getattr(function, "__self__", None) is self._master:
            raise TypeError(
                f"run: {function.__name__} is bound to the module of this process; call() with its "
                "name runs it on the replicas"
            )
        return self._evaluate(function, args, kwargs, split, gather)

    def _evaluate(
        self,
        called: Called,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        split: bool = True,
        gather: bool = True,
    ) -> Any:
        """Split, run, gather, for what is called."""
        named = isinstance(called, str)
        verb = "call" if named else "forward" if forward.runs_module(called) else "run"
        with record_function(f"raydp_parallel.DataParallel.{verb}"):
            return self._begin(called, inputs, kwargs, split, gather)()

    def _begin(
        self,
        called: Called,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        split: bool = True,
        gather: bool = True,
    ) -> Callable[[], Any]:
        """Split and send, for what is called. Returns what waits and gathers."""
        if not self.device_ids or process.running_replica():
            output = self._in_place(called, inputs, kwargs)
            return lambda: output if gather else [output]
        ambient_state.refuse_transforms()
        self._warn_of_hooks()
        chunks, chunk_kwargs = (inputs,), (kwargs,)
        if split:
            # [1]
            chunks, chunk_kwargs = self.scatter(inputs, kwargs, self.device_ids)
            if not chunks and not chunk_kwargs:
                chunks, chunk_kwargs = ((),), ({},)
        if isinstance(called, LossCall):
            called = called.for_chunks(len(chunks), self.dim)
        if len(self.device_ids) == 1 or not split:
            (alone,) = functional.calling(self._replicate(self.device_ids[:1]), called)
            given = SharedObjects(inputs, kwargs)
            with self._setting():
                one = functional.begin_one(
                    alone, chunks[0], chunk_kwargs[0], self.dim, given=given
                ).outputs
            return lambda: one()[0] if gather else one()
        ids = self.device_ids[: len(chunks)]
        replicas = functional.calling(self.replicate(self._master, ids), called)
        numbers = isinstance(called, LossCall) and called.reduction != "none"
        weighing = self._weighing(chunks, chunk_kwargs, gather and not numbers)
        # Outputs are joined at once where no subclass's method sees them before.
        own = self._has_own("parallel_apply")
        joins = gather and self.dim == 0 and own and self._has_own("gather")
        with self._setting(joins=joins, balance=self._balance(self.device_ids)):
            if own:
                begun = functional.begin(
                    replicas,
                    chunks,
                    chunk_kwargs,
                    ids,
                    dim=self.dim,
                    unused=self._options.unused_grads,
                )
                outputs: Callable[[], list[Any]] = begun.outputs
            else:
                applied = self.parallel_apply(replicas, chunks, chunk_kwargs)
                outputs = lambda: applied  # noqa: E731

        def finish() -> Any:
            found = outputs()
            if not gather:
                return found
            join = called.joined if numbers else self.gather  # type: ignore[union-attr]
            # [10]
            with weighing:
                return join(found, self.output_device)

        return finish

    @ambient_state.uncompiled
    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[Any]:
        """Remote replicas of ``module``, one per device."""
        if module is self._master:
            return self._replicate(device_ids)
        return functional.replicate(
            module, device_ids, not torch.is_grad_enabled(), executor=self.executor
        )

    @ambient_state.uncompiled
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Chunks of the arguments, one per device."""
        return batch.scatter_kwargs(
            inputs,
            kwargs,
            device_ids,
            dim=self.dim,
            unequal=self._warn_of_sizes,
            sizes=self._chunk_sizes(device_ids),
        )

    @ambient_state.uncompiled
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """The outputs of each replica for its chunk."""
        ids = self.device_ids[: len(replicas)]
        return functional.apply(
            replicas, inputs, kwargs, ids, dim=self.dim, unused=self._options.unused_grads
        )

    @ambient_state.uncompiled
    def gather(self, outputs: Any, output_device: Any) -> Any:
        """The outputs of all chunks as one."""
        return batch.gather(
            outputs, output_device, dim=self.dim, scalars=self._options.scalars, weights=_rows.get()
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of forwards made in this block in the replicas, as one does while
        they are accumulated.

        ::

            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()

        The first backward of a forward outside brings the sums. Until then ``.grad`` of a parameter
        stands for what lies in the replicas; whatever uses it, such as a step, fetches it. So the
        values are those without ``no_sync``, but for the order of additions. The driver keeps
        copies of the batches, to compute again what a replica had that dies. In place it does
        nothing.
        """
        holding = self.__dict__.get("_holding", [])
        holding.append(None)
        try:
            yield
        finally:
            holding.pop()

    @contextlib.contextmanager
    def capture(self, *names: str) -> Iterator[Mapping[str, Any]]:
        """Bring outputs of submodules back, which hooks in another process cannot do.

        ::

            with model.capture("encoder.0") as captured:
                out = model(x)
            features = captured["encoder.0"]

        Args:
            names: The submodules, as in ``module.get_submodule``.

        Yields:
            After a forward: for each name the gathered output; a list of them, if the submodule ran
            several times.
        """
        if not names:
            raise ValueError("capture: name at least one submodule")
        for name in names:
            self._master.get_submodule(name)
        wanted = forward.Capture(self._master, names)
        reset = forward.capturing.set(wanted)
        try:
            yield _Captured(self, wanted)
        finally:
            forward.capturing.reset(reset)

    def map(
        self,
        batches: Iterable[Any],
        *,
        in_flight: int | None = None,
        split: bool | None = None,
        ordered: bool = True,
        on_error: batch_inference.OnError = "raise",
        progress: bool = False,
    ) -> Generator[Any, None, None]:
        """Compute many batches without gradients, several at once, and give their outputs.

        ::

            for out in model.map([x, x, x]):
                print(out.shape)

        A batch that is a tuple or a list is called as ``model(*batch)``, a mapping as
        ``model(**batch)``, anything else as ``model(batch)``. The loader and the loop run in the
        caller's thread, while replicas compute. A batch must stay as it is until its output was
        given, and the module while the map runs: batches in flight might see a change. What
        forward writes into the module, such as batch norm's running statistics, is dropped; only
        where the module runs in place does it stay.

        Args:
            batches: The batches; they are loaded one by one.
            in_flight: The most batches that are loaded and have not given their outputs. By
                default two for each replica, or two if batches are split.
            split: Whether each batch is split among the replicas, as in a call of the model; or
                goes to one replica as a whole. None splits if ``in_flight`` is less than the
                number of replicas, because some would have nothing to do.
            ordered: Whether outputs come in the order of batches, or as they end.
            on_error: ``"raise"`` raises what the module raised, in place of the batch's output, and
                ends; ``"skip"`` gives no output for that batch, and warns of all of them at the
                end. What the loader raises is raised after the outputs of the batches before.
            progress: Whether to count batches on standard error.

        Yields:
            One output for each batch. Leaving the loop early waits for the batches in flight.
        """
        count = len(self.device_ids)
        _check_map(in_flight, on_error)
        if split is None:
            split = in_flight is not None and in_flight < count
        whole = count > 0 and not (split and count > 1)
        in_place = not count or process.running_replica()
        if not in_place:
            self._replicate(self.device_ids)  # starts in the caller's thread, which Ctrl-C can end
        ahead = not in_place and not self.executor.options.in_process
        limit = in_flight or (2 * count if whole else 2)
        settings = batch_inference.MapSettings(
            replicas=count if whole else 1,
            in_flight=limit if ahead else 1,
            at_once=min(count, limit) if whole else None,
            place=None if in_place else self._output_device,
            ordered=ordered,
            on_error=on_error,
            progress=progress,
        )
        begin = self._begin_whole if whole and not in_place else self._begin_split
        return batch_inference.outputs(batches, begin, settings)

    def _begin_whole(
        self, at: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Send a batch to one replica. Returns what waits for its output."""
        with self._setting():
            replicas = self._replicate(self.device_ids, detach=True)
            one = functional.calling(replicas, self._loss_of(inputs, kwargs))[at]
            outputs = one._begin(inputs, kwargs).outputs
        return lambda: outputs()[0]

    def _begin_split(
        self, at: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Send a batch to all replicas, or run the module in place. Returns what waits for its
        output.
        """
        with torch.no_grad():
            if self._has_own("forward"):
                finish = self._begin(self._loss_of(inputs, kwargs), inputs, kwargs)
                return torch.no_grad()(finish)
            output = self.forward(*inputs, **kwargs)
            return lambda: output

    @contextlib.contextmanager
    def _setting(self, **more: Any) -> Iterator[None]:
        """Tell the call that is made in the block what the options ask for."""
        per_sample = self._options.rng == "per_sample"
        if per_sample and self.dim != 0:
            raise ValueError(
                f"Options(rng='per_sample'): rows must be along dimension 0, and dim is {self.dim}"
            )
        compiled = self._options.compile
        settings = forward.CallSettings(
            gradient_dtype=self._options.gradient_dtype,
            per_sample=per_sample,
            compiled=None if compiled is False else {} if compiled is True else dict(compiled),
            holds=bool(self._holding),
            means=self._options.buffers == "mean",
            late_buffers=self._options.buffer_updates == "evaluation",
            **more,
        )
        reset = forward.settings.set(settings)
        try:
            yield
        finally:
            forward.settings.reset(reset)

    def _chunk_sizes(self, device_ids: Sequence[Any]) -> batch.ChunkSizes | None:
        """The sizes of chunks, if `torch.chunk` does not give them."""
        options = self._options
        if options.chunk_weights is None and options.least_rows == 1:
            return None
        _check_weights(options, device_ids)
        balance, weights = self._balance(device_ids), options.chunk_weights
        if balance is not None:
            weights = balance.weights()
        assert weights != "auto"
        return functools.partial(
            batch.weighted_sizes, chunks=len(device_ids), weights=weights, least=options.least_rows
        )

    def _balance(self, device_ids: Sequence[Any]) -> ChunkBalance | None:
        """What balances the chunks for these devices, if that is asked for."""
        if self._options.chunk_weights != "auto":
            return None
        balance: ChunkBalance | None = self.__dict__.get("_chunk_balance")
        if balance is None or balance.device_ids != tuple(device_ids):
            balance = self._chunk_balance = ChunkBalance(device_ids)
        return balance

    def _warn_of_sizes(self, sizes: str) -> None:
        """Once: the chunks of such arguments do not belong together, row by row; some programs mean
        that.
        """
        if len(self.device_ids) > 1 and "_warned_of_sizes" not in self.__dict__:
            self._warned_of_sizes = True
            warnings.warn(
                f"arguments have different sizes along dim {self.dim}, and are split into "
                "as many chunks each, as "
                f"torch.nn.DataParallel does: {sizes}. Each replica gets chunks of "
                "different sizes, which may "
                "broadcast; if rows are to belong together, give all arguments one size. "
                "This is said once for "
                "each wrapper.",
                stacklevel=2,
            )

    def _warn_of_hooks(self) -> None:
        """Once: upstream's replicas run the hooks that this process has for all modules."""
        hooks = (
            nn.modules.module._global_forward_pre_hooks
            or nn.modules.module._global_forward_hooks
            or nn.modules.module._global_backward_pre_hooks
            or nn.modules.module._global_backward_hooks
        )
        if (
            hooks
            and "_warned_of_hooks" not in self.__dict__
            and not self.executor.options.in_process
        ):
            self._warned_of_hooks = True
            warnings.warn(
                "hooks for all modules, such as those of register_module_forward_hook, run in this "
                "process only: replicas do not have them, so that what they change or record of "
                "the module is missing. Register hooks on the modules themselves, or use "
                "capture(). This is said once for each wrapper.",
                stacklevel=2,
            )

    def _passes(self, name: str) -> bool:
        """Whether a name that was not found is looked up on the module. This is asked of objects
        without attributes too, by copy and pickle.
        """
        own = vars(self)
        options, children = own.get("_options"), own.get("_modules", {})
        if options is None or not options.passthrough or "module" not in children:
            return False
        # What the wrapper's class has was found, and has raised.
        has_it = any(name in vars(kind) for kind in type(self).__mro__)
        return not has_it and not (name.startswith("__") and name.endswith("__"))

    def _in_place(self, called: Called, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = replica.callee(self._master, called)
        if batch.holds_refs((inputs, kwargs)):
            place = _module_device(self._master)
            inputs, kwargs = batch.resolved((inputs, kwargs), fetched, place)
        wanted = forward.capturing.get()
        if wanted is None or wanted.module is not self._master:
            return function(*inputs, **kwargs)
        with replica.capturing(self._master, wanted.names) as captured:
            output = function(*inputs, **kwargs)
        wanted.parts = [captured]
        return output

    def _replicate(self, device_ids: Sequence[Any], detach: bool = False) -> list[Any]:
        executor = self.executor
        slots = executor.slots(device_ids)
        module, detach = self._master, detach or not torch.is_grad_enabled()
        tracker = executor.tracker(module)
        if tracker is not self._tracker:  # setting an attribute of a module is slow
            self._tracker = tracker
        return [
            functional.RemoteReplica(
                module, device, slot, tracker=tracker, executor=executor, detach=detach
            )
            for device, slot in zip(device_ids, slots, strict=True)
        ]

    def _has_own(self, method: str) -> bool:
        """Whether a method is this class's, and not one of a subclass or of the instance."""
        return getattr(getattr(self, method), "__func__", None) is vars(DataParallel)[method]

    def _weighing(
        self, chunks: Sequence[Any], kwargs: Sequence[Any], gathers: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Tells `gather` how many rows each chunk has, if that weighs; its arguments are
        upstream's. This is asked for before a call, which has effects.

        Raises:
            ValueError: The rows of chunks are not known.
        """
        if self._options.scalars != "weighted_mean":
            return contextlib.nullcontext()
        wanted = forward.capturing.get()
        captures = wanted is not None and wanted.module is self._master
        rows = tuple(batch.rows(a, k, self.dim) for a, k in zip(chunks, kwargs, strict=True))
        if not all(rows) and batch.holds_refs((chunks, kwargs)):
            if gathers or captures:
                raise ValueError(
                    "Options(scalars='weighted_mean'): the rows of chunks are not known, because "
                    "all arguments are ChunkRefs; give one tensor with these rows, such as their "
                    "numbers"
                )
            return contextlib.nullcontext()
        if captures and wanted is not None:
            wanted.rows = rows
        return _weighed_by(rows)


@contextlib.contextmanager
def _weighed_by(rows: tuple[int, ...]) -> Iterator[None]:
    reset = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(reset)


class _Captured(Mapping[str, Any]):
    """What submodules returned in the last forward, gathered when it is read."""

    def __init__(self, model: DataParallel[Any], wanted: forward.Capture) -> None:
        self._model = model
        self._wanted = wanted

    def __getitem__(self, name: str) -> Any:
        if name not in self._wanted.names:
            raise KeyError(name)
        parts = [part[name] for part in self._wanted.parts]
        if not parts:
            raise LookupError(
                f"capture: {name!r} has no output yet; call the model inside the with block"
            )
        if not self._model.device_ids:
            return parts[0][0] if len(parts[0]) == 1 else list(parts[0])
        reset = _rows.set(self._wanted.rows)
        try:
            gathered = [
                self._model.gather(list(outputs), self._model.output_device)
                for outputs in zip(*parts, strict=True)
            ]
        finally:
            _rows.reset(reset)
        return gathered[0] if len(gathered) == 1 else gathered

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted.names)

    def __len__(self) -> int:
        return len(self._wanted.names)


@ambient_state.uncompiled
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Evaluate ``module(*inputs, **module_kwargs)`` in parallel, once. The functional form of
    `DataParallel`.

    Args:
        module: The module.
        inputs: Its arguments as a tuple, or a single argument.
        device_ids: Logical GPUs of the cluster, or ``"cpu"`` entries; None is every GPU.
        output_device: Where the output goes, by default to the module's device.
        dim: The dimension to split and to gather along.
        module_kwargs: Its keyword arguments.
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    ids = normalize(device_ids, Options())
    if not ids:
        raise RuntimeError(
            "device type could not be determined: the cluster has no GPU. Give "
            "device_ids=['cpu', ...] for CPU replicas"
        )
    check_devices(module)
    chunks, kwargs = batch.scatter_kwargs(inputs, module_kwargs, ids, dim)
    if not chunks and not kwargs:
        chunks, kwargs = ((),), ({},)
    replicas = functional.replicate(module, ids[: len(chunks)])
    if len(ids) == 1:
        return functional.begin_one(replicas[0], chunks[0], kwargs[0], dim).outputs()[0]
    outputs = functional.apply(replicas, chunks, kwargs, ids[: len(chunks)], dim=dim)
    place = _module_device(module) if output_device is None else _own_device(output_device, ids)
    return batch.gather(outputs, place, dim)


@functools.cache
def _say_in_place() -> None:
    """Warn once per process: training goes on, perhaps slower than the user meant."""
    log.warning("DataParallel: %s", _IN_PLACE)


def _module_device(module: nn.Module) -> torch.device:
    # The first of `parameters()`, without the five generators that it goes through.
    found = (p for m in module.modules() for p in m._parameters.values() if p is not None)
    tensor: torch.Tensor | None = next(found, None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _own_device(entry: Any, ids: Sequence[DeviceId]) -> torch.device:
    """The driver's device that ``output_device`` names. Ids are logical: without CUDA they name the
    driver's CPU.
    """
    is_index = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
    if is_index and entry not in ids and entry >= torch.cuda.device_count():
        raise ValueError(
            f"output_device={entry} is neither one of device_ids {list(ids)} nor a CUDA device here"
        )
    return devices.output_place(entry)


def _check_weights(options: Options, ids: Sequence[Any]) -> None:
    weights = options.chunk_weights
    if isinstance(weights, tuple) and len(weights) != len(ids):
        raise ValueError(
            f"Options(chunk_weights={weights}): {len(weights)} weights for {len(ids)} devices "
            f"{list(ids)}"
        )


def _check_map(in_flight: Any, on_error: Any) -> None:
    if in_flight is not None and (isinstance(in_flight, bool) or not isinstance(in_flight, int)):
        raise TypeError(f"map: in_flight must be an int or None, got {in_flight!r}")
    if in_flight is not None and in_flight < 1:
        raise ValueError(f"map: in_flight={in_flight}, expected at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"map: on_error={on_error!r}, expected 'raise' or 'skip'")


def _check_types(module: Any, executor: Any, options: Any, dim: Any) -> None:
    for name, value, kind in (
        ("module", module, nn.Module),
        ("executor", executor, Executor),
        ("options", options, Options),
    ):
        if not isinstance(value, kind) and (name == "module" or value is not None):
            raise TypeError(
                f"DataParallel: {name} must be a {kind.__name__}, got {type(value).__name__}"
            )
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"DataParallel: dim must be an int, got {dim!r}")

"""`DataParallel` and `data_parallel`: upstream's interface, on the replicas of an executor.

The journey of a batch. The numbers stand in the code as comments, such as `# [7]`.

```
 driver                                              replica k
 [1]  scatter        batch.splitting                 |
 [2]  look           state.mirror                    |
 [3]  request        driver.forward, dispatcher ====>| [4] run: take the state over, run the chunk
 [5]  verify         state.mirror, meanwhile         | [6] report: writes, outputs
 [7]  wait           driver.dispatcher <=============|
 [8]  effects        write-backs, warnings, failure  | make the next module
 [9]  attach         driver.autograd: Fork, Join     |
 [10] gather         batch.joining                   |
 backward: Joins put their gradients aside, then Fork makes
 [11] one trip       driver.backward <==============>| differentiate the kept graph
 [12] sum            driver.gradients, in chunk order|
```
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from raydp_parallel import batch, functional, hugging_face
from raydp_parallel.batch import Function, Keywords
from raydp_parallel.cluster.placement import Device, device_id, normalize
from raydp_parallel.cluster.ray_api import warn_once
from raydp_parallel.devices import ambient
from raydp_parallel.driver import forward, loss, optimizer
from raydp_parallel.driver.executor import Executor, shared
from raydp_parallel.driver.forward import Called
from raydp_parallel.driver.loss import LossCall
from raydp_parallel.errors import warn
from raydp_parallel.extras import map as mapping
from raydp_parallel.functional import module_device
from raydp_parallel.monitoring.stats import ExecutorStats
from raydp_parallel.options import Options
from raydp_parallel.replica import exceptions, replica
from raydp_parallel.replica.actor import fetched
from raydp_parallel.state.look import check_devices

T = TypeVar("T", bound=nn.Module)

Devices = Sequence[Device]
Inputs = tuple[object, ...]
"""Positional arguments of a call."""


_weights: ContextVar[Sequence[int] | None] = ContextVar("weights", default=None)
"""The rows of the chunks whose outputs are gathered, by which means of them are weighed."""


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

    One device that this process has runs in place, as upstream's: the module itself is called.

    Args:
        module: The master copy. It may live on the CPU or on one CUDA device.
        device_ids: Logical GPUs of the cluster, the driver's node first; or ``"cpu"`` entries, each
            a CPU replica. None is every GPU of the cluster; if there is none, the module runs in
            place.
        output_device: Where outputs go, by default to the master's device.
        dim: The dimension to split and to gather along.
        executor: The executor that runs the replicas, also of one device; None is the process's,
            which all wrappers share.
        options: Settings that few programs need.
    """

    _loss: LossCall | None = None
    _keys_to_ignore_on_save = None  # Hugging Face's Trainer asks for it where it resumes
    state_dict = hugging_face.by_trainer(nn.Module.state_dict)
    load_state_dict = hugging_face.by_trainer(nn.Module.load_state_dict)

    def __init__(
        self,
        module: T,
        device_ids: Devices | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        executor: Executor | None = None,
        options: Options | None = None,
    ) -> None:
        # Not upstream's constructor, which would look for the ids among this process's own devices.
        nn.Module.__init__(self)
        _check_types(dim, module=module, executor=executor, options=options)
        self.module = module
        if device_ids is None and executor is not None:
            device_ids = executor.device_ids or None
        of_executor = executor.options if executor is not None else options or Options()
        self._options = options or of_executor
        of_executor.refuse_others(self._options)
        self.device_ids: list[Any] = [*normalize(device_ids, of_executor)]
        if not self.device_ids:
            warn_once(
                "DataParallel: the module runs in place, in this process, because device_ids were "
                "left out and there is no GPU. device_ids=['cpu', 'cpu'] makes two CPU replicas"
            )
            return
        _check_weights(self._options.chunk_weights, self.device_ids)
        self.dim = dim
        self._executor = executor
        self.output_device = output_device
        place = self._place
        if place is None and module_device(module).type == "meta":
            raise ValueError(
                "DataParallel: the module is on the meta device, where parameters have no values: "
                "call module.to_empty(device='cpu'), and load its weights, before it is wrapped"
            )
        if place is not None and place.type == "cuda":
            module.to(place)

    @property
    def _place(self) -> torch.device | None:
        """The only device, if this process has it and no executor was asked for."""
        if len(self.device_ids) != 1 or self._executor is not None:
            return None
        (entry,) = self.device_ids
        if entry == "cpu":
            return torch.device("cpu")
        gpu = entry // self._options.replicas_per_gpu
        return torch.device("cuda", gpu) if gpu < torch.cuda.device_count() else None

    @property
    def _in_place(self) -> bool:
        return not self.device_ids or self._place is not None or replica.own_process

    @property
    def output_device(self) -> Any:
        """Where outputs go: as upstream, a CUDA index where it is one."""
        device = self._output_device or module_device(self.module, self.device_ids)
        return device.index if device.type == "cuda" else device

    @output_device.setter
    def output_device(self, value: Device | None) -> None:
        if value is not None:
            named = value if value == -1 else device_id(value, "output_device")
            known = (-1, "cpu", *self.device_ids)
            if named not in known and int(named) >= torch.cuda.device_count():
                raise ValueError(
                    f"output_device={value!r} is neither one of device_ids {self.device_ids} nor a "
                    "CUDA device of this process. Leave it out to get outputs where the module is"
                )
            value = batch.output_place(value)  # without CUDA, ids name the driver's CPU
        self._output_device = value

    @property
    def src_device_obj(self) -> torch.device:  # type: ignore[override]  # an attribute upstream, which is never set
        """Where the master copy lives."""
        if not self.device_ids:
            raise AttributeError  # torch's `__getattr__` gives the text
        return module_device(self.module, self.device_ids)

    @property
    def executor(self) -> Executor:
        """The executor that runs the module's replicas."""
        return self._executor or shared(self._options)

    def extra_repr(self) -> str:
        """Say which devices run the module, and whether that is in place."""
        return f"device_ids={self.device_ids}{', in place' if self._in_place else ''}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("_") or not callable(getattr(module, name, None)):
                raise
            raise AttributeError(
                f"{error}: model.call({name!r}, ...) runs it on the replicas, and "
                f"model.module.{name}(...) in this process"
            ) from None

    def stats(self) -> ExecutorStats:
        """Describe the work of the replicas, for all models of the executor; prints as a table. In
        place there are none.
        """
        if self._in_place:
            return ExecutorStats("in place", (), "in place")
        found = self.executor.stats()
        own = self.executor.master(self.module).resident
        return found if own is None else replace(found, steps_behind=own.weights.steps_behind)

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: ParamsT | None = None, **keywords: Any
    ) -> Any:
        """Make an optimizer whose steps are made where the module runs; in place it is torch's own.

        ::

            optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)

        Weights, gradients and the optimizer's state stay in the replicas, and the loop is the
        ordinary one. Whatever uses the weights here fetches them first.

        Args:
            kind: The class, of `torch.optim` or another package.
            params: Its first argument; None is all parameters of the module.
            keywords: Its other arguments.

        Returns:
            An instance of ``kind``. With replicas it has ``clip_grad_norm_(max_norm)`` and
            ``grad_norm()`` besides, which do as torch's functions, where the gradients are.
        """
        params = self.module.parameters() if params is None else params
        if self._in_place:
            return kind(params, **keywords)
        return optimizer.make(self.executor, self.module, self.device_ids, kind, params, keywords)

    @ambient.uncompiled
    def sync(self) -> None:
        """Fetch the weights, and the state of an `optimizer`, that the replicas have stepped, as
        any use of a weight does by itself.
        """
        if not self._in_place:
            trained = self.executor.master(self.module).resident
            if trained is not None:
                trained.pull_all()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are summed with each backward, and their values are right."""
        yield

    # Calls.

    @hugging_face.SignedForward
    @ambient.uncompiled
    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Split, run, gather."""
        return self._evaluate(self._loss, inputs, kwargs, split=True, gather=True)

    @ambient.uncompiled
    def call(
        self,
        method: str,
        /,
        *args: object,
        split: bool = True,
        gather: bool = True,
        **kwargs: object,
    ) -> Any:
        """Call a method of the module on the replicas, differentiable as forward is.

        ::

            outputs = model.call("forward", x)

        Args:
            method: The method's name.
            args: Its positional arguments.
            split: True if the arguments are split into one chunk per device. Otherwise one replica
                gets them as they are.
            gather: True if the chunks' outputs become one; otherwise they are a list.
            kwargs: Its keyword arguments.

        Raises:
            AttributeError: The module has no such attribute.
            TypeError: It cannot be called.
        """
        if not isinstance(method, str):
            raise TypeError(f"call: give the name of a method, got {type(method).__name__}")
        if not callable(getattr(self.module, method)):
            raise TypeError(f"call: {type(self.module).__name__}.{method} is not a method")
        return self._evaluate(method, args, kwargs, split, gather)

    @ambient.uncompiled
    def run(
        self,
        function: Function,
        /,
        *args: object,
        split: bool = True,
        gather: bool = True,
        **kwargs: object,
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
        """
        if not callable(function):
            raise TypeError(
                "run: expected a function that takes the module first, got "
                f"{type(function).__name__}; call() takes names of methods"
            )
        if getattr(function, "__self__", None) is self.module:
            raise TypeError(f"run: {function.__name__} is bound to the module: use call() by name")
        return self._evaluate(function, args, kwargs, split, gather)

    def _evaluate(
        self, called: Called, inputs: Inputs, kwargs: Keywords, split: bool, gather: bool
    ) -> object:
        """Split, run, gather, for what is called."""
        with record_function("raydp_parallel.DataParallel.forward"), exceptions.ShortTraceback():
            if self._in_place:
                output = self._run_in_place(called, inputs, kwargs, split)
                return output if gather else [output]
            if nn.modules.module._has_any_global_hook():
                self._warn_once(
                    "hooks for all modules, such as those of register_module_forward_hook, run in "
                    "this process only: replicas do not have them, so that what they change or "
                    "record of the module is missing. Register hooks on the modules themselves",
                    "_warned_of_hooks",
                )
            called, args, named, join = self._chunks(called, inputs, kwargs, split)
            ids = self.device_ids[: len(args)]
            replicas = self.replicate(self.module, ids)
            if called is not None:
                replicas = [replace(one, _called=called) for one in replicas]
            if gather and self._own("parallel_apply", "gather"):
                with self.executor.replica_set.lock:  # outputs lie in windows until then
                    return join(functional.apply(replicas, args, named, ids, self.dim, split))
            outputs = self.parallel_apply(replicas, args, named)
            return join(outputs) if gather else outputs

    def _chunks(
        self, called: Called, inputs: Inputs, kwargs: Keywords, split: bool
    ) -> tuple[Called, Sequence[Inputs], Sequence[Keywords], Function]:
        """Split the arguments of a call. Returns what is called and its arguments for each chunk,
        and the function that makes one output of the chunks'.
        """
        args, named = [inputs], [kwargs]
        if split:
            args, named = self.scatter(inputs, kwargs, self.device_ids)  # [1] scatter
            args, named = args or [()], named or [{}]
        if isinstance(called, LossCall):
            called.divided(inputs, kwargs)  # raises here what is wrong here
            called = called.for_chunks(len(args), self.dim)
            if called.reduction != "none":
                place = batch.output_place(self.output_device)
                return called, args, named, functools.partial(called.joined, place=place)
        if not split:
            return called, args, named, operator.itemgetter(0)
        rows = [next(batch.sizes(chunk, self.dim), 0) for chunk in zip(args, named, strict=True)]
        scalars, shares = self._options.scalars, hugging_face.shares(named, rows)
        if shares is not None:  # by the Trainer, which wants one number
            scalars, named = "mean", shares
        if scalars == "mean" and not any(rows) and batch.split_by_rule((args, named)):
            raise ValueError(
                "Options(scalars='mean'): the rows of chunks are not known, because no argument is "
                "a tensor that is split: let the module return a loss for each row"
            )

        def join(outputs: Sequence[object]) -> object:
            """Gather. A subclass's method may give other values to this class's."""
            weighed = copy_context()
            weighed.run(_weights.set, None if scalars == "vector" else rows)
            return weighed.run(self.gather, [*outputs], self.output_device)  # [10] gather

        return called, args, named, join

    def _run_in_place(self, called: Called, inputs: Inputs, kwargs: Keywords, split: bool) -> Any:
        """Call the module itself, as upstream does with one device."""
        place = None if replica.own_process else self._place
        if place is not None:
            check_devices(self.module)
            if split:
                args, named = self.scatter(inputs, kwargs, self.device_ids)
                inputs, kwargs = (args or [()])[0], (named or [{}])[0]
            if place.type == "cuda":
                inputs, kwargs = batch.mapped((inputs, kwargs), torch.Tensor, lambda t: t.to(place))
        home = module_device(self.module)
        inputs, kwargs = batch.resolved((inputs, kwargs), fetched, home)
        if isinstance(called, LossCall):
            called = replace(called, whole=True, reduction="none")
        return replica.called_on(self.module, called)(*inputs, **kwargs)

    @ambient.uncompiled
    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[Any]:
        """Return remote replicas of ``module``, one per device."""
        how = not torch.is_grad_enabled(), self.executor, self._options.unused_grads
        return [*functional.replicas_of(module, device_ids, *how)]

    @ambient.uncompiled
    def scatter(self, inputs: Inputs, kwargs: Keywords | None, device_ids: Devices) -> Any:
        """Split the arguments into chunks, one per device."""
        weights = self._options.chunk_weights
        _check_weights(weights, device_ids)
        return batch.scatter_kwargs(
            inputs, kwargs, device_ids, self.dim, warn=self._warn_once, weights=weights
        )

    @ambient.uncompiled
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[object], kwargs: Sequence[Keywords] | None
    ) -> list[Any]:
        """Return the outputs of each replica for its chunk."""
        ids = self.device_ids[: len(replicas)]
        return functional.apply(replicas, inputs, kwargs, ids, self.dim)

    @ambient.uncompiled
    def gather(self, outputs: Iterable[object], output_device: Device) -> Any:
        """Make one output of all chunks'."""
        rows = _weights.get()
        scalars = self._options.scalars if rows is None else "mean"
        return batch.gather(outputs, output_device, self.dim, scalars=scalars, weights=rows)

    # Beyond upstream.

    def with_loss(
        self,
        criterion: Function,
        *,
        targets: int | str | Sequence[str] = 1,
        reduction: str | None = None,
        count: Function | None = None,
    ) -> DataParallel[T]:
        """Return this model with a loss that is computed where its outputs are, so that these do
        not travel.

        ::

            criterion_model = model.with_loss(torch.nn.MSELoss())
            loss = criterion_model(x, y)
            loss.backward()

        A call takes the model's arguments and then the targets, and gives one number: what the
        criterion gives for the whole batch. For torch's criteria that is known from their settings,
        with class weights, ``ignore_index`` and whatever else they divide by.

        Args:
            criterion: Called with the output and the targets of a chunk, in its replica. Tensors
                and parameters that it has go whole to each replica and get gradients.
            targets: How many of the last positional arguments are targets; or the names of the
                keyword arguments that are.
            reduction: The result of a criterion of your own: ``"mean"`` of the rows, ``"sum"``, or
                ``"none"`` for losses that are gathered as outputs are. A loss that compares rows
                with each other is none of these.
            count: For a mean over something else than rows: what it is divided by, as a function
                of the output and the targets.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: It is not known how the losses of chunks become that of the batch, or the
                criterion has parameters of the module.
        """
        found = loss.loss_call(criterion, targets, reduction, count)
        held = getattr(criterion, "__self__", criterion)
        if isinstance(held, nn.Module):
            forward.refuse_own_parameters(self.module, [*held.parameters()])
        model = type(self).__new__(type(self))
        nn.Module.__init__(model)
        # Also the modules, so that both have one master. Hooks of calls expect outputs.
        of_calls = "_forward_", "_backward_"
        same = {name: value for name, value in vars(self).items() if not name.startswith(of_calls)}
        vars(model).update(same, _loss=found)
        return model

    def map(
        self,
        batches: Iterable[object],
        *,
        in_flight: int | None = None,
        split: bool = False,
        on_error: mapping.OnError = "raise",
    ) -> Generator[Any, None, None]:
        """Compute many batches without gradients, one on each replica, and yield their outputs in
        order.

        ::

            for out in model.map([x, x, x]):
                print(out.shape)

        A batch that is a tuple or a list is called as ``model(*batch)``, a mapping as
        ``model(**batch)``, anything else as ``model(batch)``; a model that takes a dict gets it as
        ``(batch,)``. A batch, and the module, must stay as they are until the output was given.
        Writes of forward into the module's replica are dropped.

        Args:
            batches: The batches; they are loaded one by one.
            in_flight: The most batches that are loaded and have not given their outputs; one for
                each replica by default.
            split: True if each batch is split among the replicas, as in a call of the model.
            on_error: ``"raise"`` raises what the module raised, in place of the batch's output, and
                ends; ``"skip"`` gives no output for that batch, and warns of all at the end.
        """
        mapping.check(in_flight, on_error)
        if not (self._in_place or self._own("forward", "replicate", "parallel_apply")):
            raise TypeError(
                f"map: {type(self).__name__} changes forward, replicate or parallel_apply, and "
                "batches are given to replicas past these: call the model for each batch"
            )
        most = 1 if split or self._in_place else len(self.device_ids)
        if not self._in_place:
            self.executor.slots(self.device_ids)  # starts in the caller's thread

        def begin(at: int, inputs: Inputs, kwargs: Keywords) -> Callable[[], object]:
            """Send a batch to one replica, or its chunks to all; none of them writes back."""
            if self._in_place:
                return functools.partial(torch.no_grad()(self.forward), *inputs, **kwargs)
            first = 0 if split else at % len(self.device_ids)
            with torch.no_grad():
                called, args, named, join = self._chunks(self._loss, inputs, kwargs, split)
                replicas = self.replicate(self.module, self.device_ids)
                chunks = []
                for i, (a, k) in enumerate(zip(args, named, strict=True), first):
                    replica = replace(replicas[i], _called=called, _writes=False)
                    chunks.append(replica.chunk(a, k, self.dim, i if split else None))
                flight = forward.start(chunks, at_once=len(self.device_ids))
            return exceptions.ShortTraceback()(lambda: join(flight.finish()))

        return mapping.outputs(batches, begin, min(most, in_flight or most), on_error)

    def _own(self, *methods: str) -> bool:
        """Tell if methods are this class's, and not those of a subclass or of the instance."""
        own = vars(DataParallel)
        return all([inspect.getattr_static(self, name) is own[name] for name in methods])

    def _warn_once(self, text: str, name: str) -> None:
        if name not in self.__dict__:
            self.__dict__[name] = True
            warn(f"{text}. This is said once for each wrapper.")


@ambient.uncompiled
def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: Devices | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Keywords | None = None,
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
        raise RuntimeError("device type could not be determined: no GPU. Give ['cpu', ...]")
    # One device does not move the module: where it does not lie already, a replica runs it.
    stays = len(ids) > 1 or ids == ["cpu"] or ids == [module_device(module).index]
    executor = None if stays else shared(Options())
    model = DataParallel(module, ids, output_device, dim, executor=executor)
    return model(*inputs, **(module_kwargs or {}))


def _check_weights(weights: Sequence[float] | None, ids: Sequence[object]) -> None:
    if weights is not None and len(weights) != len(ids):
        raise ValueError(
            f"chunk_weights: {len(weights)} weights for {len(ids)} devices {list(ids)}"
        )


def _check_types(dim: object, **others: object) -> None:
    kinds = {"module": nn.Module, "executor": Executor, "options": Options}
    for name, value in others.items():
        if not isinstance(value, kinds[name]) and (name == "module" or value is not None):
            kind = f"{'a' if name == 'module' else 'an'} {kinds[name].__name__}"
            raise TypeError(f"DataParallel: {name} must be {kind}, got {type(value).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"DataParallel: dim must be an int, got {dim!r}")

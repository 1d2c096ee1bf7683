"""The caller's ambient torch state, captured in the driver and entered in a replica (row A8)."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_AUTOCAST_DEVICES = ("cpu", "cuda")

_NAMES = {dtype: str(dtype)[6:] for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class CallContext(NamedTuple):
    """State that torch code may depend on besides its arguments."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, str], ...]  # for each device type: enabled, dtype's name
    autocast_cache: bool
    anomaly: tuple[bool, bool]  # on, checks for NaN
    flags: tuple[Any, ...]  # process-wide settings, see _FLAGS


class _Flag(NamedTuple):
    """One process-wide setting: how to read it, and how to set it."""

    read: Any
    write: Any


_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that torch reads before each matrix product if algorithms have to be
deterministic.
"""

VARIABLES = (
    _WORKSPACES,
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables of the environment that control how a process computes on a GPU. A replica inherits
those of its node, which may differ from the driver's, so it is given the driver's."""


def environment() -> dict[str, str]:
    """The variables among `VARIABLES`, and NCCL's, that are set in this process, for a replica that
    starts.
    """
    chosen = os.environ.items()
    return {name: one for name, one in chosen if name in VARIABLES or name.startswith("NCCL_")}


_LACKING = _Flag(lambda: None, lambda value: None)
"""Stands for a setting that this torch does not have."""


def _deterministic() -> tuple[bool, bool, str]:
    on = torch.are_deterministic_algorithms_enabled()
    return (
        on,
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get(_WORKSPACES, "") if on else "",
    )


def _set_deterministic(value: tuple[bool, bool, str]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    if value[2]:
        os.environ[_WORKSPACES] = value[2]


def _older(read: Callable[[], Any], write: Callable[[Any], None]) -> _Flag:
    """A precision setting of torch's older interface, which raises when it is read after the newer
    interface was used.
    """

    def read_if_told() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return _Flag(read_if_told, write)


def _functions(read: str, write: str) -> _Flag:
    """A setting of `torch.backends.cuda` by two functions."""
    cuda = torch.backends.cuda
    return _Flag(getattr(cuda, read), getattr(cuda, write)) if hasattr(cuda, read) else _LACKING


def _property(owner: Any, name: str) -> _Flag:
    """A setting that is an attribute."""
    if not hasattr(owner, name):
        return _LACKING
    return _Flag(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))


def _reduction(name: str) -> _Flag:
    """A setting of `torch.backends.cuda.matmul`, which newer versions of torch split in two."""
    matmul, second = torch.backends.cuda.matmul, f"{name}_split_k"
    if not hasattr(matmul, second):
        return _property(matmul, name)
    return _Flag(
        lambda: (getattr(matmul, name), getattr(matmul, second)),
        functools.partial(setattr, matmul, name),
    )


def _precisions() -> list[_Flag]:
    """The precision of float32 products in torch's newer interface, which the older interface does
    not report.
    """
    read: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return []
    write: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
    # The general setting comes first: an operation without a setting of its own follows it.
    settings = [("generic", "all")]
    for backend in ("cuda", "mkldnn"):
        settings += [(backend, op) for op in ("all", "matmul", "conv", "rnn")]
    partial = functools.partial
    return [_Flag(partial(read, *which), partial(write, *which)) for which in settings]


_FLAGS = (
    _Flag(
        lambda: _NAMES[torch.get_default_dtype()],
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    _Flag(_deterministic, _set_deterministic),
    _older(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _property(torch.backends.cudnn, "enabled"),
    _property(torch.backends.cudnn, "benchmark"),
    _property(torch.backends.cudnn, "deterministic"),
    _older(
        lambda: torch.backends.cudnn.allow_tf32,
        functools.partial(setattr, torch.backends.cudnn, "allow_tf32"),
    ),
    _functions("flash_sdp_enabled", "enable_flash_sdp"),
    _functions("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    _functions("math_sdp_enabled", "enable_math_sdp"),
    _functions("cudnn_sdp_enabled", "enable_cudnn_sdp"),
    _reduction("allow_fp16_reduced_precision_reduction"),
    _reduction("allow_bf16_reduced_precision_reduction"),
    _property(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    *_precisions(),  # last, because the older settings change these as well
)

_READS = [flag.read for flag in _FLAGS]


def capture() -> CallContext:
    """The caller's state, now."""
    autocast = [
        (torch.is_autocast_enabled(device), _NAMES[torch.get_autocast_dtype(device)])
        for device in _AUTOCAST_DEVICES
    ]
    return CallContext(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=tuple(autocast),
        autocast_cache=torch.is_autocast_cache_enabled(),
        anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        flags=_flags(),
    )


def enter(context: CallContext) -> contextlib.AbstractContextManager[Any]:
    """Run a block under the caller's state. Process-wide settings stay set, because the next call
    most often has the same.
    """
    if _flags() != context.flags:
        for flag, value in zip(_FLAGS, context.flags, strict=True):
            if value is not None and flag.read() != value:
                flag.write(value)
    wanted = [enabled for enabled, _ in context.autocast]
    current = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    if not (True in wanted or True in current or context.inference or context.anomaly[0]):
        return torch.set_grad_enabled(context.grad)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(context.inference))
        stack.enter_context(torch.set_grad_enabled(context.grad and not context.inference))
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, context.autocast, strict=True):
            kind, cache = getattr(torch, dtype), context.autocast_cache
            stack.enter_context(torch.autocast(device, kind, enabled, cache_enabled=cache))
        if context.anomaly[0]:
            stack.enter_context(
                torch.autograd.set_detect_anomaly(True, check_nan=context.anomaly[1])
            )
        return stack.pop_all()


def _flags() -> tuple[Any, ...]:
    return tuple([read() for read in _READS])


_NO_TRANSFORMS = (
    "transforms of torch.func (vmap, grad, jacrev, jvp for forward-mode derivatives) and batched "
    "gradients (is_grads_batched=True, vectorize=True) do not reach into replicas, nor into those "
    "of torch.nn.DataParallel: use torch.autograd without them, such as "
    "torch.autograd.functional.jacobian or jvp, or the module itself"
)


_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def refuse_transforms() -> None:
    """Raise an error inside of a transform of `torch.func`: the values that it computes with have
    no bytes that could be sent, and what torch says of that names neither cause nor way out.
    """
    if _transforms() is not None:
        raise NotImplementedError(_NO_TRANSFORMS)


def refuse_batches(error: RuntimeError) -> None:
    """Raise the same if an error says that gradients are batched: torch tells only as their bytes
    are read.
    """
    if re.search("data pointer|inside of vmap|Batching rule", str(error)):
        raise NotImplementedError(_NO_TRANSFORMS) from error


def uncompiled(function: F) -> F:
    """Make a function a graph break of `torch.compile`, without effect on what it calls, as
    `torch.compiler.disable` does.

    `torch.compiler.disable` imports the compiler, which takes seconds; here the same is set without
    that import.
    """
    try:
        eval_frame = torch._C._dynamo.eval_frame
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):  # another torch: better a slow import than none
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function

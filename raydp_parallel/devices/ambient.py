"""The caller's ambient torch state, captured in the driver and entered in a replica (row A8)."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])

_AUTOCAST_DEVICES = ("cpu", "cuda")


class CallContext(NamedTuple):
    """State that torch code may depend on besides its arguments."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # for each device type: enabled, dtype
    autocast_cache: bool
    anomaly: tuple[bool, bool]  # on, checks for NaN
    flags: tuple[object, ...]  # process-wide settings, see _FLAGS


_Flag = tuple[Callable[[], Any], Callable[[Any], object]]
"""One process-wide setting: how to read it, and how to set it."""

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


def _older(read: Callable[[], object], write: Callable[[Any], object]) -> _Flag:
    """A precision setting of torch's older interface, which raises when it is read after the newer
    interface was used.
    """

    def read_if_told() -> object:
        try:
            return read()
        except RuntimeError:
            return None

    return read_if_told, write


def _attribute(path: str) -> _Flag:
    """A setting of `torch.backends`, which reads as None if this torch does not have it."""
    *parents, name = path.split(".")
    owner: Any = torch.backends
    for parent in parents:
        owner = getattr(owner, parent, None)
    return partial(getattr, owner, name, None), partial(setattr, owner, name)


def _attention(kind: str) -> _Flag:
    """A setting of `torch.backends.cuda` by two functions."""
    cuda = torch.backends.cuda
    read = getattr(cuda, f"{kind}_sdp_enabled", lambda: None)
    return read, getattr(cuda, f"enable_{kind}_sdp", lambda value: None)


def _reduction(name: str) -> _Flag:
    """A setting of `torch.backends.cuda.matmul`, which newer versions of torch split in two."""
    matmul, second = torch.backends.cuda.matmul, f"{name}_split_k"
    if not hasattr(matmul, second):
        return _attribute(f"cuda.matmul.{name}")
    both = operator.attrgetter(name, second)
    return partial(both, matmul), partial(setattr, matmul, name)


_PRECISIONS = (
    *("fp32_precision", "cudnn.fp32_precision"),
    *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)
"""The precision of float32 products in torch's newer interface, which the older one does not
report. The general setting comes first: an operation without a setting of its own follows it. That
of mkldnn as a whole is left out, as torch sets the general one in its place.
"""

_FLAGS: tuple[_Flag, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        torch.get_deterministic_debug_mode,  # 0 off, 1 warns, 2 raises
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    (partial(os.environ.get, _WORKSPACES), partial(os.environ.__setitem__, _WORKSPACES)),
    _older(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *map(_attribute, ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic")),
    _older(*_attribute("cudnn.allow_tf32")),
    *map(_attention, ("flash", "mem_efficient", "math", "cudnn")),
    _reduction("allow_fp16_reduced_precision_reduction"),
    _reduction("allow_bf16_reduced_precision_reduction"),
    _attribute("cuda.matmul.allow_fp16_accumulation"),
    *map(_attribute, _PRECISIONS),  # last, because the older settings change these as well
)

_READS = [read for read, _ in _FLAGS]


def capture() -> CallContext:
    """The caller's state, now."""
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ]
    return CallContext(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=tuple(autocast),
        autocast_cache=torch.is_autocast_cache_enabled(),
        anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        flags=tuple([read() for read in _READS]),
    )


def enter(context: CallContext) -> contextlib.AbstractContextManager[object]:
    """Run a block under the caller's state. Process-wide settings stay set, because the next call
    most often has the same.
    """
    if tuple([read() for read in _READS]) != context.flags:
        for (read, write), value in zip(_FLAGS, context.flags, strict=True):
            if value is not None and read() != value:
                write(value)
    wanted = [enabled for enabled, _ in context.autocast]
    current = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    if not (True in wanted or True in current or context.inference or context.anomaly[0]):
        return torch.set_grad_enabled(context.grad)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(context.inference))
        stack.enter_context(torch.set_grad_enabled(context.grad and not context.inference))
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, context.autocast, strict=True):
            cache = context.autocast_cache
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=cache))
        if context.anomaly[0]:
            stack.enter_context(
                torch.autograd.set_detect_anomaly(True, check_nan=context.anomaly[1])
            )
        return stack.pop_all()


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


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the same for derivatives of forward mode, which would be lost in silence."""
    duals = torch.autograd.forward_ad
    if duals._current_level >= 0 and any(duals.unpack_dual(t).tangent is not None for t in tensors):
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

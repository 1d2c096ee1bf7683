"""The caller's ambient torch state, captured in the driver and entered in a replica (row A8)."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter, setitem
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils import parametrize

F = TypeVar("F", bound=Callable[..., object])

_DEVICES = ("cpu", "cuda")  # that have an autocast


class CallContext(NamedTuple):
    """State that torch code may depend on besides its arguments."""

    grad: bool  # outputs may require gradients
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # for each device type: enabled, dtype
    autocast_cache: bool
    anomaly: tuple[bool, bool]  # on, checks for NaN
    cached: bool  # each chunk computes a parametrized tensor once
    flags: tuple[object, ...]  # process-wide settings, see FLAGS


_Flag = tuple[Callable[[], object], Callable[[Any], object]]
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
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables of the environment that control how a process computes. A replica inherits those of its
node, which may differ from the driver's, so it is given the driver's."""


def environment() -> dict[str, str]:
    """The variables among `VARIABLES`, and NCCL's, that are set in this process, for a replica that
    starts. Sets of strings have one order in all of them.
    """
    chosen = ({"PYTHONHASHSEED": "0"} | os.environ).items()
    return {name: one for name, one in chosen if name in VARIABLES or name.startswith("NCCL_")}


def _setting(path: str, reader: str = "") -> _Flag:
    """A setting of torch: an attribute, or a function that sets it, beside the one that reads it.
    It reads as None if this torch does not have it; and some of the older interface for precisions
    raise, where the newer one was used. Newer versions have split some of one matmul in two, which
    are read apart and set as one.
    """
    *parents, name = path.split(".")
    owner: object = torch
    for parent in parents:
        owner = getattr(owner, parent, None)
    told: Callable[[], object] = partial(getattr, owner, name, None)
    write: Callable[[object], object] = partial(setattr, owner, name)
    if hasattr(owner, f"{name}_split_k"):
        told = partial(attrgetter(name, f"{name}_split_k"), owner)
    if reader:
        told, write = getattr(owner, reader, lambda: None), getattr(owner, name, lambda value: None)

    def read() -> object:
        try:
            return told()
        except RuntimeError:
            return None

    return read, write


_SETTINGS = (
    "set_default_dtype get_default_dtype",
    "set_warn_always is_warn_always_enabled",
    "set_float32_matmul_precision get_float32_matmul_precision",
    "backends.mha.set_fastpath_enabled get_fastpath_enabled",
    "backends.cuda.enable_flash_sdp flash_sdp_enabled",
    "backends.cuda.enable_mem_efficient_sdp mem_efficient_sdp_enabled",
    "backends.cuda.enable_math_sdp math_sdp_enabled",
    "backends.cuda.enable_cudnn_sdp cudnn_sdp_enabled",
    "backends.cuda.allow_fp16_bf16_reduction_math_sdp fp16_bf16_reduction_math_sdp_allowed",
    "backends.cuda.preferred_linalg_library preferred_linalg_library",
    "backends.cuda.preferred_blas_library preferred_blas_library",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.benchmark_limit"),
    *("backends.cudnn.deterministic", "backends.cudnn.depthwise_kernel"),
    *("backends.cudnn.allow_tf32", "backends.miopen.immediate"),
    *("backends.mkldnn.enabled", "backends.mkldnn.deterministic"),
    *("backends.opt_einsum.enabled", "backends.opt_einsum.strategy"),
    *("utils.deterministic.fill_uninitialized_memory", "distributions.Distribution._validate_args"),
    # Of float32 products in the newer interface, which the older one changes and does not report.
    # The general one comes first: an operation without one of its own follows it. That of mkldnn as
    # a whole is left out, as torch sets the general one in its place.
    *("backends.fp32_precision", "backends.cudnn.fp32_precision"),
    *("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision"),
    *("backends.cudnn.rnn.fp32_precision", "backends.mkldnn.matmul.fp32_precision"),
    *("backends.mkldnn.conv.fp32_precision", "backends.mkldnn.rnn.fp32_precision"),
)
"""Attributes of torch, and functions, each with the one that reads it."""

_invariants = torch.sparse.check_sparse_tensor_invariants

FLAGS: dict[str, _Flag] = {
    _WORKSPACES: (partial(os.environ.get, _WORKSPACES), partial(setitem, os.environ, _WORKSPACES)),
    "use_deterministic_algorithms": (
        torch.get_deterministic_debug_mode,  # 0 off, 1 warns, 2 raises
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    # Torch cannot be asked, but Python's own numbers are computed alike.
    "set_flush_denormal": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    "sparse.check_sparse_tensor_invariants": (
        _invariants.is_enabled,
        lambda on: _invariants.enable() if on else _invariants.disable(),
    ),
    **{text.partition(" ")[0]: _setting(*text.split()) for text in _SETTINGS},
}
"""Each process-wide setting by the name below torch that sets it; precisions last."""


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple([(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _DEVICES])


def capture() -> CallContext:
    """The caller's state, now."""
    autocast = _autocast()
    if autocast[0][0] and not torch.cuda.is_initialized():
        autocast = autocast[:1] * 2  # modules here are on the CPU, and replicas may have GPUs
    return CallContext(
        grad=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=autocast,
        autocast_cache=torch.is_autocast_cache_enabled(),
        anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        cached=parametrize._cache_enabled > 0,
        flags=tuple([read() for read, _ in FLAGS.values()]),
    )


def enter(context: CallContext) -> contextlib.AbstractContextManager[object]:
    """Run a block under the caller's state. Process-wide settings stay set, because the next call
    most often has the same.
    """
    for (read, write), value in zip(FLAGS.values(), context.flags, strict=True):
        if value is not None and read() != value:
            write(value)
    rare = context.inference or context.anomaly[0] or context.cached
    # Dtypes also where it is off: blocks in the module have them by default.
    if not rare and context.autocast == _autocast():
        return torch.set_grad_enabled(context.grad)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(context.inference))
        stack.enter_context(torch.set_grad_enabled(context.grad))
        for device, (enabled, dtype) in zip(_DEVICES, context.autocast, strict=True):
            on = enabled and (device == "cpu" or torch.cuda.is_initialized())
            stack.enter_context(torch.autocast(device, dtype, on, context.autocast_cache))
        stack.enter_context(torch.autograd.set_detect_anomaly(*context.anomaly))
        if context.cached:
            stack.enter_context(parametrize.cached())  # its end empties the cache
        return stack.pop_all()


_NO_TRANSFORMS = (
    "transforms of torch.func (vmap, grad, forward-mode jvp) and batched gradients (vectorize) do "
    "not reach into replicas, nor into those of torch.nn.DataParallel: use torch.autograd without "
    "them, such as torch.autograd.functional.jacobian or jvp, or the module itself"
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
    if any([duals.unpack_dual(t).tangent is not None for t in tensors]):
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

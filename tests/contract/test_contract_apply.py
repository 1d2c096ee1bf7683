"""parallel_apply, exceptions, the caller's state, randomness: rows A1 to A11."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import re
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any, ClassVar

import numpy as np
import oracle
import pytest
import torch
from harness import Apply, made_of, ones, raised, trio
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, ReplicaExit, parallel_apply, replicate
from raydp_parallel.devices import ambient

CPUS = ["cpu", "cpu"]


@pytest.mark.upstream
@pytest.mark.parametrize(
    "arguments",
    [
        ([torch.ones(2, 3)],),
        ([torch.ones(2, 3)] * 3,),
        ([torch.ones(2, 3)] * 2, [{}]),
        ([torch.ones(2, 3)] * 2, [{}] * 2, [0]),
        ([torch.ones(2, 3)] * 2, None, [0, 1, 0]),
    ],
)
def test_A1_lengths_are_checked_in_upstream_s_words(arguments: Any) -> None:
    """AssertionErrors that give both numbers."""
    net = nn.Linear(3, 2)
    ours = raised(lambda: parallel_apply(replicate(net, CPUS), *arguments))
    theirs = raised(lambda: oracle.parallel_apply(oracle.replicate(net, [0, 1]), *arguments))
    assert type(ours) is type(theirs) is AssertionError
    assert str(ours) == str(theirs)


def test_A1_empty_lists_raise_index_error() -> None:
    """As upstream, with words."""
    assert isinstance(raised(lambda: oracle.parallel_apply([], [])), IndexError)
    with pytest.raises(IndexError, match="empty"):
        parallel_apply([], [])


@pytest.mark.parametrize("one", [(1, 2), [1, 2], (), [], {"a": 1}, None, "text", 5, ((1, 2),)])
def test_A2_tuples_and_lists_are_positional_and_all_else_is_one_argument(one: Any) -> None:
    """And kwargs go beside."""
    net = Apply(lambda _net, *args, **kwargs: repr((args, sorted(kwargs.items()))))
    for kwargs in (None, [{}, {"k": 1}]):
        ours = parallel_apply(replicate(net, CPUS), [one, one], kwargs)
        assert ours == oracle.parallel_apply(oracle.replicate(net, [0, 1]), [one, one], kwargs)


@pytest.mark.long
def test_A3_devices_may_be_left_out() -> None:
    """Replicas know theirs; different plain modules go to the cluster's devices, side by side."""
    nets = [nn.Linear(3, 2), nn.Linear(3, 4)]
    x = torch.randn(2, 3)
    for devices in (None, CPUS, [0, 1]):
        ours = parallel_apply(nets, [x, (x,)], None, devices)
        for one, net in zip(ours, nets, strict=True):
            torch.testing.assert_close(one, net(x))
        sum(out.sum() for out in ours).backward()
    for net in nets:
        plain = copy.deepcopy(net)
        plain.zero_grad()
        plain(x).sum().backward()
        torch.testing.assert_close(net.weight.grad, 3 * plain.weight.grad)


def test_A3_without_devices_plain_modules_go_to_the_gpus_in_turn() -> None:
    """A deviation: upstream runs all of them on the current device, which a cluster has not got."""
    net = Apply(lambda _net, x: torch.full((len(x),), os.getpid()))
    pids = [out.item() for out in parallel_apply([net] * 3, [torch.ones(1, 1)] * 3)]
    assert pids[0] == pids[2] != pids[1]
    assert pids[:2] == DataParallel(net, [0, 1])(torch.ones(2, 1)).tolist()


class TwoArguments(Exception):
    """Its constructor takes two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Message(Exception):
    """Its constructor takes a message, which is an attribute of the class."""

    message = ""

    def __init__(self, text: str = "", *, message: str = "") -> None:
        super().__init__(message or text)
        self.message = message or text


class Attributed(ValueError):
    """Carries more than its text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 5


class Pointed(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.frame = sys._getframe()


def raising(make: Callable[[], BaseException], rows: tuple[int, ...] = (0, 1)) -> nn.Module:
    """A module that raises what it is told, in the chunks that begin with one of these values."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if int(x[0]) in rows:
            raise net.make()
        return x

    return Apply(forward, make=make)


def inner() -> BaseException:
    try:
        raise LookupError("the cause")
    except LookupError as error:
        found = ValueError("the effect")
        found.__cause__ = error
        return found


def local() -> BaseException:
    class Local(Exception):
        pass

    return Local("text")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("some text"),
    "several lines": lambda: ValueError("one\ntwo\nthree"),
    "no text": ValueError,
    "two args": lambda: ValueError("a", 2),
    "KeyError": lambda: KeyError("key\nline"),
    "IndexError": lambda: IndexError(5),
    "AssertionError": AssertionError,
    "StopIteration": lambda: StopIteration(1),
    "OSError": lambda: FileNotFoundError(2, "No such file", "/there"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "LinAlgError": lambda: torch.linalg.LinAlgError("singular"),
    "two arguments": lambda: TwoArguments("one", "two"),
    "message": lambda: Message("said"),
    "attributed": lambda: Attributed("some text"),
    "not picklable": lambda: Pointed("some text"),
    "cause": inner,
}


def without_frames(text: str) -> list[str]:
    """A traceback's lines without those that say where."""
    return [line for line in text.splitlines() if not line.startswith("  ")]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("rows", [(0, 1), (1,)])
def test_A4_exceptions_are_upstream_s_word_for_word(name: str, rows: tuple[int, ...]) -> None:
    """Type, text, repr of a KeyError, odd constructors; only the frames between differ."""
    net = raising(ERRORS[name], rows)
    x = torch.tensor([[0.0], [1.0]])
    ours = raised(lambda: DataParallel(net, [0, 1])(x))
    theirs = raised(lambda: oracle.DataParallel(net, [0, 1])(x))
    assert type(ours) is type(theirs)
    assert without_frames(str(ours)) == without_frames(str(theirs))
    assert without_frames(repr(ours).replace("\\n", "\n")) == without_frames(
        repr(theirs).replace("\\n", "\n")
    )
    assert f"in replica {rows[0]} on device {rows[0]}.\n" in str(ours)
    assert "in forward\n    raise net.make()" in str(ours)
    found = [frame.name for frame in traceback.extract_tb(ours.__traceback__)]
    assert found[-1] == "forward" and "raydp_parallel" not in str(ours)  # no frames of ours
    assert getattr(ours, "code", None) == getattr(theirs, "code", None)
    assert ours.__cause__ is None


def test_A4_a_class_that_only_the_replica_knows() -> None:
    """It cannot be named in the caller: the name is in the text."""
    error = raised(lambda: DataParallel(raising(local), CPUS)(torch.tensor([[0.0], [1.0]])))
    assert "Caught " in str(error)
    assert (
        "Local in replica 0 on device cpu.\nOriginal Traceback (most recent call last):"
    ) in str(error)
    assert str(error).rstrip().endswith("Local: text")


def test_A6_a_single_replica_of_several_devices_is_wrapped_and_a_single_device_is_not() -> None:
    """Two devices and one chunk: replica 0. One device: the exception as it is."""
    x = torch.tensor([[0.0]])
    ours = raised(lambda: DataParallel(raising(ERRORS["two args"]), [0, 1])(x))
    theirs = raised(lambda: oracle.DataParallel(raising(ERRORS["two args"]), [0, 1])(x))
    assert without_frames(str(ours)) == without_frames(str(theirs))
    error = raised(lambda: DataParallel(raising(ERRORS["two args"]), ["cpu"])(x))
    assert type(error) is ValueError and error.args == ("a", 2)


def stop() -> BaseException:
    """An exception of a class that cannot be pickled."""
    return type("Stop", (BaseException,), {"held": threading.Lock()})()


@pytest.mark.parametrize(
    "make", [SystemExit, lambda: SystemExit(3), KeyboardInterrupt, GeneratorExit, stop]
)
def test_A7_a_module_that_ends_its_process_gets_a_named_error(
    make: Callable[[], BaseException],
) -> None:
    """SystemExit and KeyboardInterrupt in one chunk: which replica, how, and the replicas go on."""
    model = DataParallel(raising(make, (1,)), CPUS)
    pids = [replica.pid for replica in model.executor.replicas()]
    with pytest.raises(ReplicaExit, match=r"replica \d+ .*pid \d+") as caught:
        model(torch.tensor([[0.0], [1.0]]))
    assert type(make()).__name__ in str(caught.value)
    assert "raise net.make()" in str(caught.value)
    assert model(torch.tensor([[5.0], [6.0]])).tolist() == [[5.0], [6.0]]
    assert [replica.pid for replica in model.executor.replicas()] == pids


def test_A8_inputs_and_weights_of_inference_mode() -> None:
    """Inference tensors as inputs, in and out of the mode; a module made in the mode."""
    with torch.inference_mode():
        x = torch.randn(4, 3)
        made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        ours, plain = DataParallel(made, CPUS), copy.deepcopy(made)
        torch.testing.assert_close(ours(x)[:2], plain(x[:2]))
        torch.testing.assert_close(made[1].running_mean, plain[1].running_mean)
    net = nn.Linear(3, 2)
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(net, CPUS)(x), net(x))


def settings(_net: Any = None, x: Any = None) -> str:
    """Torch's settings, as text."""
    row = {name: read() for name, (read, _) in ambient.FLAGS.items()}
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    lower = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    # Where the CPU's is on, replicas with GPUs have it.
    dtypes = [*map(torch.get_autocast_dtype, ["cpu"] if lower[0] else ["cpu", "cuda"])]
    return str((row, modes, anomaly, lower, dtypes))


@contextlib.contextmanager
def cuda_s_autocast() -> Iterator[None]:
    """Without CUDA torch refuses to turn it on by ``torch.autocast``, and so does a replica."""
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)


MODES: dict[str, Callable[[], Any]] = {
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "anomaly without NaN check": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast that is off": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "CUDA's autocast": cuda_s_autocast,
}
"""Of a block of code."""


OTHERS: dict[str, Any] = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "set_default_dtype": torch.float64,
    "set_float32_matmul_precision": "high",
    "use_deterministic_algorithms": 2,
    "backends.cudnn.depthwise_kernel": "cudnn",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (False, False),
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (False, False),
}
"""Values of settings that are not switched; those of precisions are alike."""


@pytest.mark.parametrize("name", [*ambient.FLAGS, *MODES])
@pytest.mark.filterwarnings("ignore")
def test_A8_settings_travel(name: str) -> None:
    """Set in the caller, they are set inside; set back, they are back."""
    read, write = ambient.FLAGS.get(name, (lambda: False, lambda _: None))
    if read() is None or "preferred" in name:
        pytest.skip("this torch does not have it")
    value = "ieee" if "fp32" in name else OTHERS.get(name, not read())
    before, model, x = ambient.capture(), DataParallel(Apply(settings), CPUS), torch.ones(2, 1)
    usual = settings()
    assert model(x) == [usual] * 2
    try:
        with MODES.get(name, contextlib.nullcontext)():
            write(value)
            assert settings() != usual or "precision" in name
            assert model(x) == [settings()] * 2
    finally:
        with ambient.enter(before):
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert model(x) == [usual] * 2 or name == "CUBLAS_WORKSPACE_CONFIG"


LEFT_OUT = {
    "*rng_state*|*set_num_*threads": "a call has a seed, and an option for threads",
    "*autocast*|*grad_enabled|*enable_grad|*anomaly*": "travel with the call, too",
    "set_default_device|*set_default_tensor_type": "stays with the caller, as upstream",
    "*.set_flags|set_deterministic_debug_mode|*.matmul.allow_tf32": "listed by other names",
    "*_split_k|*invariants.enable|*.set_default_validate_args": "listed by other names, too",
    "*.set_device*|*.set_stream|cuda.tunable.*|cuda.memory.*": "of one GPU",
    "backends.quantized.*|backends.*_native.*|*xnnpack*|*rocm*": "of the node's processor",
    "backends.mkldnn.fp32_precision|backends.mkldnn.allow_tf32": "torch does not tell it",
    "*multithreading*|autograd.graph.*|cuda.set_sync_debug_mode": "changes or warns of no value",
    "compiler.*|utils.set_module|Graph.*": "of code, and not of values",
    "utils.checkpoint.*|__future__.*": "blocks in the module, and moves of it in the driver",
    "nn.attention.*|utils.data.*|utils.backend_registration.*": "blocks, loaders, other devices",
}
"""Patterns of settings that stay with the caller, with why."""


VERBS, BOUND = re.compile("(set|enable|allow|use|preferred)(_|$)"), (staticmethod, classmethod)
PARTS = "__future__|autograd|backends|compiler|cuda|distributions|nn|random|sparse|utils"


def settings_of_torch() -> Iterator[str]:
    """Names below torch of all that looks as if it sets something."""
    for name in re.findall(r'name == "(\w+)"', inspect.getsource(torch.backends.cuda)):
        yield f"backends.cuda.matmul.{name}"
    for full, module in [*sys.modules.items()]:
        if not re.fullmatch(rf"torch(\.({PARTS})(\.[a-z]\w*)*)?", full):
            continue
        own = vars(type(module)) if type(module) is not types.ModuleType else {}
        for name, value in {**own, **vars(vars(module).get("m", module))}.items():
            path = f"{full}.{name}".removeprefix("torch.")
            here = (getattr(value, "__module__", None) or full) == full
            if isinstance(value, torch.backends._FP32Precision):
                yield f"{path}.fp32_precision"
            elif hasattr(type(value), "__set__") or (here and VERBS.match(name)):
                yield from [path] if name[0] != "_" else ()
            elif isinstance(value, type) and here:
                methods = [n for n, v in vars(value).items() if isinstance(v, BOUND)]
                yield from [f"{path}.{n}" for n in methods if VERBS.match(n)]


def test_A8_no_setting_of_torch_is_overlooked() -> None:
    """Each travels, or stays for a reason."""
    known = {*ambient.FLAGS, *"|".join(LEFT_OUT).split("|")}
    assert not [n for n in settings_of_torch() if not any(fnmatch(n, one) for one in known)]


class Counts(nn.Module):
    """A parametrization that counts its calls."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 2


def test_A8_a_chunk_has_the_cache_of_parametrizations() -> None:
    """Each computes a weight once in ``parametrize.cached()``, and the next one does so anew."""

    def used_thrice(net: Any, x: Tensor) -> Tensor:
        counts = net.layer.parametrizations.weight[0]
        before = counts.calls
        assert not torch.equal(net.other.weight, net.layer.weight)
        total = sum(net.layer.weight.sum() for _ in range(2)) * 0
        return total + x * (counts.calls - before)

    net, x = Apply(used_thrice, layer=nn.Linear(3, 3), other=nn.Linear(3, 3)), torch.ones(2, 1)
    model = DataParallel(net, CPUS)
    for layer in (net.other, net.layer):
        parametrize.register_parametrization(layer, "weight", Counts())
    for _ in range(2):
        assert model(x).flatten().tolist() == [3.0, 3.0]
        with parametrize.cached():
            outs = [model(x) for _ in range(2)]
        assert torch.cat(outs).flatten().tolist() == [1.0] * 4
        sum(outs).sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_A8_anomaly_mode_holds_in_backward() -> None:
    """It finds the NaN where it arises, inside the replica's graph."""
    model = DataParallel(Apply(lambda net, x: (x * net.weight).sqrt(), weight=ones(3)), CPUS)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        out = model(torch.zeros(4, 3))
        with pytest.raises(
            RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"
        ):
            (out * 0).sum().backward()
        model(torch.ones(4, 3))
    assert not torch.is_anomaly_enabled()


def test_A8_what_upstream_does_not_propagate_is_not_propagated() -> None:
    """saved_tensors_hooks and the default device stay with the caller, and do no harm."""
    calls = []
    model = DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), CPUS)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(1) or t, lambda t: t):
        out = model(torch.ones(4, 3))
    assert calls == []
    out.sum().backward()
    x = torch.ones(4, 3, requires_grad=True)
    find = Apply(lambda _net, x: torch.ones(1).is_meta)
    with torch.device("meta"):
        assert DataParallel(find, CPUS)(x) == [False] * 2
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        grad.sum().backward()
    torch.testing.assert_close(out, model.module(x))
    assert model.module[0].weight.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*(prototype|beta).*")
def test_A8_the_caller_s_default_device_is_not_the_wrapper_s() -> None:
    """Whatever travels is made where it belongs, of all layouts."""
    values = [
        torch.randn(4, 3),
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    ]
    for value in values:
        replica = replicate(nn.Identity(), ["cpu"])[0]
        with torch.device("meta"):
            out = replica(value)
        assert out.data.device.type == "cpu"
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2), torch.ones(2)])
    with torch.device("meta"):
        out = DataParallel(nn.Identity(), CPUS)(packed)
    assert out.data.tolist() == packed.data.tolist()


def warns(category: type[Warning] = UserWarning) -> nn.Module:
    """Warns in forward, and in backward; raises where its input is negative."""

    def back(grad: Tensor) -> None:
        warnings.warn("on the way back", FutureWarning, stacklevel=1)

    def forward(net: Any, x: Tensor) -> Tensor:
        warnings.warn(f"seen {int(x[0])}", category, stacklevel=1)
        if x[0] < 0:
            raise ValueError("after")
        out: Tensor = x * net.weight
        out.register_hook(back)
        return out

    return Apply(forward, weight=ones(1))


class OwnWarning(UserWarning):
    """A category of the test's own."""


@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, OwnWarning])
def test_A9_warnings_of_replicas_reach_the_caller(category: type[Warning]) -> None:
    """Text, category, file and line, in the order of chunks, as upstream's do; of backward, too."""
    records = []
    ours, theirs, _ = trio(warns(category), 2)
    for model in (ours, theirs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.tensor([[0.0], [1.0]])).sum().backward()
        own = [w for w in caught if w.category in (category, FutureWarning)]
        records.append(sorted((str(w.message), w.filename, w.lineno) for w in own))
        assert [w.category for w in own] == [category] * 2 + [FutureWarning] * 2
    assert records[0] == records[1]
    assert [text for text, *_ in records[0]] == ["on the way back"] * 2 + ["seen 0", "seen 1"]


def test_A9_the_caller_s_filters_decide() -> None:
    """Ignored, once per place, or raised as an error."""
    model = DataParallel(warns(), CPUS)
    x = torch.tensor([[3.0], [3.0]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        model(x)
        assert caught == []
        warnings.simplefilter("default")
        model(x)
        assert len([w for w in caught if "seen 3" in str(w.message)]) == 1
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="seen 3"):
            model(x)
        warnings.simplefilter("ignore")
        assert model(x).tolist() == [[3.0], [3.0]]


def test_A9_warnings_come_before_an_exception() -> None:
    """What was warned before a chunk raised is not lost."""
    with pytest.warns(UserWarning, match="seen -1"):
        error = raised(lambda: DataParallel(warns(), CPUS)(-torch.ones(2, 1)))
    assert isinstance(error, ValueError)


@made_of()
def drawing(_net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Draws from every generator there is."""
    shape = len(x), 4
    python = torch.tensor([[random.random() for _ in range(4)] for _ in range(len(x))])
    mask = nn.functional.dropout(torch.ones(shape))
    numpy = torch.from_numpy(np.random.rand(*shape))
    return torch.rand(shape), torch.randn(shape), mask, python, numpy


def test_A10_manual_seed_makes_everything_repeatable() -> None:
    """The same bits, whoever runs the chunks; a second call and each chunk have others."""
    x, runs = torch.ones(6, 1), []
    for ids, seed in ((CPUS, 1), ([0, 1], 1), ([0, 0], 1), (CPUS, 2)):
        model = DataParallel(drawing(), ids)
        torch.manual_seed(seed)
        runs.append([t.cpu() for t in (*model(x), torch.rand(3), *model(x))])
    first, *same, other = runs
    for one in same:
        assert all(map(torch.equal, first, one))
    assert not any(map(torch.equal, first, other))
    assert not any(map(torch.equal, first[:5], first[6:]))
    assert all(len(drawn.unique(dim=0)) == 6 for drawn in first[:2])


@pytest.mark.parametrize("replicas", [2, 4])
def test_A10_a_forward_draws_one_number_from_the_caller_s_generator(replicas: int) -> None:
    """As a DataLoader does, whatever the replicas draw, and however many there are."""
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64, device="cpu").random_()
    expected = torch.rand(3)
    states = random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(3)
    DataParallel(drawing(), ["cpu"] * replicas)(torch.ones(4, 1))
    assert torch.equal(torch.rand(3), expected)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_A10_a_rerun_draws_the_same_numbers() -> None:
    """Contents that changed behind versions run the forward again, with the same masks."""
    results = []
    for behind in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
        model = DataParallel(net, CPUS)
        model(torch.ones(4, 3))
        torch.manual_seed(1)
        with torch.no_grad():
            (net[0].weight.data if behind else net[0].weight).mul_(2)
        results.append(model(torch.ones(4, 3)))
    assert torch.equal(*results)


@made_of(first=(3, 32), drop=lambda: nn.Dropout(0.5), second=(32, 2))
def dropping(net: Any, x: Tensor, inside: bool, reentrant: bool) -> Tensor:
    """Two layers with dropout between, which may be in a checkpoint."""

    def body(x: Tensor) -> Tensor:
        return net.second(net.drop(net.first(x).tanh()))  # type: ignore[no-any-return]

    found: Tensor = checkpoint(body, x, use_reentrant=reentrant) if inside else body(x)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_A10_a_checkpoint_sees_the_same_masks(where: str, reentrant: bool) -> None:
    """Around the wrapper preserve_rng_state puts the caller's generator back, hence the seed, hence
    the masks; inside the module the replica's. Another forward in between does not disturb.
    """
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        net, how = dropping(), (wrapped and where == "inside", reentrant)
        model = DataParallel(net, CPUS)
        x = torch.randn(6, 3, requires_grad=True)
        torch.manual_seed(7)
        if wrapped and where == "around":
            out = checkpoint(model, x, *how, use_reentrant=reentrant)
        else:
            out = model(x, *how)
        model(x.detach().requires_grad_(), *how)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in net.parameters()), torch.rand(3)])
    assert all(map(torch.equal, *results))


def test_A10_a_generator_that_the_module_holds() -> None:
    """It is a plain attribute: each forward starts from the master's, of which edits are seen."""
    generator = torch.Generator().manual_seed(4)
    net = Apply(lambda net, x: torch.rand(len(x), 3, generator=net.generator), generator=generator)
    model = DataParallel(net, CPUS)
    first = model(torch.ones(4, 1))
    expected = torch.rand(2, 3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, torch.cat([expected, expected]))
    assert torch.equal(model(torch.ones(4, 1)), first)
    net.generator.manual_seed(9)
    assert torch.equal(
        model(torch.ones(2, 1))[:1], torch.rand(1, 3, generator=torch.Generator().manual_seed(9))
    )


def attributes_of_a_class(net: Any) -> Any:
    """Which replicas of upstream's share with the module."""

    class Counts(nn.Linear):
        calls = 0
        shapes: ClassVar[list[Any]] = []

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            self.shapes.append(x.shape)
            return super().forward(x) * self.calls

    net.__class__ = Counts
    return lambda: [Counts.calls, *Counts.shapes]


def names_of_a_script(net: nn.Module) -> Any:
    """A list and a number that a function of a script looks up."""
    script = """
def hook(module, args, out):
    global number
    log.append(len(out))
    number += 1
"""
    space: dict[str, Any] = {"__name__": "a_script", "log": [], "number": 0}
    exec(script, space)
    net.register_forward_hook(space["hook"])
    return lambda: space["log"] + [None] * space["number"]


@pytest.mark.parametrize("keep", [names_of_a_script, attributes_of_a_class])
def test_A11_objects_of_the_program_that_hooks_change(keep: Any) -> None:
    """They stay as they were, forward after forward, with one warning at most."""
    net, x = nn.Linear(3, 3), torch.ones(4, 3)
    expected, kept = net(x), keep(net)
    before, model = kept(), DataParallel(net, CPUS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = model(x)
            torch.testing.assert_close(out, expected)
            out.sum().backward()
    own = [w for w in caught if "backward hook is firing" not in str(w.message)]  # torch's
    assert len(own) <= 1
    assert kept() == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_A11_each_replica_has_locks_of_its_own() -> None:
    """In attributes, and in the closures of hooks; one that the program holds stops none."""
    lock, shapes, guard = threading.Lock(), {}, threading.RLock()

    def guarded(net: Any, x: Tensor) -> Tensor:
        with net.guard, net.guard, net.done:
            return x * 2

    def keep(_module: nn.Module, _args: Any, out: Tensor) -> None:
        with lock:
            shapes["out"] = out.shape

    net = Apply(guarded, guard=guard, done=threading.Condition())
    net.register_forward_hook(keep)
    model, x = DataParallel(net, CPUS), torch.ones(4, 3)
    with guard, lock:
        assert torch.equal(model(x), 2 * x)
    assert net.guard is guard and shapes == {}


def test_A11_objects_that_hooks_only_read_bring_no_warning() -> None:
    """Nor do modules and tensors that they refer to, which are the master's."""
    net, factors = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), {"scale": 2.0}
    net[0].register_forward_hook(lambda _module, _args, out: out * factors["scale"])
    net[1].register_forward_hook(lambda _module, _args, out: out + net[1].running_mean.sum())
    model = DataParallel(net, CPUS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3)).sum().backward()


def test_A11_hooks_for_all_modules_stay_here_and_that_is_said_once() -> None:
    """Upstream's threads run them; a replica cannot have them."""
    net = nn.Linear(3, 2)
    model, x = DataParallel(net, ["cpu", "cpu"]), torch.ones(4, 3)

    def triple(module: nn.Module, _inputs: Any, out: Tensor) -> Tensor | None:
        return out * 3 if isinstance(module, nn.Linear) else None

    with nn.modules.module.register_module_forward_hook(triple):
        tripled = net(x)
        with pytest.warns(UserWarning, match="hooks for all modules") as caught:
            once = [model(x), model(x)]
    assert [warning.filename for warning in caught] == [__file__]
    for out in [*once, model(x)]:
        torch.testing.assert_close(3 * out, tripled)

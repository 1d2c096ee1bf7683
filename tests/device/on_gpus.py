"""Tests on stand-in GPUs: ``--device cuda`` and its places.

``"cpu"`` entries name GPUs then, and replicas are processes with one each. With ``cuda`` the driver
has no GPU. With ``cuda:0`` or ``cuda:1`` it has all, the tests' modules and inputs lie there, and
one replica shares the driver's GPU.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

PLACES = ("cpu", "cuda", "cuda:0", "cuda:1")
_ASKED = "STANDIN_PLACE"
GPUS = 8


def asked() -> str:
    """Tell where tests are to run, before pytest has read its arguments."""
    for one, after in itertools.pairwise([*sys.argv, ""]):
        if one.startswith("--device"):
            os.environ[_ASKED] = one.partition("=")[2] or after
    return os.environ.get(_ASKED, "cpu")


def _prepare() -> None:
    place = asked()
    if place == "cpu":
        return
    import standin

    os.environ["STANDIN_GPUS"] = str(GPUS)
    if place == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if standin.LIBRARY not in os.environ:  # else Python's start has done it
        standin.install()


def use() -> None:
    """Let ``"cpu"`` entries name GPUs."""
    if asked() == "cpu":
        return
    import oracle
    import torch

    from raydp_parallel.cluster import replica_set
    from raydp_parallel.cluster.placement import Place
    from raydp_parallel.wire import trial

    def places(ids: Sequence[Any]) -> tuple[Place, ...]:
        numbers = itertools.count()
        return tuple(Place("gpu", next(numbers) if one == "cpu" else one) for one in ids)

    replica_set.places = places
    torch.backends.cuda.enable_flash_sdp(False)  # CPUs have another one, with other bits
    trial.SIZES[:], trial._PRODUCTS = [1 << 12, 1 << 16], 1
    oracle.place = torch.device("cpu" if asked() == "cuda" else asked())


@contextmanager
def placed() -> Iterator[None]:
    """Let what a test makes lie on the driver's GPU, and have a look at the device afterwards."""
    if asked() in ("cpu", "cuda"):
        yield
        return
    import standin
    import torch

    torn = standin.number("torn")
    with there(asked()):
        yield
    torch.accelerator.synchronize()
    assert standin.number("torn") == torn, "memory was unregistered while a copy used it"


def there(device: str) -> AbstractContextManager[Any]:
    """Let tensors that are made without a device, on the CPU as ever, be moved to one."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    made = _device_constructors()

    class There(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            named = {"device", "out", "pin_memory"} & {n for n, one in kwargs.items() if one}
            if function not in made or named:
                return function(*args, **kwargs)
            grad = kwargs.pop("requires_grad", False)
            found = function(*args, **kwargs)
            return found.to(device).requires_grad_(grad) if found.is_cpu else found

    return There()


_prepare()  # torch is imported after this

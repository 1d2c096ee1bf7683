"""`Options(passthrough=True)`: names that the wrapper has not got are the module's (pytorch #16885,
transformers #6821).
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, cluster
from raydp_parallel.calls.executor import shared

TWO = ["cpu", "cpu"]
PASSING = Options(in_process=True, threads=1, passthrough=True)


class Config:
    """What models of a library hold."""

    hidden = 7


class Net(nn.Module):
    """A module with attributes of all kinds."""

    kind = "of the class"

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.config = Config()
        self.register_buffer("total", torch.zeros(2))
        self.dim = 5
        self.device_ids = "the module's"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def generate(self, x: Tensor) -> tuple[Tensor, int]:
        """Says where it runs."""
        return self(x), os.getpid()

    @property
    def rows(self) -> int:
        """A property."""
        return len(self.total)

    @property
    def broken(self) -> int:
        """A property that lacks something."""
        return self.nothing_of_that_name  # type: ignore[return-value]

    def __len__(self) -> int:
        return 3


class Copies(Net):
    """A module that says how it is copied."""

    def __deepcopy__(self, memo: Any) -> Copies:
        again = Copies()
        again.load_state_dict(self.state_dict())
        memo[id(self)] = again
        return again


class TriesFirst(DataParallel[Any]):
    """The most frequent subclass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class AsksModule(DataParallel[Any]):
    """The module is asked first, then the wrapper."""

    def __getattr__(self, name: str) -> Any:
        if name != "module":
            try:
                return getattr(self.module, name)
            except AttributeError:
                pass
        return super().__getattr__(name)


class Adds(DataParallel[Any]):
    """Names of its own, computed, and properties that raise."""

    def __getattr__(self, name: str) -> Any:
        if name == "answer":
            return 42
        return super().__getattr__(name)

    @property
    def config(self) -> Any:
        """The module has this name too."""
        raise AttributeError("not here")


SUBCLASSES = [DataParallel, TriesFirst, AsksModule, Adds]


def test_what_is_passed_on() -> None:
    """Attributes, methods, properties, submodules and buffers: those of the master, as objects."""
    model = DataParallel(Net(), TWO, options=PASSING)
    net = model.module
    assert model.config is net.config and model.config.hidden == 7
    assert model.encoder is net.encoder and model.total is net.total
    assert (model.kind, model.rows) == ("of the class", 2)
    assert hasattr(model, "generate") and not hasattr(model, "absent")
    assert getattr(model, "absent", None) is None
    x = torch.randn(4, 3)
    out, where = model.generate(x)
    assert where == os.getpid() and torch.equal(out, net(x))


def test_what_the_wrapper_has_stays_its_own() -> None:
    """Its attributes, those that are set on it, its methods, and names that Python asks for."""
    model = DataParallel(Net(), TWO, dim=1, options=PASSING)
    assert (model.dim, model.device_ids) == (1, TWO)
    assert model.forward.__self__ is model and model.call.__self__ is model
    model.config = "set"
    assert model.config == "set" and isinstance(model.module.config, Config)
    with pytest.raises(TypeError):
        len(model)
    with pytest.raises(AttributeError):
        _ = model.__len__
    assert model.state_dict().keys() == {"module." + name for name in model.module.state_dict()}


def test_the_default_passes_nothing() -> None:
    """As upstream; of two wrappers of one executor each has its own option."""
    assert not Options().passthrough
    with Executor(TWO, options=Options(in_process=True)) as executor:
        model = DataParallel(Net(), executor=executor)
        passing = DataParallel(model.module, executor=executor, options=PASSING)
        with pytest.raises(AttributeError, match="'DataParallel' object has no attribute 'config'"):
            _ = model.config
        assert not hasattr(model, "generate")
        assert passing.config is model.module.config
    assert shared(PASSING) is shared(Options(in_process=True, threads=1))


def test_what_is_nowhere() -> None:
    """One error, which names it, without another behind it."""
    model = DataParallel(Net(), TWO, options=PASSING)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'") as raised:
        _ = model.absent
    assert raised.value.__context__ is None
    with pytest.raises(AttributeError, match=r"nothing_of_that_name|broken"):
        _ = model.broken
    assert not hasattr(model, "broken")


def test_properties_of_the_wrapper_that_raise() -> None:
    """The module's attribute of that name does not take their place."""
    model = Adds(Net(), TWO, options=PASSING)
    assert model.answer == 42 and model.kind == "of the class"
    with pytest.raises(AttributeError, match="'Adds' object has no attribute 'config'"):
        _ = model.config
    assert not hasattr(model, "config")


def test_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper's names that do not exist there are not the module's, as with devices."""
    monkeypatch.setattr(cluster, "all_gpus", lambda _options: [])
    model = DataParallel(Net(), options=PASSING)
    assert model.device_ids == [] and model.config.hidden == 7
    with pytest.raises(AttributeError, match=r"no attribute 'dim': the module runs in place"):
        _ = model.dim


@pytest.mark.parametrize("kind", SUBCLASSES)
@pytest.mark.parametrize(
    "options", [PASSING, Options(in_process=True, threads=1)], ids=["on", "off"]
)
def test_copies_and_files(kind: Any, options: Options) -> None:
    """`copy`, `deepcopy`, pickle and `torch.save` ask objects for names before they have any; what
    comes out is a wrapper that passes on what the first one did.
    """
    model = kind(Net(), TWO, options=options)
    x = torch.randn(4, 3)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(again) is kind and type(again.module) is Net
        assert hasattr(again, "kind") == hasattr(model, "kind")
        torch.testing.assert_close(again(x), expected)
    assert copy.deepcopy(model).module is not model.module


def test_a_module_that_says_how_it_is_copied() -> None:
    """It says it of itself, not of the wrapper."""
    model = DataParallel(Copies(), TWO, options=PASSING)
    again = copy.deepcopy(model)
    assert type(again) is DataParallel and type(again.module) is Copies
    assert again.module is not model.module and again.config.hidden == 7


@pytest.mark.parametrize("kind", [DataParallel, AsksModule, Adds])
def test_an_object_without_attributes(kind: Any) -> None:
    """AttributeError, never RecursionError; `TriesFirst` asks itself for ``module``, for ever."""
    bare = kind.__new__(kind)
    for name in ("module", "config", "_modules", "_options", "__setstate_of_nothing__"):
        with pytest.raises(AttributeError):
            getattr(bare, name)


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_training(kind: Any) -> None:
    """All else is as without the option."""
    model = kind(Net(), TWO, options=PASSING)
    x = torch.randn(4, 3)
    model(x).sum().backward()
    torch.testing.assert_close(model.module.encoder.bias.grad, torch.full((2,), 4.0))
    values, _ = model.call("generate", x)
    torch.testing.assert_close(values, model.module(x))

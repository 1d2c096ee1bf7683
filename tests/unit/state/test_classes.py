"""Edits of classes that replicas import by name reach the replicas."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel

pytestmark = pytest.mark.usefixtures("cluster")


class Scaled(nn.Module):
    """Multiplies by an attribute of its class."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    @staticmethod
    def helper(x: Tensor) -> Tensor:
        return x


class Calls(nn.Module):
    """Calls a static method of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.helper(self.inner(x))


def tripled(self: Any, x: Tensor) -> Tensor:
    """Stands for a script's own forward."""
    return x * 3


ONES = torch.ones(4, 2)


@pytest.mark.long
def test_C11_a_method_that_was_set_before_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's class patched at the top of a script: replicas import the class, and get the
    patch.
    """
    monkeypatch.setattr(Scaled, "forward", tripled)
    assert torch.equal(DataParallel(Calls(), ["cpu", "cpu"])(ONES), ONES * 3)


def test_C11_edits_between_two_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes, methods and static methods; and back again."""
    model = DataParallel(Calls(), ["cpu", "cpu"])
    assert torch.equal(model(ONES), ONES * 2)
    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "factor", 5.0)
        assert torch.equal(model(ONES), ONES * 5)
        patch.setattr(Scaled, "helper", staticmethod(lambda x: x + 1))
        assert torch.equal(model(ONES), ONES * 6)
        patch.setattr(Scaled, "forward", lambda self, x: -x)
        assert torch.equal(model(ONES), ONES * 0)
    assert torch.equal(model(ONES), ONES * 2)


def test_C11_a_wrapped_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator put around a method keeps its name; it is not taken for the method."""
    model = DataParallel(Calls(), ["cpu", "cpu"])
    assert torch.equal(model(ONES), ONES * 2)
    plain = Scaled.forward

    @functools.wraps(plain)
    def louder(self: Any, x: Tensor) -> Tensor:
        return plain(self, x) * 10

    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "forward", louder)
        assert torch.equal(model(ONES), ONES * 20)
    assert torch.equal(model(ONES), ONES * 2)


def test_C11_a_library_s_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of torch's own."""
    model = DataParallel(nn.Sequential(nn.ReLU()), ["cpu", "cpu"])
    assert torch.equal(model(-ONES), ONES * 0)
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", tripled)
        assert torch.equal(model(-ONES), ONES * -3)
    assert torch.equal(model(-ONES), ONES * 0)

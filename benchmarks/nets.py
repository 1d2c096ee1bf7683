"""The nets that are trained: each with its batch, and with a loss that every way of training can
compute.

All numbers of rows are powers of two, so that a mean of means over equal chunks is the mean over
all, to the last bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Case(NamedTuple):
    """One net, and what it is trained on.

    Attributes:
        make: Makes the net, the same for everybody.
        batch: Makes the batch, the same for everybody.
        loss: The loss of a net, wrapped or not, for a batch or a chunk of it.
        steps: How many steps a contender makes in its turn.
        rounds: How many turns each has.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    steps: int
    rounds: int = 24


def classify(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed outside of the net: its outputs travel to the driver."""
    return F.cross_entropy(net(x), y)


def inside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed inside the net, one number per row, as language models do."""
    loss: Tensor = net(x, y).mean()
    return loss


def perceptron(width: int, layers: int = 2) -> nn.Module:
    """Some square layers."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def vectors(width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randint(
        0, 10, (rows,), generator=generator
    )


class Block(nn.Module):
    """Two convolutions and a way past them, with batch norm."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        same = stride == 1 and into == out
        self.past = nn.Identity() if same else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.past(x))


def residual() -> nn.Module:
    """A small ResNet with batch norm: three stages of two blocks, 2.8 M parameters."""
    torch.manual_seed(0)
    widths = [(32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [Block(*shape) for shape in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def images(rows: int) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(
        0, 10, (rows,), generator=generator
    )


def texts(rows: int, words: int, length: int) -> tuple[Tensor, Tensor]:
    """Words, and the words that follow."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, words, (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


SMALL_MLP, LARGE_MLP = "MLP 2.1 M, batch 64", "MLP 16.8 M, batch 256"
TINY_MLP, DEEP_MLP = "MLP 0.04 M, batch 64", "MLP 33.6 M, batch 64"
CONV = "ResNet-like 2.8 M, batch norm, batch 16"
GPT2_SMALL, RESNET50 = "GPT-2 0.34 M, batch 8 x 32", "ResNet-50 23.5 M, batch 8"
GPT2_20M = "GPT-2 19 M, batch 8 x 32"
"""Nets of `transformers` as they are: the one has many small parameters, the other many modules."""

_SMALL_VOCABULARY = 512


class RowLosses(nn.Module):
    """A language model of `transformers`, and the loss of each row.

    Args:
        model: The language model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row."""
        logits = self.model(ids, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def gpt2(width: int) -> nn.Module:
    """GPT-2 of six layers without dropout: 76 parameters, which at width 64 hold 341,000 numbers
    and at 512 19 million.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # optional

    torch.manual_seed(0)
    sizes = {
        "n_layer": 6,
        "n_embd": width,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": _SMALL_VOCABULARY,
    }
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    return RowLosses(GPT2LMHeadModel(config))


def resnet50() -> nn.Module:
    """ResNet-50: 286 modules, with batch norm."""
    from transformers import ResNetConfig, ResNetForImageClassification  # optional

    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def pictures(rows: int) -> tuple[Tensor, Tensor]:
    """Images of 64 by 64, and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 64, 64, generator=generator), torch.randint(
        0, 10, (rows,), generator=generator
    )


def classify_logits(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed outside of a net that gives an object with logits."""
    return F.cross_entropy(net(x).logits, y)


def usable(case: str) -> bool:
    """Tell if the packages of a case are installed."""
    return (
        case not in (GPT2_SMALL, GPT2_20M, RESNET50)
        or importlib.util.find_spec("transformers") is not None
    )


CASES = {
    SMALL_MLP: Case(lambda: perceptron(1024), lambda: vectors(1024, 64), classify, 4),
    LARGE_MLP: Case(lambda: perceptron(2896), lambda: vectors(2896, 256), classify, 1),
    TINY_MLP: Case(lambda: perceptron(64, 8), lambda: vectors(64, 64), classify, 1),
    DEEP_MLP: Case(lambda: perceptron(2048, 8), lambda: vectors(2048, 64), classify, 1),
    CONV: Case(residual, lambda: images(16), classify, 1, 72),
    GPT2_SMALL: Case(lambda: gpt2(64), lambda: texts(8, _SMALL_VOCABULARY, 32), inside, 4, 48),
    GPT2_20M: Case(lambda: gpt2(512), lambda: texts(8, _SMALL_VOCABULARY, 32), inside, 1),
    RESNET50: Case(resnet50, lambda: pictures(8), classify_logits, 1),
}
"""By name, so that other processes find them."""

"""The nets that are trained: each with its batch, and with a loss that every way of training can
compute.

All numbers of rows are powers of two, so that a mean of means over equal chunks is the mean over
all, to the last bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

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
        rounds: How many turns each has. Where all are close together, medians of few would tell
            them apart by chance.
        optimizer: The optimizer's class, and what it is made with.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    steps: int
    rounds: int = 24
    optimizer: tuple[Any, dict[str, Any]] = (torch.optim.SGD, {"lr": 1e-3})


def classify(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed outside of the net: its outputs travel to the driver."""
    return F.cross_entropy(net(x), y)


def inside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed inside the net, one number per row, as language models do."""
    loss: Tensor = net(x, y).mean()
    return loss


def perceptron(width: int) -> nn.Module:
    """Two square layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def vectors(width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randint(
        0, 10, (rows,), generator=generator
    )


class Block(nn.Module):
    """Two convolutions and a way past them. Normalized by group: what batch norm does depends on
    how rows are spread over devices.
    """

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, out)
        same = stride == 1 and into == out
        self.past = nn.Identity() if same else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.past(x))


def residual() -> nn.Module:
    """A small ResNet: three stages of two blocks, 2.8 M parameters."""
    torch.manual_seed(0)
    widths = [(32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    blocks = [Block(*shape) for shape in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def images(rows: int) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(
        0, 10, (rows,), generator=generator
    )


WIDTH, HEADS, LAYERS, WORDS, LENGTH = 768, 12, 2, 8192, 64
"""GPT-2 small's width and heads, with two of its twelve layers and a sixth of its vocabulary."""


class Layer(nn.Module):
    """Attention and a perceptron, each normalized before and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        rows, length, _ = x.shape
        parts = self.attend(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A small GPT-2: learned positions, the output layer tied to the embedding, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row."""
        x = self.words(ids) + self.places.weight
        logits = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def language() -> nn.Module:
    """The language model, 20.5 M parameters."""
    torch.manual_seed(0)
    return Gpt()


def texts(rows: int, words: int = WORDS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Words, and the words that follow."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, words, (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


GPT2_SMALL, RESNET50 = "GPT-2 0.34 M, batch 8 x 32", "ResNet-50 23.5 M, batch 8"
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


def gpt2_small() -> nn.Module:
    """GPT-2 of six layers of width 64 without dropout: 76 parameters that hold 341,000 numbers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # optional

    torch.manual_seed(0)
    sizes = {
        "n_layer": 6,
        "n_embd": 64,
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
    """Whether what a case needs is installed."""
    return (
        case not in (GPT2_SMALL, RESNET50) or importlib.util.find_spec("transformers") is not None
    )


CASES = {
    "MLP 2.1 M, batch 64": Case(lambda: perceptron(1024), lambda: vectors(1024, 64), classify, 4),
    "MLP 16.8 M, batch 256": Case(
        lambda: perceptron(2896), lambda: vectors(2896, 256), classify, 1
    ),
    "ResNet-like 2.8 M, batch 16": Case(residual, lambda: images(16), classify, 1, 72),
    "GPT-2-like 20.5 M, batch 4 x 64": Case(language, lambda: texts(4), inside, 1),
    GPT2_SMALL: Case(gpt2_small, lambda: texts(8, _SMALL_VOCABULARY, 32), inside, 4, 48),
    RESNET50: Case(resnet50, lambda: pictures(8), classify_logits, 1),
}
"""By name, so that other processes find them."""

MLP_ADAMW, GPT_ADAMW = "MLP 16.8 M, batch 256, AdamW", "GPT-2-like 20.5 M, batch 4 x 64, AdamW"
ADAMW = torch.optim.AdamW, {"lr": 1e-4}
CASES |= {
    MLP_ADAMW: CASES["MLP 16.8 M, batch 256"]._replace(optimizer=ADAMW),
    GPT_ADAMW: CASES["GPT-2-like 20.5 M, batch 4 x 64"]._replace(optimizer=ADAMW),
}

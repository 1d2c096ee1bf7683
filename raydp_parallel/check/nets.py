"""The nets of the check: small ones for parity, ResNet-50 and GPT-2 small for speed. They are
written here because torch itself has none.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def perceptron(width: int = 16, into: int = 8, out: int = 3) -> nn.Module:
    """Three layers."""
    return nn.Sequential(
        nn.Linear(into, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)
    )


class Residual(nn.Module):
    """A basic residual block with batch norm."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = _shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.bn1(self.conv1(x)).relu_()
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        result: Tensor = out.relu_()
        return result


def _shortcut(into: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and into == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))


def residual() -> nn.Module:
    """A small ResNet with batch norm."""
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    blocks = [Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 12, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))


class Tagger(nn.Module):
    """Two layers of LSTM in both directions over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores for each word."""
        self.lstm.flatten_parameters()
        out, _ = self.lstm(self.words(ids))
        scores: Tensor = self.head(out)
        return scores.flatten(0, 1)


class Layer(nn.Module):
    """Attention and a perceptron, each with a norm before it and its input added to the result."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        rows, length, width = x.shape
        parts = (
            self.attend(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))
        return result


class Gpt(nn.Module):
    """GPT-2's architecture: learned positions, the output layer tied to the embedding, no dropout.

    With targets it gives the loss of each row, as language models that are trained with
    DataParallel do.
    """

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """The scores of the next words, or the loss of each row."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        scores: Tensor = self.head(self.norm(self.layers(x)))
        if targets is None:
            return scores
        return F.cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)


def gpt() -> nn.Module:
    """A tiny GPT."""
    return Gpt(words=48, length=16, width=16, layers=2, heads=2)


def gpt2_small() -> nn.Module:
    """GPT-2 small: 124 M parameters."""
    return Gpt(words=50257, length=1024, width=768, layers=12, heads=12)


class Bottleneck(nn.Module):
    """ResNet-50's block: narrow, convolve, widen."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = _shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.bn1(self.conv1(x)).relu_()
        out = self.bn2(self.conv2(out)).relu_()
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        result: Tensor = out.relu_()
        return result


def resnet50() -> nn.Module:
    """25.6 M parameters, as published, with the stride in the 3 x 3 convolution."""
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks: list[nn.Module] = []
    into = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(into, width, stride if number == 0 else 1))
            into = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*stem, *blocks, *head)


def generator() -> nn.Module:
    """Noise to samples, with batch norm."""
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))


def critic() -> nn.Module:
    """Samples to scores, smooth enough for a gradient of a gradient."""
    into = [nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh()]
    return nn.Sequential(*into, nn.Linear(12, 12), nn.Softplus(), nn.Linear(12, 1))


class Complex(nn.Module):
    """A linear map over complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        """The image of each row."""
        return x @ self.weight


class Twice(nn.Module):
    """A large weight that two checkpoints use, each of which adds to its gradient at another time,
    and one that is used once.

    Args:
        width: Rows and columns of each.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.once, self.again = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as the input."""
        x = self.once(x)
        for _ in range(2):
            x = checkpoint(self.again, x.relu(), use_reentrant=True)
        return x


class Witness(nn.Module):
    """Returns the devices that it ran on, and the size of its chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, x: Tensor, named: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], tuple[str, str, int]]:
        """The inputs, scaled; the devices of weights and inputs, and the number of rows."""
        seen = str(self.scale.device), str(x.device), len(x)
        return x * self.scale, {"twice": named["y"] * 2}, seen


class Products(nn.Module):
    """Multiplies, and returns the settings that it ran under."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[str, str]]:
        """The product; its precision by torch's newer interface, and the variable that cuBLAS
        reads.
        """
        newer = hasattr(torch._C, "_get_fp32_precision_getter")
        precision = torch.backends.cuda.matmul.fp32_precision if newer else ""
        return x @ self.weight, (precision, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


class Flattens(nn.Module):
    """A recurrent net that gives its weights other memory in forward on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs."""
        self.lstm.flatten_parameters()
        out: Tensor = self.lstm(x)[0]
        return out


class Named(nn.Module):
    """Computes on a device that it names.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.place = device
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        return x.to(self.place) * self.scale


class Stray(nn.Module):
    """Indexes out of bounds if the first entry of its chunk is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        if x[0, 0] < 0:
            x = x[torch.full((len(x),), 1 << 40, device=x.device)]
        return x * self.scale


class Greedy(nn.Module):
    """Allocates more memory than there is if the first entry of its chunk is below zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        if x[0, 0] < 0:
            x = x + torch.empty(self.size, dtype=torch.uint8, device=x.device)[0]
        return x * self.scale

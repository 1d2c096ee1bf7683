"""Image classification as the public ImageNet program does it for VGG: the convolutions are
wrapped, the classifier stays in the driver; epochs of training and validation, and a checkpoint of
the best.

Output::

    epoch 0: loss 0.851, accuracy 28.9 %
    epoch 1: loss 0.546, accuracy 71.1 %
    epoch 2: loss 0.537, accuracy 89.8 %
    the checkpoint of epoch 2 gives 89.8 % again
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import command_line
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from raydp_parallel import DataParallel

SIDE = 32


class VGG(nn.Module):
    """A small net with the parts of torchvision's: ``features`` and ``classifier``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 32, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def shapes(count: int, seed: int) -> TensorDataset:
    """Noisy images of a square, a disc or a cross, and which of them each shows."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (count,), generator=draw)
    centres = torch.randint(10, SIDE - 10, (count, 2, 1, 1), generator=draw)
    grid = torch.arange(SIDE)
    dy = (grid.view(1, SIDE, 1) - centres[:, 0]).abs()
    dx = (grid.view(1, 1, SIDE) - centres[:, 1]).abs()
    square = (dy < 7) & (dx < 7)
    disc = dy * dy + dx * dx < 64
    cross = square & ((dy < 2) | (dx < 2))
    shown = torch.stack([square, disc, cross])[kinds, torch.arange(count)]
    images = shown.unsqueeze(1) + 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=draw)
    return TensorDataset(images, kinds)


def train(
    loader: DataLoader[tuple[Tensor, ...]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    """One epoch; returns the mean loss."""
    model.train()
    losses = []
    for images, kinds in loader:
        loss = nn.functional.cross_entropy(model(images), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def validate(loader: DataLoader[tuple[Tensor, ...]], model: nn.Module) -> float:
    """The share of images that are recognised."""
    model.eval()
    hits = [(model(images).argmax(1) == kinds).float() for images, kinds in loader]
    return torch.cat(hits).mean().item()


def main(device_ids: list[str | int] | None = None, epochs: int = 3) -> list[float]:
    """Trains, and returns the accuracy after each epoch."""
    torch.manual_seed(0)
    model = VGG(classes=3)
    model.features = DataParallel(model.features, device_ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    training = DataLoader(shapes(512, seed=1), batch_size=32, shuffle=True)
    validation = DataLoader(shapes(128, seed=2), batch_size=64)

    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder) / "best.pt"
        for epoch in range(epochs):
            loss = train(training, model, optimizer)
            accuracy = validate(validation, model)
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}".replace("%", " %"))
            if accuracy > max(found, default=-1.0):
                torch.save({"epoch": epoch, "state_dict": model.state_dict()}, best)
            found.append(accuracy)
        checkpoint = torch.load(best)
    model.load_state_dict(checkpoint["state_dict"])
    again = f"{validate(validation, model):.1%}".replace("%", " %")
    print(f"the checkpoint of epoch {checkpoint['epoch']} gives {again} again")
    return found


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))

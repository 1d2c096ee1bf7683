"""Twenty steps of training real architectures: losses, gradients, weights and buffers are
upstream's, step by step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from harness import tiny_gpt2
from torch import Tensor, nn
from torch.nn import functional as F

import raydp_parallel
from raydp_parallel import Options

pytestmark = pytest.mark.usefixtures("cluster", "one_thread")

STEPS = 20
ONE_THREAD = Options(threads=1)
"""How a sum is shared among threads decides its last bits."""

Batches = Callable[[int], tuple[Any, ...]]
Loss = Callable[..., Tensor]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The driver computes with one thread too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run(NamedTuple):
    """What a training run did.

    Attributes:
        losses: The loss of each step.
        grads: The gradients of each step, by parameter.
        state: Weights and buffers at the end.
        output: What the trained model says in eval mode.
    """

    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    output: Tensor


def ours(module: nn.Module, replicas: int) -> nn.Module:
    """Under our wrapper."""
    return raydp_parallel.DataParallel(
        copy.deepcopy(module), ["cpu"] * replicas, options=ONE_THREAD
    )


def theirs(module: nn.Module, replicas: int) -> nn.Module:
    """Under upstream's."""
    return oracle.DataParallel(copy.deepcopy(module), list(range(replicas)))


def grads(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients, by name without the wrapper's prefix."""
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of weights and buffers, by name without the wrapper's prefix."""
    return {name.removeprefix("module."): t.clone() for name, t in model.state_dict().items()}


def train(model: nn.Module, batches: Batches, loss: Loss, optimizer: torch.optim.Optimizer) -> Run:
    """The ordinary loop."""
    losses, history = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, *batches(step))
        value.backward()
        losses.append(value.detach())
        history.append(grads(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = loss(model, *batches(STEPS))
    return Run(losses, history, state(model), output)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay, so that parameters without a gradient would show."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def numbers(step: int) -> torch.Generator:
    """The same batches for all."""
    return torch.Generator().manual_seed(100 + step)


def identical(found: Run, expected: Run) -> None:
    """Bit by bit, every step."""
    for step, (one, other) in enumerate(zip(found.grads, expected.grads, strict=True)):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            assert torch.equal(grad, other[name]), f"step {step}: {name}"
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.state.keys() == expected.state.keys()
    for name, tensor in found.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    assert torch.equal(found.output, expected.output)


def close(found: Run, expected: Run, tolerance: float) -> None:
    """Within ``tolerance`` of the norm, every step."""
    for step, (one, other) in enumerate(zip(found.grads, expected.grads, strict=True)):
        assert one.keys() == other.keys()
        scale = torch.stack([grad.norm() for grad in other.values()]).norm()
        for name, grad in one.items():
            assert (grad - other[name]).norm() <= tolerance * scale, f"step {step}: {name}"
    for name, tensor in found.state.items():
        expected_one = expected.state[name]
        assert (
            tensor - expected_one
        ).double().norm() <= tolerance * expected_one.double().norm(), name


# --- a perceptron ---


def perceptron() -> nn.Module:
    """Three layers."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Batches of different sizes: 30, 30, 10, as the end of an epoch."""
    generator, count = numbers(step), (30, 30, 10)[step % 3]
    return torch.randn(count, 8, generator=generator), torch.randint(
        3, (count,), generator=generator
    )


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy outside of the model."""
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_perceptron(replicas, optimizer):
    """Bit-identical with upstream on 1 to 4 replicas, and with the plain module but for
    rounding.
    """
    net = perceptron()
    found, expected = ours(net, replicas), theirs(net, replicas)
    run = train(found, rows, classify, optimizer(found))
    identical(run, train(expected, rows, classify, optimizer(expected)))
    if optimizer is sgd:
        close(run, train(net, rows, classify, optimizer(net)), 1e-5)


def test_perceptron_in_double_precision_is_the_plain_module():
    """Only the order of sums differs."""
    net = perceptron().double()

    def batches(step):
        x, y = rows(step)
        return x.double(), y

    found = ours(net, 3)
    run = train(found, batches, classify, adam(found))
    close(run, train(net, batches, classify, adam(net)), 1e-12)


def test_perceptron_with_accumulated_gradients():
    """Several backwards before each step, with gradients clipped."""

    def accumulate(model, *_):
        value = torch.zeros(())
        for micro in range(3):
            loss = classify(model, *rows(micro)) / 3
            if torch.is_grad_enabled() and micro < 2:
                loss.backward()
            value = loss
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return value

    net = perceptron()
    found, expected = ours(net, 2), theirs(net, 2)
    run = train(found, lambda _step: (), accumulate, sgd(found))
    identical(run, train(expected, lambda _step: (), accumulate, sgd(expected)))


# --- a residual net ---


class Residual(nn.Module):
    """A basic block."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x)).relu_()
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return out.relu_()


class ResNet(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 12, 1))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def images(step: int) -> tuple[Tensor, Tensor]:
    """Small images."""
    generator = numbers(step)
    return torch.randn(11, 3, 8, 8, generator=generator), torch.randint(
        4, (11,), generator=generator
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_residual_net_with_batchnorm(replicas, channels_last):
    """Running statistics come from chunk 0, weights from all."""
    net = ResNet()
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    found, expected = ours(net, replicas), theirs(net, replicas)
    run = train(found, images, classify, sgd(found))
    identical(run, train(expected, images, classify, sgd(expected)))
    assert run.state["stem.1.num_batches_tracked"] == STEPS
    assert not torch.equal(run.state["stem.1.running_mean"], net.stem[1].running_mean)


# --- a bidirectional LSTM ---


class Tagger(nn.Module):
    """Two layers of LSTM in both directions over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.lstm(self.words(ids))
        return self.head(out).flatten(0, 1)


def sentences(step: int) -> tuple[Tensor, Tensor]:
    """Word ids, and a tag for each word."""
    generator = numbers(step)
    return torch.randint(20, (9, 7), generator=generator), torch.randint(
        4, (63,), generator=generator
    )


@pytest.mark.parametrize("replicas", [2, 3])
def test_bidirectional_lstm(replicas):
    """Recurrent weights are the same tensors in the replica's flat list and in its parameters."""
    net = Tagger()
    found, expected = ours(net, replicas), theirs(net, replicas)
    identical(
        train(found, sentences, classify, adam(found)),
        train(expected, sentences, classify, adam(expected)),
    )


# --- a transformer with tied embeddings ---


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that pads some rows."""
    generator = numbers(step)
    mask = torch.ones(7, 12, dtype=torch.int64)
    mask[1::2, 9:] = 0
    return torch.randint(48, (7, 12), generator=generator), mask


def next_token(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Predict each next token; the loss is outside, from the gathered logits."""
    logits = model(input_ids=ids, attention_mask=mask)["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_inside(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own loss, one per replica, averaged as the Trainer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scalars become a vector
        return model(input_ids=ids, attention_mask=mask, labels=ids)["loss"].mean()


@pytest.mark.parametrize("loss", [next_token, loss_inside])
@pytest.mark.parametrize("replicas", [2, 3])
def test_tied_transformer(replicas, loss):
    """Embedding and head share one weight, in the master and in every replica."""
    net = tiny_gpt2()
    assert net.lm_head.weight is net.transformer.wte.weight
    found, expected = ours(net, replicas), theirs(net, replicas)
    run = train(found, texts, loss, adam(found))
    identical(run, train(expected, texts, loss, adam(expected)))
    assert found.module.lm_head.weight is found.module.transformer.wte.weight
    assert torch.equal(run.state["lm_head.weight"], run.state["transformer.wte.weight"])


# --- a GAN ---


def generator_net() -> nn.Module:
    """Noise to samples, with batch norm."""
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))


def critic_net() -> nn.Module:
    """Samples to scores."""
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.Softplus(),
        nn.Linear(12, 1),
    )


def train_gan(generate: nn.Module, critic: nn.Module) -> tuple[Run, Run]:
    """WGAN-GP: two critic steps, then one of the generator."""
    by_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    by_generator = torch.optim.Adam(generate.parameters(), lr=1e-3, betas=(0.0, 0.9))
    critic_run, generator_run = Run([], [], {}, torch.empty(0)), Run([], [], {}, torch.empty(0))
    for step in range(STEPS):
        random = numbers(step)
        real = torch.randn(10, 6, generator=random) + 2
        for _ in range(2):
            by_critic.zero_grad()
            with torch.no_grad():
                fake = generate(torch.randn(10, 4, generator=random))
            value = (
                critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, random)
            )
            value.backward()
            by_critic.step()
        critic_run.losses.append(value.detach())
        critic_run.grads.append(grads(critic))
        by_generator.zero_grad()
        value = -critic(generate(torch.randn(10, 4, generator=random))).mean()
        value.backward()
        by_generator.step()
        generator_run.losses.append(value.detach())
        generator_run.grads.append(grads(generate))
    return critic_run._replace(state=state(critic)), generator_run._replace(state=state(generate))


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, random: torch.Generator) -> Tensor:
    """How far the norm of the critic's gradient is from one, between real and generated samples."""
    weight = torch.rand(len(real), 1, generator=random)
    between = (weight * real + (1 - weight) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("replicas", [2, 3])
def test_gan_with_gradient_penalty(replicas):
    """Two wrapped nets on the same replicas, one's output the other's input, and second order."""
    generate, critic = generator_net(), critic_net()
    found = train_gan(ours(generate, replicas), ours(critic, replicas))
    expected = train_gan(theirs(generate, replicas), theirs(critic, replicas))
    for one, other in zip(found, expected, strict=True):
        identical(one, other)

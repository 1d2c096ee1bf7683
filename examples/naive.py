"""Data parallelism on Ray actors in plain code, without the package: the whole idea on one screen.
Read it first. ``docs/naive.md`` goes through it line by line, and says what the package adds.

One step of training has six parts. The driver is this program; each device has one actor::

    driver                                       actor k
    1. scatter   cut the batch into chunks
    2. forward   module and chunk       ------>  load the module, compute, keep the graph
                 outputs                <------
    3. gather    join outputs, compute the loss, differentiate it down to the outputs
    4. backward  the outputs' gradients ------>  differentiate the graph that was kept
                 parameters' gradients  <------
    5. sum       add the actors' gradients to .grad of the driver's parameters
    6. step      the optimizer changes the driver's parameters

Output::

    loss 1.3543 -> 0.1534, of the plain module 1.3543 -> 0.1534
    all 30 losses are the same to 5 digits: True
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import command_line
import ray
import torch
from torch import Tensor, nn

STEPS, ROWS, FEATURES, CLASSES = 30, 64, 8, 4

Criterion = Callable[[Tensor], Tensor]  # from the outputs to the loss
Step = Callable[[Tensor, Criterion], Tensor]  # from a batch to its loss, gradients in .grad


@ray.remote(num_cpus=0)  # book no core: any number of actors may share a small machine
class Replica:
    """Runs one chunk of each batch, in a process of its own."""

    def __init__(self, device: str) -> None:
        # Ray shows an actor only the GPU it booked for it, so that GPU is always "cuda" in here.
        self.device = torch.device("cpu" if device == "cpu" else "cuda")
        self.module: nn.Module | None = None
        self.output: Tensor | None = None

    def forward(self, pickled: bytes, chunk: Tensor) -> Tensor:
        """Compute one chunk's output with the driver's weights."""
        # A new copy in every call: the driver's optimizer changed the weights, and a program may
        # have changed anything else (a layer, a mode, a hook). torch.nn.DataParallel copies its
        # replicas anew in every call as well.
        self.module = pickle.loads(pickled).to(self.device)
        # Autograd's graph cannot leave its process. It stays here, reachable from this attribute.
        self.output = self.module(chunk.to(self.device))
        return self.output.detach().cpu()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Take up the chain rule where the driver has left it."""
        assert self.module is not None and self.output is not None
        self.output.backward(gradient.to(self.device))
        found = [parameter.grad for parameter in self.module.parameters()]
        self.module = self.output = None  # frees the graph
        return [None if gradient is None else gradient.cpu() for gradient in found]


class NaiveDataParallel:
    """A module whose forward and backward run on several actors."""

    def __init__(self, module: nn.Module, device_ids: list[str | int]) -> None:
        self.module = module  # the master: the optimizer works on its parameters
        self.replicas = [
            Replica.options(num_gpus=0 if device == "cpu" else 1).remote(str(device))
            for device in device_ids
        ]

    def step(self, x: Tensor, criterion: Criterion) -> Tensor:
        """Compute the loss of a batch, and add its gradients to the parameters' ``.grad``."""
        # 1. Scatter. A batch may have fewer rows than there are actors, hence fewer chunks.
        chunks = x.chunk(len(self.replicas))
        replicas = self.replicas[: len(chunks)]

        # 2. Forward. The module is pickled once, put into Ray's object store once, and read there
        # by every actor of this machine. remote() does not wait: all actors compute at one time.
        pickled = ray.put(pickle.dumps(self.module))
        calls = [
            replica.forward.remote(pickled, chunk)
            for replica, chunk in zip(replicas, chunks, strict=True)
        ]
        outputs = ray.get(calls)

        # 3. Gather. In the driver the outputs are leaves: no graph is behind them. So backward of
        # the loss ends here, and leaves its gradient with respect to the outputs in .grad.
        gathered = torch.cat(outputs).requires_grad_()
        loss = criterion(gathered)
        loss.backward()
        assert gathered.grad is not None

        # 4. Backward. Each actor gets the rows of that gradient which belong to its chunk.
        sizes = [len(chunk) for chunk in chunks]
        calls = [
            replica.backward.remote(gradient)
            for replica, gradient in zip(replicas, gathered.grad.split(sizes), strict=True)
        ]

        # 5. Sum. The loss is one function of all rows, and each actor has differentiated it for
        # its own rows. So gradients are added, not averaged, always in the order of chunks:
        # floating-point sums depend on the order, and a run should give the same bits again.
        for gradients in ray.get(calls):
            for parameter, gradient in zip(self.module.parameters(), gradients, strict=True):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += gradient.to(parameter.device)
        return loss.detach()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def train(module: nn.Module, step: Step) -> list[float]:
    """Run the training loop; return the loss of each step."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, FEATURES)
        y = x[:, :CLASSES].argmax(1)
        optimizer.zero_grad()
        loss = step(x, partial(nn.functional.cross_entropy, target=y))
        optimizer.step()  # 6. Step. The next forward sends what it has made of the weights.
        losses.append(loss.item())
    return losses


def main(device_ids: list[str | int] | None = None) -> list[float]:
    """Train twice, on actors and in this process, and compare the losses."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    module = net()
    found = train(module, NaiveDataParallel(module, device_ids or ["cpu", "cpu"]).step)

    plain = net()

    def in_this_process(x: Tensor, criterion: Criterion) -> Tensor:
        loss = criterion(plain(x))
        loss.backward()
        return loss.detach()

    expected = train(plain, in_this_process)
    same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)
    print(
        f"loss {found[0]:.4f} -> {found[-1]:.4f}, "
        f"of the plain module {expected[0]:.4f} -> {expected[-1]:.4f}"
    )
    print(f"all {STEPS} losses are the same to 5 digits: {same}")
    return found


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))

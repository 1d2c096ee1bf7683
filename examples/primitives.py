"""Data parallelism by hand: replicate the module, scatter the input, apply in parallel, gather the
outputs.

Output::

    output (10, 4), 4 gradients; equal to the plain module: True
"""

from __future__ import annotations

import command_line
import torch
from torch import nn

from raydp_parallel import gather, parallel_apply, replicate, scatter


def data_parallel(
    module: nn.Module, input: torch.Tensor, device_ids: list[str | int] | None
) -> torch.Tensor:
    if not device_ids:
        return module(input)
    replicas = replicate(module, device_ids)
    inputs = scatter(input, device_ids)
    replicas = replicas[: len(inputs)]
    outputs = parallel_apply(replicas, inputs)
    return gather(outputs, input.device)


def run(forward, module: nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    """The output of a forward, and the gradients of its loss."""
    output = forward(input)
    return [output, *torch.autograd.grad(output.square().sum(), module.parameters())]


def main(device_ids: list[str | int] | None = None) -> bool:
    """Compares with the plain module: the output, and the gradient of each parameter."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    input = torch.randn(10, 8)

    plain = run(module, module, input)
    parallel = run(lambda x: data_parallel(module, x, device_ids), module, input)
    equal = all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(plain, parallel, strict=True)
    )
    print(
        f"output {tuple(parallel[0].shape)}, {len(parallel) - 1} gradients; equal to the "
        f"plain module: {equal}"
    )
    return equal


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))

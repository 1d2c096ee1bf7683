"""A policy gradient beside other Ray actors: they play with a copy of the policy, and the wrapped
policy learns from all their games in one batch.

Output::

    reward 0.11 -> 0.47
"""

from __future__ import annotations

from collections.abc import Mapping

import command_line
import ray
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel

PLAYERS, GAMES, MOVES, SIZE = 2, 64, 8, 5


def policy() -> nn.Module:
    """Scores for a step to the left, none, and one to the right."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))


@ray.remote(num_cpus=0)
class Player:
    """Plays many games at once: on a line, go to a goal and stay there."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = policy()

    @torch.no_grad()
    def play(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Observations, moves and rewards of a round of games: [move, game]."""
        self.policy.load_state_dict(weights)
        place, goal = torch.randint(-SIZE, SIZE + 1, (2, GAMES))
        seen, done, rewards = [], [], []
        for _ in range(MOVES):
            seen.append(torch.stack([place, goal], dim=1) / SIZE)
            move = torch.distributions.Categorical(logits=self.policy(seen[-1])).sample()
            place = (place + move - 1).clamp(-SIZE, SIZE)
            done.append(move)
            rewards.append((place == goal).float())
        return torch.stack(seen), torch.stack(done), torch.stack(rewards)


def main(device_ids: list[str | int] | None = None, steps: int = 80) -> list[float]:
    """Learns, and returns the mean reward of each step."""
    torch.manual_seed(0)
    net = policy()
    model = DataParallel(net, device_ids)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    players = [Player.remote(seed) for seed in range(PLAYERS)]

    means = []
    for _ in range(steps):
        weights = ray.put(net.state_dict())
        games = ray.get([player.play.remote(weights) for player in players])
        seen, done, rewards = (torch.cat(parts, dim=1) for parts in zip(*games, strict=True))
        to_come = rewards.flip(0).cumsum(0).flip(0)  # what each move can still earn
        advantage = to_come - to_come.mean(1, keepdim=True)
        scores = model(seen.flatten(0, 1)).log_softmax(1).cpu()
        chosen = scores.gather(1, done.flatten().unsqueeze(1)).squeeze(1)
        loss = -(chosen * advantage.flatten()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(rewards.mean().item())
    print(f"reward {means[0]:.2f} -> {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))

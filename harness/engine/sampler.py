"""From logits to token ids: greedy, or drawn with a number that depends only on (seed, request, position).

It does not know sequences or caches. Because a draw owes nothing to the other rows or to the order of service, neither
batch mates, chunking, preemption nor guessing ahead can change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row becomes a token. `position` is the place the token will take in its sequence."""

    temperature: float
    top_p: float
    seed: int
    request_id: int
    position: int

    def uniform(self) -> float:
        """A number in [0, 1) that this draw alone owns, the same on every machine."""
        name = f"{self.seed}/{self.request_id}/{self.position}".encode()
        return (int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 11) / 2**53


class Sampler:
    """Greedy or nucleus sampling, with one wait for the device a step."""

    def __call__(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Token ids for logits [R, V], one draw a row; ties go to the lowest id. ValueError if the counts differ."""
        if logits.shape[0] != len(draws):
            raise ValueError(f"{logits.shape[0]} rows of logits cannot serve {len(draws)} draws")
        if not draws:
            return []
        chosen = logits.argmax(-1)  # [R] int64
        random = [row for row, draw in enumerate(draws) if draw.temperature > 0]
        if random:
            rows = torch.tensor(random, device=logits.device)  # [r] int64
            chosen[rows] = _nucleus(logits[rows], [draws[row] for row in random])
        return chosen.tolist()


def _nucleus(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Inverse-CDF draws from logits [r, V], over the fewest tokens that hold top_p of the mass (Holtzman et al. 2020) -> [r]."""
    temperature, top_p, uniform = torch.tensor(
        [(draw.temperature, draw.top_p, draw.uniform()) for draw in draws], dtype=torch.float64, device=logits.device
    ).T.unsqueeze(-1)  # each [r, 1]
    probabilities, order = torch.softmax(logits.double() / temperature, -1).sort(dim=-1, descending=True, stable=True)  # [r, V]
    below = probabilities.cumsum(-1) - probabilities  # mass above each token in the order
    kept = (probabilities * (below < top_p)).cumsum(-1)  # [r, V]
    place = (kept < uniform * kept[:, -1:]).sum(-1, keepdim=True)  # [r, 1]: the first token whose cumulated mass reaches it
    return order.gather(-1, place).squeeze(-1)

"""How a server makes one sign out of many workers' signs.

    majority          U_j = sign(sum_m Y_mj); an even split counts as positive, or as zero where zeros abstain
    log-likelihood    U_j = sign(sum_m L_m Y_mj),  L_m = ln((1 - p_m) / p_m)

where p_m is how often worker m's sign is wrong: each worker's sign is the true one sent through a binary symmetric
channel, and the weighted vote is its maximum-likelihood decoder (Park and Lee, "IT-signSGD"; Park, Poor and Lee, 2024,
arXiv 2403.16372). p is estimated for each worker and coordinate as in the paper, or for each worker over all
coordinates (`LogLikelihood`). Weights never leave the server.

Of n voters the majority is right while the wrong ones are fewer than half, if they do not know of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from dure.codec import bits
from dure.codec.coder import Coder

Messages = Mapping[int, torch.Tensor]
"""Encoded signs by worker."""

Votes = Mapping[int, torch.Tensor]
"""Signs by worker, flat: -1, 0 and 1."""

_BLOCK = 1 << 16


class Majority:
    """One worker, one vote."""

    def decide(self, messages: Messages, coder: Coder) -> torch.Tensor:
        """The decided signs, encoded as the votes are. Raises `DamagedMessage`."""
        packed = [signs for signs in map(coder.packed_signs, messages.values()) if signs is not None]
        if len(packed) == len(messages):
            return bits.at_least(packed, (len(messages) + 1) // 2)
        return self.settle({voter: _votes(message, coder) for voter, message in messages.items()}, coder)

    def settle(self, votes: Votes, coder: Coder) -> torch.Tensor:
        """The decided signs, encoded as the votes were."""
        total = torch.zeros(coder.numel, device=next(iter(votes.values())).device)
        for vote in votes.values():
            total += vote
        message = coder.verdict(total)
        if coder.packed_signs(message) is not None:
            return bits.pack_signs(total)  # an even split is no zero of a coder's: it counts as positive
        return message

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a `state`."""


class LogLikelihood:
    """Votes weighted by how reliable each worker has been.

    For the first `start` rounds of a worker its weight is 1: for 10, or 50 where each coordinate has a p, since a round
    is then but one sample of it. `least` bounds p from below and above. `forget` below 1 lets old rounds fade: 0.9, as
    how likely a sign is wrong depends on the weights of that round, or 1 for coordinates.

    For each coordinate, as in the paper, p is the share of rounds in which a worker was not of what was decided. A zero
    counts as nothing. With n disagreements in t rounds the paper has p = n / t. Here it is (n + 1) / (t + 2) for both
    granularities, so that a worker without a disagreement has a finite weight.

    Over all of a worker's coordinates, p is the mean probability that its sign is wrong, given all votes: their
    log-likelihood ratio says how sure the decision is (the expectation step of Dawid and Skene, "Maximum Likelihood
    Estimation of Observer Error-Rates Using the EM Algorithm", 1979). To call every decision right would let whoever
    weighs most confirm itself. A zero is as good as a coin, so that to abstain is a sign of weakness. It counts only
    what is news, a decision unlike that of the round before: voters who always say the same there agree with each
    other, and know nothing.
    """

    def __init__(
        self,
        granularity: Literal["worker", "coordinate"] = "worker",
        *,
        start: int | None = None,
        least: float = 0.01,
        forget: float | None = None,
    ) -> None:
        self.granularity = granularity
        self.start = start if start is not None else 10 if granularity == "worker" else 50
        self.least = least
        self.forget = forget if forget is not None else 0.9 if granularity == "worker" else 1.0
        self.decided: torch.Tensor | None = None
        self.rounds: dict[int, int] = {}
        self.seen: dict[int, torch.Tensor] = {}
        self.wrong: dict[int, torch.Tensor] = {}

    def decide(self, messages: Messages, coder: Coder) -> torch.Tensor:
        """The decided signs, encoded as the votes are. Raises `DamagedMessage`."""
        return self.settle({voter: _votes(message, coder) for voter, message in messages.items()}, coder)

    def settle(self, votes: Votes, coder: Coder) -> torch.Tensor:
        """The decided signs, encoded as the votes were."""
        voters = sorted(votes)
        total = torch.zeros(coder.numel, device=votes[voters[0]].device)
        weights = [self.weight(voter) for voter in voters]
        for begin in range(0, coder.numel, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            for voter, weight in zip(voters, weights, strict=True):
                total[block] += votes[voter][block] * (weight[block] if weight.dim() else weight)
        message = coder.verdict(total)
        if self.granularity == "worker":
            self._learn_of_news(votes, total)
        else:
            self._learn(votes, _votes(message, coder))
        return message

    def weight(self, voter: int) -> torch.Tensor:
        """What a vote of `voter` counts: one number, or one for each coordinate."""
        if self.rounds.get(voter, 0) < self.start or voter not in self.wrong:
            return torch.ones(())
        if self.granularity == "worker" and self.seen[voter] < 1:
            return torch.ones(())  # nothing is news
        p = ((self.wrong[voter] + 1) / (self.seen[voter] + 2)).clamp(self.least, 1 - self.least)
        return torch.log((1 - p) / p)

    def _learn(self, votes: Votes, decided: torch.Tensor) -> None:
        """Count who disagreed with what was decided, at each coordinate."""
        for voter, vote in votes.items():
            seen = (vote != 0).float()
            self._add(voter, seen, (vote != decided) * seen)

    def _learn_of_news(self, votes: Votes, odds: torch.Tensor) -> None:
        """Count how likely each was wrong, given the log-likelihood ratios of all votes."""
        decided = odds.sign().to(torch.int8)
        news = decided != 0 if self.decided is None else decided != self.decided
        self.decided = decided
        places = news.nonzero().squeeze(1)
        seen, odds = torch.tensor(float(places.numel())), odds[places]
        for voter, vote in votes.items():
            self._add(voter, seen, torch.sigmoid(-odds * vote[places]).sum())

    def _add(self, voter: int, seen: torch.Tensor, wrong: torch.Tensor) -> None:
        self.rounds[voter] = self.rounds.get(voter, 0) + 1
        for counts, new in ((self.seen, seen), (self.wrong, wrong)):
            counts[voter] = new if voter not in counts else counts[voter] * self.forget + new

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        tensors = {f"rounds {voter}": torch.tensor(rounds) for voter, rounds in self.rounds.items()}
        for name, counts in (("seen", self.seen), ("wrong", self.wrong)):
            tensors |= {f"{name} {voter}": count for voter, count in counts.items()}
        return tensors if self.decided is None else tensors | {"decided": self.decided}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a `state`."""
        for key, tensor in state.items():
            name, _, voter = key.partition(" ")
            if name == "decided":
                self.decided = tensor.clone()
            elif name == "rounds":
                self.rounds[int(voter)] = int(tensor)
            else:
                (self.seen if name == "seen" else self.wrong)[int(voter)] = tensor.clone()


def _votes(message: torch.Tensor, coder: Coder) -> torch.Tensor:
    """The signs in a message, as int8."""
    values = torch.empty(coder.numel, device=message.device)
    coder.decode(message, values)
    return values.to(torch.int8)

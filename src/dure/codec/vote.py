"""Votes: rules by which a server reduces the signs of all workers to one sign per element.

    majority          U_j = sign(sum_m Y_mj); an even split counts as positive, or as zero where zeros abstain
    log-likelihood    U_j = sign(sum_m L_m Y_mj),  L_m = ln((1 - p_m) / p_m)

where p_m is the error rate of worker m. The model: a worker's sign is the true sign, sent through a binary symmetric
channel; the weighted vote is the maximum-likelihood decoder (Park and Lee, "IT-signSGD"; Park, Poor and Lee, 2024,
arXiv 2403.16372). p is estimated for each worker and coordinate, as in the paper, or for each worker over all
coordinates (`LogLikelihood`). Weights never leave the server.

A majority decides right as long as fewer than half of the votes are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from dure.codec import bits
from dure.codec.coder import Coder

Messages = Mapping[int, torch.Tensor]
"""Encoded signs by the rank of the worker."""

Votes = Mapping[int, torch.Tensor]
"""Flat signs (-1, 0, 1) by the rank of the worker."""

_BLOCK = 1 << 16


class Majority:
    """Majority vote: every worker's sign has the same weight."""

    def decide(self, messages: Messages, coder: Coder) -> torch.Tensor:
        """As `Vote`. Raises `DamagedMessage`."""
        packed = [signs for signs in map(coder.packed_signs, messages.values()) if signs is not None]
        if len(packed) == len(messages):
            return bits.at_least(packed, (len(messages) + 1) // 2)
        return self.settle({voter: _votes(message, coder) for voter, message in messages.items()}, coder)

    def settle(self, votes: Votes, coder: Coder) -> torch.Tensor:
        """As `Vote`."""
        total = torch.zeros(coder.numel, device=next(iter(votes.values())).device)
        for vote in votes.values():
            total += vote
        message = coder.verdict(total)
        if coder.packed_signs(message) is not None:
            return bits.pack_signs(total)  # one bit cannot abstain: an even split counts as positive
        return message

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps, on the CPU."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""


class LogLikelihood:
    """Log-likelihood vote: signs weighted by the estimated error rate p of each worker.

    A worker has weight 1 in its first `start` rounds: 10, or 50 with a p per coordinate, where a round is only one
    sample of it. `least` bounds p by least <= p <= 1 - least. `forget` is the factor of the counts after each round:
    0.9 for workers, since error rates change with the weights, and 1 for coordinates.

    Per coordinate, as in the paper, p is the share of rounds in which the worker's sign differed from the decision.
    Zeros do not count. The paper has p = n / t for n disagreements in t rounds. Here p = (n + 1) / (t + 2) for both
    granularities, so that a worker without a disagreement has a finite weight.

    Per worker, p is the mean probability that the worker's sign is wrong, given the log-likelihood ratio of all votes,
    over its coordinates (the expectation step of Dawid and Skene, "Maximum Likelihood Estimation of Observer
    Error-Rates Using the EM Algorithm", 1979). Taking every decision as right instead would let the worker of largest
    weight confirm itself. A zero counts as wrong with probability 1/2. Only coordinates whose decision differs from the
    round before count: where workers always send the same sign, their agreement says nothing about reliability.
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
        """As `Vote`. Raises `DamagedMessage`."""
        return self.settle({voter: _votes(message, coder) for voter, message in messages.items()}, coder)

    def settle(self, votes: Votes, coder: Coder) -> torch.Tensor:
        """As `Vote`."""
        voters = sorted(votes)
        total = torch.zeros(coder.numel, device=votes[voters[0]].device)
        self._move_to(total.device)
        weights = [self.weight(voter) for voter in voters]
        step = _BLOCK if total.device.type == "cpu" else max(coder.numel, 1)
        for begin in range(0, coder.numel, step):
            block = slice(begin, begin + step)
            for voter, weight in zip(voters, weights, strict=True):
                total[block] += votes[voter][block] * (weight[block] if weight.dim() else weight)
        message = coder.verdict(total)
        if self.granularity == "worker":
            self._learn_from_changes(votes, total)
        else:
            self._learn(votes, _votes(message, coder))
        return message

    def weight(self, voter: int) -> torch.Tensor:
        """The weight of `voter`: one number, or one for each coordinate."""
        if self.rounds.get(voter, 0) < self.start or voter not in self.wrong:
            return torch.ones(())
        if self.granularity == "worker" and self.seen[voter] < 1:
            return torch.ones(())  # no decision has changed yet
        p = ((self.wrong[voter] + 1) / (self.seen[voter] + 2)).clamp(self.least, 1 - self.least)
        return torch.log((1 - p) / p)

    def _move_to(self, device: torch.device) -> None:
        """Move what has an entry per coordinate to the device of the votes. Numbers per worker may stay on the CPU."""
        self.decided = None if self.decided is None else self.decided.to(device)
        for counts in (self.seen, self.wrong):
            counts.update({voter: count.to(device) for voter, count in counts.items() if count.dim()})

    def _learn(self, votes: Votes, decided: torch.Tensor) -> None:
        """Count each worker's disagreements with the decision, at each coordinate."""
        for voter, vote in votes.items():
            seen = (vote != 0).float()
            self._add(voter, seen, (vote != decided) * seen)

    def _learn_from_changes(self, votes: Votes, odds: torch.Tensor) -> None:
        """Add each worker's error probabilities, given the log-likelihood ratios, where the decision has changed."""
        decided = odds.sign().to(torch.int8)
        changed = decided != 0 if self.decided is None else decided != self.decided
        self.decided = decided
        places = changed.nonzero().squeeze(1)
        seen, odds = torch.tensor(float(places.numel())), odds[places]
        for voter, vote in votes.items():
            self._add(voter, seen, torch.sigmoid(-odds * vote[places]).sum())

    def _add(self, voter: int, seen: torch.Tensor, wrong: torch.Tensor) -> None:
        self.rounds[voter] = self.rounds.get(voter, 0) + 1
        for counts, new in ((self.seen, seen), (self.wrong, wrong)):
            counts[voter] = new if voter not in counts else counts[voter] * self.forget + new

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps, on the CPU."""
        tensors = {f"rounds {voter}": torch.tensor(rounds) for voter, rounds in self.rounds.items()}
        for name, counts in (("seen", self.seen), ("wrong", self.wrong)):
            tensors |= {f"{name} {voter}": count.cpu() for voter, count in counts.items()}
        return tensors if self.decided is None else tensors | {"decided": self.decided.cpu()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""
        for key, tensor in state.items():
            name, _, voter = key.partition(" ")
            if name == "decided":
                self.decided = tensor.clone()
            elif name == "rounds":
                self.rounds[int(voter)] = int(tensor)
            else:
                (self.seen if name == "seen" else self.wrong)[int(voter)] = tensor.clone()


def _votes(message: torch.Tensor, coder: Coder) -> torch.Tensor:
    """Decode the signs of a message to int8."""
    values = torch.empty(coder.numel, device=message.device)
    coder.decode(message, values)
    return values.to(torch.int8)

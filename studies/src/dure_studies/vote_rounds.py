"""Rounds of BSP over one server in a plain loop, for many short runs of votes on signs.

    at every worker m      Y_m <- encode(gradient of its mini-batch at w)
    at the server          U <- vote on all Y_m        without a vote: their mean, weighted by samples
    everywhere             w <- w - lr U

`dure.train` with `bsp ps` makes the same rounds: its runs in virtual time have the same accuracies and messages. The
loop simulates neither machines nor links, and decodes each message once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.codec.coder import SliceLayout
from dure.codec.vote import LogLikelihood
from dure.job.data.dataset import called
from dure.job.evaluation import Evaluator
from dure.job.replica import Replica
from dure.run.strategy import make

if TYPE_CHECKING:
    from torch import Tensor

    from dure.codec.base import Vote
    from dure.codec.coder import Coder
    from dure.job.data.split import BatchSampler
    from dure.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteTrial:
    """A codec and a learning rate, for workers with these mini-batches and a split of the data."""

    codec: str
    lr: float
    batch_sizes: tuple[int, ...]
    split: str = "iid"


class Learned(NamedTuple):
    """Test accuracy by round, and bytes of the messages that one worker sends, and receives, in a round.

    By worker, after the last round: `errors` has the mean of the error rates that a weighted vote estimates, `leading`
    the share of coordinates in which the worker has the largest weight. Both are empty without such a vote.
    """

    accuracies: Mapping[int, float]
    bytes_per_step: float
    bytes_back_per_step: float
    errors: tuple[float, ...] = ()
    leading: tuple[float, ...] = ()


def learn(job: Job, trial: VoteTrial, *, rounds: int, every: int, seed: int) -> Learned:
    """Train by SGD without momentum; evaluate after each `every` rounds and after the last."""
    job = dataclasses.replace(job, split=trial.split)
    replica, evaluator = Replica(job.build(seed)), Evaluator(job, seed=seed)
    workers = _workers(job, trial, replica, seed)
    codec = make(trial.codec, "codec")
    layout = SliceLayout.of(replica.layers, [(0, replica.numel)])
    server = _Server(codec.coder(layout), codec.vote(), trial.batch_sizes)
    accuracies: dict[int, float] = {}
    for step in range(1, rounds + 1):
        update = server.combined([worker.message(job, replica) for worker in workers])
        replica.params.add_(update, alpha=-trial.lr)
        if step % every == 0 or step == rounds:
            accuracies[step] = float(evaluator.grade(replica.params).accuracy or 0.0)
    sent, received = server.received / rounds / len(workers), server.answered / rounds
    return Learned(accuracies, sent, received, *_estimates(server.vote, replica.numel, len(workers)))


def _estimates(vote: Vote | None, numel: int, workers: int) -> tuple[tuple[float, ...], ...]:
    """`errors` and `leading` of `Learned`."""
    if not isinstance(vote, LogLikelihood):
        return (), ()
    rates = [float(torch.sigmoid(-vote.weight(worker)).mean()) for worker in range(workers)]
    largest = torch.stack([vote.weight(worker).expand(numel) for worker in range(workers)]).argmax(0)
    return tuple(rates), tuple((torch.bincount(largest, minlength=workers) / numel).tolist())


@dataclass(slots=True)
class _Worker:
    sampler: BatchSampler
    coder: Coder

    def message(self, job: Job, replica: Replica) -> Tensor:
        """The encoded gradient of the next mini-batch."""
        inputs, targets = job.train.batch(self.sampler.next())
        loss: Tensor = job.loss(called(replica.module, inputs), targets)
        gradients = torch.autograd.grad(loss, replica.parameters)
        return self.coder.encode(torch.cat([gradient.reshape(-1) for gradient in gradients]))


def _workers(job: Job, trial: VoteTrial, replica: Replica, seed: int) -> list[_Worker]:
    """All workers by rank; a worker draws the signs of its zeros from its rank, as `dure.train` does."""
    layout = SliceLayout.of(replica.layers, [(0, replica.numel)])
    samplers = job.samplers(trial.batch_sizes, seed=seed)
    codec = make(trial.codec, "codec")
    return [_Worker(sampler, codec.coder(layout, seed=rank)) for rank, sampler in enumerate(samplers)]


@dataclass(slots=True)
class _Server:
    """The server of all rounds. `received` counts the bytes of messages to it, `answered` those to one worker."""

    coder: Coder
    vote: Vote | None
    batch_sizes: Sequence[int]
    received: int = 0
    answered: int = 0

    def combined(self, messages: Sequence[Tensor]) -> Tensor:
        """The direction of the step, as every worker decodes it."""
        self.received += sum(message.numel() for message in messages)
        update = torch.empty(self.coder.numel)
        if self.vote is None:
            update.zero_()
            for message, samples in zip(messages, self.batch_sizes, strict=True):
                self.coder.accumulate(message, update, samples / sum(self.batch_sizes))
            self.answered += update.nbytes
            return update
        verdict = self.vote.decide(dict(enumerate(messages)), self.coder)
        self.answered += verdict.numel()
        self.coder.decode(verdict, update)
        return update

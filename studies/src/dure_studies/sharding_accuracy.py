"""Test accuracy of a model cut by layer and by memory: real gradients on CIFAR-10, in virtual time.

VGG-16 itself learns slowly without batch norm: its small form reaches 27 % after 300 mini-batches of 64. The network
here has one convolution for each pooling, and like VGG-16 three dense layers, the first of which is dominant. Cards,
cores and servers are slower by its size relative to VGG-16, so that a step takes as long as with VGG-16.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from torch import nn

from dure.job.job import Job, load_job
from dure.job.models.mlp import with_he_values
from dure.run.train import train
from dure_studies.output import Row, spread
from dure_studies.sharding_virtual import SYNCS, WORKERS, cluster

SERVERS = WORKERS // 2
BATCH = 16
VGG16 = 138_357_544
"""Parameters of VGG-16."""

COMPUTE = 3.2
"""Seconds of a step's computation, about those fitted to the paper's ratios with synchronous servers."""

RATES = {"bsp": 0.1, "downpour": 0.01}
"""Learning rates of SGD: an update is a mean of 8 gradients, or a gradient of one worker."""

CHANNELS, UNITS = (3, 8, 16, 32), (512, 128, 64, 10)
"""Channels before and behind each convolution, units before and behind each dense layer."""


def accuracy_rows(syncs: Sequence[str], rounds: int, seeds: int, data: Path | None) -> tuple[str, list[Row]]:
    """The source of the data, and a row for each of `syncs` and cut, with the accuracy after `rounds` steps.

    `accuracies` are those of the seeds, and `digests` identify the parameters at the end.
    """
    job = small(data)
    rows = [_row(job, sync, by, rounds, range(seeds)) for sync in syncs for by in ("layer", "memory")]
    return job.source, rows


def small(data: Path | None) -> Job:
    """The small network on CIFAR-10."""
    job = load_job("cifar10-cnn", data)
    return replace(job, model=partial(with_he_values, network), name="small-vgg", batch_size=BATCH)


def network() -> nn.Sequential:
    """Network from (batch, 3, 32, 32) to (batch, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(CHANNELS):
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise(UNITS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _row(job: Job, sync: str, by: str, rounds: int, seeds: Sequence[int]) -> Row:
    summaries = [_summary(job, sync, by, rounds, seed) for seed in seeds]
    accuracies = [each["accuracy"] for each in summaries]
    return {
        "sync": sync,
        "split": by,
        "accuracy": statistics.mean(accuracies),
        "spread": spread(accuracies),
        "accuracies": accuracies,
        "digests": [each["params_sha256"] for each in summaries],
        "staleness": statistics.mean(each["staleness"]["mean"] for each in summaries),
        "seconds": statistics.mean(each["seconds"] for each in summaries) / rounds,
    }


def _summary(job: Job, sync: str, by: str, rounds: int, seed: int) -> Row:
    numel = sum(parameter.numel() for parameter in network().parameters())
    strategy = f"{SYNCS[sync]} ps:shards={SERVERS},split={by}"
    on = cluster(WORKERS, "separate", COMPUTE, scale=numel / VGG16)
    given = {"optimizer": f"sgd:lr={RATES[sync]:g}", "steps": rounds, "eval_every": rounds, "seed": seed}
    return train(job, strategy=strategy, on=on, **given).summary()

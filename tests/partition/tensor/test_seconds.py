"""Virtual seconds and bytes of BERT's and ALBERT's base sizes on two and four GPUs against closed forms.

| strategy                      | a step, paced by the slowest workers                                              |
|-------------------------------|-----------------------------------------------------------------------------------|
| data, all-reduce along a ring | compute of a sixth of the samples; slices of the gradient in turn, behind it      |
| `tensor:ways=6`               | compute of a sixth of most operations; 4 all-reduces a layer, 1 of embedded words |

An all-reduce of n bytes among the ways is two exchanges of messages of n / 6. In each, 2 * 4 messages cross the card of
either host in each direction, and a message leaves once its receiver has asked for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from support.purposes import soaked

from dure.job.job import Job
from dure.run.train import train
from dure.runtime.virtual.cluster import Cluster, Link
from dure_jobs import transformers

HOSTS = Path(__file__).parents[3] / "examples" / "clusters" / "two_and_four_gpus.yaml"
WORKERS, CROSSING = 6, 8
SLOWEST = 6.5e12
"""Operations per second of the two workers of the first host."""

HIDDEN, PERCEPTRON = 768, 3072
EMBEDDING = {"bert": 768, "albert": 128}
STEPS = 2


class Case(NamedTuple):
    kind: str
    layers: int
    batch: int
    tokens: int
    bandwidth: float  # Gbit/s of the card of each host

    @property
    def cluster(self) -> Cluster:
        link = Link(bandwidth=f"{self.bandwidth} Gbit/s", latency="0.1 ms")
        return Cluster.from_yaml(HOSTS).changed(link=link)

    @property
    def split(self) -> float:
        """Operations of a mini-batch in layers that are split: dense ones, 6 for each weight, and attention."""
        weights = 4 * HIDDEN**2 + 2 * HIDDEN * PERCEPTRON
        return self.batch * self.layers * (6 * weights * self.tokens + 12 * HIDDEN * self.tokens**2)

    @property
    def whole(self) -> float:
        """Operations of a mini-batch in layers that each way computes: pooler, scores, and ALBERT's wider words."""
        widened = self.tokens * EMBEDDING[self.kind] * HIDDEN if self.kind == "albert" else 0
        return self.batch * 6 * (widened + HIDDEN**2 + 2 * HIDDEN)

    @property
    def activations(self) -> list[int]:
        """The bytes of each all-reduce among the ways."""
        words = 4 * self.batch * self.tokens
        return [words * HIDDEN] * (4 * self.layers) + [words * EMBEDDING[self.kind]]


CASES = [
    Case("bert", 2, 12, 64, 10),
    Case("albert", 2, 48, 128, 200),
    *soaked(
        *((Case(kind, 12, batch, 512, bandwidth),) for kind in EMBEDDING for batch in (6, 48) for bandwidth in (1, 100))
    ),
]


def ring_seconds(cluster: Cluster, nbytes: float) -> float:
    """An all-reduce along a ring, which crosses each card once in a round; half of the rounds add."""
    part = nbytes / WORKERS
    link = cluster.link
    message = link.latency + cluster.alpha + part * (cluster.beta + 1 / link.bandwidth)
    return 2 * (WORKERS - 1) * message + (WORKERS - 1) * part * cluster.gamma


def exchanged_seconds(cluster: Cluster, nbytes: float) -> float:
    """An all-reduce of two exchanges, each of which begins with the receivers' headers."""
    part, link = nbytes / WORKERS, cluster.link
    asked = link.latency + cluster.alpha + cluster.header / link.bandwidth
    crossed = CROSSING * (part + cluster.header) / link.bandwidth
    return 2 * (asked + crossed + link.latency + cluster.alpha + part * cluster.beta)


def slices(job: Job) -> list[tuple[int, float]]:
    """Slices of the gradient from the last parameter on: bytes, and the share of backward behind them."""
    sizes = [each.numel() * 4 for each in job.build().parameters()]
    least = min(max(sum(sizes) // 8, 3 << 19), 4 << 20)
    found, held, left = [], 0, sum(sizes)
    for size in reversed(sizes):
        held, left = held + size, left - size
        if held >= least or left == 0:
            found.append((held, left / sum(sizes)))
            held = 0
    return found


def data_seconds(case: Case, job: Job) -> float:
    cluster = case.cluster
    compute = cluster.machines[0].compute.overhead + (case.split + case.whole) / WORKERS / SLOWEST
    free = 0.0
    for nbytes, left in slices(job):
        free = max(free, compute * (1 - cluster.backward * left)) + ring_seconds(cluster, nbytes)
    return max(free, compute)


def tensor_seconds(case: Case) -> float:
    compute = case.cluster.machines[0].compute.overhead / WORKERS + (case.split / WORKERS + case.whole) / SLOWEST
    return compute + sum(exchanged_seconds(case.cluster, each) for each in case.activations)


def measured(case: Case, job: Job, partition: str) -> tuple[float, int]:
    """Seconds and bytes of a step."""
    size = case.batch if partition != "none" else case.batch // WORKERS
    run = train(
        job,
        sync="bsp",
        topology="collective",
        partition=partition,
        on=case.cluster,
        batch_size=size,
        steps=STEPS,
        timing_only=True,
    )
    summary = run.summary()
    return summary["seconds"] / STEPS, summary["bytes_sent"] / STEPS


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_steps_of_data_and_tensor_parallel_runs_take_the_seconds_and_bytes_of_their_closed_forms(case, monkeypatch):
    monkeypatch.setitem(transformers.BASE, "layers", case.layers)
    job = transformers.base_shapes(case.kind, tokens=case.tokens)
    parameters = sum(each.numel() for each in job.build().parameters())
    seconds, nbytes = measured(case, job, "none")
    assert seconds == pytest.approx(data_seconds(case, job), rel=1e-4)
    assert nbytes == 2 * (WORKERS - 1) * 4 * parameters
    seconds, nbytes = measured(case, job, f"tensor:ways={WORKERS}")
    assert seconds == pytest.approx(tensor_seconds(case), rel=1e-4)
    assert nbytes == 2 * (WORKERS - 1) * sum(case.activations)

"""Figures and memory of workers that share layers, against closed forms."""

from __future__ import annotations

import pytest
import torch
from support.purposes import soaked
from support.runs import resolved, virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.errors import UsageError
from dure.partition.memory import MemoryUse, of_part
from dure.runtime.virtual.cluster import Cluster, Machines

OPTIONS = {"steps": 3, "seed": 3, "dtype": "float64"}
ROWS = 10  # samples of a mini-batch of `plain`, whose layers are of 64, 12, 14, 12 and 10 units
WIDTH, BATCH = 20, 12
ROW = 4 * WIDTH  # bytes of one sample's inputs of a layer
PART = 4 * (WIDTH * WIDTH + WIDTH // 2 + WIDTH)  # bytes of the shards of a pair of layers at one of two workers
ONCE = {"all_reduce": 8 * ROWS * (14 + 10 + 14)}  # two forward, and the gradient of the second pair's inputs


def test_collectives_are_counted_with_their_payloads():
    trained = virtual(job_text("plain"), f"bsp collective {pairs(2)}", workers=2, **OPTIONS)
    figures = trained.summary["pipeline"]
    assert figures["worker 0"] == figures["worker 1"]
    assert figures["worker 0"]["collectives"] == {"all_reduce": 3 * 3}
    assert figures["worker 0"]["collective_bytes"] == {kind: 3 * nbytes for kind, nbytes in ONCE.items()}
    timed = virtual(job_text("plain"), f"bsp collective {pairs(2)}", workers=2, timing_only=True, **OPTIONS)
    assert timed.summary["pipeline"] == figures


def test_each_split_has_collectives_of_its_kind():
    """By outputs, the outputs are gathered. Of three workers, none has all of a tensor that is gathered."""
    plan = {"strategy": "bsp collective tensor:ways=3,layers=columns", "workers": 3, "timing_only": True, **OPTIONS}
    figures = virtual(job_text("plain"), **plan).summary["pipeline"]["worker 2"]
    assert figures["collectives"] == {"all_gather": 4 * 3, "all_reduce": 3 * 3}
    gathered, reduced = 12 + 14 + 12 + 10, 12 + 14 + 12
    assert figures["collective_bytes"] == {"all_gather": 3 * 8 * ROWS * gathered, "all_reduce": 3 * 8 * ROWS * reduced}


def test_an_exchange_counts_what_a_worker_sends():
    run = virtual(job_text("plain"), "bsp collective neurons:ways=2", workers=2, **OPTIONS)
    for worker, figures in run.summary["pipeline"].items():
        found = figures["collective_bytes"]
        assert found.keys() == {"exchange", "all_gather"}
        own = found["all_gather"] // 2  # five of ten outputs
        assert found["exchange"] + own == run.summary["per_worker"][worker]["bytes_sent"]


def test_workers_without_shared_layers_have_no_collectives_of_layers():
    run = virtual(job_text("plain"), "bsp collective gpipe:stages=2,micro=2", workers=2, **OPTIONS)
    assert not any("collectives" in each for each in run.summary["pipeline"].values())


def test_a_forward_that_is_computed_again_makes_its_collectives_again():
    """Micro-batches of 5 samples: each forward is computed twice."""
    partition = f"gpipe:stages=2,micro=2,cuts=2,remat=true+{pairs(2)}"
    figures = virtual(job_text("plain"), f"bsp collective {partition}", workers=4, **OPTIONS).summary["pipeline"]
    assert figures["worker 1"]["collectives"] == {"all_reduce": 3 * 2 * 2}
    assert figures["worker 3"]["collectives"] == {"all_reduce": 3 * 2 * (2 + 1)}
    assert figures["worker 3"]["collective_bytes"] == {"all_reduce": 3 * 8 * ROWS * (2 * 10 + 14)}


@pytest.mark.parametrize(("recompute", "of_layer"), [("false", 4), ("true", 6)])
def test_a_layer_makes_four_all_reduces_and_six_if_it_is_computed_again(recompute, of_layer):
    def passes(layers):
        job = f"transformer:layers={layers},hidden=32,heads=4,vocab=100,sequence=16,batch=4,recompute={recompute}"
        setup, _ = resolved(job, "bsp collective tensor:ways=2", workers=2, on="virtual", timing_only=True)
        use = of_part(setup.stages.layout, 0, 4, 0, setup.stages.modules[0].kept)
        return setup.stages.modules[0].cost(0, 4), use.activations

    (few, kept), (many, more) = passes(2), passes(3)
    pieces = [sum(piece.call is not None for piece in (*cost.forward, *cost.backward)) for cost in (few, many)]
    assert pieces[1] - pieces[0] == of_layer
    flops = [[sum(piece.flops for piece in each) for each in (cost.forward, cost.backward)] for cost in (few, many)]
    times = 3 if recompute == "true" else 2
    assert flops[1][1] - flops[0][1] == pytest.approx(times * (flops[1][0] - flops[0][0]))
    border = 4 * 16 * 32 * 4
    assert more - kept == border if recompute == "true" else more - kept > 5 * border


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "partition", "workers"),
    [
        ("char-gpt:layers=2,width=16,heads=2,context=12", "zero-bubble:stages=2,micro=3+tensor:ways=2", 4),
        (job_text("plain"), "zero-bubble:stages=1,micro=2+tensor:ways=2", 2),
        *soaked(
            ("char-gpt:layers=2,width=16,heads=2,context=12", "gpipe:stages=2,micro=2,remat=true+tensor:ways=2", 4),
            ("char-gpt:layers=2,width=16,heads=2,context=12", "interleaved:stages=1,chunks=2,micro=2+tensor:ways=2", 2),
            (job_text("plain"), "features-replay:stages=2+tensor:ways=2", 4),
            (job_text("plain"), "tensor:ways=3,layers=rows", 3),
        ),
    ],
)
def test_a_timing_only_run_has_the_seconds_and_figures_of_one_with_gradients(job, partition, workers):
    """Zero-bubble computes gradients of inputs and of weights apart, with collectives of their own."""
    given = {"strategy": f"bsp collective {partition}", "workers": workers, **OPTIONS}
    trained, timed = virtual(job, **given), virtual(job, timing_only=True, **given)
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-12)
    assert timed.summary["pipeline"] == trained.summary["pipeline"]
    assert timed.summary["bytes_sent"] == trained.summary["bytes_sent"]


def test_collectives_are_counted_through_checkpoints(tmp_path):
    options = {**OPTIONS, "steps": 6, "workers": 2}
    whole = virtual(job_text("plain"), f"bsp collective {pairs(2)}", **options)
    kept = virtual(job_text("plain"), f"bsp collective {pairs(2)}", checkpoint_every=2, out=tmp_path, **options)
    assert kept.summary["pipeline"] == whole.summary["pipeline"]


# ---- memory


def dense() -> dure.Job:
    """Six equal layers. Each keeps its inputs for the backward, and nothing else."""
    data = dure.Data(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))

    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    return dure.Job(model, cross_entropy, data, data, batch_size=BATCH, name="dense")


@pytest.mark.parametrize(
    ("partition", "workers", "pairs_held", "rows_kept"),
    [
        (pairs(2), 2, 3, BATCH * 3),
        (f"gpipe:stages=3,micro=4+{pairs(2)}", 6, 1, BATCH),
        (f"1f1b:stages=3,micro=4+{pairs(2)}", 6, 1, 9),
    ],
)
def test_a_worker_keeps_its_own_part(partition, workers, pairs_held, rows_kept):
    """The inputs of the first layer of a pair whole, of the second those that the worker computes."""
    setup, _ = resolved(dense(), f"bsp collective {partition}", workers=workers, on="virtual")
    use = of_part(setup.stages.layout, 0, BATCH, 2, setup.stages.modules[0].kept)
    nbytes = pairs_held * PART
    assert use == MemoryUse(nbytes, nbytes, 2 * nbytes, 0, rows_kept * ROW * 3 // 2)
    run = virtual(dense(), f"bsp collective {partition}", workers=workers, steps=1)
    figures = run.summary["pipeline"]["worker 0"]
    assert (figures["weight_bytes"], figures["activation_bytes"]) == (use.weights, use.activations)


def test_two_ways_fit_where_the_whole_model_does_not():
    """Of 25,920 bytes; each of two workers needs 14,640."""
    limit = 9 * PART
    cluster = Cluster(machines=(Machines(count=2, memory=limit),))
    with raising(UsageError, "worker 0"):
        virtual(dense(), "bsp collective", cluster, steps=1)
    assert virtual(dense(), f"bsp collective {pairs(2)}", cluster, steps=1).summary["steps"] == 1


@pytest.mark.parametrize(
    ("partition", "advice"),
    [
        (
            pairs(2),
            f"Shard it, as in --partition {pairs(2)}+zero:stage=3, use more ways than 2 or more stages than 1, or make "
            "the mini-batch smaller.",
        ),
        (
            f"{pairs(2)}+zero:stage=3",
            "Use more workers than 4, use more ways than 2 or more stages than 1, or make the mini-batch smaller.",
        ),
        (
            f"gpipe:stages=2,micro=2,cuts=2+{pairs(2)}",
            f"Shard it, as in --partition gpipe:stages=2,cuts=2,micro=2+{pairs(2)}+zero:stage=1, use more ways than 2 "
            "or more stages than 2, add remat=true, or make the mini-batch smaller.",
        ),
        (
            "neurons:ways=2",
            "Shard it, as in --partition neurons:ways=2+zero:stage=1, use more ways than 2, or make the mini-batch "
            "smaller.",
        ),
    ],
)
def test_a_machine_that_is_too_small_is_refused_with_advice(partition, advice):
    cluster = Cluster(machines=(Machines(count=4, memory=1000),))
    with pytest.raises(UsageError) as caught:
        virtual(dense(), f"bsp collective {partition}", cluster, steps=1)
    assert str(caught.value).endswith(f"and machine 0 has 1,000 for it. {advice}")

"""Runs with shared layers against runs of the whole model: virtual, on processes, and over a mesh."""

from __future__ import annotations

import pytest
import torch
from support.purposes import soaked
from support.runs import local, resolved, virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text

OPTIONS = {"steps": 6, "seed": 3, "dtype": "float64", "eval_every": 3, "optimizer": "momentum:lr=0.1"}

MESHES = [  # partition, and the workers of one copy of the model
    (pairs(2), 2),
    (pairs(3), 3),
    (f"gpipe:stages=2,micro=2,cuts=2+{pairs(2)}", 4),
    (f"gpipe:stages=2,micro=3,cuts=2,remat=true+{pairs(2)}", 4),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("partition", "parts"), MESHES)
def test_shared_layers_train_as_the_whole_model_does(partition, parts, replicas):
    whole = virtual(job_text("plain"), "bsp collective", workers=replicas, **OPTIONS)
    shared = virtual(job_text("plain"), f"bsp collective {partition}", workers=replicas * parts, **OPTIONS)
    torch.testing.assert_close(shared.params, whole.params, rtol=0, atol=1e-13)
    assert [row["loss"] for row in shared.rows] == pytest.approx([row["loss"] for row in whole.rows], abs=1e-13)


def test_replicas_that_pause_in_one_module_have_buffers_and_random_numbers_of_their_own():
    """Batch norm and dropout between two pairs: a forward of each replica pauses behind them."""
    options = OPTIONS | {"optimizer": "sgd:lr=0.05"}
    whole = virtual(job_text("normed_between"), "bsp collective gpipe:stages=1,micro=1", workers=3, **options)
    shared = virtual(job_text("normed_between"), f"bsp collective {pairs(2)}", workers=6, **options)
    torch.testing.assert_close(shared.params, whole.params, rtol=0, atol=1e-13)
    assert [row["loss"] for row in shared.rows] == pytest.approx([row["loss"] for row in whole.rows], abs=1e-13)


def test_a_timing_only_run_takes_the_seconds_and_bytes_of_a_run_with_gradients():
    for partition, parts, _ in [(*MESHES[1], 1), (*MESHES[3], 1)]:
        options = OPTIONS | {"workers": 2 * parts}
        trained = virtual(job_text("plain"), f"bsp collective {partition}", **options)
        timed = virtual(job_text("plain"), f"bsp collective {partition}", timing_only=True, **options)
        assert timed.seconds == pytest.approx(trained.seconds, rel=1e-12)
        assert timed.summary["bytes_sent"] == trained.summary["bytes_sent"]


@pytest.mark.parametrize(
    ("partition", "parts", "replicas"),
    [(pairs(2), 2, 1), *soaked((pairs(3), 3, 1), (f"1f1b:stages=2,micro=2,cuts=2+{pairs(2)}", 4, 1), (pairs(2), 2, 2))],
)
def test_processes_give_the_bits_of_virtual_time(fork_server, partition, parts, replicas):
    options = OPTIONS | {"workers": parts * replicas}
    virtually = virtual(job_text("plain"), f"bsp collective {partition}", **options)
    really = local(job_text("plain"), f"bsp collective {partition}", fork_server=fork_server, **options)
    assert torch.equal(virtually.params, really.params)
    assert virtually.summary["bytes_sent"] == really.summary["bytes_sent"]


GPT = "char-gpt:layers=2,width=16,heads=2,context=12"


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "partition", "workers"),
    [
        (GPT, "tensor:ways=2", 2),
        (f"{GPT},tied=true", "tensor:ways=2", 2),
        (GPT, "tensor:ways=2,sequence=true", 2),
        ("digits-mlp:hidden=16", "tensor:ways=3", 3),
        *soaked(
            (GPT, "gpipe:stages=2,micro=2+tensor:ways=2", 4),
            (f"{GPT},tied=true", "1f1b:stages=2,micro=2+tensor:ways=2", 4),
        ),
    ],
)
def test_built_in_jobs_train_as_whole_models_do(job, partition, workers):
    options = OPTIONS | {"batch_size": 8, "steps": 4}
    whole = virtual(job, "bsp collective", workers=1, **options)
    shared = virtual(job, f"bsp collective {partition}", workers=workers, **options)
    torch.testing.assert_close(shared.params, whole.params, rtol=0, atol=1e-12)


def test_the_record_counts_the_collectives_of_a_layer():
    """Two all-reduces forward and two backward in each of two layers, of 8 x 12 x 16 values, and those of the words.

    The words have one all-reduce of their embeddings, and one of the gradient of the head's inputs. The loss has an
    all-gather and an all-reduce, of one and of two values for each of 8 x 12 positions.
    """
    run = virtual(GPT, "bsp collective tensor:ways=2", workers=2, **OPTIONS | {"batch_size": 8, "steps": 3})
    hidden, positions = 8 * 12 * 16 * 8, 8 * 12 * 8
    for stage in run.summary["pipeline"].values():
        assert stage["collectives"] == {"all_gather": 3, "all_reduce": 3 * (4 * 2 + 2 + 1)}
    sent = 2 * 3 * ((4 * 2 + 2) * hidden + 3 * positions)
    assert run.summary["bytes_sent"] == sent


def test_frozen_parameters_have_the_same_values_in_all_runs(fork_server):
    """Against a plain loop on a model made under the run's seed: unpartitioned, in stages, and shared."""
    options = {"steps": 5, "seed": 3, "dtype": "float64", "eval_every": 5, "optimizer": "sgd:lr=0.1", "workers": 1}
    setup, _ = resolved(job_text("frozen"), "bsp collective", on="virtual", **options)
    own, model = setup.job, setup.job.build(3)
    trained = [each for each in model.parameters() if each.requires_grad]
    (sampler,) = own.samplers([own.batch_size], seed=3)
    for _ in range(5):
        inputs, targets = own.train.batch(sampler.next())
        gradients = torch.autograd.grad(own.loss(model(inputs), targets), trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= 0.1 * gradient
    right = torch.cat([each.detach().reshape(-1) for each in trained])
    inputs, targets = own.test.batch(torch.arange(len(own.test)))
    loss = float(own.loss(model(inputs), targets).detach())
    runs = [
        virtual(job_text("frozen"), f"bsp collective {partition}", **options | {"workers": workers})
        for partition, workers in [("none", 1), ("gpipe:stages=2,micro=2", 2), (pairs(2), 2)]
    ]
    runs.append(local(job_text("frozen"), "bsp collective", fork_server=fork_server, **options))
    for run in runs:
        torch.testing.assert_close(run.params, right, rtol=0, atol=1e-13)
        assert run.rows[-1]["loss"] == pytest.approx(loss, rel=1e-3)

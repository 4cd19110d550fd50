"""Figures of stages in the record of a run: staleness, versions, micro-batches in flight, and bytes."""

import pytest
from support.purposes import soaked

import dure
from dure.job.job import load_job
from dure.partition.memory import of_part
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve

STAGES = 4
OPTIONS = {"sync": "bsp", "topology": "collective", "on": "virtual", "steps": 12, "batch_size": 8}


def ended(partition, **options):
    job = load_job("digits-mlp", depth=7, hidden=16)
    return dure.train(job, partition=partition, workers=STAGES, **{**OPTIONS, **options}).summary()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("partition", "staleness", "versions", "sets"),
    [
        ("gpipe:stages=4,micro=6", [0, 0, 0, 0], [1, 1, 1, 1], [6, 6, 6, 6]),
        ("1f1b:stages=4,micro=6", [0, 0, 0, 0], [1, 1, 1, 1], [4, 3, 2, 1]),
        ("pipedream:stages=4", [3, 2, 1, 0], [4, 3, 2, 1], [4, 3, 2, 1]),
        ("pipedream:stages=4,sync=vertical", [3, 3, 3, 3], [4, 4, 4, 4], [4, 3, 2, 1]),
        ("pipedream:stages=4,ahead=many", [6, 4, 2, 0], [7, 5, 3, 1], [7, 5, 3, 1]),
        ("petrowski:stages=4", [6, 4, 2, 0], [1, 1, 1, 1], [7, 5, 3, 1]),
        ("multi-version:stages=4", [0, 0, 0, 0], [7, 7, 7, 7], [7, 5, 3, 1]),
    ],
)
@pytest.mark.parametrize("timing_only", [True, *soaked(False)])
def test_figures_are_those_of_the_table_of_methods(partition, staleness, versions, sets, timing_only):
    summary = ended(partition, steps=14, timing_only=timing_only)["pipeline"]
    found = [summary[f"worker {rank}"] for rank in range(STAGES)]
    assert [max(map(int, each["staleness"])) for each in found] == staleness
    assert [each["versions"] for each in found] == versions
    assert [each["sets"] for each in found] == sets


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "partition",
    [
        "gpipe:stages=4,micro=4,remat=true",
        "1f1b:stages=4,micro=5",
        "pipedream:stages=4",
        "petrowski:stages=4,acts=overwritten",
        "multi-version:stages=4",
    ],
)
def test_counted_bytes_are_the_predicted_ones(partition):
    job = load_job("digits-mlp", depth=7, hidden=16)
    setup, _ = resolve(TrainConfig(job="", partition=partition, workers=STAGES, **OPTIONS), Prebuilt(job=job))
    assert setup.stages is not None
    found = ended(partition)["pipeline"]
    for rank in range(STAGES):
        use, counted = of_part(setup.stages.layout, rank, 8, vectors=0), found[f"worker {rank}"]
        assert counted["weight_bytes"] == use.weights
        assert counted["version_bytes"] == use.versions
        assert counted["activation_bytes"] == use.activations


def test_the_staleness_of_a_run_is_that_of_all_its_stages():
    summary = ended("pipedream:stages=4")
    assert summary["staleness"]["histogram"] == {"0": 12 + 3, "1": 11 + 2, "2": 10 + 1, "3": 9}
    assert ended("none")["staleness"]["max"] == 0
    assert "pipeline" not in ended("none")


def test_figures_go_on_after_checkpoints(tmp_path):
    options = {"checkpoint_every": 4}
    whole = ended("pipedream:stages=4", **options, out=tmp_path / "whole")
    assert sum(whole["pipeline"]["worker 0"]["staleness"].values()) == 12
    assert whole["pipeline"]["worker 0"]["staleness"] == {"0": 3, "1": 3, "2": 3, "3": 3}

"""Replicas of a pipeline with a flush are workers with the whole model: the same parameters under every method."""

from __future__ import annotations

import pytest
from support.runs import Finished, virtual
from support.soak import soaked

from dure.errors import StrategyError
from dure.run.strategy import Strategy

OPTIONS = {"steps": 7, "batch_size": 8, "dtype": "float64", "split": "striped"}
GPIPE = "gpipe:stages=2,micro=2"


def pair(strategy: str, partition: str = GPIPE, stages: int = 2, **options: object) -> tuple[Finished, Finished]:
    """A run of two replicas of a pipeline, and that of two workers without a partition."""
    chosen = {**OPTIONS, **options}
    return (
        virtual("digits-mlp", f"{strategy} {partition}", workers=2 * stages, **chosen),
        virtual("digits-mlp", strategy, workers=2, **chosen),
    )


def distance(one: Finished, other: Finished) -> float:
    return float((one.params - other.params).abs().max())


COLLECTIVE = [
    "bsp collective",
    "averaging:period=3 collective",
    "one-shot collective",
    "easgd:period=2 collective",
    "eamsgd:period=2 collective",
    "bmuf:period=4,overlap=2 collective",
    "diloco:period=3 collective",
    *soaked(
        "averaging:period=2,weights=fisher collective",
        "averaging:period=3,state=average collective",
        "bmuf:period=3 collective",
        "bsp collective:algorithm=tree",
        "averaging:period=2 collective:algorithm=ring",
    ),
]


@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_replicas_of_a_pipeline_are_workers_with_the_whole_model(strategy):
    one, other = pair(strategy, optimizer="momentum" if strategy.startswith("averaging") else None)
    assert distance(one, other) < 1e-12


def test_unequal_batches_weigh_the_replicas():
    one, other = pair("averaging:period=3 collective", batch_sizes=(12, 4))
    assert distance(one, other) < 1e-12


def test_averaging_after_every_step_is_bsp():
    one, _ = pair("averaging:period=1 collective")
    assert distance(one, pair("bsp collective")[1]) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("averaging:weights=loss collective", "weights=loss uses the loss, and only the last stage knows it"),
        ("averaging:schedule=adaptive collective", "schedule=adaptive uses the loss"),
        ("averaging:schedule=overhead collective", "schedule=overhead measures seconds"),
        ("averaging:pace=time ps", "pace=time counts a worker's steps by its seconds"),
        ("bmuf:fragments=2 collective", "fragments cut the vector of the whole model"),
        ("backup ps", "it decides on each gradient"),
        ("k-sync ps", "it decides on each gradient"),
        ("lbfgs ps", "it decides on each gradient"),
    ],
)
def test_a_method_that_would_decide_for_each_stage_is_refused(strategy, reason):
    with pytest.raises(StrategyError, match=f"does not run over gpipe:stages=2,micro=2: {reason}"):
        Strategy.parse(f"{strategy} {GPIPE}")

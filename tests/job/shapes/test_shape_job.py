"""Parameters that all published models have."""

from __future__ import annotations

import pytest
from support.wording import raising

from dure.errors import StrategyError
from dure.job.job import load_job
from dure.planner.candidates import Scene
from dure.planner.timing import timed
from dure.runtime.virtual.cluster import Cluster


@pytest.mark.parametrize("name", ["alexnet:batch=1", "gnmt8:batch=1,sequence=2", "transformer:layers=1,batch=1"])
def test_the_state_of_the_optimizer_counts_in_the_memory_of_a_worker(name: str) -> None:
    cluster = Cluster(machines=[{"gpus": 2}])
    plain, adam = (
        timed(Scene(job, cluster, 2), "bsp").memory
        for job in (load_job(f"{name},optimizer={rule}") for rule in ("sgd", "adamw"))
    )
    assert (plain.optimizer, adam.optimizer) == (0, 2 * plain.weights)
    assert adam.total == plain.total + 2 * plain.weights


def test_an_unknown_optimizer_is_refused() -> None:
    with raising(StrategyError, 'no optimizer "adamx"'):
        load_job("bert-base:optimizer=adamx")

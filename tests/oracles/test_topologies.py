"""One short run on processes for each topology: the loss falls, and every worker makes its steps."""

from __future__ import annotations

import pytest
from support import sparse_jobs
from support.runs import local

from dure.job.evaluation import Evaluator
from dure.run.strategy import catalogue

SPARSE = f"{sparse_jobs.__file__}:sparse"
RUNS = {
    "collective": ("digits-mlp", "bsp collective"),
    "ps": ("digits-mlp", "ssp:bound=2 ps:shards=2"),
    "hybrid": (SPARSE, "bsp hybrid:servers=all"),
    "shared": (SPARSE, "hogwild shared"),
    "gossip": ("digits-mlp", "ad-psgd gossip"),
}


def test_every_topology_is_here():
    assert RUNS.keys() == catalogue("topology").keys()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", RUNS)
def test_a_run_on_processes(topology, fork_server):
    job, strategy = RUNS[topology]
    run = local(job, strategy, workers=2, steps=40, eval_every=10, fork_server=fork_server)
    untrained = Evaluator(run.setup.job).grade(run.setup.replica.params)
    assert run.rows[-1]["loss"] < 0.97 * untrained.loss
    assert run.rows[-1]["step"] == 40
    assert run.summary["samples"] == 2 * 40 * run.setup.job.batch_size

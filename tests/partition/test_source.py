"""Mean gradients over the replicas of a stage: their time in the record of a run."""

import pytest
from support.chains import chain, split
from support.runs import virtual

from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant


@pytest.mark.parametrize("stages", [1, 2])
def test_each_worker_communicates_for_as_long_as_one_with_the_whole_model(stages):
    """The all_reduce takes the latency alone here, so it takes as long for a part of the model."""
    whole = virtual(chain(), "bsp collective", _latency(2), workers=2, steps=3)
    partition = split("gpipe:micro=2", stages)
    cut = virtual(chain(), f"bsp collective {partition}", _latency(2 * stages), workers=2 * stages, steps=3)
    assert whole.outcome.totals.time["communicate"] > 0
    assert cut.outcome.totals.time["communicate"] == pytest.approx(stages * whole.outcome.totals.time["communicate"])
    assert cut.outcome.totals.time["compute"] == pytest.approx(whole.outcome.totals.time["compute"])


def test_all_time_of_a_worker_is_in_the_record():
    run = virtual(chain(), "bsp collective gpipe:stages=1,micro=2", _latency(2), workers=2, steps=3)
    assert sum(run.outcome.totals.time.values()) == pytest.approx(2 * run.seconds)


def _latency(workers):
    return Cluster.uniform(
        workers, link=Link(bandwidth=1e18, latency=1.0), alpha=0.0, beta=0.0, compute=Constant(call=0.0)
    )

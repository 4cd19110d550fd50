"""Pipelines on processes of this machine, against the same pipelines in virtual time."""

from __future__ import annotations

import pytest
import torch
from support.runs import local, virtual
from support.soak import soaked
from support.stage_jobs import job_text

from dure.runtime.launch.fork_server import ForkServer

PARTITIONS = [
    "gpipe:stages=2,micro=3",  # of 10 samples: 4, 3 and 3
    "gpipe:stages=2,micro=3,remat=true",
    "1f1b:stages=4,micro=4",
    "pipedream:stages=3",
    "pipedream:stages=2,remat=true",
    "ddg:stages=2",
    "features-replay:stages=3",
]
GRADED = ("step", "updates", "loss", "accuracy")


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer() as one:
        yield one


def both(fork_server, job, strategy, workers, **options):
    given = {"workers": workers, "steps": 7, "eval_every": 3, "seed": 3, "dtype": "float64"} | options
    text = job_text(job) if "-" not in job else job
    return virtual(text, strategy, **given), local(text, strategy, fork_server=fork_server, **given)


def check_equal(virtually, really, within=0.0):
    """The same model up to `within`, and the same rows; the same counts and payload bytes at each worker exactly."""
    torch.testing.assert_close(really.params, virtually.params, rtol=0, atol=within)
    rows = [[{name: row[name] for name in GRADED} for row in run.rows] for run in (virtually, really)]
    assert [row["step"] for row in rows[1]] == [3, 6, 7]
    for row, expected in zip(rows[1], rows[0], strict=True):
        assert row == pytest.approx(expected, rel=0, abs=within), "rows differ"
    there, here = virtually.summary, really.summary
    for name in ("samples", "updates_applied", "steps", "staleness"):
        assert here[name] == there[name], name
    for worker, counts in there["per_worker"].items():
        for name in ("bytes_sent", "bytes_received"):
            assert here["per_worker"][worker][name] == counts[name], f"{name} of {worker}"


def stages(partition):
    return int(partition.partition("stages=")[2].partition(",")[0])


@pytest.mark.parametrize("partition", [*PARTITIONS[1::2], *soaked(*PARTITIONS[0::2])])
@pytest.mark.parametrize("job", ["normed", *soaked("plain", "normed_first", "normed_last")])
def test_a_pipeline_on_processes_is_the_virtual_one_bit_for_bit(job, partition, fork_server):
    """Batch norm and dropout included: the losses of the rows are those of the buffers that all stages sent."""
    check_equal(*both(fork_server, job, f"bsp collective {partition}", stages(partition)))


@pytest.mark.parametrize("partition", [PARTITIONS[0], PARTITIONS[4], *soaked(PARTITIONS[1], *PARTITIONS[5:6])])
def test_two_pipelines_on_processes_are_the_virtual_ones(partition, fork_server):
    """A sum of two is the same in either order, so even over an all-reduce of the engine all bits are equal."""
    check_equal(*both(fork_server, "normed", f"bsp collective {partition}", 2 * stages(partition)))


@pytest.mark.parametrize("algorithm", ["ring", *soaked("tree", "halving-doubling")])
def test_two_groups_written_from_messages_on_one_node(algorithm, fork_server):
    """Each node is in a group of its stage, whose messages have tags of their own beside those of the pipeline."""
    strategy = f"bsp collective:algorithm={algorithm} gpipe:stages=2,micro=2"
    check_equal(*both(fork_server, "normed", strategy, 4))


def test_a_batch_of_uneven_micro_batches_in_pipelines_of_unequal_batches(fork_server):
    strategy = "bsp collective gpipe:stages=2,micro=3"
    check_equal(*both(fork_server, "plain", strategy, 4, batch_sizes=(7, 10)), within=1e-12)

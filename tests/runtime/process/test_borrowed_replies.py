"""What a server lends to its workers in virtual time: the same memory, for reading, until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import local, virtual
from support.wording import raising

from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.virtual.cluster import Cluster
from dure.sync.worker_state import WorkerState
from dure.topology.parameter_server.versions import Buffer

STEPS = 4


def segment(shards: int = 1) -> VirtualSegment:
    """Two SSP workers, ready to run."""
    cluster = Cluster.uniform(2)
    strategy = f"ssp:bound=1 ps:shards={shards}"
    config = TrainConfig(job="digits-mlp", strategy=strategy, on="virtual", workers=2, steps=STEPS)
    setup, _ = resolve(config, Prebuilt(cluster=cluster))
    return VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)


def spied(run: VirtualSegment, look: Callable[[WorkerState], None]) -> None:
    """Call `look` at each step of every worker, and run to the end."""
    for worker in run.workers.values():
        before = worker.on_step

        def on_step(own: WorkerState, gradient: object, before: object = before) -> None:
            look(own)
            before(own, gradient)  # type: ignore[operator]

        worker.on_step = on_step
    run.run()


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_worker_computes_on_the_memory_of_the_only_shard() -> None:
    run = segment()
    seen: list[bool] = []
    spied(run, lambda worker: seen.append(memory(worker.params) in {memory(b.tensor) for b in versions(run)}))
    assert seen == [True] * 2 * STEPS


def versions(run: VirtualSegment) -> list[Buffer]:
    (shard,) = run.shards
    return [shard.versions.current, *shard.versions._kept.values()]


def test_parameters_of_several_shards_are_the_workers_own() -> None:
    run = segment(shards=2)
    owners: list[int] = []
    spied(run, lambda worker: owners.append(memory(worker.params)))
    assert not set(owners) & {memory(shard.values) for shard in run.shards}


def test_what_was_lent_is_given_back() -> None:
    run = segment()
    spied(run, lambda worker: None)
    assert run.shards[0].versions.pool.made <= 2 * (2 + 1) + 2, (
        "versions that two workers read or stage, and what is made next"
    )


def test_writing_to_what_was_lent_is_an_error_that_names_the_way_out() -> None:
    run = segment()
    with raising(UsageError, "worker.server.pull()"):
        spied(run, lambda worker: worker.params.mul_(2))


def test_what_was_lent_and_left_is_given_back_and_never_written_to() -> None:
    """A loop of the user's own copies what it is given to where its module lies."""
    run = segment()

    def look(worker: WorkerState) -> None:
        lent, home = memory(worker.params), torch.empty_like(worker.params)
        values = worker.params.clone()
        holders = sum(buffer.holders for buffer in versions(run))
        worker.settle(home)
        assert worker.params is home
        assert torch.equal(home, values)
        assert sum(buffer.holders for buffer in versions(run)) == holders - 1
        assert memory(worker.room()) != lent

    spied(run, look)


BIG = """
from dure.job.job import load_job
def job():
    return load_job("quadratic", dim=300_000, samples=32)
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["ssp:bound=0", "bsp", "downpour:at_once=true"])
def test_across_processes_a_worker_computes_on_what_is_lent_as_in_virtual_time(
    method: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    file = tmp_path / "job.py"
    file.write_text(BIG)
    workers = 1 if method.startswith("downpour") else 2
    options: dict[str, Any] = {"workers": workers, "steps": 6}
    real = local(f"{file}:job", f"{method} ps", fork_server=fork_server, **options)
    assert torch.allclose(real.params, virtual(f"{file}:job", f"{method} ps", **options).params, rtol=0, atol=1e-6)
    assert real.outcome.totals.counts["updates_applied"] == 6 * workers

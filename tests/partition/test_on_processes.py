"""Pipelines on processes of this machine, against the same pipelines in virtual time."""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.purposes import soaked
from support.real_runs import Terminate, Trial
from support.runs import local, virtual
from support.stage_jobs import job_text
from support.wording import raising

from dure.errors import UsageError
from dure.run import checkpoint
from dure.run.config import TrainConfig
from dure.runtime.launch.interruption import Interrupted, Interruption
from dure_studies import namespaces

EAGER = Path(__file__).parents[2] / "examples" / "10_eager_1f1b.py"
PARTITIONS = [
    "gpipe:stages=2,micro=3",  # of 10 samples: 4, 3 and 3
    "gpipe:stages=2,micro=3,remat=true",
    "1f1b:stages=4,micro=4",
    "pipedream:stages=3",
    "pipedream:stages=2,remat=true",
    "ddg:stages=2",
    "features-replay:stages=3",
    f"{EAGER}:Eager:stages=2,micro=3",
]
ASYNCHRONOUS = [
    "multi-version:stages=2",
    "petrowski:stages=3",
    "pipedream:stages=3,sync=vertical",
    "pipedream-2bw:stages=2,micro=3",
    "chen:stages=2,delay=2",
]
GRADED = ("step", "updates", "loss", "accuracy")


def both(fork_server, job, strategy, workers, **options):
    given = {"workers": workers, "steps": 7, "eval_every": 3, "seed": 3, "dtype": "float64"} | options
    text = job_text(job) if "-" not in job else job
    return virtual(text, strategy, **given), local(text, strategy, fork_server=fork_server, **given)


def check_equal(virtually, really, within=0.0):
    """The same model up to `within`, and the same rows; the same counts and payload bytes at each worker exactly."""
    torch.testing.assert_close(really.params, virtually.params, rtol=0, atol=within)
    check_rows(really.rows, virtually.rows, [3, 6, 7], within)
    there, here = virtually.summary, really.summary
    for name in ("samples", "updates_applied", "steps", "staleness"):
        assert here[name] == there[name], name
    for worker, counts in there["per_worker"].items():
        for name in ("bytes_sent", "bytes_received"):
            assert here["per_worker"][worker][name] == counts[name], f"{name} of {worker}"


def check_rows(rows, expected, steps, within=0.0):
    """The losses are those of the whole model with the buffers of all stages."""
    assert [row["step"] for row in rows] == steps
    for row, other in zip(rows, expected, strict=True):
        chosen = [{name: each[name] for name in GRADED} for each in (row, other)]
        assert chosen[0] == pytest.approx(chosen[1], rel=0, abs=within)


def stages(partition):
    return int(partition.partition("stages=")[2].partition(",")[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("partition", [*PARTITIONS[1::2], *soaked(*PARTITIONS[0::2], *ASYNCHRONOUS)])
@pytest.mark.parametrize("job", ["normed", *soaked("plain", "normed_first", "normed_last")])
def test_a_pipeline_on_processes_is_the_virtual_one_bit_for_bit(job, partition, fork_server):
    """Batch norm and dropout included: the losses of the rows are those of the buffers that all stages sent."""
    check_equal(*both(fork_server, job, f"bsp collective {partition}", stages(partition)))


@pytest.mark.sampled(1)
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


def test_a_worker_in_an_all_reduce_hands_out_messages(fork_server):
    """Otherwise this run would never end: see `late_requests`."""
    deadline = time.monotonic() + 30

    def act(trial):
        assert time.monotonic() < deadline, "the run hangs"

    options = {"workers": 4, "steps": 4, "seed": 3, "eval_every": 100}
    strategy = "bsp collective pipedream:stages=2"
    config = TrainConfig(job=job_text("late_requests"), strategy=strategy, on="local", **options)
    really = Trial(config).run(act, fork_server=fork_server)
    assert torch.equal(really.params, virtual(job_text("plain"), strategy, **options).params)


def test_a_worker_does_not_finish_before_its_last_message_is_fetched(fork_server):
    """It would count the bytes that it has sent without that message."""
    options = {"workers": 2, "steps": 3, "seed": 3}
    strategy = "bsp collective pipedream:stages=2"
    really = local(job_text("slow_requests"), strategy, fork_server=fork_server, **options)
    there = virtual(job_text("plain"), strategy, **options)
    sent = [run.summary["per_worker"]["worker 1"]["bytes_sent"] for run in (really, there)]
    assert sent[0] == sent[1] == 3 * 10 * 12 * 4


# ---- checkpoints


@pytest.mark.long
@pytest.mark.parametrize(
    "partition",
    [
        "pipedream:stages=2",
        *soaked("gpipe:stages=2,micro=2", "ddg:stages=3", "dni:stages=2", "spectrain:stages=3"),
        *soaked("multi-version:stages=2", "pipedream:stages=2,sync=vertical"),
    ],
)
def test_a_pipeline_is_resumed_from_a_checkpoint(partition, fork_server, tmp_path):
    """As if it had been killed before its last checkpoint. It ends as the virtual run with the same checkpoints."""
    strategy = f"bsp collective {partition}"
    options = {"workers": 2 * stages(partition), "steps": 8, "eval_every": 3, "checkpoint_every": 3, "seed": 3}
    options |= {"optimizer": "momentum", "dtype": "float64"}
    config = TrainConfig(job=job_text("normed"), strategy=strategy, on="local", out=tmp_path / "here", **options)
    whole = Trial(config).run(fork_server=fork_server)
    there = virtual(job_text("normed"), strategy, out=tmp_path / "there", **options)
    assert torch.equal(whole.params, there.params)
    shutil.rmtree(tmp_path / "here" / "checkpoints" / "step-6")
    trial = Trial(replace(config, resume=tmp_path / "here"))
    resumed = trial.run(fork_server=fork_server)
    assert torch.equal(resumed.params, there.params)
    check_rows(resumed.history, there.rows, [3, 6, 8])
    for name in ("samples", "updates_applied"):
        assert resumed.totals.counts[name] == there.outcome.totals.counts[name], name
    assert resumed.totals.staleness.as_dict() == there.outcome.totals.staleness.as_dict()


@pytest.mark.long
@pytest.mark.parametrize("partition", ["pipedream:stages=3", *soaked("1f1b:stages=2,micro=2", "dni:stages=3,rate=0.3")])
def test_sigterm_drains_a_pipeline_at_a_step_that_no_stage_has_begun(partition, fork_server, tmp_path):
    """The checkpoint is that of the virtual run that is scheduled to drain at this step."""
    strategy = f"bsp collective {partition}"
    options = {"workers": stages(partition), "steps": 100_000, "seed": 3, "optimizer": "momentum"}
    config = TrainConfig(
        job=job_text("slow"),
        strategy=strategy,
        on="local",
        checkpoint_every=10**6,
        eval_every=10**6,
        out=tmp_path,
        **options,
    )
    trial, interruption = Trial(config), Interruption()
    with pytest.raises(Interrupted), interruption.heard():
        trial.run(Terminate(), fork_server=fork_server, interruption=interruption)
    left = checkpoint.load(tmp_path / "checkpoints")
    clocks = {left.parts[f"worker-{number}"].plain["clock"] for number in range(options["workers"])}
    assert clocks == {left.step}
    assert 10 <= left.step < 10_000
    goes_on = {"steps": left.step + 5}
    resumed = Trial(replace(config, resume=tmp_path, **goes_on)).run(fork_server=fork_server)
    drained = virtual(
        job_text("slow"), strategy, **options | goes_on, checkpoint_every=left.step, out=tmp_path / "there"
    )
    assert torch.equal(resumed.params, drained.params)


def test_a_pipeline_does_not_end_after_seconds():
    with raising(UsageError, "mini-batch"):
        virtual("digits-mlp", "bsp collective pipedream:stages=2", workers=2, seconds=3)


# ---- several hosts


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_two_pipelines_over_two_hosts_are_the_virtual_ones():
    """Each host has the stages of one pipeline; the all-reduces of each stage cross between the hosts."""
    options = ["--partition", "pipedream:stages=2", "--steps", "6", "--seed", "3", "--dtype", "float64"]
    command = ["-m", "dure", "train", "digits-mlp", "--sync", "bsp", "--on", "torchrun", *options, "--json"]
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        done = hosts.run([sys.executable, *command], seconds=100, per_host=2)
    summary = json.loads(done[0].out.splitlines()[-1])
    given = {"workers": 4, "steps": 6, "seed": 3, "dtype": "float64"}
    there = virtual("digits-mlp", "bsp collective pipedream:stages=2", **given).summary
    assert summary["params_sha256"] == there["params_sha256"]
    for worker, counts in there["per_worker"].items():
        assert summary["per_worker"][worker]["bytes_sent"] == counts["bytes_sent"], worker


# ---- memory


def private_nbytes(pid):
    """The memory of a process that no other shares, and that it has written."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.soak
def test_a_process_of_a_stage_takes_the_memory_of_a_stage(fork_server):
    """Of a model of 137 MB: parameters, gradient, velocity, and the weights of a mini-batch, of a half each."""
    most = {}

    def look(trial):
        for name, pid in trial.fork_server.pids.items():
            with suppress(OSError):
                most[name] = max(most.get(name, 0), private_nbytes(pid))

    options = {"workers": 2, "steps": 6, "eval_every": 100, "optimizer": "momentum", "on": "local"}
    found = []
    for strategy in ("bsp collective", "bsp collective gpipe:stages=2,micro=2"):
        most.clear()
        Trial(TrainConfig(job=job_text("large"), strategy=strategy, **options)).run(look, fork_server=fork_server)
        found.append(max(most.values()))
    assert found[1] < 0.6 * found[0]

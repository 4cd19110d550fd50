"""Checkpoints of elastic runs: counted from one, each sample of an epoch is used once, whoever works then."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.real_runs import JOBS, Trial, configured
from support.wording import raising

from dure.core.regular_file import CHECKPOINTS, LATEST
from dure.core.state import State
from dure.errors import UsageError
from dure.report.record import RunFolder
from dure.run import checkpoint
from dure.run.checkpoint_schedule import CheckpointRound
from dure.run.config import TrainConfig, WorkerRange
from dure.run.leases import Leases
from dure.run.resolve import resolve
from dure.run.resume import resumed
from dure.run.scaling import REQUEST, STATE
from dure.run.train import run
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity

SAMPLES, EPOCHS, BATCH = 960, 5, 4
LEAST, MOST, SCALED = 2, 4, 3
OPTIONS = {"workers": f"{LEAST}..{MOST}", "epochs": float(EPOCHS), "checkpoint_every": 30}
OTHERS = ("ssp:bound=3 ps:shards=2", "bsp ps", "hogwild", "ad-psgd", "easgd:period=4")
STRATEGIES = ["downpour ps:shards=2", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)]


def used(folder: Path, leave_out=()) -> Counter[int]:
    """The samples that processes have used, apart from some."""
    files = [path for path in folder.glob("samples *") if int(path.name.split()[1]) not in leave_out]
    return Counter(int(word) for path in files for word in path.read_text().split())


def left_of(folder: Path, setup) -> Counter[int]:
    """The samples that the newest checkpoint has as not used, by the order of the run's mini-batches."""
    leases = checkpoint.load(folder / CHECKPOINTS).parts["run"].plain["leases"]
    return samples_of(setup, [number for start, stop in leases["left"] for number in range(start, stop)])


def samples_of(setup, numbers):
    sampler, found = setup.data.sampler(0), Counter()
    for number in numbers:
        sampler.number = number
        found.update(sampler.next().tolist())
    return found


@pytest.fixture(params=STRATEGIES)
def killed(request, tmp_path):
    """The folder of a run with three workers whose launcher was killed after a checkpoint, and what it has used."""
    out, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    options = ["--workers", OPTIONS["workers"], "--epochs", str(EPOCHS), "--checkpoint-every", "30"]
    command = [sys.executable, "-m", "dure", "train", f"{JOBS}:notes_samples", "--strategy", request.param, *options]
    launcher = subprocess.Popen(
        [*command, "--out", str(out), "--data", str(data)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(launcher, lambda: (out / STATE).exists())
        (out / REQUEST).write_text(json.dumps({"workers": SCALED}))
        wait_for(launcher, lambda: parts_of_workers(out) == SCALED)
        before = sum(used(data).values())
        wait_for(launcher, lambda: sum(used(data).values()) >= before + 40)
    finally:
        launcher.kill()
        launcher.wait(30)
    time.sleep(0.5)  # its processes end on their own
    return out, used(data)


def wait_for(launcher, condition):
    until = time.monotonic() + 60
    while not condition():
        assert launcher.poll() is None, "it was over before"
        assert time.monotonic() < until
        time.sleep(0.02)


def parts_of_workers(out: Path) -> int:
    if not (out / CHECKPOINTS / LATEST).exists():
        return 0
    newest = out / CHECKPOINTS / (out / CHECKPOINTS / LATEST).read_text().strip()
    return len(list(newest.glob("worker-*.json")))


def go_on(folder: Path, fork_server, act=lambda trial: None, **given):
    """Resume a run; its trial, its outcome and what its processes have used."""
    data = folder.parent / f"{folder.name} data"
    data.mkdir()
    trial = Trial(resumed(TrainConfig(resume=folder, data=data, **given)))
    return trial, trial.run(act, fork_server=fork_server), used(data)


def test_a_run_whose_launcher_was_killed_goes_on_with_any_number_of_workers(killed, fork_server):
    out, first = killed
    for number in (None, LEAST, MOST):
        folder = out.parent / f"with {number}"
        shutil.copytree(out, folder)
        given = {} if number is None else {"workers": number}
        trial, outcome, second = go_on(folder, fork_server, **given)
        left = left_of(out, trial.setup)
        assert second == left
        assert first + left >= Counter(dict.fromkeys(range(SAMPLES), EPOCHS)), "the checkpoint counts what was not used"
        assert outcome.totals.counts["samples"] == EPOCHS * SAMPLES
        assert trial.driver.scaling._target == (number or SCALED)
        ranks = {f"worker {rank}" for rank in range(number or SCALED)}
        assert trial.driver.roster.incarnations.keys() - {*trial.driver.roster.servers} == ranks
        assert trial.driver.roster.finished.keys() <= ranks


# ---- a killed server


@pytest.fixture
def losing(tmp_path, fork_server):
    """A run that loses a process once it has a checkpoint and has gone on for a while."""

    def lose(strategy, victim):
        out, data = tmp_path / "run", tmp_path / "data"
        out.mkdir()
        data.mkdir()
        trial = Trial(configured("notes_samples", strategy, data=data, out=out, **OPTIONS))
        lives = []

        def kill(trial):
            if not (out / REQUEST).exists() and trial.driver.scaling._target == LEAST and len(trial.drivers) == 1:
                (out / REQUEST).write_text(json.dumps({"workers": SCALED}))
            elif not lives and parts_of_workers(out) == SCALED and len(trial.driver.roster.working()) == SCALED:
                lives.append({*trial.fork_server.processes.values()})
                lives.append(left_of(out, trial.setup))
                lives.append(trial.driver)
                trial.kill(victim)

        outcome = trial.run(kill, fork_server=fork_server)
        return trial, outcome, lives, data

    return lose


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("downpour ps:shards=2", "server 0"),
        pytest.param("bsp ps:shards=2", "server 1", marks=pytest.mark.long),
        pytest.param("ssp:bound=3 ps", "server 0", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_a_dead_server_takes_an_elastic_run_back_to_the_checkpoint(strategy, victim, losing):
    trial, outcome, (pids, left, _), data = losing(strategy, victim)
    assert len(trial.drivers) == 2
    assert used(data, leave_out=pids) == left
    assert trial.driver.scaling._target == SCALED
    assert outcome.totals.counts["samples"] == EPOCHS * SAMPLES
    assert trial.driver.roster.finished.keys() == {f"worker {rank}" for rank in range(SCALED)}


@pytest.mark.long  # 7 s; a launcher that was killed keeps the leases in make test
def test_a_server_that_comes_back_alone_keeps_the_leases(losing):
    trial, outcome, _, data = losing("downpour ps:shards=2", "server 1")
    assert len(trial.drivers) == 1
    assert trial.driver.roster.incarnations["server 1"] == 1
    assert used(data) == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert outcome.totals.counts["samples"] == EPOCHS * SAMPLES


def test_a_worker_that_is_started_again_before_the_others_have_written_holds_nobody_up(tmp_path):
    node, working = ProcessNode(Identity("job", "driver"), Credentials.drawn("mac")), {"worker 0", "worker 1"}
    current = CheckpointRound(node, tmp_path, 10, lambda: working)
    current.draft.mkdir()
    for name in sorted(working):
        current.stopped(name)
    checkpoint.write_part(current.draft, "worker-1", State())
    working.remove("worker 1")
    current.look()
    working.add("worker 1")  # another process, which waits for the end
    assert not current.all_written.done
    current.written("worker 0", None)
    assert current.all_written.done
    current._remove_failed()
    assert not list(current.draft.iterdir()), "the newcomer would go on from the part of the one that has failed"
    node.wire.close(0.1)
    node.loop.end()


# ---- the last checkpoint, other lengths, other numbers


@pytest.mark.long  # 14 s; runs of a killed launcher go on in make test
def test_sigterm_leaves_a_checkpoint_from_which_the_rest_is_used_once(tmp_path, fork_server):
    out, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    words = ["--workers", OPTIONS["workers"], "--epochs", str(EPOCHS), "--checkpoint-every", "100000"]
    command = [sys.executable, "-m", "dure", "train", f"{JOBS}:notes_samples", "--sync", "downpour", *words]
    launcher = subprocess.Popen(
        [*command, "--out", str(out), "--data", str(data)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(launcher, lambda: sum(used(data).values()) >= 400)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait(30)
    assert f"resume with: dure train --resume {out}" in said
    first, left = used(data), left_of(out, resolve(resumed(TrainConfig(resume=out)))[0])
    _, outcome, second = go_on(out, fork_server)
    assert second == left
    assert first + left >= Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert outcome.totals.counts["samples"] == EPOCHS * SAMPLES


@pytest.mark.parametrize(("total", "left"), [(240, 180), (720, 660), (480, 420)])
def test_the_ranges_that_are_left_follow_the_length_of_the_run(total, left):
    """Of 480 mini-batches 60 are used, the last of them in the middle of leases."""
    leases = Leases(480)
    leases.take("worker 0", workers=1)
    leases.take("worker 1", workers=1)
    leases.report("worker 1", 26)
    for _ in range(3):
        leases.take("worker 0", workers=1)
    leases.report("worker 0", 66)
    assert leases.left == 420
    again = Leases(total)
    again.restore(json.loads(json.dumps(leases.state())))
    assert again.left == left
    taken = []
    while work := again.take("worker 5", workers=1):
        taken += work
    assert taken == [*range(26, 32), *range(66, total)]


def test_a_run_is_resumed_with_a_number_in_its_range_and_with_no_fewer_steps_than_it_has(tmp_path, fork_server):
    out, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    trial = Trial(configured("notes_samples", "downpour ps", data=data, out=out, **OPTIONS | {"checkpoint_every": 100}))
    with RunFolder.create(out) as folder:
        folder.write_config(trial.config.plain(), seed=0, code={})
    trial.run(fork_server=fork_server)
    with raising(UsageError, "5 workers"):
        resumed(TrainConfig(resume=out, workers=5, trust=True))
    config = resumed(TrainConfig(resume=out, workers=3, trust=True))
    assert config.workers == WorkerRange(LEAST, MOST, first=3)
    assert str(config.workers) == f"{LEAST}..{MOST}"
    with raising(UsageError, "steps=200"):
        run(resumed(TrainConfig(resume=out, steps=200, trust=True)))

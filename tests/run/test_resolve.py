"""A run is resolved once; its other processes rebuild the set-up from final values."""

from __future__ import annotations

import json

import pytest
import torch

from dure.cli.main import main
from dure.job.job import load_job
from dure.job.optimizer import OptimizerSpec
from dure.run import train
from dure.run.config import TrainConfig
from dure.run.launchers import entry
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import rebuild, resolve
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Machines, SharedHost

STRATEGIES = (
    "bsp",
    "ssp:bound=2 ps:shards=2",
    "averaging:period=3",
    "downpour+dc-asgd:lambda=0.04",
    "bsp collective 1bit",
    "diloco",
)


@pytest.mark.parametrize(
    ("text", "lr", "used"),
    [
        ("adam", None, 0.2),  # the job's own rule: its rate
        ("adagrad", None, 0.01),
        ("adagrad:lr=0.5", None, 0.5),
        ("adagrad:lr=0.5", 0.25, 0.25),
        (None, 0.25, 0.25),
    ],
)
def test_the_rate_of_a_run(text, lr, used):
    """A flag before the optimizer's text, the text before the rule's default, which another rule than the job's has."""
    config = TrainConfig(job="given", optimizer=text, lr=lr, on="virtual")
    assert config.optimizer_over(OptimizerSpec("adam", lr=0.2)).lr == used


@pytest.fixture
def counts(monkeypatch):
    """How often this process resolves a run, chooses a strategy and checks one."""
    found = {"resolve": 0, "chosen": 0, "check": 0}

    def counted(name, function):
        def call(*given, **named):
            found[name] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(train, "resolve", counted("resolve", train.resolve))
    monkeypatch.setattr(TrainConfig, "chosen", counted("chosen", TrainConfig.chosen))
    monkeypatch.setattr(Strategy, "__post_init__", counted("check", Strategy.__post_init__))
    return found


ONCE = {"resolve": 1, "chosen": 1, "check": 1}
SHORT = ("train", "quadratic", "--sync", "ssp", "--steps", "4", "--workers", "2")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", ["virtual", "local"])
def test_a_run_is_resolved_and_its_strategy_checked_once(counts, on):
    assert main([*SHORT, "--on", on]) == 0
    assert counts == ONCE


def test_a_resumed_run_is_resolved_once(counts, tmp_path):
    out = str(tmp_path / "run")
    assert main([*SHORT, "--on", "virtual", "--out", out, "--checkpoint-every", "2"]) == 0
    counts.update(dict.fromkeys(counts, 0))
    assert main(["train", "--resume", out, "--steps", "8"]) == 0
    assert counts == ONCE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fork_server_rebuilds_the_set_up_and_resolves_nothing(strategy, monkeypatch):
    config = TrainConfig(
        job="quadratic",
        strategy=strategy,
        workers=3,
        epochs=2.0,
        optimizer="adam",
        scale_lr=True,
        batch_sizes=(1, 2, 3),
    )
    setup, _ = resolve(config)
    values = json.loads(json.dumps(setup.plain()))
    monkeypatch.setattr(TrainConfig, "chosen", None)
    again = rebuild(values)
    assert again.plain() == setup.plain()
    assert (again.config, again.strategy) == (setup.config, setup.strategy)
    assert again.job.optimizer == setup.job.optimizer
    assert callable(entry.load(values))


def config_of(strategy: str, **options: object) -> TrainConfig:
    return TrainConfig.of({"job": "digits-mlp", "strategy": strategy} | options)


HOSTED = Cluster(machines=[Machines(count=2, workers=2), Machines(workers=4)])


def test_the_machines_of_workers_are_those_of_the_cluster():
    setup, _ = resolve(config_of("bsp", on="virtual"), Prebuilt(cluster=HOSTED))
    assert setup.machines == setup.topology.plan.machines == (0, 0, 1, 1, 2, 2, 2, 2)
    one_host = Cluster(machines=[Machines(count=3)], host=SharedHost())
    assert resolve(config_of("bsp", on="virtual"), Prebuilt(cluster=one_host))[0].machines == (0, 0, 0)


def test_the_machines_of_a_stage_are_those_of_its_workers():
    setup, _ = resolve(config_of("bsp", on="virtual", partition="gpipe:stages=2"), Prebuilt(cluster=HOSTED))
    assert [setup.of_worker(rank).machines for rank in (0, 1)] == [(0, 1, 2, 2)] * 2


def test_the_machines_of_a_real_run_are_those_of_its_launcher(monkeypatch):
    setup, _ = resolve(config_of("bsp", on="local", workers=3))
    assert setup.machines == (0, 0, 0)
    assert rebuild(json.loads(json.dumps(setup.plain()))).machines == (0, 0, 0)
    environment = {"RANK": "3", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**environment, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert resolve(config_of("bsp", on="torchrun", workers=6))[0].machines == (0, 0, 1, 1, 2, 2)


def test_a_given_job_gets_the_dtype_of_the_run():
    given = TrainConfig(job="given", strategy="bsp", on="virtual", dtype="float64", workers=2)
    setup, _ = resolve(given, Prebuilt(job=load_job("digits-mlp")))
    inputs, _ = setup.job.train.batch(torch.arange(2))
    assert setup.replica.dtype == inputs.dtype == torch.float64

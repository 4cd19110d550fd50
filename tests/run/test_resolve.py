"""A run is resolved once; its other processes rebuild the set-up from final values."""

from __future__ import annotations

import json

import pytest

from dure.cli.main import main
from dure.run import train
from dure.run.config import TrainConfig
from dure.run.launchers import entry
from dure.run.resolve import rebuild, resolve
from dure.run.strategy import Strategy

STRATEGIES = (
    "bsp",
    "ssp:bound=2 ps:shards=2",
    "averaging:period=3",
    "downpour+dc-asgd:lambda=0.04",
    "bsp collective 1bit",
    "diloco",
)


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

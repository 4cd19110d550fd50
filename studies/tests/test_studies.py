"""The studies of the survey on parallel algorithms: settings, statements on rows made by hand, and measures."""

import os
from dataclasses import replace

import pytest
import torch

from dure.cli.reproduce import find
from dure.job.job import load_job
from dure.run.config import TrainConfig
from dure.run.strategy import Strategy
from dure.run.train import train
from dure.runtime.virtual.cluster import Cluster
from dure_studies import averaging, elastic, gossip, momentum, shared_memory
from dure_studies.study import TUNING_SEED, Setting, Study, at_best_rate

STUDIES = (
    "asynchronous",
    "averaging",
    "batch-size",
    "delay-compensation",
    "elastic",
    "gossip",
    "momentum",
    "shared-memory",
)


def rows_of(study, **figures):
    """A row of each setting, all with the same figures."""
    shown = [getattr(each, "figure", each) for each in study.columns]
    return {name: dict.fromkeys(shown, 1.0) | {"loss": 1.0, "steps": 1} | figures for name in study.settings()}


@pytest.mark.parametrize("name", STUDIES)
def test_each_setting_is_a_run(name):
    study = find(name)
    assert study.name == name
    for setting in study.settings().values():
        for lr in setting.rates or (None,):
            chosen = setting if lr is None else setting.at_rate(lr)
            Strategy.parse(chosen.strategy)
            TrainConfig.of({"job": chosen.job or study.job, "on": "virtual", **chosen.options})


@pytest.mark.parametrize("name", STUDIES)
def test_each_statement_reads_figures_that_the_rows_have(name):
    study = find(name)
    for statement in study.statements:
        statement.holds(rows_of(study))
    assert len({statement.text for statement in study.statements}) == len(study.statements)


def judged(study, rows):
    return {statement.text: statement.holds(rows) for statement in study.statements}


def test_statements_about_periods_follow_the_rows():
    rows = rows_of(elastic.STUDY, accuracy=0.95, distance=0.1)
    assert judged(elastic.STUDY, rows)["EASGD keeps at least 90 % at a period of 64"]
    rows["EASGD, period 64"]["accuracy"] = 0.85
    found = judged(elastic.STUDY, rows)
    assert not found["EASGD keeps at least 90 % at a period of 64"]
    assert not found["EASGD's accuracies at the periods 1 to 64 differ by at most 3 points"]


def test_statements_about_seconds_are_strict():
    rows = rows_of(averaging.STUDY)
    assert not any(holds for text, holds in judged(averaging.STUDY, rows).items() if "before" in text)
    rows["period 10, 100 Mbit/s"]["seconds_to_target"] = 0.5
    found = judged(averaging.STUDY, rows)
    assert found["100 Mbit/s: period 10 reaches the target before period 1"]


def test_delays_of_a_slow_worker_are_against_equal_workers():
    rows = rows_of(gossip.STUDY)
    rows["BSP, ring, 10x"]["seconds_to_target"] = 5.0
    assert judged(gossip.STUDY, rows)["10 times slower: BSP takes at least 4 times as long"]
    assert judged(gossip.STUDY, rows)["10 times slower: AD-PSGD takes at most 1.5 times as long"]


def test_the_rate_is_that_of_the_fastest_run_else_of_the_most_accurate():
    figures = {0.1: (5.0, 0.99), 0.2: (3.0, 0.9), 0.3: (float("inf"), 1.0)}
    seeds = []

    def measure(study, job, setting, rounds, seed):
        seeds.append(seed)
        return dict(zip(("seconds_to_target", "accuracy"), figures[setting.options["lr"]], strict=True))

    study = Study(name="x", about="", settings=dict, statements=(), measure=measure)
    setting = Setting("downpour:local_lr={lr} ps", Cluster.uniform(2), rates=(0.1, 0.2, 0.3))
    chosen = at_best_rate(study, None, setting, 1)
    assert (chosen.strategy, chosen.options, set(seeds)) == ("downpour:local_lr=0.2 ps", {"lr": 0.2}, {TUNING_SEED})
    figures.update({0.1: (float("inf"), 0.99), 0.2: (float("inf"), 0.9)})
    assert at_best_rate(study, None, setting, 1).options == {"lr": 0.3}


def test_weak_springs_let_models_go_further():
    study, job, settings = replace(elastic.STUDY, target=0.5), load_job("softmax-regression"), elastic.STUDY.settings()
    rows = [
        elastic.with_distance(study, job, settings[f"EASGD, elasticity {each}"].at_rate(0.1), 16, 0)
        for each in (0.01, 0.225)
    ]
    assert rows[0]["distance"] > rows[1]["distance"] > 0


def test_the_momentum_of_a_known_recursion_is_found():
    lr, mu = 0.3, 0.6
    generator = torch.Generator().manual_seed(0)
    pushes = torch.randn(1500, 300, dtype=torch.float64, generator=generator)
    models = torch.zeros_like(pushes)
    gradient = torch.zeros(300, dtype=torch.float64)
    for step in range(len(models) - 1):
        gradient = mu * gradient + (1 - mu) * models[step]
        models[step + 1] = models[step] - lr * (gradient + pushes[step])
    assert momentum.momentum_of(models, pushes, lr) == pytest.approx(mu, abs=0.02)


def test_the_least_loss_of_the_convex_job_is_approached_and_never_passed():
    job = load_job("softmax-regression", samples=100, dim=5)
    least = shared_memory.least_loss(job)
    run = train(job, sync="bsp", on="virtual", workers=1, batch_size=100, lr=2.0, steps=200, eval_every=50)
    above = [row["loss"] - least for row in run.history]
    assert above == sorted(above, reverse=True)
    assert -1e-12 < above[-1] < 1e-6


@pytest.mark.soak
@pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with data sets")
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs(name, tmp_path):
    found = find(name).reproduce(rounds=30, seeds=1, out=tmp_path / "picture.svg")
    assert {row["setting"] for row in found["rows"]} == set(find(name).settings())

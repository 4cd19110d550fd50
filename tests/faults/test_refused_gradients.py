"""Gradients that hold NaN: refused, counted, and after three in a row their worker takes no further part."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from support.real_runs import JOBS, Trial, configured
from support.wording import raising

import dure
from dure.cli.main import main
from dure.core.vectors import all_finite
from dure.errors import DivergedError, DureError
from dure.run.compare import run_all
from dure.run.config import CompareConfig
from dure.run.prebuilt import Prebuilt

LOCAL = ["downpour ps", "hogwild", "bsp"]
SOAK = [
    pytest.param(strategy, marks=pytest.mark.soak)
    for strategy in (
        "downpour:at_once=true ps",
        "hogbatch",
        "ssp:bound=2,form=rmw ps",
        "averaging:period=4 ps",
        "bsp collective:algorithm=ring",
        "bsp ps 1bit",
    )
]
VIRTUAL = [
    "downpour ps:shards=2",
    "downpour:n_push=4 ps",
    "hogwild",
    "ad-psgd",
    "easgd:period=2 ps",
    "ssp:bound=2 ps",
    "bsp ps",
    "k-sync:k=2 ps",
    "averaging:period=4",
    "bsp",
    "bsp collective sign",
    *SOAK,
]
TOGETHER = ("bsp", "bsp collective:algorithm=ring", "bsp collective sign")
NEEDED = (*TOGETHER, "averaging:period=4")


def local(fork_server, job, strategy, **options):
    trial = Trial(configured(job, strategy, **{"workers": 2, "steps": 60} | options))
    return trial, trial.run(fork_server=fork_server)


def virtual(job, strategy, **options):
    name = f"{JOBS}:{job}"
    return dure.train(
        name,
        strategy=strategy,
        on="virtual",
        **{"workers": 2, "steps": 60, "eval_every": 1000, "split": "iid"} | options,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", LOCAL)
def test_one_nan_is_refused_and_its_worker_goes_on(strategy, fork_server):
    trial, outcome = local(fork_server, "one_nan", strategy)
    lost = 2 if strategy == "bsp" else 1
    assert outcome.totals.counts["updates_refused"] == lost
    assert outcome.totals.counts["updates_applied"] == 120 - lost
    assert {said["done"] for said in trial.driver.roster.finished.values()} == {60}
    assert outcome.notes["unfinished"] == outcome.notes["deaths"] == {}
    assert all_finite(outcome.params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", LOCAL)
def test_three_in_a_row_put_a_worker_out_or_end_the_run(strategy, fork_server):
    why = r"the gradients of worker 1 hold NaN or infinity in 3 steps in a row, the last of them step 2"
    if strategy == "bsp":
        with pytest.raises(DureError, match=why):
            local(fork_server, "one_worker_of_nan", strategy)
        return
    trial, outcome = local(fork_server, "one_worker_of_nan", strategy)
    assert list(outcome.notes["deaths"]) == list(outcome.notes["unfinished"]) == ["worker 1"]
    assert outcome.notes["deaths"]["worker 1"].startswith(why)
    counts = outcome.totals.counts
    assert (counts["updates_applied"], counts["updates_refused"]) == (60, 3)
    assert all_finite(outcome.params)
    assert trial.driver.roster.finished["worker 0"]["done"] == 60


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", VIRTUAL)
def test_one_nan_is_refused_in_virtual_time(strategy):
    run = virtual("one_nan", strategy)
    summary = run.summary()
    lost = 2 if strategy in TOGETHER else 1
    assert summary["updates_refused"] == lost
    if "k-sync" not in strategy and not any(word in strategy for word in ("n_push", "hogbatch", "easgd", "averaging")):
        assert summary["updates_applied"] == 120 - lost
    assert summary["unfinished"] == {}
    assert math.isfinite(summary["loss"])


@pytest.mark.long
def test_an_evaluation_of_nan_ends_the_run(fork_server):
    words = r"the loss of the evaluation at step \d+ is nan: the training diverged"
    with pytest.raises(DivergedError, match=words):
        virtual("evaluation_of_nan", "bsp")
    with pytest.raises(DivergedError, match=words):
        local(fork_server, "evaluation_of_nan", "bsp")


STALE = {"workers": 8, "steps": 40, "eval_every": 4, "seed": 1}
"""Options with which `quadratic` converges under bsp, and diverges with stale gradients."""


@pytest.mark.long
def test_a_comparison_keeps_the_rows_of_runs_that_diverge(tmp_path, capsys):
    job, strategies = f"{JOBS}:quadratic", ("downpour", "bsp", "downpour")
    flags = [text for name, value in STALE.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    asked = [text for each in strategies for text in ("--strategy", each)]
    place = ["--out", str(tmp_path), "--report", str(tmp_path / "x.html"), "--target-loss", "0.01"]
    assert main(["compare", job, "--on", "virtual", "--json", *flags, *asked, *place]) == 0
    said = capsys.readouterr()
    first, good, last = json.loads(said.out, parse_constant=pytest.fail)["runs"]
    alone = dure.train(job, strategy="bsp", on="virtual", **STALE)
    assert good["params_sha256"] == alone.figures["params_sha256"]
    with pytest.raises(DivergedError) as caught:
        dure.train(job, strategy="downpour", on="virtual", **STALE)
    rows = caught.value.history
    assert len(rows) > 3
    for stale in first, last:
        assert (stale["loss"], stale["steps"], stale["seconds"]) == ("NaN", rows[-1]["step"], rows[-1]["seconds"])
        assert stale["diverged"] == str(caught.value)
    assert said.err.count(" diverged ") == 2
    assert ">diverged<" in (tmp_path / "x.html").read_text()


@pytest.mark.long
def test_the_command_fails_if_all_that_it_trains_diverges(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [f"{JOBS}:evaluation_of_nan", "--on", "virtual", "--workers", "1", "--steps", "1", "--strategy", "bsp"]
    assert main(["compare", *options]) == 1
    assert main(["train", *options]) == 1
    assert re.search(r"^dure: the loss .* diverged\. Try a l", capsys.readouterr().err, re.MULTILINE)


def test_a_comparison_of_processes_keeps_the_row_of_nan(fork_server, tmp_path):
    config = CompareConfig.of(
        {
            "job": f"{JOBS}:evaluation_of_nan",
            "strategies": ("bsp",),
            "on": ("local",),
            "workers": 1,
            "steps": 4,
            "report": tmp_path / "x.html",
        }
    )
    (run,) = run_all(config, Prebuilt(fork_server=fork_server)).runs
    assert [math.isnan(row["loss"]) for row in run.history] == [True]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", VIRTUAL)
def test_three_in_a_row_in_virtual_time(strategy):
    if strategy in NEEDED:
        with raising(DureError, "worker 1"):
            virtual("one_worker_of_nan", strategy)
        return
    summary = virtual("one_worker_of_nan", strategy).summary()
    assert list(summary["unfinished"]) == ["worker 1"]
    assert summary["failures_survived"] == 1
    assert summary["updates_refused"] == 3
    assert math.isfinite(summary["loss"])


SHARDED = {"zero:stage=1": "worker 1", "zero:stage=2": "a worker"}
"""The worker that an error names: with stage 2 no gradient is whole when the mean is refused."""


@pytest.mark.parametrize("shards", SHARDED)
def test_workers_with_shards_refuse_alike(shards, fork_server):
    strategy = f"bsp collective {shards}"
    whole = virtual("one_nan", "bsp").summary()
    assert virtual("one_nan", strategy).summary()["params_sha256"] == whole["params_sha256"]
    _, outcome = local(fork_server, "one_nan", strategy)
    assert outcome.totals.counts["updates_refused"] == 2
    assert all_finite(outcome.params)
    why = f"the gradients of {SHARDED[shards]} hold NaN or infinity in 3 steps in a row, the last of them step 2"
    with pytest.raises(DureError, match=why):
        virtual("one_worker_of_nan", strategy)
    with pytest.raises(DureError, match=why):
        local(fork_server, "one_worker_of_nan", strategy)


def test_a_run_with_a_refused_gradient_is_the_same_each_time():
    first, again = (virtual("one_nan", "ssp:bound=2 ps").summary() for _ in range(2))
    assert (first["params_sha256"], first["seconds"]) == (again["params_sha256"], again["seconds"])


@pytest.mark.parametrize("strategy", ["bsp ps", pytest.param("downpour ps", marks=pytest.mark.soak)])
def test_a_resumed_run_refuses_what_the_whole_one_does(strategy, tmp_path):
    whole = virtual("one_nan", strategy, checkpoint_every=20, out=tmp_path / "whole")
    virtual("one_nan", strategy, checkpoint_every=20, steps=40, out=tmp_path / "part")
    again = dure.train(f"{JOBS}:one_nan", resume=tmp_path / "part", on="virtual", steps=60)
    for name in ("params_sha256", "updates_refused", "updates_applied"):
        assert again.summary()[name] == whole.summary()[name]


def test_a_resumed_run_counts_what_was_refused_of_a_worker_that_had_ended(tmp_path):
    options = {"steps": 12, "checkpoint_every": 4}  # worker 1 is quarantined before the first checkpoint
    whole = virtual("one_worker_of_nan", "downpour ps", **options, out=tmp_path / "whole").summary()
    virtual("one_worker_of_nan", "downpour ps", **options | {"steps": 8}, out=tmp_path / "part")
    again = dure.train(f"{JOBS}:one_worker_of_nan", resume=tmp_path / "part", on="virtual", steps=12).summary()
    assert (whole["updates_applied"], whole["updates_refused"]) == (12, 3)
    for name in ("params_sha256", "updates_refused", "updates_applied", "unfinished", "deaths", "failures_survived"):
        assert again[name] == whole[name]


def test_a_void_step_moves_no_momentum():
    """A worker whose only gradient of three is NaN: the model of two steps, momentum and all."""
    options = {"workers": 1, "steps": 120, "optimizer": "momentum:momentum=0.9"}
    for strategy in ("bsp", "bsp ps"):
        params = virtual("one_nan", strategy, **options).summary()["params_sha256"]
        shorter = virtual("no_nan", strategy, **options | {"steps": 119}).summary()["params_sha256"]
        assert params == shorter


@pytest.mark.long
def test_the_exit_status_and_the_last_line_say_who_has_not_done_its_work(capfd):
    arguments = ["train", f"{JOBS}:one_worker_of_nan", "--strategy", "downpour ps", "--workers", "2", "--steps", "60"]
    assert main([*arguments, "--on", "local", "--json"]) == 3
    out, said = capfd.readouterr()
    assert '"unfinished":' in out
    assert said.splitlines()[-1].startswith("dure: the run has ended without all the work of worker 1 (the gradients")


def test_finite_is_exact():
    assert all_finite(torch.tensor([3e38, -3e38, 3e38]))
    assert not all_finite(torch.tensor([1.0, math.inf]))
    assert not all_finite(torch.sparse_coo_tensor([[1]], [math.nan], (3,), check_invariants=True).coalesce())
    assert all_finite(torch.empty(0))

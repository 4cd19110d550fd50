"""Studies of the survey of concepts: their closed forms and measures, on small settings."""

import math
import operator
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.forms.collectives import all_to_all, ring
from oracles.forms.messages import Wire
from torch import nn

from dure.job.job import load_job
from dure.job.replica import Replica
from dure.runtime.virtual.cluster import Cluster, Link
from dure_jobs.text import BagOfWords
from dure_studies import collectives, hogwild, hybrid, k_methods, neurons, ssp, stale_gradients, strom, structures
from dure_studies.study import learnt


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_order_statistics_are_those_of_drawn_times(shift):
    rng = np.random.default_rng(0)
    drawn = np.sort(shift + (1 - shift) * rng.standard_exponential((200_000, k_methods.WORKERS)), axis=1).mean(axis=0)
    expected = [k_methods.order_statistic(k, shift) for k in range(1, k_methods.WORKERS + 1)]
    assert drawn == pytest.approx(expected, rel=0.01)


def measured(name, rounds=60):
    return k_methods.STUDY.measure(
        k_methods.STUDY, load_job(k_methods.STUDY.job), k_methods.STUDY.settings()[name], rounds, 0
    )


@pytest.mark.parametrize(
    ("name", "slack"), [("exponential, backup:backups=1", 0.3), ("shifted, k-batch-async:k=4", 0.1)]
)
def test_seconds_of_an_update_are_those_of_the_closed_form(name, slack):
    row = measured(name)
    assert abs(row["error"]) < slack
    assert row["measured"] == pytest.approx(row["expected"] * (1 + row["error"]))


def test_a_learner_has_its_loss_above_the_least():
    history = measured("exponential, k-sync:k=8", rounds=20)["history"]
    assert history[0]["excess"] > 1 > history[-1]["excess"] > 0


@pytest.mark.parametrize(("algorithm", "form"), [("ring", ring), ("all-to-all", all_to_all)])
def test_an_all_reduce_sends_the_bytes_of_its_closed_form(algorithm, form):
    link = Link(bandwidth=1.25e9, latency=20e-6)
    cluster = Cluster.uniform(4, link=link)
    seconds, sent = collectives.one_all_reduce(algorithm, 4_000_000, cluster)
    wire = Wire(link.latency, cluster.alpha, link.bandwidth, cluster.beta, cluster.gamma)
    cost = form(1_000_000, 4, wire, 4)
    assert sent == pytest.approx(max(cost.sent), rel=1e-3)
    assert 0.9 * cost.seconds <= seconds <= cost.seconds * (1 + 1e-9)


def test_hosts_send_less_over_the_card_by_a_torus():
    settings = collectives.STUDY.settings()
    rows = {
        name: collectives.one_all_reduce(name, 10**6, settings[f"8 on 2 hosts, 20 us, {name}"].cluster)
        for name in ("ring", "torus")
    }
    assert rows["torus"][0] < rows["ring"][0]


def test_whole_layers_at_machines_do_not_speed_up(monkeypatch):
    monkeypatch.setattr(
        neurons, "MODELS", {"local": lambda: neurons.local(side=32), "dense": lambda: neurons.dense(64)}
    )
    settings = neurons.STUDY.settings()
    rows = {
        name: neurons.STUDY.measure(neurons.STUDY, None, settings[name], 1, 0)
        for name in ("local, 4 machines, layers", "local, 4 machines, cut", "local, 4 machines, random")
    }
    whole, cut, drawn = rows.values()
    assert whole["speedup"] <= 1 < cut["speedup"]
    assert cut["forward"] < drawn["forward"]


def events(*spans):
    return [{"cat": "compute", "pid": pid, "ts": start, "dur": end - start} for pid, start, end in spans]


@pytest.mark.parametrize(
    ("spans", "lead"),
    [
        ([(1, 0, 1), (2, 0, 1), (1, 1, 2), (2, 1, 2)], 0),
        ([(1, 0, 1), (1, 1, 2), (1, 2, 3), (2, 0, 9)], 2),
        ([(1, 0, 1), (1, 1, 2), (2, 0, 1.5), (1, 2, 3)], 1),
    ],
)
def test_the_largest_lead_counts_steps_ahead_of_the_slowest(spans, lead):
    assert ssp.largest_lead(sorted(events(*spans), key=operator.itemgetter("ts"))) == lead


def test_leads_of_a_run_reach_the_bound_and_not_more():
    study = ssp.STUDY
    row = study.measure(study, load_job(study.job), study.settings()["lasting, bound 1"], 20, 0)
    assert row["lead"] == 1
    assert 0 < row["waiting"] < 1


def test_synchronous_replicas_are_equal_and_asynchronous_ones_differ():
    job, settings = load_job("digits-mlp"), stale_gradients.STUDY.settings()
    assert stale_gradients.equal_replicas(job, settings["synchronous, 4 workers"], 0) == 1.0
    assert stale_gradients.equal_replicas(job, settings["asynchronous, 4 workers"], 0) < 0.5


def test_a_run_needs_samples_to_its_target():
    study = stale_gradients.STUDY
    setting = study.settings()["asynchronous, 4 workers"]
    reached = learnt(study, load_job(study.job), setting.at_rate(0.1), 80, 0)
    assert 0 < reached["samples_to_target"] <= 80 * 32 or math.isinf(reached["samples_to_target"])
    assert reached["staleness"] == pytest.approx(3, abs=0.3)


def test_the_hybrid_is_tried_with_each_set_of_parameters():
    names = [layer.name for layer in Replica(BagOfWords(10, 4, 4)).layers]
    assert sorted(names) == sorted(hybrid.PARAMETERS)
    assert len(set(hybrid._by_hand())) == 2 ** len(names)


class Table(nn.Module):
    """A table of ten rows of two, and a dense parameter of five elements."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 2))
        self.rest = nn.Parameter(torch.zeros(5))


@pytest.mark.parametrize(("own", "shared", "of_all"), [((0, 1), 0.5, 7 / 9), ((8, 9), 0.0, 5 / 9), ((1, 1), 1.0, 1.0)])
def test_conflicts_are_elements_that_another_update_changes(own, shared, of_all):
    words = iter([torch.tensor(own), *[torch.tensor([1, 2])] * (hogwild.WORKERS - 1)])
    job = replace(load_job("quadratic"), model=lambda: Table(), rows=lambda _inputs: {"table": next(words)})
    assert hogwild.conflicts(job, 1, 0) == pytest.approx((shared, of_all))


def test_thresholds_are_compared_by_bytes_and_accuracy():
    rows = {"fp32": {"nbytes": 900.0, "accuracy": 0.9}, "strom": {"nbytes": 3.0, "accuracy": 0.895}}
    assert strom._saves(rows, "strom", 300, 1)
    assert not strom._saves(rows, "strom", 301, 1)
    assert not strom._saves(rows, "strom", 300, 0.4)


@pytest.mark.soak
@pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with data sets")
@pytest.mark.parametrize(
    "study", [strom.STUDY, hogwild.STUDY, hybrid.STUDY, structures.STUDY], ids=lambda study: study.name
)
def test_reduced_studies_run(study, tmp_path):
    result = study.reproduce(**study.quick, out=tmp_path / "out.svg")
    assert {row["setting"] for row in result["rows"]} == set(study.settings())
    assert len(result["statements"]) == len(study.statements)

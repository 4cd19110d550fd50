"""A plan that chooses the strategy of a run."""

import logging

import pytest

import dure
from dure.errors import UsageError
from dure.planner import search
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

SLOW_LINK = Cluster(
    machines=(Machines(count=2, compute=Constant(flops_per_second=1e10, overhead=1e-4)),),
    link=Link(bandwidth=1e6, latency=0.05),
)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_run_has_the_strategy_that_the_plan_ranks_first(few, caplog, monkeypatch):
    if few:  # of all candidates
        monkeypatch.setattr(search, "single", lambda shape: ["bsp", "averaging:period=4", "averaging:period=16"])
        monkeypatch.setattr(search, "on_servers", lambda *_: [])
    with caplog.at_level(logging.WARNING, logger="dure"):
        run = dure.train("digits-mlp", sync="auto", on=SLOW_LINK, steps=4)
    (line,) = [record.message for record in caplog.records if record.message.startswith("auto: ")]
    chosen = Strategy.parse(line.removeprefix("auto: ").partition(" (")[0])
    assert run.summary()["strategy"] == chosen.text()
    assert run.summary()["strategy"]["sync"] != "bsp"  # the network is slow
    assert "plain data parallelism" in line


def test_a_strategy_text_may_be_auto_too():
    run = dure.train("digits-mlp", strategy="auto", on="virtual", workers=1, steps=2)
    assert run.summary()["workers"] == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync": "auto", "topology": "ps"}, "auto chooses the whole strategy, and topology=ps was asked for"),
        ({"sync": "auto", "strategy": "bsp"}, "auto chooses the whole strategy, and strategy=bsp was asked for"),
        ({"sync": "auto", "on": "torchrun"}, "auto plans before workers start"),
        ({"strategy": "auto", "resume": "runs/old"}, "a resumed run has one in its record"),
    ],
)
def test_options_that_contradict_auto_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        dure.train("digits-mlp", **{"on": "virtual", **options})

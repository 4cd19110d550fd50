"""Whether a codec pays: the record says so, and virtual time agrees."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import recorded

import dure
from dure.core.cost import CodecCost, Line
from dure.run.break_even import BANDWIDTHS, StepBytes, break_even, break_even_summary
from dure.run.config import TrainConfig
from dure.run.outcome import Totals
from dure.run.resolve import resolve
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

K = 4
NUMEL = 64 * 64 + 64 + 64 * 10 + 10
COST = CodecCost(encode=Line(value=1e-7), decode=Line(value=2e-7), combine=Line(value=3e-7))


def summary(strategy: str, bandwidth: float = 1e8, per_host: int = 1) -> dict[str, Any]:
    """Of a cluster in which nothing but what the model has takes time."""
    kind = Machines(count=K // per_host, workers=per_host, compute=Constant(seconds=1e-3))
    rest = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0, "codecs": {"fp16": COST, "1bit": COST}}
    on = Cluster(machines=(kind,), link=Link(bandwidth=bandwidth, latency=0.0), **rest)
    return dure.train("digits-mlp", strategy=strategy, on=on, steps=4).summary()


def test_the_model_is_what_it_says() -> None:
    found = summary("bsp collective fp16", bandwidth=1e7)["payoff"]
    ring = 2 * (K - 1) / K * 4 * NUMEL
    assert found["bytes_fp32"] == ring
    assert found["bytes"] == pytest.approx(ring / 2, rel=1e-3)  # stripes differ by an element
    assert found["compute"] == pytest.approx(1e-3)
    assert found["costs"] == "cluster"
    assert [step["bandwidth"] for step in found["steps"]] == [1e7, *BANDWIDTHS]
    for step in found["steps"]:
        assert step["fp32"] == pytest.approx(1e-3 + ring / step["bandwidth"])
        assert step["seconds"] == pytest.approx(1e-3 + found["coding"] + found["bytes"] / step["bandwidth"])


def test_through_servers_the_busiest_card_counts_both_ways() -> None:
    found = summary("bsp ps:shards=2 fp16")["payoff"]
    pulls = 5 / 4  # of a step: the first, and one after each of four
    assert found["bytes_fp32"] == pytest.approx(K * (4 + 4 * pulls) * NUMEL / 2)
    assert found["bytes"] == pytest.approx(K * (2 + 4 * pulls) * NUMEL / 2)


def test_the_busiest_card_may_be_that_of_a_host() -> None:
    """All workers on one host, whose card carries the bytes of four shards."""
    found = summary("bsp ps:shards=4 fp16", per_host=4)["payoff"]
    assert found["bytes"] == pytest.approx(4 * (2 + 4 * 5 / 4) * NUMEL)


def test_a_step_has_its_share_of_what_happens_every_few_steps() -> None:
    each, fourth = (summary(f"averaging:period={period} fp16")["payoff"] for period in (1, 4))
    for name in ("coding", "bytes", "bytes_fp32"):
        assert fourth[name] == pytest.approx(each[name] / 4), name
    assert fourth["break_even"] == pytest.approx(each["break_even"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective 1bit", "bsp ps:shards=2 fp16"])
def test_a_run_on_either_side_of_break_even_is_faster_or_slower(strategy: str) -> None:
    even = summary(strategy)["payoff"]["break_even"]
    plain = " ".join([*strategy.split()[:2], "fp32"])
    for bandwidth, pays in ((even / 2, True), (even * 2, False)):
        coded = summary(strategy, bandwidth)
        assert (coded["seconds"] < summary(plain, bandwidth)["seconds"]) is pays
        here = next(step for step in coded["payoff"]["steps"] if step["bandwidth"] == bandwidth)
        assert (here["seconds"] < here["fp32"]) is pays


def test_what_saves_nothing_pays_nowhere_and_what_costs_nothing_everywhere() -> None:
    assert break_even(1.0, StepBytes(coded=2.0, plain=2.0)) is None
    assert break_even(0.0, StepBytes(coded=1.0, plain=2.0)) == float("inf")


def test_without_a_codec_or_others_there_is_nothing_to_say() -> None:
    assert "payoff" not in summary("bsp")
    alone = dure.train("digits-mlp", strategy="bsp collective 1bit", on="virtual", workers=1, steps=2).summary()
    assert alone["payoff"] == {}


def test_a_worker_of_which_only_steps_are_known_counts_for_nothing() -> None:
    config = TrainConfig.of({"job": "digits-mlp", "sync": "ssp", "codec": "fp16", "on": "virtual", "workers": 3})
    setup, cluster = resolve(config)
    told = {"steps": 10, "bytes_sent": 10 * 2 * NUMEL, "bytes_received": 10 * 4 * NUMEL}
    totals = Totals(per_worker={"worker 0": told, "worker 1": {"steps": 4}, "worker 2": dict(told)})
    totals.time["compute"] = 0.2
    found = break_even_summary(setup, totals, cluster)
    assert (found["compute"], found["bytes"], found["bytes_fp32"]) == pytest.approx((0.01, 12 * NUMEL, 16 * NUMEL))
    assert break_even_summary(setup, Totals(per_worker={"worker 1": {"steps": 4}}), cluster) == {}


def test_in_which_order_workers_were_counted_makes_no_difference() -> None:
    """A checkpoint has them in another one: 10 before 2."""
    config = TrainConfig.of({"job": "digits-mlp", "sync": "ssp", "codec": "fp16", "on": "virtual", "workers": 17})
    setup, cluster = resolve(config)
    sizes = [10 + rank % 4 for rank in range(17)]
    rows = {
        f"worker {rank}": {"steps": steps, "bytes_sent": 1001 * rank, "bytes_received": 7 * rank * rank}
        for rank, steps in enumerate(sizes)
    }
    found = [
        break_even_summary(setup, Totals(per_worker=dict(order)), cluster)
        for order in (rows.items(), sorted(rows.items()))
    ]
    assert found[0] == found[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective 1bit", "bsp ps:shards=2 1bit"])
def test_after_a_real_run_the_codec_is_measured(strategy: str, fork_server: ForkServer) -> None:
    run = recorded("digits-mlp", strategy, fork_server, workers=2, steps=3)
    found = run.summary()["payoff"]
    assert found["bytes"] < found["bytes_fp32"]
    assert (found["costs"], found["link"]) == ("measured", None)
    assert min(found["compute"], found["coding"], found["break_even"]) > 0
    assert [step["bandwidth"] for step in found["steps"]] == list(BANDWIDTHS)

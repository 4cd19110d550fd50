"""The same method file gives the same parameters in virtual time and on real processes, where order is determined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import dyadic_jobs
from support.runs import local, virtual

from dure.runtime.launch.fork_server import ForkServer

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def check(job: str, strategy: str, fork_server: ForkServer, **options: Any) -> None:
    real, modelled = local(job, strategy, fork_server=fork_server, **options), virtual(job, strategy, **options)
    assert float((real.params - modelled.params).abs().max()) < TOLERANCE[options["dtype"]]
    for key in ("samples", "updates_applied"):
        assert real.summary[key] == modelled.summary[key]
    assert real.summary["staleness"] == modelled.summary["staleness"]
    assert real.summary.get("version_skew") == modelled.summary.get("version_skew")
    assert real.rows[-1]["loss"] == pytest.approx(modelled.rows[-1]["loss"], rel=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "workers", "dtype", "optimizer"),
    [
        ("bsp collective", 2, "float32", "sgd"),
        ("bsp collective", 3, "float64", "momentum"),
        ("bsp ps", 3, "float64", "adam"),
        ("bsp ps:shards=2,split=layer", 2, "float32", "momentum"),
        ("averaging:period=3 collective", 3, "float32", "adam"),
        ("averaging:period=3 ps:shards=2", 2, "float64", "momentum"),
        ("bsp ps:shards=3,split=hybrid,bound=1000", 2, "float32", "adam"),
        ("bsp ps:shards=2,split=keys", 2, "float64", "sgd"),
    ],
)
def test_digits(strategy, workers, dtype, optimizer, fork_server):
    options = {"workers": workers, "batch_sizes": (8, 12, 16)[:workers], "dtype": dtype, "optimizer": optimizer}
    check("digits-mlp", strategy, fork_server, steps=8, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective", "averaging:period=2 ps:shards=3,split=memory"])
def test_quadratic(strategy, fork_server):
    check("quadratic", strategy, fork_server, workers=2, steps=7, dtype="float64")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "shards"), [("bsp", 0), ("bsp", 1), ("bsp", 2), ("bsp", 3)])
def test_real_bsp_is_one_worker_with_the_whole_batch(strategy, shards, fork_server):
    """On processes as in virtual time: over collectives, and over one to three servers of either split."""
    topology = f"ps:shards={shards},split={'layer' if shards == 2 else 'memory'}" if shards else "collective"
    options: dict[str, Any] = {"steps": 6, "dtype": "float64", "split": "striped"}
    sizes = {"workers": 3, "batch_sizes": (4, 8, 20)}
    together = local("digits-mlp", f"{strategy} {topology}", fork_server=fork_server, **sizes, **options)
    alone = virtual("digits-mlp", "bsp", workers=1, batch_size=32, **options)
    assert float((together.params - alone.params).abs().max()) < 1e-12


def test_rows_on_the_way_are_those_of_virtual_time(fork_server):
    """A role that only waits for collectives must let its snapshots leave when they are taken, not at the end."""
    options: dict[str, Any] = {"workers": 2, "steps": 12, "eval_every": 4}
    real = local("digits-mlp", "bsp collective", fork_server=fork_server, **options)
    modelled = virtual("digits-mlp", "bsp collective", **options)
    assert [row["step"] for row in real.rows] == [row["step"] for row in modelled.rows] == [4, 8, 12]
    for ours, theirs in zip(real.rows, modelled.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert real.rows[0]["seconds"] < real.rows[1]["seconds"] < real.rows[2]["seconds"]


SENT = ["ring", "tree", "halving-doubling", "hierarchical,per_host=3", "torus,per_host=2", "all-to-all"]


def test_bsp_over_any_collective_is_bsp_in_every_bit(fork_server):
    """On data whose sums are exact in any order, with four workers: by the engine, and by sends, in both runtimes."""
    options: dict[str, Any] = {"workers": 4, "steps": 4}
    expected = virtual(dyadic_jobs.dyadic(), "bsp collective", **options)
    bytes_sent: dict[str, int] = {}
    for algorithm in SENT:
        strategy = f"bsp collective:algorithm={algorithm}"
        modelled = virtual(dyadic_jobs.dyadic(), strategy, **options)
        real = local(f"{dyadic_jobs.__file__}:dyadic", strategy, fork_server=fork_server, **options)
        assert torch.equal(modelled.params, expected.params)
        assert torch.equal(real.params, expected.params)
        assert real.summary["bytes_sent"] == modelled.summary["bytes_sent"]
        bytes_sent[algorithm] = real.summary["bytes_sent"]
    least = 4 * 2 * 3 * 64  # altogether; how evenly differs
    assert bytes_sent == {each: 2 * least if each == "all-to-all" else least for each in SENT}
    assert expected.summary["bytes_sent"] == 4 * 2 * 3 * 64

"""All topologies, methods and codecs of real runs with replicas on a device, against the same runs on the CPU."""

from __future__ import annotations

from itertools import product

import pytest
from accelerator.train_tasks import check_equal, check_same_on_both, outcomes, task

from dure.errors import StrategyError
from dure.run.config import TrainConfig

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("accelerator"),
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("device"),
]

SERVERS = ("ps", "ps:shards=2", "ps:split=layer,shards=2")
COLLECTIVES = (
    "collective", "collective:algorithm=ring", "collective:algorithm=tree", "collective:algorithm=halving-doubling",
    "collective:algorithm=hierarchical,per_host=1",
)  # fmt: skip
METHODS = ("bsp", "averaging:period=2", "bmuf:period=3")
CODECS = (
    "fp32", "fp16", "bf16", "int8", "int8+ef", "1bit", "strom", "strom:coding=fixed", "top-k:share=0.25",
    "top-k:share=0.25,feedback=false", "sign", "sign:scaled=true+ef", "sign+momentum", "ternary",
    "ternary:coding=fixed", "it-sign",
)  # fmt: skip
OTHERS = {
    "dyadic ssp:bound=0 ps:shards=2": {},
    "dyadic k-async:k=2 ps": {},
    "dyadic k-batch-sync:k=2 ps": {},
    "dyadic easgd:period=2 ps": {"workers": 1},
    "plain easgd:period=2 collective": {},
    "plain eamsgd:period=2 collective": {},
    "plain diloco:period=3 collective": {},
    "plain diloco:period=3 ps": {},
    "plain one-shot ps": {},
    "plain one-shot collective": {},
    "bags bsp hybrid:servers=all": {},
    "bags bsp hybrid:servers=all,shards=2": {"workers": 3},
    "bags bsp hybrid:servers=table.weight": {},
    "sparse_bags bsp hybrid:servers=all": {},
    "sparse_bags bsp collective": {},
    "sparse_bags hogwild shared:mode=atomic": {"workers": 1},
    "sparse_bags hogbatch:batch=2": {"workers": 1},
    "sparse_bags asysvrg": {"workers": 1},
    "plain hogwild": {"workers": 1},
    "plain hogwild shared:mode=atomic": {"workers": 1},
    "plain hogbatch:batch=4": {"workers": 1},
    "plain asysvrg": {"workers": 1},
    "plain asysvrg:lock=readwrite": {"workers": 1},
    "plain downpour:n_push=3,n_fetch=2": {"workers": 1},
    "plain downpour:local_lr=0.1": {"workers": 1},
    "plain downpour+dc-asgd": {"workers": 1},
    "plain downpour+dc-asgd:mode=adaptive": {"workers": 1},
    "plain ssp+staleness-lr": {"workers": 1},
    "plain ssp+momentum-compensation": {"workers": 1},
    "plain ssp:form=rmw": {"workers": 1},
}
"""Runs of other methods, whose order is fixed; several of them because they have one worker."""


def possible(strategy: str) -> bool:
    """Whether a strategy is one: not every method sends what every codec can encode."""
    try:
        TrainConfig(job="given", strategy=strategy).chosen()
    except StrategyError:
        return False
    return True


MATRIX = {
    f"plain {strategy}": {}
    for method, topology, codec in product(METHODS, (*SERVERS, *COLLECTIVES), CODECS)
    for strategy in (f"{method} {topology} {codec}",)
    if possible(strategy)
}
RUNS = {**MATRIX, **OTHERS}

MOVED = [
    *(name for name in MATRIX if " ps:shards=2 " in name or " collective " in name),
    *(name for name, options in OTHERS.items() if "k-batch" not in name),
]
"""Runs that are resumed on the other device and back."""

CRASHES = {
    "ssp ps": {"killed": "worker 1", "again": True},
    "ssp ps:shards=2": {"killed": "worker 1"},
    "averaging:period=4 ps": {"killed": "worker 2"},
    "ad-psgd": {"killed": "worker 1"},
    "hogwild": {"killed": "worker 1", "again": True},
    "bsp ps": {"killed": "worker 1", "checkpoint_every": 5},
    "bsp ps sign": {"killed": "server 0", "checkpoint_every": 5},
    "bsp ps:shards=2 top-k:share=0.25": {"killed": "server 1", "checkpoint_every": 5},
}


@pytest.fixture(scope="module")
def done():
    return outcomes({name: task(name, **options) for name, options in RUNS.items()})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_device_equals_that_on_the_cpu(done, name):
    check_same_on_both(name, done[name])


@pytest.fixture(scope="module")
def moved():
    ways = {"whole": ["cpu"] * 3, "there": ["cpu", "auto", "cpu"], "back": ["auto", "cpu", "auto"]}
    return outcomes(
        {
            (name, way): task(name, moves=devices, every=2, **RUNS[name])
            for name in MOVED
            for way, devices in ways.items()
        }
    )


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("name", MOVED)
def test_a_resumed_run_on_another_device_equals_that_on_the_cpu(moved, name, way):
    check_equal(name, moved[name, way], moved[name, "whole"])


@pytest.fixture(scope="module")
def crashed():
    return outcomes({name: task(f"slow {name}", workers=3, steps=40, at=10, **more) for name, more in CRASHES.items()})


@pytest.mark.parametrize("name", CRASHES)
def test_a_run_with_replicas_on_a_device_survives_a_crash(crashed, name):
    found, victim = crashed[name], CRASHES[name]["killed"]
    assert "error" not in found, found["error"]
    assert found["failures_survived"] == 1
    assert found["unfinished"] in ([], [victim])
    if CRASHES[name].get("again"):
        assert found["unfinished"] == []

"""A virtual run on a device gives what it gives on the CPU (`virtual_programs.py`)."""

import math
import re
from pathlib import Path

import pytest
from accelerator import target

from dure.core.catalogue import combines, load
from dure.errors import StrategyError
from dure.run.strategy import Strategy, catalogue

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]

NEAR = 2e-6
"""Difference that operations may have which are not elementwise."""

STRATEGIES = [
    "bsp",
    "bsp ps:shards=2 sign+momentum",
    "bsp hybrid:servers=all,shards=2",
    "bmuf:period=3,fragments=2,overlap=1",
    "diloco:period=3 ps int8",
    "easgd:period=2",
    "backup:backups=1 ps 1bit",
    "k-sync:k=3 ps fp16",
    "k-async:k=2+momentum-compensation ps top-k",
    "downpour:n_push=2+dc-asgd:mode=adaptive ps strom:threshold=0.001",
    "ssp:bound=1,form=rmw ps:shards=3 bf16",
    "bsp ps ternary",
    "bsp ps it-sign",
    "hogwild shared:mode=atomic",
    "hogbatch:batch=3",
    "asysvrg:inner=0.1",
    "ad-psgd gossip:graph=ring",
    "lbfgs:m=3,batch=256",
]
"""Every topology and every codec, and methods of each family."""

CARRIED = ["convolutions_and_running_statistics", "rows_of_tables_at_servers", "sparse_gradients"]
EQUAL = ["large_layers_and_activations_by_autograd", "parameter_groups", "a_loss_of_its_own", "workers_come_and_go"]
OTHERS = [
    "layers_that_only_vmap_stacks",
    "random_layers",
    "gradients_that_are_not_finite",
    "squares_that_overflow",
    "the_size_of_a_stack_follows_from_free_memory",
    "a_run_that_goes_on_elsewhere",
]


def ran(*names):
    """The results by name."""
    return dict(target.results("virtual_programs", *names))


@pytest.fixture(scope="module")
def found(device):
    return ran(*STRATEGIES, *CARRIED, *EQUAL, *OTHERS, *(["waits_of_the_host"] if device == "standin" else []))


def fault(run, within=0.0):
    """What is wrong with a run that is compared with one on the CPU; empty if nothing is."""
    if isinstance(run, str):
        return run
    if target.device_type() != "standin":  # the stand-in has the CPU's kernels
        within = math.inf if run["signs"] else 1e-3
    equal = max(run["params"], run["grades"], run["losses"]) <= within and not run["differ"]
    return "" if equal and run["moved"] > 1e-3 else f"differs: {run}"


def fault_of_carried(run, within=0.0):
    """As `fault`, of a run and of those that go on from its checkpoints on the other device."""
    if isinstance(run, str):
        return run
    runs = {name: each for name, each in run.items() if name != "checkpoints"}
    assert len(runs) == 1 + 2 * run["checkpoints"]
    faults = [f"{name} {wrong}" for name, each in runs.items() if (wrong := fault(each, within))]
    return "; ".join(faults) if run["checkpoints"] else "no checkpoint was written"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_and_its_checkpoints_are_as_on_the_cpu(found, strategy):
    assert fault_of_carried(found[strategy]) == ""


@pytest.mark.parametrize("name", CARRIED)
def test_models_and_their_checkpoints_are_as_on_the_cpu(found, name):
    for run in found[name] if isinstance(found[name], list) else [found[name]]:
        assert fault_of_carried(run) == ""


@pytest.mark.parametrize("name", EQUAL)
def test_runs_are_as_on_the_cpu(found, name):
    for run in found[name] if isinstance(found[name], list) else [found[name]]:
        assert fault(run) == ""


def test_what_only_vmap_stacks_is_nearly_as_on_the_cpu(found):
    assert fault(found["layers_that_only_vmap_stacks"], NEAR) == ""


def test_random_layers_draw_from_seed_worker_and_step(found):
    """The numbers are those of the device's generator, and not the CPU's."""
    drawn = found["random_layers"]
    assert fault(drawn["again"]) == fault(drawn["resumed"]) == ""
    assert drawn["state kept"]
    assert drawn["draws"] == 4  # two of the five works are equal


def test_gradients_that_are_not_finite_are_refused_as_on_the_cpu(found):
    refused = found["gradients_that_are_not_finite"]
    assert [fault(run) for run in refused["runs"]] == [""] * 5
    assert min(refused["refused"]) > 0


def test_finite_gradients_whose_squares_overflow_are_not_refused(found):
    run = found["squares_that_overflow"]
    assert fault(run) == ""
    assert run["refused"] == 0


def test_the_size_of_a_stack_follows_from_free_memory(found):
    """It is a power of two, at most an eighth of the free memory."""
    some, more, little = found["the_size_of_a_stack_follows_from_free_memory"]
    assert some == more
    assert some[0] == 1 << 19
    assert re.fullmatch(r"stacked: batched products( padded to \d+ rows)?, at most 27", some[1])  # as its products need
    assert little[0] == 1 << 18
    assert little[1].startswith("one at a time: 16 times 19240 bytes")


def test_a_run_goes_on_elsewhere_and_records_how_the_device_computes(found):
    (back, steps, on_cpu), (forth, _, on_device) = found["a_run_that_goes_on_elsewhere"]
    assert target.device_type() != "standin" or (back and forth)
    assert steps == ["step-6"]
    assert on_cpu is None
    assert on_device.keys() == {"matmul", "convolution", "deterministic"}
    assert on_device["deterministic"] is False


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        ("bsp", 2),  # the losses of all workers, and the mean gradient
        ("averaging:period=4", 1),
        ("ad-psgd gossip:graph=ring", 1),
        ("bsp ps", 17),  # and every update, where it arrives
        ("downpour ps", 19),  # gradients are not all pending at once
        ("hogwild", 17),
    ],
)
def test_the_host_waits_once_for_all_losses(found, strategy, most):
    """Per step of 16 workers."""
    target.skip_without_counts()
    assert found["waits_of_the_host"][strategy] <= most


def every_strategy():
    """Every method over every topology with every codec, with parameters that let all take part in a short run."""
    more = {"hybrid": "hybrid:servers=all,shards=2", "ps": "ps:shards=2", "lbfgs": "lbfgs:m=3,batch=256",
            "asysvrg": "asysvrg:inner=0.1"}  # fmt: skip
    for sync, place in catalogue("sync").items():
        for topology in combines(load(place)):
            for codec in catalogue("codec"):
                text = " ".join(more.get(each, each) for each in (sync, topology, codec))
                try:
                    Strategy.of(*text.split())
                except StrategyError:
                    continue
                yield text


@pytest.mark.soak
def test_every_method_over_every_topology_with_every_codec(device):
    names = list(every_strategy())
    assert len(names) > 100
    wrong = {name: wrong for name, run in ran(*names).items() if (wrong := fault_of_carried(run))}
    assert not wrong

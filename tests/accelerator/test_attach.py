"""`dure.attach` over servers: two ranks on a device give what two on the CPU give (`attach_programs.py`)."""

from pathlib import Path

import pytest
from accelerator import target
from support.purposes import soaked

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]

BESIDE = "downpour:overlap=true,n_fetch=10,local_lr=0.05 @plain @stream"
"""Gradients are pushed while the next backward overwrites them. The order in which servers add them is not fixed."""

STRATEGIES = ["bsp ps:shards=2,split=layer @default", "averaging:period=2 ps @scaler"]
MORE = [
    "one-shot ps",
    "bmuf:period=2 ps",
    "diloco:period=2 ps",
    "easgd:period=2 ps",
    "eamsgd:period=2 ps @stream",
    "backup:backups=0",
    "k-sync:k=2",
    "k-batch-sync:k=1",
    "k-async:k=1",
    "k-batch-async:k=1",
    "downpour",
    "downpour:at_once=true",
    "downpour:n_push=2,n_fetch=3,local_lr=0.05",
    "downpour+dc-asgd+staleness-lr+momentum-compensation:target=0.5",
    "ssp",
    "ssp:bound=inf",
    "ssp:form=rmw @stream",
    "bsp ps @scaler @stream",
    "bsp ps @early",
    "bsp @default",
    "averaging:period=2 collective:algorithm=ring @default",
    "downpour ps:shards=2 @scaler",
]


def ran(*names):
    """The values of both ranks, by name. They may share a device."""
    return {name: ranks for name, *ranks in target.results("attach_programs", *names)}


@pytest.fixture(scope="module")
def trained():
    return ran(*STRATEGIES, BESIDE)


@pytest.fixture(scope="module")
def trained_long():
    return ran(*MORE)


def check_equal(ranks, within=0.0):
    within = max(within, target.ROUNDING)
    for rank in ranks:
        assert not isinstance(rank, str), rank
        assert rank["difference"] <= within
        assert rank["bytes"][0] == rank["bytes"][1] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_on_a_device_equal_two_on_the_cpu(trained, strategy):
    check_equal(trained[strategy])


@pytest.mark.parametrize("strategy", soaked(*MORE))
def test_the_other_methods_on_a_device_equal_those_on_the_cpu(trained_long, strategy):
    check_equal(trained_long[strategy])


def test_a_gradient_is_pushed_while_the_next_one_is_computed_in_its_place(trained):
    check_equal(trained[BESIDE], within=2e-6)


@pytest.mark.soak
def test_a_model_is_pulled_while_its_module_computes():
    """The server may answer a pull before or after a push, so that only the order on the device is certain."""
    check_equal(ran("downpour:overlap=true")["downpour:overlap=true"], within=0.5)


@pytest.mark.soak
def test_autocast_on_a_device_is_near_autocast_on_the_cpu():
    """The two round other operators to bfloat16."""
    check_equal(ran("bsp ps @autocast")["bsp ps @autocast"], within=0.05)


@pytest.mark.soak
def test_what_a_user_saves_goes_on_on_another_device():
    for rank in ran("resumed")["resumed"]:
        assert rank["differences"] == [0.0, 0.0]
        assert rank["moved"] > 1e-2


@pytest.mark.soak
def test_a_rank_on_a_device_goes_on_without_one_that_is_killed():
    found = ran("crash_on_the_cpu", "crash_on_the_device")
    assert found["crash_on_the_device"][1] == "no answer"
    assert found["crash_on_the_device"] == found["crash_on_the_cpu"]


@pytest.mark.soak
@pytest.mark.parametrize(("case", "lost"), [("crash_beside_a_server", "server 1"), ("crash_in_a_ring", "worker 1")])
def test_the_loss_of_a_server_or_of_a_needed_rank_is_an_error_on_a_device_too(case, lost):
    [error, _] = ran(case)[case]
    assert error.startswith(f"{lost} is gone")


@pytest.mark.parametrize("strategy", ["bsp ps:shards=2,split=layer @default", BESIDE])
def test_the_host_waits_for_the_device_once_in_a_step(trained, strategy):
    """To look for NaN in the gradient."""
    target.skip_without_counts()
    for rank in trained[strategy]:
        assert set(rank["waits"]) == {1}


def test_a_gradient_scaler_costs_no_further_wait(trained):
    """Where a gradient has overflowed, each of its elements is looked at."""
    target.skip_without_counts()
    first, second = trained["averaging:period=2 ps @scaler"]
    assert first["waits"] == [1, 2, 1, 1, 1, 1]
    assert second["waits"] == [1, 2, 1, 2, 1, 1]


@pytest.mark.parametrize("strategy", soaked(*(each for each in MORE if "scaler" not in each)))
def test_with_the_other_methods_the_host_waits_once_in_a_step_too(trained_long, strategy):
    target.skip_without_counts()
    for rank in trained_long[strategy]:
        assert set(rank["waits"]) == {1}

"""Places of runs: names of launchers, with and without an address."""

import sys

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.places import address_of, has_early_fork_server, is_here, is_real, is_started_outside
from dure.run.resolve import resolve


def test_an_address_belongs_to_the_launchers_that_take_one():
    for on, address in (("ray", ""), ("ray:auto", "auto"), ("ray:[fd00::1]:6379", "[fd00::1]:6379")):
        assert TrainConfig(job="quadratic", on=on).on == on
        assert address_of(on) == address
        assert is_real(on)
        assert not is_started_outside(on)
        assert not is_here(on)
        assert not has_early_fork_server(on)
    assert not is_real("local:10.0.0.1:6379")
    assert not is_real("cluster.yaml")


@pytest.mark.parametrize(
    "on",
    ["ray:", "ray:6379", "ray:10.0.0.1", "ray:10.0.0.1:0", "ray:10.0.0.1:65536", "ray:10.0.0.1:x", "ray: :6379"],
)
def test_a_wrong_address_is_refused_with_the_right_form(on):
    with raising(UsageError, on, "ray:10.0.0.1:6379", "ray:auto"):
        TrainConfig(job="quadratic", on=on)


@pytest.mark.parametrize("on", ["rai:10.0.0.1:6379", "local:10.0.0.1:6379", "torchrun:auto"])
def test_a_place_that_takes_no_address_is_refused(on):
    with raising(UsageError, on, "ray"):
        TrainConfig(job="quadratic", on=on)


def test_the_address_of_the_client_of_ray_is_refused():
    with raising(UsageError, "ray:ray://10.0.0.1:10001", "ray:auto", "ray job submit"):
        TrainConfig(job="quadratic", on="ray:ray://10.0.0.1:10001")


def test_a_run_on_ray_has_no_devices():
    with raising(UsageError, "--device cuda", "--device cpu"):
        resolve(TrainConfig(job="quadratic", on="ray", device="cuda", workers=2))


def test_ray_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'--on ray needs ray .*pip install "dure\[ray\]"'):
        dure.train("quadratic", on="ray", workers=2, steps=2)

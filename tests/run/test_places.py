"""Places of runs: names of launchers, with and without an address."""

import sys

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.places import address_of, has_early_fork_server, is_here, is_real, is_started_outside
from dure.run.reservation import LEAST, Reservation, reservations
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


def test_a_worker_on_ray_has_the_first_device_that_it_sees():
    setup, _ = resolve(TrainConfig(job="quadratic", on="ray", device="cuda", workers=2))
    assert setup.devices == ("cuda:0", "cuda:0")


@pytest.mark.parametrize("device", ["auto", "cuda:1", "xpu"])
def test_a_device_that_ray_does_not_choose_is_refused(device):
    with raising(UsageError, f"--device {device}", "--device cuda", "--device cpu"):
        TrainConfig(job="quadratic", on="ray", device=device)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reserve": "worker:cpus=2", "on": "local"}, "for --on ray"),
        ({"reserve": "workers:cpus=2"}, "workers is none of worker"),
        ({"reserve": "worker:cores=2"}, 'no parameter "cores"'),
        ({"reserve": "worker:cpus=0"}, "at least 0.001 processors"),
        ({"reserve": "worker:cpus=nan"}, "at least 0.001 processors"),
        ({"reserve": "worker:gpus=1.5"}, "a whole number"),
        ({"reserve": "worker:gpus=0", "device": "cuda"}, "gives a worker no GPU"),
    ],
)
def test_what_ray_cannot_reserve_is_refused(options, said):
    with raising(UsageError, said):
        resolve(TrainConfig(**{"job": "quadratic", "on": "ray"} | options))


def test_reservations_of_a_run():
    found = reservations("worker:cpus=4,gpus=0.5 server:cpus=2", "cuda")
    assert found["worker"] == Reservation(4.0, 0.5)
    assert found["server"] == Reservation(2.0, 0.0)
    assert found["actor"] == reservations(None, None)["worker"] == Reservation(LEAST, 0.0)
    assert reservations(None, "cuda")["worker"].gpus == 1.0


def test_ray_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'--on ray needs ray .*pip install "dure\[ray\]"'):
        dure.train("quadratic", on="ray", workers=2, steps=2)

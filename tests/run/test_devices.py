"""What `--device` names, dealt out to the workers of machines with other devices than this one has."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.run import devices
from dure.run.config import TrainConfig
from dure.run.devices import check_alike, check_form, check_use, dealt, described, devices_of, in_summary, notice
from dure.run.launchers import torchrun
from dure.run.resolve import rebuild, resolve
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with `count` devices of a kind."""

    def have(kind, count=0):
        monkeypatch.setattr(devices, "found_kind", lambda: kind)
        monkeypatch.setattr(devices, "count_of_devices", lambda: count)

    return have


def test_workers_get_the_devices_in_turn():
    assert dealt("cuda", 4, 3) == ("cuda:0", "cuda:1", "cuda:2")
    assert dealt("cuda", 2, 5) == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    assert dealt("cuda", 4, 3, index="02") == ("cuda:2",) * 3
    assert dealt("cuda", 4, 3, one=True) == ("cuda:0",) * 3


@pytest.mark.parametrize(("local_rank", "taken"), [(0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0"), (5, "cuda:1")])
def test_a_rank_takes_the_device_of_its_local_rank(local_rank, taken):
    """More ranks than devices share them."""
    assert dealt("cuda", 2, 4, local_rank=local_rank) == (taken,) * 4
    assert dealt("cuda", 2, 4, local_rank=local_rank, index="1") == ("cuda:1",) * 4


def test_a_run_under_torchrun_takes_the_device_of_its_rank(machine, monkeypatch):
    machine("cuda", 2)
    environment = {"RANK": "4", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = TrainConfig(job="quadratic", on="torchrun", workers=6, device="auto")
    assert resolve(config)[0].for_worker(4).device == "cuda:1"


def met(topology, device, monkeypatch):
    """The devices that rank 0 finds in a rendezvous with a rank 1 on the CPU of another machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    setup = resolve(TrainConfig(job="quadratic", topology=topology, on="torchrun", workers=2, device=device))[0]
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(lambda rank: Rendezvous(RankEnvironment(rank, 2, "127.0.0.1"), "test"), (0, 1))
    there.put("device 1", ["cpu", "b"])
    return torchrun._devices(here, setup)


def test_rank_0_learns_the_devices_of_the_other_ranks(machine, monkeypatch, caplog):
    machine("cuda", 2)
    assert met("ps", "auto", monkeypatch) == ["cuda:0", "cpu"]
    assert f"found cpu and cuda: 2 workers on cuda:0 of {socket.gethostname()}, the CPU." in caplog.text
    with raising(UsageError, "rank 1"):
        met("collective", "cuda", monkeypatch)
    assert met("collective", None, monkeypatch) == ["cpu", "cpu"]


def test_each_worker_of_this_machine_has_its_device_and_shares_the_data(machine):
    machine("cuda", 2)
    setup = resolve(TrainConfig(job="quadratic", on="local", workers=3, device="cuda"))[0]
    assert [setup.for_worker(rank).device for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert setup.for_worker(1).data is setup.data
    assert setup.device == "cpu"  # of servers and of the driver


def test_a_fork_server_looks_for_no_devices(machine, monkeypatch):
    """A driver that it has asked could not be used in the processes that it forks."""
    machine("cuda", 2)
    plain = resolve(TrainConfig(job="quadratic", on="local", workers=3, device="cuda"))[0].plain()
    monkeypatch.delattr(devices, "found_kind")
    monkeypatch.delattr(devices, "count_of_devices")
    assert rebuild(plain).devices == ("cuda:0", "cuda:1", "cuda:0")


def test_auto_takes_an_accelerator_if_there_is_one(machine):
    machine(None)
    assert devices_of("auto", 2, virtual=False) == devices_of("cpu", 2, virtual=False) == ("cpu", "cpu")
    machine("xpu", 2)
    assert devices_of("auto", 3, virtual=False) == devices_of("xpu", 3, virtual=False) == ("xpu:0", "xpu:1", "xpu:0")
    assert devices_of("auto", 2, virtual=True) == ("xpu:0", "xpu:0")
    assert devices_of("cpu", 2, virtual=False) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("has", "asked", "said"),
    [
        ((None,), "cuda", r"PyTorch \d\S* finds no accelerator here. Write cpu or auto."),
        (("cuda", 2), "gpu", "PyTorch finds devices of kind cuda here. Write cuda, cpu or auto."),
        (("cuda", 2), "cuda:2", "2 are here, cuda:0 to cuda:1. Write one of these, cuda or auto."),
        (("cuda", 1), "cuda:1", "one is here. Write cuda:0, cuda or auto."),
        (("cuda", 1), "auto:0", "PyTorch finds devices of kind cuda here."),
    ],
)
def test_an_error_names_the_devices_that_are_here(machine, has, asked, said):
    machine(*has)
    with pytest.raises(UsageError, match=f'device="{asked}" was asked for, and {said}'):
        devices_of(asked, 2, virtual=False)


@pytest.mark.parametrize("text", ["", "CUDA", "cuda:", "cuda:one", "cuda:1,2", "0", "cuda 1"])
def test_a_text_that_can_name_no_device_is_refused_before_torch_is_imported(text):
    with pytest.raises(UsageError, match=f'device="{text}" is no device. Write auto, cpu, cuda, or cuda:1'):
        TrainConfig(job="quadratic", device=text)


def test_a_run_that_cannot_use_its_device_is_refused():
    check_use(["cuda:0"], timing_only=False)
    check_use(["cpu"], timing_only=True)
    with raising(UsageError, "cuda:0"):
        check_use(["cuda:0"], timing_only=True)


def test_a_device_without_side_streams_is_not_taken(machine):
    machine("mps", 1)
    assert devices_of("auto", 2, virtual=False) == ("cpu", "cpu")
    with raising(UsageError, "mps"):
        devices_of("mps", 2, virtual=False)
    assert notice(None, ["cpu"]) == ""


def test_notices(machine):
    machine("cuda", 2)
    assert notice("cuda", ["cuda:0", "cuda:1"]) == "2 workers on cuda:0, cuda:1."
    assert notice("auto", ["cuda:0", "cuda:0"]) == "device=auto found cuda: 2 workers on cuda:0: several share one."
    assert notice("auto", ["cpu"]) == "device=auto found no accelerator: 1 worker on the CPU."
    assert notice("cpu", ["cpu", "cpu"]) == ""
    assert notice(None, ["cpu"]).endswith("this machine has devices of kind cuda: --device auto uses them.")
    machine(None)
    assert notice(None, ["cpu"]) == ""


def test_devices_of_several_machines():
    assert described(["cuda:0", "cuda:1"] * 2, ["a", "a", "b", "b"]) == (
        "4 workers on cuda:0 of a, cuda:0 of b, cuda:1 of a, cuda:1 of b"
    )
    assert (
        described(["cuda:0", "cuda:0", "cpu"], ["a", "a", "b"])
        == "3 workers on cuda:0 of a, the CPU: several share one"
    )
    assert described(["cuda:0", "cpu", "cpu"]) == "3 workers on cuda:0, the CPU"


def test_ranks_of_collectives_need_devices_of_one_kind():
    check_alike(["cuda:0", "cuda:1"])
    with raising(UsageError, "rank 0"):
        check_alike(["cuda:0", "cuda:1", "cpu", "cpu"])


def test_the_summary_of_a_run_on_the_cpu_has_no_devices():
    assert in_summary(["cpu", "cpu"]) == in_summary([]) == {}
    assert in_summary(["cuda:0", "cpu"]) == {"devices": ["cuda:0", "cpu"]}


def test_forms():
    for text in ("cpu", "cuda", "cuda:13", "privateuse1", "auto"):
        check_form(text)

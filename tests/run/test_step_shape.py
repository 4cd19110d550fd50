"""Seconds of a step on a device of the catalogue, against closed forms; and the machines that name one."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn

from dure.core.devices import KERNEL, MOVED, PRODUCTS, device
from dure.core.spec_text import machines_in_line
from dure.errors import ClusterError, UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.run.step_shape import device_seconds, referred
from dure.runtime.virtual.accelerators import AcceleratorEngine, InsideLink
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant

WIDTH, ROWS = 4096, 2048


def dense(precision: str = "", accumulate: int = 1) -> Job:
    """Two dense layers without biases, whose seconds are those of their products and of their update."""

    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))

    data = Data(torch.empty(10_000, WIDTH, device="meta"), torch.empty(10_000, WIDTH, device="meta"))
    return Job(model, nn.functional.mse_loss, data, batch_size=ROWS, precision=precision, accumulate=accumulate)


def test_a_step_of_dense_layers_takes_their_products_and_the_update() -> None:
    v100 = device("v100-sxm2-16gb")
    layer = 2 * ROWS * WIDTH**2 / (PRODUCTS["fp32"] * v100.flops["fp32"]) + KERNEL
    update = 5 * 2 * WIDTH**2 * 4 / (MOVED * v100.bandwidth)
    # two forwards, two gradients of weights, and the gradient of the second layer's inputs
    assert device_seconds(dense(), "v100-sxm2-16gb") == pytest.approx(5 * layer + update, rel=1e-6)
    # the gradients of each mini-batch move as many weights
    halves = 2 * 5 * ((layer - KERNEL) / 2 + KERNEL) + update
    assert device_seconds(dense(accumulate=2), "v100-sxm2-16gb") == pytest.approx(halves, rel=1e-6)


def test_precision_decides_the_speed_of_products() -> None:
    plain, fast = (device_seconds(dense(precision), "a100-sxm4-80gb") for precision in ("fp32", "tf32"))
    assert fast < plain / 3
    assert device_seconds(dense("tf32"), "v100-sxm2-16gb") == device_seconds(dense("fp32"), "v100-sxm2-16gb")


def test_machines_that_name_a_device_take_its_seconds_memory_and_links() -> None:
    cluster = Cluster.described("2x8 v100-sxm2-16gb @ 100 Gbit/s")
    assert (cluster.workers, cluster.memory_of(0), cluster.inside_of(1).kind) == (16, 16 * 2**30, "mesh")
    job = load_job("resnet50:batch=32")
    seconds = referred(cluster, job).machines[0].compute.seconds
    assert seconds == device_seconds(job, "v100-sxm2-16gb")
    run = virtual(load_job("resnet50:batch=32"), "bsp", cluster, steps=2, timing_only=True)
    assert 2 * seconds < run.summary["seconds"] < 2.6 * seconds


def test_what_a_file_states_counts_before_the_catalogue() -> None:
    kind = Machines(gpus=8, gpu="a100-sxm4-40gb", memory="30 GB", compute=Constant(seconds=0.1))
    cluster = Cluster(machines=(kind,), inside=InsideLink(kind="pcie"))
    assert (cluster.memory_of(0), cluster.inside_of(0).kind) == (30 * 10**9, "pcie")
    assert referred(cluster, dense()).machines[0].compute.seconds == 0.1
    stated = Machines(gpus=8, gpu="a100-sxm4-40gb", compute=Constant(flops_per_second="10 TFLOP/s"))
    assert referred(Cluster(machines=(stated,)), dense()).machines[0].compute.seconds is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"gpus": 8, "gpu": "v100"}, "no device is called 'v100'"),
        ({"gpus": 8, "gpu": "epyc-7742"}, "epyc-7742 has cores and no accelerators"),
        ({"workers": 8, "gpu": "t4"}, "t4 is an accelerator: write gpus"),
    ],
)
def test_wrong_devices_are_refused(kind: dict, words: str) -> None:
    with raising(ClusterError, words):
        Machines(**kind)


def test_a_line_of_several_machines_needs_the_speed_of_their_cards() -> None:
    assert Cluster.described("1x2 rtx-4090").workers == 2
    with raising(ClusterError, "nothing says how fast"):
        Cluster.described("2x8 t4")
    with raising(ClusterError, "t44"):
        Cluster.described("2x8 t44 @ 10 Gbit/s")


def test_a_line_states_links_cards_and_transport() -> None:
    cluster = Cluster.described("2x8 A100-pcie-40gb PCIe-host @ 4 x 25 Gbit/s TCP")
    assert (cluster.inside_of(0).kind, cluster.inside_of(0).bandwidth) == ("pcie-host", pytest.approx(11e9))
    assert (cluster.card.count, cluster.card.transport, cluster.link.bandwidth) == (4, "tcp", 25e9 / 8)
    assert Cluster.described("2x8 h100-sxm5-80gb switch @ 400 Gbit/s").inside_of(0).bandwidth == 360e9
    for text in ("2x8 t4 @ 4x 100 Gbit/s rdma", "1x8 t4 pcie", "2x2 t4 @ 10 Gbit/s"):
        assert str(machines_in_line(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2x8 t4 nvlink @ 10 Gbit/s", "'nvlink' is unknown"),
        ("2x8 t4 @ 10 Gbit/s roce", "'10 Gbit/s roce' is not a bandwidth"),
        ("2x8 t4 @ 100", "100 has no unit: write 100 Gbit/s"),
        ("2x8 t4 @ 0x10 Gbit/s", "card.count: 0 must be at least 1"),
        ("2x8 t4 tcp", "'tcp' is unknown"),
    ],
)
def test_wrong_words_of_a_line_are_refused(text: str, words: str) -> None:
    with raising(ClusterError, words):
        Cluster.described(text)


@pytest.mark.parametrize("partition", ["gpipe:stages=2,micro=2", "tensor:ways=2"])
def test_steps_of_several_mini_batches_are_for_whole_models(partition: str) -> None:
    with raising(UsageError, "accumulate=2 is for workers with the whole model"):
        virtual(dense(accumulate=2), f"bsp {partition}", workers=2, steps=1, timing_only=True)


@pytest.mark.parametrize("partition", ["zero:stage=2", "zero:stage=3"])
def test_steps_of_several_mini_batches_need_the_whole_gradient_at_a_worker(partition: str) -> None:
    with raising(UsageError, "accumulate=2 sums the whole gradients of 2 mini-batches at each worker"):
        virtual(dense(accumulate=2), f"bsp {partition}", workers=2, steps=1, timing_only=True)
    virtual(dense(accumulate=2), "bsp zero:stage=1", workers=2, steps=1, timing_only=True)


@pytest.mark.parametrize(("micro", "own"), [(1, ROWS), (256, ROWS), (256, 64)])
def test_micro_batches_of_a_pipeline_take_the_starts_and_moves_of_their_size(micro: int, own: int) -> None:
    """Eight samples move the weights of a layer in more time than their products take; their messages are short."""
    v100, job = device("v100-sxm2-16gb"), dense().adjusted(own_batch_size=own)
    cluster = Cluster(machines=(Machines(gpus=2, gpu=v100.name, inside=InsideLink(bandwidth="1e15")),))
    strategy = f"bsp gpipe:stages=2,micro={micro}"
    run = virtual(job, strategy, cluster.changed(engine=AcceleratorEngine(spread=0.0)), steps=1, timing_only=True)
    rows = ROWS // micro
    products = 2 * rows * WIDTH**2 / (PRODUCTS["fp32"] * v100.flops["fp32"])
    moves = 4 * (WIDTH**2 + 2 * rows * WIDTH) / (MOVED * v100.bandwidth)
    layer = KERNEL + max(products, moves)
    update = 5 * WIDTH**2 * 4 / (MOVED * v100.bandwidth)
    # forward of the first stage, then forwards and two gradients of the second; the first stage's last gradient
    expected = layer + 3 * micro * layer + update + layer + update / micro
    assert run.summary["seconds"] == pytest.approx(expected, rel=4e-3)
    assert (moves > products) == (micro > 1)


def shared_pair() -> Job:
    """Two dense layers that workers share, and a norm that each of them has whole."""

    def model() -> nn.Module:
        with torch.device("meta"):
            first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            return nn.Sequential(first, nn.ReLU(), second, nn.LayerNorm(WIDTH, elementwise_affine=False))

    data = Data(torch.empty(10_000, WIDTH, device="meta"), torch.empty(10_000, WIDTH, device="meta"))
    return Job(model, nn.functional.mse_loss, data, batch_size=ROWS)


def forwards(rows: int, ways: int) -> list[float]:
    """Seconds of the forward of each layer of `shared_pair` at one of the workers that share them."""
    v100 = device("v100-sxm2-16gb")
    values, weights = rows * WIDTH, WIDTH**2

    def operation(flops: float, moved: float) -> float:
        return max(flops / (PRODUCTS["fp32"] * v100.flops["fp32"]), 4 * moved / (MOVED * v100.bandwidth)) + KERNEL

    dense = operation(2 * rows * weights / ways, values + (weights + values) / ways)
    return [dense, operation(0, 2 * values / ways), dense, operation(0, 2 * values + 2 * rows)]


@pytest.mark.parametrize("rows", [32, ROWS, 2 * ROWS])
@pytest.mark.parametrize("ways", [2, 4])
def test_a_part_takes_its_share_of_products_the_whole_norm_and_all_starts(rows: int, ways: int) -> None:
    """The seconds of a step of the job's own batch on one device are the measure: starts do not grow with the batch."""
    inside = InsideLink(bandwidth="1000000 GB/s", latency=0.0)
    kind = Machines(gpus=ways, gpu="v100-sxm2-16gb", inside=inside, memory="1 TB")
    cluster = Cluster(machines=(kind,), engine=AcceleratorEngine(start=0.0, spread=0.0))
    run = virtual(shared_pair(), f"bsp tensor:ways={ways}", cluster, steps=2, batch_size=rows, timing_only=True)
    whole = forwards(ROWS, 1)
    backward = (2 * sum(whole) - whole[0]) / sum(whole)  # the first layer needs no gradient of its inputs
    update = 5 * 2 * WIDTH**2 * 4 / ways / (MOVED * device("v100-sxm2-16gb").bandwidth)
    expected = sum(forwards(rows, ways)) * (1 + backward) + update
    assert run.summary["seconds"] / 2 == pytest.approx(expected, rel=1e-3)

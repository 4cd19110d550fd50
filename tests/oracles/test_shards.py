"""Sharded data parallelism in virtual time: the parameters of bsp, and closed forms of its seconds and bytes."""

from __future__ import annotations

import time
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from support.runs import virtual
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.job.shapes.transformers import Sizes, albert, bert, pretraining_loss
from dure.planner.candidates import Scene
from dure.planner.timing import setup_in, timed
from dure.run.step_shape import shape_of_whole
from dure.runtime.virtual.accelerators import LIBRARIES, AcceleratorEngine, InsideLink
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

# ---- numbers


def images():
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(96, 1, 8, 8, generator=generator), torch.randint(10, (96,), generator=generator)

    def model():
        def convolved(inputs, outputs):
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        return nn.Sequential(convolved(1, 6), convolved(6, 8), nn.Flatten(), nn.Linear(512, 10))

    data = dure.Data(inputs, targets)
    return dure.Job(model, cross_entropy, data, data, batch_size=12, name="images")


def words(network):
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randint(40, (64, 12), generator=generator)
    targets = torch.cat([torch.randint(2, (64, 1), generator=generator), inputs], dim=1)
    data = dure.Data(inputs, targets)
    return dure.Job(network, pretraining_loss, data, data, batch_size=12, name="words")


JOBS = {
    "mlp": lambda: "digits-mlp",
    "batch norm": images,
    "tied": lambda: "char-gpt:width=16,layers=1,heads=2,context=8",
    "bert": lambda: words(partial(bert, 2, Sizes(16, 2, 2, 32), vocab=40)),
    "albert": lambda: words(partial(albert, 2, Sizes(16, 2, 2, 32), vocab=40, width=8)),
}
"""Jobs: of two the embedding is the head's weight, and the layers of the last one are one layer."""

OPTIMIZERS = {"mlp": "momentum:lr=0.1", "batch norm": "adamw:lr=0.01", "tied": "adam:lr=0.001"}


@cache
def params(job, strategy, workers, optimizer):
    options = {"steps": 4, "batch_size": 12 // workers, "optimizer": optimizer, "exact": True}
    return virtual(JOBS[job](), strategy, workers=workers, **options).params


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("job", "stage", "workers"), [(job, stage, workers) for workers in (2, 4, 3) for job in JOBS for stage in (1, 3)]
)
def test_shards_have_the_parameters_of_whole_models(job, stage, workers):
    """Stage 3 multiplies the loss, not the gradient, by the share of a worker: the same bits unless it is a third."""
    same = workers != 3 or stage == 1
    optimizer = OPTIMIZERS.get(job, "adamw:lr=0.01") if same else "momentum:lr=0.05"
    found, whole = (params(job, text, workers, optimizer) for text in (f"bsp zero:stage={stage}", "bsp"))
    assert torch.equal(found, whole) if same else float((found - whole).abs().max()) < 1e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("job", "partition"),
    [(job, each) for job in JOBS for each in ("zero:stage=1", "zero:stage=3", "zero:stage=1,within=2")],
)
def test_shards_are_clipped_by_the_norm_of_the_whole_gradient(job, partition):
    """Their sum of squares has another order, and that of groups of ranks another order of gradients."""
    optimizer = "momentum:lr=0.05,clip=0.1"
    found, whole = (params(job, text, 4, optimizer) for text in (f"bsp {partition}", "bsp"))
    assert float((found - whole).abs().max()) < 1e-6
    assert not torch.equal(whole, params(job, "bsp", 4, "momentum:lr=0.05"))


# ---- seconds and bytes

BLOCKS, WIDTH, BATCH = 5, 640, 64
P = 4 * BLOCKS * (WIDTH * WIDTH + WIDTH)
"""Bytes of the parameters of equal blocks."""


def stack(*widths, **options):
    """A job of dense layers between these widths, each of which is a block."""
    data = dure.Data(torch.zeros(256, widths[0]), torch.zeros(256, dtype=torch.long))
    model = partial(_dense, widths)
    return dure.Job(model, cross_entropy, data, batch_size=BATCH, name="stack", **options)


def _dense(widths):
    return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)))


EQUAL = stack(*[WIDTH] * (BLOCKS + 1))


def scene(job, count, bandwidth, **kind):
    """Steps of a second, of which forward is a third, on workers whose messages cost their bytes alone."""
    machines = Machines(**{"count": count, "compute": Constant(seconds=1.0), **kind})
    link, inside = Link(bandwidth=bandwidth, latency=0.0), InsideLink(bandwidth=8 * bandwidth, latency=0.0)
    cluster = Cluster(
        machines=(machines,), link=link, inside=inside, alpha=0.0, beta=0.0, gamma=0.0, backward=2 / 3, header=0
    )
    return Scene(job, cluster, BATCH * cluster.workers)


def seconds(here, partition):
    return timed(here, f"bsp {partition}").seconds


def agreement(ranks, bandwidth):
    """Seconds in which a ring sums a number of 8 bytes, which one rank's part has all of."""
    return 2 * (ranks - 1) * 8 / bandwidth


@pytest.mark.parametrize("workers", [2, 4])
def test_stage_1_scatters_slices_behind_backward_and_gathers_after_the_step(workers):
    here, half = scene(EQUAL, workers, P), (workers - 1) / workers  # a message of all parameters takes a second
    slices, end = setup_in(here, "bsp zero:stage=1").topology.slices, 0.0
    assert len(slices) == BLOCKS
    for numel, left in slices:
        end = max(end, 1 - 2 / 3 * left) + half * 4 * numel / P
    assert seconds(here, "zero:stage=1") == pytest.approx(end + half + agreement(workers, P), rel=1e-9)
    assert seconds(here, "zero:stage=2") == seconds(here, "zero:stage=1")


def test_stage_3_takes_the_sum_of_its_passes_where_messages_take_no_time():
    assert seconds(scene(EQUAL, 4, 1e20), "zero:stage=3") == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(("workers", "blocks"), [(2, 5), (4, 5), (2, 2)])
def test_stage_3_behind_a_slow_network_gathers_twice_and_scatters_once_without_a_break(workers, blocks):
    """(2 n - 1) g + n s, as the last block stays gathered, and the forward of that, which the next gather follows."""
    bandwidth = P / 1000
    g = s = (workers - 1) / workers * 1000 / BLOCKS
    expected = (2 * blocks - 1) * g + blocks * s + 1 / 3 / blocks + agreement(workers, bandwidth)
    here = scene(stack(*[WIDTH] * (blocks + 1)), workers, bandwidth)
    assert seconds(here, "zero:stage=3") == pytest.approx(expected, rel=1e-9)


def test_stage_3_at_a_fast_network_waits_for_the_first_gather_and_the_last_scatter_alone():
    bandwidth = 8 * P
    ends = 2 * 3 / 4 / BLOCKS / 8
    assert seconds(scene(EQUAL, 4, bandwidth), "zero:stage=3") == pytest.approx(
        1.0 + ends + agreement(4, bandwidth), rel=1e-9
    )


def played(passes, gather, scatter):
    """Seconds of a step of stage 3, by events: computations and messages are two queues, each one after another."""
    n, now, lane, done, there = len(passes), 0.0, 0.0, {}, set()

    def send(name, took):
        nonlocal lane
        lane = done[name] = max(lane, now) + took

    forwards = [("F", k, min(k + 1, n - 1)) for k in range(n)]
    backwards = [("B", k, max(k - 1, 0)) for k in reversed(range(n))]
    for kind, k, ahead in forwards + backwards:
        for each in (k, ahead):
            if each not in there:
                there.add(each)
                send(("gather", each), gather[each])
        now = max(now, done["gather", k]) + passes[k][kind == "B"]
        if (kind, k) != ("F", n - 1):  # the last block stays
            there.discard(k)
        if kind == "B":
            now = max(now, done.get(("scatter", k + 1), 0.0))  # one scatter at a time
            send(("scatter", k), scatter[k])
    return lane


PASSES = [(0.02, 0.04), (0.1, 0.15), (0.05, 0.14), (0.01, 0.03), (0.06, 0.4)]
"""Forward and backward of blocks, a second together."""


@pytest.mark.parametrize("moving", [0.01, 0.1, 0.4, 1.0, 2.0])
def test_stage_3_takes_the_seconds_of_its_events(moving):
    """Blocks of unequal sizes and seconds; all parameters take so many seconds over a link."""
    widths, workers = (640, 320, 640, 160, 640, 400), 4
    nbytes = [4 * (inputs + 1) * outputs for inputs, outputs in pairwise(widths)]
    bandwidth = sum(nbytes) / moving
    here = scene(stack(*widths, block_seconds=PASSES), workers, bandwidth)
    messages = [(workers - 1) / workers * each / bandwidth for each in nbytes]
    expected = played(PASSES, messages, messages) + agreement(workers, bandwidth)
    assert seconds(here, "zero:stage=3") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("within", ["host", "2"])
def test_shards_inside_two_hosts_are_summed_across_them(within):
    """HSDP: scatters and gathers take the links inside, and each of two parts a card alone, as engines do here."""
    here = scene(EQUAL, 2, P, workers=2)
    slices, end, inside = setup_in(here, "bsp zero:stage=1").topology.slices, 0.0, 8 * P
    for numel, left in slices:
        end = max(end, 1 - 2 / 3 * left) + 1 / 2 * 4 * numel / inside
    across = 2 * 1 / 2 * (P / 2) / P
    expected = end + across + agreement(2, inside) + 1 / 2 * P / inside
    assert seconds(here, f"zero:stage=1,within={within}") == pytest.approx(expected, rel=1e-9)
    # the sums across are behind each other, those of four blocks beside backward
    by_blocks = seconds(here, f"zero:stage=3,within={within}")
    assert 1 + across / BLOCKS < by_blocks < 1 + across / 2


@pytest.mark.parametrize("partition", ["zero:stage=1", "zero:stage=3", "zero:stage=1,within=2"])
def test_the_shares_of_time_have_all_messages_of_shards(partition):
    """Workers compute in turn with messages: what is not computing, in seconds of the run, is communication."""
    run = virtual("digits-mlp", strategy=partition, workers=4, steps=5).summary
    whole = virtual("digits-mlp", strategy="bsp", workers=4, steps=5).summary
    computed = [each["time_share"]["compute"] * each["seconds"] for each in (run, whole)]
    assert computed[0] == pytest.approx(computed[1], rel=1e-3)


def accelerators(count, bandwidth, job=EQUAL):
    """Steps of a second on GPUs of one host. Collectives start in a millisecond, and slow computations by a tenth."""
    machines = Machines(gpus=count, gpu="v100-sxm2-16gb", compute=Constant(seconds=1.0))
    engine = AcceleratorEngine(spread=0.0, start=1e-3, contention=0.1)
    cluster = Cluster(machines=(machines,), inside=InsideLink(bandwidth=bandwidth, latency=0.0), engine=engine)
    return Scene(job, cluster, BATCH * count)


def test_accelerators_update_their_shards_alone():
    """Stage 1 on a free network: the steps of bsp without the updates of the others, and two collectives more."""
    here = accelerators(4, 1e20)
    update = shape_of_whole(EQUAL, here.model, here.cluster, BATCH).update
    assert 0.01 < update < 0.9
    expected = seconds(here, "none") - update * 3 / 4 + 2 * 1e-3  # the gather, and the agreement
    assert seconds(here, "zero:stage=1") == pytest.approx(expected, rel=1e-9)


def test_collectives_of_blocks_slow_the_computation_of_accelerators():
    bandwidth = 100 * P
    here = accelerators(4, bandwidth)
    update = shape_of_whole(EQUAL, here.model, here.cluster, BATCH).update
    moved = 3 / 4 / BLOCKS / 100
    lost = 1e-3 + moved - moved / 1.1
    slowed = 3 * (BLOCKS - 1) * lost + 2 * BLOCKS * LIBRARIES["ddp"].tensor
    ends = 2 * (1e-3 + moved) + 1e-3 + 2 * 3 / 4 * 8 / bandwidth
    expected = 1 - update * 3 / 4 + slowed + ends
    assert seconds(here, "zero:stage=3") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bytes_are_twice_or_three_times_those_of_a_share_of_the_others(workers):
    """(2, 2, 3 - b_n / P) (N - 1) / N P in each step, and 8 bytes by a ring."""
    here = scene(EQUAL, workers, P)
    small = 2 * (workers - 1) / workers * 8
    for stage, times in ((1, 2), (2, 2), (3, 3 - 1 / BLOCKS)):
        sent = timed(here, f"bsp zero:stage={stage}").bytes_per_step
        assert sent == pytest.approx(times * (workers - 1) / workers * P + small, rel=1e-5)


@pytest.mark.parametrize(("workers", "within"), [(4, 2), (8, 4)])
def test_bytes_of_groups_are_those_inside_a_group_and_those_of_a_part_across(workers, within):
    here, groups = scene(EQUAL, workers, P), workers // within
    across, small = 2 * (groups - 1) / groups * P / within, 2 * (within - 1) / within * 8
    for stage, times in ((1, 2), (2, 2), (3, 3 - 1 / BLOCKS)):
        sent = timed(here, f"bsp zero:stage={stage},within={within}").bytes_per_step
        assert sent == pytest.approx(times * (within - 1) / within * P + across + small, rel=1e-5)


@pytest.mark.alone
def test_a_thousand_workers_are_timed_in_seconds():
    begun = time.perf_counter()
    for partition in ("zero:stage=1", "zero:stage=3"):
        virtual("digits-mlp", f"bsp {partition}", workers=1000, steps=2, timing_only=True)
    assert time.perf_counter() - begun < 60

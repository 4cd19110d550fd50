"""Profiles of blocks: counted sizes against closed forms, a file and back, and nothing changed."""

import pytest
import torch
from support import stage_jobs
from support.runs import resolved, virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import dure
from dure.errors import StrategyError, UsageError
from dure.job.models.mlp import mlp
from dure.job.shapes.images import vgg16
from dure.partition.blocks import blocks_of
from dure.partition.cut import Level, Speeds, cut_of, plan
from dure.partition.profile import BlockProfile, Profile, counted, timed
from dure.runtime.virtual.accelerators import InsideLink
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant


def job_of(model, width=8, targets=None):
    targets = torch.zeros(6, dtype=torch.int64) if targets is None else targets
    return dure.Job(model, cross_entropy, dure.Data(torch.randn(6, width), targets), name="small")


def profiled(job, samples, **settings):
    return counted(job, blocks_of(job, job.build()), samples, **settings)


def test_sizes_of_dense_layers_are_those_of_the_closed_forms():
    """A dense layer of (n, m): 2 b n m operations forward, as many for each gradient; the first needs one only."""
    b = 4
    found = profiled(job_of(lambda: mlp(8, 16, 4)), b, flops=2.0).blocks
    assert [block.seconds * 2.0 for block in found] == [0, 2 * 2 * b * 8 * 16, 0, 3 * 2 * b * 16 * 4]
    assert [block.output_nbytes for block in found] == [4 * b * n for n in (8, 16, 16, 4)]
    assert [block.parameter_nbytes for block in found] == [0, 4 * (8 * 16 + 16), 0, 4 * (16 * 4 + 4)]
    assert [block.activation_nbytes for block in found] == [0, 4 * b * 8, 4 * b * 16, 4 * b * 16]
    assert [block.name for block in found][1] == "block 1 (Linear)"


def test_the_operations_of_the_blocks_are_those_of_the_job():
    job = job_of(lambda: mlp(8, 16, 4))
    assert sum(block.seconds for block in profiled(job, 2).blocks) == 2 * job.flops_per_sample


def test_a_block_without_counted_operations_is_charged_by_its_parameters():
    job = dure.Job(
        lambda: nn.Sequential(nn.Embedding(10, 3), nn.LayerNorm(3)), mse_loss, dure.Data(torch.arange(4), torch.ones(4))
    )
    assert [block.seconds for block in profiled(job, 4).blocks] == [6 * 30 * 4, 6 * 6 * 4]


def test_all_tensors_of_a_border_count_and_integers_have_no_gradient():
    class Split(nn.Linear):
        def forward(self, x):
            return {"x": super().forward(x), "mask": x > 0}

    class Join(nn.Linear):
        def forward(self, x, mask):
            assert not mask.requires_grad
            return super().forward(x * mask)

    job = dure.Job(
        lambda: nn.Sequential(Split(8, 8), Join(8, 2)),
        cross_entropy,
        dure.Data(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)),
        stages=list,
    )
    assert [block.output_nbytes for block in profiled(job, 4).blocks] == [4 * 8 * 4 + 4 * 8, 4 * 2 * 4]


def test_a_profile_changes_nothing():
    job = job_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
    module = job.build()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    counted(job, list(module), 4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_block_may_change_its_inputs_in_place():
    job = job_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)))
    before = job.train.inputs.clone()
    assert [block.seconds for block in profiled(job, 2).blocks] == [2 * 2 * 2 * 64, 0, 3 * 2 * 2 * 16]
    assert torch.equal(before, job.train.inputs)


def test_frozen_parameters_are_no_gradient_to_exchange():
    job = job_of(lambda: mlp(8, 8, 4))
    module = job.build()
    module[1].requires_grad_(False)
    found = counted(job, list(module), 2)
    assert [block.parameter_nbytes for block in found.blocks] == [0, 0, 0, 4 * 36]
    assert not found.trains(0, 3)


def test_times_are_medians_without_the_first_computation():
    seconds = [0]

    class Slow(nn.Linear):
        costs = iter([0, 100, 1, 5, 2])  # the first call finds the sizes

        def forward(self, x):
            seconds[0] += next(self.costs)
            return super().forward(x)

    job = job_of(lambda: nn.Sequential(Slow(8, 4)))
    found = timed(job, list(job.build()), 4, clock=lambda: seconds[0], repeats=3)
    assert [block.seconds for block in found.blocks] == [2]


def test_a_block_may_return_what_only_its_successor_or_the_loss_understands():
    class Nested(nn.Linear):
        def forward(self, x):
            return super().forward(x), [None, (x,)]

    class Out(nn.Linear):
        def forward(self, both):
            x, (_, (y,)) = both
            return {"logits": super().forward(x + y), "hidden": None}

    found = profiled(job_of(lambda: nn.Sequential(Nested(8, 8), Out(8, 2))), 4).blocks
    assert [block.output_nbytes for block in found] == [2 * 4 * 4 * 8, 4 * 4 * 2]


# ---- plans by profile


def test_the_plan_of_vgg16_is_that_of_pipedream():
    """PipeDream's plan of VGG-16 on 4 workers, 3 replicas and 1: at 64 images, 6 TFLOP/s and links of 10 Gbit/s."""
    profile = profiled(vgg16(), 64, flops=6e12)
    for combine in ("max", "add"):
        stages = plan(profile, [Level(4, 1.25e9)], combine=combine).stages
        assert [stage.replicas for stage in stages] == [3, 1]
        assert stages[1].start < 32  # the dense layers, with 89 % of the parameters, are not replicated


def test_cuts_by_profile_balance_operations():
    job = job_of(lambda: mlp(8, 64, 64, 64, 4))
    blocks = blocks_of(job, job.build())
    assert cut_of("profile", blocks, 2, profile=lambda: counted(job, blocks, 4)) == (4,)
    assert cut_of("parameters", blocks, 2) == (5,)


def three_equal_layers(seconds, **changes):
    data = dure.Data(torch.randn(8, 8), torch.randn(8, 8))
    return dure.Job(
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), mse_loss, data, block_seconds=seconds, **changes
    )


@pytest.mark.parametrize(
    ("seconds", "cut"),
    [([(1, 2), (1, 2), (3, 4)], 2), ([(3, 5), (1, 2), (2, 1)], 1), ([(1, 0), (0, 1), (0, 5)], 2)],
)
def test_stated_seconds_decide_where_a_pipeline_is_cut(seconds, cut):
    setup, _ = resolved(
        three_equal_layers(seconds), "bsp gpipe:stages=2,cuts=profile", Cluster.uniform(2), on="virtual"
    )
    assert setup.stages.layout.bounds == (0, cut, 3)


def test_a_pipeline_takes_the_stated_shares_of_a_step():
    """Stages of 0.1 + 0.4 and 0.3 + 0.2 s, two micro-batches: 0.05 + 2 * 0.15 forward, then 0.1 + 2 * 0.2 backward."""
    machines = Machines(count=2, compute=Constant(seconds=1.0))
    free = Cluster(machines=(machines,), link=Link(bandwidth=1e15, latency=0), alpha=0, beta=0)
    job = three_equal_layers([(0.1, 0.4), (0.1, 0.1), (0.2, 0.1)], batch_size=4)
    run = virtual(job, "bsp gpipe:stages=2,micro=2,cuts=1", free, steps=3, timing_only=True)
    assert run.seconds == pytest.approx(3 * 0.85)


def test_a_profile_in_a_file_cuts_as_the_profile(tmp_path):
    path = tmp_path / "small.json"
    job = job_of(lambda: mlp(8, 64, 64, 4))
    profile = profiled(job, 4)
    profile.write(path)
    assert Profile.read(path) == profile
    blocks = blocks_of(job, job.build())
    assert cut_of(str(path), blocks, 2) == cut_of("profile", blocks, 2, profile=lambda: profile)
    with raising(UsageError, "small.json"):
        cut_of(str(path), list(mlp(8, 8, 4)), 2)


def test_a_slow_link_moves_the_cut_to_the_smaller_border():
    blocks = list(mlp(8, 4, 16, 4))
    profile = Profile(tuple(BlockProfile(1.0, 4 * each, 10) for each in (8, 4, 4, 16, 16, 4)))
    assert cut_of("profile", blocks, 2, profile=lambda: profile) == (3,)
    profile = Profile(tuple(BlockProfile(1.0, 4 * each, 10) for each in (8, 4, 16, 16, 16, 4)))
    assert cut_of("profile", blocks, 2, profile=lambda: profile, speeds=Speeds(6.0, 10.0)) == (2,)


def slow(**kind):
    return Cluster(machines=(Machines(compute=Constant(seconds=0.1), **kind),), link=Link(bandwidth=1e4))


@pytest.mark.parametrize(
    ("cluster", "cut"),
    [
        (Cluster.uniform(4), 1),
        (slow(count=4), 2),  # 2 * 30 samples * 40 numbers of 4 bytes take 0.96 s, the mini-batch 0.1 s
        (slow(count=2, workers=2), 1),  # both stages of a replica are on one machine
        (slow(count=1, workers=4, inside=InsideLink(bandwidth=1e4)), 2),
        (Cluster(machines=(Machines(count=3), Machines(link=Link(bandwidth=1e4)))), 2),  # the slowest of both replicas
    ],
)
def test_a_cluster_gives_the_link_of_a_cut_by_profile(cluster, cut):
    job = stage_jobs.job(lambda: nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 4), nn.Linear(4, 10)), batch_size=30)
    setup, _ = resolved(job, "bsp collective gpipe:stages=2,cuts=profile", cluster, on="virtual")
    assert setup.stages.layout.bounds == (0, cut, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks: [{seconds: 1}, {seconds: -2}]", "2"),
        ("blocks: [{seconds: 1, flops: 3}]", "profile"),
        ("blocks: [3]", "3"),
        ("[1, 2]", "profile"),
        ("blocks: [", "cannot"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with raising(UsageError, message):
        Profile.read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with raising(UsageError, "absent.json"):
        cut_of(str(tmp_path / "absent.json"), list(mlp(8, 8)), 1)


def test_a_cut_by_profile_needs_one():
    with raising(StrategyError, "cut"):
        cut_of("profile", list(mlp(8, 8, 8)), 2)

"""PipeDream's dynamic programme against every possible plan, closed forms and limits."""

import math
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.wording import raising
from torch import nn

from dure.errors import StrategyError
from dure.job.job import load_job
from dure.partition.blocks import blocks_of
from dure.partition.cut import Level, PlannedStage, plan
from dure.partition.profile import BlockProfile, Profile, counted

BLOCK = st.builds(
    BlockProfile,
    seconds=st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]),
    output_nbytes=st.sampled_from([0, 1, 10, 40]),
    parameter_nbytes=st.sampled_from([0, 1, 8, 100]),
    activation_nbytes=st.sampled_from([0, 5, 20]),
)
PROFILES = st.lists(BLOCK, min_size=1, max_size=8).map(lambda blocks: Profile(tuple(blocks)))
BANDWIDTHS = st.sampled_from([1.0, 20.0, 1000.0, math.inf])


def equal(count, **sizes):
    return Profile(tuple(BlockProfile(1.0, parameter_nbytes=8, **sizes) for _ in range(count)))


TIED = Profile((BlockProfile(1.0, 0, 0.75), BlockProfile(1.0, 0, 0.75), BlockProfile(2.0, 0, 3)))
"""One stage of the first two blocks, or two, in the same time."""


def splits(total, most):
    """All ways to write `total` as an ordered sum of 1 to `most` positive numbers."""
    for parts in range(1, min(total, most) + 1):
        for cuts in combinations(range(1, total), parts - 1):
            yield [stop - start for start, stop in pairwise((0, *cuts, total))]


def every_plan(profile, workers, bandwidth, combine, memory, computed=None):
    """Seconds and stages of every plan that uses all workers, by the definition rather than the recurrence."""
    for sizes in splits(len(profile.blocks), workers):
        bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        for replicas in splits(workers, len(sizes)):
            if len(replicas) == len(sizes):
                stages = [PlannedStage(*span, r) for span, r in zip(pairwise(bounds), replicas, strict=True)]
                seconds = seconds_of(profile, stages, bandwidth, combine, memory, computed)
                if seconds is not None:
                    yield seconds, stages


def seconds_of(profile, stages, bandwidth, combine, memory=math.inf, computed=None):
    slowest = 0.0
    for number, (start, stop, m) in enumerate(stages):
        blocks = profile.blocks[start:stop]
        weights = sum(block.parameter_nbytes for block in blocks)
        held = math.ceil(sum(stage.replicas for stage in stages[number:]) / m)
        if not weights or held * (weights + sum(block.activation_nbytes for block in blocks)) > memory:
            return None
        sync = 4 * (m - 1) * weights / (m * bandwidth)
        compute = computed(start, stop) if computed else math.fsum(block.seconds for block in blocks)
        slowest = max(slowest, (max(compute, sync) if combine == "max" else compute + sync) / m)
        if number:
            slowest = max(slowest, 2 * profile.blocks[start - 1].output_nbytes / bandwidth)
    return slowest


@settings(max_examples=60, deadline=None)
@given(PROFILES, st.integers(1, 6), BANDWIDTHS, st.sampled_from(["max", "add"]), st.sampled_from([math.inf, 60, 300]))
@example(equal(3), 2, 1.0, "max", 48)
@example(TIED, 3, 1.0, "max", math.inf)
def test_no_plan_is_faster(profile, workers, bandwidth, combine, memory):
    every = list(every_plan(profile, workers, bandwidth, combine, memory))
    if not every:
        with pytest.raises(StrategyError, match="no plan puts these"):
            plan(profile, [Level(workers, bandwidth)], combine=combine, memory_nbytes=memory)
        return
    found = plan(profile, [Level(workers, bandwidth)], combine=combine, memory_nbytes=memory)
    seconds, _, stages = min((seconds, len(stages), stages) for seconds, stages in every)
    assert (found.seconds, list(found.stages)) == (seconds, stages)


@settings(max_examples=40, deadline=None)
@given(PROFILES, st.integers(1, 4), BANDWIDTHS)
def test_one_replica_each_makes_a_stage_of_each_worker(profile, workers, bandwidth):
    straight = [
        (seconds, [(start, stop) for start, stop, _ in stages])
        for seconds, stages in every_plan(profile, workers, bandwidth, "max", math.inf)
        if all(stage.replicas == 1 for stage in stages)
    ]
    if straight:
        found = plan(profile, [Level(workers, bandwidth)], replicas={1})
        assert found.seconds == min(straight)[0]
        assert len(found.stages) == workers == len(found.cuts) + 1


@pytest.mark.parametrize("workers", range(1, 9))
def test_without_communication_the_time_is_the_whole_over_the_workers(workers):
    found = plan(equal(8), [Level(workers)])
    assert found.seconds == 8 / workers
    assert found.stages == (PlannedStage(0, 8, workers),)
    straight = plan(equal(8), [Level(workers)], replicas={1})
    assert straight.seconds == math.ceil(8 / workers)


def test_large_weights_behind_small_outputs_are_not_replicated():
    """The form of VGG-16: convolutions with long computations, then dense layers with most of the parameters."""
    convolutions = [BlockProfile(1.0, output_nbytes=1, parameter_nbytes=1) for _ in range(3)]
    profile = Profile((*convolutions, BlockProfile(0.9, parameter_nbytes=100)))
    assert plan(profile, [Level(4, bandwidth=10.0)]).stages == (PlannedStage(0, 3, 3), PlannedStage(3, 4, 1))
    assert plan(profile, [Level(4)]).stages == (PlannedStage(0, 4, 4),)


def test_communication_is_hidden_or_added():
    profile = equal(2, output_nbytes=1000)
    levels = [Level(2, bandwidth=16.0)]  # sync: 4 * 16 / 2 / 16 = 2 s, as long as the computation
    assert plan(profile, levels).seconds == 1.0
    assert plan(profile, levels, combine="add").seconds == 2.0


def test_a_border_counts_both_ways():
    profile = equal(2, output_nbytes=30)
    assert plan(profile, [Level(2, bandwidth=10.0)], replicas={1}).seconds == 6.0


def test_memory_forces_a_cut():
    """Each of two blocks weighs 8 bytes and keeps 4. Both on one worker are 24; the first of two keeps 2 batches."""
    profile = equal(2, activation_nbytes=4, output_nbytes=100)
    levels = [Level(2, bandwidth=1e3)]
    assert plan(profile, levels, memory_nbytes=24).stages == (PlannedStage(0, 2, 2),)
    unequal = Profile((BlockProfile(1.0, 9, 4), BlockProfile(1.0, 9, 14)))
    assert plan(unequal, levels, memory_nbytes=14).stages == (PlannedStage(0, 1), PlannedStage(1, 2))
    with raising(StrategyError, "these 2"):
        plan(unequal, levels, memory_nbytes=13)


def test_ties_take_the_fewest_stages_then_the_earliest_cuts():
    assert plan(equal(3), [Level(2)], replicas={1}).cuts == (1,)
    assert len(plan(equal(4), [Level(4)]).stages) == 1
    assert plan(equal(3), [Level(3)], replicas={1, 2}).stages == (PlannedStage(0, 1, 1), PlannedStage(1, 3, 2))


def test_equal_ranges_have_equal_times_wherever_they_are():
    """Differences of running sums would be 0.6000000000000001 here and 0.6 there."""
    blocks = tuple(BlockProfile(seconds, parameter_nbytes=1) for seconds in (0.1, 0.2, 0.3) * 3)
    assert plan(Profile(blocks), [Level(3)], replicas={1}).cuts == (3, 6)
    assert plan(Profile(blocks[::-1]), [Level(3)], replicas={1}).cuts == (3, 6)


# ---- PipeDream's models on 16 workers

A, B = Level(16, 10e9 / 8), Level(16, 25e9 / 8)
"""PipeDream's clusters: 4 hosts of 4 V100 and 10 Gbit/s, 2 hosts of 8 and 25 Gbit/s."""

SECONDS = {"vgg16:batch=64": (234e-3 + 439e-3) / 2, "alexnet:batch=256": 45e-3 + 41e-3}
"""A mini-batch on one GPU, by the sums of PipeDream's profiles; that of VGG-16 has 128 samples."""


@cache
def published(name):
    job = load_job(name)
    blocks = blocks_of(job, job.model())
    dense = next(number for number, block in enumerate(blocks) if isinstance(block, nn.Linear))
    return counted(job, blocks, job.batch_size).lasting(SECONDS[name]), dense


@pytest.mark.parametrize("combine", ["max", "add"])
@pytest.mark.parametrize(("name", "cluster"), [("vgg16:batch=64", A), ("vgg16:batch=64", B), ("alexnet:batch=256", A)])
def test_fifteen_workers_replicate_the_convolutions_and_one_has_the_dense_layers(name, cluster, combine):
    """PipeDream's plans for 16 GPUs (`hybrid_conf.json` of its repository, models/vgg16 and models/alexnet)."""
    profile, dense = published(name)
    found = plan(profile, [cluster], combine=combine)
    assert [stage.replicas for stage in found.stages] == [15, 1]
    assert found.cuts[0] <= dense
    rest = profile.blocks[found.cuts[0] : dense]
    assert sum(block.seconds for block in rest) < 0.15 * SECONDS[name]  # few convolutions beside the dense layers
    alike = plan(profile, [cluster], combine=combine, replicas={16})
    assert alike.seconds > 1.9 * found.seconds


def test_the_dense_layers_of_alexnet_have_two_workers_behind_the_faster_network():
    """Its border before them takes 6 ms at 25 Gbit/s, and they compute for longer; at 10 Gbit/s it takes 15 ms."""
    profile, _ = published("alexnet:batch=256")
    assert [stage.replicas for stage in plan(profile, [B]).stages] == [14, 1, 1]


# ---- levels


@settings(max_examples=30, deadline=None)
@given(PROFILES, st.integers(1, 4), BANDWIDTHS)
def test_a_level_of_one_changes_nothing(profile, workers, bandwidth):
    if profile.trains(0, len(profile.blocks)):
        flat = plan(profile, [Level(workers, bandwidth)])
        assert plan(profile, [Level(1, bandwidth), Level(workers, bandwidth)]) == flat
        assert plan(profile, [Level(workers, bandwidth), Level(1, bandwidth)]) == flat


def test_units_of_the_inner_level_are_replicated_whole():
    """Two hosts of two workers: inside a host the link is fast, so the host splits the model; hosts replicate it."""
    profile = Profile((BlockProfile(1.0, 1, 10), BlockProfile(1.0, 1, 10)))
    found = plan(profile, [Level(2, bandwidth=1e9), Level(2, bandwidth=100.0)], replicas={1, 2})
    assert found.seconds == 0.5
    assert sum(stage.replicas * (stage.stop - stage.start) for stage in found.stages) in (4, 8)
    split = plan(profile, [Level(2, bandwidth=10.0), Level(2, bandwidth=math.inf)])
    assert split.stages == (PlannedStage(0, 1, 2), PlannedStage(1, 2, 2))
    assert split.seconds == 0.5


@settings(max_examples=25, deadline=None)
@given(PROFILES.filter(lambda profile: len(profile.blocks) <= 6), st.integers(1, 2), st.integers(1, 3), BANDWIDTHS)
def test_no_plan_of_two_levels_is_faster(profile, inside, hosts, bandwidth):
    def on_a_host(start, stop):
        blocks = Profile(profile.blocks[start:stop])
        return min((seconds for seconds, _ in every_plan(blocks, inside, 20.0, "max", math.inf)), default=math.inf)

    every = [seconds for seconds, _ in every_plan(profile, hosts, bandwidth, "max", math.inf, on_a_host)]
    if min(every, default=math.inf) < math.inf:
        found = plan(profile, [Level(inside, 20.0), Level(hosts, bandwidth)])
        assert found.seconds == min(every)
        assert sum(stage.replicas for stage in found.stages) == inside * hosts
        bounds = [0, *(stage.stop for stage in found.stages)]
        assert [stage.start for stage in found.stages] == bounds[:-1]
        assert bounds[-1] == len(profile.blocks)


def test_a_slow_network_between_hosts_puts_the_border_where_little_crosses():
    blocks = [BlockProfile(1.0, output_nbytes=nbytes, parameter_nbytes=50) for nbytes in (100, 1, 100, 100)]
    found = plan(Profile(tuple(blocks)), [Level(2, bandwidth=1e9), Level(2, bandwidth=10.0)])
    assert found.stages == (PlannedStage(0, 2, 2), PlannedStage(2, 4, 2))
    assert found.seconds == 1.0


def test_a_limit_of_memory_needs_one_level():
    with raising(StrategyError, "level"):
        plan(equal(4), [Level(2), Level(2)], memory_nbytes=100)

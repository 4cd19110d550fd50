"""The end of a step whose buckets leave during backward; `tests/oracles/test_accelerators.py` simulates it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dure.core.step_shape import GradientTensor, StepShape
from dure.runtime.virtual.accelerators import LIBRARIES, AcceleratorEngine, slowest_of
from dure.runtime.virtual.buckets import Computed, end_of_step

BYTES_PER_SECOND, START = 1e9, 1e-3


def all_reduce(nbytes: float) -> float:
    return START + nbytes / BYTES_PER_SECOND


def tensors(sizes, seconds_of_blocks):
    whole = sum(seconds_of_blocks)
    done = itertools.accumulate(each / whole for each in seconds_of_blocks)
    return tuple(GradientTensor(n, size, share) for n, (size, share) in enumerate(zip(sizes, done, strict=True)))


def even(parts, numel):
    return StepShape(2 / 3, 0.0, tensors([numel // parts] * parts, [1.0] * parts))


def bare(**values):
    return AcceleratorEngine(spread=0, contention=0, start=0, **values)


def test_communication_that_is_shorter_than_backward_leaves_the_last_bucket_alone():
    # four buckets of 25 MB at 1 GB/s take 25 ms each, backward completes one in 50 ms
    shape = even(4, 25_000_000)
    engine = bare(library="ddp", bucket=1)
    found = end_of_step(shape, [Computed(0.0, 0.3)], 8, engine, 4, lambda nbytes: nbytes / 1e9)
    assert found == pytest.approx(0.3 + 4 * LIBRARIES["ddp"].tensor + 0.025)


def test_without_overlap_all_bytes_follow_backward():
    shape = even(4, 25_000_000)
    for engine in (bare(library="ddp", overlap=False), bare(library="at-end")):
        found = end_of_step(shape, [Computed(0.0, 0.3)], 8, engine, 4, lambda nbytes: nbytes / 1e9)
        assert found == pytest.approx(0.3 + 4 * engine.rules.tensor + 0.1)


def test_the_slowest_of_the_ranks_decides_and_the_others_start_does_not():
    shape = even(1, 1000)
    engine = bare(library="at-end")
    computed = [Computed(0.0, 0.3), Computed(0.2, 0.2)]
    assert end_of_step(shape, computed, 2, engine, 4, lambda nbytes: 0.0) == pytest.approx(0.4)


def test_the_expected_slowest_of_many_ranks_is_that_of_drawn_values():
    rng = np.random.default_rng(0)
    for ranks in (2, 16, 512):
        assert slowest_of(ranks) == pytest.approx(rng.standard_normal((4000, ranks)).max(axis=1).mean(), abs=0.03)


def test_the_optimizer_follows_the_last_bucket():
    shape = StepShape(0.6, 0.1, tensors([1000], [1.0]))
    found = end_of_step(shape, [Computed(0.0, 1.0)], 1, bare(library="at-end"), 4, lambda nbytes: 0.5)
    assert found == pytest.approx(0.9 + 0.5 + 0.1)


def test_cycles_send_together_what_became_ready_while_the_network_was_busy():
    # 0.1 s of backward with ten tensors; the first bucket keeps the network busy until all others are ready
    shape = StepShape(1.0, 0.0, tensors([1000] * 10, [1.0] * 10))
    engine, sent = bare(library="horovod"), []

    def seconds(nbytes):
        sent.append(nbytes)
        return 0.2 if len(sent) == 1 else 0.01

    found = end_of_step(shape, [Computed(0.0, 0.1)], 4, engine, 4, seconds)
    negotiation, cycle = 4 * engine.rules.negotiation, engine.rules.cycle
    assert sent == [4000, 9 * 4000]
    # the first tensor is ready at 10 ms, a cycle; the second round is the first cycle after the network is free
    free = 0.010 + negotiation + 0.2
    second = -(-free // cycle) * cycle
    assert found == pytest.approx(second + negotiation + 0.01)


def test_a_cycle_sends_no_more_than_its_buffer():
    shape = StepShape(1.0, 0.0, tensors([1000] * 4, [1.0, 0.0, 0.0, 0.0]))
    sent = []

    def seconds(nbytes):
        sent.append(nbytes)
        return 0.001

    end_of_step(shape, [Computed(0.0, 0.1)], 4, bare(library="horovod", bucket=8000), 4, seconds)
    assert sent == [8000, 8000]

"""Laws of splits and samplers."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import raising

from dure.errors import CheckpointError, UsageError
from dure.job.data.split import IID, Dirichlet, Replicated, Sampler, Striped, parse_split

SPLITS = {"iid": IID(), "whole": Replicated(), "striped": Striped(), "dirichlet:alpha=0.1": Dirichlet(0.1)}
DISJOINT = ("iid", "dirichlet:alpha=0.1")


def labels(samples: int, classes: int = 5) -> torch.Tensor:
    return torch.arange(samples) * 7 % classes


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)
laws = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("text", SPLITS)
def test_text_names_the_split_and_is_its_name(text: str) -> None:
    assert parse_split(text) == SPLITS[text]
    assert str(parse_split(text)) == text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", SPLITS)
@laws
@given(samples=st.integers(6, 60), batch_sizes=sizes, seed=st.integers(0, 2**40))
def test_same_arguments_same_batches(text: str, samples: int, batch_sizes: list[int], seed: int) -> None:
    runs = [SPLITS[text].samplers(labels(samples), batch_sizes, seed=seed) for _ in range(2)]
    for one, other, size in zip(*runs, batch_sizes, strict=True):
        for _ in range(5):
            batch = one.next()
            assert batch.dtype == torch.int64
            assert batch.shape == (size,)
            assert torch.equal(batch, other.next())


@pytest.mark.parametrize("text", DISJOINT)
@laws
@given(samples=st.integers(6, 60), workers=st.integers(1, 6), seed=st.integers(0, 99))
def test_parts_are_disjoint_and_complete(text: str, samples: int, workers: int, seed: int) -> None:
    samplers = SPLITS[text].samplers(labels(samples), [1] * workers, seed=seed)
    assert all(len(sampler.indices) for sampler in samplers)
    together = np.concatenate([sampler.indices for sampler in samplers])
    assert sorted(together.tolist()) == list(range(samples))


@pytest.mark.parametrize("text", [*DISJOINT, "whole"])
@laws
@given(samples=st.integers(6, 60), batch_sizes=sizes, seed=st.integers(0, 99))
def test_each_epoch_has_each_own_index_once(text: str, samples: int, batch_sizes: list[int], seed: int) -> None:
    for sampler in SPLITS[text].samplers(labels(samples), batch_sizes, seed=seed):
        own = sorted(sampler.indices.tolist())
        stream = torch.cat([sampler.next() for _ in range(-(-3 * len(own) // sampler.batch_size))]).tolist()
        for epoch in range(3):
            assert sorted(stream[epoch * len(own) : (epoch + 1) * len(own)]) == own


@laws
@given(samples=st.integers(3, 60), batch_sizes=sizes, seed=st.integers(0, 99))
def test_striped_workers_together_see_what_one_sees(samples: int, batch_sizes: list[int], seed: int) -> None:
    many = Striped().samplers(labels(samples), batch_sizes, seed=seed)
    (one,) = Striped().samplers(labels(samples), [sum(batch_sizes)], seed=seed)
    for _ in range(6):
        assert torch.equal(torch.cat([sampler.next() for sampler in many]), one.next())


@pytest.mark.parametrize("text", SPLITS)
@laws
@given(before=st.integers(0, 12), batch_sizes=sizes)
def test_restored_sampler_goes_on_exactly(text: str, before: int, batch_sizes: list[int]) -> None:
    original, fresh, moved = (SPLITS[text].samplers(labels(31), batch_sizes, seed=5)[-1] for _ in range(3))
    for _ in range(before):
        original.next()
    fresh.restore(json.loads(json.dumps(original.state())))
    assert original.number == before
    moved.number = before
    for _ in range(8):
        following = original.next()
        assert torch.equal(following, fresh.next())
        assert torch.equal(following, moved.next())
    assert fresh.state() == original.state()


def test_orders_differ_between_epochs_workers_and_seeds() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        samplers = Replicated().samplers(labels(40), [40, 40], seed=seed)
        return [tuple(sampler.next().tolist()) for sampler in samplers for _ in range(2)]

    assert len({*orders(0), *orders(1)}) == 8


def test_a_batch_is_a_copy() -> None:
    sampler = Sampler(np.arange(8), 4, seed=0, stream=1)
    sampler.next().fill_(99)
    sampler.restore({**sampler.state(), "position": 0})
    assert sampler.next().max() < 8


def test_iid_parts_differ_by_at_most_one() -> None:
    parts = [len(sampler.indices) for sampler in IID().samplers(labels(23), [4, 1, 9], seed=0)]
    assert sorted(parts) == [7, 8, 8]


def test_small_alpha_gives_uneven_labels_and_large_alpha_even_ones() -> None:
    def largest_share(alpha: float) -> float:
        targets = labels(5000)
        samplers = Dirichlet(alpha).samplers(targets, [1] * 8, seed=3)
        shares = [torch.bincount(targets[sampler.indices]).max().item() / len(sampler.indices) for sampler in samplers]
        return float(np.mean(shares))

    assert largest_share(1000.0) < 0.25
    assert largest_share(0.05) > 0.6


def test_epoch_counts_passes() -> None:
    sampler = Sampler(np.arange(8), 4, seed=0, stream=1)
    for _ in range(3):
        sampler.next()
    assert sampler.epoch == 1.5


def test_state_of_another_sampler_is_refused() -> None:
    saved = IID().samplers(labels(20), [2, 2], seed=0)[0].state()
    for other in (IID().samplers(labels(20), [2, 2], seed=1)[0], IID().samplers(labels(20), [2, 2], seed=0)[1]):
        with raising(CheckpointError, "saved"):
            other.restore(saved)
    with raising(CheckpointError, "samples=20"):
        IID().samplers(labels(20), [2], seed=0)[0].restore(saved)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dirichelt", "dirichlet"),
        ("nonsense-of-all-kinds", "dirichlet"),
        ("dirichlet", "dirichlet"),
        ("dirichlet:alpa=1", "alpha"),
        ("dirichlet:alpha=x", "number"),
        ("dirichlet:alpha=0", "above 0"),
        ("dirichlet:alpha=nan", "above 0"),
        ("iid:alpha=1", "none"),
    ],
)
def test_wrong_text_is_refused_with_the_right_one(text: str, said: str) -> None:
    with raising(UsageError, said):
        parse_split(text)


def test_impossible_splits_are_refused() -> None:
    with raising(UsageError, "to 4"):
        IID().samplers(labels(3), [1] * 4, seed=0)
    with raising(UsageError, "0"):
        Replicated().samplers(labels(3), [], seed=0)
    with raising(UsageError, "least 1"):
        Striped().samplers(labels(3), [2, 0], seed=0)
    with raising(UsageError, "float32"):
        Dirichlet(1.0).samplers(torch.rand(9), [1, 1], seed=0)
    with raising(UsageError, "seed"):
        IID().samplers(labels(3), [1], seed=-1)

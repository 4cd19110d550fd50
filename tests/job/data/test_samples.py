"""Map-style data sets: what is read, collated and drawn."""

import random

import numpy as np
import pytest
import torch
from support.input_jobs import Reviews, padded
from support.wording import raising
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dure.errors import UsageError
from dure.job.data.samples import Samples
from dure.job.data.split import Dirichlet, Replicated

PAIRS = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


@pytest.mark.parametrize("dataset", [PAIRS, Subset(PAIRS, range(6)), [PAIRS[index] for index in range(6)]])
def test_a_batch_is_that_of_a_data_loader(dataset):
    inputs, targets = Samples(dataset).batch(torch.tensor([5, 0, 5]))
    (expected,) = DataLoader(Subset(PAIRS, [5, 0, 5]), batch_size=3)
    assert torch.equal(inputs, expected[0])
    assert torch.equal(targets, expected[1])
    assert (len(Samples(dataset)), Samples(dataset).steps(1.0, 4)) == (6, 2)


def test_a_collate_pads_and_labels_are_read_for_a_split():
    data = Samples(Reviews(), padded)
    inputs, targets = data.batch(torch.arange(5))
    assert {key: value.shape for key, value in inputs.items()} == {"ids": (5, 7), "mask": (5, 7)}
    assert targets.tolist() == Reviews().targets[:5]
    by_label = data.samplers(Dirichlet(0.1), [4, 4], seed=0)
    again = Dirichlet(0.1).samplers(torch.tensor(Reviews().targets), [4, 4], seed=0)
    assert [each.next().tolist() for each in by_label] == [each.next().tolist() for each in again]


class Noisy(Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())]), index


def test_transforms_draw_by_the_numbers_of_the_batch_and_leave_the_generators_as_they_were():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data, indices = Samples(Noisy()), torch.tensor([1, 1])
    one, again, other = (data.batch(indices, draw)[0] for draw in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    assert torch.equal(one, again)
    assert (one != other).all()
    assert (one[0] != one[1]).all()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_floating_point_values_are_cast():
    inputs, targets = Samples(PAIRS).to(torch.float64).batch(torch.tensor([0]))
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Unmeasured:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (
            Endless(),
            "__len__",
        ),
        (Unmeasured(), "__len__"),
        (DataLoader(PAIRS), "dure.Samples("),
        ([], "sample"),
    ],
)
def test_what_is_no_map_style_data_set_is_refused(dataset, said):
    with raising(UsageError, said):
        Samples(dataset)


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda samples: {"ids": torch.zeros(2), "labels": torch.zeros(2)}, "mapping"),
        (lambda samples: torch.zeros(2), "targets"),
        (lambda samples: (1, 2, 3), "gave 3"),
        (lambda samples: (["words"], torch.zeros(2)), "0"),
        (lambda samples: (torch.zeros(7, 2), torch.zeros(2)), "for 2"),
        (lambda samples: (torch.zeros(2), torch.tensor(0.0)), "for 2"),
    ],
)
def test_a_collate_that_makes_no_batch_is_refused(collate, said):
    with raising(UsageError, said):
        Samples(PAIRS, collate).batch(torch.tensor([0, 1]))
    with raising(UsageError, "function"):
        Samples(PAIRS, collate="pad")


def test_every_tensor_of_the_inputs_has_one_row_per_sample():
    def collate(samples):
        return {"ids": torch.zeros(len(samples), 2), "mask": torch.zeros(len(samples) + 1, 2)}, torch.zeros(
            len(samples)
        )

    with raising(UsageError, "for 3"):
        Samples(PAIRS, collate).batch(torch.arange(3))


def test_samples_of_different_lengths_need_a_collate():
    words = [(torch.zeros(length), 0) for length in (2, 3)]
    with raising(UsageError, "default_collate"):
        Samples(words).batch(torch.arange(2))


@pytest.mark.parametrize("targets", [["cat", "dog"] * 3, [{"boxes": 1}] * 6, None, [1, 2]])
def test_targets_that_are_no_labels_are_left_alone(targets):
    class Named(TensorDataset):
        pass

    data = Named(*PAIRS.tensors)
    data.targets = targets
    sampler = Samples(data).samplers(Replicated(), [2], seed=0)[0]
    assert set(sampler.next().tolist()) <= set(range(6))

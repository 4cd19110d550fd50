"""The share of a data set that this rank sees, for a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Sampler as TorchSampler

from dure.core.ranges import equal_ranges
from dure.errors import UsageError
from dure.job.data.split import Dirichlet, Sampler, parse_split


class EpochSampler(TorchSampler[int]):
    """Indices of one rank's samples: each pass over it is the next epoch, in a fresh order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler.next().tolist())

    def __len__(self) -> int:
        return self._sampler.batch_size


def share_of(
    dataset: Sized, rank: int, world_size: int, *, split: str = "iid", seed: int = 0, targets: Any = None
) -> EpochSampler:
    """The sampler of `rank` over `dataset`, split as `dure.job.data.split` says.

    `targets` are those of the whole set, needed where labels decide ("dirichlet"); those of `dataset` if left out.

    Raises `UsageError` for a data set without indices or with fewer samples than ranks, and for other `targets`.
    """
    _check_indexed(dataset, rank, world_size)
    if not len(dataset):
        raise UsageError("the data set is empty: len(dataset) is 0. Give one that has a sample for each rank.")
    chosen = parse_split(split)
    labels = torch.zeros(len(dataset), device="cpu")
    if isinstance(chosen, Dirichlet):
        labels = _labels(dataset, targets, labels)
    sizes = [max(stop - start, 1) for start, stop in equal_ranges(len(dataset), world_size)]
    sampler = chosen.samplers(labels, sizes, seed=seed)[rank]
    if sampler.stride == sampler.batch_size:  # a stream of its own: one batch is one pass over it
        sampler.batch_size = sampler.stride = len(sampler.indices)
    return EpochSampler(sampler)


def _labels(dataset: Sized, targets: Any, default: torch.Tensor) -> torch.Tensor:
    """The label of each sample: `targets`, or those of `dataset`."""
    found = getattr(dataset, "targets", None) if targets is None else targets
    if found is None:
        return default
    if len(found) != len(dataset):
        raise UsageError(
            f"targets are one label for each sample: {len(found)} were found for {len(dataset)} samples. Write "
            "replica.sampler(dataset, targets=labels)."
        )
    return torch.as_tensor(found, device="cpu")


def _check_indexed(dataset: object, rank: int, world_size: int) -> None:
    """Raises `UsageError` for what is no data set of samples with the indices 0 to len(dataset) - 1."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a sampler gives indices of samples, and a DataLoader gives batches. Write sampler = "
            "replica.sampler(loader.dataset), and DataLoader(loader.dataset, sampler=sampler, ...) with it."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a sampler gives indices, and {kind} has none: it needs __len__ and __getitem__. Let a data set that is "
            f"read in order leave out the samples of the other ranks, and give it to DataLoader without a sampler: in "
            f"its __iter__, islice(samples, {rank}, None, {world_size}), which is islice(samples, replica.rank, None, "
            "replica.world_size)."
        )

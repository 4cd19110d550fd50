"""The share of a data set that this rank sees, for a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler as TorchSampler

from dure.core.ranges import equal_ranges
from dure.job.data.split import Sampler, parse_split


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
    """
    found = getattr(dataset, "targets", None) if targets is None else targets
    labels = torch.zeros(len(dataset), device="cpu") if found is None else torch.as_tensor(found, device="cpu")
    sizes = [max(stop - start, 1) for start, stop in equal_ranges(len(dataset), world_size)]
    sampler = parse_split(split).samplers(labels, sizes, seed=seed)[rank]
    if sampler.stride == sampler.batch_size:  # a stream of its own: one batch is one pass over it
        sampler.batch_size = sampler.stride = len(sampler.indices)
    return EpochSampler(sampler)

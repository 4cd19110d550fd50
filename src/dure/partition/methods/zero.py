"""ZeRO: data parallelism whose workers each hold a part of what they would all hold alike.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, sections 5
(memory) and 7 (bytes). N ranks compute gradients of the whole model, each of its own samples, and rank r owns an equal
part of each unit of it.

    stage 1   backward; g_r <- reduce-scatter of the gradient, slice by slice while backward goes on
              w_r <- Opt(w_r, g_r); w <- all-gather of w_r
    stage 2   the same, and the gradient of a slice is freed once it is scattered
    stage 3   block by block: gather w, forward, free w;  in reverse: gather w, backward, scatter g, free both
              w_r <- Opt(w_r, g_r)

| in the paper              | here                                                                 |
|---------------------------|----------------------------------------------------------------------|
| P_os, P_os+g, P_os+g+p    | `stage` 1, 2, 3                                                      |
| N_d                       | the ranks of a shard group: all, or `within` of them                 |
| bytes 2 Psi, 2 Psi, 3 Psi | (N - 1) / N P times 2, 2, 3 - b / P: the last block b stays gathered |

The result is that of bsp: each element of the mean gradient is summed in rank order. `within` shards in groups of
ranks, and all-reduces each part across them: HSDP (Zhang et al., "MiCS", PVLDB 16 (1), 2022; Zhao et al., "PyTorch
FSDP", PVLDB 16 (12), 2023). Of R groups of W ranks, each rank then sends (W - 1) / W P times 2, 2, 3 - b / P, and
2 (R - 1) / R P / W across. In stages 1 and 2 that is as much as without groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

from dure.core.catalogue import parameter
from dure.core.shards import SLICES_AT_ONCE, UNITS_AT_ONCE, ShardedMemory, Shards
from dure.core.vectors import size
from dure.errors import UsageError


@dataclass(frozen=True, slots=True)
class Zero:
    """Sharded data parallelism: each worker keeps a part of optimizer state, gradient (2) and parameters (3)."""

    paper: ClassVar[str] = (
        "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020"
    )

    stage: Literal[1, 2, 3] = parameter(
        1, "1: the optimizer's state is sharded; 2: the gradient too; 3: the parameters too"
    )
    within: int | Literal["host"] | None = parameter(
        None,
        "ranks in a row that share one copy of what is sharded; host: those of one host; none: all",
        range=">= 2",
        unit="workers",
    )

    def __post_init__(self) -> None:
        if isinstance(self.within, int) and self.within < 2:
            raise ValueError(
                f"within={self.within} shards nothing: write the ranks of a shard group, such as within=2, or "
                "within=host"
            )

    def keeps(self, shards: Shards) -> ShardedMemory:
        """The most that a worker keeps at once of what `shards` divide.

        | stage | weights      | gradient     | each vector | messages |
        |-------|--------------|--------------|-------------|----------|
        | 1     | P            | P + P/N      | P/N         | 2 u      |
        | 2     | P            | P/N + 3 u    | P/N         | 2 u      |
        | 3     | P/N + r + 2u | P/N + r + 3u | P/N         | u        |

        P is all, u the largest unit; of several, the largest ones. A unit is a slice of the gradient, in stage 3 a
        block of the model. Its first one, r, is what several blocks have: it is whole during a step. The parameters of
        a block are gathered during the one before. Of the gradients, one is computed, and others are scattered; stage 3
        copies the one that is computed. Messages are the parts that come from the other ranks.
        """
        root, numels = 0, [size(unit) for unit in shards.units]
        whole, own = sum(numels), shards.numels[0]
        if shards.ranks == 1:
            return ShardedMemory(whole, whole, whole, 0)
        if self.stage == 3:
            root, *numels = numels
        numels.sort()
        at_once = UNITS_AT_ONCE if self.stage == 3 else SLICES_AT_ONCE
        copied = self.stage == 3
        messages, gradients = sum(numels[-at_once:]), root + sum(numels[-at_once - 1 - copied :])
        weights = own + root + sum(numels[-2:]) if self.stage == 3 else whole
        return ShardedMemory(weights, own + (whole if self.stage == 1 else gradients), own, messages)


def shard_group_size(zero: Zero, machines: Sequence[int]) -> int:
    """The ranks that share one copy of what `zero` shards, of workers on these `machines`.

    Raises `UsageError` where they make no groups of one size.
    """
    workers, within = len(machines), zero.within
    if within is None:
        return workers
    if within == "host":
        sizes = [len(list(ranks)) for _, ranks in groupby(machines)]
        if len(set(sizes)) > 1:
            raise UsageError(
                f"within=host makes shard groups of the workers of each host, and the hosts have "
                f"{', '.join(map(str, sizes))}. Use hosts with the same number of workers, or within=W."
            )
        if sizes[0] == 1 < workers:
            raise UsageError(
                f"within=host makes shard groups of the workers of each host, and each of the {workers} hosts has one "
                "that holds this part of the model: nothing would be sharded. Leave within out, or put several workers "
                "on each host."
            )
        return sizes[0]
    if workers % within:
        raise UsageError(
            f"within={within} makes shard groups of {within} workers, and {workers} hold the same part of the model. "
            f"Use a multiple of {within} workers, or a divisor of {workers} for within."
        )
    return within

"""Tensor parallelism: each layer's weights divided among workers, with collectives within forward and backward.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, s. 3.

    f: forward the tensor,   backward an all-reduce        before layers that are split by outputs
    g: forward an all-reduce, backward the gradient         behind layers that are split by inputs

    Y = g(act(f(X) A^T + a) B^T) + b                        A: rows at each worker; B: columns at each worker

A transformer layer has two such pairs, so that it makes two all-reduces forward and two backward, each of as many
elements as its output. All workers read the same mini-batch, and the result equals that of one worker to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.partition.shared_layers import SharedLayers
from dure.partition.tensor.plans import columns, megatron, rows
from dure.partition.tensor.sequence import by_positions

if TYPE_CHECKING:
    from torch import nn

    from dure.job.job import Job
    from dure.partition.tensor.plan import SplitPlan


@dataclass(frozen=True)
class TensorParallel(SharedLayers):
    """Tensor parallelism: pairs of layers split by outputs and by inputs."""

    paper: ClassVar[str] = "Shoeybi et al., Megatron-LM, 2019, section 3"

    layers: Literal["pairs", "rows", "columns"] = parameter(
        "pairs",
        "split of the layers: Megatron-LM's pairs; or each linear layer alone, by inputs (rows) or outputs (columns)",
    )

    sequence: bool = parameter(
        False, "between pairs each worker computes some positions of the sequence only (sequence parallelism)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence and self.layers != "pairs":
            raise ValueError(f"sequence=true is for layers=pairs, got layers={self.layers}: leave one of them out")

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        if self.layers == "rows":
            return rows(module, self.ways)
        if self.layers == "columns":
            return columns(module, self.ways)
        plan = megatron(module, self.ways, job.loss)
        return by_positions(plan, module) if self.sequence else plan

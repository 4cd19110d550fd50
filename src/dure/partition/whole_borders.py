"""The borders between blocks at which workers that share layers have whole tensors, so that a model may be cut there.

Behind a layer that is split by outputs each worker has a part of the tensors, until a layer that is split by inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.core.user_code import explain_user_errors
from dure.partition.blocks import block_name, first_samples
from dure.partition.tensor.recording import Recording
from dure.partition.tensor.ways import Ways

if TYPE_CHECKING:
    from torch import nn

    from dure.job.job import Job
    from dure.partition.borders import Call
    from dure.partition.tensor.plan import SplitPlan

Shapes = Sequence[tuple[torch.dtype, torch.Size]]


def whole_borders(
    job: Job, plan: SplitPlan, ways: int, call: Call, blocks_of: Callable[[nn.Module], Sequence[nn.Module]], rows: int
) -> list[int]:
    """The numbers of the blocks before which a worker has the tensors of the whole model, of `rows` samples.

    The worker is the last of `ways`, which has the smallest part of each layer.
    """
    module = job.build(0)
    inputs, _ = first_samples(job, rows, next(module.parameters()).device)
    whole = _shapes(blocks_of(module), call, inputs)
    own = Ways(ways - 1, ways, Recording().carry_out)
    part = _shapes(blocks_of(plan.apply(module, own)), call, inputs, own)
    return [number for number in range(1, len(whole)) if whole[number - 1] == part[number - 1]]


def _shapes(blocks: Sequence[nn.Module], call: Call, value: Any, ways: Ways | None = None) -> list[Shapes]:
    """The types and shapes of the outputs of each block."""
    found: list[Shapes] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if ways is not None:
            ways.begin()
        for number, block in enumerate(blocks):
            with explain_user_errors(f"{block_name(number, block)} raised"):
                value = call(block, value)
            found.append([(each.dtype, each.shape) for each in tree_leaves(value) if isinstance(each, Tensor)])
        if ways is not None:
            ways.end()
    return found

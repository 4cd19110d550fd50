"""Cross-entropy of logits that are split by vocabulary, without gathering them.

Of `positions` of a text and V words, gathering the logits would send positions x V elements. This sends three for each
position: its largest logit, the sum of exponentials, and the logit of its target.

    loss = log(sum_j exp(z_j - m)) + m - z_target          m: the largest logit; sums and maxima over all workers

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dure.core.ranges import equal_ranges
from dure.partition.tensor.ways import Ways

IGNORED = -100
"""The target of positions without a loss, as in `torch.nn.functional.cross_entropy`."""


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        each = ways.all_gather(logits.amax(dim=1), [targets.shape] * ways.size)
        largest = torch.stack(each).amax(dim=0)
        exponentials = (logits - largest[:, None]).exp()
        own = targets - start
        here = (own >= 0) & (own < logits.shape[1])
        place = own.where(here, torch.zeros_like(own))[:, None]
        found = logits.gather(1, place)[:, 0] * here
        total, found = ways.all_reduce(torch.stack([exponentials.sum(dim=1), found]))
        kept = targets != IGNORED
        losses = (total.log() + largest - found) * kept
        count = kept.sum()
        ctx.save_for_backward(exponentials / total[:, None], place, here, kept, count)
        mean: Tensor = losses.sum() / count
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, place, here, kept, count = ctx.saved_tensors
        gradient = softmax.clone()
        gradient.scatter_add_(1, place, -here.to(gradient.dtype)[:, None])
        gradient *= (kept * (gradients[0] / count))[:, None]
        return None, gradient, None, None


def split_cross_entropy(ways: Ways, logits: Tensor, targets: Tensor, words: int) -> Tensor:
    """The mean cross-entropy of `words` classes, of which each worker has the logits of an even range.

    `logits` are (..., own words), `targets` (...) of whole numbers; those that are -100 do not count.
    """
    ways.leave()
    start = equal_ranges(words, ways.size)[ways.rank][0]
    flat, wanted = logits.flatten(0, -2), targets.flatten()
    found: Tensor = _CrossEntropy.apply(ways, flat, wanted, start)  # type: ignore[no-untyped-call]
    return found

"""Cross-entropy of split logits against that of whole ones."""

from __future__ import annotations

import pytest
import torch
from support.ways import on_ways
from torch import Tensor
from torch.nn.functional import cross_entropy

from dure.core.vectors import equal_ranges
from dure.partition.tensor.layers import split_cross_entropy
from dure.partition.tensor.ways import Ways

WORDS = 11


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_and_its_gradient_are_those_of_whole_logits(size: int, scale: float) -> None:
    """Large logits, whose exponentials overflow, and positions that are ignored."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, WORDS, dtype=torch.float64, generator=draw) * scale
    targets = torch.randint(0, WORDS, (2, 5), generator=draw)
    targets[1, 2:4] = -100
    whole = logits.clone().requires_grad_()
    loss = cross_entropy(whole.flatten(0, 1), targets.flatten())
    (3 * loss).backward()

    def at(ways: Ways) -> tuple[float, Tensor, dict[str, int]]:
        start, stop = equal_ranges(WORDS, ways.size)[ways.rank]
        own = logits[..., start:stop].clone().requires_grad_()
        found = split_cross_entropy(ways, own, targets, WORDS)
        (3 * found).backward()
        assert own.grad is not None
        return float(found.detach()), own.grad, dict(ways.counts)

    each = on_ways(size, at)
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in each], dim=2), whole.grad, rtol=0, atol=1e-13)
    for found, _, counts in each:
        assert found == pytest.approx(float(loss.detach()), rel=1e-13)
        assert counts == {"all_gather": 1, "all_reduce": 1}

"""Counter of floating-point operations: PyTorch's, without its tracker of modules, and right for groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count


class FlopCounter(FlopCounterMode):
    """Context that counts the operations of matrix products and convolutions: `get_total_flops()`.

    PyTorch's tracker of modules puts hooks on tensors. With them, a forward cannot call `torch.autograd.grad` or
    `torch.func`, so this counter has no counts by module. Entered again, it counts on.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward})
        self.mod_tracker: Any = _NoTracker()

    def __enter__(self) -> Self:
        before = self.flop_counts.copy()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.flop_counts.update(before)
        return self


def convolution_backward(
    outputs: Sequence[int], inputs: Sequence[int], weights: Sequence[int], *given: Any, **_shapes: object
) -> int:
    """Operations of the backward of a convolution: those of its forward for each wanted gradient of inputs and weights.

    PyTorch's formula takes the gradient of grouped weights for one of all channels, which is `groups` times as much.
    """
    *_, transposed, _padding, _groups, wanted = given
    forward = int(conv_flop_count([*inputs], [*weights], [*outputs], transposed=transposed))
    return forward * [*wanted[:2]].count(True)


class _NoTracker:
    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""

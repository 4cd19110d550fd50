"""Counter of floating-point operations: PyTorch's, without its tracker of modules."""

from __future__ import annotations

from typing import Any, Self

from torch.utils.flop_counter import FlopCounterMode


class FlopCounter(FlopCounterMode):
    """Context that counts the operations of matrix products and convolutions: `get_total_flops()`.

    PyTorch's tracker of modules puts hooks on tensors. With them, a forward cannot call `torch.autograd.grad` or
    `torch.func`, so this counter has no counts by module. Entered again, it counts on.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _NoTracker()

    def __enter__(self) -> Self:
        before = self.flop_counts.copy()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.flop_counts.update(before)
        return self


class _NoTracker:
    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""

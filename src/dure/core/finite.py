"""A check of vectors for NaN and infinity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dure.core.node import Ghost

if TYPE_CHECKING:
    import torch


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element of a flat vector, dense or sparse and coalesced, is NaN or infinity.

    A finite sum of squares proves it in one pass. Only where it is not finite, each element is checked.

    >>> import torch
    >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.full((3,), 1e38))
    (True, False, True)
    """
    if isinstance(values, Ghost):
        return True
    values = values.values() if values.is_sparse else values
    return math.isfinite(values.dot(values).item()) or bool(values.isfinite().all())

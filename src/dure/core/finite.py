"""Whether a vector holds NaN or infinity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element of a flat vector, or of a sparse coalesced one, is NaN or infinity.

    Exact; one cheap pass where the sum of squares is a number, as that of NaN or infinity is not.

    >>> import torch
    >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.full((3,), 1e38))
    (True, False, True)
    """
    values = values.values() if values.is_sparse else values
    return math.isfinite(values.dot(values).item()) or bool(values.isfinite().all())

"""The settings of PyTorch that decide how an accelerator computes, for the record of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dure.run.devices import CPU


def numerics(devices: Sequence[str]) -> dict[str, Any]:
    """The entry of a run's summary on the numerics of its `devices`; none for a run on the CPU alone.

    `matmul` and `convolution` are PyTorch's precision of float32 under CUDA: "tf32", "ieee", or "none" for the default.
    `deterministic` says whether operations without a deterministic form were refused.
    """
    if not set(devices) - {CPU}:
        return {}
    import torch

    backends = torch.backends
    found = {
        "matmul": backends.cuda.matmul.fp32_precision,
        "convolution": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {"numerics": found}

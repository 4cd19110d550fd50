"""The state of each rank inside a checkpoint of a framework: `dure/rank0.pt`, `dure/rank1.pt`, ..."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.user_loop.attached import Attached


def save_rank(checkpoint: str | Path, replica: Attached) -> None:
    """Write the state of this rank into the folder `checkpoint`; every rank calls this."""
    path = _path(checkpoint, replica.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    torch.save(replica.state_dict(), draft)
    draft.replace(path)  # a rank that dies here leaves no half of a file


def load_rank(checkpoint: str | Path, replica: Attached) -> None:
    """Go on from the state of this rank in the folder `checkpoint`; every rank calls this.

    Raises `UsageError` where it was written by another number of ranks, or not at all.
    """
    path = _path(checkpoint, replica.rank)
    if not path.exists():
        others = len(list(path.parent.glob("rank*.pt")))
        raise UsageError(
            f"{path} is missing: the checkpoint has the states of {others} ranks, and {replica.world_size} are started."
            if others
            else f"{path} is missing: the checkpoint was written without dure. Load the model alone, and start anew."
        )
    replica.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _path(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / "dure" / f"rank{rank}.pt"

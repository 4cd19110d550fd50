"""The state of each rank of a checkpoint of a framework.

| a checkpoint is a | states of its ranks                                             |
|-------------------|-----------------------------------------------------------------|
| folder            | inside: `dure/rank0.pt`, `dure/rank1.pt`, ...                   |
| file `X`          | beside it (`beside=True`): `X.dure/rank0.pt`, `X.dure/rank1.pt` |
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.user_loop.attached import Attached


def save_rank(checkpoint: str | Path, replica: Attached, *, beside: bool = False) -> None:
    """Write the state of this rank, which belongs to `checkpoint`; every rank calls this."""
    path = _path(checkpoint, replica.rank, beside=beside)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    torch.save(replica.state_dict(), draft)
    draft.replace(path)  # a rank that dies here leaves no half of a file


def load_rank(checkpoint: str | Path, replica: Attached, *, beside: bool = False) -> None:
    """Go on from the state of this rank that belongs to `checkpoint`; every rank calls this.

    Any number of ranks may go on from a state that all ranks have alike, as that of `bsp`.

    Raises `UsageError` where it was written by another number of ranks, or not at all.
    """
    path = _path(checkpoint, replica.rank, beside=beside)
    if not path.exists():  # more ranks are started than before; or the state of rank 0 says why that is not possible
        path = _path(checkpoint, 0, beside=beside)
    if not path.exists():
        raise UsageError(
            f"{path} is missing: the checkpoint was written without dure, or copied without the folder "
            f"{path.parent.name}. Load the model alone, and start anew."
        )
    replica.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def remove_rank(checkpoint: str | Path, rank: int) -> None:
    """Remove the state of this rank beside a checkpoint that is a file; every rank calls this."""
    path = _path(checkpoint, rank, beside=True)
    path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or those of other ranks are in it
        path.parent.rmdir()


def _path(checkpoint: str | Path, rank: int, *, beside: bool) -> Path:
    folder = Path(f"{checkpoint}.dure") if beside else Path(checkpoint) / "dure"
    return folder / f"rank{rank}.pt"

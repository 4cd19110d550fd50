"""The check that a user's code has not changed a model in place where the method would undo that.

    step()   the method pulls or averages ... the model is loaded        note
    user's code: forward, backward, and perhaps p.data.clamp_(...)
    step()   is the model as it was loaded?                              check

Servers hold the model of most methods, and a pull replaces that of each rank. The version counter of a parameter does
not tell: a write to `parameter.data` does not advance it. So the values themselves are compared, by the sums of their
bits over short runs. That is two passes over the model in each step: 22 ms of one core for 25 million parameters, where
a rank's own part of a step over servers takes 650 ms.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress
from typing import TYPE_CHECKING

import torch

from dure.errors import UsageError
from dure.job.replica import as_bytes

if TYPE_CHECKING:
    from dure.job.replica import Replica

RUN_NBYTES = 512
"""Bytes of a run: 64 whole numbers, enough for PyTorch to add them at the speed of the memory."""

MOST_NAMES = 3
"""Parameters that an error names."""


class ModelCheck:
    """Raises `UsageError` in the calls named `undone_at` if the parameters of `replica` have changed since `note`."""

    def __init__(self, replica: Replica, undone_at: Collection[str]) -> None:
        self._replica = replica
        self._undone_at = undone_at
        self._noted: torch.Tensor | None = None

    def note(self) -> None:
        """The parameters are as the method left them."""
        if self._undone_at:
            self._noted = sums_of_runs(self._replica.params)

    def check(self, call: str) -> None:
        if call not in self._undone_at or self._noted is None:
            return
        now = sums_of_runs(self._replica.params)
        if torch.equal(now, self._noted):
            return
        where = self._where(now != self._noted)
        if call == "close":
            raise UsageError(
                f"{where} changed in place after the last step, and close() loads what the method delivers in its "
                "place. Make this change after the block: after replica.close()."
            )
        raise UsageError(
            f"{where} changed in place after the last step. Servers hold the model, and their next values would undo "
            "that. A loop that clips weights, projects them or loads others while it trains needs a method whose steps "
            'are local: sync="bsp" or "averaging" with topology="collective". To go on from loaded weights over '
            "servers, close the block, load them, make a new optimizer and attach again."
        )

    def _where(self, changed: torch.Tensor) -> str:
        """Text that names the parameters in the runs that changed. A run may hold parts of several parameters."""
        size, layers = self._replica.params.element_size(), self._replica.layers
        runs = [(layer.start * size // RUN_NBYTES, -(-layer.stop * size // RUN_NBYTES)) for layer in layers]
        changes = [bool(changed[start:stop].any()) for start, stop in runs]
        names = [repr(layer.name) for layer in compress(layers, changes)]
        if len(names) == len(layers):
            return "the model's parameters were"
        rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"values among the parameters {', '.join(names[:MOST_NAMES])}{rest} were"


def sums_of_runs(values: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of each run of `RUN_NBYTES` of flat values, as 64-bit integers. The last run may be shorter.

    A changed element changes the sum of its run; only changes that cancel within a run, such as two elements of it that
    change places, are not seen.
    """
    flat = as_bytes(values.detach())
    whole = flat.numel() // RUN_NBYTES * RUN_NBYTES
    rest = flat.new_zeros(RUN_NBYTES)
    rest[: flat.numel() - whole] = flat[whole:]
    runs = flat[:whole].view(torch.int64).view(-1, RUN_NBYTES // 8)
    return torch.cat([runs.sum(1), rest.view(torch.int64).sum().view(1)])

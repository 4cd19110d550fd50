"""Actions of a pipeline's stages: the units of work that a schedule orders."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "S", "U"]


class Action(NamedTuple):
    """One action of a worker: forward or backward of a micro-batch through a chunk of the model, or an update.

    `kind` is "F" (forward), "B" (backward), "I" (the part of backward that computes the gradient of the inputs), "W"
    (the part that computes the gradient of the weights), "S" (a step of a model that predicts gradients) or "U" (update
    by the gradient of a mini-batch, of all chunks of the worker). `batch` is the number of the mini-batch in the run
    and `micro` that of the micro-batch in it, from 0. `chunk` counts the chunks of the worker; a worker with one stage
    has one.

    >>> str(Action("F", 3)), str(Action("B", 0, micro=2, chunk=1))
    ('F3', "B0.2'")
    """

    kind: Kind
    batch: int
    micro: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        part = f".{self.micro}" if self.micro else ""
        return f"{self.kind}{self.batch}{part}{chr(39) * self.chunk}"

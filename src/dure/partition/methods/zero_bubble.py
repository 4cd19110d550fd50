"""Zero bubble: a backward is in two parts, and the gradients of weights are computed where a worker would be idle.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (h1, h2); "Pipeline Parallelism with Controllable Memory",
NeurIPS 2024 (v). At worker k = 1 .. K:

    I(u):  the gradient of the stage's inputs, which the stage before waits for
    W(u):  the gradient of the stage's weights, which no stage waits for; at any time before the update
    W <- Opt(W, sum of |u| / T grad(u))

| `schedule` | order                                                     | idle in worker k    | in flight at a worker |
|------------|-----------------------------------------------------------|---------------------|-----------------------|
| `h1`       | 1F1B, each W held back by k - 1 micro-batches             | (K - 1) (f + i - w) | K                     |
| `h2`       | 2 (K - k) forwards ahead, each W held back by 2 (k - 1)   | (K - k) (f + i - 2w)| 2K - 1                |
| `v`        | two chunks: stages k and 2K + 1 - k; the loss at worker 1 | 0 if f = i = w      | 2K, each of a chunk   |

f, i and w are the times of F, I and W. The idle times hold if w <= f, with K micro-batches or more for `h1`, and with
2K - 1 or more for `h2` and `v`. For these two it is the time between the first action of a worker and its last. W
computes the backward of its stage's outputs again, so a real run gains where stages are long beside that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from dure.core.catalogue import parameter
from dure.partition.orders import Action, looped, v_shaped, zero_bubble, zero_bubble_2, zero_bubble_v
from dure.partition.pipeline import MicroBatched

ORDERS = {"h1": zero_bubble, "h2": zero_bubble_2, "v": zero_bubble_v}


@dataclass(frozen=True)
class ZeroBubble(MicroBatched):
    """Flush pipeline in which the gradients of weights are computed later, in the bubbles."""

    paper: ClassVar[str] = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024"

    schedule: Literal["h1", "h2", "v"] = parameter(
        "h1", "order: with the memory of 1F1B (h1), with twice of it (h2), or two chunks in a V (v)"
    )

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "v" else 1

    def stage_of(self, rank: int, chunk: int) -> int:
        return (v_shaped if self.schedule == "v" else looped)(rank, chunk, self.stages)

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return ORDERS[self.schedule](rank, self.stages, self.micro, batches)

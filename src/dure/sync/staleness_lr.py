"""Staleness-aware rate: a gradient that is d versions old counts 1/d.

Zhang, Gupta, Lian and Liu, "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

    at a shard, for the gradients g_1 .. g_c of a group, computed d_1 .. d_c versions ago:
        w <- w - (1/c) sum over l of  alpha(d_l) g_l            alpha(d) = lr / d  if d > 0,  else lr

| in the paper           | here                                                                         |
|------------------------|------------------------------------------------------------------------------|
| alpha_0                | the job's rate                                                               |
| n-softsync             | `k-batch-async:k=c+staleness-lr`, c = workers / n; c = 1 is `downpour`'s way |
| time stamps            | versions, per shard                                                          |
| which comes first      | the factor weighs the gradient, before the mean and before momentum or Adagrad |

A gradient one version old counts in full, as one that is fresh. On a parabola of curvature a, lr a < 1 is then stable
for every constant delay. A worker that is five times slower pushes gradients about five times as stale, which count
a fifth: its data count less, which biases the model if workers hold different data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dure.sync.corrected import STALE, with_remedy

if TYPE_CHECKING:
    from dure.topology.correction import Update


@dataclass(frozen=True, slots=True)
class StalenessLR:
    """The rate of each gradient, divided by its staleness."""

    paper: ClassVar[str] = (
        "Zhang, Gupta, Lian and Liu, Staleness-Aware Async-SGD for Distributed Deep Learning, IJCAI 2016"
    )
    joins: ClassVar[tuple[str, ...]] = STALE

    compares: ClassVar[bool] = False

    def __radd__(self, method: Any) -> Any:
        return with_remedy(method, self)

    def correct(self, update: Update) -> None:
        if update.staleness > 1:
            update.gradient.div_(update.staleness)

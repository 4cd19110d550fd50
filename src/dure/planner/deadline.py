"""The end of the real seconds that a part of a plan may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """Over once `seconds` have passed on `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def over(self) -> bool:
        """Whether the seconds have passed."""
        return self._clock() > self._end

    @property
    def left(self) -> float | None:
        """The seconds that are left, at least 0; None without an end."""
        return None if math.isinf(self._end) else max(0.0, self._end - self._clock())


NEVER = Deadline(math.inf)

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


NEVER = Deadline(math.inf)

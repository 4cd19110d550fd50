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
        return self.left < 0

    @property
    def left(self) -> float:
        """The seconds that are left; below 0 once it is over."""
        return self._end - self._clock()


NEVER = Deadline(math.inf)

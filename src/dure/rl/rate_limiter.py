"""Reverb's rate limiter: the number of sampled transitions for each inserted one stays near a target.

Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.4.

    error = (inserts - min_size) * samples_per_insert - samples
    insert while  error <= buffer        sample while  inserts >= min_size  and  error >= -buffer
"""

from __future__ import annotations

from dure.errors import UsageError


class RateLimiter:
    """Counts of inserted and sampled transitions, and the next operations that they admit.

    In this library whole messages are inserted and whole batches sampled. An operation is admitted if the error after
    it is within `buffer`, as in Reverb. If a message is larger than `buffer`, it is admitted while the error is not
    above 0, and a batch while the error is not below 0: one of the two operations is always admitted.
    """

    def __init__(self, samples_per_insert: float, min_size: int, buffer: float) -> None:
        if not samples_per_insert > 0:
            raise UsageError(f"samples_per_insert must be above 0, got {samples_per_insert}.")
        if min_size < 1:
            raise UsageError(f"min_size counts transitions and must be at least 1, got {min_size}.")
        if not buffer >= max(1, samples_per_insert):
            least = max(1, samples_per_insert)
            raise UsageError(f"buffer must be at least max(1, samples_per_insert) = {least:g} samples, got {buffer:g}.")
        self.samples_per_insert, self.min_size, self.buffer = samples_per_insert, min_size, buffer
        self.inserts = self.samples = 0

    @property
    def error(self) -> float:
        """Samples that are due (above 0), or were taken too early."""
        return (self.inserts - self.min_size) * self.samples_per_insert - self.samples

    def can_insert(self, count: int) -> bool:
        """Whether a message of `count` transitions may be inserted now."""
        return self.error <= max(0, self.buffer - count * self.samples_per_insert)

    def can_sample(self, count: int) -> bool:
        """Whether a batch of `count` transitions may be sampled now."""
        return self.inserts >= self.min_size and self.error >= min(0, count - self.buffer)

    def batches(self, inserts: int, count: int) -> int:
        """The batches of `count` transitions that are admitted, from the first on, where `inserts` have been inserted.

        >>> [RateLimiter(2.0, min_size=10, buffer=4.0).batches(inserts, 4) for inserts in (9, 10, 11, 12, 13, 14)]
        [0, 1, 1, 2, 2, 3]
        """
        if inserts < self.min_size:
            return 0
        due = (inserts - self.min_size) * self.samples_per_insert - min(0, count - self.buffer)
        return int(due // count) + 1

    def inserted(self, count: int) -> None:
        self.inserts += count

    def sampled(self, count: int) -> None:
        self.samples += count

    def state(self) -> dict[str, int]:
        return {"inserts": self.inserts, "samples": self.samples}

    def restore(self, state: dict[str, int]) -> None:
        self.inserts, self.samples = state["inserts"], state["samples"]

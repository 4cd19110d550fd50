"""Prioritized replay of transitions: draws in proportion to priorities, over a tree of their sums.

Schaul et al., "Prioritized Experience Replay", ICLR 2016; the soft capacity is of Horgan et al., "Distributed
Prioritized Experience Replay", ICLR 2018. The tree is that of appendix B.2.1, with 16 children of each node in place of
2: NumPy then descends a tree of a million leaves in few passes over whole batches of draws.

    insert   p_i = priority, or the maximum so far
    sample   P(i) = p_i^alpha / sum_j p_j^alpha         one draw in each of `count` equal segments of the sum
             w_i = (size * P(i))^-beta / max_j w_j      the maximum over the batch
    update   p_i = |TD error|

| in the paper                     | here                                                          |
| priority = abs(TD error) + eps   | max(abs(TD error), PRIORITY_FLOOR): no transition gets lost    |
| max_j w_j: of the whole memory   | of the batch, as in Ape-X                                     |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dure.core.state import State
from dure.errors import UsageError
from dure.rl.frames import FrameRing
from dure.rl.transitions import FRAMES, STACKED, Layout, Transitions

FAN_OUT = 16

TOP = 4096
"""Nodes of the highest level at most. One prefix sum over it and binary searches are faster than higher levels."""

BELOW = 1 - 2.0**-52
"""A positive number times this is the next smaller one, or the one before it."""

SUM_BEFORE = np.triu(np.ones((FAN_OUT, FAN_OUT + 1)), 1)
"""Row times this: the sums of the row's values before each one, and of all. `cumsum` is slow for many short rows."""


class SumTree:
    """Weights of the slots 0 .. size - 1, all 0 at first, in float64.

    >>> tree = SumTree(4)
    >>> tree.set(np.array([0, 2, 3]), np.array([1.0, 3.0, 4.0]))
    >>> tree.total, tree.find(np.array([0.0, 1.0, 3.9, 4.0, 8.0])).tolist()
    (8.0, [0, 2, 2, 3, 3])
    """

    def __init__(self, size: int) -> None:
        self._levels = [np.zeros(_rounded_up(size))]
        while self._levels[-1].size > TOP:
            self._levels.append(np.zeros(_rounded_up(self._levels[-1].size // FAN_OUT)))
        self._groups = [level.reshape(-1, FAN_OUT) for level in self._levels[:-1]]
        self._top: NDArray[np.float64] | None = None  # sums of the highest level's nodes before each, and of all

    @property
    def total(self) -> float:
        """The sum of all weights, as `find` sees it."""
        return float(self._prefix_sums()[-1])

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weights of `slots`."""
        return self._levels[0].take(slots)

    # A sum is made from its summands anew: differences added to it would leave rounding errors in it for ever.

    def set(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set the weights of `slots`. Of several weights of one slot the last one stays."""
        self._levels[0][slots] = weights
        nodes = slots
        for groups, sums in zip(self._groups, self._levels[1:], strict=True):
            nodes = nodes // FAN_OUT
            sums[nodes] = _row_sums(groups.take(nodes, axis=0))
        self._top = None

    def fill(self, slots: slice, weights: NDArray[np.float64] | float) -> None:
        """Set the weights of a range of slots."""
        self._levels[0][slots] = weights
        first, end = slots.start, slots.stop
        for groups, sums in zip(self._groups, self._levels[1:], strict=True):
            first, end = first // FAN_OUT, -(-end // FAN_OUT)
            sums[first:end] = _row_sums(groups[first:end])
        self._top = None

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each point of [0, total], the first slot at which the sum of the weights so far is above the point.

        A point that is not below the total (by rounding) gets the last slot with a weight. The total must be positive.
        """
        sums = self._prefix_sums()
        points = np.minimum(points, sums[-1] * BELOW)
        nodes = sums.searchsorted(points, side="right") - 1
        points = points - sums[nodes]
        first = np.arange(len(points)) * (FAN_OUT + 1)
        for groups in reversed(self._groups):
            sums = groups.take(nodes, axis=0) @ SUM_BEFORE
            # The sum of a node's children may be rounded below the node's own. A point must stay below it, which also
            # keeps it from a child of weight 0.
            points = np.minimum(points, sums[:, -1] * BELOW)
            child = (sums > points[:, None]).argmax(axis=1) - 1
            points -= sums.take(first + child)
            nodes = nodes * FAN_OUT + child
        return nodes

    def _prefix_sums(self) -> NDArray[np.float64]:
        if self._top is None:
            self._top = np.concatenate([[0.0], self._levels[-1].cumsum()])
        return self._top


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


def _row_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.einsum("ij->i", rows)  # `sum` takes more than twice the time on short rows
    return sums


PRIORITY_FLOOR = 1e-6

FRAMES_PER_TRANSITION = 1.25
"""Memory for frames is reserved at this rate; a message of 50 transitions has about 57 frames."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Transitions drawn from a replay, with their keys and importance weights (float32, at most 1)."""

    keys: NDArray[np.int64]
    values: Transitions
    weights: NDArray[np.float32]
    probabilities: NDArray[np.float64]


class Replay:
    """The newest transitions, up to `capacity` of them, drawn by priority.

    A transition's key is the number of transitions inserted before it. With `storage` above `capacity`, inserts beyond
    the capacity stay until `trim`, at most `storage` of them; without it they evict the oldest at once. `alpha=0`
    draws uniformly and ignores priorities.

    >>> from dure.rl.transitions import Column
    >>> replay = Replay(Layout((Column("reward", "float32"),)), capacity=3, seed=0, alpha=1.0)
    >>> for rewards in ([1, 2, 3], [4]):
    ...     replay.insert({"reward": np.array(rewards, np.float32)}, np.full(len(rewards), 2.0))
    range(0, 3)
    range(3, 4)
    >>> replay.update(np.array([0, 2, 3]), np.array([9.0, 1.0, 1.0]))
    2
    >>> sample = replay.sample(4, beta=1.0)
    >>> sample.keys.tolist(), sample.weights.tolist()
    ([3, 1, 1, 2], [1.0, 0.5, 0.5, 1.0])
    """

    def __init__(
        self, layout: Layout, capacity: int, *, seed: int, alpha: float = 0.6, storage: int | None = None
    ) -> None:
        storage = capacity if storage is None else storage
        if not 1 <= capacity <= storage:
            raise UsageError(f"a replay needs 1 <= capacity <= storage, got {capacity} and {storage} transitions.")
        if not alpha >= 0:
            raise UsageError(f"alpha must be at least 0, got {alpha}.")
        self.layout, self.capacity, self.storage, self.alpha = layout, capacity, storage, alpha
        self.inserted = self.sampled = self.evicted = 0
        self._rng = np.random.default_rng(seed)
        self._rows = np.empty(storage, layout.row)
        self._columns = {name: self._rows[name] for name in self._rows.dtype.names or ()}
        self._tree = SumTree(storage) if alpha else None
        self._maximum = 1.0
        self._frames = FrameRing(layout.frames, int(storage * FRAMES_PER_TRANSITION) + 1) if layout.frames else None

    @property
    def size(self) -> int:
        """Transitions that can be drawn."""
        return self.inserted - self.evicted

    @property
    def nbytes(self) -> int:
        """Bytes of the transitions that can be drawn, and of their frames."""
        frames = len(self._frames) * self._frames.layout.nbytes if self._frames is not None else 0
        return self.size * self._rows.itemsize + frames

    # ---- insert

    def insert(self, values: Transitions, priorities: NDArray[np.floating] | None) -> range:
        """Store transitions; the range of their keys."""
        count = self._checked(values)
        weights = self._weights(self._checked_priorities(priorities, count)) if self.alpha else None
        keys = range(self.inserted, self.inserted + count)
        self._evict(keys.stop - self.storage)
        if self._frames is not None:
            values = self._frames.add(values, keys.stop)
        done = 0
        for slots in self._slots(keys.start, keys.stop):
            part = slice(done, done + slots.stop - slots.start)
            for name, column in self._columns.items():
                column[slots] = values[name][part]
            if self._tree is not None and weights is not None:
                self._tree.fill(slots, weights[part])
            done = part.stop
        self.inserted = keys.stop
        return keys

    def _checked(self, values: Transitions) -> int:
        """The number of transitions. An error names what does not fit the layout."""
        wanted = self._columns.keys() | ({FRAMES} if self._frames is not None else set())
        if values.keys() != wanted:
            raise UsageError(f"the columns {sorted(wanted)} are stored here, got {sorted(values)}.")
        count = len(values[self.layout.columns[0].name])
        if count > self.storage:
            raise UsageError(f"{count} transitions in one insert do not fit a storage of {self.storage}.")
        for name, column in self._columns.items():
            given, shape = values[name], (count, *column.shape[1:])
            if given.shape != shape or not np.can_cast(given.dtype, column.dtype, "same_kind"):
                raise UsageError(f"{name} must be {column.dtype} of shape {shape}, got {given.dtype} of {given.shape}.")
        if self._frames is not None:
            self._frames.check(values)
        return count

    def _slots(self, first: int, end: int) -> list[slice]:
        """The slots of the transitions with keys first .. end - 1: one or two ranges of the ring, in order."""
        start, count = first % self.storage, end - first
        fit = min(count, self.storage - start)
        return [slice(start, start + fit)] + ([slice(0, count - fit)] if count > fit else [])

    # ---- sample

    def sample(self, count: int, beta: float) -> Sample:
        """Draw `count` transitions, with replacement."""
        if not self.size:
            raise UsageError("the replay is empty: insert transitions before a sample.")
        strata = (np.arange(count) + self._rng.random(count)) / count
        if self._tree is None:
            keys = self.evicted + np.minimum((strata * self.size).astype(np.int64), self.size - 1)
            slots = keys % self.storage
            probabilities = np.full(count, 1 / self.size)
            weights = np.ones(count, np.float32)
        else:
            total = self._tree.total
            slots = self._tree.find(strata * total)
            keys = self.evicted + (slots - self.evicted) % self.storage
            likely = self._tree.weights(slots)
            probabilities = likely / total
            weights = ((likely.min() / likely) ** beta).astype(np.float32)  # size and total cancel out
        self.sampled += count
        return Sample(keys, self._values(slots), weights, probabilities)

    def _values(self, slots: NDArray[np.int64]) -> Transitions:
        rows = self._rows.take(slots)
        values = {name: np.ascontiguousarray(rows[name]) for name in self._columns}
        if self._frames is not None:
            # One array for both: the C library gives back the memory of two, and a fresh page costs more than its copy.
            stacks = self._frames.stacks(np.concatenate([values[name] for name in STACKED]))
            values |= zip(STACKED, np.split(stacks, 2), strict=True)
        return values

    # ---- priorities

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.floating]) -> int:
        """Set priorities; the number of keys that were not evicted. Of several priorities of one key the last stays."""
        live = (keys >= self.evicted) & (keys < self.inserted)
        if self._tree is not None:
            given = self._checked_priorities(priorities, len(keys))
            self._tree.set(keys[live] % self.storage, self._weights(given[live]))
        return int(live.sum())

    def _checked_priorities(self, priorities: NDArray[np.floating] | None, count: int) -> NDArray[np.float64]:
        """`count` priorities: those given, or the maximum so far."""
        if priorities is None:
            return np.full(count, self._maximum)
        given = np.asarray(priorities, np.float64)
        least, most = given.min(initial=0), given.max(initial=0)  # NaN if one is
        if given.shape != (count,) or not (least >= 0 and most < np.inf):
            raise UsageError(f"priorities must be {count} finite numbers of at least 0, got {priorities}.")
        return given

    def _weights(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The priorities to the power of alpha, which the tree holds; their maximum counts."""
        self._maximum = max(self._maximum, float(priorities.max(initial=0)))
        return np.maximum(priorities, PRIORITY_FLOOR) ** self.alpha

    # ---- eviction

    def trim(self) -> int:
        """Evict the oldest transitions beyond the capacity; their number."""
        before = self.evicted
        self._evict(self.inserted - self.capacity)
        if self._tree is not None:
            for slots in self._slots(before, self.evicted):
                self._tree.fill(slots, 0.0)
        return self.evicted - before

    def _evict(self, oldest: int) -> None:
        """Evict the transitions before key `oldest`. Their weights stay in the tree: an insert overwrites them."""
        self.evicted = max(self.evicted, oldest)
        if self._frames is not None:
            self._frames.free(self.evicted)

    # ---- state

    def state(self) -> State:
        """All that a restart needs, the generator included."""
        slots = np.arange(self.evicted, self.inserted) % self.storage
        rows = self._rows[slots]
        columns = {name: torch.from_numpy(np.ascontiguousarray(rows[name])) for name in self._columns}
        counts = {"inserted": self.inserted, "sampled": self.sampled, "evicted": self.evicted}
        state = State({}, counts | {"maximum": self._maximum, "rng": self._rng.bit_generator.state})
        state |= State(columns).under("columns")
        if self._tree is not None:
            state |= State({"weights": torch.from_numpy(self._tree.weights(slots))})
        return state if self._frames is None else state | self._frames.state().under("frames")

    def restore(self, state: State) -> None:
        """Continue from `state`, which a replay of the same layout, storage and alpha gave."""
        plain = state.plain
        if plain["inserted"] - plain["evicted"] > self.storage:
            held = plain["inserted"] - plain["evicted"]
            raise UsageError(f"{held} transitions of a checkpoint do not fit a storage of {self.storage}.")
        self.inserted, self.sampled, self.evicted = plain["inserted"], plain["sampled"], plain["evicted"]
        self._maximum = plain["maximum"]
        self._rng.bit_generator.state = plain["rng"]
        slots = np.arange(self.evicted, self.inserted) % self.storage
        for name, column in state.part("columns").tensors.items():
            self._columns[name][slots] = column.cpu().numpy()
        if self._tree is not None:
            self._tree = SumTree(self.storage)
            weights, done = state.tensors["weights"].cpu().numpy(), 0
            for part in self._slots(self.evicted, self.inserted):
                self._tree.fill(part, weights[done : done + part.stop - part.start])
                done += part.stop - part.start
        if self._frames is not None:
            self._frames.restore(state.part("frames"))

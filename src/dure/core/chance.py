"""Seeding of the global generators of PyTorch, NumPy and Python, which user code draws from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(draw: Sequence[int]) -> Iterator[None]:
    """Seed the three global CPU generators with the numbers `draw`; on exit restore their states.

    >>> with seeded([1, 2]):
    ...     first = torch.rand(1), random.random()
    >>> with seeded([1, 2]):
    ...     first == (torch.rand(1), random.random())
    True
    """
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(draw)).encode(), digest_size=4).digest(), "little")
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

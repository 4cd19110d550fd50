"""Environments for runs in which something goes wrong. Job texts name their functions: `FILE@NAME`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

STEP_SECONDS = 0.01
"""Seconds of a step of `slow`: so the processes of a test leave the cores to others."""


class Walk(gymnasium.Env[np.ndarray, int]):
    """Episodes of 20 steps, each with the reward 1. `fail` is called at the seventh step of each episode."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.steps == 7:
            self.fail()
        return np.full(3, self.steps / 20, np.float32), 1.0, self.steps == 20, False, {}

    def fail(self) -> None:
        """Do nothing."""


class Slow(Walk):
    def step(self, action: int) -> Any:
        time.sleep(STEP_SECONDS)
        return super().step(action)


class Raises(Walk):
    def fail(self) -> None:
        raise RuntimeError("the emulator lost its socket")


class Crashes(Walk):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(Walk):
    def fail(self) -> None:
        os._exit(0)


class IsNoNumber(Walk):
    def step(self, action: int) -> Any:
        observation, *rest = super().step(action)
        return observation * np.nan, *rest


walk, slow, raises, crashes, exits, is_no_number = Walk, Slow, Raises, Crashes, Exits, IsNoNumber

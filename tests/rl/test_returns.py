"""Real runs that learn: minutes each, so all are part of the soak. `bench/rl_returns.py` measures three seeds."""

from __future__ import annotations

import pytest

from dure.cli.rl import RlOptions
from dure.run.train import run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
LIKE_APEX = ("double=true", "dueling=true")


@pytest.mark.parametrize(
    ("options", "aim"),
    [
        ({"algorithm": "apex", "env": "CartPole-v1", "actors": 2, "frames": 60_000}, 475),
        ({"algorithm": "apex", "env": "Acrobot-v1", "actors": 2, "frames": 60_000}, -100),
        ({"algorithm": "apex", "env": "Pendulum-v1", "actors": 2, "frames": 40_000}, -200),
        ({"algorithm": "gorila", "env": "CartPole-v1", "n_step": 3, "set": LIKE_APEX, "frames": 60_000}, 475),
    ],
    ids=lambda value: f"{value['algorithm']} {value['env']}" if isinstance(value, dict) else str(value),
)
def test_an_evaluation_of_100_episodes_reaches_the_aim(options, aim):
    finished = run(RlOptions(**options, eval_episodes=100).config())
    assert finished.summary()["experience"]["best_return"] >= aim

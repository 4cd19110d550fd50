"""Requests that no run could carry out are refused before anything starts."""

from __future__ import annotations

import pytest
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.rl import jobs
from dure.rl.settings import MOST, RlSettings


@pytest.mark.parametrize(
    ("outputs", "says"),
    [(5, "1"), (None, "mat2"), ((), "tuple")],
)
def test_a_network_of_other_outputs_is_refused(outputs, says):
    class Empty(nn.Module):
        def forward(self, inputs):
            return ()

    network = {5: nn.Linear(4, 5), None: nn.Linear(9, 2), (): Empty()}[outputs]
    with raising(UsageError, says):
        jobs.apex(env="CartPole-v1", network=lambda: network)


def test_continuous_actions_need_a_policy_and_a_critic():
    with raising(UsageError, "policy"):
        jobs.apex(env="Pendulum-v1", network=lambda: nn.Linear(3, 1))


def test_a_network_of_a_policy_and_a_critic_needs_their_forward():
    class Halves(nn.Module):
        def policy(self, observations): ...

        def critic(self, observations, actions): ...

    with raising(UsageError, "forward"):
        jobs.apex(env="Pendulum-v1", network=Halves)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_layer_without_units_is_refused(env):
    with raising(UsageError, "least"):
        jobs.apex(env=env, hidden=(8, 0))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"send": MOST + 1}, f"Give at most {MOST}"),
        ({"send": 50, "capacity": 20, "min_size": 10}, "Give at most 20"),
        ({"actors": 3, "late": 3, "late_seconds": 1.0}, "Give at most 2"),
        ({"actors": 3, "late": 1}, "give late_seconds"),
        ({"beta": 1.5}, "at most 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, says):
    with pytest.raises(UsageError, match=says):
        RlSettings(**given)


def test_actors_that_stop_before_the_first_batch_are_refused():
    companions = jobs.apex(env="CartPole-v1", actors=2, replays=2, min_size=100, frames=199).companions
    with raising(UsageError, "200"):
        companions.check(1, 64)
    jobs.apex(env="CartPole-v1", actors=2, replays=2, min_size=100, frames=200).companions.check(1, 64)


def test_dqn_of_images_makes_an_update_after_every_fourth_step():
    """Mnih et al. (2015): batches of 32, and 0.01 inside the root for the gradient of their sum."""
    suited = jobs.DQN.suited[jobs.IMAGES]
    assert suited.batch_size / suited.settings.samples_per_insert == 4
    assert suited.optimizer.eps * suited.batch_size**2 == pytest.approx(0.01)


def test_a_batch_above_the_largest_sample_is_refused():
    companions = jobs.apex(env="CartPole-v1").companions
    companions.check(1, MOST)
    with raising(UsageError, "largest"):
        companions.check(1, MOST + 1)


def test_the_actors_of_the_highest_ranks_join_late():
    nodes = jobs.apex(env="CartPole-v1", actors=4, late=2, late_seconds=3.0).companions.nodes(1)
    assert [node.joins_after for node in nodes] == [0, 0, 3, 3, 0]


def test_a_network_of_a_file_may_import_its_neighbors_when_it_is_called(tmp_path):
    (tmp_path / "widths_of_nets.py").write_text("width = 4\n")
    (tmp_path / "nets.py").write_text(
        "import torch\n\ndef net():\n    from widths_of_nets import width\n    return torch.nn.Linear(width, 2)\n"
    )
    job = jobs.apex(env="CartPole-v1", network=f"{tmp_path}/nets.py:net")
    assert next(job.model().parameters()).shape == (2, 4)

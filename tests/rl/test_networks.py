"""Networks of agents: sizes, the dueling form, and what is read of an observation."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from dure.rl.networks import dueling, policy_and_critic, q_network

SCREEN = Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)


@pytest.mark.parametrize(("form", "numel"), [(False, 1_693_362), (True, 3_300_019)])
def test_sizes_of_the_papers(form, numel):
    network = q_network(SCREEN, 18, dueling=form)
    assert sum(each.numel() for each in network.parameters()) == numel
    assert network(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 18)


def test_dueling_subtracts_the_mean_of_the_advantages():
    value, advantages = torch.tensor([[2.0]]), torch.tensor([[1.0, 2.0, 6.0]])
    assert dueling(value, advantages).tolist() == [[0, 1, 5]]


def test_advantages_around_the_value_sum_to_zero():
    network = q_network(VECTOR, 5).double()
    observations = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    network.trunk[0].forward = lambda values: values.double()
    assert network.value is not None
    around = network(observations) - network.value(network.trunk(observations))
    assert around.abs().max() > 0.01
    assert around.sum(1).abs().max() < 1e-12


def test_bytes_are_divided_by_255():
    network = q_network(SCREEN, 3)
    seen = []
    network.trunk[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(torch.full((1, 4, 84, 84), 51, dtype=torch.uint8))
    assert seen[0].unique().tolist() == pytest.approx([0.2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.bool])
def test_observations_of_other_types_and_shapes_are_flattened(dtype):
    network = q_network(Box(0, 1, (10, 5), np.float32), 2, hidden=(16,))
    ones = torch.ones(3, 10, 5)
    assert torch.equal(network(ones.to(dtype)), network(ones))


def test_policies_reach_their_bounds_and_no_further():
    module = policy_and_critic(VECTOR, Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)), hidden=(8,))
    last = module.policy_layers[-1]
    for bias, expected in ((1e3, [2, 10]), (-1e3, [-2, 0]), (0.0, [0, 5])):
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.constant_(last.bias, bias)
        assert module.policy(torch.ones(1, 3)).tolist() == [expected]


def test_a_critic_reads_observations_and_actions():
    module = policy_and_critic(VECTOR, Box(-1, 1, (2,), np.float32))
    observations, actions = torch.ones(4, 3), torch.ones(4, 2)
    values = module.critic(observations, actions)
    assert values.shape == (4,)
    assert not torch.equal(values, module.critic(observations, -actions))
    assert not torch.equal(values, module.critic(-observations, actions))
    assert list(module.state_dict()) == [name for name, _ in module.named_parameters()]

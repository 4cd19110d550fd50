"""Policy gradients: finite differences on a quadratic critic, the clip, and the part of exploration."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from dure.rl.dpg import Dpg

OBSERVATIONS = torch.linspace(-1, 1, 8, dtype=torch.float64).unsqueeze(1)
VECTOR = Box(-1, 1, (3,), np.float32)


class Quadratic(torch.nn.Module):
    """The critic is -scale * |a - best(s)|^2, the policy an affine function of s."""

    def __init__(self, scale=1.0, actions=2):
        super().__init__()
        self.layer = torch.nn.Linear(1, actions).double()
        self.scale = scale
        self.low, self.high = torch.full((actions,), -1.0), torch.full((actions,), 1.0)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.fill_(0.2)

    def policy(self, observations):
        return self.layer(observations)

    def best(self, observations):
        return torch.cat([0.5 * observations, 0.3 - 0.2 * observations], 1)[:, : self.layer.out_features]

    def critic(self, observations, actions):
        return -self.scale * (actions - self.best(observations)).square().sum(1)


def batch(module, observations=OBSERVATIONS):
    zeros = torch.zeros(len(observations), dtype=torch.float64)
    return {
        "observation": observations,
        "action": module.policy(observations).detach(),
        "reward": zeros,
        "discount": zeros,
        "next_observation": observations,
    }


def backward(module, observations=OBSERVATIONS):
    values = batch(module, observations)
    module.zero_grad()
    Dpg().loss(module, values, Dpg().targets(module, module, values), torch.ones(len(observations)))[0].backward()
    return module


def test_policy_gradient_equals_finite_differences():
    """|dq/da| is below 1 here, so the clip changes nothing."""
    module = backward(Quadratic(scale=0.3))
    for parameter in module.parameters():
        for index in np.ndindex(*parameter.shape):
            around = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter[index] += step
                    around.append(float(module.critic(OBSERVATIONS, module.policy(OBSERVATIONS)).mean()))
                    parameter[index] -= step
            slope = (around[0] - around[1]) / 2e-5
            assert abs(slope) > 1e-3
            assert -float(parameter.grad[index]) == pytest.approx(slope, abs=1e-9)


def test_the_slope_of_the_critic_is_clipped_element_by_element():
    """At s = 1, dq/da = 2 * 3.75 * (0.2, -0.2) for the first pair of actions and (0.05, -0.2) for the second."""
    module = Quadratic(scale=7.5)
    with torch.no_grad():
        module.layer.weight.fill_(0)
        module.layer.bias.copy_(torch.tensor([0.3, 0.12], dtype=torch.float64))
    backward(module, torch.ones(1, 1, dtype=torch.float64))  # dq/da = (3, -0.3)
    assert (-module.layer.bias.grad).tolist() == pytest.approx([1, -0.3])
    assert (-module.layer.weight.grad.flatten()).tolist() == pytest.approx([1, -0.3])


def test_each_transition_is_clipped_before_the_mean():
    """Slopes of 3 and -0.6 become 1 and -0.6: their mean is 0.2, not clip(1.2)."""
    module = Quadratic(scale=1.0, actions=1)
    with torch.no_grad():
        module.layer.weight.fill_(0)
        module.layer.bias.fill_(0)
    backward(module, torch.tensor([[3.0], [-0.6]], dtype=torch.float64))
    assert float(-module.layer.bias.grad) == pytest.approx(0.2)


@pytest.mark.parametrize("scale", [0.3, 100.0])
def test_policies_converge_to_the_best_actions(scale):
    module = Quadratic(scale=scale)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5 if scale < 1 else 0.005)
    for _ in range(300):
        backward(module)
        optimizer.step()
    assert (module.policy(OBSERVATIONS) - module.best(OBSERVATIONS)).abs().max() < 1e-3


def test_policy_and_critic_get_the_gradient_of_their_own_loss():
    torch.manual_seed(0)
    algorithm = Dpg()
    actions = Box(-2, 2, (2,), np.float32)
    module, target = (algorithm.network(VECTOR, actions) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    draw = {name: torch.randn(16, 3, generator=generator) for name in ("observation", "next_observation")}
    values = draw | {
        "action": torch.rand(16, 2, generator=generator),
        "reward": torch.randn(16, generator=generator),
        "discount": torch.full((16,), 0.9),
    }
    weights = torch.rand(16, generator=generator)
    loss, errors = algorithm.loss(module, values, algorithm.targets(module, target, values), weights)
    loss.backward()
    following = values["next_observation"]
    with torch.no_grad():
        y = values["reward"] + 0.9 * target.critic(following, target.policy(following))
    delta = y - module.critic(values["observation"], values["action"])
    assert torch.equal(errors, delta.detach().abs())
    assert torch.equal(errors, algorithm.errors(module, values, algorithm.targets(module, target, values)))
    critic = list(module.critic_layers.parameters())
    for found, expected in zip(critic, torch.autograd.grad((weights * delta**2 / 2).mean(), critic), strict=True):
        torch.testing.assert_close(found.grad, expected)
    policy = list(module.policy_layers.parameters())
    q = module.critic(values["observation"], module.policy(values["observation"])).mean()  # slopes are far below 1
    for found, expected in zip(policy, torch.autograd.grad(-q, policy), strict=True):
        assert found.grad.abs().max() > 0
        torch.testing.assert_close(found.grad, expected, rtol=1e-4, atol=1e-7)
    assert all(each.grad is None for each in target.parameters())


def test_the_value_of_the_loss_is_that_of_the_critic():
    module = Quadratic(scale=0.3)
    values = batch(module) | {"reward": torch.arange(8.0, dtype=torch.float64), "discount": torch.zeros(8).double()}
    weights = torch.linspace(0.2, 1.0, 8, dtype=torch.float64)
    loss, _ = Dpg().loss(module, values, Dpg().targets(module, module, values), weights)
    delta = values["reward"] - module.critic(values["observation"], values["action"])
    assert loss.item() == pytest.approx((weights * delta.square() / 2).mean().item(), rel=1e-12)


def test_noise_has_the_scale_of_half_the_range_and_stays_within_bounds():
    module = Dpg().network(VECTOR, Box(np.array([-1, 0], np.float32), np.array([1, 20], np.float32)))
    for parameter in module.policy_layers.parameters():
        torch.nn.init.zeros_(parameter)
    noise = np.repeat([0.0, 0.1, 2.0], 4000)
    actions = Dpg().act(module, np.zeros((12_000, 3), np.float32), noise, np.random.default_rng(0))
    assert (actions.dtype, actions.shape) == (np.float32, (12_000, 2))
    still, small, large = actions.reshape(3, 4000, 2)
    assert (still == [0, 10]).all()
    assert small.std(0) == pytest.approx([0.1, 1.0], rel=0.05)
    assert small.mean(0) == pytest.approx([0, 10], abs=0.1)
    assert (large.min(0).tolist(), large.max(0).tolist()) == ([-1, 0], [1, 20])


class Bandit(torch.nn.Module):
    """One state: the policy is a constant, the critic linear in (1, a, a^2), both zero at first."""

    low, high = torch.tensor([-1.0]), torch.tensor([1.0])

    def __init__(self):
        super().__init__()
        self.constant = torch.nn.Parameter(torch.zeros(1))
        self.weights = torch.nn.Parameter(torch.zeros(3))

    def policy(self, observations):
        return self.constant.expand(len(observations), 1)

    def critic(self, observations, actions):
        return torch.cat([torch.ones_like(actions), actions, actions.square()], 1) @ self.weights


def action_learned(sigma):
    """The action that is learned with rewards -(a - 0.5)^2."""
    algorithm, module, rng = Dpg(n_step=1), Bandit(), np.random.default_rng(0)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    observations = np.zeros((64, 1), np.float32)
    for _ in range(300):
        actions = torch.from_numpy(algorithm.act(module, observations, np.full(64, sigma), rng))
        state, zeros = torch.from_numpy(observations), torch.zeros(64)
        rewards = -(actions.squeeze(1) - 0.5).square()
        names = ("observation", "action", "reward", "discount", "next_observation")
        values = dict(zip(names, (state, actions, rewards, zeros, state), strict=True))
        optimizer.zero_grad()
        algorithm.loss(module, values, algorithm.targets(module, module, values), torch.ones(64))[0].backward()
        optimizer.step()
    return float(module.constant.detach())


def test_a_policy_learns_from_the_noise_of_its_actions():
    assert action_learned(0.3) == pytest.approx(0.5, abs=0.02)
    assert action_learned(0.0) == 0.0

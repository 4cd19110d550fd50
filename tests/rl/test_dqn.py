"""Q-learning: the worked examples, the gradient, exploration, and what time limits teach."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TimeLimit
from support.wording import raising

from dure.errors import UsageError
from dure.rl.dqn import Dqn
from dure.rl.environments import Environments
from dure.rl.transitions import NStep, columns

VECTOR = Box(-1, 1, (3,), np.float32)


class Table(torch.nn.Module):
    """Action values (states, actions); an observation is the number of a state."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, observations):
        return self.values[observations]


ONLINE = Table([[0, 0, 0], [1, 3, 2], [0, 5, 4]])
TARGET = Table([[0, 0, 0], [10, 20, 30], [1, 2, 3]])
BATCH = {
    "observation": torch.tensor([0, 0]),
    "action": torch.tensor([0, 2]),
    "reward": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "discount": torch.tensor([0.9, 0.0], dtype=torch.float64),
    "next_observation": torch.tensor([1, 2]),
}
ONES = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(("double", "targets"), [(False, [28.0, 2.0]), (True, [19.0, 2.0])])
def test_worked_example(double, targets):
    """The values of the state acted in are zero, so the errors are the targets."""
    algorithm = Dqn(double=double)
    assert algorithm.errors(ONLINE, BATCH, algorithm.targets(ONLINE, TARGET, BATCH)).tolist() == pytest.approx(
        targets, abs=1e-12
    )
    loss, errors = algorithm.loss(ONLINE, BATCH, algorithm.targets(ONLINE, TARGET, BATCH), ONES)
    assert errors.tolist() == pytest.approx(targets, abs=1e-12)
    assert loss.item() == pytest.approx(sum(each**2 for each in targets) / 4)


def test_a_module_is_its_own_target_in_actors():
    """Both forms take the maximum then, and the errors are those of a learner whose target is equal."""
    own = [
        Dqn(double=double).errors(ONLINE, BATCH, Dqn(double=double).targets(ONLINE, ONLINE, BATCH)).tolist()
        for double in (False, True)
    ]
    assert own[0] == own[1] == pytest.approx([1 + 0.9 * 3, 2], abs=1e-12)
    assert (
        Dqn().loss(ONLINE, BATCH, Dqn().targets(ONLINE, Table(ONLINE.values.tolist()), BATCH), ONES)[1].tolist()
        == own[1]
    )


def gradient(algorithm, batch, weights):
    module = Table(ONLINE.values.tolist())
    algorithm.loss(module, batch, algorithm.targets(module, TARGET, batch), weights)[0].backward()
    assert TARGET.values.grad is None
    return module.values.grad


@pytest.mark.parametrize("double", [False, True])
def test_the_gradient_is_that_of_the_action_taken(double):
    batch = BATCH | {"reward": torch.tensor([1.0, -0.25], dtype=torch.float64)}
    first = 28.0 if not double else 19.0
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 0], expected[0, 2] = -first / 2, 0.25 / 2
    assert torch.allclose(gradient(Dqn(double=double), batch, ONES), expected, atol=1e-12)
    expected[0, 0] = -1 / 2  # Huber: the slope is clipped to 1, and small errors are as before
    assert torch.allclose(gradient(Dqn(double=double, loss_="huber"), batch, ONES), expected, atol=1e-12)


@pytest.mark.parametrize("form", ["squared", "huber"])
def test_equal_transitions_weigh_as_much_as_one(form):
    one = {name: values[:1] for name, values in BATCH.items()}
    many = {name: values[:1].repeat(16) for name, values in BATCH.items()}
    single = gradient(Dqn(loss_=form), one, ONES[:1])
    assert single.abs().max() > 0.5
    assert (gradient(Dqn(loss_=form), many, torch.ones(16)) - single).abs().max() < 1e-12
    assert (gradient(Dqn(loss_=form), many, torch.full((16,), 0.25)) - single / 4).abs().max() < 1e-12


def test_of_equal_values_the_first_action_is_taken():
    module = Table([[1, 3, 3, 2], [5, 5, 5, 5]])
    rng = np.random.default_rng(0)
    assert Dqn().act(module, np.array([0, 1]), np.zeros(2), rng).tolist() == [1, 0]


def test_random_actions_come_with_the_probability_of_their_stream():
    module, rng, count = Table([[0, 0, 1]]), np.random.default_rng(0), 30_000
    noise = np.repeat([0.0, 0.3, 1.0], count)
    actions = Dqn().act(module, np.zeros(3 * count, np.int64), noise, rng).reshape(3, count)
    assert actions.dtype == np.int64
    shares = np.stack([np.bincount(each, minlength=3) / count for each in actions])
    expected = np.array([[0, 0, 1], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]])
    assert np.abs(shares - expected).max() < 5 * np.sqrt(0.25 / count)


def test_every_call_draws_as_many_random_numbers():
    """Otherwise the randomness of later steps would depend on parameters."""
    states = []
    for epsilon in (0.0, 0.5, 1.0):
        rng = np.random.default_rng(3)
        Dqn().act(ONLINE, np.zeros(4, np.int64), np.full(4, epsilon), rng)
        states.append(rng.bit_generator.state)
    assert states[0] == states[1] == states[2]


class Forever(gymnasium.Env):
    """One state, one action, reward 1, and no end."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


def value_of_forever(n, gamma, *, limit_is_an_end):
    """The value that is learned from episodes with a time limit of 5 steps."""
    algorithm = Dqn(gamma, n, dueling=False)
    environments = Environments(lambda: TimeLimit(Forever(), 5), 2, 0)
    layout = algorithm.layout(environments.observation_space, environments.action_space)
    windows, rng, items = NStep(n, gamma), np.random.default_rng(0), []
    module = torch.nn.Linear(1, 1, bias=False)
    for _ in range(10):
        before = environments.observations
        step = environments.step(algorithm.act(module, before, np.zeros(2), rng))
        for i, (limit, action) in enumerate(zip(step.truncated, [0, 0], strict=True)):
            items += windows.add(
                i,
                before[i],
                action,
                step.rewards[i],
                step.final[i],
                terminated=limit_is_an_end and limit,
                truncated=not limit_is_an_end and limit,
            )
    assert len(items) == 20
    values = {name: torch.from_numpy(each) for name, each in columns(items, layout).items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(150):
        optimizer.zero_grad()
        algorithm.loss(module, values, algorithm.targets(module, module, values), torch.ones(20))[0].backward()
        optimizer.step()
    return float(module.weight.detach())


@pytest.mark.parametrize("n", [1, 3])
def test_a_time_limit_is_no_end(n):
    assert value_of_forever(n, 0.9, limit_is_an_end=False) == pytest.approx(10, abs=1e-2)
    as_an_end = {1: 1 / (1 - 0.9 * 4 / 5), 3: (3 * 2.71 + 1.9 + 1) / (5 - 2 * 0.9**3)}[n]
    assert value_of_forever(n, 0.9, limit_is_an_end=True) == pytest.approx(as_an_end, abs=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Dqn, gamma=2), "between 0"),
        (partial(Dqn, n_step=0), "n_step"),
        (partial(Dqn, loss_="mse"), "mse"),
    ],
)
def test_values_out_of_range(make, message):
    with raising(UsageError, message):
        make()


def test_networks_have_the_form_asked_for():
    torch.manual_seed(0)
    assert Dqn(hidden=(7,)).network(VECTOR, Discrete(2)).trunk[1].out_features == 7
    assert Dqn(dueling=False).network(VECTOR, Discrete(2)).value is None

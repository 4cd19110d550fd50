"""Recurrent DNI against truncated back-propagation, and against the gradient of an infinite future."""

import copy

import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn.functional import mse_loss

from dure.errors import UsageError
from dure.partition.synthesizer import RecurrentSynthesizer

ROWS, WIDTH, WINDOW = 4, 6, 3


def core(kind):
    torch.manual_seed(2)
    return kind(2, WIDTH).double()


def sequence(steps):
    draws = torch.Generator().manual_seed(4)
    return torch.randn(steps, ROWS, 2, dtype=torch.float64, generator=draws)


def hidden_of(state):
    return state if isinstance(state, torch.Tensor) else state[0]


def window(cell, state, inputs):
    """The loss of the outputs against the inputs, and the state after the window."""
    loss = torch.zeros((), dtype=torch.float64)
    for each in inputs:
        state = cell(each, state)
        loss = loss + mse_loss(hidden_of(state)[:, :2], each)
    return loss, state


def zeros(kind):
    zero = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    return (zero, zero) if kind is nn.LSTMCell else zero


def truncated(cell, state, inputs):
    """Truncated back-propagation with plain SGD."""
    for part in inputs.split(WINDOW):
        state = tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()
        loss, state = window(cell, state, part)
        step(cell, torch.autograd.grad(loss, list(cell.parameters())))
    return cell


def decoupled(cell, state, inputs, synthesizer):
    for part in inputs.split(WINDOW):
        state = synthesizer.begin(state)
        loss, state = window(cell, state, part)
        cell.zero_grad()
        (loss + synthesizer.beyond(state)).backward()
        synthesizer.learn()
        step(cell, [each.grad for each in cell.parameters()])
    return cell


def step(cell, gradients):
    with torch.no_grad():
        for parameter, gradient in zip(cell.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell])
def test_a_frozen_synthesizer_is_truncated_back_propagation_bit_for_bit(kind):
    width = 2 * WIDTH if kind is nn.LSTMCell else WIDTH
    frozen, free = (RecurrentSynthesizer(width, optimizer=f"sgd:lr={lr}", dtype=torch.float64) for lr in (0.0, 0.5))
    plain = truncated(core(kind), zeros(kind), sequence(12))
    assert same(decoupled(core(kind), zeros(kind), sequence(12), frozen), plain)
    assert not same(decoupled(core(kind), zeros(kind), sequence(12), free), plain)


def test_one_window_over_the_whole_sequence_is_back_propagation():
    """S is zero in the first window, so nothing is added to it."""
    synthesizer = RecurrentSynthesizer(WIDTH, dtype=torch.float64)
    cell, inputs = core(nn.RNNCell), sequence(WINDOW)
    loss, _ = window(copy.deepcopy(cell), zeros(nn.RNNCell), inputs)
    whole = copy.deepcopy(cell)
    loss, _ = window(whole, zeros(nn.RNNCell), inputs)
    step(whole, torch.autograd.grad(loss, list(whole.parameters())))
    assert same(decoupled(cell, zeros(nn.RNNCell), inputs, synthesizer), whole)


W, Q = 0.8, 1.5


def decaying(weight, state):
    """The losses q h^2 / 2 of the window [a, a + T), a mean over the rows, and the state after it: h <- w h."""
    loss = torch.zeros((), dtype=torch.float64)
    for _ in range(WINDOW):
        loss = loss + 0.5 * Q * state.square().sum(dim=1).mean()
        state = weight * state
    return loss, state


def learned():
    """A synthesizer of the scalar chain h <- w h, trained on random states."""
    synthesizer, draws = RecurrentSynthesizer(1, dtype=torch.float64), torch.Generator().manual_seed(1)
    for _ in range(600):
        state = synthesizer.begin(torch.randn(ROWS, 1, dtype=torch.float64, generator=draws))
        loss, after = decaying(W, state)
        (loss + synthesizer.beyond(after)).backward()
        synthesizer.learn()
    return synthesizer


def test_the_fixed_point_is_the_gradient_of_the_infinite_future():
    """d/dh of the sum over all j of q (w^j h)^2 / 2 is q h / (1 - w^2): S must find it from windows of three steps."""
    weight, offset = learned().state_dict()["tensors"]["values"].tolist()
    assert weight == pytest.approx(Q / (1 - W**2), rel=1e-9)
    assert offset == pytest.approx(0.0, abs=1e-9)


def test_with_the_true_synthesizer_windows_add_up_to_the_whole_gradient():
    """d/dw of the sum over all j of q (w^j h)^2 / 2 is q w h^2 / (1 - w^2)^2; truncated windows miss a part of it."""
    found = []
    for synthesizer in (learned(), RecurrentSynthesizer(1, dtype=torch.float64)):
        weight = torch.tensor(W, dtype=torch.float64, requires_grad=True)
        state = torch.full((ROWS, 1), 2.0, dtype=torch.float64)
        for _ in range(40):
            loss, state = decaying(weight, synthesizer.begin(state))
            (loss + synthesizer.beyond(state)).backward()
        found.append(float(weight.grad))
    exact = Q * W * 2.0**2 / (1 - W**2) ** 2
    assert found[0] == pytest.approx(exact, rel=1e-9)
    assert found[1] < 0.7 * exact


def test_scale_multiplies_what_enters_the_loss():
    synthesizer = learned()
    synthesizer.scale = 0.1
    state = torch.ones(ROWS, 1, dtype=torch.float64)
    assert float(synthesizer.beyond(state)) == pytest.approx(0.1 * Q / (1 - W**2), rel=1e-9)


def test_a_restored_synthesizer_goes_on_as_the_first():
    first = learned()
    second = RecurrentSynthesizer(1, dtype=torch.float64)
    second.load_state_dict(first.state_dict())
    state = torch.ones(ROWS, 1, dtype=torch.float64)
    assert torch.equal(first.beyond(state), second.beyond(state))


def test_wrong_use_says_what_is_right():
    synthesizer = RecurrentSynthesizer(3)
    with raising(UsageError, "state"):
        synthesizer.learn()
    with raising(UsageError, "2"):
        synthesizer.beyond(torch.zeros(4, 2))

"""The flat replica: one buffer that the module's tensors are views of, and stay views of."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn.utils import prune

from dure.errors import ReplicaError
from dure.job.replica import Layer, Replica, digest


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def backward(module: nn.Module, seed: int = 1) -> None:
    dtype = next(module.parameters()).dtype
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    module(inputs).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_module_and_the_buffer_are_one(dtype):
    module = small(dtype)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    replica = Replica(module)
    assert replica.dtype == dtype
    assert replica.numel == 3 * 4 + 4 + 4 * 2 + 2
    assert replica.layers[1] == Layer("0.bias", 12, 16, (4,))
    assert torch.equal(replica.params, torch.cat([value.flatten() for value in before]))
    replica.params += 1
    for value, parameter in zip(before, module.parameters(), strict=True):
        assert torch.equal(parameter, value + 1)


def test_backward_fills_the_flat_gradient():
    plain, module = small(), small()
    module.load_state_dict(plain.state_dict())
    replica = Replica(module)
    backward(plain)
    backward(module)
    assert torch.equal(replica.grads, torch.cat([parameter.grad.flatten() for parameter in plain.parameters()]))
    backward(module)
    torch.testing.assert_close(replica.grads, 2 * torch.cat([p.grad.flatten() for p in plain.parameters()]))
    replica.zero_grad()
    assert not replica.grads.any()
    assert module[0].weight.grad.data_ptr() == replica.grads.data_ptr()


def test_a_plain_optimizer_moves_the_buffer():
    replica = Replica(small())
    before = replica.params.clone()
    optimizer = torch.optim.SGD(replica.module.parameters(), lr=0.5)
    backward(replica.module)
    optimizer.step()
    torch.testing.assert_close(replica.params, before - 0.5 * replica.grads)


def test_a_gradient_that_was_there_comes_along():
    module = small()
    backward(module)
    gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    assert torch.equal(Replica(module).grads, gradient)


def test_frozen_parameters_are_left_alone():
    module = small()
    module[0].weight.requires_grad_(False)
    place = module[0].weight.data_ptr()
    replica = Replica(module)
    assert [layer.name for layer in replica.layers] == ["0.bias", "2.weight", "2.bias"]
    assert module[0].weight.data_ptr() == place
    replica.check()
    module[0].weight.requires_grad_(True)
    with raising(ReplicaError, "0"):
        replica.check()


def test_a_shared_parameter_lies_there_once():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    replica = Replica(module)
    assert [layer.name for layer in replica.layers] == ["0.weight", "0.bias", "1.bias"]
    backward(module)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    weight, first, second = (parameter.detach().clone().requires_grad_() for parameter in module.parameters())
    ((inputs @ weight.T + first) @ weight.T + second).square().mean().backward()
    torch.testing.assert_close(replica.grads[:9], weight.grad.flatten())
    replica.params.zero_()
    assert not module[1].weight.any()


def test_a_parameter_laid_out_in_another_order_keeps_its_values():
    module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    weight = module.weight.detach().clone()
    replica = Replica(module)
    assert torch.equal(module.weight, weight)
    assert torch.equal(replica.params[: weight.numel()], weight.flatten())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "dtypes"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "devices"),
        (nn.ReLU, "parameters"),
        (
            lambda: nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
            "floating-point",
        ),
    ],
)
def test_what_cannot_be_laid_out_flat_is_refused(make, message):
    with raising(ReplicaError, message):
        Replica(make())


def test_a_lazy_module_must_see_a_batch_first():
    lazy = nn.LazyLinear(2)
    with raising(ReplicaError, "through"):
        Replica(lazy)
    lazy(torch.ones(1, 3))
    assert Replica(lazy).numel == 8


def test_two_parameters_in_one_memory_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight.data = module[0].weight.data
    with raising(ReplicaError, "module.1.weight"):
        Replica(module)


# ---- loading


def test_load_copies_and_refuses_what_does_not_fit():
    replica = Replica(small())
    values = torch.arange(float(replica.numel))
    replica.load(values)
    values += 1
    assert replica.module[0].weight[0].tolist() == [0, 1, 2]
    with raising(ReplicaError, "26"):
        replica.load(torch.zeros(3))
    with raising(ReplicaError, "float64"):
        replica.load(values.double())


# ---- calls that detach views


def test_gradients_set_to_none_are_adopted_again():
    replica = Replica(small())
    backward(replica.module)
    expected = replica.grads.clone()
    replica.module.zero_grad(set_to_none=True)
    replica.check()
    assert not replica.grads.any()
    replica.module.zero_grad(set_to_none=True)
    backward(replica.module)
    replica.check()
    assert torch.equal(replica.grads, expected)
    assert all(
        parameter.grad.untyped_storage().data_ptr() == replica.grads.data_ptr() for parameter in replica.parameters
    )


def test_a_gradient_of_the_users_own_is_copied_in():
    replica = Replica(small())
    own = torch.full((4, 3), 7.0)
    replica.module[0].weight.grad = own
    replica.check()
    assert torch.equal(replica.grads[:12], own.flatten())
    own += 1
    assert replica.grads[0] == 7


def test_a_sparse_gradient_is_copied_in():
    module = nn.Embedding(4, 2, sparse=True)
    replica = Replica(module)
    module.zero_grad(set_to_none=True)
    module(torch.tensor([1, 1])).sum().backward()
    assert module.weight.grad.is_sparse
    replica.check()
    assert replica.grads.view(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def assign_state(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def replace_data(module):
    module[2].bias.data = module[2].bias.data.clone()


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (
            lambda module: module.double(),
            "model.to(",
        ),
        (lambda module: module.half(), "float16"),
        (lambda module: module.to(torch.bfloat16), "bfloat16"),
        (
            lambda module: module.to_empty(device="meta"),
            "meta",
        ),
        (assign_state, "assign=True"),
        (replace_data, "parameter.data.copy_("),
    ],
)
def test_moved_parameters_are_refused_with_the_call_that_moved_them(move, message):
    replica = Replica(small())
    replica.check()
    move(replica.module)
    with raising(ReplicaError, message):
        replica.check()


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 2


def register(module, name):
    module[0].register_buffer(name, torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: setattr(module, "2", nn.Linear(4, 2)), "2"),
        (lambda module: module.append(nn.Linear(2, 2)), "4"),
        (lambda module: module.__setitem__(1, nn.PReLU()), "1"),
        (lambda module: module[1].register_parameter("slope", nn.Parameter(torch.ones(1))), "1"),
        (lambda module: module[3].append(nn.Parameter(torch.ones(1))), "3"),
        (lambda module: module[1].add_module("inner", nn.Linear(1, 1)), "1"),
        (lambda module: module.__delitem__(2), "2"),
        (lambda module: register(module, "seen"), "0"),
        (lambda module: delattr(module[1], "count"), "1"),
        (lambda module: delattr(module[0], "weight"), "0"),
        (lambda module: setattr(module[2], "bias", None), "2"),
        (lambda module: nn.utils.parametrize.register_parametrization(module[0], "weight", Scaled()), "parametr"),
        (lambda module: nn.utils.parametrizations.weight_norm(module[0]), "weight_norm"),
        (lambda module: nn.utils.spectral_norm(module[0]), "spectral_norm"),
        (lambda module: prune.l1_unstructured(module[0], "weight", 0.5), "0"),
        (
            lambda module: setattr(module[2], "weight", nn.Parameter(module[2].weight.data)),
            "module.2",
        ),
    ],
)
def test_a_module_that_has_changed_since_is_refused(change, message):
    module = nn.Sequential(*small(), nn.ParameterList([nn.Parameter(torch.ones(1))]))
    module[1].register_buffer("count", torch.zeros(1))
    replica = Replica(module)
    replica.check()
    change(module)
    for _ in range(2):
        with raising(ReplicaError, message):
            replica.check()


def test_changes_that_have_no_part_in_training_pass():
    module = small()
    module.register_buffer("table", torch.zeros(2))
    replica = Replica(module)
    module[1] = nn.ReLU()
    module.table = module.table + 1
    module[0].register_buffer("cache", torch.zeros(2), persistent=False)
    module[2] = nn.Sequential(module[2])
    replica.check()
    module[1] = nn.PReLU()
    with raising(ReplicaError, "1.weight"):
        replica.check()


def test_calls_that_move_nothing_pass():
    replica = Replica(small())
    replica.module.float().to("cpu").train()
    replica.module.load_state_dict(small().state_dict())
    replica.check()
    assert torch.equal(replica.params[:12].view(4, 3), replica.module[0].weight)


# ---- buffers


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_buffers_travel_flat_and_come_back_the_same():
    replica, other = Replica(normed()), Replica(normed())
    assert replica.has_batch_norm
    for _ in range(3):
        replica.module(torch.randn(8, 3))
    snapshot = replica.buffers_flat()
    assert snapshot.tolist()[-1] == 3
    assert snapshot.numel() == 2 + 2 + 1
    other.load_buffers(snapshot)
    norm = other.module[1]
    assert torch.equal(norm.running_mean, replica.module[1].running_mean)
    assert norm.num_batches_tracked.dtype == torch.int64
    assert norm.num_batches_tracked.item() == 3
    other.load_buffers(snapshot - 1e-9)
    assert norm.num_batches_tracked.item() == 3
    with raising(ReplicaError, "have 5"):
        other.load_buffers(snapshot[:4])


def test_merged_buffers_are_the_mean_of_statistics_and_the_largest_count():
    replica = Replica(normed())
    one = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64)
    two = torch.tensor([3.0, 6.0, 3.0, 0.0, 7.0], dtype=torch.float64)
    assert replica.merge_buffers([one, two]).tolist() == [2, 4, 3, 2, 10]
    assert replica.merge_buffers([one, two], [3, 1]).tolist() == [1.5, 3, 3, 3, 10]


def test_constants_are_no_part_of_the_buffers():
    module = small()
    module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    module.register_buffer("cache", torch.ones(2), persistent=False)
    replica = Replica(module)
    assert replica.buffers_flat().numel() == 0
    replica.load_buffers(torch.empty(0))


# ---- what a module is like


@pytest.mark.parametrize(
    ("module", "stochastic"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval(), False),
        (nn.Sequential(nn.Linear(2, 2), nn.RReLU()), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), True),
        (nn.LSTM(2, 2), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
    ],
)
def test_randomness_is_seen(module, stochastic):
    assert Replica(module).is_stochastic is stochastic


def test_digest_is_of_the_little_endian_bytes():
    values = torch.tensor([1.5, -0.0, 3e-9])
    assert digest(values) == hashlib.sha256(struct.pack("<3f", 1.5, -0.0, 3e-9)).hexdigest()
    assert digest(values) != digest(values.double())
    assert digest(values[::2]) == hashlib.sha256(struct.pack("<2f", 1.5, 3e-9)).hexdigest()

"""Changes of a model in place between two steps: which calls are seen, and what the error names."""

import pytest
import torch
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.replica import Replica
from dure.user_loop.checks import RUN_NBYTES, ModelCheck, sums_of_runs


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def quietly(change):
    def apply(module):
        with torch.no_grad():
            change(module)

    return apply


def step(module):
    module[2].weight.grad = torch.ones_like(module[2].weight)
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def permute(module):
    module[0].weight.data.copy_(module[0].weight.data.roll(1, 0))


CHANGES = {
    "clamp under no_grad": quietly(lambda module: module[0].weight.clamp_(-0.01, 0.01)),
    "clamp of data": lambda module: module[0].weight.data.clamp_(-0.01, 0.01),
    "a view of data": lambda module: module[0].weight.data[0, :1].mul_(1.5),
    "detach": lambda module: module[0].weight.detach().neg_(),
    "load_state_dict": lambda module: module.load_state_dict(model(1).state_dict()),
    "copy_": quietly(lambda module: module[2].bias.copy_(torch.ones(10))),
    "init": lambda module: nn.init.zeros_(module[2].weight),
    "another optimizer": step,
    "rows that change places": permute,
    "numpy": lambda module: module[2].bias.detach().numpy().fill(0.5),
    "one bit": lambda module: module[2].bias.data.view(torch.int32)[9:].bitwise_xor_(1),
    "nan": lambda module: module[2].bias.data[3:4].fill_(torch.nan),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen(name):
    module = model()
    check = ModelCheck(Replica(module), ("step",))
    check.note()
    check.check("step")
    CHANGES[name](module)
    with raising(UsageError, "changed"):
        check.check("step")
    check.check("close")
    check.note()
    check.check("step")


def test_forward_backward_and_clipped_gradients_are_no_change():
    module = model()
    replica = Replica(module)
    check = ModelCheck(replica, ("step",))
    check.note()
    module(torch.ones(2, 64)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    module.zero_grad()
    module.train()
    check.check("step")
    check.note()
    replica.load(replica.params * 2)
    check.note()
    check.check("step")


def test_an_embedding_that_scales_its_rows_in_forward_is_named():
    module = nn.Sequential(nn.Embedding(1000, 64, max_norm=0.5), nn.Linear(64, 64))
    check = ModelCheck(Replica(module), ("step",))
    check.note()
    module(torch.tensor([7]))
    with raising(UsageError, "0.weight"):
        check.check("step")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 5, 64, 256, 257, 1000])
def test_each_element_is_in_a_run(dtype, elements):
    values = torch.zeros(elements, dtype=dtype)
    before = sums_of_runs(values)
    assert before.numel() == elements * dtype.itemsize // RUN_NBYTES + 1
    for index in range(elements):
        values[index] = 1
        changed = (sums_of_runs(values) != before).nonzero().flatten().tolist()
        assert changed == [index * dtype.itemsize // RUN_NBYTES]
        values[index] = 0

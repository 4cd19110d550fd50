"""Blocks of a model: what is accepted, what is refused by name, and what is tied."""

import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.errors import StrategyError, UsageError
from dure.partition.blocks import blocks_of, call_of, check_composition, refuse_hooks, refuse_ties, tied, tied_stages


class Reader(nn.Module):
    """A model that is no `Sequential`: embedding, two layers of an encoder, a head on the mean over the words."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)

    def forward(self, ids, mask):
        x = self.table(ids)
        for layer in self.encoder["layers"]:
            x = torch.relu(layer(x))
        return self.head(self.norm((x * mask).sum(1)))


class Words(nn.Module):
    """The first block: it passes the mask on."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids, mask):
        return {"x": self.table(ids), "mask": mask}


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        return torch.relu(self.layer(x)), mask


class Head(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x, mask):
        return self.parts((x * mask).sum(1))


def cut_reader(module):
    layers = [Layer(each) for each in module.encoder["layers"]]
    return [Words(module.table), *layers, Head(module.norm, module.head)]


def reading(stages, model=Reader):
    inputs = {"ids": torch.arange(12).view(4, 3) % 10, "mask": torch.ones(4, 3, 1)}
    train = dure.Data(inputs, torch.arange(4))
    return dure.Job(model, cross_entropy, train, stages=stages, name="reader", batch_size=4)


def dense(*layers, stages=None):
    return dure.Job(
        lambda: nn.Sequential(*layers), cross_entropy, dure.Data(torch.randn(4, 4), torch.arange(4)), stages=stages
    )


def test_children_of_a_sequential_are_its_blocks_even_if_one_occurs_twice():
    relu = nn.ReLU()
    job = dense(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    module = job.build()
    assert [id(each) for each in blocks_of(job, module)] == [id(module[i]) for i in range(4)]
    assert blocks_of(job, module)[3] is relu


def test_stages_come_before_the_children():
    job = dense(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), stages=lambda module: [module[:2], module[2]])
    assert [type(each) for each in blocks_of(job, job.build())] == [nn.Sequential, nn.Linear]


def test_blocks_in_order_compute_what_the_model_computes():
    job = reading(cut_reader)
    module = job.build()
    blocks, call = blocks_of(job, module), call_of(job)
    inputs, _ = job.train.batch(torch.arange(4))
    value = inputs
    for block in blocks:
        value = call(block, value)
    assert torch.equal(value, module(**inputs))


def test_a_model_without_blocks_is_refused():
    with raising(UsageError, "reader"):
        blocks_of(reading(None), Reader())


def test_a_sequential_with_a_forward_of_its_own_is_refused():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    with raising(UsageError, "Sequential"):
        blocks_of(reading(None), Residual(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (lambda module: None, "modules"),
        (lambda module: [], "modules"),
        (lambda module: [module.table, torch.relu], "builtin_function_or_method"),
        (lambda module: module.absent, "reader"),
    ],
)
def test_what_is_no_list_of_modules_is_refused(stages, message):
    with raising(UsageError, message):
        blocks_of(reading(stages), Reader())


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (0, "table"),
        (1, "0"),
        (3, "norm"),
    ],
)
def test_a_parameter_in_no_block_is_named_with_its_submodule(left_out, message):
    job = reading(lambda module: [each for i, each in enumerate(cut_reader(module)) if i != left_out])
    with raising(UsageError, message):
        blocks_of(job, job.build())


def test_the_outermost_submodule_that_is_left_out_is_named():
    job = reading(lambda module: [Words(module.table), Head(module.norm, module.head)])
    with raising(UsageError, "encoder"):
        blocks_of(job, job.build())


def test_a_parameter_of_the_model_itself_is_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.body = nn.Linear(4, 4)

    job = reading(lambda module: [module.body], Scaled)
    with raising(UsageError, "scale"):
        blocks_of(job, job.build())


def test_a_frozen_parameter_may_be_left_out():
    module = Reader()
    module.table.weight.requires_grad_(False)
    job = reading(lambda module: cut_reader(module)[1:])
    assert len(blocks_of(job, module)) == 3


def test_a_parameter_that_is_none_of_the_models_is_refused():
    job = reading(lambda module: [*cut_reader(module), nn.Linear(10, 10)])
    with raising(UsageError, "weight"):
        blocks_of(job, job.build())


def test_changing_buffers_in_two_blocks_are_refused():
    job = reading(lambda module: [*cut_reader(module)[:2], module.norm, *cut_reader(module)[2:]])
    with raising(UsageError, "norm"):
        blocks_of(job, job.build())


def test_constant_buffers_may_be_in_two_blocks():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
            self.register_buffer("positions", torch.arange(4), persistent=False)

    shared = Masked()
    job = dense(shared, nn.ReLU(), shared)
    assert len(blocks_of(job, job.build())) == 3


# ---- tied parameters


def test_tied_parameters_are_named_with_their_blocks():
    module = Reader()
    module.head.weight = nn.Parameter(module.table.weight.data)
    module.table.weight = module.head.weight
    assert tied(module, cut_reader(module)) == {"table.weight": (0, 3)}
    assert tied(Reader(), cut_reader(Reader())) == {}


def test_a_layer_that_occurs_twice_is_tied_whole():
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.ReLU(), layer, layer)
    assert tied(module, list(module)) == {"0.weight": (0, 2, 3), "0.bias": (0, 2, 3)}


def test_blocks_of_one_stage_share_freely():
    ties = {"0.weight": (0, 2, 3)}
    assert tied_stages(ties, (2,)) == {"0.weight": (0, 1)}
    assert tied_stages(ties, (1, 2, 3)) == {"0.weight": (0, 2, 3)}
    assert tied_stages(ties, (4,)) == {}
    assert tied_stages(ties, ()) == {}


def test_a_pipeline_without_a_flush_refuses_tied_stages():
    refuse_ties("pipedream", {})
    with raising(StrategyError, "stages 0,"):
        refuse_ties("pipedream", {"table.weight": (0, 1, 3)})


# ---- the order of blocks


def test_blocks_that_compute_the_models_loss_pass_and_leave_all_as_it_was():
    job = reading(cut_reader)
    module = job.build()
    module.norm.eval()
    blocks = blocks_of(job, module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    check_composition(job, module, blocks)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert not module.norm.training
    assert all(each.training for each in blocks)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 1, 2, 3)])
def test_blocks_in_a_wrong_order_or_twice_are_refused(order):
    job = reading(lambda module: [cut_reader(module)[i] for i in order])
    module = job.build()
    with raising(UsageError, "blocks"):
        check_composition(job, module, blocks_of(job, module))


def test_a_block_that_raises_is_named():
    job = reading(lambda module: [module.table, *cut_reader(module)[1:]])
    module = job.build()
    with raising(UsageError, "block 0"):
        check_composition(job, module, blocks_of(job, module))


def hooked(place):
    def model():
        found = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        if place == "parameter":
            next(found.parameters()).register_hook(lambda gradient: gradient * 2)
        else:
            (found if place == "model" else found[1]).register_forward_hook(lambda module, inputs, outputs: outputs * 2)
        return found

    return model


@pytest.mark.parametrize(("place", "says"), [("parameter", "gradient"), ("model", "Sequential")])
def test_hooks_that_no_block_would_run_are_refused(place, says):
    module = hooked(place)()
    with raising(UsageError, says):
        refuse_hooks(module, list(module))


def test_hooks_of_a_block_are_its_own():
    module = hooked("block")()
    refuse_hooks(module, list(module))

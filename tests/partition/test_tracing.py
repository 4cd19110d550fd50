"""Blocks by tracing: they compute what the module computes, hold its own parameters, and leave it as it was."""

import copy

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy, dropout, linear

import dure
from dure.errors import UsageError
from dure.job.data.dataset import called
from dure.partition.blocks import blocks_of, tied
from dure.partition.tracing import traced_blocks


class Layer(nn.Module):
    """A residual layer with shapes read from its inputs, and a mask."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.25)

    def forward(self, x, mask):
        rows, words, width = x.shape
        heads = self.inner(x).view(rows, words, 2, width // 2).transpose(1, 2)
        return self.norm(x + self.drop(heads.transpose(1, 2).reshape(rows, words, width)) * mask)


class Reader(nn.Module):
    """Mask, residual connections, a parameter and a constant of its own, an argument with a default."""

    def __init__(self, width=4):
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.places = nn.Parameter(torch.randn(3, width))
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.calls = 0

    def forward(self, ids, mask, shift=None):
        self.calls += 1
        x = self.table(ids) + self.places * self.scale
        x = x + 0 * torch.rand_like(x)  # draws in evaluation mode too
        if shift is not None:
            x = x + shift
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm((x * mask).sum(1)))


def inputs(rows):
    return {
        "ids": torch.arange(3 * rows).view(rows, 3) % 10,
        "mask": (torch.arange(3 * rows) % 4 > 0).float().view(rows, 3, 1),
    }


def chained(blocks, value):
    for block in blocks:
        value = called(block, value)
    return value


def test_the_blocks_compute_what_the_module_computes_for_any_number_of_samples():
    module = Reader()
    blocks = traced_blocks(module, inputs(2))
    assert len(blocks) == 8  # table, places, and in each layer inner and norm; then norm and head
    for rows in (2, 5):
        torch.manual_seed(3)
        expected = module(**inputs(rows))
        torch.manual_seed(3)
        assert torch.equal(chained(blocks, inputs(rows)), expected)


def test_the_blocks_follow_the_mode_of_the_module():
    module = Reader()
    blocks = traced_blocks(module, inputs(2))
    module.eval()
    assert torch.equal(chained(blocks, inputs(4)), chained(blocks, inputs(4)))


def test_the_parameters_and_buffers_are_those_of_the_module():
    module = Reader()
    job = dure.Job(
        Reader,
        cross_entropy,
        dure.Data(inputs(6), torch.arange(6)),
        stages=lambda module: traced_blocks(module, inputs(2)),
    )
    blocks = blocks_of(job, module)
    held = [id(each) for block in blocks for each in (*block.parameters(), *block.buffers())]
    assert sorted(held) == sorted(id(each) for each in (*module.parameters(), *module.buffers()))
    assert tied(module, blocks) == {}


def test_the_module_stays_as_it_was():
    module = Reader()
    module.layers[0].eval()
    seen = []
    module.head.register_forward_hook(lambda *_: seen.append("head"))
    before = copy.deepcopy(module.state_dict())
    parts = {name: (id(part), part.training, len(part._forward_hooks)) for name, part in module.named_modules()}
    tensors = {name: (id(each), each._version) for name, each in (*module.named_parameters(), *module.named_buffers())}
    attributes, state = sorted(vars(module)), torch.get_rng_state()
    traced_blocks(module, inputs(2))
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert parts == {name: (id(part), part.training, len(part._forward_hooks)) for name, part in module.named_modules()}
    assert tensors == {
        name: (id(each), each._version) for name, each in (*module.named_parameters(), *module.named_buffers())
    }
    assert (attributes, module.calls, seen) == (sorted(vars(module)), 0, [])
    assert torch.equal(state, torch.get_rng_state())
    assert all(each.grad is None for each in module.parameters())


def test_hooks_of_submodules_run():
    module, seen = Reader(), []
    module.layers[1].register_forward_hook(lambda *_: seen.append("layer"))
    blocks = traced_blocks(module, inputs(2))
    assert seen == []
    chained(blocks, inputs(2))
    assert seen == ["layer"]


def test_fewer_tensors_at_each_border_make_fewer_blocks():
    """The mask goes on to the sum over the words; behind it one tensor crosses."""
    blocks = traced_blocks(Reader(), inputs(2))
    assert [len(block(**value)) for block, value in steps(blocks[:-1], inputs(2))] == [2, 2, 2, 2, 2, 1, 1]
    narrow = traced_blocks(Reader(), inputs(2), tensors=1)
    assert [len(list(block.parameters())) for block in narrow] == [10, 2, 1]


def steps(blocks, value):
    for block in blocks:
        yield block, value
        value = called(block, value)


def test_the_example_takes_the_dtype_and_the_device_of_the_module():
    assert len(traced_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), torch.ones(2, 4))) == 2
    assert len(traced_blocks(Reader().to("meta"), inputs(2))) == 8


def test_a_tied_parameter_stays_one_object():
    class Tied(Reader):
        def forward(self, ids, mask):
            x = self.layers[0](self.table(ids), mask) + self.places
            x = self.layers[1](x, mask).sum(1)
            return linear(self.head(self.norm(x)), self.table.weight.T) + linear(x, self.places).sum()

    module = Tied()
    blocks = traced_blocks(module, inputs(2))
    ties = tied(module, blocks)
    assert set(ties) == {"table.weight", "places"}
    assert ties["table.weight"] == (0, len(blocks) - 2)
    module.eval()
    assert torch.equal(chained(blocks, inputs(2)), module(**inputs(2)))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        return x if x.sum() > 0 else -x


def test_a_submodule_that_cannot_be_traced_is_one_operation():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Branching()), nn.Linear(4, 2))
    blocks = traced_blocks(module, torch.randn(2, 4))
    assert len(blocks) == 3
    for sign in (1.0, -1.0):
        value = sign * torch.ones(3, 4)
        assert torch.equal(chained(blocks, value), module(value))


def test_values_that_are_no_tensors_do_not_cross():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x):
            x = self.parts[0](x)
            rows = x.shape[0]
            x = self.parts[2](self.parts[1](x))
            return self.parts[3](x / rows)

    module = Sized()
    blocks = traced_blocks(module, torch.randn(2, 4))
    assert [len(list(block.parameters())) for block in blocks] == [2, 4, 2]
    value = torch.randn(5, 4)
    assert torch.equal(chained(blocks, value), module(value))


def test_an_argument_before_the_given_ones_has_its_default():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, bias=None, double=True, *, x):
            x = self.first(x) * (2 if double else 1)
            return self.last(x if bias is None else x + bias)

    module = Optional()
    blocks = traced_blocks(module, {"x": torch.randn(2, 4)})
    value = {"x": torch.randn(3, 4)}
    assert len(blocks) == 2
    assert torch.equal(chained(blocks, value), module(**value))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)


class Drops(Net):
    def forward(self, x):
        return self.last(dropout(self.first(x), 0.5, training=self.training))


class Chooses(Net):
    def forward(self, x):
        return self.last(self.first(x)) if x.sum() > 0 else self.last(x)


class Anything(Net):
    def forward(self, *x):
        return self.last(self.first(x[0]))


class Shaped(Net):
    def forward(self, x):
        rows = self.first(x).shape[0]
        return self.last(x) * rows


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (Drops, torch.ones(2, 4), "Job.stages"),
        (Chooses, torch.ones(2, 4), "TraceError"),
        (Anything, torch.ones(2, 4), "x"),
        (lambda: nn.Linear(4, 2), torch.ones(2, 4), "forward"),
        (Reader, torch.ones(2, 4), "TypeError"),
        (Drops, torch.ones(2, 5), "the"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(model, example, message):
    with raising(UsageError, message):
        traced_blocks(model(), example)


def test_a_pipeline_of_traced_blocks_trains_as_the_module():
    data = dure.Data({"ids": torch.arange(36).view(12, 3) % 10, "mask": torch.ones(12, 3, 1)}, torch.arange(12) % 10)

    class Net(Reader):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            for layer in self.layers:
                layer.drop = nn.Identity()

    job = dure.Job(Net, cross_entropy, data, batch_size=6, stages=lambda module: traced_blocks(module, inputs(2)))
    job = job.to(torch.float64)
    whole = virtual(job, "bsp", workers=1, steps=4)
    cut = virtual(job, "bsp", workers=2, steps=4, partition="gpipe:stages=2,micro=2")
    torch.testing.assert_close(cut.params, whole.params, rtol=1e-12, atol=1e-12)
    assert len(cut.setup.stages.layout.blocks) == 8

"""Tensors at the borders of stages, and the memory that blocks keep."""

import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dure
from dure.errors import UsageError
from dure.job.data.dataset import called
from dure.job.models.mlp import mlp
from dure.job.replica import Replica
from dure.job.shapes.images import vgg16
from dure.job.shapes.transformers import DecoderLayer, Sizes
from dure.partition.borders import Border, BorderTensor, with_kept
from dure.partition.layout import StageLayout


class Split(nn.Linear):
    """Gives a mapping: floats with a gradient, a mask, indices, and floats without a gradient."""

    def forward(self, x):
        return {"x": super().forward(x), "mask": x > 0, "index": x.argmax(1), "scale": x.detach()}


class Through(nn.Linear):
    def forward(self, x, mask, index, scale):
        return super().forward(x * mask * scale), index


class Last(nn.Linear):
    def forward(self, x, index):
        return super().forward(x + index.unsqueeze(1))


class Threaded(nn.Sequential):
    def forward(self, value):
        for block in self:
            value = called(block, value)
        return value


def layout_of(model, cuts="", stages=2, blocks=None):
    data = dure.Data(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64))
    job = dure.Job(model, cross_entropy, data, stages=blocks, name="small")
    return StageLayout(job, dure.GPipe(stages=stages, cuts=cuts), Replica(job.build()))


def test_each_structure_keeps_its_form_and_only_floats_with_a_graph_have_gradients():
    layout = layout_of(lambda: Threaded(Split(8, 8), Through(8, 8), Last(8, 2)), "1/2", 3, blocks=list)
    assert layout.border(0, 4) == Border(
        (
            BorderTensor(torch.float32, (4, 8), True),
            BorderTensor(torch.bool, (4, 8), False),
            BorderTensor(torch.int64, (4,), False),
            BorderTensor(torch.float32, (4, 8), False),
        ),
        keys=("x", "mask", "index", "scale"),
        single=False,
    )
    assert layout.border(1, 4) == Border(
        (BorderTensor(torch.float32, (4, 8), True), BorderTensor(torch.int64, (4,), False)), single=False
    )


@pytest.mark.parametrize("rows", [1, 3, 6, 8])
def test_shapes_follow_the_size_of_the_micro_batch(rows):
    layout = layout_of(lambda: mlp(8, 16, 4), "3")
    assert layout.border(0, rows).tensors == (BorderTensor(torch.float32, (rows, 16), True),)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3),
        (torch.ones(2), torch.zeros(2, dtype=torch.bool)),
        (torch.ones(2),),
        {"x": torch.ones(2), "mask": torch.zeros(2, dtype=torch.int32)},
    ],
)
def test_the_tensors_of_a_value_make_it_again(value):
    border = Border.of(value, "block 0 (Linear)")
    again = border.value(border.flat(value))
    assert type(again) is type(value)
    assert again.keys() == value.keys() if isinstance(value, dict) else len(again) == len(value)
    torch.testing.assert_close(again, value)


def test_other_shapes_than_those_of_the_border_are_refused():
    border = Border.of((torch.ones(2), torch.ones(3)), "block 0 (Linear)")
    for wrong in ((torch.ones(2), torch.ones(4)), (torch.ones(2).double(), torch.ones(3)), (torch.ones(2),)):
        with raising(UsageError, "between"):
            border.flat(wrong)


class Both(nn.Linear):
    """Gives what is no mapping or tuple of tensors."""

    def forward(self, x):
        return super().forward(x), None


class First(nn.Linear):
    def forward(self, both):
        return super().forward(both[0])


def test_an_output_that_cannot_cross_is_refused_at_a_border_only():
    def model():
        return nn.Sequential(nn.Linear(8, 8), Both(8, 8), First(8, 2))

    assert layout_of(model, "1").border(0, 4).single
    with raising(UsageError, "block 1"):
        layout_of(model, "2").border(0, 4)


class Reader(nn.Linear):
    """Reads the weight of another layer, which is none of its own."""

    def __init__(self, other, *, holds=False):
        super().__init__(8, 8)
        self.others = [other]
        if holds:
            self.other = other

    def forward(self, x):
        return super().forward(x) + x @ self.others[0].weight


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_that_reads_a_parameter_of_another_stage_is_refused(order):
    def model(*, holds=False):
        layer = nn.Linear(8, 8)
        blocks = layer, Reader(layer, holds=holds)
        return nn.Sequential(*(blocks[number] for number in order), nn.Linear(8, 2))

    with raising(
        UsageError, f"block {order.index(1)} (Reader) reads a parameter or a tensor of block {order.index(0)}"
    ):
        layout_of(model, "1").border(0, 4)
    layout_of(model, "2").border(0, 4)
    layout_of(lambda: model(holds=True), "1").border(0, 4)


def test_a_change_in_place_is_refused_at_a_border_only():
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))

    assert layout_of(model, "2").border(0, 4).single
    with raising(UsageError, "inplace=False"):
        layout_of(model, "1").border(0, 4)


def test_inputs_of_a_stage_that_a_later_block_changes_through_a_view_are_refused():
    behind = nn.Linear(8, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 2)
    with raising(UsageError, "block 2"):
        layout_of(lambda: nn.Sequential(*behind), "1").border(0, 4)


def test_inputs_of_the_model_that_the_first_stage_changes_are_refused():
    """A forward that is computed again would begin at changed inputs, and micro-batches are views of one batch."""
    with raising(UsageError, "block 0"):
        layout_of(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 2)), "2").border(0, 4)


class Reading(nn.Linear):
    """Computes with the weight of a layer that it does not hold."""

    def __init__(self, other):
        super().__init__(8, 8)
        self.others = [other]

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.others[0].weight)


def reading():
    first = nn.Linear(8, 8)
    return nn.Sequential(first, nn.ReLU(), Reading(first), nn.Linear(8, 2))


def test_a_block_may_read_a_parameter_of_another_stage_that_it_holds():
    def model():
        blocks = reading()
        blocks[2].other = blocks[0]
        return blocks

    assert layout_of(model, "1").border(0, 4).single


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("inner", [Clamped, lambda *sizes: nn.Sequential(nn.Tanh(), Clamped(*sizes))])
def test_a_forward_that_changes_a_parameter_in_place_is_refused(inner):
    with raising(UsageError, "weight"):
        layout_of(lambda: nn.Sequential(nn.Linear(8, 8), inner(8, 8), nn.Linear(8, 2)), "1").border(0, 4)


def test_an_embedding_that_limits_its_norms_is_refused():
    def model():
        return nn.Sequential(nn.Embedding(6, 8, max_norm=0.1), nn.Flatten(), nn.Linear(64, 2))

    data = dure.Data(torch.randint(0, 6, (6, 8)), torch.zeros(6, dtype=torch.int64))
    job = dure.Job(model, cross_entropy, data, name="small")
    layout = StageLayout(job, dure.GPipe(stages=2, cuts="2"), Replica(job.build()))
    with raising(UsageError, "max_norm"):
        layout.border(0, 4)


def test_a_block_that_raises_is_named():
    with raising(UsageError, "block 2"):
        layout_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(7, 2)), "2").border(0, 4)


def test_a_block_that_takes_no_micro_batch_is_named_before_a_run_begins(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    data = dure.Data(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64))
    job = dure.Job(model, cross_entropy, data, batch_size=4)
    with raising(UsageError, "block 1"):
        dure.train(job, on="virtual", workers=2, partition="gpipe:stages=2,micro=4", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_blocks_that_compute_something_else_than_the_model_are_refused():
    with pytest.raises(UsageError, match="the blocks in order have a loss of"):
        layout_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), blocks=lambda m: [m[0], m[2]])


def test_measuring_leaves_buffers_and_random_state():
    layout = layout_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
    before, state = layout.whole.buffers_flat(), torch.get_rng_state()
    layout.border(0, 4)
    assert torch.equal(before, layout.whole.buffers_flat())
    assert torch.equal(state, torch.get_rng_state())
    assert layout.whole.module.training


# ---- costs


def test_a_stage_keeps_a_tensor_once():
    """Backward of dense layers with ReLU reads the inputs of each layer, which the ReLU before it reads too."""
    layout = layout_of(lambda: mlp(8, 16, 16, 4), "5")
    assert layout.activations(0, 3).nbytes == 4 * 3 * (8 + 16 + 16)
    assert layout.activations(1, 3).nbytes == 4 * 3 * 16


def test_cuts_by_profile_balance_the_operations_of_the_stages():
    layout = layout_of(lambda: mlp(8, 64, 64, 64, 4), "profile")
    assert layout.bounds == (0, 4, 8)
    assert sum(layout.shares) == 1.0


def test_a_model_without_values_is_measured_too():
    job = vgg16()
    layout = StageLayout(job, dure.GPipe(stages=2), Replica(job.build()))
    (tensor,) = layout.border(0, 2).tensors
    assert (tensor.dtype, tensor.gradient) == (torch.float32, True)
    images = 2 * 3 * 224 * 224 * 4
    assert layout.activations(0, 2).nbytes > 10 * images


def test_attention_on_the_meta_device_keeps_its_inputs_and_output_and_no_weights():
    with torch.device("meta"):
        layer = DecoderLayer(Sizes(64, 4, 2, 128)).bfloat16()

        def kept(sequence):
            inputs = torch.empty(1, sequence, 64, dtype=torch.bfloat16, requires_grad=True)
            return sum(with_kept(layer, [], lambda: layer(inputs))[1].values())

        assert kept(2048) == pytest.approx(2 * kept(1024), rel=0.01)
        query = torch.empty(1, 4, 1024, 16, dtype=torch.bfloat16, requires_grad=True)
        key, value = torch.empty_like(query), torch.empty_like(query)
        _, found = with_kept(nn.Identity(), [], lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
        assert sorted(found.values()) == [query.nbytes] * 4


class Keeping(nn.Linear):
    """Keeps its outputs for a later block."""

    def forward(self, x):
        self.kept = super().forward(x)
        return torch.tanh(self.kept)


class Taking(nn.Linear):
    def __init__(self, keeping):
        super().__init__(8, 8)
        self.others = [keeping]

    def forward(self, x):
        return super().forward(x) + self.others[0].kept


def test_a_block_that_reads_a_tensor_of_another_stage_beside_its_inputs_is_refused():
    def model():
        first = Keeping(8, 8)
        return nn.Sequential(first, nn.Linear(8, 8), Taking(first), nn.Linear(8, 2))

    with raising(UsageError, "block 2 (Taking) reads a parameter or a tensor of block 0 (Keeping)"):
        layout_of(model, "1").border(0, 4)
    layout_of(model, "3").border(0, 4)

"""`imdb-bert` and `imdb-albert`: sizes, operations, blocks, and training through tokenizer and stages."""

from __future__ import annotations

import sys
from copy import deepcopy

import pytest
import torch
from support.archives import unpack
from support.reviews import invented
from support.runs import virtual
from support.wording import raising

from dure.errors import UsageError
from dure.job.job import load_job
from dure_jobs.data.wordpieces import PADDING, built_from, load_pieces
from dure_jobs.transformers import ReviewClassifier, base_shapes, blocks

SMALL = {"layers": 3, "hidden": 12, "heads": 3, "vocabulary": 120, "tokens": 10, "dropout": 0.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    unpack(folder, invented(20))
    return folder


def text(name, **options):
    return f"{name}:{','.join(f'{key}={value}' for key, value in (SMALL | options).items())}"


@pytest.mark.parametrize(("kind", "encoder"), [("bert", 108_310_272), ("albert", 11_683_584)])
def test_base_sizes_have_the_published_numbers_of_parameters(kind, encoder):
    """Without the two scores of this task. `tests` need no memory for them: they are on the meta device."""
    model = base_shapes(kind).model()
    scores = 768 * 2 + 2
    assert sum(each.numel() for each in model.parameters()) - scores == encoder
    assert {each.device.type for each in model.parameters()} == {"meta"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_the_operations_of_a_piece_are_those_of_twelve_layers(kind):
    """188.7 MFLOP forward at 512 pieces: 24 width^2 + 4 pieces width, twelve times. A backward has twice as many."""
    layers = 12 * (24 * 768**2 + 4 * 512 * 768)
    assert layers == pytest.approx(188.7e6, rel=1e-3)
    assert base_shapes(kind).flops_per_sample / 512 / 3 == pytest.approx(layers, rel=5e-3)


@pytest.mark.parametrize("name", ["imdb-bert", "imdb-albert"])
def test_the_blocks_are_hugging_faces_own_network(name, data):
    """Its forward pads and masks by itself."""
    job = load_job(text(name, tokens=20), data)
    model = job.build(0).eval()
    words, _ = job.train.batch(torch.arange(6))
    assert (words == PADDING).any()
    assert isinstance(model, ReviewClassifier)
    right = model.network(input_ids=words, attention_mask=(words != PADDING).long()).logits
    torch.testing.assert_close(model(words), right, rtol=1e-5, atol=1e-6)
    assert len(blocks(model)) == 5


def test_pieces_are_the_same_in_every_process():
    texts = ["unable able ability", "able cable", "b\u00e9b\u00e9 bebe"]
    tokenizer = built_from(texts, 60)
    assert tokenizer.encode("Able!").tokens == ["[CLS]", "able", "[UNK]", "[SEP]"]
    assert tokenizer.encode("cabley").tokens == ["[CLS]", "cable", "##y", "[SEP]"]
    ranked = [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    assert ranked[:4] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    assert ranked[-5:] == ["able", "bebe", "ability", "cable", "unable"]


def test_reviews_are_cut_padded_and_counted(data):
    loaded = load_pieces(data, vocabulary=120, tokens=5, reviews=7)
    words, labels = loaded.train.batch(torch.arange(7))
    assert words.shape == (7, 5)
    assert len(loaded.train) == len(labels) == 7
    assert words[:, 0].unique().tolist() == [2]
    with raising(UsageError, "reviews=50"):
        load_pieces(data, vocabulary=120, reviews=50)
    with raising(UsageError, "vocabulary=9"):
        load_pieces(data, vocabulary=9)


def test_alberts_gradient_is_the_sum_over_all_applications_of_its_layer(data):
    """Against the same network with a copy of the layer for each application."""
    job = load_job(text("imdb-albert"), data)
    model, (words, labels) = job.build(0).double(), job.train.batch(torch.arange(6))
    job.loss(model(words), labels).backward()
    first, *layers, last = blocks(model)
    copies = [deepcopy(layer) for layer in layers]
    value = first(words)
    for copy in copies:
        copy.zero_grad()
        value = copy(*value)
    job.loss(last(*value), labels).backward()
    for number, parameter in enumerate(layers[0].parameters()):
        total = sum(list(copy.parameters())[number].grad for copy in copies)
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-13)


def test_data_parallelism_sends_alberts_layer_once_however_often_it_is_applied(data):
    options = {"workers": 2, "steps": 2, "data": data, "batch_size": 8, "timing_only": True}
    sent = {
        (name, layers): virtual(text(name, layers=layers), "bsp collective", **options).summary["bytes_sent"]
        for name in ("imdb-bert", "imdb-albert")
        for layers in (2, 4)
    }
    assert sent["imdb-albert", 2] == sent["imdb-albert", 4]
    assert sent["imdb-bert", 2] < sent["imdb-bert", 4]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["imdb-bert", "imdb-albert"])
@pytest.mark.parametrize(
    "partition", ["tensor:ways=3", "gpipe:stages=2,micro=2", "gpipe:stages=2,micro=2+tensor:ways=2"]
)
def test_partitions_train_as_the_whole_model_does(name, partition, data):
    """ALBERT's layer is in both stages, and its gradients are summed."""
    options = {"steps": 4, "seed": 3, "dtype": "float64", "batch_size": 8, "optimizer": "sgd:lr=0.1", "data": data}
    whole = virtual(text(name), "bsp collective", workers=1, **options)
    workers = {"t": 3, "g": 2}[partition[0]] * (2 if "+" in partition else 1)
    split = virtual(text(name), f"bsp collective {partition}", workers=workers, **options)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)
    assert [row["loss"] for row in split.rows] == pytest.approx([row["loss"] for row in whole.rows], abs=1e-12)


def test_wrong_sizes_are_refused(data):
    with raising(UsageError, "hidden=13"):
        load_job(text("imdb-bert", hidden=13), data)
    with raising(UsageError, "pieces"):
        load_job(text("imdb-albert", tokens=2), data)


def test_a_missing_library_is_named(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # an import of it fails as if it were not installed
    with raising(UsageError, "dure[text]"):
        load_job(text("imdb-bert"), data)

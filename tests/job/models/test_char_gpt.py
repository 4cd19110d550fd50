"""The job `char-gpt`: sizes as published, no view of later characters, texts of users."""

from pathlib import Path

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.errors import DataError, StrategyError, UsageError
from dure.job.job import Job, load_job
from dure.job.models.char_gpt import decoder, next_accuracy, next_loss


def parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def small(**settings: object) -> Job:
    return load_job("char-gpt", **{"width": 8, "layers": 2, "heads": 2, "context": 6, **settings})


def size(vocabulary: int, width: int, layers: int, context: int, *, tied: bool) -> int:
    blocks = layers * (12 * width**2 + 13 * width)
    return blocks + ((2 - tied) * vocabulary + context + 2) * width


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_gpt_2(tied: bool) -> None:
    """The smallest model that was published has 124,439,808 parameters; embedding and head share their weight."""
    assert size(50257, 768, 12, 1024, tied=True) == 124_439_808
    assert parameters(decoder(30, 8, 3, 2, 5, tied=tied)) == size(30, 8, 3, 5, tied=tied)


def test_the_model_is_embedding_blocks_and_head() -> None:
    module = small().build()
    assert isinstance(module, nn.Sequential)
    assert [type(each).__name__ for each in module] == ["Embedding", "Block", "Block", "Head"]
    job = small(tied=True)
    module = job.build()
    assert module[3].scores.weight is module[0].characters.weight
    inputs, targets = job.train.batch(torch.tensor([0, 50]))
    job.loss(module(inputs), targets).backward()
    before = module[0].characters.weight.grad.clone()
    assert before.abs().sum(dim=1).min() > 0  # the head's part reaches characters that the batch does not contain


def test_initial_values_are_those_of_gpt_2() -> None:
    module = decoder(500, 64, 8, 4, 200)
    block = module[3]
    for weight, deviation in (
        (module[0].characters.weight, 0.02),
        (module[0].places.weight, 0.02),
        (module[9].scores.weight, 0.02),
        (block.attention.weight, 0.02),
        (block.rise.weight, 0.02),
        (block.project.weight, 0.005),
        (block.fall.weight, 0.005),
    ):
        assert weight.std().item() == pytest.approx(deviation, rel=0.05)
    assert not any(each.bias.any() for each in (block.attention, block.rise, block.project, block.fall))


def test_no_output_depends_on_a_later_character() -> None:
    torch.manual_seed(0)
    module = decoder(11, 8, 3, 2, 7).double()
    for part in module.parameters():
        nn.init.normal_(part, std=0.5)
    tokens = torch.randint(11, (2, 7))
    outputs = module(tokens)
    assert outputs.shape == (2, 7, 11)
    for place in range(7):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        difference = (module(changed) - outputs).abs().amax(dim=(0, 2))
        assert not difference[:place].any()
        assert (difference[place:] > 1e-9).all()  # and each depends on every earlier one
    torch.testing.assert_close(module(tokens[:, :4]), outputs[:, :4])


def test_loss_and_accuracy_count_characters() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = [cross_entropy(logits[b, t], targets[b, t]) for b in range(2) for t in range(3)]
    assert torch.allclose(next_loss(logits, targets), torch.stack(by_hand).mean())
    right = nn.functional.one_hot(targets, 5).float()
    right[0, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0])
    assert next_accuracy(right, targets) == pytest.approx(5 / 6)


def test_dropout_acts_in_training_only() -> None:
    module = small(dropout=0.5).build()
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))
    plain = small().build()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain(tokens), module(tokens))


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("äbc\n" * 50, encoding="utf-8")
    job = small(text=str(path))
    assert job.build()[3].scores.out_features == 4
    assert job.source == f"characters: 180 training and 20 test characters of 4 kinds, from {path}"
    inputs, targets = job.train.batch(torch.tensor([1]))
    assert inputs.tolist() == [[1, 2, 0, 3, 1, 2]]  # newline, b, c, ä
    assert targets.tolist() == [[2, 0, 3, 1, 2, 0]]
    run = dure.train(small(text=str(path)), on="virtual", workers=1, steps=60, eval_every=60, lr=0.03)
    assert run.history[-1]["accuracy"] > 0.95


def test_the_default_text_needs_no_file() -> None:
    job = load_job("char-gpt")
    assert "from the manual of Python 3." in job.source
    assert len(job.train.tokens) > 100_000
    assert parameters(job.build()) < 250_000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 10, "heads": 4}, "width=10"),
        ({"layers": 0}, "got 8,"),
        ({"dropout": 1.0}, "1.0"),
        ({"context": 10**6}, "context=1000000"),
    ],
)
def test_settings_that_cannot_be_are_explained(settings: dict[str, object], said: str) -> None:
    with raising(UsageError, said):
        small(**settings)


def test_texts_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    with raising(DataError, "absent.txt"):
        small(text=str(tmp_path / "absent.txt"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa" * 99)
    with raising(DataError, "cannot"):
        small(text=str(tmp_path / "binary"))


CUT = {"steps": 3, "batch_size": 6, "dtype": "float64", "optimizer": "sgd:lr=0.1", "eval_samples": 8}


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_pipeline_of_embedding_blocks_and_head_is_one_worker(tied: str) -> None:
    job = f"char-gpt:width=8,heads=2,layers=2,context=12,tied={tied}"
    pipeline = virtual(job, "bsp gpipe:stages=4,micro=3", workers=4, **CUT)
    assert (pipeline.params - virtual(job, "bsp", workers=1, **CUT).params).abs().max() < 1e-12


def test_a_shared_weight_needs_a_pipeline_that_flushes() -> None:
    with raising(StrategyError, "0.characters.weight"):
        virtual("char-gpt:width=8,layers=1,tied=true", "bsp pipedream:stages=2", workers=2, **CUT)


def test_a_forward_that_is_computed_again_drops_the_same_units() -> None:
    job, partition = "char-gpt:width=8,heads=2,layers=2,context=12,dropout=0.3", "bsp gpipe:stages=4,micro=3"
    once, twice = (virtual(job, text, workers=4, **CUT) for text in (partition, f"{partition},remat=true"))
    assert torch.equal(once.params, twice.params)
    assert (once.params - virtual(job, "bsp", workers=1, **CUT).params).abs().max() > 1e-6  # a stage draws its own

"""Windows of a text: those that the equations say."""

import numpy as np
import pytest
import torch
from support.wording import raising

from dure.errors import CheckpointError, UsageError
from dure.job.data.split import IID, Dirichlet, Replicated, Striped
from dure.job.data.stream import Stream

TOKENS = torch.arange(103) * 3 % 50


def check_windows(text, starts):
    inputs, targets = text.batch(starts)
    scale = text.block if text.windows == "contiguous" else 1
    for row, start in enumerate((starts * scale).tolist()):
        assert torch.equal(inputs[row], TOKENS[start : start + text.block])
        assert torch.equal(targets[row], TOKENS[start + 1 : start + 1 + text.block])


def test_random_windows_are_nanogpts():
    """ix = randint(len(data) - block_size, (batch_size,)); x = data[i : i + block], y = data[i + 1 : i + 1 + block]."""
    text = Stream(TOKENS, block=8)
    first, second = text.samplers(IID(), [300, 5], seed=1)
    starts = first.next()
    assert starts.unique().tolist() == list(range(103 - 8))
    check_windows(text, starts)
    assert first.next().tolist() != starts.tolist()
    assert second.next().tolist() != starts[:5].tolist()
    assert len(text) == 95


def test_striped_draws_are_those_of_one_worker():
    text = Stream(TOKENS, block=8)
    workers, (alone,) = text.samplers(Striped(), [2, 3, 4], seed=1), text.samplers(Striped(), [9], seed=1)
    for _ in range(3):
        assert torch.equal(torch.cat([each.next() for each in workers]), alone.next())
    assert workers[0].epoch == alone.epoch == 3 * 9 / 12


def test_contiguous_windows_come_once_an_epoch():
    text = Stream(TOKENS, block=8, windows="contiguous")
    (sampler,) = text.samplers(Replicated(), [4], seed=0)
    starts = torch.cat([sampler.next() for _ in range(3)])
    check_windows(text, starts)
    assert sorted(starts.tolist()) == list(range(12))
    assert text.steps(1.0, 4) == 3


def word_language_model(tokens, columns, block):
    """Batches of PyTorch's example: batchify, then get_batch; here batch first, without the shorter last one."""
    length = len(tokens) // columns
    source = tokens[: length * columns].view(columns, -1).t()
    for place in range(0, length - 1 - block + 1, block):
        yield source[place : place + block].t(), source[place + 1 : place + 1 + block].t()


@pytest.mark.parametrize("split", [IID(), Striped()])
def test_batchified_windows_are_the_word_language_models(split):
    text = Stream(TOKENS, block=5, windows="batchified")
    samplers = text.samplers(split, [1, 2], seed=0)
    expected = list(word_language_model(TOKENS, 3, 5))
    assert len(expected) == text.steps(1.0, 3) == 6
    for inputs, targets in [*expected, *expected[:2]]:  # and over again
        made = [text.batch(each.next()) for each in samplers]
        assert torch.equal(torch.cat([each[0] for each in made]), inputs)
        assert torch.equal(torch.cat([each[1] for each in made]), targets)
    assert samplers[0].epoch == 8 / 6


def test_whole_batchified_gives_every_worker_all_columns():
    text = Stream(TOKENS, block=5, windows="batchified")
    first, second = text.samplers(Replicated(), [2, 2], seed=0)
    assert first.next().tolist() == second.next().tolist() == [0, 51]


@pytest.mark.parametrize("windows", ["random", "contiguous", "batchified"])
def test_a_sampler_goes_on_where_it_was_saved(windows):
    text = Stream(TOKENS, block=4, windows=windows)
    whole, resumed = (text.samplers(IID(), [2, 2], seed=3)[1] for _ in range(2))
    for _ in range(5):
        whole.next()
    resumed.restore(whole.state())
    following = [whole.next().tolist() for _ in range(4)]
    assert [resumed.next().tolist() for _ in range(4)] == following
    moved = text.samplers(IID(), [2, 2], seed=3)[1]
    moved.number = 5
    assert [moved.next().tolist() for _ in range(4)] == following
    assert moved.number == whole.number == 9
    with raising(CheckpointError, "differ"):
        Stream(TOKENS[:90], 4, windows).samplers(IID(), [2, 2], seed=3)[1].restore(whole.state())


def test_a_file_of_tokens_is_read_where_it_lies(tmp_path):
    TOKENS.numpy().astype(np.uint16).tofile(tmp_path / "train.bin")
    text = Stream(np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r"), block=8)
    assert isinstance(text.tokens, np.memmap)
    check_windows(text, torch.tensor([0, 94]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": TOKENS.float()}, "103"),
        ({"tokens": TOKENS.view(1, -1)}, "1"),
        ({"tokens": "text"}, "tensor"),
        ({"tokens": TOKENS[:8]}, "need 9,"),
        ({"block": 0}, "least 1,"),
        ({"windows": "sliding"}, "sliding"),
    ],
)
def test_what_is_no_text_is_refused(given, said):
    with raising(UsageError, said):
        Stream(**{"tokens": TOKENS, "block": 8, **given})


def test_splits_that_make_no_sense_are_refused():
    with raising(UsageError, "random"):
        Stream(TOKENS, 8).samplers(Dirichlet(1.0), [2, 2], seed=0)
    with raising(UsageError, "labels"):
        Stream(TOKENS, 8, "contiguous").samplers(Dirichlet(1.0), [2, 2], seed=0)
    with raising(UsageError, "in 30"):
        Stream(TOKENS, 8, "batchified").samplers(IID(), [15, 15], seed=0)

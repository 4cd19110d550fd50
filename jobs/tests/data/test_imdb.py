"""The layout of the published film reviews: tiny sets made here, whole and damaged; the real one where there is any."""

import os
import tarfile
from pathlib import Path

import pytest
import torch
from support.archives import pack, unpack
from support.reviews import ARCHIVE, reviews
from support.wording import raising

from dure.errors import DataError, UsageError
from dure_jobs.data.imdb import load_imdb

NOWHERE = ("http://127.0.0.1:9",)


def placed(root: Path, files: dict[str, str], packed: bool) -> None:
    if packed:
        pack(root / ARCHIVE, files)
    else:
        unpack(root, files)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("under", ["imdb", "."])
def test_takes_the_reviews_that_are_there(tmp_path: Path, packed: bool, under: str) -> None:
    placed(tmp_path / under, reviews(), packed)
    loaded = load_imdb(tmp_path, NOWHERE, tokens=6)
    assert loaded.train.inputs.shape == (6, 6)
    assert loaded.train.inputs.dtype == loaded.train.targets.dtype == torch.int64
    assert loaded.train.targets.tolist() == [0, 1, 0, 1, 0, 1]  # by number: 0, 0, 1, 1, 2, 10
    assert loaded.test.targets.tolist() == [0, 1]
    assert "6 of 25,000 training and 2 of 25,000 test reviews" in loaded.source


def test_words_are_numbered_by_how_frequent_they_are(tmp_path: Path) -> None:
    """film 5, fine 4, a 3, dull 3; then 10 twice, and what is there once in alphabetical order."""
    unpack(tmp_path, reviews())
    loaded = load_imdb(tmp_path, NOWHERE, tokens=6)
    film, fine, a, dull, ten, cafe, case, cast, dont, it, miss, must, naive, plot, snake = range(2, 17)
    train = loaded.train.inputs.tolist()
    assert train[0] == [a, dull, film, 0, 0, 0]
    assert train[1] == [a, fine, film, dont, miss, it]
    assert train[2] == [dull, plot, dull, cast, 0, 0]
    assert train[3] == [fine, fine, fine, a, must, 0]
    assert train[4] == [cafe, naive, snake, case, ten, ten]
    assert train[5] == [film, film, film, 0, 0, 0]
    assert loaded.test.inputs.tolist() == [[0] * 6, [1, 1, fine, 0, 0, 0]]


def test_words_beyond_the_vocabulary_share_a_row_and_those_beyond_the_length_are_cut(tmp_path: Path) -> None:
    unpack(tmp_path, reviews())
    loaded = load_imdb(tmp_path, NOWHERE, vocabulary=4, tokens=3)
    assert loaded.train.inputs.tolist() == [[1, 1, 2], [1, 3, 2], [1, 1, 1], [3, 3, 3], [1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(("given", "said"), [({"vocabulary": 2}, "least 3,"), ({"tokens": 0}, "got 0")])
def test_what_holds_no_word_is_refused(tmp_path: Path, given: dict[str, int], said: str) -> None:
    with raising(UsageError, said):
        load_imdb(tmp_path, NOWHERE, **given)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train/pos/0_3.txt", "x", "train/pos/0_3.txt"),
        ("test/neg/9_5.txt", "x", "of 5"),
        ("train/neg/seven.txt", "x", "seven.txt"),
        ("train/neg/5_1.txt", "", "of 0"),
        ("train/neg/5_1.txt", "x" * 100_001, "of 100,001"),
        ("train/neg/5_1.txt", "\udcff", "UTF-8"),
    ],
)
def test_damaged_reviews_are_refused(tmp_path: Path, packed: bool, name: str, text: str, said: str) -> None:
    files = {**reviews(), f"aclImdb/{name}": text}
    if text == "\udcff":
        files[f"aclImdb/{name}"] = Broken(text)
    placed(tmp_path, files, packed)
    with raising(DataError, said) as caught:
        load_imdb(tmp_path, NOWHERE)
    assert f"published {ARCHIVE}" in str(caught.value)


class Broken(str):
    def encode(self) -> bytes:
        return b"\xff\xfe"


@pytest.mark.parametrize("packed", [True, False])
def test_a_half_without_a_kind_is_refused(tmp_path: Path, packed: bool) -> None:
    placed(tmp_path, {name: text for name, text in reviews().items() if "test/neg" not in name}, packed)
    with raising(DataError, "test/neg"):
        load_imdb(tmp_path, NOWHERE)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("../escape.txt", tarfile.REGTYPE, "folder"),
        ("/etc/escape", tarfile.REGTYPE, "folder"),
        ("aclImdb/train/pos/7_7.txt", tarfile.SYMTYPE, "neither"),
        ("aclImdb/train/pos/7_7.txt", tarfile.LNKTYPE, "neither"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path: Path, name: str, kind: bytes, said: str) -> None:
    extra = tarfile.TarInfo(name)
    extra.type, extra.linkname = kind, "/etc/passwd"
    pack(tmp_path / ARCHIVE, reviews(), extra)
    with raising(DataError, said):
        load_imdb(tmp_path, NOWHERE)


@pytest.mark.parametrize("keep", [0, 5, 200, -30, -4])
def test_cut_archives_are_refused(tmp_path: Path, keep: int) -> None:
    path = pack(tmp_path / ARCHIVE, reviews())
    path.write_bytes(path.read_bytes()[:keep])
    with raising(DataError, "v1.tar.gz"):
        load_imdb(tmp_path, NOWHERE)


def test_offline_the_error_says_which_file_goes_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_imdb(tmp_path, NOWHERE)
    for part in (ARCHIVE, "the folder aclImdb", str(tmp_path / "imdb"), "127.0.0.1:9"):
        assert part in str(caught.value)


@pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with IMDB reviews")
def test_the_real_set() -> None:
    loaded = load_imdb(Path(os.environ["DURE_DATA"]), NOWHERE)
    assert len(loaded.train) in range(5_000, 25_001)
    assert loaded.train.targets.double().mean().item() == pytest.approx(0.5)
    assert int(loaded.train.inputs.max()) == 19_999
    unknown = [(data.inputs == 1).double().mean().item() for data in (loaded.train, loaded.test)]
    assert unknown[0] < 0.05
    assert unknown[0] < unknown[1] < 0.1

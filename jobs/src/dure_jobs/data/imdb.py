"""Film reviews from IMDB in their published layout.

Maas et al., "Learning Word Vectors for Sentiment Analysis", ACL 2011. The archive `aclImdb_v1.tar.gz` holds one review
per file. The file's name has a number and the reviewer's stars:

    aclImdb/train/pos/127_7.txt    7 to 10 stars, label 1         12,500 of each, and as many under aclImdb/test
    aclImdb/train/neg/127_4.txt    1 to 4 stars, label 0

Nothing is unpacked to disk, and other files (`unsup`, bags of words) are ignored. A part of the set is accepted. In
`load_imdb` a review becomes a vector of rows of the vocabulary:

    row 0 of the vocabulary   padding, after the last word of a short review
    row 1                     all words that have no row of their own
    row 2, 3, ...             words of the training reviews, the most frequent first

A word is a run of letters and digits in lower case, including a part after an apostrophe: "don't" is one word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dure.errors import DataError, UsageError
from dure.job.data.dataset import Data, Loaded
from dure_jobs.data.archive import files
from dure_jobs.data.download import Published, fetch
from dure_jobs.data.location import find

HOMES = ("https://ai.stanford.edu/~amaas/data/sentiment",)
ARCHIVE = "aclImdb_v1.tar.gz"
NBYTES = 84_125_825
SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
FOLDER = "aclImdb"
PUBLISHED = 25_000
"""Reviews in each half of the published set."""
MOST_BYTES, MOST_REVIEW_BYTES = 100_000_000, 100_000
"""Limits of a file and of a review. The largest published file has 41 MB, the longest review 14 kB."""

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
IntArray = npt.NDArray[np.int64]
T = TypeVar("T")

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_PLACE = re.compile(rf"(?:\./)?{FOLDER}/(train|test)/(neg|pos)/([^/]+)")
_NAME = re.compile(r"([0-9]{1,9})_(10|[0-9])\.txt")
_STARS = {"neg": range(1, 5), "pos": range(7, 11)}


@dataclass(slots=True)
class Half(Generic[T]):
    """Reviews of one half: (number, label), and each text in the form that the reader has converted it to."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    texts: list[T] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def labels(self) -> list[int]:
        return [label for _, label in self.keys]

    def in_order(self) -> Half[T]:
        """Sort by number: the order is then independent of the file system, and good and bad reviews alternate."""
        order = sorted(range(len(self)), key=self.keys.__getitem__)
        return Half([self.keys[i] for i in order], [self.texts[i] for i in order])


def load_imdb(root: Path, homes: tuple[str, ...] = HOMES, *, vocabulary: int = 20_000, tokens: int = 200) -> Loaded:
    """Load each review's first `tokens` words as rows of the vocabulary, int64 (count, tokens), and labels as int64.

    `vocabulary` is the number of rows. The folder `aclImdb` or the archive is searched in `root/imdb` and `root`. If
    neither is found, the archive is downloaded to `root/imdb`. Raises `DataError` for a damaged or unsafe file, or a
    failed download.
    """
    if vocabulary <= FIRST_WORD:
        raise UsageError(f"vocabulary counts padding and unknown words too: give at least 3, got {vocabulary}.")
    if tokens < 1:
        raise UsageError(f"tokens counts the words that a review is cut to and must be >= 1, got {tokens}.")
    seen: defaultdict[str, int] = defaultdict(count().__next__)
    path, train, test = read_imdb(root, homes, lambda text: [seen[word] for word in words(text)[:tokens]])
    rows = _rows(train.texts, seen, vocabulary)
    return Loaded(_data(train, rows, tokens), _data(test, rows, tokens), source_of(path, len(train), len(test)))


def read_imdb(root: Path, homes: tuple[str, ...], convert: Callable[[str], T]) -> tuple[Path, Half[T], Half[T]]:
    """Read the set that `load_imdb` finds: its path, the training reviews and the test reviews, each half in order.

    `convert` is applied to each text. Raises `DataError` as `load_imdb` does.
    """
    path = _locate(root, homes)
    halves = _read(path, convert)
    for name, half in halves.items():
        if set(half.labels) != {0, 1}:
            held = ", ".join(f"{half.labels.count(label)} under {name}/{kind}" for label, kind in enumerate(_STARS))
            raise DataError(f"{path} needs reviews of both kinds in both halves; it holds {held}. {_again(path)}")
    return path, halves["train"].in_order(), halves["test"].in_order()


def source_of(path: Path, train: int, test: int) -> str:
    """The number of reviews of each half and their place, in words."""
    return f"IMDB: {train:,} of {PUBLISHED:,} training and {test:,} of {PUBLISHED:,} test reviews, from {path}"


def words(text: str) -> list[str]:
    """The words of a text.

    >>> words("Don't miss it!<br /><br />10/10")
    ["don't", 'miss', 'it', '10', '10']
    """
    return _WORD.findall(text.lower().replace("<br />", " "))


def _locate(root: Path, homes: tuple[str, ...]) -> Path:
    found = find((root / "imdb", root), (FOLDER, ARCHIVE))
    if found is not None:
        return found
    try:
        return fetch(Published(ARCHIVE, NBYTES, SHA256, homes), root / "imdb")
    except DataError as error:
        raise DataError(
            f"the IMDB reviews are not under {root} and {error}. Without a network, put {ARCHIVE}, or the folder "
            f"{FOLDER} out of it, into {root / 'imdb'}, or name the folder above imdb/ with --data or DURE_DATA."
        ) from error


def _read(path: Path, convert: Callable[[str], T]) -> dict[str, Half[T]]:
    halves: dict[str, Half[T]] = {"train": Half(), "test": Half()}
    for name, body in _in_folder(path) if path.is_dir() else _in_archive(path):
        place = _PLACE.fullmatch(name)
        assert place is not None
        half, kind, file = place.groups()
        number = _number(name, kind, file, path)
        halves[half].keys.append((number, int(kind == "pos")))
        halves[half].texts.append(convert(_text(name, body, path)))
    return halves


def _in_archive(path: Path) -> Iterable[tuple[str, bytes]]:
    return files(path, lambda name: _PLACE.fullmatch(name) is not None, most=MOST_BYTES, again=_again(path))


def _in_folder(folder: Path) -> Iterable[tuple[str, bytes]]:
    for half in ("train", "test"):
        for kind in _STARS:
            for file in sorted((folder / half / kind).glob("*")):
                yield f"{FOLDER}/{half}/{kind}/{file.name}", file.read_bytes()


def _number(name: str, kind: str, file: str, path: Path) -> int:
    parts = _NAME.fullmatch(file)
    if parts is None:
        raise DataError(f"{path} holds {name}, where names like 127_7.txt are right. {_again(path)}")
    if int(parts[2]) not in _STARS[kind]:
        right = f"{_STARS[kind][0]} to {_STARS[kind][-1]}"
        raise DataError(f"{path} holds {name}, of {parts[2]} stars, where {right} are right. {_again(path)}")
    return int(parts[1])


def _text(name: str, body: bytes, path: Path) -> str:
    if not 0 < len(body) <= MOST_REVIEW_BYTES:
        limits = f"1 to {MOST_REVIEW_BYTES:,} bytes"
        raise DataError(f"{path} holds {name} of {len(body):,} bytes, where {limits} are right. {_again(path)}")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} holds {name}, which is no UTF-8 text: {error}. {_again(path)}") from error


def _rows(texts: Iterable[Sequence[int]], seen: dict[str, int], vocabulary: int) -> IntArray:
    """The vocabulary row of each word number. Words of equal frequency in `texts` are ordered alphabetically."""
    counts = np.bincount(np.fromiter(chain.from_iterable(texts), dtype=np.int64), minlength=len(seen))
    known = [word for word, number in seen.items() if counts[number]]
    ranked = sorted(known, key=lambda word: (-counts[seen[word]], word))
    rows = np.full(len(seen), UNKNOWN, dtype=np.int64)
    for row, word in enumerate(ranked[: vocabulary - FIRST_WORD], FIRST_WORD):
        rows[seen[word]] = row
    return rows


def _data(half: Half[list[int]], rows: IntArray, tokens: int) -> Data:
    inputs = np.full((len(half), tokens), PADDING, dtype=np.int64)
    for line, text in zip(inputs, half.texts, strict=True):
        line[: len(text)] = rows[text]
    return Data(torch.from_numpy(inputs), torch.tensor(half.labels))


def _again(path: Path) -> str:
    return f"Replace {path} with the published {ARCHIVE}, or delete it to have that downloaded."

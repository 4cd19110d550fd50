"""Texts as vectors of characters, for language models.

Without a file the text is Python's own manual (`pydoc_data.topics`), which every Python brings along: about 700,000
characters, which differ a little between versions of Python.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from dure.errors import DataError, UsageError
from dure.job.data.stream import Stream

TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Characters:
    """Windows of a text; tokens number the characters that occur in it, in the order of their code points."""

    train: Stream
    test: Stream
    vocabulary: int
    source: str


def load_characters(path: Path | None, block: int) -> Characters:
    """Read the UTF-8 text `path`, or the default text; the last tenth is for tests. A window has `block` characters.

    Raises `DataError` for a file that cannot be read, `UsageError` for a text that is too short for two windows.
    """
    text = _manual() if path is None else _read(path)
    origin = f"the manual of Python {platform.python_version()}" if path is None else str(path)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    letters, tokens = np.unique(codes, return_inverse=True)
    test = int(TEST_SHARE * len(tokens))
    if test <= block:
        raise UsageError(
            f"{origin} has {len(tokens):,} characters, a tenth of which is for tests: no window of context={block} and "
            "the character after it fit. Use a smaller context or a longer text."
        )
    train = Stream(tokens[:-test], block)
    counts = f"{len(train.tokens):,} training and {test:,} test characters of {len(letters)} kinds"
    return Characters(train, Stream(tokens[-test:], block), len(letters), f"characters: {counts}, from {origin}")


def _manual() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the text {path} cannot be read: {error}. Name a text file in UTF-8.") from error

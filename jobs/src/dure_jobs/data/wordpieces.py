"""Film reviews as numbers of word pieces, by a tokenizer built from the training reviews.

The tokenizer is Hugging Face's WordPiece with BERT's normalization (lower case, no accents) and splitting. Its pieces
are, in this order: four special ones, the characters of the training reviews, alone and as continuations ("##a"), and
the most frequent words, those of equal frequency in alphabetical order. So an unknown word becomes a known beginning
and characters. The library's own training of pieces depends on the order of a hash table, and gives other pieces in
each process.

    [CLS] piece piece ... [SEP] [PAD] [PAD] ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dure.errors import UsageError
from dure.job.data.dataset import Data, Loaded
from dure_jobs.data.imdb import HOMES, Half, read_imdb, source_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
SPECIAL = (PAD, UNKNOWN, BEGIN, END)
PADDING = SPECIAL.index(PAD)
CONTINUES = "##"


def load_pieces(
    root: Path, homes: tuple[str, ...] = HOMES, *, vocabulary: int = 4000, tokens: int = 64, reviews: int = 0
) -> Loaded:
    """Load each review's first `tokens` pieces, int64 (count, tokens), and labels as int64.

    `vocabulary` is the most pieces. `reviews` is the number of training reviews that are used, 0 for all; the tokenizer
    is built from all. Raises `DataError` as `load_imdb` does, and `UsageError` without the library.
    """
    if tokens < 3:
        raise UsageError(f"tokens counts pieces, [CLS] and [SEP] among them, and must be >= 3, got {tokens}.")
    path, train, test = read_imdb(root, homes, lambda text: text.replace("<br />", " "))
    if not 0 <= reviews <= len(train):
        raise UsageError(f"reviews={reviews} of {len(train)} training reviews: give a number from 1 on, or 0 for all.")
    tokenizer = built_from(train.texts, vocabulary)
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(pad_id=PADDING, pad_token=PAD, length=tokens)
    used = Half(train.keys[: reviews or None], train.texts[: reviews or None])
    source = source_of(path, len(used), len(test))
    return Loaded(_data(tokenizer, used), _data(tokenizer, test), source)


def built_from(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """A tokenizer with at most `vocabulary` pieces, those of `texts`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    counts = Counter[str]()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted({character for word in counts for character in word})
    known = [*SPECIAL, *characters, *(CONTINUES + each for each in characters)]
    if vocabulary < len(known):
        raise UsageError(
            f"vocabulary={vocabulary} is less than the {len(known)} special pieces and characters: give more, such as "
            f"{4 * len(known)}."
        )
    ranked = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    pieces = {piece: number for number, piece in enumerate([*known, *ranked][:vocabulary])}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=UNKNOWN, continuing_subword_prefix=CONTINUES))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    ends = [(each, pieces[each]) for each in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=ends)
    return tokenizer


def _data(tokenizer: Tokenizer, half: Half[str]) -> Data:
    rows = [each.ids for each in tokenizer.encode_batch(half.texts)]
    return Data(torch.tensor(rows, dtype=torch.int64), torch.tensor(half.labels))

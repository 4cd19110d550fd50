"""Tiny sets of film reviews in the layout in which the large one is published."""

from __future__ import annotations

import random

ARCHIVE = "aclImdb_v1.tar.gz"


def reviews() -> dict[str, str]:
    """Files by name: three training reviews of either kind and one test review of either, and what is no review."""
    return {
        "aclImdb/README": "Large Movie Review Dataset v1.0",
        "aclImdb/train/pos/0_9.txt": "A fine film. Don't miss it!",
        "aclImdb/train/pos/1_7.txt": "Fine, fine, FINE.<br /><br />A must",
        "aclImdb/train/pos/10_10.txt": "film film film",
        "aclImdb/train/neg/0_1.txt": "A dull film",
        "aclImdb/train/neg/1_4.txt": "dull plot; dull cast",
        "aclImdb/train/neg/2_3.txt": "Caf\u00e9 na\u00efve snake_case 10/10",
        "aclImdb/train/unsup/0_0.txt": "unlabeled unlabeled unlabeled unlabeled",
        "aclImdb/test/pos/0_8.txt": "unseen and fine",
        "aclImdb/test/neg/0_2.txt": "...",
    }


def invented(count: int) -> dict[str, str]:
    """`count` reviews of twelve words in each folder. Each kind has 30 words of its own, and 30 are anybody's."""
    draw = random.Random(3)
    files = {}
    for half in ("train", "test"):
        for kind, stars in (("pos", 9), ("neg", 2)):
            for number in range(count):
                text = [f"{draw.choice((kind, 'any'))}{draw.randrange(30)}" for _ in range(12)]
                files[f"aclImdb/{half}/{kind}/{number}_{stars}.txt"] = " ".join(text)
    return files

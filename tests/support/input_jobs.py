"""One job whose inputs and targets are given in every form that a job takes, and language models on a stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from dure.job.data.dataset import Data, Samples
from dure.job.data.stream import Stream
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

SAMPLES, TOKENS, WORDS, CLASSES = 96, 7, 11, 3


class Reader(nn.Module):
    """Mean of the words' rows where the mask is 1, then one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = self.table(ids) * mask.unsqueeze(-1)
        scores: Tensor = self.head(rows.sum(1) / mask.sum(1, keepdim=True))
        return scores


class OfOneTensor(Reader):
    """The same of ids and mask side by side in one tensor."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs[:, 0], inputs[:, 1])


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
    return ids, (torch.arange(TOKENS) < lengths).long(), ids.sum(1) % CLASSES


def made(data: object, model: type[nn.Module] = Reader, name: str = "") -> Job:
    return Job(
        model, cross_entropy, data, data, batch_size=8, accuracy=right, name=name,
        optimizer=OptimizerSpec("momentum", lr=0.1),
    )  # fmt: skip


def right(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


def tensor() -> Job:
    ids, mask, targets = drawn()
    return made(Data(torch.stack([ids, mask], dim=1), targets), OfOneTensor)


def several() -> Job:
    ids, mask, targets = drawn()
    return made(Data((ids, mask), targets))


def named() -> Job:
    ids, mask, targets = drawn()
    return made(Data({"mask": mask, "ids": ids}, targets))


class Reviews(Dataset):
    """Samples of unequal length."""

    def __init__(self) -> None:
        self.ids, self.mask, labels = drawn()
        self.targets = labels.tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.ids[index][self.mask[index] == 1].tolist(), self.targets[index]


def padded(samples: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    ids, mask = torch.zeros(2, len(samples), TOKENS, dtype=torch.int64).unbind()
    for row, (words, _) in enumerate(samples):
        ids[row, : len(words)] = torch.tensor(words)
        mask[row, : len(words)] = 1
    return {"ids": ids, "mask": mask}, torch.tensor([label for _, label in samples])


def dataset() -> Job:
    return made(Samples(Reviews(), padded))


FORMS = {"tensor": tensor, "several": several, "named": named, "dataset": dataset}


# ---- language models


class Bigrams(nn.Module):
    """(batch, block) tokens to (batch, block, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.table(tokens)
        return scores


def of_each_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def text() -> Tensor:
    return torch.arange(200).square() % WORDS


def model(windows: str = "random") -> Job:
    return Job(
        Bigrams, of_each_token, Stream(text(), 8, windows), Stream(text()[:50], 8), batch_size=4,
        optimizer=OptimizerSpec(lr=0.5), name=windows,
    )  # fmt: skip


def batchified() -> Job:
    return model("batchified")


def contiguous() -> Job:
    return model("contiguous")

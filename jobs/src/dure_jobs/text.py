"""`embedding-text`: classifies film reviews as good or bad. Its gradients are sparse."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.errors import UsageError
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure_jobs.data.imdb import PADDING, load_imdb


def embedding_text(
    data_root: Path, vocabulary: int = 20_000, dim: int = 64, hidden: int = 128, tokens: int = 200
) -> Job:
    """A job that embeds a review's first `tokens` words, averages the embeddings, and applies two dense layers.

    The table of embeddings has `vocabulary` rows of `dim` numbers. A batch of 32 reads about a twelfth of the rows.
    """
    if min(dim, hidden) < 1:
        raise UsageError(f"dim and hidden count units and must be >= 1, got {dim} and {hidden}.")
    data = load_imdb(data_root, vocabulary=vocabulary, tokens=tokens)
    return Job(
        name="embedding-text",
        model=partial(BagOfWords, vocabulary, dim, hidden),
        loss=cross_entropy,
        train=data.train,
        test=data.test,
        batch_size=32,
        optimizer=OptimizerSpec("adagrad", lr=0.1),  # plain SGD needs thousands of steps for rare words
        steps=250,
        accuracy=top1,
        source=data.source,
        rows=words_read,
    )


def words_read(inputs: Tensor) -> dict[str, Tensor]:
    """Rows of the embedding table that a batch reads: the words of its reviews."""
    return {"bag.weight": inputs[inputs != PADDING]}


class BagOfWords(nn.Module):
    """Mean of embeddings and two dense layers: inputs (batch, tokens), outputs (batch, 2). Padding is not averaged."""

    def __init__(self, vocabulary: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, dim, mode="mean", padding_idx=PADDING, sparse=True)
        self.classifier = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.bag(inputs))
        return scores

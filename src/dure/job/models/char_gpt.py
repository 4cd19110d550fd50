"""`char-gpt`: a small decoder of GPT-2's form that predicts the next character of a text.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; sizes and initial values as published with
it: layer norms before each part, weights from N(0, 0.02^2), and those that end a residual branch from
N(0, 0.02^2 / (2 layers)). With V characters, context C, width W and L blocks it has

    V W + C W  +  L (12 W^2 + 13 W)  +  2 W + V W        parameters; with tied=True the last V W are the first

    | child of the `nn.Sequential` | module      | outputs                        |
    |------------------------------|-------------|--------------------------------|
    | 0                            | `Embedding` | (batch, context, width)        |
    | 1 to L                       | `Block`     | (batch, context, width)        |
    | L + 1                        | `Head`      | logits (batch, context, V)     |
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from dure.errors import UsageError
from dure.job.data.loaders import load_characters
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec


def char_gpt(
    text: str = "",
    width: int = 64,
    layers: int = 4,
    heads: int = 4,
    context: int = 64,
    dropout: float = 0.0,
    tied: bool = False,
) -> Job:
    """A job on the characters of the file `text`, or of Python's manual; `accuracy` is the share of right characters.

    `dropout` acts on the embeddings and at the end of each residual branch. With `tied`, embedding and head share their
    weight; of pipelines, only those that flush can train that over several stages.
    """
    if min(width, layers, heads, context) < 1:
        raise UsageError(f"width, layers, heads and context must be >= 1, got {width}, {layers}, {heads}, {context}.")
    if width % heads:
        raise UsageError(f"width={width} cannot be divided among heads={heads}: write a multiple, width={heads * 16}.")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is a probability from 0 to below 1, got {dropout}.")
    data = load_characters(Path(text) if text else None, context)
    return Job(
        name="char-gpt",
        model=partial(decoder, data.vocabulary, width, layers, heads, context, dropout=dropout, tied=tied),
        loss=next_loss,
        train=data.train,
        test=data.test,
        batch_size=16,
        optimizer=OptimizerSpec("adamw", lr=0.001),
        steps=1000,
        accuracy=next_accuracy,
        source=data.source,
    )


def decoder(
    vocabulary: int, width: int, layers: int, heads: int, context: int, *, dropout: float = 0.0, tied: bool = False
) -> nn.Sequential:
    """The network: tokens (batch, length) to logits (batch, length, vocabulary), for lengths up to `context`."""
    embedding, head = Embedding(vocabulary, context, width, dropout), Head(width, vocabulary)
    blocks = [Block(width, heads, dropout) for _ in range(layers)]
    network = nn.Sequential(embedding, *blocks, head)
    for part in network.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for block in blocks:
        for last in (block.project, block.fall):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
    if tied:
        head.scores.weight = embedding.characters.weight
    return network


class Embedding(nn.Module):
    """The sum of embeddings of a character and of its place in the window."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        summed: Tensor = self.dropout(self.characters(tokens) + self.places.weight[: tokens.shape[1]])
        return summed


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.project(self._attended(self.norm_1(x))))
        summed: Tensor = x + self.dropout(self.fall(gelu(self.rise(self.norm_2(x)), approximate="tanh")))
        return summed

    def _attended(self, x: Tensor) -> Tensor:
        """The values of all earlier characters and the own one, weighted for each head."""
        mixed = self.attention(x)  # a worker that shares the layer has some of the heads, and all positions
        split = (*mixed.shape[:2], -1, x.shape[2] // self.heads)
        query, key, value = (each.view(split).transpose(1, 2) for each in mixed.chunk(3, dim=2))
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).flatten(2)


class Head(nn.Module):
    """A layer norm and the logits of the next character."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.scores(self.norm(x))
        return logits


def next_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of a character, in nats."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_accuracy(logits: Tensor, targets: Tensor) -> float:
    """The share of characters to which the highest logit belongs."""
    return float((logits.argmax(dim=2) == targets).double().mean())

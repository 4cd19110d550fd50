"""A small GPT over characters, of the shape of nanoGPT's, and a text that every Python brings along.

Shared by the scripts that measure a language model, such as `attach_vs_ddp.py`.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from dure.job.data.dataset import Data


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.rise, self.fall = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (each.view(split).transpose(1, 2) for each in self.attention(self.norm_1(x)).chunk(3, 2))
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        return x + self.fall(gelu(self.rise(self.norm_2(x))))


class GPT(nn.Module):
    """Logits (batch, length, vocabulary) of the next character; embedding and head share their weight."""

    def __init__(self, vocabulary: int, *, layers: int = 4, heads: int = 4, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("project.weight", "fall.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of a character, in nats."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> tuple[Tensor, int]:
    """Python's own manual as character numbers, and how many characters there are."""
    manual = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(manual))
    number = {letter: index for index, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in manual]), len(letters)


def windows(characters: Tensor, length: int) -> Data:
    """Consecutive pieces of `length`, and the same one character later."""
    count = (len(characters) - 1) // length
    return Data(
        characters[: count * length].view(count, length), characters[1 : count * length + 1].view(count, length)
    )

"""Transformers as shapes without values: BERT, ALBERT, and decoders of the forms of GPT-2 and of Llama.

    | job                     | model                                                          | samples              |
    |-------------------------|----------------------------------------------------------------|----------------------|
    | `bert-base`, `-large`   | Devlin et al., BERT, NAACL 2019, with both heads of            | `sequence=128` words |
    |                         | pretraining; 30,522 words                                      |                      |
    | `albert-base`           | Lan et al., ALBERT, ICLR 2020: one layer, 12 times; 30,000     | `sequence=128` words |
    | `transformer`           | a decoder: `layers=12`, `hidden=768`, `heads=12`, `kv` of them | `sequence=1024`      |
    |                         | with keys of their own, `ffn`, `vocab=50257`, `form=gpt`       | words                |

A decoder of the form `gpt` has learned places, layer norms, biases, and a perceptron with GELU. Its embedding and head
share their weight (Radford et al., 2019). One of the form `llama` has rotated queries and keys, root-mean-square norms,
no biases, a perceptron with a gate, and a head of its own (Touvron et al., 2023).

Each model is an `nn.Sequential` of embeddings, layers and head. Dropout is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

from dure.errors import UsageError
from dure.job.job import Job
from dure.job.models.char_gpt import next_loss
from dure.job.shapes.shape_job import Shapes

FORMS = ("gpt", "llama")


class Sizes(NamedTuple):
    """Sizes of a layer: of its inputs, numbers of heads and of heads of keys, and units of its perceptron."""

    hidden: int
    heads: int
    kv: int
    ffn: int
    form: str = "gpt"

    @property
    def llama(self) -> bool:
        """Whether the layer has no biases, a gate, and rotated queries and keys."""
        return self.form == "llama"

    def norm(self) -> nn.Module:
        """A norm of the hidden units."""
        return nn.RMSNorm(self.hidden) if self.llama else nn.LayerNorm(self.hidden)

    def dense(self, inputs: int, outputs: int) -> nn.Linear:
        """A dense layer."""
        return nn.Linear(inputs, outputs, bias=not self.llama)


class Attention(nn.Module):
    """Attention of several heads, causal or not: inputs and outputs (batch, sequence, hidden)."""

    def __init__(self, sizes: Sizes, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv = sizes.heads, sizes.kv
        self.width, self.causal, self.rotates = sizes.hidden // sizes.heads, causal, sizes.llama
        self.query, self.key, self.value = (
            sizes.dense(sizes.hidden, count * self.width) for count in (sizes.heads, sizes.kv, sizes.kv)
        )
        self.output = sizes.dense(sizes.hidden, sizes.hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        """The values of the positions that each position sees, weighted for each head."""
        query, key, value = (
            each(inputs).unflatten(2, (-1, self.width)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if self.rotates:
            query, key = rotated(query), rotated(key)
        seen = scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=True)
        mixed: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return mixed


def rotated(heads: Tensor) -> Tensor:
    """`heads` (batch, heads, sequence, width), of which pairs of values are rotated by an angle of their position.

    Su et al., RoFormer, 2021, with 10,000 as the base of the angles.
    """
    length, width = heads.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, width, 2, device=heads.device) / width)
    angles = torch.outer(torch.arange(length, device=heads.device), rates).to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Perceptron(nn.Module):
    """Two dense layers with GELU between them; of the form of Llama with a gate, another dense layer and SiLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.rise, self.fall = sizes.dense(sizes.hidden, sizes.ffn), sizes.dense(sizes.ffn, sizes.hidden)
        self.gate = sizes.dense(sizes.hidden, sizes.ffn) if sizes.llama else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the shape of the inputs."""
        risen = self.rise(inputs)
        found: Tensor = self.fall(gelu(risen) if self.gate is None else silu(self.gate(inputs)) * risen)
        return found


class DecoderLayer(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = sizes.norm(), sizes.norm()
        self.attention, self.perceptron = Attention(sizes, causal=True), Perceptron(sizes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs are (batch, sequence, hidden)."""
        inputs = inputs + self.attention(self.norm_1(inputs))
        found: Tensor = inputs + self.perceptron(self.norm_2(inputs))
        return found


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each beside a residual, and a norm behind each sum."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.perceptron = Attention(sizes, causal=False), Perceptron(sizes)
        self.norm_1, self.norm_2 = sizes.norm(), sizes.norm()

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs are (batch, sequence, hidden)."""
        inputs = self.norm_1(inputs + self.attention(inputs))
        found: Tensor = self.norm_2(inputs + self.perceptron(inputs))
        return found


# ---- decoders


class Embeddings(nn.Module):
    """Embeddings of words, and of places if there are some: words (batch, sequence) to (batch, sequence, hidden)."""

    def __init__(self, vocab: int, hidden: int, places: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, hidden)
        self.places = nn.Embedding(places, hidden) if places else None

    def forward(self, words: Tensor) -> Tensor:
        """The sum of the embeddings."""
        found: Tensor = self.words(words)
        return found if self.places is None else found + self.places.weight[: words.shape[1]]


class NextWord(nn.Module):
    """A norm, and the scores of all words as the next one."""

    def __init__(self, sizes: Sizes, vocab: int) -> None:
        super().__init__()
        self.norm, self.scores = sizes.norm(), nn.Linear(sizes.hidden, vocab, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, sequence, hidden), outputs (batch, sequence, vocab)."""
        found: Tensor = self.scores(self.norm(inputs))
        return found


MOST_LAYERS = 1000
"""So many are made without values in seconds."""


def decoder(sizes: Sizes, layers: int, vocab: int, sequence: int) -> nn.Sequential:
    """A decoder: words (batch, sequence) to scores (batch, sequence, vocab)."""
    embeddings = Embeddings(vocab, sizes.hidden, 0 if sizes.llama else sequence)
    head = NextWord(sizes, vocab)
    if not sizes.llama:
        head.scores.weight = embeddings.words.weight
    return nn.Sequential(embeddings, *(DecoderLayer(sizes) for _ in range(layers)), head)


def transformer(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    kv: int = 0,
    ffn: int = 0,
    vocab: int = 50_257,
    sequence: int = 1024,
    form: str = "gpt",
    batch: int = 32,
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: bool = False,
    optimizer: str = "sgd",
) -> Job:
    """A decoder; the defaults are those of GPT-2 with 124,439,808 parameters. `kv=0`: as many as heads.

    `ffn=0`: four times hidden. Raises `UsageError` for sizes that do not fit together.
    """
    counted = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "sequence": sequence}
    for key, value in counted.items():
        if value < 1:
            raise UsageError(f"transformer: {key} must be at least 1, got {value}.")
    if layers > MOST_LAYERS:
        raise UsageError(f"transformer: layers must be at most {MOST_LAYERS:,}, got {layers:,}.")
    sizes = Sizes(hidden, heads, kv or heads, ffn or 4 * hidden, form)
    if form not in FORMS:
        raise UsageError(f"transformer: form must be gpt or llama, got {form!r}.")
    if hidden % (2 * heads):
        raise UsageError(
            f"transformer: hidden={hidden} must be an even number for each of heads={heads}: write "
            f"hidden={2 * heads * max(1, hidden // (2 * heads))}."
        )
    if sizes.kv < 1 or heads % sizes.kv:
        raise UsageError(f"transformer: kv={kv} must divide heads={heads}: write kv={heads}, or a divisor of it.")
    if sizes.ffn < 1:
        raise UsageError(f"transformer: ffn must be at least 1, or 0 for four times hidden, got {ffn}.")
    network = partial(decoder, sizes, layers, vocab, sequence)
    shapes = Shapes("transformer", network, next_loss, (sequence,), (sequence,), torch.int64)
    return shapes.job(batch, precision, accumulate, recompute, optimizer)


# ---- encoders


class EncoderEmbeddings(nn.Module):
    """Embeddings of words, places and segments, their sum behind a norm, and a dense layer if they are narrower."""

    def __init__(self, vocab: int, width: int, hidden: int, places: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.widened = nn.Identity() if width == hidden else nn.Linear(width, hidden)

    def forward(self, words: Tensor) -> Tensor:
        """Words (batch, sequence), outputs (batch, sequence, hidden)."""
        summed = self.words(words) + self.places.weight[: words.shape[1]] + self.segments(torch.zeros_like(words))
        found: Tensor = self.widened(self.norm(summed))
        return found


class Pretraining(nn.Module):
    """The scores of all words at each position, and those of the two orders of the segments."""

    def __init__(self, embeddings: EncoderEmbeddings, hidden: int) -> None:
        super().__init__()
        vocab, width = embeddings.words.weight.shape
        self.pooled, self.order = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.dense, self.norm = nn.Linear(hidden, width), nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocab)
        self.scores.weight = embeddings.words.weight

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (batch, sequence, hidden), outputs (batch, sequence, vocab) and (batch, 2)."""
        scores = self.scores(self.norm(gelu(self.dense(inputs))))
        return scores, self.order(torch.tanh(self.pooled(inputs[:, 0])))


def pretraining_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The loss of all words and of the order; targets are (batch, 1 + sequence)."""
    scores, order = outputs
    return next_loss(scores, targets[:, 1:]) + cross_entropy(order, targets[:, 0])


class Again(nn.Module):
    """A layer that others are, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the layer."""
        found: Tensor = self.layer(inputs)
        return found


def bert(layers: int, sizes: Sizes, vocab: int = 30_522) -> nn.Sequential:
    """BERT: words (batch, sequence) to the scores of `Pretraining`."""
    embeddings = EncoderEmbeddings(vocab, sizes.hidden, sizes.hidden)
    middle = [EncoderLayer(sizes) for _ in range(layers)]
    return nn.Sequential(embeddings, *middle, Pretraining(embeddings, sizes.hidden))


def albert(layers: int, sizes: Sizes, vocab: int = 30_000, width: int = 128) -> nn.Sequential:
    """ALBERT: words (batch, sequence) to the scores of `Pretraining`."""
    embeddings, shared = EncoderEmbeddings(vocab, width, sizes.hidden), EncoderLayer(sizes)
    return nn.Sequential(embeddings, *(Again(shared) for _ in range(layers)), Pretraining(embeddings, sizes.hidden))


def _encoder(name: str, network: Callable[[], nn.Module]) -> Callable[..., Job]:
    def encoder(
        sequence: int = 128,
        batch: int = 32,
        precision: str = "fp32",
        accumulate: int = 1,
        recompute: bool = False,
        optimizer: str = "sgd",
    ) -> Job:
        if not 1 <= sequence <= 512:
            raise UsageError(f"{name}: sequence must be from 1 to its 512 places, got {sequence}.")
        shapes = Shapes(name, network, pretraining_loss, (sequence,), (1 + sequence,), torch.int64)
        return shapes.job(batch, precision, accumulate, recompute, optimizer)

    return encoder


BASE, LARGE = Sizes(768, 12, 12, 3072), Sizes(1024, 16, 16, 4096)

bert_base = _encoder("bert-base", partial(bert, 12, BASE))
bert_large = _encoder("bert-large", partial(bert, 24, LARGE))
albert_base = _encoder("albert-base", partial(albert, 12, BASE))

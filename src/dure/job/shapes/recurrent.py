"""GNMT, a recurrent network that translates, as shapes without values: `gnmt8` and `gnmt16`, with `sequence=50` words.

Wu et al., "Google's Neural Machine Translation System", 2016, in the form of NVIDIA's implementation (MLPerf training,
version 0.5): as many layers in the encoder as in the decoder, 1,024 units, one embedding of 32,320 words for both
languages, and attention in the first layer of the decoder alone, whose context all others read.

    embedding of the source, a layer of both directions, layers      encoder: 4 or 8 layers
    embedding of the target, a layer with attention, layers          decoder: 4 or 8 layers
    dense layer                                                      scores of all words

Blocks are these parts. A sample is two rows of words, source and target. Tensors for later blocks go through those
before it: words of the target through the encoder, the context through the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.job import Job
from dure.job.models.char_gpt import next_loss
from dure.job.shapes.shape_job import Shapes

UNITS, WORDS = 1024, 32_320


class Recurrent(nn.Module):
    """A layer of LSTM units without values: the products of all steps with the state are one product.

    Parameters, operations and shapes are those of the steps, one after another. The state is a part of a tensor of the
    right shape, so that it has a gradient.
    """

    def __init__(self, inputs: int, units: int = UNITS) -> None:
        super().__init__()
        self.units = units
        self.of_inputs, self.of_state = nn.Linear(inputs, 4 * units), nn.Linear(units, 4 * units)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, sequence, inputs), outputs (batch, sequence, units)."""
        projected = self.of_inputs(inputs)
        gates = projected + self.of_state(projected[..., : self.units])
        enter, forget, value, leave = gates.chunk(4, dim=-1)
        state = torch.sigmoid(enter) * torch.tanh(value) + torch.sigmoid(forget)
        return torch.sigmoid(leave) * torch.tanh(state)


class SourceEmbedding(nn.Module):
    """Words (batch, 2, sequence) to embeddings of the source, and the words of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, UNITS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (batch, sequence, units), and words (batch, sequence)."""
        return self.words(words[:, 0]), words[:, 1].contiguous()


class BothDirections(nn.Module):
    """The first layer of the encoder: one over the words in order, and one in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = Recurrent(UNITS), Recurrent(UNITS)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs (batch, sequence, 2 units), and the words of the target."""
        source, words = inputs
        return torch.cat([self.ahead(source), self.back(source.flip(1)).flip(1)], dim=-1), words


class EncodingLayer(nn.Module):
    """Another layer of the encoder, beside a residual if inputs and outputs have one shape."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer, self.residual = Recurrent(inputs), inputs == UNITS

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs (batch, sequence, units), and the words of the target."""
        source, words = inputs
        outputs = self.layer(source)
        return (outputs + source if self.residual else outputs), words


class TargetEmbedding(nn.Module):
    """The words of the target to embeddings, by the `words` of the source's."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The outputs of the encoder, and embeddings (batch, sequence, units)."""
        encoded, words = inputs
        return encoded, self.words(words)


class AttendingLayer(nn.Module):
    """The first layer of the decoder, and its attention (Bahdanau et al., ICLR 2015, with a normed vector)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Recurrent(UNITS)
        self.query, self.key = (nn.Linear(UNITS, UNITS, bias=False) for _ in range(2))
        self.vector, self.shift = (nn.Parameter(torch.zeros(UNITS)) for _ in range(2))
        self.length = nn.Parameter(torch.ones(1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and context, both (batch, sequence, units)."""
        encoded, target = inputs
        outputs = self.layer(target)
        pairs = self.query(outputs).unsqueeze(2) + self.key(encoded).unsqueeze(1) + self.shift
        scores = torch.tanh(pairs) @ (self.vector * (self.length / self.vector.norm()))
        return outputs, torch.softmax(scores, dim=-1) @ encoded


class DecodingLayer(nn.Module):
    """Another layer of the decoder, of the outputs of the one before and the context."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.layer, self.residual = Recurrent(2 * UNITS), residual

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs (batch, sequence, units), and the context."""
        target, context = inputs
        outputs = self.layer(torch.cat(inputs, dim=-1))
        return (outputs + target if self.residual else outputs), context


class WordScores(nn.Module):
    """The scores of all words."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(UNITS, WORDS)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs (batch, sequence, words)."""
        found: Tensor = self.scores(inputs[0])
        return found


def network(layers: int) -> nn.Sequential:
    """GNMT with so many layers in the encoder, and as many in the decoder."""
    source = SourceEmbedding()
    return nn.Sequential(
        source,
        BothDirections(),
        *(EncodingLayer(UNITS if number else 2 * UNITS) for number in range(layers - 1)),
        TargetEmbedding(source.words),
        AttendingLayer(),
        *(DecodingLayer(residual=number > 0) for number in range(layers - 1)),
        WordScores(),
    )


def _translator(name: str, layers: int) -> Callable[..., Job]:
    def translator(
        sequence: int = 50,
        batch: int = 32,
        precision: str = "fp32",
        accumulate: int = 1,
        recompute: bool = False,
        optimizer: str = "sgd",
    ) -> Job:
        if sequence < 1:
            raise UsageError(f"{name}: sequence must be at least 1, got {sequence}.")
        shapes = Shapes(name, partial(network, layers), next_loss, (2, sequence), (sequence,), torch.int64)
        return shapes.job(batch, precision, accumulate, recompute, optimizer)

    return translator


gnmt8, gnmt16 = _translator("gnmt8", 4), _translator("gnmt16", 8)

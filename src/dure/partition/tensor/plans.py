"""Plans of splits: every linear layer alone, pairs of layers in an `nn.Sequential`, and Megatron-LM's for known models.

Every linear layer alone, with a synchronization behind each:

    rows       by inputs: each worker takes its inputs, and the outputs are summed
    columns    by outputs: by rows of `torch.nn.Linear.weight`, and the outputs are gathered

The paper of `dure reproduce bert-albert` divides the weight matrix "by rows" and combines the results; it does not say
in which storage. A transformer layer has six linear layers. In units of its input, of `batch * sequence * width`
elements, ring collectives of `rows` send 27 (W - 1) / W for it and those of `columns` 23 (W - 1) / W, where
Megatron-LM's pairing sends 8 (W - 1) / W.

Pairs of layers in an `nn.Sequential`: the first is split by outputs, the second by inputs. Between the two each worker
has some channels of the activations. So there may be only layers that act on each channel alone: functions of single
units, pooling, batch norm (split by channels) and dropout. `nn.Flatten` keeps the elements of a channel together, so a
dense layer behind it is split by blocks of inputs.

Megatron-LM's pairing, for models that are known by the classes of their layers:

| model                                  | by outputs (column)           | by inputs (row)                      |
|----------------------------------------|-------------------------------|--------------------------------------|
| `nn.Sequential`: dense, convolutions   | each first of two             | each second of two                   |
| BERT, ALBERT (Hugging Face), attention | `query`, `key`, `value`       | `output.dense`, or ALBERT's `dense`  |
| the same, perceptron                   | `intermediate.dense`, `ffn`   | `output.dense`, `ffn_output`         |
| `char-gpt`, attention and perceptron   | `attention` (three in one), `rise` | `project`, `fall`               |
| `transformer` and encoders by name     | `query`, `key`, `value`, `rise`, `gate` | `output`, `fall`           |

Attention is split by heads. Word embeddings are split by vocabulary, and so are the scores of `char-gpt` and
`transformer`.
Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.models.char_gpt import Block, Embedding, Head, next_loss
from dure.job.shapes.transformers import Attention, Embeddings, EncoderEmbeddings, NextWord, Perceptron
from dure.partition.blocks import is_sequence
from dure.partition.tensor.layers import ByChannel, Column, Row, Vocabulary, is_splittable, split_cross_entropy
from dure.partition.tensor.plan import LayerSplit, SplitPlan
from dure.partition.tensor.ways import Ways


def rows(module: nn.Module, ways: int) -> SplitPlan:
    """Every linear layer split by inputs. Raises `UsageError` for a model without one."""
    return SplitPlan(dict.fromkeys(_linear(module, ways, dim=1), Row(slices=True)))


def columns(module: nn.Module, ways: int) -> SplitPlan:
    """Every linear layer split by outputs. Raises `UsageError` for a model without one."""
    return SplitPlan(dict.fromkeys(_linear(module, ways, dim=0), Column(gathers=True)))


def _linear(module: nn.Module, ways: int, dim: int) -> list[str]:
    """The linear layers with at least as many inputs or outputs as workers; smaller ones stay whole."""
    found: list[str] = []
    times: dict[int, int] = {}
    for _, each in module.named_parameters(remove_duplicate=False):
        times[id(each)] = times.get(id(each), 0) + 1
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and layer.weight.shape[dim] >= ways and times[id(layer.weight)] == 1:
            found.append(name)
    if not found:
        raise UsageError(
            f"this {type(module).__name__} has no torch.nn.Linear of at least {ways} units that could be split: use "
            "fewer ways, or another partition."
        )
    return found


ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.Softplus),
    nn.Identity,
)
"""Layers that act on each unit alone, so that a worker can apply them to its own."""

POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
"""Layers that act on each channel of a convolution alone."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(slots=True)
class _Open:
    """A layer that would be split by outputs, and what lies behind it, until a second layer is found."""

    first: str
    layer: nn.Module
    between: list[tuple[str, LayerSplit | None]] = field(default_factory=list)
    flat: bool = False

    @property
    def outputs(self) -> int:
        return self.layer.get_parameter("weight").shape[0]

    @property
    def dense(self) -> bool:
        return isinstance(self.layer, nn.Linear)

    def passes(self, place: str, layer: nn.Module) -> bool:
        """Whether a layer acts on each channel alone."""
        if isinstance(layer, NORMS):
            self.between.append((place, ByChannel()))
            return not self.flat and layer.num_features == self.outputs
        if isinstance(layer, DROPOUTS):
            self.between.append((place, None))
            return True
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            self.flat = True
            return not self.dense
        return isinstance(layer, ELEMENTWISE) or (isinstance(layer, POOLING) and not self.dense and not self.flat)

    def pairs_with(self, layer: nn.Module) -> bool:
        """Whether a layer reads the channels of the first, dense layers behind convolutions flat ones."""
        dense = isinstance(layer, nn.Linear)
        return dense == (self.dense or self.flat) and layer.get_parameter("weight").shape[1] % self.outputs == 0


def pairs(path: str, sequence: nn.Sequential, ways: int) -> Iterator[tuple[str, LayerSplit | None]]:
    """The splits of the layers of `sequence`, by name; None for dropout between the two layers of a pair.

    A layer with fewer outputs than `ways` stays whole. So do one without a second, and one that occurs again or has a
    parameter of another.
    """
    opened: _Open | None = None
    flat = list(_flat(path, sequence))
    times = Counter(id(parameter) for _, layer in flat for parameter in layer.parameters())
    for place, layer in flat:
        if any(times[id(parameter)] > 1 for parameter in layer.parameters()):
            opened = None
        elif not is_splittable(layer):
            opened = opened if opened is not None and opened.passes(place, layer) else None
        elif opened is not None and opened.pairs_with(layer):
            yield opened.first, Column()
            yield from opened.between
            yield place, Row(layer.get_parameter("weight").shape[1] // opened.outputs)
            opened = None
        else:
            opened = _Open(place, layer)
            opened = opened if opened.outputs >= ways else None


def layers_of(sequence: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence with their names; `named_children` leaves out one that occurs again."""
    return [(name, layer) for name, layer in sequence._modules.items() if layer is not None]


def _flat(path: str, sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, in their order."""
    for name, layer in layers_of(sequence):
        place = f"{path}.{name}" if path else name
        if is_sequence(layer):
            yield from _flat(place, layer)
        else:
            yield place, layer


INSIDE = None
"""In place of a split: a module between split layers."""

Found = Iterator[tuple[str, LayerSplit | None]]


def megatron(module: nn.Module, ways: int, loss: Callable[[Any, Any], Tensor] | None = None) -> SplitPlan:
    """The plan for a model with a `loss`.

    The scores of words are split where the loss is the cross-entropy of `char-gpt` and `transformer`. Raises
    `UsageError` for a model in which no layers are known, or with too few heads.
    """
    found: dict[str, LayerSplit | None] = {}
    sequences = set[str]()
    for path, part in module.named_modules():
        known = _known(part)
        if known is not None:
            found |= {f"{path}.{name}" if path else name: split for name, split in known(part, ways)}
        elif is_sequence(part):
            found |= {} if path and path.rpartition(".")[0] in sequences else dict(pairs(path, part, ways))
            sequences.add(path)
    if not found:
        raise UsageError(
            f"no layers of this {type(module).__name__} are known that {ways} workers could share: there are pairs of "
            f"dense layers or convolutions in an nn.Sequential, the first of {ways} outputs or more, with layers that "
            "act on each channel alone between, Hugging Face BERT and ALBERT, char-gpt, and models by name. Describe a "
            'plan of your own: a subclass of dure.SharedLayers, as partition="FILE.py:CLASS".'
        )
    layers = {name: split for name, split in found.items() if split is not None}
    inside = frozenset(found.keys() - layers.keys())
    head = next((f"{path}.scores" for path, part in module.named_modules() if type(part) in (Head, NextWord)), None)
    if head is None or loss is not next_loss:
        return SplitPlan(_untied(module, layers), inside=inside)
    words = module.get_parameter(f"{head}.weight").shape[0]

    def split_loss(own: Ways, outputs: Tensor, targets: Tensor) -> Tensor:
        return split_cross_entropy(own, outputs, targets, words)

    return SplitPlan(layers | {head: Column()}, inside=inside, loss=split_loss)


def _untied(module: nn.Module, layers: Mapping[str, LayerSplit]) -> Mapping[str, LayerSplit]:
    """The splits without those of embeddings whose weight other layers have, which stay whole."""
    named = module.named_parameters(remove_duplicate=False)
    times = Counter(id(parameter) for _, parameter in named)
    return {
        name: split
        for name, split in layers.items()
        if not isinstance(split, Vocabulary) or times[id(module.get_parameter(f"{name}.weight"))] == 1
    }


def _bert_layer(layer: nn.Module, ways: int) -> Found:
    attention = layer.get_submodule("attention.self")
    unit = _unit(attention, "attention_head_size", "num_attention_heads", ways)
    for name in ("query", "key", "value"):
        yield f"attention.self.{name}", Column(unit)
    yield "attention.self.dropout", INSIDE
    yield "attention.output.dense", Row(unit)
    yield "intermediate.dense", Column()
    yield "output.dense", Row()


def _albert_layer(layer: nn.Module, ways: int) -> Found:
    unit = _unit(layer.get_submodule("attention"), "attention_head_size", "num_attention_heads", ways)
    for name in ("query", "key", "value"):
        yield f"attention.{name}", Column(unit)
    yield "attention.attention_dropout", INSIDE
    yield "attention.dense", Row(unit)
    yield "ffn", Column()
    yield "ffn_output", Row()


def _gpt_block(block: nn.Module, ways: int) -> Found:
    assert isinstance(block, Block)
    heads, width = block.heads, block.project.in_features
    _check_heads(heads, ways)
    yield "attention", Column(width // heads, parts=3)
    yield "project", Row(width // heads)
    yield "rise", Column()
    yield "fall", Row()


def _attention(part: nn.Module, ways: int) -> Found:
    assert isinstance(part, Attention)
    _check_heads(part.kv, ways)
    if part.kv != part.heads and part.kv % ways:
        raise UsageError(
            f"ways={ways} cannot divide {part.kv} heads of keys, which {part.heads} heads read, evenly: write a "
            f"divisor of {part.kv}."
        )
    for name in ("query", "key", "value"):
        yield name, Column(part.width)
    yield "output", Row(part.width)


def _perceptron(part: nn.Module, ways: int) -> Found:
    assert isinstance(part, Perceptron)
    yield "rise", Column()
    if part.gate is not None:
        yield "gate", Column()
    yield "fall", Row()


def _words(name: str) -> Callable[[nn.Module, int], Found]:
    def found(part: nn.Module, ways: int) -> Found:
        yield name, Vocabulary()

    return found


HUGGING_FACE: Mapping[str, Callable[[nn.Module, int], Found]] = {
    "BertLayer": _bert_layer,
    "BertEmbeddings": _words("word_embeddings"),
    "AlbertLayer": _albert_layer,
    "AlbertEmbeddings": _words("word_embeddings"),
}
"""The splits of the layers in a module, by the name of its class, which is not imported."""

OWN: Mapping[type, Callable[[nn.Module, int], Found]] = {
    Block: _gpt_block,
    Embedding: _words("characters"),
    Attention: _attention,
    Perceptron: _perceptron,
    Embeddings: _words("words"),
    EncoderEmbeddings: _words("words"),
}


def _known(part: nn.Module) -> Callable[[nn.Module, int], Found] | None:
    kind = type(part)
    return HUGGING_FACE.get(kind.__name__) if kind.__module__.startswith("transformers.") else OWN.get(kind)


def _unit(attention: nn.Module, size: str, heads: str, ways: int) -> int:
    _check_heads(int(getattr(attention, heads)), ways)
    return int(getattr(attention, size))


def _check_heads(heads: int, ways: int) -> None:
    if ways > heads:
        raise UsageError(f"ways={ways} is more than the {heads} heads of an attention layer: write ways={heads}.")

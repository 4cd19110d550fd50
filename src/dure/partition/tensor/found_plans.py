"""Plans of Megatron-LM's pairing for models that are known by the classes of their layers.

| model                                  | by outputs (column)           | by inputs (row)                      |
|----------------------------------------|-------------------------------|--------------------------------------|
| `nn.Sequential`: dense, convolutions   | each first of two             | each second of two                   |
| BERT, ALBERT (Hugging Face), attention | `query`, `key`, `value`       | `output.dense`, or ALBERT's `dense`  |
| the same, perceptron                   | `intermediate.dense`, `ffn`   | `output.dense`, `ffn_output`         |
| `char-gpt`, attention and perceptron   | `attention` (three in one), `rise` | `project`, `fall`               |

Attention is split by heads. Word embeddings are split by vocabulary, and so are the scores of `char-gpt`.
Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.models.char_gpt import Block, Embedding, Head, next_loss
from dure.partition.blocks import is_sequence
from dure.partition.tensor.embedding import Vocabulary
from dure.partition.tensor.linear import Column, Row
from dure.partition.tensor.loss import split_cross_entropy
from dure.partition.tensor.pairs import pairs
from dure.partition.tensor.plan import LayerSplit, SplitPlan
from dure.partition.tensor.ways import Ways

INSIDE = None
"""In place of a split: a module between split layers."""

Found = Iterator[tuple[str, LayerSplit | None]]


def megatron(module: nn.Module, ways: int, loss: Callable[[Any, Any], Tensor] | None = None) -> SplitPlan:
    """The plan for a model with a `loss`.

    The scores of words are split where the loss is the cross-entropy of `char-gpt`. Raises `UsageError` for a model in
    which no layers are known, or with too few heads.
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
            "act on each channel alone between, Hugging Face BERT and ALBERT, and char-gpt. Describe a plan of your "
            'own: a subclass of dure.SharedLayers, as partition="FILE.py:CLASS".'
        )
    layers = {name: split for name, split in found.items() if split is not None}
    inside = frozenset(found.keys() - layers.keys())
    head = next((f"{path}.scores" for path, part in module.named_modules() if type(part) is Head), None)
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

OWN: Mapping[type, Callable[[nn.Module, int], Found]] = {Block: _gpt_block, Embedding: _words("characters")}


def _known(part: nn.Module) -> Callable[[nn.Module, int], Found] | None:
    kind = type(part)
    return HUGGING_FACE.get(kind.__name__) if kind.__module__.startswith("transformers.") else OWN.get(kind)


def _unit(attention: nn.Module, size: str, heads: str, ways: int) -> int:
    _check_heads(int(getattr(attention, heads)), ways)
    return int(getattr(attention, size))


def _check_heads(heads: int, ways: int) -> None:
    if ways > heads:
        raise UsageError(f"ways={ways} is more than the {heads} heads of an attention layer: write ways={heads}.")

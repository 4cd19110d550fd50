"""Sequence parallelism: between split layers each worker has some positions of the sequence.

Where layers are not split, as layer norms, dropout and residuals, all workers would compute the same. With this option
each computes its own positions. An all-gather before layers that are split by outputs, and a reduce-scatter behind
those that are split by inputs, take the place of all-reduces, and send as much. Parameters of the layers between have a
gradient of the own positions only, which is summed over the workers.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from dure.core.vectors import equal_ranges
from dure.errors import UsageError
from dure.job.models.char_gpt import Block, Embedding, Head
from dure.partition.tensor.layers import Column, Row, unchanged
from dure.partition.tensor.plan import ParameterShard, SplitPlan
from dure.partition.tensor.ways import Ways, collected, gathered, scattered, sliced

DIM = 1
"""The dimension of positions in activations (batch, positions, width)."""


class Positions:
    """The positions of each worker, in sequences that all have the same length."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def sliced(self, ways: Ways, whole: Tensor) -> Tensor:
        """This worker's positions of a tensor that all workers have."""
        self._sizes = [stop - start for start, stop in equal_ranges(whole.shape[DIM], ways.size)]
        if not min(self._sizes):
            raise UsageError(
                f"{ways.size} workers share sequences of {whole.shape[DIM]} positions: each needs one at least. Use "
                "fewer ways, or longer sequences."
            )
        return sliced(ways, whole, self._sizes, DIM)

    def collected(self, ways: Ways, own: Tensor) -> Tensor:
        """All positions, for layers of which each worker has a part."""
        return collected(ways, own, self._sizes, DIM)

    def scattered(self, ways: Ways, part: Tensor) -> Tensor:
        """This worker's positions of the sum over the workers."""
        return scattered(ways, part, self._sizes, DIM)

    def gathered(self, ways: Ways, own: Tensor) -> Tensor:
        """All positions, for layers that all workers repeat."""
        return gathered(ways, own, self._sizes, DIM)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A change of the first argument of a layer, or of its output; the layer itself is not split."""

    change: Callable[[Ways, Tensor], Tensor]
    place: Literal["before", "behind"] = "before"

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        return {}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        change = partial(self.change, ways)
        if self.place == "behind":
            layer.register_forward_hook(partial(_joined, change))
        else:
            layer.register_forward_pre_hook(partial(_changed, change), with_kwargs=True)
        return layer


def _changed(
    change: Callable[[Tensor], Tensor], _: nn.Module, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first, *others = given
    return (change(first), *others), options


def _joined(change: Callable[[Tensor], Tensor], _: nn.Module, given: Any, found: Any) -> Any:
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)


def by_positions(plan: SplitPlan, module: nn.Module) -> SplitPlan:
    """A plan of pairs, with sequence parallelism. Raises `UsageError` for layers in which it is not known."""
    positions = Positions()
    layers = dict(plan.layers)
    partials: set[str] = set()
    encoder: list[str] = []
    for path, layer in module.named_modules():
        kind, prefix = _kind(layer), f"{path}." if path else ""
        for name in JOINS.get(kind, ()):
            row = layers[prefix + name]
            assert isinstance(row, Row)
            layers[prefix + name] = replace(row, joins=positions.scattered)
        for name in READS.get(kind, ()):
            split = layers.get(prefix + name)
            own = replace(split, reads=positions.collected) if isinstance(split, Column) else None
            layers[prefix + name] = own or Crossing(positions.gathered)
        for name, inner in COLLECTS.get(kind, {}).items():
            layers[prefix + name] = Crossing(positions.collected)
            for each in inner:
                split = layers[prefix + each]
                assert isinstance(split, Column)
                layers[prefix + each] = replace(split, reads=unchanged)
        if kind == "Embedding":
            layers[path] = Crossing(positions.sliced, "behind")
        if kind == "BertLayer":
            encoder.append(path)
        partials |= {prefix + name for name in PARTIAL.get(kind, ()) if _has(layer, name)}
    if not partials:
        raise UsageError(
            f"sequence=true is known for BERT and char-gpt, and not for this {type(module).__name__}: leave it out."
        )
    if encoder:  # BERT makes its mask from the embeddings of all positions, so the first layer takes its own
        layers[f"{encoder[0]}.attention"] = Crossing(positions.sliced)
        layers[encoder[-1]] = Crossing(positions.gathered, "behind")
    return replace(plan, layers=layers, partial=plan.partial | partials, inside=frozenset({""}))


JOINS: Mapping[str, Sequence[str]] = {
    "BertLayer": ("attention.output.dense", "output.dense"),
    "Block": ("project", "fall"),
}
"""Layers that are split by inputs, whose output is divided by positions, by the class that holds them."""

READS: Mapping[str, Sequence[str]] = {"Block": ("attention", "rise"), "Head": ("scores",)}
"""Layers that are split by outputs and read positions of their own, by the class that holds them."""

COLLECTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "BertLayer": {
        "attention.self": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "intermediate": ("intermediate.dense",),
    }
}
"""Modules whose input is collected once, for the layers in them that are split by outputs."""

NORM = ("weight", "bias")
PARTIAL: Mapping[str, Sequence[str]] = {
    "BertLayer": [
        *("attention.output.dense.bias", *(f"attention.output.LayerNorm.{name}" for name in NORM)),
        *("output.dense.bias", *(f"output.LayerNorm.{name}" for name in NORM)),
    ],
    "Block": ["project.bias", "fall.bias", *(f"norm_{number}.{name}" for number in (1, 2) for name in NORM)],
    "Head": [f"norm.{name}" for name in NORM],
}
"""Parameters that act on positions of their own."""


def _kind(layer: nn.Module) -> str:
    """The name of the class of a layer of Hugging Face or of `char-gpt`; other classes may have the same name."""
    kind = type(layer)
    known = kind.__module__.startswith("transformers.") or kind in (Block, Embedding, Head)
    return kind.__name__ if known else ""


def _has(layer: nn.Module, name: str) -> bool:
    return any(name == each for each, _ in layer.named_parameters())

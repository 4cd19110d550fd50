"""One weird trick: convolutions data-parallel, dense layers model-parallel, over the same workers.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997, 2014, section 4.

    each worker:  features of its T samples              convolutions: few parameters, most of the computation
    junction:     the features of all W T samples        in one round (`gather`), or in W (`turns`, `mixed`)
    each worker:  its part of the dense layers           most of the parameters, little computation
    backward:     gradients of features return to the workers of their samples
    gradients of convolutions are summed over the workers; those of dense layers stay where they are

A mini-batch of the run is that of all W workers together. Data parallelism sends 2 (W - 1) P / W elements from each
worker for P parameters. One weird trick sends from each worker

    2 (W - 1) C / W      for the C parameters of convolutions
    2 (W - 1) T F        for features: its own T samples forward, and gradients for the samples of the others backward
    2 (W - 1) T n        for each pair of dense layers with n outputs, and as much for its inputs unless it is the first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from dure.core.catalogue import parameter
from dure.errors import UsageError
from dure.partition.blocks import is_sequence
from dure.partition.shared_layers import SharedLayers
from dure.partition.tensor.layers import CONVOLUTIONS, Column, unchanged
from dure.partition.tensor.plan import SplitPlan
from dure.partition.tensor.plans import layers_of, pairs
from dure.partition.tensor.trunk import Junction, Scheme

if TYPE_CHECKING:
    from dure.job.job import Job


@dataclass(frozen=True)
class OneWeirdTrick(SharedLayers):
    """One weird trick: each worker computes convolutions for its samples, and its part of the dense layers for all."""

    paper: ClassVar[str] = "Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014"

    in_pipelines: ClassVar[bool] = False

    scheme: Scheme = parameter(
        "gather",
        "samples of a round of the dense layers: all (gather), those of one worker (turns), or some of each (mixed)",
    )

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        if not is_sequence(module):
            raise UsageError(
                f"one-weird-trick splits an nn.Sequential of convolutions and dense layers that has no forward of its "
                f"own, and this model is a {type(module).__name__}. Use tensor:ways={self.ways}, or a plan of your own."
            )
        children, cut = layers_of(module), _first_dense(module)
        found = dict(pairs("", nn.Sequential(OrderedDict(children[cut:])), self.ways))
        layers = {name: split for name, split in found.items() if split is not None}
        first = next(name.rpartition(".")[0] for name, _ in _parameters(children[cut:]))
        split = layers.get(first)
        if isinstance(split, Column):
            layers[first] = replace(split, reads=unchanged)
        layers[""] = Junction(cut, self.scheme, isinstance(split, Column))
        trunk = children[:cut]
        return SplitPlan(
            layers,
            partial=frozenset(name for name, _ in _parameters(trunk)),
            inside=frozenset(found.keys() - layers.keys() | {name for name, _ in trunk}),
        )


def _parameters(children: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some children of a module, with their names in it."""
    for name, child in children:
        yield from child.named_parameters(prefix=name)


def _first_dense(module: nn.Sequential) -> int:
    """The number of the first dense layer behind the last convolution. Raises `UsageError` if there is none."""
    layers = list(module)
    last = max((n for n, layer in enumerate(layers) if _has(layer, CONVOLUTIONS)), default=-1)
    dense = [n for n, layer in enumerate(layers) if n > last and _has(layer, (nn.Linear,))]
    if last < 0 or not dense:
        raise UsageError(
            "one-weird-trick needs convolutions and behind them dense layers, and this model has "
            f"{'no convolution' if last < 0 else 'no dense layer behind its last convolution'}. Use tensor, or none."
        )
    return dense[0]


def _has(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(part, kinds) for part in layer.modules())

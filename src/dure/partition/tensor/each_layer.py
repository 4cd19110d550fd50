"""Plans that split every linear layer alone, with a synchronization behind each, as paper 004 describes.

    rows       by inputs: each worker takes its inputs, and the outputs are summed
    columns    by outputs: by rows of `torch.nn.Linear.weight`, and the outputs are gathered

The paper divides the weight matrix "by rows" and combines the results; it does not say in which storage. A transformer
layer has six linear layers. In units of its input, of `batch * sequence * width` elements, ring collectives of `rows`
send 27 (W - 1) / W for it and those of `columns` 23 (W - 1) / W, where Megatron-LM's pairing sends 8 (W - 1) / W.
"""

from __future__ import annotations

from torch import nn

from dure.errors import UsageError
from dure.partition.tensor.linear import Column, Row
from dure.partition.tensor.plan import SplitPlan


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

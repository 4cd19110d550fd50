"""Options that a job with companions cannot have: it has no data set, and its gradients come from other nodes."""

from __future__ import annotations

from dure.errors import UsageError
from dure.partition.mesh import pipeline_of
from dure.run.config import TrainConfig
from dure.run.strategy import Strategy, member_text
from dure.sync.base import OfEpochs, traits_of

LARGE = 2**31
"""Steps of an epoch that no method has for its own."""


def check_options(config: TrainConfig, strategy: Strategy, name: str) -> None:
    """Raise `UsageError` for an option, or a part of `strategy`, that the job `name` cannot have."""
    sync = strategy.sync
    if pipeline_of(strategy.partition) is not None:
        raise UsageError(
            f"{name} learns from a replay, and each of its workers holds a whole model: "
            f"{strategy.text()['partition']} would divide it. Use the partition none."
        )
    if traits_of(sync).chooses_samples:
        raise UsageError(
            f"{member_text('sync', sync)} asks for the gradient of samples that it chooses, and the replay of {name} "
            "chooses them. Use another method, such as bsp or downpour."
        )
    if isinstance(sync, OfEpochs) and sync.with_epoch(LARGE) != sync:
        raise UsageError(f"{member_text('sync', sync)} counts epochs, and {name} has none. Use a fixed schedule.")
    if config.timing_only:
        raise UsageError(
            f"timing_only computes no gradients, and the actors of {name} need a model that learns. Leave it out."
        )
    for option, advice in (("epochs", "Give steps or seconds"), ("split", "Leave it out")):
        if getattr(config, option) is not None:
            raise UsageError(f"{option} is for a job with a data set, and {name} has none. {advice}.")

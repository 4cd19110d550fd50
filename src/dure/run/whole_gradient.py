"""Checks of runs that need the gradient of the whole model: for its norm, and for parameters in several stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.errors import StrategyError
from dure.partition.blocks import refuse_ties

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.run.stages import Stages


def check_clip(setup: Setup) -> None:
    """Raise `StrategyError` for a limit of the norm where no worker knows the gradient of the whole model."""
    clip, text = setup.job.optimizer.clip, setup.strategy.text()
    if clip is None:
        return
    over_servers = setup.topology.servers > 0 and not setup.server_side.own_rule
    if over_servers or setup.coordinated:
        raise StrategyError(
            f"clip={clip:g} limits the norm of the gradient of the whole model, and with {text['sync']} over "
            f"{text['topology']} each server applies gradients of its own part of the model. Leave clip out, or use "
            "bsp over collective."
        )
    if setup.stages is not None and not setup.stages.pipeline.flushes:
        raise StrategyError(
            f"clip={clip:g} limits the norm of the gradient over all stages, and the stages of {text['partition']} "
            "update at different times. Leave clip out, or use a pipeline that flushes, such as gpipe or 1f1b."
        )


def check_ties(setup: Setup, stages: Stages) -> None:
    """Raise `StrategyError` for parameters in several stages if a codec or the method makes their copies different."""
    copies = [held for each in stages.layout.held for held in each if not held.first]
    ties, text = [held for each in stages.layout.held for held in each if held.tied] or copies, setup.strategy.text()
    if not setup.synchronous:
        refuse_ties("an asynchronous method", stages.layout.tied, "a synchronous one, such as bsp")
        if copies:
            raise StrategyError(
                f"the parameter {copies[0].name!r} is whole at all workers that share layers by {text['partition']}, "
                f"and {text['sync']} over {text['topology']} updates it at each of them at a time of its own, so the "
                "copies would differ. Use a synchronous method, such as bsp."
            )
    if setup.codec is None or not ties or not (setup.traits.changes or setup.topology.servers):
        return
    what = "the change of each stage's model" if setup.traits.changes else "what each stage sends to its servers"
    raise StrategyError(
        f"{text['codec']} encodes {what}, and several workers have copies of the parameter {ties[0].name!r}, which "
        "would become different. Use fp32, other cuts, or bsp over collective, which encodes gradients."
    )

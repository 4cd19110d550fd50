"""Seconds of a mini-batch in pipelines by closed forms. `step_forms` has those of 1F1B.

K stages compute U micro-batches. At stage k, f and b are the seconds of a forward and a backward, t = f + b, w = b / 2
those of the gradients of weights, x those of its exchange with other copies of the model; M is a message.

    partition             seconds of a mini-batch
    gpipe, shared layers  sum of t_k and of messages, and (U - 1) (max f + max b)
    1f1b                  `flushed`
    zero-bubble (h1)      `flushed`, with gradients of weights computed later: U t + (K - 1) (t - 2 w)
    interleaved           v U max(t / v, f / v + M, b / v + M), and t / v and messages of the other stages, with v
                          chunks: (v U + K - 1) t / v
    pipedream             the largest of `endless`, t_k + x_k and (w_k + x_k) / (K - k + 1)
    pipedream-2bw         U `endless` + max x

An interleaved worker takes K micro-batches through a chunk while the first of them goes around, so each of its forwards
and backwards has the seconds of a chunk and a message.

Behind a flush, stage k exchanges while the stages before it compute, and begins later: x_k adds to the seconds of the
mini-batch what exceeds the way from the first stage to it and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dure.partition.methods.gpipe import GPipe
from dure.partition.methods.interleaved import Interleaved
from dure.partition.methods.one_f_one_b import OneFOneB
from dure.partition.methods.pipedream import PipeDream
from dure.partition.methods.pipedream_2bw import PipeDream2BW
from dure.partition.methods.zero_bubble import ZeroBubble
from dure.planner.stage_passes import StagePasses
from dure.planner.step_forms import Between, StageSeconds, endless, flushed, longest, ways

Passes = Sequence[StagePasses]


def mini_batch(pipeline: Any, passes: Passes, exchanges: Sequence[float], between: Between) -> float | None:
    """Seconds of a mini-batch in `pipeline`, with the exchange of each stage; None where no form is known."""
    form = FORMS.get(type(pipeline))
    return None if form is None else form(pipeline, passes, exchanges, between)


def _whole(passes: Passes) -> list[StageSeconds]:
    return [each.whole for each in passes]


def _exchanged(seconds: float, stages: Sequence[StageSeconds], exchanges: Sequence[float]) -> float:
    """Seconds of a mini-batch behind a flush, with the exchange of each stage."""
    way = ways(stages)
    return max(seconds - way[0] + own + each for own, each in zip(way, exchanges, strict=True))


def _gpipe(pipeline: GPipe, passes: Passes, exchanges: Sequence[float], between: Between) -> float:
    stages = _whole(passes)
    slowest = max(max(each.forward for each in passes) + max(each.backward for each in passes), between.busiest)
    return _exchanged(ways(stages)[0] + (pipeline.micro_batches - 1) * slowest, stages, exchanges)


def _one_f_one_b(pipeline: OneFOneB, passes: Passes, exchanges: Sequence[float], between: Between) -> float:
    stages = _whole(passes)
    return _exchanged(flushed(stages, pipeline.micro_batches, between._replace(ask=0.0)), stages, exchanges)


def _zero_bubble(pipeline: ZeroBubble, passes: Passes, exchanges: Sequence[float], between: Between) -> float | None:
    if pipeline.schedule != "h1":
        return None
    stages = [each.split for each in passes]
    return _exchanged(flushed(stages, pipeline.micro_batches, between), stages, exchanges)


def _interleaved(pipeline: Interleaved, passes: Passes, exchanges: Sequence[float], between: Between) -> float:
    v = pipeline.chunks
    stages = [each._replace(forward=each.forward / v, inputs=each.inputs / v) for each in _whole(passes)]
    around = [max(each.forward / v + each.outputs, each.backward / v + each.gradients) for each in passes]
    seconds = v * pipeline.micro_batches * max(longest(stages), *around, between.busiest / v)
    return _exchanged(seconds + ways(stages)[0] - longest(stages), stages, exchanges)


def _pipedream(_pipeline: PipeDream, passes: Passes, exchanges: Sequence[float], between: Between) -> float:
    stages = _whole(passes)
    each = [stage.busy + exchange for stage, exchange in zip(stages, exchanges, strict=True)]
    round_trips = [
        (way + exchange) / (len(stages) - k)
        for k, (way, exchange) in enumerate(zip(ways(stages), exchanges, strict=True))
    ]
    return max(endless(stages, between), *each, *round_trips)


def _double_buffered(pipeline: PipeDream2BW, passes: Passes, exchanges: Sequence[float], between: Between) -> float:
    return pipeline.micro_batches * endless(_whole(passes), between._replace(ask=0.0)) + max(exchanges)


FORMS: Mapping[type, Callable[[Any, Passes, Sequence[float], Between], float | None]] = {
    GPipe: _gpipe,
    OneFOneB: _one_f_one_b,
    ZeroBubble: _zero_bubble,
    Interleaved: _interleaved,
    PipeDream: _pipedream,
    PipeDream2BW: _double_buffered,
}

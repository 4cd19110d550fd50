"""Seconds of a mini-batch in pipelines by closed forms. `steps` has those of 1F1B.

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

from oracles.forms.steps import endless, flushed, longest, ways

import dure


def mini_batch(pipeline, stages, exchanges, between):
    """Seconds of a mini-batch in `pipeline`, with the exchange of each stage; None where no form is known."""
    form = FORMS.get(type(pipeline))
    return None if form is None else form(pipeline, stages, exchanges, between)


def _exchanged(seconds, stages, exchanges):
    """Seconds of a mini-batch behind a flush, with the exchange of each stage."""
    way = ways(stages)
    return max(seconds - way[0] + own + each for own, each in zip(way, exchanges, strict=True))


def _gpipe(pipeline, stages, exchanges, between):
    slowest = max(max(each.forward for each in stages) + max(each.backward for each in stages), between.busiest)
    return _exchanged(ways(stages)[0] + (pipeline.micro_batches - 1) * slowest, stages, exchanges)


def _one_f_one_b(pipeline, stages, exchanges, between):
    return _exchanged(flushed(stages, pipeline.micro_batches, between._replace(ask=0.0)), stages, exchanges)


def _zero_bubble(pipeline, stages, exchanges, between):
    if pipeline.schedule != "h1":
        return None
    split = [each.split for each in stages]
    return _exchanged(flushed(split, pipeline.micro_batches, between), split, exchanges)


def _interleaved(pipeline, stages, exchanges, between):
    v = pipeline.chunks
    chunks = [each._replace(forward=each.forward / v, inputs=each.inputs / v) for each in stages]
    around = [max(each.forward + each.outputs, each.backward + each.gradients) for each in chunks]
    seconds = v * pipeline.micro_batches * max(longest(chunks), *around, between.busiest / v)
    return _exchanged(seconds + ways(chunks)[0] - longest(chunks), chunks, exchanges)


def _pipedream(_pipeline, stages, exchanges, between):
    each = [stage.busy + exchange for stage, exchange in zip(stages, exchanges, strict=True)]
    round_trips = [
        (way + exchange) / (len(stages) - k)
        for k, (way, exchange) in enumerate(zip(ways(stages), exchanges, strict=True))
    ]
    return max(endless(stages, between), *each, *round_trips)


def _double_buffered(pipeline, stages, exchanges, between):
    return pipeline.micro_batches * endless(stages, between._replace(ask=0.0)) + max(exchanges)


FORMS = {
    dure.GPipe: _gpipe,
    dure.OneFOneB: _one_f_one_b,
    dure.ZeroBubble: _zero_bubble,
    dure.Interleaved: _interleaved,
    dure.PipeDream: _pipedream,
    dure.PipeDream2BW: _double_buffered,
}

"""Timing-only runs with a codec send the bytes and take the seconds of runs with gradients."""

import pytest

import dure
from dure.errors import DureError

FIXED = ("fp16", "bf16", "int8", "1bit", "sign", "sign:scaled=true+ef", "sign+momentum")
BY_VALUE = ("top-k", "strom", "ternary", "it-sign")
METHODS = (
    "bsp collective",
    "bsp ps:shards=2",
    "averaging:period=2 collective",
    "downpour ps:shards=2",
    "k-batch-async ps",
    "backup ps",
    "bsp collective gpipe:stages=2",
)


def figures(strategy: str, *, timing_only: bool) -> tuple[float, int]:
    options = {"on": "virtual", "workers": 4, "steps": 5, "eval_every": 5, "timing_only": timing_only}
    found = dure.train("digits-mlp", strategy=strategy, **options).summary()
    return found["seconds"], found["bytes_sent"]


def both(method: str, codec: str) -> tuple[tuple[float, int], tuple[float, int]]:
    try:
        real = figures(f"{method} {codec}", timing_only=False)
    except DureError as error:
        pytest.skip(f"not a combination: {error}")
    return real, figures(f"{method} {codec}", timing_only=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("method", METHODS)
def test_messages_of_a_fixed_length_are_exact(method, codec):
    real, timed = both(method, codec)
    assert timed == real


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", BY_VALUE)
@pytest.mark.parametrize("method", ["bsp collective", "bsp ps:shards=2"])
def test_messages_whose_length_depends_on_values_have_the_length_of_the_first_gradients(method, codec):
    """Combined values are coded again, and differ from gradients: at most a quarter of the bytes."""
    (seconds, nbytes), (timed_seconds, timed_nbytes) = both(method, codec)
    assert timed_nbytes == pytest.approx(nbytes, rel=0.25)
    assert timed_seconds == pytest.approx(seconds, rel=0.02)

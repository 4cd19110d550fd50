"""The arguments of `dure train` that give a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from dure.run.config import TrainConfig
from dure.run.strategy import AXES

FIRST, LAST = ("strategy", *AXES), ("workers", "on")


def arguments_of(config: TrainConfig) -> list[str]:
    """The words after `dure` that make `config`: the job, the strategy, and the options that differ from the defaults.

    >>> arguments_of(TrainConfig(job="digits-mlp", sync="ssp", trace=True, batch_sizes=(8, 4), out="runs/a"))[1:]
    ['digits-mlp', '--sync', 'ssp', '--batch-sizes', '8', '4', '--trace', '--out', 'runs/a', '--on', 'local']
    """
    names = [option.name for option in fields(TrainConfig) if option.name not in ("job", "strategy", *AXES, *LAST)]
    return [
        "train",
        config.job,
        *(word for name in ("strategy", *AXES, *names, *LAST) for word in _words(config, name)),
    ]


def _words(config: TrainConfig, name: str) -> Iterator[str]:
    value = getattr(config, name)
    default = next(option.default for option in fields(TrainConfig) if option.name == name)
    if value == default or (name == "seed" and value == 0):
        return
    yield f"--{name.replace('_', '-')}"
    if value is not True:
        yield from map(str, value if isinstance(value, tuple) else (value,))

"""The names of jobs: those of this package, and those that other distributions offer.

    | job              | data                | model, with parameters of the job and their defaults             |
    |------------------|---------------------|-------------------------------------------------------------------|
    | `digits-mlp`     | 8x8 digits, bundled | `depth=1` hidden layers of `hidden=64` units                      |
    | `char-gpt`       | Python's manual, or a file `text` | decoder; `width=64`, `layers=4`, `heads=4`, `context=64` |
    | `quadratic`      | drawn               | a point; `dim`, `conditioning`, `noise`; its optimum is known     |
    | `apex`, `gorila`, `dqn` | an environment, `env=CartPole-v1` | a Q-network, or a policy and a critic; `actors=4` |
    | `resnet50`, `bert-base` and others | shapes, no values | published ones (`shapes`), for timing-only runs |

A distribution offers a job by an entry point of the group `dure.jobs`, as in its `pyproject.toml`:

    [project.entry-points."dure.jobs"]
    mnist-mlp = "dure_jobs.mnist:mnist_mlp"

The function returns a `Job`; its parameters are those of the job. A name of this package cannot be offered again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dure.core.packages import loaded, offer, offers, origin
from dure.core.spec_text import names, nearest, parse_member
from dure.errors import UsageError

BUILT_IN: Mapping[str, str] = {
    "digits-mlp": "dure.job.models.mlp:digits_mlp",
    "char-gpt": "dure.job.models.char_gpt:char_gpt",
    "quadratic": "dure.job.models.quadratic:quadratic",
    "apex": "dure.rl.jobs:apex",
    "gorila": "dure.rl.jobs:gorila",
    "dqn": "dure.rl.jobs:dqn",
}

SHAPES: Mapping[str, str] = {
    "resnet50": "dure.job.shapes.images:resnet50",
    "resnet101": "dure.job.shapes.images:resnet101",
    "resnet152": "dure.job.shapes.images:resnet152",
    "resnext50-32x4d": "dure.job.shapes.images:resnext50",
    "resnext101-32x8d": "dure.job.shapes.images:resnext101",
    "inception-v3": "dure.job.shapes.images:inception_v3",
    "vgg16": "dure.job.shapes.images:vgg16",
    "alexnet": "dure.job.shapes.images:alexnet",
    "bert-base": "dure.job.shapes.transformers:bert_base",
    "bert-large": "dure.job.shapes.transformers:bert_large",
    "albert-base": "dure.job.shapes.transformers:albert_base",
    "amoebanet-d": "dure.job.shapes.amoebanet:amoebanet_d",
    "gnmt8": "dure.job.shapes.recurrent:gnmt8",
    "gnmt16": "dure.job.shapes.recurrent:gnmt16",
    "transformer": "dure.job.shapes.transformers:transformer",
}
"""Published models without values."""

FILES: Mapping[str, str] = {".yaml": "dure.job.stated:of_yaml", ".txt": "dure.job.stated:of_graph"}
"""The functions that make those of jobs in files of stated seconds, by the end of the file's name."""

GROUP = "dure.jobs"
"""The group of the entry points that offer jobs."""

DURE_JOBS = (
    "digits-local",
    "mnist-mlp",
    "mnist-cnn",
    "cifar10-cnn",
    "cifar10-vgg16",
    "embedding-text",
    "imdb-bert",
    "imdb-albert",
    "softmax-regression",
)
"""The jobs of the distribution `dure-jobs`, which may be missing."""

INSTALL = "pip install dure-jobs"

FORM = "MODULE:FUNCTION"
"""The value of an entry point that offers a job."""


def known_jobs() -> tuple[str, ...]:
    """The names of all jobs: of this package, of `dure-jobs` if it is installed, and of other distributions."""
    offered = offers(GROUP).names
    own = (*BUILT_IN, *SHAPES, *(name for name in DURE_JOBS if name in offered))
    return (*own, *sorted(offered - {*own, *DURE_JOBS}))


def function_of(name: str) -> Callable[..., Any] | None:
    """The function of the job `name`, or None. Raises `UsageError` if the entry point of that name is no function."""
    place = BUILT_IN.get(name) or SHAPES.get(name)
    if place is not None:
        return _imported(place)
    if (ending := Path(name).suffix) in FILES:
        return _imported(FILES[ending])(Path(name))  # type: ignore[no-any-return]
    entry = offer(GROUP, "a job", name)
    if entry is None:
        return None
    found = loaded(entry, "the job", FORM)
    if not callable(found):
        raise UsageError(
            f"the job {name} of {origin(entry)} is {entry.value}, which is no function, but {type(found).__name__}: "
            f"write {FORM}."
        )
    return found  # type: ignore[no-any-return]


def _imported(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def unknown(name: str) -> str:
    """The text of an error: no job is called `name`, or it is one of `dure-jobs`, which is not installed."""
    if name in DURE_JOBS:
        try:
            has = f"and dure-jobs {version('dure-jobs')} has none of this name: pip install --upgrade dure-jobs"
        except PackageNotFoundError:
            has = f"which is not installed: {INSTALL}"
        return f"the job {name} is part of dure-jobs, {has}"
    known = known_jobs()
    more = "" if {*DURE_JOBS} & {*known} else f" {names(DURE_JOBS)} come with {INSTALL}."
    hint = nearest(name, (*known, *DURE_JOBS))
    return f"no job is called {name!r}: there are {names(known)}, and FILE.py:FUNCTION.{hint}{more}"


def may_have_companions(name_or_path: str) -> bool:
    """Whether the job of that name may have companions: a user's, one of reinforcement learning, or one offered."""
    name = parse_member(name_or_path).name
    return name not in {*SHAPES, *DURE_JOBS} and BUILT_IN.get(name, "dure.rl").startswith("dure.rl")

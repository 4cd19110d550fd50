"""Reproduces tables and figures of papers: the published figures beside those of this library.

| name         | module       | from                                                                           |
|--------------|--------------|--------------------------------------------------------------------------------|
| `sharding`   | `sharding`   | a comparison of layer-based and memory-based parameter sharding on VGG-16      |
| `it-signsgd` | `it_signsgd` | Park and Lee: a weighted vote on the signs of workers with unequal batches     |
| `byzantine`  | `byzantine`  | Bernstein et al.: a majority vote on signs, some of which are false            |
| `pipelines`  | `pipelines`  | a survey: the damage of stale weights to learning, by the number of stages     |
| `bert-albert` | `bert_albert`, `bert_albert_methods` | a comparison of data and tensor parallelism on BERT, ALBERT |
| `one-weird-trick` | `one_weird_trick` | Krizhevsky: convolutions data-parallel, dense layers model-parallel  |
| `asynchronous` | `asynchronous` | Dean et al., Chen et al.: asynchronous SGD, backup workers and synchronous SGD |
| `elastic` | `elastic` | Zhang et al.: elastic averaging and Downpour SGD by the steps between exchanges |
| `version-skew` | `version_skew` | Yook et al.: models from several servers, whose parts have different versions |
| `averaging` | `averaging` | Zinkevich et al., Su et al., Chen and Huo: periods and weights of averages of models |
| `delay-compensation` | `delay_compensation` | Zheng et al.: DC-ASGD, Downpour and BSP by the number of workers |
| `gossip` | `gossip` | Lian et al.: AD-PSGD, BSP and Downpour by the strength of a slow worker |
| `momentum` | `momentum` | Mitliagkas et al.: the momentum that asynchrony adds, and its compensation |
| `batch-size` | `batch_size` | Yook et al.: sizes of mini-batches at equal samples |
| `shared-memory` | `shared_memory` | Niu et al., Sallinen et al., Zhao and Li: one model in shared memory |
| `k-methods` | `k_methods` | Dutta et al.: seconds of an update and loss by K, beside closed forms |
| `neurons` | `neurons` | Dean et al.: words and seconds of assignments of units to machines |
| `collectives` | `collectives` | a survey: seconds of an all-reduce by algorithm, size and latency |
| `strom` | `strom` | Strom: bytes and accuracy by the threshold of his codec |
| `hybrid` | `hybrid` | a survey: collectives, servers and the hybrid, for a sparse and a dense model |
| `ssp` | `ssp` | Ho et al.: waiting, lead and accuracy by the bound of SSP |
| `hogwild` | `hogwild` | Niu et al.: conflicts of updates without locks, and the seconds of locks |
| `structures` | `structures` | a survey: seconds of a step over collectives and over servers, for several models |
| `reinforcement` | `reinforcement` | a survey: DQN, Gorila and Ape-X at equal time; Horgan et al.: more actors |
| `stale-gradients` | `stale_gradients` | a survey: samples to an accuracy by the number of asynchronous workers |
| `table1` | `table1` | Yook et al.: operations and words of synchronous, asynchronous and pipelined SGD |

`papers` lists the sections, figures, tables and claims of the papers, with the commands that show them. `every` runs
them all. A `study` compares settings over several seeds.

Each module but these has `reproduce`, which returns the object of `dure reproduce NAME --json`, and `table`, which
shows it. The parameters of `reproduce` are the flags that apply to it, all with defaults. `QUICK` are the flags of a
reduced form.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

from dure.core.spec_text import names, nearest
from dure.errors import UsageError

NAMES = {
    "sharding": "dure.cli.reproduce.sharding",
    "it-signsgd": "dure.cli.reproduce.it_signsgd",
    "byzantine": "dure.cli.reproduce.byzantine",
    "pipelines": "dure.cli.reproduce.pipelines",
    "one-weird-trick": "dure.cli.reproduce.one_weird_trick",
    "bert-albert": "dure.cli.reproduce.bert_albert",
    "table1": "dure.cli.reproduce.table1",
    "version-skew": "dure.cli.reproduce.version_skew",
    "elastic": "dure.cli.reproduce.elastic",
    "asynchronous": "dure.cli.reproduce.asynchronous",
    "averaging": "dure.cli.reproduce.averaging",
    "delay-compensation": "dure.cli.reproduce.delay_compensation",
    "gossip": "dure.cli.reproduce.gossip",
    "momentum": "dure.cli.reproduce.momentum",
    "batch-size": "dure.cli.reproduce.batch_size",
    "shared-memory": "dure.cli.reproduce.shared_memory",
    "k-methods": "dure.cli.reproduce.k_methods",
    "neurons": "dure.cli.reproduce.neurons",
    "collectives": "dure.cli.reproduce.collectives",
    "strom": "dure.cli.reproduce.strom",
    "hybrid": "dure.cli.reproduce.hybrid",
    "ssp": "dure.cli.reproduce.ssp",
    "hogwild": "dure.cli.reproduce.hogwild",
    "structures": "dure.cli.reproduce.structures",
    "reinforcement": "dure.cli.reproduce.reinforcement",
    "stale-gradients": "dure.cli.reproduce.stale_gradients",
}


def find(name: str) -> ModuleType:
    """The module that reproduces `name`. Raises `UsageError`."""
    if name not in NAMES:
        known = names(NAMES)
        raise UsageError(f"nothing called {name!r} can be reproduced: there is {known}.{nearest(name, NAMES)}")
    return import_module(NAMES[name])


def check(name: str, module: ModuleType, flags: dict[str, Any]) -> None:
    """Raise `UsageError` if one of `flags` does not apply to `module`."""
    takes = list(inspect.signature(module.reproduce).parameters)
    for flag in flags:
        if flag not in takes:
            raise UsageError(f"{name} has no use for --{flag}; it takes {names(f'--{each}' for each in takes)}.")

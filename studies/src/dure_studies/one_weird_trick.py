"""Compares one weird trick with pure data parallelism: convolutions data-parallel, dense layers model-parallel.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: convolutions hold about 5 % of the
parameters and 95 % of the computation, dense layers the rest. Each part is parallelized where that sends little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.shapes.images import alexnet, one_tower, vgg
from dure.partition.tensor.trunk import Scheme
from dure.run.config import TrainConfig
from dure.run.launchers.local import run_processes
from dure.run.outcome import summary
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.train import train
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant
from dure_studies.output import Columns, Row, table_of

HERE = Path(__file__)
PAPER = {"parameters": 0.05, "operations": 0.95}
"""Shares of convolutions in the paper, about."""

WORKERS, SAMPLES, BANDWIDTH = 8, 128, "10 Gbit/s"
"""Workers in virtual time, samples of each in a step, and the speed of each worker's link."""

FLOPS_PER_SECOND = 5e12
"""Of a worker in virtual time: about a graphics card of the paper's time in single precision, at half of its peak."""

REAL_STEPS, REAL_SAMPLES = 20, 64
"""Steps of the runs on two processes, and samples of each process in a step."""

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


def reproduce() -> dict[str, Any]:
    """The rows: shares of convolutions, runs of AlexNet in virtual time, and runs of a small network on two processes.

    `shares`: of convolutions in parameters and in operations. Of a row of `rows`, `bytes_per_step` are those that all
    workers send, `bytes_by_formula` those of `bytes_of`. A real row has `difference`, the largest distance of a
    parameter from that of one process with the same mini-batches, in both precisions.
    """
    with torch.device("meta"):
        shares = [_shares("alexnet", one_tower()), _shares("vgg16", vgg())]
    rows = [_virtual_row(job, scheme) for job in [alexnet(batch=SAMPLES)] for scheme in ("data", *SCHEMES)]
    rows += [_real_row(scheme) for scheme in ("data", *SCHEMES)]
    return {"reproduce": "one-weird-trick", "time": "virtual and real", "paper": PAPER, "shares": shares, "rows": rows}


def table(result: dict[str, Any]) -> Group:
    """The shares, and the rows as a table."""
    return Group(_shares_table(result), _rows_table(result))


def small() -> Job:
    """A small network of two convolutions and three dense layers on digits, for the runs on two processes."""
    data = load_digits()

    def model() -> nn.Sequential:
        convolutions = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        convolutions += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
        dense = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*convolutions, *dense)

    return Job(model, cross_entropy, data.train, batch_size=REAL_SAMPLES, name="digits-convolutions")


def bytes_of(network: nn.Sequential, *, workers: int, samples: int, itemsize: int) -> dict[str, int]:
    """The bytes that all workers together send in a step, by kind of parallelism; each worker has so many `samples`.

    With P parameters, C of them in convolutions, F features of a sample, and for each pair of dense layers n outputs
    of the second, and n' inputs of the first if it is not the first of the network:

        data parallelism:   2 (W - 1) P
        one weird trick:    2 (W - 1) C  +  2 (W - 1) W T F  +  2 (W - 1) W T (sum of n + sum of n')
    """
    layers = list(network)
    cut = next(number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    head = [layer for layer in layers[cut:] if isinstance(layer, nn.Linear)]
    pairs = list(zip(head[::2], head[1::2], strict=False))
    exchanged = head[0].in_features + sum(second.out_features for _, second in pairs)
    exchanged += sum(first.in_features for first, _ in pairs[1:])
    both = 2 * (workers - 1) * itemsize
    every = sum(each.numel() for each in network.parameters())
    trunk = sum(each.numel() for layer in layers[:cut] for each in layer.parameters())
    trick = both * (trunk + workers * samples * exchanged)
    return {"data": both * every, **dict.fromkeys(SCHEMES, trick)}


def _shares(name: str, network: nn.Sequential) -> Row:
    """The shares of convolutions in the parameters and the operations of a network on meta, for one image."""
    value, operations = torch.empty(1, 3, 224, 224), {True: 0.0, False: 0.0}
    for layer in network:
        counter = FlopCounterMode(display=False)
        with counter:
            value = layer(value)
        operations[isinstance(layer, nn.Conv2d)] += counter.get_total_flops()
    convolutions = (layer for layer in network if isinstance(layer, nn.Conv2d))
    parameters = sum(each.numel() for each in network.parameters())
    return {
        "network": name,
        "parameters": parameters,
        "share_of_parameters": sum(each.numel() for layer in convolutions for each in layer.parameters()) / parameters,
        "share_of_operations": operations[True] / sum(operations.values()),
    }


def _virtual_row(job: Job, scheme: str) -> Row:
    compute, link = Constant(flops_per_second=FLOPS_PER_SECOND), Link(bandwidth=BANDWIDTH)
    cluster = Cluster.uniform(WORKERS, compute=compute, link=link)
    strategy = f"bsp collective {_partition(scheme, WORKERS)}"
    size = SAMPLES if scheme == "data" else WORKERS * SAMPLES
    run = train(alexnet(batch=size), strategy=strategy, on=cluster, steps=2, timing_only=True)
    return {"time": "virtual"} | _row(job, scheme, WORKERS, SAMPLES, run.summary(), 2)


def _real_row(scheme: str) -> Row:
    differences, size = {}, REAL_SAMPLES if scheme == "data" else 2 * REAL_SAMPLES
    summaries = {}
    for dtype in ("float32", "float64"):
        given: dict[str, Any] = {"steps": REAL_STEPS, "seed": 3, "dtype": dtype, "batch_size": size}
        given |= {"optimizer": "sgd:lr=0.05", "eval_every": REAL_STEPS}
        strategy = f"bsp collective {_partition(scheme, 2)}"
        real, summaries[dtype] = _trained(strategy, on="local", workers=2, **given)
        alone, _ = _trained("bsp collective", on="virtual", workers=2 if scheme == "data" else 1, **given)
        differences[dtype] = float((real - alone).abs().max())
    row = _row(small(), scheme, 2, REAL_SAMPLES, summaries["float32"], REAL_STEPS)
    return {"time": "real"} | row | {"difference": differences}


def _trained(strategy: str, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """The parameters at the end of a run of the small network, and its summary."""
    setup, cluster = resolve(TrainConfig(job=f"{HERE}:small", strategy=strategy, **options), Prebuilt())
    if cluster is None:
        outcome = run_processes(setup, Callbacks(), None, None)
    else:
        outcome = VirtualRun(setup, cluster, Callbacks()).run()
    assert outcome.params is not None
    return outcome.params, summary(setup, outcome, "real" if cluster is None else "virtual")


def _partition(scheme: str, ways: int) -> str:
    return "none" if scheme == "data" else f"one-weird-trick:ways={ways},scheme={scheme}"


def _row(job: Job, scheme: str, workers: int, samples: int, summary: Row, steps: int) -> Row:
    formulas = bytes_of(cast("nn.Sequential", job.model()), workers=workers, samples=samples, itemsize=4)
    return {
        "job": job.name,
        "parallelism": "data" if scheme == "data" else "one-weird-trick",
        "scheme": None if scheme == "data" else scheme,
        "workers": workers,
        "samples": samples,
        "seconds_per_step": summary["seconds"] / steps,
        "bytes_per_step": summary["bytes_sent"] // steps,
        "bytes_by_formula": formulas[scheme],
    }


def _shares_table(result: Row) -> Table:
    columns: Columns = [
        ("network", "{network}"),
        ("parameters", "{parameters:,}"),
        ("in convolutions", lambda row: f"{100 * row['share_of_parameters']:.1f} %"),
        ("operations there", lambda row: f"{100 * row['share_of_operations']:.1f} %"),
    ]
    caption = "Shares of convolutions, counted for one image of 3 x 224 x 224. The paper: about 5 % and 95 %."
    return table_of(result["shares"], columns, caption, texts=("network",))


def _rows_table(result: Row) -> Table:
    columns: Columns = [
        ("time", "{time}"),
        ("network", "{job}"),
        ("parallelism", lambda row: f"one weird trick, {row['scheme']}" if row["scheme"] else "data"),
        ("samples", "{workers} x {samples}"),
        ("s/step", "{seconds_per_step:.4f}"),
        ("MB/step", lambda row: f"{row['bytes_per_step'] / 1e6:,.2f}"),
        ("by formula", lambda row: f"{row['bytes_by_formula'] / 1e6:,.2f}"),
        ("difference", lambda row: " ".join(f"{each:.0e}" for each in row.get("difference", {}).values())),
    ]
    caption = (
        f"virtual: a model of {WORKERS} workers of {FLOPS_PER_SECOND / 1e12:g} TFLOP/s with links of {BANDWIDTH} each. "
        "real: two processes of this machine. MB of all workers in a step, counted and by formula. Difference: the "
        "largest of a parameter to one process with the same mini-batches, in float32 and float64."
    )
    return table_of(result["rows"], columns, caption, texts=("time", "network", "parallelism"))

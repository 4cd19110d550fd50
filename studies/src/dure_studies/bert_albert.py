"""Compares data and tensor parallelism for BERT-base and ALBERT-base on two hosts with two and four GPUs.

The paper (in Korean) trains on 50,000 IMDB reviews with two TITAN RTX in one server and four RTX 3090 in another, data
parallelism by PyTorchJob and tensor parallelism by DeepSpeed, and reports seconds of training. It states neither the
network nor the mini-batch, the length of reviews, the epochs and the precision, and it did not examine communication.
So all of these are assumed here, and the network is swept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dure.core.cost import CodecCost
from dure.core.regular_file import check_output
from dure.errors import UsageError
from dure.runtime.virtual.accelerators import InsideLink
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure_studies import bert_albert_methods
from dure_studies.bert_albert_methods import BATCH, TOKENS, WORKERS
from dure_studies.flags import OUT, numbers
from dure_studies.output import Columns, Row, draw, known, line, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dure.job.job import Job
    from dure.report.figures import Band

HERE = Path(__file__)
PAPER = {("bert", "data"): 556, ("bert", "tensor"): 392, ("albert", "data"): 264, ("albert", "tensor"): 200}
"""Seconds of training in the paper, by model and parallelism."""

MODELS, PARALLELISMS = ("bert", "albert"), ("data", "tensor")
LAYERS, WIDTH = 12, 768
PARTITIONS = {"data": "none", "tensor": f"tensor:ways={WORKERS}", "rows": f"tensor:ways={WORKERS},layers=rows"}
"""The partition of each kind of parallelism: `tensor` splits pairs of layers, `rows` each layer by its inputs."""

GBITS = (1.0, 10.0, 100.0)
"""Speeds of each host's network card, in Gbit/s."""

SWEPT = (16, 32, 64, 256, 512)
"""Word pieces of a review in the sweep, where a step has one review for each worker."""

SLOWER, FASTER = 6.5e12, 14e12
"""Operations per second: 40 % of what the maker states for a TITAN RTX and an RTX 3090 in single precision."""

REAL_STEPS, REAL_BATCH = 20, 16

quick = {"reviews": "5000"}


def reproduce(
    *,
    reviews: Annotated[str, arg(help="Numbers of training reviews, with commas between.")] = "5000,25000,50000",
    epochs: Annotated[float, arg(help="Passes over the reviews.")] = 1.0,
    out: Annotated[Path, OUT] = Path("bert-albert.svg"),
) -> dict[str, Any]:
    """The rows: seconds of a step and of a whole run, in virtual time and on two processes; draws the border to `out`.

    `reviews` are numbers of training reviews, `epochs` the passes over them. A virtual row has the speed of each host's
    card, `gbits`; `closed_form` are its seconds per step by `step_seconds`, and `memory` the bytes of the worker that
    needs most, by kind. `methods` are methods of synchronization for BERT (`bert_albert_methods.py`). `sweep` has steps
    of one review for each worker, of several lengths, and `border` the tokens of a step above which data parallelism is
    faster.

    Raises `UsageError` for options that do not fit.
    """
    counts = numbers("reviews", reviews, int, "5000,50000")
    if not epochs > 0:
        raise UsageError(f"epochs must be above 0, got {epochs:g}.")
    check_output(out)
    kinds = list(product(MODELS, PARALLELISMS))
    steps = [row for model, kind in product(MODELS, PARTITIONS) for row in virtual(model, kind, BATCH, TOKENS)]
    steps += [_real(model, kind) for model, kind in kinds]
    sweep = [row for model, kind in kinds for tokens in SWEPT for row in virtual(model, kind, WORKERS, tokens)]
    rows = [_whole(row, count, epochs) for row in steps for count in counts]
    _draw(out, sweep)
    return {
        "reproduce": "bert-albert",
        "time": "virtual and real",
        "paper": {f"{model} {kind}": seconds for (model, kind), seconds in PAPER.items()},
        "rows": rows,
        "methods": methods(),
        "sweep": sweep,
        "border": [_border(sweep, model, gbits) for model, gbits in product(MODELS, GBITS)],
        "picture": str(out),
    }


def table(result: dict[str, Any]) -> Group:
    """The rows of the most reviews beside the paper's, methods of synchronization, and the border."""
    from rich.console import Group

    return Group(_rows_table(result), bert_albert_methods.table(result["methods"]), _border_table(result))


def step_seconds(model: str, parallelism: str, gbits: float, batch: int, tokens: int) -> float:
    """Seconds of a step by a closed form, without latencies and without overlap.

    All kinds compute a sixth of the operations at each worker, and wait for the slowest; `rows` leaves the products of
    attention whole at each. With P parameters, L layers of width h, b samples of s tokens, and a card that sends and
    receives B bytes per second at each host:

        data:    2 * 5/6 * 4 P / B                    an all-reduce along a ring, which crosses each card once
        tensor:  (4 L + 1) * 2 * 8/6 * 4 b s h / B    all-reduces in two rounds; in each 2 * 4 pairs of workers are on
                                                      different hosts, and send a sixth of a tensor
        rows:    L (2 * 9 + 9) * 8/6 * 4 b s h / B    forward all-reduces of outputs of 9 h in all, and backward
                                                      all-gathers of gradients of inputs of 9 h, in one round
    """
    flops, parameters = _sizes(model, tokens)
    compute = flops * batch / WORKERS / SLOWER
    second = gbits * 1e9 / 8
    if parallelism == "data":
        return compute + 2 * 5 / 6 * 4 * parameters / second
    crossing = 8 / 6 * 4 * batch * tokens * WIDTH / second
    if parallelism == "tensor":
        return compute + (4 * LAYERS + 1) * 2 * crossing
    attention = 12 * LAYERS * batch * tokens**2 * WIDTH / SLOWER
    return compute + (WORKERS - 1) / WORKERS * attention + LAYERS * (2 * 9 + 9) * crossing


def hosts(gbits: float) -> Cluster:
    """The paper's two servers, each with one network card of this speed; the rest is assumed."""

    def host(workers: int, flops: float, inside: str) -> Machines:
        link = InsideLink(bandwidth=inside, latency="10 us")
        compute = Constant(flops_per_second=flops)
        return Machines(count=1, workers=workers, cores=16, compute=compute, inside=link)

    machines = (host(2, SLOWER, "12 GB/s"), host(4, FASTER, "24 GB/s"))
    network = Link(bandwidth=f"{gbits:g} Gbit/s", latency="0.1 ms")
    codecs = {"fp16": CodecCost(), "int8": CodecCost()}
    # GPUs copy, add and encode in little time
    return Cluster(machines=machines, link=network, beta=0.0, gamma=0.0, codecs=codecs)


def small_bert() -> Job:
    """A small BERT on random word pieces, for the runs on two processes."""
    return _small("bert")


def small_albert() -> Job:
    """A small ALBERT on random word pieces."""
    return _small("albert")


def _small(model: str) -> Job:
    import torch
    from torch.nn.functional import cross_entropy

    from dure.job.data.dataset import Data
    from dure.job.job import Job
    from dure_jobs import transformers

    sizes = {"layers": 4, "hidden": 128, "heads": 4, "intermediate": 512, "words": 2000, "places": 64}
    given = sizes | {"dropout": 0.0, "embedding": 32}
    made = transformers.bert if model == "bert" else transformers.albert
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, 2000, (1024, 64), generator=draw)
    data = Data(words, torch.randint(0, 2, (1024,), generator=draw))
    return Job(lambda: made(given), cross_entropy, data, batch_size=REAL_BATCH, name=f"small-{model}")


def methods() -> list[Row]:
    """The rows of methods of synchronization for BERT over each network."""
    job = shapes("bert", BATCH // WORKERS, TOKENS, bert_albert_methods.REVIEWS)
    return bert_albert_methods.rows(job, {gbits: hosts(gbits) for gbits in GBITS})


def shapes(model: str, batch: int, tokens: int, reviews: int = 0) -> Job:
    """The job of a model of the paper, with shapes only; of few `reviews` if 0, for runs of one step."""
    from dure.job.optimizer import OptimizerSpec
    from dure_jobs.transformers import base_shapes

    job = base_shapes(model, reviews=reviews or max(2 * batch, 64), tokens=tokens, batch_size=batch)
    return replace(job, optimizer=OptimizerSpec("adamw"))  # with the memory of its two vectors


@cache
def _sizes(model: str, tokens: int) -> tuple[float, int]:
    """The operations of a review, forward and backward, and the number of parameters."""
    job = shapes(model, WORKERS, tokens)
    return job.flops_per_sample, sum(each.numel() for each in job.model().parameters())


def virtual(model: str, parallelism: str, batch: int, tokens: int) -> list[Row]:
    """The rows of a timing-only step over each network."""
    from dure.planner.timing import largest_memory
    from dure.run.config import TrainConfig
    from dure.run.outcome import summary
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.resolve import resolve
    from dure.run.virtual import VirtualRun

    job = shapes(model, batch // WORKERS if parallelism == "data" else batch, tokens)
    strategy = f"bsp collective {PARTITIONS[parallelism]}"
    config = TrainConfig(job=job.name, strategy=strategy, on="virtual", steps=1, timing_only=True)
    setup, _ = resolve(config, Prebuilt(job=job, cluster=hosts(GBITS[0])))
    memory = largest_memory(setup)._asdict()
    rows = []
    for gbits in GBITS:
        run = summary(setup, VirtualRun(setup, hosts(gbits), Callbacks()).run(), "virtual")
        rows.append(
            {
                "time": "virtual",
                "model": model,
                "parallelism": parallelism,
                "workers": WORKERS,
                "gbits": gbits,
                "batch": batch,
                "tokens": tokens,
                "seconds_per_step": run["seconds"],
                "bytes_per_step": run["bytes_sent"],
                "closed_form": step_seconds(model, parallelism, gbits, batch, tokens),
                "memory": memory,
            }
        )
    return rows


def _real(model: str, parallelism: str) -> Row:
    from dure.run.train import train

    tensor = parallelism == "tensor"
    run = train(
        f"{HERE}:small_{model}",
        strategy=f"bsp collective {'tensor:ways=2' if tensor else 'none'}",
        on="local",
        workers=2,
        batch_size=REAL_BATCH if tensor else REAL_BATCH // 2,
        steps=REAL_STEPS,
        eval_every=REAL_STEPS,  # evaluations are not timed, and each takes longer than the steps between
        eval_samples=REAL_BATCH,
    ).summary()
    return {
        "time": "real",
        "model": f"small {model}",
        "parallelism": parallelism,
        "workers": 2,
        "gbits": None,
        "batch": REAL_BATCH,
        "tokens": 64,
        "seconds_per_step": run["seconds"] / REAL_STEPS,
        "bytes_per_step": run["bytes_sent"] // REAL_STEPS,
        "closed_form": None,
        "memory": None,
    }


def _whole(row: Row, reviews: int, epochs: float) -> Row:
    """A row of a whole run over so many reviews."""
    steps = math.ceil(reviews * epochs / row["batch"])
    whole = {"reviews": reviews, "epochs": epochs, "steps": steps, "seconds": steps * row["seconds_per_step"]}
    return {**row, **whole}


def _of(sweep: Sequence[Row], model: str, parallelism: str, gbits: float) -> list[Row]:
    wanted = (model, parallelism, gbits)
    return [row for row in sweep if (row["model"], row["parallelism"], row["gbits"]) == wanted]


def _border(sweep: Sequence[Row], model: str, gbits: float) -> Row:
    """The tokens of a step at which both kinds take as long: by the sweep, on lines between its points, and by form."""
    data, tensor = (_of(sweep, model, kind, gbits) for kind in PARALLELISMS)
    places = [math.log(row["batch"] * row["tokens"]) for row in data]
    apart = [math.log(b["seconds_per_step"] / a["seconds_per_step"]) for a, b in zip(data, tensor, strict=True)]
    found = None
    for n in range(1, len(places)):
        if apart[n - 1] < 0 <= apart[n]:
            part = apart[n - 1] / (apart[n - 1] - apart[n])
            found = math.exp(places[n - 1] + part * (places[n] - places[n - 1]))
    _, parameters = _sizes(model, SWEPT[0])
    form = 2 * 5 / 6 * parameters / ((4 * LAYERS + 1) * 2 * 8 / 6 * WIDTH)
    first = "tensor" if apart[0] < 0 else "data"
    return {"model": model, "gbits": gbits, "tokens": found, "closed_form": form, "smallest_step_won_by": first}


def _draw(path: Path, sweep: Sequence[Row]) -> None:
    """Draw the seconds of a step of tensor parallelism over those of data parallelism against the tokens of a step."""
    panels: dict[tuple[str, str], list[Band]] = {}
    for model in MODELS:
        bands = []
        for gbits in GBITS:
            data, tensor = (_of(sweep, model, kind, gbits) for kind in PARALLELISMS)
            places = [math.log2(row["batch"] * row["tokens"]) for row in data]
            pairs = zip(data, tensor, strict=True)
            ratios = [math.log2(b["seconds_per_step"] / a["seconds_per_step"]) for a, b in pairs]
            bands.append(line(f"{gbits:g} Gbit/s", places, ratios))
        bands.append(line("equal", [places[0], places[-1]], [0.0, 0.0]))
        panels["tensor / data", f"{model.upper()}-base"] = bands
    draw(path, panels, x="tokens of a step, log2", y="seconds, log2")


def _rows_table(result: Row) -> Table:
    most = max(row["reviews"] for row in result["rows"])
    caption = (
        f"A run over {most:,} reviews; the paper's was over 50,000, of unknown epochs. Virtual seconds are those of a "
        "model: GPUs, mini-batch and lengths are assumed, and the network is swept. By form: without overlap and "
        "latencies. GB: memory of the worker that needs most."
    )
    columns: Columns = [
        ("time", "{time}"),
        ("model", "{model}"),
        ("parallelism", "{parallelism}"),
        ("card", known("gbits", "{:g} Gbit/s")),
        ("samples x tokens", "{batch} x {tokens}"),
        ("s/step", "{seconds_per_step:.3f}"),
        ("by form", known("closed_form", "{:.3f}")),
        ("MB/step", lambda row: f"{row['bytes_per_step'] / 1e6:,.0f}"),
        ("GB", lambda row: "" if row["memory"] is None else f"{sum(row['memory'].values()) / 1e9:.2f}"),
        ("run", "{seconds:,.0f} s"),
        ("paper", known("paper", "{} s")),
    ]
    largest = (row for row in result["rows"] if row["reviews"] == most)
    rows = [{**row, "paper": PAPER.get((row["model"], row["parallelism"]))} for row in largest]
    return table_of(rows, columns, caption, texts=("time", "model", "parallelism"))


def _border_table(result: Row) -> Table:
    def border(row: Row) -> str:
        if row["tokens"] is not None:
            return f"{row['tokens']:,.0f}"
        return (
            f"below {WORKERS * SWEPT[0]}" if row["smallest_step_won_by"] == "data" else f"above {WORKERS * SWEPT[-1]}"
        )

    columns: Columns = [
        ("model", "{model}"),
        ("card", "{gbits:g} Gbit/s"),
        ("border, tokens", border),
        ("by form", "{closed_form:,.0f}"),
    ]
    caption = (
        "Tensor parallelism is faster for steps of fewer tokens, all samples together, data parallelism for more. By "
        f"form: the same for every network. The picture is {result['picture']}."
    )
    return table_of(result["border"], columns, caption, texts=("model",))

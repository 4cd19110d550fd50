"""Seconds per step of DistributedDataParallel with each hook, over a slow network: dure's codecs and PyTorch's own.

    sudo python bench/hooks.py                                   both models, both bandwidths, and the table
    sudo python bench/hooks.py --model mlp-25m --mbit 100        one of each; its rows are added to --rows
    python bench/hooks.py --table                                the table of the rows there are

Two processes, one thread each, on two hosts made of network namespaces (`dure_studies.namespaces`). Both hold a
model for each hook; a repeat trains `--steps` mini-batches with each of them in turn, in a rotating order, from a
barrier to the last process's end. Told are medians, and the median of the repeats' ratios to no hook at all. Bytes are
those that the card of the first host sent in the same time: headers, acknowledgements and the barrier's included.

Besides dure's: no hook (float32 by all_reduce), PyTorch's `fp16_compress_hook` and PowerSGD, and signs as frameworks
like GRACE exchange them, a byte each, by all_gather and by all_reduce. What a hook does to accuracy is not looked at.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _script import PATH, parse, ratio_of, told
from _side_by_side import LIMIT, Loop, load, timed
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.models.mlp import mlp_maker, top1
from dure.job.optimizer import OptimizerSpec
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure_studies import namespaces

WARM_UP = 3
"""Steps of each arm that are not counted: DDP and PowerSGD send the first ones whole."""

RUN_SECONDS = 560.0
LR = 1e-4  # a sign moves every parameter by as much
MODELS = {"mnist-cnn": (10, 20), "mlp-25m": (1, 15)}
"""Steps of a repeat, and repeats."""

MBIT = (1000.0, 100.0)
NO_HOOK = "none"
THRESHOLDS = {"mnist-cnn": 0.01, "mlp-25m": 0.001}
"""With which `strom` sends about one element in a hundred."""

ONE_BUCKET = 1000  # MB

HOOKS = {NO_HOOK: "DDP without a hook"}
ALIKE = {"dure fp16": ("PyTorch fp16",), "dure sign": ("byte signs, all_gather", "byte signs, all_reduce")}
"""Hooks of others that send the same information as dure's."""

Future = torch.futures.Future[torch.Tensor]
Register = Callable[[DistributedDataParallel], object]


# ---- signs, a byte each


def gathered_signs(_: object, bucket: GradBucket) -> Future:
    """Everybody gets everybody's signs, adds them up and takes the sign of that."""
    values = bucket.buffer()
    signs = torch.sign(values).to(torch.int8)
    everybody = [torch.empty_like(signs) for _ in range(dist.get_world_size())]
    done = dist.all_gather(everybody, signs, async_op=True).get_future()
    return done.then(lambda _: values.copy_(sum(everybody).sign_()))


def summed_signs(_: object, bucket: GradBucket) -> Future:
    """The signs are added up on their way; a byte holds the sum of 127."""
    values = bucket.buffer()
    signs = torch.sign(values).to(torch.int8)
    done = dist.all_reduce(signs, async_op=True).get_future()
    return done.then(lambda _: values.copy_(signs.sign_()))


# ---- arms


def arms(model: str) -> dict[str, Register]:
    """What is registered with DDP, by name."""
    ours = ["sign", "ternary", "1bit", "int8", "fp16", "top-k", f"strom:threshold={THRESHOLDS[model]}"]
    return {
        NO_HOOK: lambda ddp: None,
        **{f"dure {text.partition(':')[0]}": partial(_register, text) for text in ours},
        "byte signs, all_gather": lambda ddp: ddp.register_comm_hook(None, gathered_signs),
        "byte signs, all_reduce": lambda ddp: ddp.register_comm_hook(None, summed_signs),
        "PyTorch fp16": lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook),
        "PyTorch PowerSGD, rank 1": lambda ddp: ddp.register_comm_hook(_power(1), powerSGD_hook),
        "PyTorch PowerSGD, rank 4": lambda ddp: ddp.register_comm_hook(_power(4), powerSGD_hook),
    }


def _register(text: str, ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, dure.hook(text))


def _power(rank: int) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)


def job(model: str) -> Job:
    """A built-in job, or a perceptron of 25 million parameters in three layers on random numbers."""
    if model != "mlp-25m":
        return load(model, None)
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(512, 1024, generator=draw), torch.randint(0, 1000, (512,), generator=draw))
    return Job(
        mlp_maker(1024, 4096, 4096, 1000),
        torch.nn.functional.cross_entropy,
        data,
        batch_size=16,
        optimizer=OptimizerSpec(lr=LR),
        accuracy=top1,
        name=model,
        source="random numbers",
    )


def loop(setup: Setup, rank: int, name: str, register: Register) -> Loop:
    """PowerSGD has one bucket: with several it stood still over Gloo until the time-out."""
    cap = ONE_BUCKET if "PowerSGD" in name else None
    model = DistributedDataParallel(setup.job.build(0), gradient_as_bucket_view=True, bucket_cap_mb=cap)
    register(model)
    return Loop(setup, rank, model, torch.optim.SGD(model.parameters(), lr=LR))


# ---- measuring, on a host


def measure(given: argparse.Namespace, rank: int) -> None:
    """One of the two processes; the first prints what it found as a line of JSON."""
    torch.set_num_threads(1)
    config = TrainConfig(job=given.model, sync="bsp", on="local", workers=2, steps=10**9)
    setup, _ = resolve(config, Prebuilt(job=job(given.model)))
    loops = {name: loop(setup, rank, name, register) for name, register in arms(given.model).items()}
    for name, each in loops.items():
        print(f"{name}: {timed(partial(each.train, WARM_UP)):.1f} s to warm up", file=sys.stderr)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    names = list(loops)
    for repeat in range(given.repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            before = sent()
            seconds = timed(partial(loops[name].train, given.steps))
            rows[name].append((seconds / given.steps, (sent() - before) / given.steps))
    if rank == 0:
        print(json.dumps(rows))


def sent() -> int:
    """Bytes that this host's card has sent so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise SystemExit("this host has no card eth0: start bench/hooks.py without RANK in the environment.")


def on_host(given: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=LIMIT)
    measure(given, rank)
    dist.barrier()  # nobody tears the engine down under the other
    dist.destroy_process_group()


# ---- hosts


def run(model: str, mbit: float, given: argparse.Namespace) -> None:
    """Measure, and add to the rows."""
    steps, repeats = MODELS[model]
    steps, repeats = given.steps or steps, given.repeats or repeats
    environ = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    asked = ["--model", model, "--steps", str(steps), "--repeats", str(repeats)]
    began = time.perf_counter()
    with namespaces.hosts(2, bandwidth=mbit * 125e3) as hosts:
        command = [sys.executable, str(Path(__file__).resolve()), "--on-host", *asked]
        done = hosts.run(command, seconds=RUN_SECONDS, environ=environ)
    found = json.loads(done[0].out.splitlines()[-1])
    row = {"model": model, "mbit_per_second": mbit, "steps": steps, "arms": found, "load": os.getloadavg()[0]}
    with given.rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{model} at {mbit:g} Mbit/s: {time.perf_counter() - began:.0f} s", file=sys.stderr)


Taken = dict[tuple[str, float], dict[str, list[tuple[float, float]]]]
"""Seconds and bytes of each repeat, by model and Mbit/s, by hook."""


def read(rows: Path) -> Taken:
    """The kept rows; repeats of several runs count together."""
    taken: Taken = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        place = taken.setdefault((row["model"], row["mbit_per_second"]), {})
        for name, found in row["arms"].items():
            place.setdefault(name, []).extend(found)
    return taken


def ratios(taken: Taken) -> list[dict[str, Any]]:
    """Each of dure's codecs beside no hook, and beside the same codec of others where there is one."""
    rows = []
    for (model, mbit), found in taken.items():
        for name in found:
            if not name.startswith("dure "):
                continue
            for peer in (NO_HOOK, *ALIKE.get(name, ())):
                sides = ([seconds for seconds, _ in found[each]] for each in (name, peer))
                rows.append(ratio_of(f"{name}, {model} at {mbit:g} Mbit/s", HOOKS.get(peer, peer), *sides))
    return rows


def table(taken: Taken) -> str:
    """A row for each hook."""
    parts = []
    for model in dict.fromkeys(model for model, _ in taken):
        widths = [mbit for each, mbit in taken if each == model]
        heads = "".join(f" {mbit:g} Mbit/s, ms per step | of no hook |" for mbit in widths)
        parts += [f"| {model} | kB sent per step |{heads}", "|---|---|" + "---|---|" * len(widths)]
        for name in taken[model, widths[0]]:
            kilobytes = statistics.median(nbytes for _, nbytes in taken[model, widths[0]][name]) / 1e3
            cells = "".join(_cells(taken[model, mbit], name) for mbit in widths)
            parts.append(f"| {name} | {kilobytes:,.0f} |{cells}")
        parts.append("")
    return "\n".join(parts)


def _cells(found: dict[str, list[tuple[float, float]]], name: str) -> str:
    seconds = statistics.median(taken for taken, _ in found[name])
    pairs = zip(found[name], found[NO_HOOK], strict=True)
    ratio = statistics.median(ours / without for (ours, _), (without, _) in pairs)
    return f" {seconds * 1e3:,.1f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="both if left out")
    parser.add_argument("--mbit", type=float, help="the cards' Mbit/s; 1000 and 100 if left out")
    parser.add_argument("--steps", type=int, help="mini-batches in a repeat")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--rows", type=Path, default=Path("runs/hooks.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the rows there are")
    parser.add_argument("--on-host", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parse(parser, model="mnist-cnn", mbit=1000.0, steps=1, repeats=2, rows=Path("runs/hooks-smoke.jsonl"))
    if given.on_host:
        on_host(given)
        return
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    if not given.table:
        reason = namespaces.missing()
        if reason:
            print(f"skipped: {reason}")
            return
        if given.smoke or (given.model is None and given.mbit is None):
            given.rows.unlink(missing_ok=True)
        for model in MODELS if given.model is None else [given.model]:
            for mbit in MBIT if given.mbit is None else [given.mbit]:
                run(model, mbit, given)
    with told("hooks", given) as facts:
        taken = read(given.rows)
        print(table(taken))
        facts["ratios"] = ratios(taken)


if __name__ == "__main__":
    main()

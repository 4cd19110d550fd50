"""Real seconds and memory of plans of large models.

    python bench/plan_seconds.py [--only bert,vgg,gpt] [--within S]

    bert    BERT-base on 64 GPUs: 8 machines of 8, 100 Gbit/s between them
    vgg     VGG-16 on the 8 machines of examples/clusters/ten_gigabit_rack.yaml
    gpt     a transformer of 7 billion parameters on 256 GPUs: 32 machines of 8, 100 Gbit/s

`better` counts the strategies that were not timed although their lower bound is better than the answer. A plan runs in
a process of its own. `peak` is the largest memory of that process or of one that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _script import ROOT, parse, told

import dure
from dure.job.job import Job, load_job
from dure.job.shapes.images import vgg16
from dure.runtime.virtual.accelerators import InsideLink
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure_jobs.transformers import base_shapes

RACK = ROOT / "examples/clusters/ten_gigabit_rack.yaml"


def machines(count: int, flops: float, memory: int) -> Cluster:
    """Machines of 8 GPUs each."""
    kind = Machines(count=count, gpus=8, compute=Constant(flops_per_second=flops, overhead=5e-4), memory=memory)
    return Cluster(machines=(kind,), link=Link(bandwidth=12.5e9), inside=InsideLink(kind="switch"))


def gpt() -> Job:
    """A decoder of 35 layers of width 4,096 on 1,024 characters, 4 texts per worker."""
    return load_job("char-gpt:width=4096,layers=35,heads=32,context=1024", batch_size=4)


PLANS: dict[str, tuple[Callable[[], Job], Callable[[], Cluster], int]] = {
    "bert": (lambda: base_shapes("bert"), lambda: machines(8, 5e13, 32 * 10**9), 64),
    "vgg": (vgg16, lambda: Cluster.from_yaml(RACK), 8),
    "gpt": (gpt, lambda: machines(32, 1e14, 80 * 10**9), 256),
    "digits": (lambda: load_job("digits-mlp"), lambda: Cluster.uniform(2), 2),
}
LARGE = ("bert", "vgg", "gpt")


def plan(name: str, within: float) -> dict[str, Any]:
    """Plan, print the figures, and return them."""
    made, cluster, workers = PLANS[name]
    start = time.perf_counter()
    found = dure.plan(made(), on=cluster(), within=within)
    seconds = time.perf_counter() - start
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    answer = found.found.rows[0].timing.seconds
    better = [strategy for strategy, least in found.found.left.items() if least < answer]
    print(
        f"{name}: {workers} workers, {found.scene.model.replica.numel / 1e6:,.0f} million parameters: {seconds:.0f} s, "
        f"peak {peak / 1e6:.2f} GB of memory. {found.strategy}; {len(found.rows)} strategies work, "
        f"{len(found.found.refused)} do not, {len(found.found.left)} were not timed, "
        f"{len(better)} of them with a better bound ({', '.join(better) or 'none'}).",
        flush=True,
    )
    return {
        "plan": name,
        "seconds": seconds,
        "peak_gigabytes": peak / 1e6,
        "strategies": len(found.rows),
        "better": len(better),
    }


def main() -> None:
    """Plan each in a forked process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(LARGE))
    parser.add_argument("--within", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    given = parse(parser, only=["digits"])
    with told("plan_seconds", given) as facts:
        facts["rows"] = [in_a_fork(name, given.within) for name in given.only]


def in_a_fork(name: str, within: float) -> dict[str, Any]:
    """The result of `plan` in a forked process. Raises `SystemExit` if that fails."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(sink, json.dumps(plan(name, within)).encode())  # far less than a pipe holds
            status = 0
        finally:
            os._exit(status)
    os.close(sink)
    with os.fdopen(source) as answer:
        text = answer.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"the plan of {name} failed; its message is above.")
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    main()

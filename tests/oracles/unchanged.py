"""Compare the results of two checkouts bit for bit: `unchanged.py OTHER [--keep FOLDER]`.

Both checkouts train the same strategies in virtual time, each in a process of its own, by public names alone. The
parameters, the virtual seconds and the bytes sent must be equal. `OTHER` also writes checkpoints, which this checkout
resumes.
With `--keep` the results of `OTHER` are written to the folder, or read from it where they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parents[2]

PLAIN = [
    "bsp",
    "bsp ps",
    "bsp ps:shards=3,split=layer",
    "bsp ps:shards=2,split=keys",
    "bsp hybrid:servers=all,shards=2",
    "bsp collective:algorithm=ring",
    "bsp collective:algorithm=tree",
    "bsp collective:algorithm=halving-doubling",
    "bsp collective:algorithm=hierarchical,per_host=2",
    "one-shot",
    "averaging:period=3",
    "averaging:period=3 ps:shards=2",
    "averaging:schedule=decay,period=4",
    "easgd:period=2",
    "easgd:period=2 collective",
    "eamsgd:period=2",
    "bmuf:period=3",
    "bmuf:period=3,fragments=2,overlap=1",
    "diloco:period=3 ps",
    "backup:backups=1",
    "k-sync:k=3",
    "k-batch-sync:k=3 ps:shards=2",
    "k-async:k=2",
    "k-batch-async:k=2",
    "downpour",
    "downpour:n_push=2,n_fetch=3 ps:shards=2",
    "downpour+dc-asgd:lambda=0.04",
    "downpour+staleness-lr ps:shards=2",
    "k-async:k=2+momentum-compensation",
    "ssp:bound=2",
    "ssp:bound=1,form=rmw ps:shards=3",
    "hogwild",
    "hogbatch:batch=2",
    "asysvrg:inner=0.1",
    "ad-psgd",
    "ad-psgd gossip:graph=ring",
    "lbfgs:m=3,batch=256",
    "bsp collective fp16",
    "bsp collective 1bit",
    "bsp ps top-k",
    "ssp ps:shards=2 int8",
    "bsp collective sign+momentum",
    "downpour ps strom:threshold=0.001",
    "bsp ps ternary",
]
"""Every method and topology, and codecs of each kind."""

CODED = [
    "bsp collective:algorithm=ring int8",
    "bsp collective:algorithm=hierarchical,per_host=2 bf16",
    "bsp collective:algorithm=ring it-sign:start=8",
    "averaging:period=3 collective 1bit",
    "k-batch-async:k=2 ps:shards=2 1bit",
    "downpour+dc-asgd ps:shards=2,split=layer int8",
    "bsp ps:shards=2,split=keys top-k",
]
"""Methods and topologies with codecs, beside those of `PLAIN`."""

DEEP = "digits-mlp:depth=3"
SPLIT = {
    "bsp collective gpipe:stages=2": (DEEP, {"workers": 4}),
    "bsp collective 1f1b:stages=2 fp16": (DEEP, {"workers": 4}),
    "bsp collective interleaved:stages=2": (DEEP, {"workers": 2}),
    "bsp collective zero-bubble:stages=2": (DEEP, {"workers": 2}),
    "downpour ps pipedream:stages=2": (DEEP, {"workers": 4}),
    "bsp collective pipedream-2bw:stages=2": (DEEP, {"workers": 4}),
    "bsp collective petrowski:stages=3": (DEEP, {"workers": 3}),
    "bsp collective chen:stages=2": (DEEP, {"workers": 2}),
    "bsp collective spectrain:stages=3": (DEEP, {"workers": 3, "optimizer": "momentum"}),
    "bsp collective multi-version:stages=2": (DEEP, {"workers": 2}),
    "bsp collective ddg:stages=3": (DEEP, {"workers": 3}),
    "bsp collective features-replay:stages=2": (DEEP, {"workers": 2}),
    "bsp collective dni:stages=2": (DEEP, {"workers": 2}),
    "bsp collective tensor:ways=2": ("digits-mlp", {"workers": 4}),
    "bsp ps tensor:ways=2": ("digits-mlp", {"workers": 4}),
    "bsp collective gpipe:stages=2+tensor:ways=2": (DEEP, {"workers": 4}),
    "bsp collective neurons:ways=3,assignment=random": ("digits-mlp", {"workers": 3}),
    "downpour ps neurons:ways=2,assignment=random": ("digits-mlp", {"workers": 4}),
    "bsp collective one-weird-trick:ways=2,scheme=mixed": ("CONVOLUTIONS", {"workers": 2}),
    "bsp collective one-weird-trick:ways=2": ("CONVOLUTIONS", {"workers": 2}),
}
"""Every partition, with its job and its options. CONVOLUTIONS is a small network with two convolutions."""

REINFORCEMENT = {
    "downpour ps": ("gorila:env=CartPole-v1", {"workers": 2}),
    "bsp ps int8": ("gorila:env=CartPole-v1", {"workers": 2}),
    "bsp collective": ("apex:env=CartPole-v1,actors=3", {"workers": 1}),
    "bsp": ("dqn:env=CartPole-v1", {"workers": 1}),
}
"""Strategies of reinforcement learning, with job and options."""

CRASHES = [
    "downpour",
    "ssp:bound=2 ps:shards=2",
    "bsp ps",
    "easgd:period=2",
    "ad-psgd gossip:graph=complete",
    "hogwild",
]
"""Strategies that are run once more with a crash, a return, a pause and a slow machine."""

RESUMED = ["bsp", "ssp:bound=2 ps:shards=2", "averaging:period=3", "ad-psgd", "hogwild", "lbfgs:m=3,batch=256"]
"""Strategies whose checkpoints of one checkout are resumed by the other."""

CASES = {
    "plain": PLAIN + CODED,
    "other": [*SPLIT.items(), *REINFORCEMENT.items()],
    "crashes": CRASHES,
}
"""The cases that both checkouts run from the beginning, by the names that `PROGRAM` has for them."""

PROGRAM = '''
import json, sys
import dure

OPTIONS = {"workers": 4, "steps": 24, "seed": 3, "batch_size": 16}
FIGURES = ("params_sha256", "seconds", "bytes_sent", "messages", "updates", "steps", "loss")
EVENTS = """
machines: [{count: 4}]
events:
- {at: 4 ms, kind: crash, worker: 3}
- {at: 8 ms, kind: join, worker: 3}
- {at: 3 ms, kind: pause, worker: 1, for: 2 ms}
- {at: 2 ms, kind: slow, worker: 2, factor: 3, for: 4 ms}
"""


def figures(run):
    return {name: run.summary().get(name) for name in FIGURES}


def tell(name, play):
    try:
        found = play()
    except dure.DureError as error:
        found = {"error": str(error)}
    print(json.dumps([name, found]), flush=True)


JOBS = """
import torch
import dure


def convolutions():
    draw = torch.Generator().manual_seed(0)
    data = dure.Data(torch.randn(256, 1, 8, 8, generator=draw), torch.randint(0, 4, (256,), generator=draw))

    def model():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 3, stride=2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(54, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))

    return dure.Job(model, torch.nn.functional.cross_entropy, data)
"""

given = json.load(sys.stdin)
open(given["folder"] + "/events.yaml", "w").write(EVENTS)
open(given["folder"] + "/jobs.py", "w").write(JOBS)
for text, (job, options) in given["other"]:
    named = given["folder"] + "/jobs.py:convolutions" if job == "CONVOLUTIONS" else job
    tell(job + " " + text, lambda: figures(dure.train(
        named, strategy=text, on="virtual", **{**OPTIONS, "batch_size": None, **options})))
for text in given["plain"]:
    tell(text, lambda: figures(dure.train("digits-mlp", strategy=text, on="virtual", **OPTIONS)))
for text in given["crashes"]:
    options = {name: value for name, value in OPTIONS.items() if name != "workers"}
    tell("crash: " + text, lambda: figures(dure.train(
        "digits-mlp", strategy=text, on=given["folder"] + "/events.yaml", **options)))
for number, text in enumerate(given["write"]):
    out = given["folder"] + f"/{number}"
    tell("wrote: " + text, lambda: figures(dure.train(
        "digits-mlp", strategy=text, on="virtual", out=out, checkpoint_every=7, **{**OPTIONS, "steps": 15})))
for number, text in enumerate(given["resume"]):
    folder = given["folder"] + f"/{number}"
    tell("resumed: " + text, lambda: figures(dure.train("digits-mlp", on="virtual", resume=folder, steps=24)))
'''


def play(checkout: Path, folder: str, **asked: Sequence[object]) -> dict[str, dict[str, object]]:
    """Results by strategy of the cases `asked`, in a process that imports `checkout`."""
    given = {"plain": [], "other": [], "crashes": [], "write": [], "resume": [], **asked, "folder": folder}
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(given), env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{checkout} ended with status {done.returncode}.")
    return dict(map(json.loads, done.stdout.splitlines()))


def before(checkout: Path, keep: Path) -> dict[str, dict[str, object]]:
    """The results of the other checkout, from `keep` if they are there."""
    kept = keep / "results.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    found = play(checkout, str(keep), **CASES, write=RESUMED)
    kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def differences(one: dict[str, dict[str, object]], other: dict[str, dict[str, object]]) -> list[str]:
    """Strategies whose results differ, with both results."""
    return [f"{name}\n  {one[name]}\n  {other.get(name)}" for name in one if one[name] != other.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--keep", type=Path, help="a folder for the results of the other checkout")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        keep = given.keep or Path(place) / "other"
        keep.mkdir(parents=True, exist_ok=True)
        old = before(given.other.resolve(), keep)
        mine = Path(place) / "mine"
        mine.mkdir()
        new = play(HERE, str(mine), **CASES, write=RESUMED)
        subprocess.run(["cp", "-r", str(keep), f"{place}/theirs"], check=True)
        across = play(HERE, f"{place}/theirs", resume=RESUMED)
        within = play(HERE, str(mine), resume=RESUMED)
    refused = [f"{name} was refused: {found['error']}" for name, found in (old | within).items() if "error" in found]
    wrong = refused + differences(old, new) + differences(within, across)
    print("\n".join(wrong) or f"{len(old) + len(within)} results, all equal")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

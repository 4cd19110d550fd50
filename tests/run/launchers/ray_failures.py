"""Runs on Ray with which something happens: `python ray_failures.py ADDRESS FOLDER`, where FOLDER is that of Ray.

The program connects to Ray once, and makes a run for each line of its input, NAME and a folder: a function below. It
answers with a line that begins with `> ` and goes on with a JSON object.
"""

import json
import os
import signal
import sys
from base64 import b64encode
from collections import Counter
from pathlib import Path

import pytest
from support import faulty_environments, faulty_jobs

import dure
from dure.errors import DureError
from dure.run.launchers import ray as launcher
from dure.run.scaling import REQUEST
from dure.runtime.wire import Credentials

# the search for doctests imports this file, also where Ray is not installed
ray = pytest.importorskip("ray")

KEY = bytes(range(100, 132))
FORMS = (KEY, KEY.hex().encode(), b64encode(KEY).rstrip(b"="), json.dumps([*KEY]).encode()[1:-1])
JOBS = faulty_jobs.__file__


class Plan:
    """Acts of one run, the next as soon as its condition holds. Both get the launcher."""

    def __init__(self, *acts):
        self.acts = list(acts)
        self.started = Counter()


class Planned(launcher.RayLauncher):
    plan = Plan()

    def start(self, name, **arguments):
        assert arguments["credentials"]["key"] == KEY.hex()
        self.plan.started[name] += 1
        super().start(name, **arguments)

    def look(self):
        super().look()
        if self.plan.acts and self.plan.acts[0][0](self):
            self.plan.acts.pop(0)[1](self)

    def host_of(self, name):
        """The process of a node's actor."""
        return parent(parent(self._hosts[name].pid))

    def running(self):
        """Process ids of the workers that run."""
        workers = [host for host in self._hosts.values() if host.name.startswith("worker")]
        return {host.name: host.pid for host in workers if host.pid and host.name not in self.exited}


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet(pid):
    while Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
        pid = parent(pid)
    return pid


def saved(out):
    return lambda _: (out / "checkpoints" / "LATEST").exists()


def rows(out, count):
    """Whether the history has so many rows."""

    def holds(_):
        path = out / "run" / "history.jsonl"
        return path.exists() and len(path.read_text().splitlines()) >= count

    return holds


def train(plan, job, **options):
    Planned.plan = plan
    summary = dure.train(job, on="ray", seed=1, **options).summary()
    assert not plan.acts
    found = {name: summary[name] for name in ("deaths", "failures_survived", "unfinished")}
    found["steps"] = {name: each["steps"] for name, each in summary["per_worker"].items()}
    return found | {"started": plan.started}


# ---- the runs


def the_key(out):
    """Look for the key of the run in all files and processes, then kill a server of Downpour."""
    found = {"in": [], "looked_at": 0}

    def look(launcher):
        processes = Path("/proc").glob("[0-9]*")
        files = [path for folder in (out, FOLDER) for path in folder.rglob("*") if path.is_file()]
        for path in (*files, *(process / each for process in processes for each in ("cmdline", "environ"))):
            try:
                content = path.read_bytes()
            except OSError:
                continue
            found["looked_at"] += 1
            if any(form in content for form in FORMS):
                found["in"].append(str(path))
        launcher.signal("server 1", signal.SIGKILL)

    options = {"steps": 300, "workers": 2, "checkpoint_every": 50, "lr": 0.02, "out": out / "run"}
    return found | train(Plan((saved(out / "run"), look)), "digits-mlp", strategy="downpour ps:shards=2", **options)


def the_actor(out):
    """Kill the actor of one worker, and have another worker crash."""

    def kill(launcher):
        os.kill(launcher.host_of("worker 1"), signal.SIGKILL)
        launcher.signal("worker 2", signal.SIGSEGV)

    options = {"steps": 400, "workers": 3, "eval_every": 10, "lr": 0.02, "out": out / "run"}
    return train(Plan((rows(out, 4), kill)), "digits-mlp", strategy="ssp ps", **options)


def the_replay(out):
    """Kill the replay of Ape-X after the first checkpoint."""
    settings = "actors=2,min_size=100,target_every=50,pull_every=20,send=10,samples_per_insert=16"
    job = f"apex:env={faulty_environments.__file__}@walk,{settings}"
    plan = Plan((saved(out / "run"), lambda launcher: launcher.signal("replay 0", signal.SIGKILL)))
    options = {"steps": 200, "workers": 1, "checkpoint_every": 100, "batch_size": 32, "out": out / "run"}
    return train(plan, job, eval_every=100_000, optimizer="adam:lr=0.001", **options)


def ask(out, workers):
    (out / "run" / REQUEST).write_text(json.dumps({"workers": workers}))


def samples(out):
    lines = [line for path in out.glob("samples *") for line in path.read_text().splitlines()]
    return Counter(int(word) for line in lines for word in line.split())


def the_number_of_workers(out):
    """Grow an elastic run from 2 to 4 workers, and shrink it to 1; the machines are those of the 4 workers."""
    pids, machines = [], []

    def working(count):
        return lambda launcher: len(launcher.running()) == count and len([*out.glob("samples *")]) >= count

    def note(launcher, workers):
        if len(launcher.running()) == 4:
            (out / "pace").unlink()
        pids.append(launcher.running())
        machines.append(len({raylet(pid) for pid in launcher.running().values()}))
        ask(out, workers)

    (out / "pace").write_text("0.1")  # the run must not end before four workers run
    plan = Plan(
        (working(2), lambda launcher: note(launcher, 4)),
        (working(4), lambda launcher: note(launcher, 2)),
        (working(2), lambda launcher: note(launcher, 2)),
    )
    options = {"workers": "2..4", "epochs": 8.0, "data": out, "out": out / "run"}
    found = train(plan, f"{JOBS}:notes_samples", strategy="downpour ps:shards=2", **options)
    used = samples(out)
    return found | {"pids": pids, "machines": machines, "used": [len(used), *sorted({*used.values()})]}


def the_room(out):
    """Grow by itself from 1 to 2 workers, and ask for a third, for which Ray has no GPU."""
    found = {}

    def note(launcher):
        forks = map(parent, launcher.running().values())
        found["gpus"] = [(out / f"devices {fork}").read_text() for fork in forks]
        found["free"] = [ray.available_resources().get(name, 0) for name in ("CPU", "GPU")]
        ask(out, 3)

    options = {"workers": "1..3", "epochs": 8.0, "data": out, "out": out / "run"}
    options["reserve"] = "worker:cpus=0.25,gpus=1 server:cpus=0.125"
    plan = Plan((lambda launcher: len([*out.glob("samples *")]) >= 2, note))
    return train(plan, f"{JOBS}:notes_devices", strategy="downpour ps", **options) | found | {"used": samples(out)}


def the_device(_):
    """Ask for GPUs that Ray has and PyTorch has not."""
    try:
        return train(Plan(), "digits-mlp", workers=2, steps=5, device="cuda")
    except DureError as error:
        return {"error": str(error)}


def the_machine(out):
    """Kill the raylet of the machine without the driver, and with it all that runs there."""

    def kill(launcher):
        here = launcher._here
        pid = next(host.pid for host in launcher._hosts.values() if host.place["node"] != here)
        os.kill(raylet(pid), signal.SIGKILL)

    (out / "pace").write_text("0.1")  # the run must not end before Ray has noticed the loss
    options = {"steps": 400, "workers": 3, "checkpoint_every": 20, "lr": 0.02, "out": out / "run", "data": out}
    return train(Plan((saved(out / "run"), kill)), f"{JOBS}:digits_at_a_pace", strategy="downpour ps", **options)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2])
    Credentials.drawn = classmethod(lambda cls, integrity="mac": cls(KEY, integrity))
    launcher.RayLauncher = Planned
    ray.init(address=sys.argv[1], log_to_driver=False)
    for line in sys.stdin:
        name, place = line.split()
        found = globals()[name](Path(place))
        assert ray.is_initialized()
        print("> " + json.dumps(found), flush=True)

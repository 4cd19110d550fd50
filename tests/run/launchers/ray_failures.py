"""A run of Downpour on Ray whose second server is killed: `python ray_failures.py PLACE OUT FOLDER`.

Before the kill it looks for the key of the run in the files of Ray, which are in FOLDER, in those of the run, and in
the arguments and environments of all processes. The last line of the output is a JSON object.
"""

import json
import signal
import sys
from base64 import b64encode
from collections import Counter
from pathlib import Path

import dure
from dure.run.launchers import ray as launcher
from dure.runtime.wire import Credentials

KEY = bytes(range(100, 132))
FORMS = (KEY, KEY.hex().encode(), b64encode(KEY).rstrip(b"="), json.dumps([*KEY]).encode()[1:-1])

FOUND = {"in": [], "looked_at": 0, "started": Counter()}


def contents(folders):
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file())
    for process in Path("/proc").glob("[0-9]*"):
        yield from (process / "cmdline", process / "environ")


class Killing(launcher.RayLauncher):
    """Kills server 1 once, after the first checkpoint."""

    def start(self, name, **arguments):
        assert arguments["credentials"]["key"] == KEY.hex()
        FOUND["started"][name] += 1
        super().start(name, **arguments)

    def look(self):
        super().look()
        if not FOUND["looked_at"] and (OUT / "checkpoints" / "LATEST").exists():
            for path in contents([OUT, Path(sys.argv[3])]):
                try:
                    content = path.read_bytes()
                except OSError:
                    continue
                FOUND["looked_at"] += 1
                if any(form in content for form in FORMS):
                    FOUND["in"].append(str(path))
            self.signal("server 1", signal.SIGKILL)


if __name__ == "__main__":
    OUT = Path(sys.argv[2])
    Credentials.drawn = classmethod(lambda cls, integrity="mac": cls(KEY, integrity))
    launcher.RayLauncher = Killing
    options = {"steps": 300, "workers": 2, "checkpoint_every": 50, "seed": 1, "lr": 0.02}
    summary = dure.train("digits-mlp", strategy="downpour ps:shards=2", on=sys.argv[1], out=OUT, **options).summary()
    FOUND |= {name: summary[name] for name in ("deaths", "failures_survived")}
    FOUND["steps"] = [each["steps"] for each in summary["per_worker"].values()]
    print(json.dumps(FOUND))

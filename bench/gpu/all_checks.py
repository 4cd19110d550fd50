"""All checks on a GPU, each in a process of its own, and how many were met.

    python bench/gpu/all_checks.py correctness      as `make test-gpu`
    python bench/gpu/all_checks.py speed            on a machine that does nothing else

Exit status 1 if a check has failed or missed its bar. Without a CUDA device every check is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
CORRECTNESS = {
    1: "suite",
    2: "suite",
    3: "synchronizations",
    5: "against_ddp",
    10: "encoding",
    11: "pinned_memory",
    12: "against_ddp",
    13: "streams",
    14: "lost_rank",
    15: "resume",
    18: "zero",
}
SPEED = {4: "against_ddp", 6: "copies", 7: "copies", 8: "copies", 9: "encoding", 16: "virtual_workers", 17: "catalogue"}
GROUPS = {"correctness": CORRECTNESS, "speed": SPEED}


def outcome(number: int, script: str, more: list[str]) -> str:
    """Run one check; its lines go to standard output."""
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        command = [sys.executable, str(HERE / f"{script}.py"), "--only", str(number), "--json", str(facts), *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print("".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("{")), end="")
        if not facts.exists():
            print(f"check {number}: failed, its message is on standard error", flush=True)
            return "failed"
        rows = json.loads(facts.read_text())["checks"][str(number)]
    rehearsed = "--rehearse" in more
    if any(row.get("met") is False for row in rows) and not (rehearsed and number in SPEED):
        return "missed"
    return "skipped" if all("skipped" in row for row in rows) else "rehearsed" if rehearsed else "met"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=tuple(GROUPS))
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    more = ["--device", given.device, *(["--rehearse"] if given.rehearse else [])]
    counts = Counter(outcome(number, script, more) for number, script in GROUPS[given.group].items())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    if counts["failed"] or counts["missed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""All scripts that hold dure beside a peer, one after another, and the table of docs/research/benchmarks.md.

    python bench/all_ratios.py [--only SCRIPT ...] [--before CHECKOUT] [--smoke]
    python bench/all_ratios.py --model        the other scripts: plans, networks, time to accuracy, returns

Each script runs in a process of its own and ends with a line of JSON. Its rows of `ratios` (bench/_script.py) go to
`runs/bench/ratios.json`, with the machine, the commit and the date, and into the table between two marks of
docs/research/benchmarks.md. A row of the table that this run has not measured stays as it is. With `--smoke` the
sizes are small, nothing is written to docs/, and the rows go to `runs/bench/smoke.json`. `--before` adds
`against_commit.py`.

A script that fails does not stop the others. Exit status 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _script import PATH, ROOT

PAGE = ROOT / "docs" / "research" / "benchmarks.md"
BEGIN, END = "<!-- ratios: begin -->", "<!-- ratios: end -->"
COLUMNS = ("script", "what", "compared with", "ratio", "95 % interval", "pairs", "machine", "commit", "date")

RATIOS: dict[str, str] = {
    "bsp_vs_ddp": "--repeats 40",
    "attach_vs_ddp": "--repeats 30",
    "local_methods": "--repeats 30",
    "ad_psgd": "--repeats 30",
    "hogwild": "--repeats 30",
    "pipelines": "--repeats 20",
    "tensor": "--repeats 30",
    "zero": "--repeats 15",
    "collectives": "--repeats 15",
    "push_pull": "--repeats 25",
    "server_throughput": "--repeats 15",
    "codecs": "--repeats 15",
    "hooks": "--model mnist-cnn --mbit 100",
    "replay": "--repeats 31",
    "replay_served": "--repeats 21",
    "acting": "--repeats 31",
    "batched_gradients": "--repeats 60",
    "virtual_run": "--repeats 15 --steps 60",
    "virtual_kernel": "--repeats 15 --steps 10000 --events 100000",
}
"""The scripts, and options that are chosen for an hour together, with 15 pairs or more for each ratio."""

MODEL = (
    "virtual_network",
    "hybrid",
    "one_machine",
    "plan",
    "plan_seconds",
    "rare_exchanges",
    "pipeline_plan",
    "time_to_accuracy",
    "codec_advice",
    "one_bit_feedback",
    "gossip_decay",
    "real_steps",
    "survivors",
    "virtual_scale",
    "sealing",
    "rl_equal_time",
    "rl_returns",
)
"""Scripts of figures without a peer; together they take hours."""

NOT_HERE = {"all_ratios", "against_commit"}
"""This script, and the one that needs another checkout."""

Row = dict[str, Any]


# ---- running


def run(script: str, options: Sequence[str]) -> tuple[int, Row | None]:
    """Run a script, with its output on standard output; its exit status and its line of JSON."""
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), *options]
    path = os.pathsep.join(filter(None, [PATH, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    print(f"== {' '.join([script, *options])}", flush=True)
    began, facts = time.monotonic(), None
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"benchmark"'):
                facts = json.loads(line)
            else:
                print(line, end="", flush=True)
    print(f"== {script}: status {process.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return process.returncode, facts


def rows_of(script: str, facts: Row) -> list[Row]:
    """The ratios of a script, each with the machine, the commit and the date."""
    measured = {name: facts[name] for name in ("machine", "commit", "date")}
    return [{"script": script, **row, **measured} for row in facts.get("ratios", ())]


# ---- the table


def cells(row: Row) -> list[str]:
    """The cells of a row of the table."""
    low, high = row["interval"]
    figures = [f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}", str(row["pairs"])]
    return [f"`{row['script']}.py`", row["what"], row["peer"], *figures, row["machine"], row["commit"], row["date"]]


def merged(table: str, rows: Iterable[Row]) -> str:
    """`table` with the new `rows`: a row of the same script, work and peer is replaced, the others stay."""
    kept: dict[tuple[str, ...], list[str]] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            old = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            kept[tuple(old[:3])] = old
    for row in rows:
        new = cells(row)
        kept[tuple(new[:3])] = new
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    head = [f"| {' | '.join(lines[0])} |", f"|{'|'.join(lines[1])}|"]
    return "\n".join([*head, *(f"| {' | '.join(each)} |" for each in kept.values())])


def write_table(page: Path, rows: Iterable[Row]) -> None:
    """Put the new `rows` into the table between the marks of `page`."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no lines {BEGIN} and {END}: put them where the table belongs.")
    page.write_text(f"{before}{BEGIN}\n{merged(table, rows)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Run the scripts, and write their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*RATIOS, *MODEL), help="these scripts alone")
    parser.add_argument("--before", type=Path, help="another checkout: time this one against it as well")
    parser.add_argument("--model", action="store_true", help="the scripts of figures without a peer")
    parser.add_argument("--smoke", action="store_true", help="small sizes; nothing is written to docs/")
    given = parser.parse_args()
    chosen = given.only or list(MODEL if given.model else RATIOS)
    calls = {name: ["--smoke"] if given.smoke else RATIOS.get(name, "").split() for name in chosen}
    if given.before is not None:
        calls["against_commit"] = [str(given.before), *(["--smoke"] if given.smoke else [])]
    found: list[Row] = []
    failed = []
    for script, options in calls.items():
        status, facts = run(script, options)
        if status:
            failed.append(script)
        elif facts is not None:
            found += rows_of(script, facts)
    kept = ROOT / "runs" / "bench" / ("smoke.json" if given.smoke else "ratios.json")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(merged("", found))
    if not given.smoke:
        write_table(PAGE, [row for row in found if row["script"] != "against_commit"])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Each script of `bench/` runs through with `--smoke`, and ends with the figures that it promises."""

import ast
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
PATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "jobs/src", "studies/src"))
SCRIPTS = sorted(path.stem for path in BENCH.glob("[!_]*.py"))
SECONDS = 400
"""Time limit of a smoke, which takes 15 s of an idle core at most."""


@pytest.fixture(scope="module")
def every():
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("all_ratios", BENCH / "all_ratios.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCH))


def finite(value):
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def smoke(script, folder):
    """The output of a smoke, and its line of JSON if it has one."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [PATH, os.environ.get("PYTHONPATH")]))}
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(BENCH / f"{script}.py"), "--smoke"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    return done.stdout, json.loads(last) if last.startswith("{") else None


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "all_ratios"])
def test_a_smoke_ends_with_the_promised_figures(script, every, tmp_path):
    output, facts = smoke(script, tmp_path)
    if "\nskipped: " in output and not (facts or {}).get("ratios"):
        pytest.skip(output.partition("\nskipped: ")[2].partition("\n")[0])
    assert facts["benchmark"] == script
    assert facts["smoke"] is True
    assert {"machine", "commit", "date", "torch"} <= facts.keys()
    assert len(output.splitlines()) > 2, "no table"
    if script in every.RATIOS or script == "against_commit":
        assert facts["ratios"]
        for row in facts["ratios"]:
            low, high = row["interval"]
            assert finite(low)
            assert low <= row["ratio"] <= high
            assert finite(high)
            assert row["what"]
            assert row["peer"]
            assert row["pairs"] >= 1
    elif script != "sealing":
        assert facts[{"gossip_decay": "graphs", "real_steps": "step_seconds", "rl_returns": "runs"}.get(script, "rows")]
    else:
        assert all(finite(each) for each in facts["codes"].values())


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_all_ratios_in_smoke_form_writes_rows_and_no_docs(tmp_path):
    page = (ROOT / "docs" / "research" / "benchmarks.md").read_bytes()
    command = [sys.executable, str(BENCH / "all_ratios.py"), "--smoke", "--only", "batched_gradients", "pipeline_plan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads((ROOT / "runs" / "bench" / "smoke.json").read_text())
    assert {row["script"] for row in rows} == {"batched_gradients"}
    assert (ROOT / "docs" / "research" / "benchmarks.md").read_bytes() == page


def imported(path):
    """The imports of a script from dure and its distributions, as (module, name)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("dure"):
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module, name):
    found = importlib.import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def test_everything_that_a_script_imports_of_dure_exists():
    """A smoke finds more, but only in the long tests."""
    found = {(path.name, *each) for path in BENCH.rglob("*.py") for each in imported(path)}
    assert len(found) > 200
    assert [each for each in sorted(found) if not exists(*each[1:])] == []


def test_every_script_is_run_by_make_bench_or_make_bench_model(every):
    assert {*every.RATIOS, *every.MODEL} | every.NOT_HERE == set(SCRIPTS)
    assert not {*every.RATIOS} & {*every.MODEL}


def row(**changed):
    measured = {"machine": "2 x m", "commit": "abc", "date": "2026-02-01"}
    ratio = {"script": "a", "what": "x", "peer": "Gloo", "ratio": 1.5, "interval": [1.4, 1.625], "pairs": 15}
    return ratio | measured | changed


def test_the_table_replaces_measured_rows_and_keeps_the_others(every, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{every.BEGIN}\n{every.END}\nafter\n")
    every.write_table(page, [row(), row(script="b", commit="old")])
    every.write_table(page, [row(ratio=2.0, commit="new"), row(peer="Ray")])
    head, *lines, end, after = page.read_text().splitlines()[1:]
    assert (head, end, after) == (every.BEGIN, every.END, "after")
    assert lines[0] == "| " + " | ".join(every.COLUMNS) + " |"
    assert lines[2:] == [
        "| `a.py` | x | Gloo | 2.00 | 1.40 to 1.62 | 15 | 2 x m | new | 2026-02-01 |",
        "| `b.py` | x | Gloo | 1.50 | 1.40 to 1.62 | 15 | 2 x m | old | 2026-02-01 |",
        "| `a.py` | x | Ray | 1.50 | 1.40 to 1.62 | 15 | 2 x m | abc | 2026-02-01 |",
    ]


def test_a_page_without_marks_is_refused(every, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="has no lines"):
        every.write_table(page, [row()])


def test_the_table_of_the_page_is_one_that_the_command_writes(every):
    table = (ROOT / "docs" / "research" / "benchmarks.md").read_text(encoding="utf-8").partition(every.BEGIN)[2]
    table = table.partition(every.END)[0].strip()
    assert every.merged(table, []) == table
    assert table.count("\n| `") >= 10


def test_a_failing_script_is_told_and_does_not_stop_the_others(every, monkeypatch, tmp_path):
    calls = []

    def run(script, options):
        calls.append(script)
        ratio = {name: value for name, value in row().items() if name != "script"}
        return (1, None) if script == "tensor" else (0, {"ratios": [ratio], **ratio})

    monkeypatch.setattr(every, "run", run)
    monkeypatch.setattr(every, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["all_ratios.py", "--smoke", "--only", "tensor", "codecs"])
    with pytest.raises(SystemExit, match="failed: tensor"):
        every.main()
    assert calls == ["tensor", "codecs"]
    assert [each["script"] for each in json.loads((tmp_path / "runs/bench/smoke.json").read_text())] == ["codecs"]

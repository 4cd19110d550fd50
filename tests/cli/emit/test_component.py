"""The component of Kubeflow Pipelines in `examples/kubernetes`: its command, run here with a small job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dure.cli.main import main

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "kubernetes"


def filled(part, inputs, folder):
    """A part of a command, with a value or a path in place of a placeholder."""
    if isinstance(part, str):
        return part
    ((kind, name),) = part.items()
    return {"inputValue": inputs, "outputPath": {name: str(folder / name / "data")}}[kind][name]


def run(folder, **given):
    component = yaml.safe_load((EXAMPLES / "component.yaml").read_text(encoding="utf-8"))
    inputs = {each["name"]: each["default"] for each in component["inputs"]} | given
    container = component["implementation"]["container"]
    command = [filled(part, inputs, folder) for part in (*container["command"], *container["args"])]
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DURE_")}
    environment = {**kept, "PATH": paths, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    return done, {each["name"]: folder / each["name"] / "data" for each in component["outputs"]}


@pytest.mark.long
def test_the_component_trains_and_writes_its_seconds(tmp_path):
    done, outputs = run(tmp_path, job="quadratic", workers="2", steps="3", batch_size="4", device="cpu")
    assert done.returncode == 0, done.stderr
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in outputs.items()}
    figures = found["summary"]
    assert (figures["job"], figures["time"], figures["steps"], figures["samples"]) == ("quadratic", "real", 3, 24)
    assert 0 < found["seconds"] == figures["seconds"] < found["elapsed"]


def test_a_refused_training_fails_the_component(tmp_path):
    done, outputs = run(tmp_path, job="quadratic", strategy="no-method", device="cpu")
    assert done.returncode == 2
    assert "no-method" in done.stderr
    assert not any(path.exists() for path in outputs.values())


def test_the_manifest_is_written_by_its_command(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("DURE_")]:
        monkeypatch.delenv(name)  # an option that the environment gives is part of a text
    written = (EXAMPLES / "pytorchjob.yaml").read_text(encoding="utf-8")
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    (command,) = (line.split() for line in text.splitlines() if line.startswith("    dure train"))
    assert main(command[1:]) == 0
    assert capsys.readouterr().out == written

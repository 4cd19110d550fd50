"""A command that needs a package of an extra names it before a run starts; the core needs none."""

import json
import sys
import tomllib

import pytest
from support.core_only import ROOT, core_only, run

from dure.core.packages import EXTRAS
from dure.errors import UsageError
from dure.planner.options import PlanOptions
from dure.report.html import write_report
from dure.run.compare import compare
from dure.run.train import train

ABSENT = ("matplotlib", "scipy", "sklearn", "gymnasium", "transformers", "tensorboard", "dure_jobs")

SCRIPT = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import dure
light = "torch" not in sys.modules
import torch

results = {"light": light, "there": [name for name in sys.argv[2:] if find_spec(name)]}
settings = {"workers": 2, "steps": 20, "seed": 0}
for on in ("virtual", "local"):
    results[on] = dure.train("digits-mlp", on=on, out=on, **settings).summary()["workers"]
results["plan"] = dure.plan("digits-mlp", on=sys.argv[1], within=5).strategy
results["compare"] = str(dure.compare("quadratic", "bsp", "ssp", on="virtual", **settings).report)
model = torch.nn.Linear(3, 1)
with dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="averaging") as replica:
    model(torch.ones(2, 3)).sum().backward()
    replica.step()
results["attach"] = float(model.bias.detach()) != 0
refused = {
    "mnist-mlp": lambda: dure.train("mnist-mlp", on="local", out="refused"),
    "apex": lambda: dure.train("apex", on="virtual", out="refused"),
    "tensorboard": lambda: dure.train("digits-mlp", on="virtual", out="refused", tensorboard=True),
    "report": lambda: dure.compare("digits-mlp", "bsp", on="virtual", report=Path("r.html"), out="refused"),
    "plan": lambda: dure.plan("digits-mlp", on=sys.argv[1], report=Path("p.html")),
}
for name, call in refused.items():
    try:
        call()
    except dure.DureError as error:
        results[name] = f"{type(error).__name__}: {error}"
results["begun"] = Path("refused").exists()
print(json.dumps(results))
"""


@pytest.mark.long
def test_the_core_trains_plans_and_attaches_and_each_extra_is_named(tmp_path):
    python = core_only(tmp_path)
    (tmp_path / "work.py").write_text(f"if __name__ == '__main__':\n    exec({SCRIPT!r})\n")
    done = run(python, "work.py", str(ROOT / "examples" / "lab.yaml"), *ABSENT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["light"], results["there"], results["begun"]) == (True, [], False)
    assert (results["virtual"], results["local"], results["compare"], results["attach"]) == (2, 2, "None", True)
    assert results["plan"]
    assert results["mnist-mlp"].endswith("part of dure-jobs, which is not installed: pip install dure-jobs")
    for name, extra in {"apex": "rl", "tensorboard": "tensorboard", "report": "report", "plan": "report"}.items():
        assert results[name].startswith("UsageError: "), results[name]
        assert f'pip install "dure[{extra}]"' in results[name]
    for command in (
        ["train", "mnist-mlp"],
        ["plan", "mnist-mlp"],
        ["probe", "cifar10-vgg16"],
        ["compare", "cifar10-vgg16"],
    ):
        refused = run(python, "-m", "dure", *command, folder=tmp_path)
        assert (refused.returncode, refused.stderr.count("pip install dure-jobs")) == (2, 1), refused.stderr
    refused = run(python, "-m", "dure", "report", "virtual", folder=tmp_path)
    assert (refused.returncode, refused.stderr.count('pip install "dure[report]"')) == (2, 1), refused.stderr


def test_the_modules_of_an_extra_have_their_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert EXTRAS.keys() <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: write_report(folder / "r.html", []),
        lambda folder: compare("quadratic", "bsp", on="virtual", steps=2, out=folder / "run", report=folder / "r.html"),
        lambda folder: PlanOptions(job="quadratic", report=folder / "r.html"),
    ],
)
def test_a_report_without_its_extra_is_refused_before_a_run(call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails as if it were not installed
    with pytest.raises(UsageError, match=r'needs matplotlib .*: pip install "dure\[report\]"'):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_looked_for_before_a_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r'--tensorboard needs tensorboard .*: pip install "dure\[tensorboard\]"'):
        train("quadratic", on="virtual", steps=2, out=tmp_path / "run", tensorboard=True)
    assert list(tmp_path.iterdir()) == []

"""Jobs and places as objects, as texts, and as neither, in all functions that take them."""

from pathlib import Path

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError

FUNCTIONS = {
    "train": lambda job, **given: dure.train(job, steps=2, workers=2, **given),
    "auto": lambda job, **given: dure.train(job, sync="auto", within=0.5, steps=2, workers=2, **given),
    "compare": lambda job, **given: dure.compare(job, "bsp", steps=2, workers=2, **given),
    "plan": lambda job, **given: dure.plan(job, within=0.5, workers=2, **given),
}


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_no_job_is_refused(call):
    for job in (None, 3, Path("x.py"), b"quadratic", dure.Job):
        with pytest.raises(UsageError, match=r'a job is a name such as "digits-mlp".* is none of these\.$'):
            call(job, on="virtual")


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_no_place_is_refused_and_does_not_stand_for_another(call):
    for on in (None, 5, {"machines": []}):
        with pytest.raises(UsageError, match="on should be a valid"):
            call("quadratic", on=on)


@pytest.mark.parametrize("name", ["train", "compare"])
def test_the_path_of_a_cluster_is_a_place(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("machines: [{count: 2}]\n")
    done = FUNCTIONS[name]("quadratic", on=Path("two.yaml"))
    (run,) = getattr(done, "runs", [done])
    assert run.config["on"] == "two.yaml"
    with pytest.raises(UsageError, match="is no place and no file"):
        FUNCTIONS[name]("quadratic", on=Path("none.yaml"))


def test_an_option_that_a_plan_has_not_is_named():
    with raising(UsageError, "wrkers", "workers"):
        dure.plan("quadratic", on="virtual", wrkers=2)


def test_no_strategies_by_name_are_refused():
    with raising(UsageError, "strategies", "None"):
        dure.compare("quadratic", strategies=None, on="virtual")

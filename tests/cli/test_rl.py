import json

import pytest

from dure.cli.main import main
from dure.cli.rl import RlOptions
from dure.errors import UsageError
from dure.report.html import DEFAULT

KEYS = {
    *("env", "algorithm", "actors", "learners", "frames", "frames_per_second", "updates", "updates_per_second"),
    *("mean_return", "best_return", "replay", "param_lag", "seconds", "time", "failures_survived"),
}


def test_one_line_of_json_has_the_figures_of_a_virtual_run(capfd):
    status = main(
        ["rl", "apex", "--actors", "3", "--frames", "900", "--set", "min_size=100", "--on", "virtual", "--json"]
    )
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert status == 0
    assert found.keys() >= KEYS
    assert (found["algorithm"], found["env"], found["actors"], found["learners"]) == ("apex", "CartPole-v1", 3, 1)
    assert found["frames"] == 900
    assert 900 - 3 * 2 <= found["replay"]["inserts"] <= 900  # all but the open windows of three steps
    assert found["time"] == "virtual"


def test_the_text_of_a_job_has_the_options_that_are_given():
    options = RlOptions(algorithm="gorila", env="lab/maze.py:make", learners=3, alpha=0.5, set=("send=5",), frames=100)
    assert options.job() == "gorila:env=lab/maze.py@make,actors=3,alpha=0.5,frames=100,send=5"
    assert (options.config().sync, options.config().workers) == ("downpour", 3)


def test_zero_is_a_value():
    zeros = dict.fromkeys(("alpha", "samples_per_insert", "gamma"), 0.0)
    options = RlOptions(**zeros, steps=1, lr=0.0, grace=0.0, seed=0)
    assert options.job() == "apex:env=CartPole-v1,alpha=0,samples_per_insert=0,gamma=0"
    config = options.config()
    assert (config.lr, config.grace, config.seed) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("options", "seconds", "frames"),
    [
        ({}, 60.0, None),
        ({"on": "virtual"}, None, "50000"),
        ({"on": "virtual", "steps": 10}, None, None),
        ({"frames": 7}, None, "7"),
        ({"seconds": 3.0, "frames": 7}, 3.0, "7"),
    ],
)
def test_a_run_that_nothing_ends_has_a_limit_of_its_own(options, seconds, frames):
    config = RlOptions(**options).config()
    given = dict(item.split("=") for item in config.job.partition(":")[2].split(","))
    assert (config.seconds, given.get("frames")) == (seconds, frames)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--set send", "write KEY=VALUE"),
        ("--set hidden=12,12", "join the parts of a value by /"),
        ("--alpha 0.5 --set alpha=0.6", "alpha has a value already. Write --alpha 0.6"),
        ("--set sends=5", "has no parameter 'sends'"),
        ("--env CartPol-v1", "CartPole-v1"),
        ("--actors 2 --replays 3", "Give at most 2"),
        ("--set min_size=200000", "a larger capacity"),
        ("--learners 2 --set lockstep=true", "lockstep"),
        (
            "--env Pendulum-v1 --set dueling=false",
            "dueling is no parameter of apex for",
        ),
    ],
)
def test_wrong_options_are_named(arguments, said, capfd):
    assert main(["rl", "apex", "--on", "virtual", *arguments.split()]) == 2
    assert said in capfd.readouterr().err


def test_learners_of_bundles_have_one_actor_each(capfd):
    assert main(["rl", "gorila", "--learners", "2", "--actors", "3", "--on", "virtual"]) == 2
    assert "as many actors as learners" in capfd.readouterr().err


@pytest.mark.long
def test_a_report_is_written(tmp_path):
    path = tmp_path / DEFAULT
    arguments = f"rl dqn --frames 150 --set min_size=100 --on virtual --report {path}"
    assert main(arguments.split()) == 0
    assert "dqn:env=CartPole-v1" in path.read_text()


def test_options_are_checked():
    with pytest.raises(UsageError, match="actors"):
        RlOptions(actors=0)

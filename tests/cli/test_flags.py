"""Options are declared once: the command line, files, the environment, records and pages follow the declarations."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from support.wording import raising

from dure.cli.commands import COMMANDS
from dure.cli.flags import parse
from dure.errors import UsageError
from dure.run.config import OptionUse, TrainConfig


def is_number(name: str) -> bool:
    return re.search(r"Annotated\[(int|float),", str(TrainConfig.types()[name])) is not None


RESUME = (Path(__file__).parents[2] / "docs" / "how-to" / "resume.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=COMMANDS)
def test_each_default_is_a_value_of_its_option(kind):
    for option in fields(kind):
        if option.default is not MISSING:
            assert kind.checked(option.name, option.default) == option.default, option.name


@pytest.mark.parametrize(
    ("words", "trace"), [("", True), ("--no-trace", False), ("--trace", True), ("--trace --no-trace", False)]
)
def test_a_flag_overrides_a_switch_of_a_file_and_of_the_environment(words, trace, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trace: true\nfrozen_after: 60\n")
    given = parse(["train", "x", "--out", "r", "--config", str(file), *words.split()], {"DURE_GRACE": "3"})
    assert (given.trace, given.frozen_after, given.grace) == (trace, 60.0, 3.0)
    assert parse(["train", "x", "--out", "r", *words.split()], {"DURE_TRACE": "1"}).trace == trace


def test_an_empty_variable_of_the_environment_is_no_value(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("workers: 3\n")
    assert parse(["train", "x", "--config", str(file)], {"DURE_WORKERS": "", "DURE_SEED": ""}).workers == 3
    assert parse(["train", "x", "--config", str(file)], {"DURE_WORKERS": "2"}).workers == 2


def test_a_flag_with_the_value_of_the_default_overrides_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("frozen_after: 60\nbatch_sizes: [8, 4]\n")
    given = parse(["train", "x", "--config", str(file), "--frozen-after", "30", "--batch-sizes"], {})
    assert (given.frozen_after, given.batch_sizes) == (30.0, ())


def test_the_page_on_resuming_lists_the_options_that_may_change():
    listed = re.search(r"\n[^\n]*`steps`, `epochs`[^.;]*may change", RESUME)
    assert set(re.findall(r"`(\w+)`", listed.group(0))) == set(TrainConfig.used(OptionUse.CHANGES))


@pytest.mark.parametrize("word", ["--trace=no", "--no-exact=false", "--timing_only=", "--json=1"])
def test_a_switch_with_a_value_is_refused(word):
    with raising(UsageError, word.partition("=")[0].replace("no-", "").replace("_", "-")):
        parse(["train", "x", "--out", "r", word], {})


def test_a_wrong_value_of_the_environment_is_named():
    with raising(UsageError, "DURE_WORKERS", "many"):
        parse(["train", "x"], {"DURE_WORKERS": "many"})


@pytest.mark.parametrize("option", [name for name in TrainConfig.types() if is_number(name) and name != "batch_sizes"])
def test_true_is_no_number(option):
    with pytest.raises(UsageError, match=f"{option} should be a valid number, got True."):
        TrainConfig.of({option: True})


def test_one_place_and_one_strategy_may_stand_alone_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("on: virtual\nstrategies: ssp\n")
    given = parse(["compare", "x", "--config", str(file)], {})
    assert (given.on, given.strategies) == (("virtual",), ("ssp",))


@pytest.mark.parametrize("words", ["train x --within nan", "train x --within -1", "probe --workers 0"])
def test_each_number_of_a_command_has_a_range(words):
    with raising(UsageError, words.rpartition(" ")[2]):
        parse(words.split(), {})


@pytest.mark.parametrize("option", ["lr", "epochs", "seconds", "grace", "frozen_after"])
def test_a_number_that_no_run_can_use_is_refused(option):
    with raising(UsageError, option, "1e+308"):
        TrainConfig.of({option: 1e308})


@pytest.mark.parametrize("name", ["checkpoint_every", "trace", "tensorboard", "sinks"])
def test_an_option_that_writes_files_needs_a_folder(name):
    with raising(UsageError, f"{name} writes files", "Give out as well"):
        TrainConfig(job="digits-mlp", **{name: {"checkpoint_every": 1, "sinks": "wandb"}.get(name, True)})

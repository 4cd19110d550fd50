"""The command line as a user meets it: its output and its exit status, in processes of its own where that matters."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import SOURCE, dure, environment, here, refused

from dure.cli.main import main


def test_methods_lists_every_axis_as_a_table():
    done = here("methods")
    assert done.returncode == 0
    for name in ("bsp", "averaging", "downpour", "ssp", "ps", "collective", "fp32", "none"):
        assert f" {name} " in done.stdout


def test_methods_as_json_is_the_last_line_alone():
    done = here("methods", "--json")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    rows = {row["name"]: row for row in json.loads(line)["methods"]}
    bound, split = dict(rows["ssp"]["parameters"][0]), dict(rows["ps"]["parameters"][1])
    assert bound.pop("meaning").startswith("clocks (completed steps) by which a worker may lead the slowest one")
    about = {"range": ">= 0", "unit": "clocks", "symbol": "s"}
    assert bound == {"name": "bound", "type": "float", "default": "3", **about}
    assert split.pop("meaning").startswith("memory: equal ranges;")
    about = {"range": "", "unit": "", "symbol": ""}
    assert split == {"name": "split", "type": "memory|layer|keys|hybrid", "default": "memory", **about}
    assert rows["ssp"]["class"] == "dure.SSP"
    assert rows["ssp"]["paper"].startswith("Ho et al.")
    assert rows["dc-asgd"]["axis"] == "remedy"
    assert rows["ssp"]["combines"] == ["ps"]
    assert rows["ps"]["axis"] == "topology"
    assert "averaging" in done.stderr


def test_methods_tells_all_about_one():
    done = here("methods", "ssp")
    assert re.search(r"^bound +3 +float >= 0 +clocks +s +clocks \(completed steps\)", done.stdout, flags=re.MULTILINE)
    assert "Ho et al." in done.stdout
    assert "dure.SSP" in done.stdout
    assert "downpour" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_methods_describes_the_member_of_a_text_with_parameters():
    assert here("methods", "gpipe:stages=4,micro=8").stdout == here("methods", "gpipe").stdout
    assert 'Did you mean "stages"?' in refused("methods", "gpipe:stage=4")


def test_methods_tells_about_a_method_in_a_file():
    done = here("methods", f"{SOURCE.parent / 'examples' / '03_post_local.py'}:PostLocal", "--json")
    (row,) = json.loads(done.stdout)["methods"]
    assert row["summary"] == "BSP for the first `switch` steps, then local SGD that averages every `period`"
    assert (row["paper"], row["combines"]) == ("", ["collective"])
    first = {"name": "switch", "type": "int", "default": "50", "range": "", "unit": "", "symbol": "", "meaning": ""}
    assert row["parameters"][0] == first


def test_methods_tells_which_methods_send_what_a_codec_encodes():
    done = here("methods", "sign", "--json")
    (row,) = json.loads(done.stdout)["methods"]
    assert row["combines"] == ["bsp", "backup"]
    assert "goes with     bsp, backup" in here("methods", "it-sign").stdout


def test_methods_shows_how_fast_graphs_of_gossip_mix():
    done = here("methods", "gossip")
    assert re.search(r"^ring +16 +2 +0.004758 +0.05075 +146 +7$", done.stdout, flags=re.MULTILINE)
    assert len(re.findall(r"^(?:ring|exponential|complete) ", done.stdout, flags=re.MULTILINE)) == 9
    assert len(re.findall(r"^random-regular,", done.stdout, flags=re.MULTILINE)) == 3
    done = here("methods", "gossip:graph=0-1/1-2", "--json")
    (graph,) = json.loads(done.stdout)["methods"][0]["graphs"]
    assert graph["mixing"] == [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]
    assert (graph["workers"], graph["gap"]) == (3, pytest.approx(0.25))
    assert "\n0 75 25  \N{MIDDLE DOT}\n" in done.stderr
    assert "dure methods gossip --workers 4" in refused("methods", "ssp", "--workers", "4")


def test_an_unknown_method_is_refused_with_the_nearest():
    assert 'Did you mean "downpour"?' in refused("methods", "downpuor", dure=dure)
    assert 'Did you mean "averaging"?' in refused("train", "digits-mlp", "--sync", "average", "--on", "virtual")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sync", "ssp:bnd=3"], "bound=3"),
        (["--sync", "ssp:bound=-1"], "bound counts clocks"),
        (["--sync", "ssp", "--topology", "collective"], "The nearest that works"),
        (["--strategy", "ssp bsp"], "sync twice"),
        (["--workers", "0"], "workers should be greater than or equal to 1, got 0."),
        (["--steps", "-5"], "steps should be greater than or equal to 1, got -5."),
        (["--workers", "3", "--batch-sizes", "8", "8"], "2 sizes for 3 workers"),
        (["--trace"], "trace writes files"),
        (["--on", "lokal"], 'Did you mean "local"?'),
        (["--dtype", "float32", "--lr", "nan"], "lr should be a finite number"),
        (["--lr", "abc"], "lr should be a valid number, unable to parse string as a number, got 'abc'."),
        (["--batch-size=1.5"], "batch_size should be a valid integer"),
        (["--optimizer", "add", "--on", "virtual"], 'no optimizer "add"; there are sgd, momentum, adagrad, adam'),
        (["--optimizer", "sgd+momentum", "--on", "virtual"], "names 2 optimizers"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(flags, words):
    assert words in refused("train", "digits-mlp", *flags)


@pytest.mark.parametrize("on", ["virtual", "local"])
def test_a_split_that_the_data_have_not_is_refused_in_both_runtimes(on):
    said = refused("train", "quadratic", "--split", "dirichlet:alpha=0.1", "--on", on)
    assert said.startswith("dure: dirichlet splits by label")


def test_more_processes_than_memory_holds_are_refused_before_any_starts():
    said = refused("train", "quadratic", "--on", "local", "--workers", "100000")
    assert re.search(r"100000 processes take \d+ GB at least, and this machine has \d+: take fewer workers", said)


@pytest.mark.parametrize(
    "words", ["compare digits-mlp --epochs x", "probe --workers x", "methods --workers x", "report . --target x"]
)
def test_a_flag_that_is_no_number_is_refused_in_one_sentence_everywhere(words):
    assert re.search(r"should be a valid (number|integer), .* got 'x'\.$", refused(*words.split()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "on"), [("ssp", "virtual"), ("downpour", "local")])
def test_a_run_without_an_update_fails_and_says_so(strategy, on, tmp_path, capsys):
    """Its time is over before the first step; what it has is recorded."""
    words = ["quadratic", "--strategy", strategy, "--on", on, "--workers", "2", "--seconds", "1e-9"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        "dure: no update was applied, so the model is the one that the run began with: it ended before"
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates_applied"] == 0


def test_the_version_is_told():
    import dure as package

    done = dure("--version")
    assert (done.returncode, done.stdout) == (0, f"{package.__version__}\n")
    assert "dure --version" in dure("--help").stdout


def test_a_misspelt_flag_and_a_missing_job_are_usage_errors():
    done = here("train", "digits-mlp", "--wrkers", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--workers" in done.stderr
    assert "dure train digits-mlp" in refused("train", "--on", "virtual")
    assert "dure compare digits-mlp" in refused("compare", "--on", "virtual")


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("job: digits-mlp\nworkers: 2\nsteps: 10\nseed: 7\nsync: ssp:bound=1\non: virtual\n")
    done = here(
        "train", "--config", str(file), "--steps", "30", "--print-config", "--json", DURE_STEPS="20", DURE_WORKERS="3"
    )
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert (used["job"], used["sync"], used["seed"]) == ("digits-mlp", "ssp:bound=1", 7)
    assert used["workers"] == 3
    assert used["steps"] == 30
    assert used["lr"] is None


def test_a_printed_configuration_can_be_given_back(tmp_path):
    flags = ["digits-mlp", "--lr", "0.5", "--strategy", "bsp ps:shards=2", "--on", "virtual", "--batch-sizes", "4", "8"]
    printed = here("train", *flags, "--print-config").stdout
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    assert here("train", "--config", str(file), "--print-config").stdout == printed
    assert "bsp ps:shards=2" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stpes: 3\n", 'Did you mean "steps"?'),
        ("workers: 0\n", "workers should be"),
        ("steps: [\n", "is no YAML"),
        ("steps: 4\nsteps: 5\n", 'the key "steps" is there twice'),
        ("- 3\n", "KEY: VALUE"),
    ],
)
def test_a_bad_configuration_file_is_named(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refused("train", "digits-mlp", "--config", str(file))
    assert words in message
    assert "bad.yaml" in message


def test_a_configuration_file_that_is_not_there_is_named():
    assert "nowhere.yaml: it cannot be read" in refused("train", "digits-mlp", "--config", "nowhere.yaml")


def test_a_bad_environment_variable_is_named():
    assert "workers should be" in refused("train", "digits-mlp", DURE_WORKERS="many")


def test_compare_expands_places_times_strategies(tmp_path):
    done = here(
        *("compare", "digits-mlp", "--strategy", "bsp", "--strategy", "ssp ps:shards=2", "--on", "virtual"),
        *("--print-config", "--json", "--out", "runs"),
    )
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert used["strategies"] == ["bsp", "ssp ps:shards=2"]
    assert used["on"] == ["virtual"]


def test_a_report_of_nothing_says_so(tmp_path):
    assert "run" in refused("report", str(tmp_path))


@pytest.mark.long
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m dure methods --json | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment())
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr


FULL = "dure: standard output cannot be written (No space left on device).\n"
QUADRATIC = "train quadratic --on virtual --workers 2 --steps 4"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("--version >/dev/full", 1, FULL),
        pytest.param("train --help >/dev/full", 1, FULL, marks=pytest.mark.long),
        pytest.param("methods ssp >/dev/full", 1, FULL, marks=pytest.mark.long),
        pytest.param("methods --json >/dev/full", 1, FULL, marks=pytest.mark.long),
        ("train quadratic --stesp 4 2>/dev/full", 2, ""),
        ("--version <&- >&- 2>&-", 0, ""),
        pytest.param("methods ssp --json <&- >&- 2>&-", 0, "", marks=pytest.mark.long),
        pytest.param(f"{QUADRATIC} --json >/dev/full", 1, FULL, marks=pytest.mark.long),
        pytest.param(f"{QUADRATIC} --json 2>/dev/full", 0, '"job": "quadratic"', marks=pytest.mark.long),
        pytest.param(
            f"{QUADRATIC} --out run <&- >&- 2>&- && cat run/summary.json", 0, '"loss"', marks=pytest.mark.long
        ),
        pytest.param(
            f"{QUADRATIC} --on local --out run <&- >&- 2>&- && cat run/summary.json",
            0,
            '"loss"',
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_ends_no_run(command, status, said, tmp_path):
    line = f"{sys.executable} -m dure {command}"
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment(COLUMNS="60")
    )
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_character_that_the_encoding_of_standard_output_lacks_is_written_as_its_number():
    done = dure("methods", "averaging", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u03c4" in done.stdout


def assert_runs(program):
    """What a Python program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_dure_leaves_torch_alone_and_names_are_lazy():
    program = (
        "import sys, dure, dure.cli.main\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(dure.__all__) <= set(dir(dure))\n"
        "assert dure.SSP(bound=2).bound == 2\n"
        "import dure.run.compare\n"
        "assert callable(dure.compare), dure.compare\n"
    )
    assert_runs(program)


def test_help_is_there_without_waiting_for_torch():
    program = (
        "import sys, dure.cli.main\n"
        "try:\n"
        "    dure.cli.main.main(['train', '--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    assert "--sync" in assert_runs(program)


JOBS = """
import torch
from dure import Data, Job

CALLS = []

def rows(outputs, targets):
    return (outputs - targets).square()

def late(outputs, targets):
    CALLS.append(1)
    if len(CALLS) > 9:
        raise ValueError("enough")
    return rows(outputs, targets).mean()

def job(loss):
    return Job(lambda: torch.nn.Linear(8, 1), loss, Data(torch.ones(9, 8), torch.ones(9, 1)), batch_size=4)

def shaped():
    return job(rows)

def tires():
    return job(late)
"""


def test_a_wrong_job_is_refused_in_one_sentence_everywhere(tmp_path, monkeypatch, capsys):
    """In one process, as `main` alone is asked."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    for on in ("virtual", "local"):
        assert main(["train", "jobs.py:shaped", "--on", on, "--workers", "2", "--out", "run"]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("dure: jobs.py:shaped: a job's loss must be one number")
        assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert not (tmp_path / "run").exists()
    assert main(["probe", "jobs.py:shaped"]) == 2
    assert "jobs.py:shaped: a job's loss must be one number" in capsys.readouterr().err
    assert main(["train", "jobs.py:tires", "--on", "virtual", "--sync", "bsp"]) == 1
    sentence, *frames = capsys.readouterr().err.splitlines()[-3:]
    assert sentence == "dure: your own code raised ValueError: enough (jobs.py, line 13)."
    assert frames[0].endswith('jobs.py", line 13, in late')


CHATTY = """
import atexit, ctypes, os, sys
import torch
from dure import Data, Job

said = sys.stdout

def loss(outputs, targets):
    print("a loss")
    said.write("to the stream of old\\n")
    os.write(1, b"from below\\n")
    ctypes.CDLL(None).puts(b"from C")
    return (outputs - targets).square().mean()

def job():
    print("a job")
    atexit.register(print, "the end")
    return Job(lambda: torch.nn.Linear(8, 1), loss, Data(torch.ones(9, 8), torch.ones(9, 1)), batch_size=4)
"""


@pytest.mark.long
def test_what_a_job_prints_is_no_part_of_the_result(tmp_path):
    (tmp_path / "jobs.py").write_text(CHATTY)
    flags = ("--on", "virtual", "--workers", "2", "--steps", "2")
    done = dure("train", "jobs.py:job", *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["steps"] == 2
    for words in ("a job", "a loss", "to the stream of old", "from below", "from C", "the end"):
        assert f"{words}\n" in done.stderr
    done = dure("train", "jobs.py:job", *flags, cwd=tmp_path)
    assert done.stdout.startswith("Strategy")
    assert "from" not in done.stdout


@pytest.mark.parametrize("name", ["", "methods", "train", "compare", "report", "reproduce", "probe"])
def test_help_begins_with_an_example_that_works(name, capsys):
    from dure.cli.main import COMMANDS, main, parse

    with pytest.raises(SystemExit) as end:
        main([name, "--help"] if name else ["--help"])
    assert not end.value.code
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"example: dure {name}")
    assert len(first) <= 80
    words = shlex.split(first)[2:]
    assert isinstance(parse(words, {}), COMMANDS[words[0]])


def lossy(folder):
    """A job without accuracy, whose loss falls by half in every step."""
    (folder / "jobs.py").write_text(
        "import torch\n"
        "from dure import Data, Job\n"
        "from dure.job.optimizer import OptimizerSpec\n"
        "class Point(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.at = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, inputs):\n"
        "        return self.at + 0 * inputs\n"
        "def job():\n"
        "    data = Data(torch.zeros(8, 1), torch.zeros(8, 1))\n"
        "    loss = lambda outputs, targets: outputs.square().mean()\n"
        "    return Job(Point, loss, data, batch_size=4, optimizer=OptimizerSpec(lr=0.25))\n"
    )
    return "jobs.py:job"


@pytest.mark.long
def test_compare_alone_runs_a_few_strategies_and_keeps_earlier_reports(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "report-2.html").write_text("mine too")
    done = dure("compare", lossy(tmp_path), "--on", "virtual", "--workers", "2", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    few = ("bsp", "averaging:period=8", "ssp:bound=3", "downpour")
    assert f"comparing {', '.join(few)}" in done.stderr
    rows = done.stdout.splitlines()[4:8]
    assert all(row.split()[0].startswith(name) for row, name in zip(rows, few, strict=True)), done.stdout
    assert "report: report-3.html (report.html was there already and stays)" in done.stderr
    assert (tmp_path / "report.html").read_text() == "mine"
    assert "<html" in (tmp_path / "report-3.html").read_text()
    assert "accuracy" not in done.stdout.replace("the job has no accuracy", "")
    assert "95 %" not in done.stdout + (tmp_path / "report-3.html").read_text()


@pytest.mark.long
def test_a_loss_is_a_target_too(tmp_path):
    flags = ("--strategy", "bsp", "--on", "virtual", "--workers", "2", "--steps", "8", "--eval-every", "1")
    given = (*flags, "--report", "r.html", "--out", "runs")
    done = here("compare", lossy(tmp_path), *given, "--target-loss", "0.05", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    history = [json.loads(line) for line in next(tmp_path.glob("runs/*/history.jsonl")).read_text().splitlines()]
    reached = next(row["seconds"] for row in history if row["loss"] <= 0.05)
    assert history[0]["loss"] > 0.05
    assert "to loss 0.05" in done.stderr
    from dure.report.labels import seconds_text

    assert seconds_text(reached) in done.stderr
    assert f"reached loss 0.05 after {seconds_text(reached)} of virtual time." in (tmp_path / "r.html").read_text()
    done = here("report", "runs", "--target-loss", "1e-9", "--out", "r.html", cwd=tmp_path)
    assert "to loss 1e-09" in done.stdout
    assert "No run reached loss 1e-09." in (tmp_path / "r.html").read_text()
    refused("report", "runs", "--target-loss", "1", "--target", "0.5", cwd=tmp_path)


@pytest.mark.long
def test_the_report_of_a_comparison_has_its_target(tmp_path):
    flags = ("--strategy", "bsp", "--on", "virtual", "--workers", "2", "--steps", "4", "--report", "r.html")
    done = here("compare", "digits-mlp", *flags, "--target", "0.125", "--out", "runs", cwd=tmp_path)
    assert "to 12.5 %" in done.stdout
    assert "12.5 %" in (tmp_path / "r.html").read_text()
    here("report", "runs", "--target", "0.375", "--out", "r.html", cwd=tmp_path)
    assert "37.5 %" in (tmp_path / "r.html").read_text()


# ---- exit statuses

UNUSABLE = Path(__file__).parents[1] / "support" / "unusable_jobs.py"

WRONG = {
    "no such name": "quadrtic",
    "no such file": "absent.py:f",
    "no function named": f"{UNUSABLE}",
    "no such function": f"{UNUSABLE}:absent",
    "no function": f"{UNUSABLE}:INPUTS",
    "no such parameter": f"{UNUSABLE}:rows:width=1",
    "parameter of another type": f"{UNUSABLE}:rows:count=x",
    "parameter without value": f"{UNUSABLE}:rows:count",
    "parameter of terabytes": f"{UNUSABLE}:rows:count=100000000000000",
    "model of terabytes": f"{UNUSABLE}:columns:count=100000000000000",
    "built-in model of terabytes": "digits-mlp:hidden=10000000000",
    "size beyond 64 bits": f"digits-mlp:hidden=1{'0' * 30}",
    "text of a megabyte": "x" * 1_000_000,
    "name that no file has": f"{'x' * 5000}.py:f",
    **{
        name: f"{UNUSABLE}:{name}"
        for name in (
            *("raises", "exits", "mute", "wordy", "nothing", "module", "needs", "no_parameters", "frozen"),
            *("model_raises", "model_exits", "no_model", "other_width", "empty", "other_length", "no_batch"),
            *("vector_loss", "no_loss", "loss_raises", "without_gradient", "accuracy_raises", "wrong_accuracy"),
            "data_raises",
        )
    },
}


def is_sentence(text):
    return text.startswith("dure: ") and text.count("\n") == 1 and len(text) < 4100 and "\x1b" not in text


@pytest.mark.sampled(18)
@pytest.mark.parametrize("job", WRONG.values(), ids=WRONG.keys())
def test_a_job_that_is_unusable_before_the_training_is_wrong_usage(job):
    assert is_sentence(refused("train", job, "--on", "virtual", "--workers", "2", "--steps", "2"))


@pytest.mark.parametrize("name", ["no_parameters", "model_raises", "other_width", "vector_loss", "exits"])
@pytest.mark.parametrize(
    "command",
    [
        ("train", "--on", "virtual", "--timing-only"),
        ("train", "--on", "local"),
        ("compare", "--on", "virtual", "--strategy", "bsp", "--strategy", "ssp"),
        ("plan", "--within", "1"),
        ("probe",),
    ],
    ids=["timing", "local", "compare", "plan", "probe"],
)
def test_every_command_gives_a_wrong_job_the_same_status(command, name, tmp_path):
    if (command[-1], name) == ("--timing-only", "vector_loss"):
        pytest.skip("a run without values computes no loss")
    assert is_sentence(refused(command[0], f"{UNUSABLE}:{name}", *command[1:], "--workers", "2", cwd=tmp_path))


def test_a_file_that_cannot_be_loaded_is_wrong_usage(tmp_path):
    for number, content in enumerate(
        [b"def f(:\n", b"import no_such_package\n", b"\xff\xfe", b"", b"raise SystemExit(0)\n"]
    ):
        path = tmp_path / f"job{number}.py"
        path.write_bytes(content)
        assert is_sentence(refused("train", f"{path}:f", "--on", "virtual"))


def test_an_error_during_the_training_is_a_failure_whose_text_is_shown_once_and_shortened():
    done = here("train", f"{UNUSABLE}:later", "--on", "virtual", "--workers", "2", "--steps", "20", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    (said,) = (line for line in done.stderr.splitlines() if "xxx" in line)
    assert said.startswith("dure: your own code raised ValueError: xxx")
    assert "characters left out" in said
    assert len(done.stderr) < 5000


@pytest.mark.long
def test_an_error_of_a_worker_process_is_shortened_wherever_it_is_shown():
    done = here("train", f"{UNUSABLE}:later", "--on", "local", "--workers", "2", "--steps", "200")
    assert done.returncode == 1
    assert "ValueError: xxx" in done.stderr
    assert len(done.stderr) < 40_000


@pytest.mark.parametrize("option", ["--workers", "--steps", "--batch-size", "--lr", "--seed"])
def test_a_number_of_any_length_is_refused_in_a_sentence(option):
    for value in ("9" * 5000, "1e400", "nan", "-1", "x" * 100_000):
        assert is_sentence(refused("train", "quadratic", "--on", "virtual", option, value))
    if option == "--workers":
        said = refused("train", "quadratic", "--on", "virtual", option, "1000000000")
        assert "1,000,000,000 workers are too many: one process holds the state of all" in said

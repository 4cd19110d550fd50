"""Links between two hosts that are down for a while, or reset: the cases of `make soak`, each once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.purposes import long

from dure_studies import namespaces

SCRIPT = Path(__file__).parents[1] / "soak" / "links.py"

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing()),
]


def disturbed(tmp_path, *options):
    """The results of the script's runs."""
    log = tmp_path / "log"
    command = [sys.executable, SCRIPT, "--log", log, *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("cases", "seconds"),
    [
        (["ssp-1"], 6),
        *long((["collective", "ring"], 6), (["bsp", "ssp"], 6), (["downpour", "pipeline"], 6), (["gossip", "rl"], 6)),
    ],
)
def test_a_run_ends_as_undisturbed_although_its_link_was_down(cases, seconds, tmp_path):
    results = disturbed(tmp_path, "--short", "--seconds", seconds, "--cases", *cases)
    assert [result["case"] for result in results] == cases
    for result in results:
        assert result["survived"] == 0, "no worker was evicted"
        assert result["seconds"] > seconds


@pytest.mark.parametrize("cases", [["bsp"], *long((["ssp", "downpour"],), (["ring", "pipeline"],))])
def test_a_run_ends_as_undisturbed_although_its_connections_were_reset(cases, tmp_path):
    results = disturbed(tmp_path, "--short", "--resets", 2, "--cases", *cases)
    assert [(result["case"], result["survived"]) for result in results] == [(case, 0) for case in cases]

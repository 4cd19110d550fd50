"""The start page for two machines: its commands train and measure on two hosts in network namespaces."""

import subprocess
from pathlib import Path

import pytest
from test_commands import ELSEWHERE, blocks, check_output, environment, lines

from dure_studies import namespaces

PAGE = Path(__file__).parents[1] / "docs" / "start" / "machines.md"
FIRST_ADDRESS = "192.168.1.10"
"""The address on the page, which the reader replaces too."""

HOSTS = ("on the first", "on the second")
SECONDS = 240.0


def started(block, name, folder, address):
    written = lines(block.text.replace(FIRST_ADDRESS, address))
    text = "\n".join(line for line in written if not ELSEWHERE.match(line))
    command = ["ip", "netns", "exec", name, "bash", "-euo", "pipefail", "-c", text]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(programs):
    """The standard outputs of programs that run at the same time."""
    try:
        said = [program.communicate(timeout=SECONDS) for program in programs]
    finally:
        for program in programs:
            program.kill()
    for program, (out, errors) in zip(programs, said, strict=True):
        assert program.returncode == 0, f"{errors[-4000:]}{out[-2000:]}"
    return [out for out, _ in said]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_the_commands_of_the_page_run_on_two_hosts(tmp_path):
    folders = [tmp_path / place for place in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    page = iter(blocks(PAGE))
    printed, trained = "", 0
    with namespaces.hosts(2, bandwidth=25e6) as hosts:
        for block in page:
            if block.caption == "train.py":
                (folders[0] / block.caption).write_text(block.text, encoding="utf-8")
            elif block.caption == f"Output {HOSTS[0]}":
                check_output(block.text, printed)
            elif block.caption == "Needs a second machine":
                copy, option, *files, _ = block.text.split()
                assert (copy, option) == ("scp", "-p")
                for file in files:
                    subprocess.run(["cp", "-p", folders[0] / file, folders[1]], check=True)
            elif block.caption.endswith(HOSTS[0]) and "--node-rank 0" in block.text:
                other = next(page)
                assert other.text == block.text.replace("--node-rank 0", "--node-rank 1")
                both = zip((block, other), hosts.names, folders, strict=True)
                printed, _ = finished([started(each, *where, hosts.addresses[0]) for each, *where in both])
                trained += 1
            elif block.is_run or block.caption.endswith(HOSTS[0]):
                (printed,) = finished([started(block, hosts.names[0], folders[0], hosts.addresses[0])])
    assert trained == 2
    assert (folders[0] / "ours.yaml").exists()
    assert not (folders[1] / "ours.yaml").exists()

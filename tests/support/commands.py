"""The command line in a test: in a process of its own, or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"


def environment(**extra):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DURE_")}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "100", **extra}


def dure(*arguments, cwd=None, **extra):
    """`dure` in a process of its own, which imports torch."""
    command = [sys.executable, "-m", "dure", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=environment(**extra))


def here(*arguments, cwd=None, **extra):
    """`dure` in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith("DURE_")]:
            patch.delenv(name)
        for name, value in environment(**extra).items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def refused(*arguments, dure=here, **options):
    """The one sentence with which `dure` refuses."""
    done = dure(*arguments, **options)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("dure: ")
    assert done.stderr.count("\n") == 1
    return done.stderr

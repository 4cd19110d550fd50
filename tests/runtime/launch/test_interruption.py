"""SIGINT and SIGTERM of the command line and of the process that hears them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
from support.faulty_jobs import __file__ as jobs

from dure.cli.main import main
from dure.runtime.launch.interruption import SAME_SECONDS, Interrupted, Interruption


@pytest.fixture(autouse=True)
def heeded():
    """SIGINT is not ignored, as it is where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class RaisesWhereItIsLost:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_lost_ends_the_work_at_the_next_check():
    interruption = Interruption()
    with interruption.heard():
        RaisesWhereItIsLost()
        gc.collect()
        with pytest.raises(Interrupted) as caught:
            interruption.check()
    assert caught.value.number == signal.SIGTERM
    assert str(caught.value) == "interrupted by signal 15 (SIGTERM)."


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_work_where_it_is(number):
    interruption = Interruption()
    with interruption.heard(), pytest.raises(Interrupted):
        signal.raise_signal(number)
    interruption = Interruption()
    with interruption.heard(), interruption.deferred():
        signal.raise_signal(number)
        signal.raise_signal(number)  # the same one, as the terminal and torchrun send it
        assert interruption.number == number
        time.sleep(SAME_SECONDS)
        with pytest.raises(Interrupted):
            signal.raise_signal(number)
    assert signal.getsignal(number) is not interruption._arrived


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interruption = Interruption()
        with interruption.heard():
            signal.raise_signal(signal.SIGINT)
        assert interruption.number is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_the_last_line_of_an_interrupted_run_says_how_to_resume_it(tmp_path, capfd):
    out = tmp_path / "a run"

    def interrupt():
        latest = out / "checkpoints" / "LATEST"
        while waiting.is_set() and not latest.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Event()
    waiting.set()
    sender = threading.Thread(target=interrupt)
    sender.start()
    options = ["--workers", "2", "--steps", "100000", "--checkpoint-every", "50", "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main(["train", f"{jobs}:waits_now_and_then", "--strategy", "ssp ps", *options])
    finally:
        waiting.clear()
        sender.join()
        signal.signal(signal.SIGINT, before)
    assert status == 128 + signal.SIGINT
    lines = capfd.readouterr().err.splitlines()
    assert lines[-2:] == ["dure: interrupted", f"resume with: dure train --resume '{out}'"]

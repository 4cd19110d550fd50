"""Computations that pause at collectives: their order, their errors, and the end of their threads."""

from __future__ import annotations

import threading

import pytest
import torch
from support.runs import local, virtual
from support.shared_layers import HERE, pairs
from support.stage_jobs import job_text
from support.wording import raising

from dure.errors import DivergedError, DureError
from dure.partition.shared_stage import PausingThread
from dure.partition.tensor.ways import CollectiveCall

CALL = CollectiveCall("all_reduce", [torch.zeros(1)], [torch.Size([1])])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def split_computations():
    return [each for each in threading.enumerate() if each.name == "split computation"]


def test_a_function_pauses_at_each_collective_and_goes_on_with_its_result():
    thread, seen = PausingThread(), []

    def function():
        for _ in range(2):
            seen.append(thread.carry_out(CALL))

    assert thread.start(function) is CALL
    assert thread.resume("first") is CALL
    assert thread.resume("second") is None
    assert seen == ["first", "second"]
    thread.end()


def test_an_error_comes_out_where_the_function_goes_on():
    thread = PausingThread()

    def function():
        thread.carry_out(CALL)
        raise ArithmeticError("in the middle")

    assert thread.start(function) is CALL
    with raising(ArithmeticError, "middle"):
        thread.resume(None)
    assert thread.start(lambda: None) is None  # the thread computes the next one
    thread.end()


def test_a_paused_function_is_unwound_at_the_end():
    thread, unwound = PausingThread(), []

    def function():
        try:
            thread.carry_out(CALL)
        finally:
            unwound.append(threading.current_thread())

    thread.start(function)
    thread.end()
    assert len(unwound) == 1
    assert not unwound[0].is_alive()
    thread.end()
    assert thread.start(function) is CALL  # another thread
    assert thread.start(function) is CALL  # gives the first up
    assert len(unwound) == 2
    del function
    thread.end()
    assert len(unwound) == 3


def test_a_thread_ends_with_its_owner():
    thread, ran_in = PausingThread(), []
    thread.start(lambda: ran_in.append(threading.current_thread()))
    del thread
    ran_in[0].join(10.0)
    assert not ran_in[0].is_alive()


# ---- runs


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 1}, {"timing_only": True}])
def test_a_run_leaves_no_thread(options, tmp_path):
    run = virtual(job_text("plain"), f"bsp collective {pairs(2)}", workers=2, steps=2, out=tmp_path, **options)
    assert run.summary["steps"] == 2
    assert split_computations() == []  # while the run is there


def fails(monkeypatch, after):
    """An error in the middle of a forward, of one worker of two, that the other waits for."""
    monkeypatch.setenv("FAILS_AFTER", str(after))
    return f"{HERE}:failing_job"


def test_an_error_between_two_collectives_is_that_of_the_run(monkeypatch):
    with raising(ArithmeticError, "between") as caught:
        virtual(fails(monkeypatch, 5), f"bsp collective {pairs(2)}", workers=2, steps=10)
    assert any(frame.path.name == HERE.name for frame in caught.traceback)
    assert split_computations() == []


@pytest.mark.long
def test_an_error_between_two_collectives_ends_a_run_on_processes(monkeypatch):
    with raising(DureError, "ArithmeticError"):
        local(fails(monkeypatch, 5), f"bsp collective {pairs(2)}", workers=2, steps=10)


def test_a_loss_that_is_no_number_ends_a_run_as_that_of_a_whole_model():
    for partition, workers in (("none", 1), (pairs(2), 2)):
        with raising(DivergedError, "worker 0,"):
            virtual(job_text("plain"), f"bsp collective {partition}", workers=workers, steps=50, lr=3e38)
    assert split_computations() == []

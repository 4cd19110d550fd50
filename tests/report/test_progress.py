import io
import re

import pytest
from rich.console import Console
from support.wording import raising

from dure.report import Progress


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def console(terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def drawn(out):
    """The lines that a terminal shows at one time or another."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", out.file.getvalue()))


def test_where_no_terminal_is_a_line_comes_every_few_seconds():
    clock, out = Clock(), console(terminal=False)
    with Progress("digits-mlp", clock=clock, console=out, every=5.0) as progress:
        for step in range(1, 101):
            clock.seconds += 0.12
            progress.update(step, 100, 1 / step, 1000 * step)
    lines = out.file.getvalue().splitlines()
    assert lines == [
        "digits-mlp:  42 %, loss 0.02381, 8,333/s, 7 s left",
        "digits-mlp:  84 %, loss 0.0119, 8,333/s, 2 s left",
    ]


def test_a_short_run_says_nothing_where_no_terminal_is():
    out = console(terminal=False)
    clock = Clock()
    with Progress("digits-mlp", clock=clock, console=out) as progress:
        progress.update(1, 1, 0.5, 100)
    assert out.file.getvalue() == ""


def test_a_terminal_shows_a_bar_with_loss_and_speed():
    clock, out = Clock(), console(terminal=True)
    with Progress("digits [bold]mlp", clock=clock, console=out) as progress:
        progress.update(0, 50, None, 0)
        clock.seconds += 1.0
        progress.update(50, 50, 0.125, 2000)
    shown = out.file.getvalue()
    assert "digits [bold]mlp" in shown
    assert "100 %" in shown
    assert "loss 0.125" in shown


def test_a_terminal_is_drawn_ten_times_a_second_at_most():
    clock, out = Clock(), console(terminal=True)
    with Progress("job", clock=clock, console=out) as progress:
        progress.update(0, 10_000, 0.5, 0)
        before = len(out.file.getvalue())
        for step in range(1, 1000):
            progress.update(step, 10_000, 0.5, step)
        assert len(out.file.getvalue()) == before
        clock.seconds += 0.2
        progress.update(1000, 10_000, 0.5, 1000)
        assert len(out.file.getvalue()) > before


def test_speed_is_of_the_last_seconds_and_of_this_run_only():
    clock, out = Clock(), console(terminal=False)
    with Progress("job", clock=clock, console=out, every=1.0) as progress:
        progress.update(0, None, 0.5, 1_000_000)
        for second in range(1, 21):
            clock.seconds += 1.0
            samples = 1_000_000 + 10 * second + 990 * max(0, second - 10)
            progress.update(second, None, 0.5, samples)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "job: step 1, loss 0.5, 10/s"
    assert lines[-1] == "job: step 20, loss 0.5, 1,000/s"


def test_an_error_passes_through():
    with raising(RuntimeError, "boom"), Progress("job", clock=Clock(), console=console(terminal=True)):
        raise RuntimeError("boom")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_fits_80_columns_and_says_what_matters(terminal):
    clock, out = Clock(), console(terminal, width=200)
    out.width = 80
    name = "averaging:period=8,schedule=adaptive ps:shards=16,split=memory"
    with Progress(name, " (virtual)", clock=clock, console=out, every=1.0) as progress:
        progress.update(0, 1_000_000, 12345.678, 0)
        with progress.evaluating():
            clock.seconds += 500
        for step in range(1, 4):
            clock.seconds += 33.0
            progress.update(300_000 * step, 1_000_000, 1.2345678e-7, 100_000_000 * step)
    lines = [line for line in drawn(out) if line.strip()]
    assert max(map(len, lines)) <= 80
    last = [line for line in lines if "left" in line][-1]
    assert last.startswith("averaging:p\N{HORIZONTAL ELLIPSIS} (virtual)")
    for part in (" 90 %", "loss 1.235e-07", "67 s left", "eval 500 s"):
        assert part in last
    assert ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 5 in last) == terminal


def test_a_terminal_says_that_a_model_is_being_evaluated():
    clock, out = Clock(), console(terminal=True)
    with Progress("bsp", clock=clock, console=out) as progress:
        progress.update(1, 10, 0.5, 100)
        with progress.evaluating():
            assert "loss 0.5  evaluating" in drawn(out)[-1]
            clock.seconds += 3
        clock.seconds += 1
        progress.update(2, 10, 0.5, 200)
        assert progress.evaluation_seconds == 3
    assert "32 s left  eval 3 s" in out.file.getvalue()


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["ssp:bound=3 ps:shards=2", "ssp:bound=30 ps:shards=2"], ["ssp…3 ps:sh…", "ssp…30 ps:s…"]),
        (["averaging:period=8", "bsp"], ["averaging:p…", "bsp"]),
        (["averaging:period=8", "averaging:period=4", "bsp"], ["ave…period=8", "ave…period=4", "bsp"]),
        (["bsp ps:shards=4", "bsp ps:shards=4"], ["bsp ps:shar…"] * 2),
    ],
)
def test_a_name_is_cut_so_that_it_differs_from_the_others(names, shown):
    def line(name):
        out, clock = console(terminal=True), Clock()
        with Progress(name, " (virtual)", others=names, clock=clock, console=out) as progress:
            progress.update(1, 1, 0.5, 100)
        return next(text for text in drawn(out) if "(virtual)" in text).partition(" (virtual)")[0]

    assert [line(name) for name in names] == shown

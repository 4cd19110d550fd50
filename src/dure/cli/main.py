"""The entry point of `dure`: parses the arguments, executes the command, and writes its result.

    defaults  <  file (--config)  <  environment (DURE_WORKERS=8)  <  flags

Standard output has the result alone: the table, or with `--json` one JSON object on one line. All other output goes to
standard error, that of user code too. Exit status: 0 done, 1 failed, 2 wrong usage, 3 done although some worker has not
done all its work, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from dure import __version__
from dure.cli.commands import COMMANDS, Command, CommandResult, Rl, Train, say
from dure.cli.flags import parse
from dure.core.regular_file import CHECKPOINTS, LATEST
from dure.core.text import printable, sentence
from dure.core.user_code import explain_user_errors, frames_behind
from dure.errors import DureError, UsageError
from dure.runtime.launch.interruption import Interrupted, Interruption
from dure.runtime.launch.relay import STDERR, STDOUT, flush, ready_streams

WIDTH = 140
"""Columns of a table that is written to a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (those of this process if None), and return its exit status."""
    given, arguments = arguments, sys.argv[1:] if arguments is None else arguments
    if given is None:
        ready_streams()
    interruption = Interruption()
    command: Command | None = None
    try:
        if list(arguments) == ["--version"]:
            _write(sys.stdout, f"{__version__}\n")
            return 0
        with interruption.heard():
            if {"-h", "--help"} & {*arguments}:
                _write(sys.stdout, f"example: {COMMANDS.get(arguments[0], Train).example}\n\n")
            command = parse(arguments, os.environ)
            with _results(for_good=given is None) as out:
                with explain_user_errors("your own code raised", DureError, only=True):
                    done = command.execute(interruption)
                if _speaks(command):
                    _tell(done, out, as_json=command.json)
            return done.status
    except DureError as error:
        frames = "" if isinstance(error, UsageError) else frames_behind(error)
        say(f"dure: {sentence(str(error))}\n{frames}".rstrip("\n"))
        if interruption.number is not None:
            return _interrupted(interruption.number, command)
        return 2 if isinstance(error, UsageError) else 1
    except Interrupted as end:
        return _interrupted(end.number, command)
    except MemoryError as error:
        say(f"dure: the memory of this machine is too small for this: {sentence(str(error)) or 'MemoryError'}")
        return 1
    except BrokenPipeError:  # the reader has closed the pipe
        pass
    return 0


@contextmanager
def _results(*, for_good: bool) -> Iterator[TextIO]:
    """Yield the stream of results. While open, all other output, of C code too, goes to standard error.

    With `for_good` this holds until the process ends, also for output of user code at exit.
    """
    flush()
    before = os.dup(STDOUT)
    standard = sys.stdout is sys.__stdout__
    out = os.fdopen(before, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) if standard else sys.stdout
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield out
    finally:
        flush()
        if not for_good:
            os.dup2(before, STDOUT)
        with suppress(OSError):  # already raised by the write
            out.close() if standard else os.close(before)


def _tell(done: CommandResult, out: TextIO, *, as_json: bool) -> None:
    """Show a result to people, and with `as_json` write its JSON to `out`."""
    with _refused_writes():
        for each in done.shown:
            _show(each, sys.stderr if as_json else out)
        out.flush()
    if done.said:
        say(done.said)
    if as_json:
        from dure.report.files import to_json

        _write(out, f"{to_json(done.values)}\n")


def _write(stream: TextIO, text: str) -> None:
    with _refused_writes():
        stream.write(text)
        stream.flush()


@contextmanager
def _refused_writes() -> Iterator[None]:
    """Within the context, raise `DureError` where standard output cannot be written, as on a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DureError(f"standard output cannot be written ({error.strerror or error}).") from error


def _interrupted(number: int, command: Command | None) -> int:
    """Report that a signal has ended `command`, and how to resume its run; returns the exit status."""
    say("dure: interrupted" if number == signal.SIGINT else "dure: terminated")
    folder = (command.resume or command.out) if isinstance(command, Train | Rl) and _speaks(command) else None
    if folder is not None and (folder / CHECKPOINTS / LATEST).exists():
        launch = "torchrun, its options as before, -m " if "TORCHELASTIC_RUN_ID" in os.environ else ""
        name = "rl" if isinstance(command, Rl) else "train"
        say(f"resume with: {launch}dure {name} --resume {shlex.quote(str(folder))}")
    return 128 + number


def _speaks(command: Command) -> bool:
    """Whether this process reports results: of ranks that another program has started, only the first does."""
    return not getattr(command, "started_outside", False) or os.environ.get("RANK", "0") == "0"


def _show(what: Any, stream: TextIO) -> None:
    from rich.console import Console

    if isinstance(what, str):
        stream.write(printable(what) if stream.isatty() else what)  # a file gets the exact text
        return
    made = partial(Console, file=stream, markup=False, emoji=False)  # brackets and colons in names are no commands
    console = made()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = made(width=WIDTH)
    if callable(what):
        what(console)
    else:
        console.print(_Printable(what))


@dataclass(frozen=True)
class _Printable:
    """Shows `what` with control characters in its text escaped: they come from records and files."""

    what: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self.what, options):
            yield Segment(text if control else printable(text), style, control)

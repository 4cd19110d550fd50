"""The process from which a run's processes on this machine are forked, and the launcher's end of it.

    launcher ── starts ──> nursery: imports torch (meanwhile the launcher does too)
    launcher ── {"config": ...} ──> nursery: loads the job once, then waits
                              ├── fork ──> server 0
                              ├── fork ──> worker 0      milliseconds each; the data are shared, not copied
                              └── fork ──> worker 1
    launcher ── {"start": "worker 2", ...} ──> nursery ── {"exited": "worker 2", "status": -9} ──> launcher

The nursery never opens a socket and never runs torch on more than one thread, so it can be forked. Nobody is left
behind: when the launcher is gone, however it went, the nursery hears the end of its standard input and kills its
children; when the nursery is gone, the system kills them (Linux), and each watches a pipe whose other end only the
launcher holds. Requests are JSON lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dure.errors import DureError
from dure.runtime.launch.sentinel import watch

STOP_SECONDS = 5.0
"""How long processes may take to end when they are told to."""

PROGRAM = "dure.forked"
"""The module that a nursery runs."""

_PR_SET_PDEATHSIG = 1


class Nursery:
    """The launcher's end: starts processes, hears of their ends, leaves none behind. A context manager.

    `exited` maps names to exit statuses, negative for the signal that ended them.
    """

    def __init__(self) -> None:
        self.exited: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self._partial = b""
        self._forked = False
        self._folder = tempfile.TemporaryDirectory(prefix="dure-")
        life, self._sentinel = os.pipe()
        with (Path(self._folder.name) / "nursery.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(life)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[life],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(life)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def load(self, config: Mapping[str, Any]) -> None:
        """Have the nursery make the job of `config` (that of a `TrainConfig`, plain). Before any `start`.

        A nursery can serve one run after another.
        """
        self.pids.clear()
        self.exited.clear()
        self._say({"config": dict(config), "logs": self._folder.name})

    def start(self, name: str, **arguments: Any) -> None:
        """Fork a process that runs `member.main` with `name` and `arguments` (JSON values)."""
        self.exited.pop(name, None)
        self.pids.pop(name, None)  # the end of one that had this name before is no news
        self._forked = True
        self._say({"start": name, "arguments": arguments})

    def look(self) -> None:
        """Hear what has happened since the last look."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while piece := self._process.stdout.read(1 << 16):
                self._partial += piece
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            heard = json.loads(line)
            if "started" in heard:
                self.pids[heard["started"]] = heard["pid"]
            elif self.pids.get(heard["exited"]) == heard["pid"]:
                self.exited[heard["exited"]] = heard["status"]
        if self._process.poll() is not None:
            raise self._ended()

    def last_words(self, name: str) -> str:
        """The last line that a process wrote to its standard error; empty if none."""
        path = Path(self._folder.name) / f"{name}.err"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else ""

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process that was started here and has not ended."""
        if name in self.pids and name not in self.exited:
            with contextlib.suppress(ProcessLookupError):  # it ended, and this has not been heard yet
                os.kill(self.pids[name], number)

    def clear(self) -> None:
        """End whatever still runs, and be ready for another run."""
        with contextlib.suppress(DureError):  # then nothing runs
            self._say({"clear": True})

    def close(self) -> None:
        """End whatever still runs."""
        assert self._process.stdin is not None
        if not self._forked:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        os.close(self._sentinel)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            self._process.wait(STOP_SECONDS)
            raise self._ended() from error

    def _ended(self) -> DureError:
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        words = self.last_words("nursery").rstrip(".")
        return DureError(f"the process that starts the others {how}{': ' + words if words else ''}. All are ended.")


class _Forks:
    """The nursery's own side. `load` makes of a configuration what its processes run."""

    def __init__(self, life: int, load: Callable[[Mapping[str, Any]], Callable[..., None]]) -> None:
        self.life = life
        self.load = load
        self.children: dict[int, str] = {}
        self.logs = Path()
        self.main: Callable[..., None]

    def serve(self) -> None:
        """Until the launcher closes our standard input; then end all children."""
        ended, tell = os.pipe()  # the system writes to it when a child ends
        os.set_blocking(ended, False)
        os.set_blocking(tell, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        pending = b""
        while True:
            ready, _, _ = select.select([0, ended], [], [])
            if ended in ready:
                os.read(ended, 1 << 10)
                self._reap()
            if 0 not in ready:
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                self._end_all()
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, request: Mapping[str, Any]) -> None:
        if "clear" in request:
            self._end_all()
        elif "config" in request:
            self.logs = Path(request["logs"])
            self.main = self.load(request["config"])
        else:
            self._fork(request["start"], request["arguments"])

    def _fork(self, name: str, arguments: Mapping[str, Any]) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            self.children[pid] = name
            _tell({"started": name, "pid": pid})
            return
        status = 1
        try:
            self._settle(name, nursery)
            self.main(name=name, **arguments)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException as error:  # noqa: BLE001  (told to the launcher, through our last words)
            traceback.print_exception(error)
            sys.stderr.write(" ".join("".join(traceback.format_exception_only(error)).split()) + "\n")
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _settle(self, name: str, nursery: int) -> None:
        """In the child: own standard streams and signals, and an eye on launcher and nursery."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(self.logs / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((0, null), (1, null), (2, log)):
            os.dup2(target, fd)
        watch(self.life)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            name = self.children.pop(pid)
            _tell({"exited": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        self.children.clear()


def _tell(message: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def serve(life: int, load: Callable[[Mapping[str, Any]], Callable[..., None]]) -> None:
    """Be the nursery: of a configuration, `load` makes what processes run. Ends this process when the launcher ends.

    `life` is the descriptor of a pipe that the launcher alone can write to.
    """
    _Forks(life, load).serve()
    os._exit(0)  # nothing is left to tidy up, and the launcher waits

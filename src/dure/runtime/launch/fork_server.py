"""The fork server: a process that forks a run's processes on this machine, and the launcher's interface to it.

    launcher ── starts ──> fork server: imports torch (meanwhile the launcher does too)
    launcher ── {"setup": ...} ───> fork server: loads the job once, then waits
                              ├── fork ──> server 0
                              ├── fork ──> worker 0      milliseconds each; the data are shared, not copied
                              └── fork ──> worker 1
    launcher ── {"start": "worker 2", ...} ──> fork server ── {"exited": "worker 2", "status": -9} ──> launcher

The fork server never opens a socket and never runs torch on more than one thread, so it can be forked. No process
remains after a run. When the launcher ends in any way, the fork server reads the end of the pipe of requests and kills
its children. When the fork server ends, the system kills its children (Linux); each child also watches a pipe whose
other end only the launcher holds. Each child leads a process group: processes that the user's code starts in it, as a
DataLoader does, are killed after the end of the child, unless they make a group of their own.

Requests and answers are JSON lines on two pipes of their own. Heartbeats of all children go through one more pipe from
them to the launcher (`heartbeat.BeatPipe`). Standard input is empty in the fork server and its
children. The fork server reads the output of its children and writes it to the launcher's standard error, each line
after the name of its process (`relay`). Output of the job while the fork server loads it goes to a file, and is passed
on when the job is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from dure.core.deployment import WORKER
from dure.core.processors import usable_processors
from dure.core.text import sentence
from dure.core.user_code import frames_behind, shown
from dure.errors import DureError
from dure.runtime.heartbeat import BeatPipe
from dure.runtime.launch import relay
from dure.runtime.launch.shard_process import watch

STOP_SECONDS = 5.0
"""Time limit for processes to end after a request."""

PROGRAM = "dure.run.launchers.entry"
"""The module that a fork server runs."""

LOADER = "fork server"
"""Prefix of lines that the job prints while the fork server loads it."""

_FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets `torch.cuda.is_available()` in a job's file ask NVML: children of a process that asked CUDA cannot use it."""

_PR_SET_PDEATHSIG = 1


class Ends(NamedTuple):
    """Descriptors of a fork server that lead to its launcher.

    `life` is a pipe that the launcher alone can write to; children keep it, and `beats`, the pipe of their heartbeats.
    `requests` and `answers` carry JSON lines; `shown` is the launcher's standard error; `output` is the file of the
    fork server's own output, its standard output and error.
    """

    life: int
    beats: int
    requests: int
    answers: int
    shown: int
    output: int


class ForkServer:
    """The launcher's interface: starts processes, reports their exits, and ends all of them. A context manager.

    `exited` maps names to exit statuses, negative for the signal that ended them. `beats` carries the heartbeats of the
    processes; its end `sink` has the same number in each of them. Output goes to the descriptor `shown`.
    """

    def __init__(self, shown: int = relay.STDERR) -> None:
        self.exited: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self._last_lines: dict[str, str] = {}
        self._partial = b""
        self._forked = False
        self._output = tempfile.TemporaryFile(prefix="dure-")  # noqa: SIM115  (open for as long as the fork server)
        life, self._sentinel = os.pipe()
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._answers, False)
        self.beats = BeatPipe()
        shown = os.dup(shown)
        ends = Ends(life, self.beats.sink, requests, answers, shown, self._output.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *map(str, ends)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=ends,
            process_group=0,  # no session of its own: Linux shares cores between sessions first, then by priority
            env={
                **_FORKABLE,
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        for end in (life, requests, answers, shown):
            os.close(end)

    def load(self, setup: Mapping[str, Any]) -> None:
        """Load a run in the fork server from its `setup` (plain values). Call it before any `start`.

        A fork server can serve several runs, one after another.
        """
        self.pids.clear()
        self.exited.clear()
        self._last_lines.clear()
        self._request({"setup": dict(setup)})

    def start(self, name: str, **arguments: Any) -> None:
        """Fork a process that runs the loaded main function with `name` and `arguments` (JSON values)."""
        self.exited.pop(name, None)
        self.pids.pop(name, None)  # ignores the exit of an earlier process of this name
        self._forked = True
        self._request({"start": name, "arguments": arguments})

    def look(self) -> None:
        """Read the answers since the last look. Raises `DureError` if the fork server has ended."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._answers, 1 << 16):
                self._partial += piece
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "started" in answer:
                self.pids[answer["started"]] = answer["pid"]
            elif self.pids.get(answer["exited"]) == answer["pid"]:
                self._last_lines[answer["exited"]] = answer["last_line"]
                self.exited[answer["exited"]] = answer["status"]
        if self._process.poll() is not None:
            self._kill_groups()
            raise self._ended()

    @property
    def source(self) -> int:
        """The descriptor that can be read when `look` has something new."""
        return self._answers

    @property
    def status(self) -> int | None:
        """Exit status of the fork server, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids of the running processes by name, and of the fork server."""
        running = {name: pid for name, pid in self.pids.items() if name not in self.exited}
        return {LOADER: self._process.pid, **running}

    def room(self) -> int:
        """Processors of this machine that are left if each worker uses one."""
        workers = sum(name.startswith(WORKER) for name in self.processes)
        return max(0, usable_processors() - workers)

    def last_line(self, name: str) -> str:
        """Last line of output of a process that has ended; empty if it wrote none."""
        return self._last_lines.get(name, "")

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a running process that was started here."""
        if name in self.pids and name not in self.exited:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and no answer has reported that yet
                os.kill(self.pids[name], number)

    def clear(self) -> None:
        """End all processes of the run; the fork server stays ready for another run."""
        with contextlib.suppress(DureError):  # the fork server has ended, and its children with it
            self._request({"clear": True})

    def close(self) -> None:
        """End all processes, the fork server included."""
        if not self._forked:
            self._process.kill()
        os.close(self._requests)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        if self._process.returncode:
            self._kill_groups()
        os.close(self._sentinel)
        os.close(self._answers)
        self.beats.close()
        self._output.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _kill_groups(self) -> None:
        """Kill the process groups of all children, after the fork server and its children were killed."""
        for name, pid in self.pids.items():
            if name not in self.exited:
                _kill_group(pid)

    def _request(self, request: Mapping[str, Any]) -> None:
        try:
            relay.write_all(self._requests, json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            self._process.wait(STOP_SECONDS)
            raise self._ended() from error

    def _ended(self) -> DureError:
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].rstrip(".") if lines else ""
        return DureError(f"the process that starts the others {how}{': ' + last if last else ''}. All are ended.")


class _Output(NamedTuple):
    """The output of a child: its pipe, and the writer of its lines."""

    source: int
    lines: relay.Prefixed

    def pass_on(self) -> bool:
        """Pass on the output that is available; False at its end."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.source, 1 << 16):
                self.lines.feed(piece)
            self.close()
            return False
        return True

    def close(self) -> None:
        self.lines.end()
        os.close(self.source)


class _ForkLoop:
    """The loop of the fork server. `load` makes the main function of the children from a set-up (plain values)."""

    def __init__(self, ends: Ends, load: Callable[[Mapping[str, Any]], Callable[..., None]]) -> None:
        self.ends = ends
        self.load = load
        self.children: dict[int, tuple[str, relay.Prefixed]] = {}
        self.outputs: dict[int, _Output] = {}
        self.own = relay.Prefixed(LOADER, ends.shown)
        self.ended, self.wakeup = os.pipe()  # the system writes to it when a child exits
        self.read = 0
        self.main: Callable[..., None]

    def serve(self) -> Mapping[str, Any] | None:
        """Serve requests until the launcher closes their pipe, then end all children and return None.

        In a child, return the arguments of `main`.
        """
        for end in self.ends:
            os.set_inheritable(end, False)
        os.set_blocking(self.ended, False)
        os.set_blocking(self.wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the launcher's terminal may stop output of other groups
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        pending = b""
        while True:
            ready, _, _ = select.select([self.ends.requests, self.ended, *self.outputs], [], [])
            for source in self.outputs.keys() & {*ready}:
                self._pass_on(source)
            if self.ended in ready:
                os.read(self.ended, 1 << 10)
                self._reap()
            if self.ends.requests not in ready:
                continue
            piece = os.read(self.ends.requests, 1 << 16)
            if not piece:
                self._end_all()
                return None
            *lines, pending = (pending + piece).split(b"\n")
            for request in map(json.loads, lines):
                if "clear" in request:
                    self._end_all()
                elif "setup" in request:
                    self.main = self.load(request["setup"])
                    self._pass_on_own()
                elif self._fork(request["start"]):
                    return {"name": request["start"], **request["arguments"]}

    def _fork(self, name: str) -> bool:
        """Fork the process `name`. Return whether this process is the child."""
        fork_server = os.getpid()
        relay.flush()  # the child would write the content of the buffers again
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            self._set_up_child(source, sink, fork_server)
            return True
        with contextlib.suppress(OSError):  # it has ended
            os.setpgid(pid, pid)  # the child does the same; the first of both counts
        os.close(sink)
        os.set_blocking(source, False)
        self.outputs[source] = _Output(source, relay.Prefixed(name, self.ends.shown))
        self.children[pid] = name, self.outputs[source].lines
        self._report({"started": name, "pid": pid})
        return False

    def _set_up_child(self, source: int, sink: int, fork_server: int) -> None:
        """Set up the child: own standard streams and signals, and exit with the launcher and the fork server."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ctrl-C of a terminal reaches the launcher's group alone. A SIGINT here ends this process like SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for descriptor in (relay.STDOUT, relay.STDERR):
            os.dup2(sink, descriptor)
        for descriptor in (source, sink, self.ended, self.wakeup, *self.outputs, *self.ends[2:]):
            os.close(descriptor)
        watch(self.ends.life)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != fork_server:
            os._exit(1)

    def _reap(self) -> None:
        while self.children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_group(ended.si_pid)  # before another process can get this id
            pid, status = os.waitpid(ended.si_pid, 0)
            if pid not in self.children:
                continue  # the job started it while it was loaded
            name, lines = self._forget(pid)
            exited = {"exited": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)}
            self._report({**exited, "last_line": lines.last})

    def _forget(self, pid: int) -> tuple[str, relay.Prefixed]:
        """Remove a child that has ended, and pass on the rest of its output."""
        name, lines = self.children.pop(pid)
        for source in [source for source, output in self.outputs.items() if output.lines is lines]:
            self._pass_on(source)
        lines.end()  # its own children may hold the pipe open
        return name, lines

    def _pass_on(self, source: int) -> None:
        if not self.outputs[source].pass_on():
            del self.outputs[source]

    def _pass_on_own(self) -> None:
        """Pass on the output of the job from its loading."""
        relay.flush()
        while piece := os.pread(self.ends.output, 1 << 16, self.read):
            self.read += len(piece)
            self.own.feed(piece)
        self.own.end()

    def _end_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            _kill_group(pid)
        for pid in [*self.children]:
            os.waitpid(pid, 0)
            self._forget(pid)

    def _report(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            relay.write_all(self.ends.answers, json.dumps(message).encode() + b"\n")


def _kill_group(leader: int) -> None:
    """Kill the processes in the process group of a child, which itself may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def serve(ends: Ends, load: Callable[[Mapping[str, Any]], Callable[..., None]]) -> None:
    """Run the fork server until the launcher ends. `load` makes the main function of the children from a set-up."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    loop = _ForkLoop(ends, load)
    arguments = loop.serve()
    if arguments is None:
        os._exit(0)  # skips the interpreter's clean-up, for which the launcher would wait
    status = 1  # this process is a child
    try:
        loop.main(**arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except DureError as error:  # the launcher reports the last line that is not indented
        sys.stderr.write(f"{sentence(str(error))}\n{frames_behind(error)}")
    except BaseException as error:  # noqa: BLE001  (the launcher reports the last line that is not indented)
        relay.flush()
        sys.stderr.write(shown(error))
    finally:
        relay.flush()
        os._exit(status)

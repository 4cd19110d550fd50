"""Warnings of preemption, by a real file and by a real HTTP server that answers as those of the clouds."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.runtime.launch import preemption
from dure.runtime.launch.preemption import check_source, is_given, watching

ACTION = json.dumps({"action": "terminate", "time": "2026-11-28T10:00:00Z"})


def events(*kinds):
    return json.dumps({"DocumentIncarnation": 1, "Events": [{"EventId": "A", "EventType": kind} for kind in kinds]})


@contextmanager
def serving(answer, port=0):
    """A server whose answers are `answer(request)`: a status and a text; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answer(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action"
        finally:
            server.shutdown()
            thread.join()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.parametrize(
    ("status", "text", "warned"),
    [
        (404, "Not Found", False),
        (200, ACTION, True),
        (200, "FALSE", False),
        (200, "TRUE\n", True),
        (200, events(), False),
        (200, events("Reboot", "Freeze"), False),
        (200, events("Reboot", "Preempt"), True),
        (200, "", True),
    ],
)
def test_an_answer_is_read_as_its_cloud_means_it(status, text, warned):
    with serving(lambda _: (status, text)) as url:
        assert is_given(url) is warned


def test_the_headers_of_google_and_azure_are_sent():
    def answer(request):
        return (200, "TRUE") if request.headers["Metadata-Flavor"] == "Google" else (403, "")

    def azure(request):
        return (200, events("Preempt")) if request.headers["Metadata"] == "true" else (400, "")

    for each in (answer, azure):
        with serving(each) as url:
            assert is_given(url)


@pytest.mark.parametrize("warned", [False, True])
def test_a_token_that_aws_asks_for_is_fetched(warned):
    def answer(request):
        if request.command == "PUT" and request.path == "/latest/api/token":
            return 200 if int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0 else 400, "secret"
        if request.headers["X-aws-ec2-metadata-token"] != "secret":
            return 401, ""
        return (200, ACTION) if warned else (404, "")

    with serving(answer) as url:
        assert is_given(url) is warned


def test_a_proxy_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with serving(lambda _: (200, "TRUE")) as url:
        assert is_given(url)


def test_a_file_warns_once_it_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "PERIOD_SECONDS", 0.05)
    warned = threading.Event()
    with watching(f"file:{tmp_path / 'preempted'}", warned.set):
        assert not warned.wait(0.3)
        (tmp_path / "preempted").touch()
        assert warned.wait(5)


def test_a_url_without_an_answer_is_logged_once_and_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(preemption, "PERIOD_SECONDS", 0.05)
    port, warned = free_port(), threading.Event()
    with watching(f"http://127.0.0.1:{port}/", warned.set):
        assert not warned.wait(0.5)
        assert sum("gives no answer" in record.message for record in caplog.records) == 1
        with serving(lambda _: (200, "TRUE"), port):
            assert warned.wait(5)


def test_a_server_that_is_silent_holds_up_nothing(monkeypatch):
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.2)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(OSError, match="timed out"):
            is_given(url)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("source", ["", "/run/preempted", "file:", "ftp://host/x", "http://", "file://host/x"])
def test_what_is_neither_a_file_nor_a_url_is_refused(source):
    with raising(UsageError, "neither a file nor a URL"):
        check_source(source)


@pytest.mark.parametrize("source", ["file:/run/preempted-{rank}", "file:///run/preempted", "http://169.254.169.254/x"])
def test_files_and_urls_are_sources(source):
    check_source(source)

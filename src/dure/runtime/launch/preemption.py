"""Warnings that a machine is about to be taken away, as a cloud gives them by a file or a URL.

| source                           | a warning is                                          |
|----------------------------------|-------------------------------------------------------|
| `file:PATH`                      | the file exists                                       |
| AWS, `.../spot/instance-action`  | an answer with status 200; before, it is 404          |
| Google, `.../instance/preempted` | the text TRUE; before, it is FALSE                    |
| Azure, `.../scheduledevents`     | an event of the type Preempt among `Events`           |
| any other URL                    | an answer with status 200 and another text than FALSE |

AWS may ask for a token (status 401), which is fetched from the same host. Azure shows the machines of a scale set each
other's events, so its warnings are right for machines alone only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from dure.core.text import log
from dure.errors import UsageError

PERIOD_SECONDS = 1.0
"""Seconds between two looks. A warning comes 30 to 120 s before the end."""

ANSWER_SECONDS = 1.0
"""Time limit for an answer: the service is on the machine itself."""

MOST_BYTES = 100_000

RANK = "{rank}"
"""Stands for the rank of a worker in a source, where each worker has one of its own."""

HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Google's and Azure's services answer only with their header."""

TOKEN_PATH = "/latest/api/token"  # noqa: S105  (a path of AWS's service)
TOKEN_SECONDS = 60


def check_source(source: str) -> None:
    """Raise `UsageError` for a source that is neither a file nor a URL."""
    parts = urlsplit(source)
    if parts.scheme == "file" and source.removeprefix("file:") and not parts.netloc:
        return
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f'preemption_notice="{source}" names neither a file nor a URL. Write file:/run/preempted, or '
            "http://169.254.169.254/latest/meta-data/spot/instance-action."
        )


def is_given(source: str) -> bool:
    """Whether there is a warning. Raises `OSError` or `HTTPException` if a URL gives no answer."""
    if source.startswith("file:"):
        return Path(source.removeprefix("file:").removeprefix("//")).exists()
    try:
        answer = _text_of(source)
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return False
        raise
    return _warns(answer)


def _warns(answer: str) -> bool:
    try:
        found = json.loads(answer)
    except ValueError:
        return answer.strip().upper() != "FALSE"
    if isinstance(found, dict) and isinstance(found.get("Events"), list):
        return any(isinstance(event, dict) and event.get("EventType") == "Preempt" for event in found["Events"])
    return found is not False


def _text_of(source: str) -> str:
    """The answer of a URL, with a token if it asks for one."""
    try:
        return _answer(source, HEADERS)
    except HTTPError as error:
        if error.code != HTTPStatus.UNAUTHORIZED:
            raise
    return _answer(source, HEADERS | {"X-aws-ec2-metadata-token": _token(source)})


def _token(source: str) -> str:
    """A token of AWS's service."""
    parts = urlsplit(source)
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    return _answer(f"{parts.scheme}://{parts.netloc}{TOKEN_PATH}", headers, "PUT")


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str:
    opener = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine
    with opener.open(Request(url, headers=headers, method=method), timeout=ANSWER_SECONDS) as reply:  # noqa: S310
        found: bytes = reply.read(MOST_BYTES)
    return found.decode(errors="replace")


@contextmanager
def watching(source: str, warn: Callable[[], None]) -> Iterator[None]:
    """While open, a thread looks for a warning, and calls `warn` once there is one.

    A source that gives no answer is logged once, and asked again.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(source, warn, ended), name="preemption notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(source: str, warn: Callable[[], None], ended: threading.Event) -> None:
    told = False
    while not ended.is_set():
        try:
            if is_given(source):
                log.warning("%s warns that this machine will be taken away.", source)
                warn()
                return
        except (OSError, HTTPException) as error:
            if not told:
                log.warning("%s gives no answer (%s); it is asked every %g s.", source, error, PERIOD_SECONDS)
            told = True
        ended.wait(PERIOD_SECONDS)

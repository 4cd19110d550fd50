"""Download of one published file: checked, and written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dure.errors import DataError

PIECE = 1 << 18
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Published:
    """A published file: its length, its SHA-256, and the URLs of the folders that offer it (`homes`)."""

    name: str
    nbytes: int
    sha256: str
    homes: Sequence[str]


def fetch(file: Published, folder: Path) -> Path:
    """Download `file` into `folder` and return its path there.

    Homes are tried in order. The file gets its name only after its length and checksum have been verified.
    Raises `DataError`, with the error of each home, if no home delivers the right file.
    """
    target = folder / file.name
    failures = []
    with _temporary(folder, file.name) as temporary:
        for home in file.homes:
            url = f"{home.rstrip('/')}/{file.name}"
            try:
                _download(url, file, temporary)
            except (OSError, HTTPException, DataError) as error:
                failures.append(f"{url}: {error}")
            else:
                os.replace(temporary, target)
                return target
    raise DataError(f"could not download {file.name}: " + "; ".join(failures))


def _download(url: str, file: Published, temporary: Path) -> None:
    digest = hashlib.sha256()
    request = urllib.request.Request(url)  # noqa: S310  (homes are constants of the loaders)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as source, temporary.open("wb") as sink:  # noqa: S310
        for piece in _progress(_pieces(source, file.nbytes), file):
            digest.update(piece)
            sink.write(piece)
        nbytes = sink.tell()
        sink.flush()
        os.fsync(sink.fileno())
    if nbytes != file.nbytes:
        raise DataError(f"got {nbytes:,} bytes or more where the published file has {file.nbytes:,}")
    if digest.hexdigest() != file.sha256:
        raise DataError(f"sha256 is {digest.hexdigest()} where the published file has {file.sha256}")


def _pieces(source: IO[bytes], nbytes: int) -> Iterator[bytes]:
    """Yield pieces of `source`, in total at most `nbytes` + 1 bytes: the extra byte shows that a file is too long."""
    left = nbytes + 1
    while left and (piece := source.read(min(PIECE, left))):
        left -= len(piece)
        yield piece


def _progress(pieces: Iterable[bytes], file: Published) -> Iterator[bytes]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(file.name, total=file.nbytes)
        for piece in pieces:
            bar.update(task, advance=len(piece))
            yield piece


@contextlib.contextmanager
def _temporary(folder: Path, name: str) -> Iterator[Path]:
    """A temporary file in `folder`, removed at the end of the block unless it was renamed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        os.close(handle)
    except OSError as error:
        raise DataError(f"cannot write into {folder}: {error.strerror}. Name a writable folder with --data.") from error
    try:
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)

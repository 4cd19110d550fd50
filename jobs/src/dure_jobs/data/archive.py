"""Reader of a published tar.gz archive; nothing is unpacked to disk."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from dure.errors import DataError


def files(path: Path, wanted: Callable[[str], bool], *, most: int, again: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file in the archive at `path` whose name is `wanted`.

    Every member is examined and the checksum at the end is read, so that a damaged or unsafe archive is rejected as a
    whole. Raises `DataError`, ending with `again`, for such an archive or for a member of more than `most` bytes.
    """
    try:
        with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r:") as archive:
            for member in archive:
                _check(member, path, most, again)
                if member.isfile() and wanted(member.name):
                    stream = archive.extractfile(member)
                    yield member.name, stream.read() if stream else b""
            while packed.read(1 << 20):  # gzip verifies the checksum at the end of the file
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path} is not a complete tar.gz archive: {error}. {again}") from error


def _check(member: tarfile.TarInfo, path: Path, most: int, again: str) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"{path} is unsafe: its member {member.name!r} leaves the folder. {again}")
    if not (member.isfile() or member.isdir()):
        raise DataError(f"{path} is unsafe: its member {member.name!r} is neither file nor folder. {again}")
    if member.size > most:
        raise DataError(f"{path} holds {member.name!r} of {member.size:,} bytes, more than published. {again}")

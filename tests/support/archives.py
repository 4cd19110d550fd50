"""Published layouts in small: files in a tar.gz archive, or in a folder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def pack(path: Path, files: Mapping[str, bytes | str], extra: tarfile.TarInfo | None = None) -> Path:
    """The archive of `files` at `path`, and in it a last member `extra` without content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            body = _bytes(content)
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
        if extra is not None:
            archive.addfile(extra)
    return path


def unpack(root: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(_bytes(content))


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content

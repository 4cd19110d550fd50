"""Files of runs: their names, reading regular files up to a bounded size, and places for new ones.

A pipe could block for ever, a device has no end, and a file without data on the disk (sparse) can claim any size.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dure.errors import UsageError

LARGEST = 1 << 28
"""Most bytes of a file that is read whole. A history of a million evaluations has about as many."""


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file. A name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def check_regular(path: Path) -> None:
    """Raise OSError if `path` is a pipe or a device: a read could block for ever, and a file must not replace it."""
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a folder is an error of its own
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most: int = LARGEST) -> bytes:
    """The content of a file. Raises OSError if it is missing, not regular, or has more than `most` bytes."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except ValueError as error:  # a name with a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def check_output(path: Path) -> None:
    """Raise `UsageError` if the folder of `path`, or an object that exists there, shows that no file can be written."""
    folder = path.absolute().parent
    cause = None
    if not folder.is_dir():
        cause = f"there is no folder {path.parent}"
    elif path.is_dir():
        cause = "it is a folder"
    elif path.exists() and not path.is_file():
        cause = "it is no regular file"
    elif not os.access(folder, os.W_OK | os.X_OK):
        cause = f"the folder {path.parent} is not writable"
    if cause is not None:
        raise UsageError(f"cannot write {path}: {cause}. Name a file in a folder that you may write to.")


CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints."""

LATEST = "LATEST"
"""Name of the file, in that folder, that names the newest checkpoint."""

"""Tracks files of a run's record that could not be written, as on a full disk: the run continues and reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dure.core.text import log


class Unwritten:
    """The `causes` of missing content, by the name of the file."""

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}

    @contextmanager
    def tolerated(self, name: str) -> Iterator[None]:
        """While open, note an error of the file system in writing `name`, and log it once, instead of raising it.

        A later block of the same name without an error removes the note: the file is complete then.
        """
        try:
            yield
        except OSError as error:
            cause = error.strerror or str(error)
            if name not in self.causes:
                log.warning("%s cannot be written (%s).", name, cause)
            self.causes[name] = cause
        else:
            self.causes.pop(name, None)

"""Files of a run's record that could not be written, as on a full disk: the run goes on without them, and tells."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("dure")


class Unwritten:
    """`causes`, by the name of a file of the record, of what is missing there."""

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}

    @contextmanager
    def tolerated(self, name: str) -> Iterator[None]:
        """While open, an error of the file system in writing `name` is noted, and logged once, in place of raised.

        A later block of the same name that ends well takes the note back: the file is whole then.
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

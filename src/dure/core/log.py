"""The log of dure, `logging.getLogger("dure")`, whose messages quote files, records and users' code."""

from __future__ import annotations

import logging

from dure.core.text import printable, shortened, text_of, traceback_of


def _in_log(value: object) -> object:
    text = text_of(value) if isinstance(value, BaseException) else value
    return shortened(printable(text)) if isinstance(text, str) else value


class Printable(logging.Filter):
    """Makes texts, exceptions and tracebacks in the records of a log printable, and shortens them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_in_log, record.args))
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = traceback_of(record.exc_info[1])
        return True


log = logging.getLogger("dure")
log.addFilter(Printable())

"""Text from outside (files, users' code, other processes) as messages and terminals show it.

A terminal obeys control characters: they move the cursor, set the title, or reverse the order of letters. `printable`
replaces them where text reaches a terminal or a page. `shortened` bounds the length of a message, `quoted` that of a
value in one.

`log` is the log of dure, `logging.getLogger("dure")`. Its messages quote files, records and users' code, so a filter
makes them printable.
"""

from __future__ import annotations

import logging
import re
import traceback

LONGEST = 4000
"""Most characters of a message. The text of an exception of user code is the longest part of one."""

LONGEST_TRACEBACK = 8000
"""Most characters of a traceback with all causes. The calls stand in front of the text of the exception."""

LONGEST_VALUE = 200
"""Most characters of a value in a message."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tabs and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ud800-\udfff]"  # ends of lines, and halves of characters, which no stream can write
)


def printable(text: str) -> str:
    r"""`text` with control characters written as their escapes; tabs and ends of lines stay.

    >>> printable("\x1b[2Jall\tgood\r\n")
    '\\x1b[2Jall\tgood\\r\n'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, most: int = LONGEST) -> str:
    """`text`, or its beginning and its end with the number of characters left out between them.

    >>> shortened("abcdefghij" * 10, 40)
    'abcdef [88 characters left out] efghij'
    """
    if len(text) <= most:
        return text
    kept = (most - len(f" [{len(text):,} characters left out] ")) // 2
    return f"{text[:kept]} [{len(text) - 2 * kept:,} characters left out] {text[-kept:]}"


def quoted(value: object) -> str:
    """`repr(value)`, shortened.

    >>> quoted("x" * 1000)[:30], quoted(10**5000)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 'a whole number of more than 4,300 digits')
    """
    if isinstance(value, int) and value.bit_length() > 14_000:
        return "a whole number of more than 4,300 digits"  # Python refuses to write it
    try:
        return shortened(repr(value), LONGEST_VALUE)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of a user's class
        return f"an object of the type {type(value).__name__}"


def sentence(text: str) -> str:
    """`text` as one printable line, shortened."""
    return shortened(printable(" ".join(text.split())))


def text_of(error: BaseException) -> str:
    """The text of an exception, also of one whose `__str__` fails."""
    if isinstance(error, SyntaxError) and isinstance(error.msg, str):
        return "".join(error.msg)  # without the lines that the traceback shows
    return str(traceback.TracebackException(type(error), error, None, limit=0))


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception with its causes, printable and shortened."""
    return shortened(printable("".join(traceback.format_exception(error))), LONGEST_TRACEBACK)


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

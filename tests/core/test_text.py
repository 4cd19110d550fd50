"""Text from outside cannot steer a terminal, and its length has a bound."""

import logging
import unicodedata

import pytest

from dure.core.text import LONGEST, Printable, printable, quoted, sentence, shortened, text_of, traceback_of


def test_no_control_character_but_tabs_and_ends_of_lines_is_left():
    everything = "".join(map(chr, range(0x3000))) + "\ud800"
    left = [each for each in printable(everything) if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")]
    assert set(left) == {"\t", "\n"}
    assert not {"\u202e", "\u2066", "\u061c"} & set(printable(everything))


@pytest.mark.parametrize("text", ["gute Nacht \N{MICRO SIGN}s 10\N{NO-BREAK SPACE}%", "日本語", "\U0001f469‍\U0001f4bb"])
def test_other_characters_stay(text):
    assert printable(text) == text


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1, 3_000_000])
def test_a_shortened_text_says_how_much_is_left_out(length):
    text = shortened("x" * length)
    left_out = 0 if length == LONGEST else int(text.partition("[")[2].partition(" ")[0].replace(",", ""))
    assert len(text) <= LONGEST
    assert text.count("x") == length - left_out


def test_a_value_of_any_size_is_quoted():
    for value in (10**5000, -(10**5000), "x" * 10**6, list(range(10**5)), {1: "x" * 10**6}):
        assert len(quoted(value)) <= 200


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("mute")


class Numeric(Exception):
    def __str__(self):
        return 3


def test_an_exception_without_a_text_has_one():
    assert text_of(Mute()) == text_of(Numeric()) == "<exception str() failed>"
    assert text_of(ValueError("said")) == "said"


@pytest.mark.parametrize("message", [None, 5, b"bytes"])
def test_a_syntax_error_of_the_users_own_has_a_text_of_any_type(message):
    assert text_of(SyntaxError(message)) == str(message)


def chain(links):
    error = ValueError("first")
    for number in range(links):
        following = ValueError(f"link {number}")
        following.__cause__, error = error, following
    return error


@pytest.mark.parametrize(
    "error",
    [ValueError("x" * 3_000_000), chain(1000), Mute(), ExceptionGroup("all", [ValueError("x" * 10**6)] * 9)],
    ids=["3 MB", "1000 causes", "no text", "group"],
)
def test_a_traceback_of_any_exception_has_a_bound(error):
    assert len(traceback_of(error)) <= 8000
    record = logging.LogRecord("dure", logging.ERROR, "", 0, "%s", (text_of(error),), (type(error), error, None))
    assert Printable().filter(record)
    assert len(logging.Formatter().format(record)) <= LONGEST + 8001


def test_a_sentence_is_one_line():
    assert sentence("a\r\n\x1b[2J\u2028b\x85") == "a \\x1b[2J b"

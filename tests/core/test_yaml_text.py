import os

import pytest
import yaml
from support.wording import raising

from dure.core.validated import read_yaml, read_yaml_file


@pytest.mark.parametrize(
    "text", ["a: 1\nb: [{c: 2}, {c: 3}]\n", "- 1\n- x\n", "", "base: &b {a: 1}\nmore: {<<: *b, a: 2}\n"]
)
def test_what_names_every_key_once_is_read_as_ever(text):
    assert read_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "b:\n  a: 1\n  a: 1\n", "- {b: 1, a: {}, 'a': {}}\n"])
def test_a_key_that_is_there_twice_is_an_error(text):
    with raising(yaml.YAMLError, "a"):
        read_yaml(text)


def test_nothing_but_plain_values_is_made():
    with raising(yaml.YAMLError, "constructor"):
        read_yaml("!!python/object/apply:os.system [ls]")


@pytest.mark.parametrize("text", ["!!map x", "a: !!map [1]"])
def test_a_mapping_that_is_none_is_no_yaml(text):
    with raising(yaml.YAMLError, "expected"):
        read_yaml(text)


@pytest.mark.long
@pytest.mark.parametrize("text", ["[" * 10_000, "{a: " * 5000], ids=["lists", "mappings"])
def test_what_is_nested_too_deep_is_no_yaml(text):
    with raising(yaml.YAMLError, "nested"):
        read_yaml(text)


def nested_aliases(levels, value="[x, x, x, x, x, x, x, x, x]"):
    """A text that stands for 9 to the power of `levels` values."""
    lines = [f"a0: &a0 {value}"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_aliases_within_the_bound_are_replaced():
    text = nested_aliases(3)
    assert read_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", [nested_aliases(7), nested_aliases(60), nested_aliases(60, "{k: 1}")], ids=["7", "60", "mappings"]
)
def test_aliases_that_stand_for_too_many_values_are_no_yaml(text):
    with raising(yaml.YAMLError, "than 1,000,000"):
        read_yaml(text)


def test_an_alias_inside_its_own_value_is_no_yaml():
    with raising(yaml.YAMLError, "contains"):
        read_yaml("a: &a [1, *a]\n")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("!!int x", "int"),
        ("!!float x", "float"),
        ("!!bool x", "bool"),
        ("2001-13-45", "timestamp"),
        ("9" * 5000, "int"),
    ],
    ids=["int", "float", "bool", "timestamp", "digits"],
)
def test_a_value_that_its_type_cannot_hold_is_no_yaml(text, kind):
    with pytest.raises(yaml.YAMLError, match=f"is no value of the type {kind}") as caught:
        read_yaml(f"a: {text}")
    assert len(str(caught.value)) < 400


def test_files_that_have_no_end_or_are_no_text_are_refused(tmp_path):
    wide, pipe, latin = tmp_path / "wide", tmp_path / "pipe", tmp_path / "latin"
    with wide.open("wb") as file:
        file.truncate(1 << 40)  # it has no data on the disk
    os.mkfifo(pipe)
    latin.write_bytes(b"a: \xff")
    reasons = {"wide": "more than 16,777,216 bytes", "pipe": "no regular file", "latin": "it is not text in UTF-8"}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            read_yaml_file(tmp_path / name)
    for name in ("/dev/zero", str(tmp_path), "a\0b", "x" * 5000):
        with raising(ValueError, "cannot"):
            read_yaml_file(name)

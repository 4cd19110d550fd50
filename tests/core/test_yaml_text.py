import pytest
import yaml

from dure.core.yaml_text import read_yaml


@pytest.mark.parametrize(
    "text", ["a: 1\nb: [{c: 2}, {c: 3}]\n", "- 1\n- x\n", "", "base: &b {a: 1}\nmore: {<<: *b, a: 2}\n"]
)
def test_what_names_every_key_once_is_read_as_ever(text):
    assert read_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "b:\n  a: 1\n  a: 1\n", "- {b: 1, a: {}, 'a': {}}\n"])
def test_a_key_that_is_there_twice_is_an_error(text):
    with pytest.raises(yaml.YAMLError, match='the key "a" is there twice'):
        read_yaml(text)


def test_nothing_but_plain_values_is_made():
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        read_yaml("!!python/object/apply:os.system [ls]")


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5000])
def test_what_is_nested_too_deep_is_no_yaml(text):
    with pytest.raises(yaml.YAMLError, match="nested too deep"):
        read_yaml(text)

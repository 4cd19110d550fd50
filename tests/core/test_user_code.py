"""A user's own files: what is wrong with them is said in one sentence, with the place in them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support.wording import raising

from dure.core import user_code
from dure.errors import DataError, DureError, UsageError
from dure.job.data.split import Sampler


def broken(folder, text, beside=""):
    """What is said of a file of this text."""
    (folder / "mine.py").write_text(text)
    (folder / "neighbor_of_mine.py").write_text(beside)
    sys.modules.pop("neighbor_of_mine", None)
    with pytest.raises(UsageError) as caught:
        user_code.run(str(folder / "mine.py"))
    assert user_code.module_of(str(folder / "mine.py")) not in sys.modules
    return str(caught.value).removeprefix(f"{folder / 'mine.py'} cannot be loaded: ").replace(f"{folder}/", "")


def test_a_file_that_cannot_be_loaded_says_where(tmp_path):
    assert broken(tmp_path, "x = 1\ndef f(:\n") == "SyntaxError: invalid syntax (mine.py, line 2)."
    said = broken(tmp_path, "\nimport no_such_module\n")
    assert said == "ModuleNotFoundError: No module named 'no_such_module' (mine.py, line 2)."
    said = broken(tmp_path, "import neighbor_of_mine\n", "\n\nassert not 'here'\n")
    assert said == "AssertionError (neighbor_of_mine.py, line 3)."
    said = broken(tmp_path, "import json\n\njson.loads('{')\n")
    assert said.startswith("JSONDecodeError: ")
    assert said.endswith("(mine.py, line 3).")


def test_a_file_that_was_mended_can_be_loaded(tmp_path):
    broken(tmp_path, "class Mine:\n    wrong = {}['x']\n")
    (tmp_path / "mine.py").write_text("class Mine:\n    right = True\n")
    assert user_code.kind(str(tmp_path / "mine.py"), "Mine").right


def test_the_place_is_told_from_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("{}['x']\n")
    with raising(UsageError, "x"):
        user_code.run("mine.py")


def test_what_dure_says_on_purpose_and_what_it_does_wrong_passes():
    with raising(DataError), user_code.explain_user_errors("it raised"):
        raise DataError("as it is")
    with pytest.raises(TypeError), user_code.explain_user_errors("it raised", DureError, only=True):
        user_code.split(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError), user_code.explain_user_errors("it raised", DureError, only=True):
        Sampler(np.arange(2), "x", seed=0, stream=1).next()  # type: ignore[arg-type]
    with pytest.raises(DureError) as caught, user_code.explain_user_errors("it raised", DureError, only=True):
        sorted([1, "a"])
    assert type(caught.value) is DureError
    assert str(caught.value).startswith("it raised TypeError: '<' not supported")
    assert f"{Path(__file__).name}, line" in str(caught.value)


def test_a_long_text_is_cut():
    with pytest.raises(UsageError) as caught, user_code.explain_user_errors("it raised"):
        raise ValueError("first\n" + "word\n" * 1000 + "last")
    said = str(caught.value)
    assert len(said) < 2200
    assert "\n" not in said
    assert "ValueError: first word" in said
    assert "characters left out" in said
    assert "word last (" in said


@pytest.mark.parametrize("details", [(), (5,), ("wrong", (5, "x", 1, "text"))])
def test_any_exception_of_a_user_is_explained(details):
    with raising(UsageError, "SyntaxError"), user_code.explain_user_errors("it raised"):
        raise SyntaxError(*details)


def test_code_of_a_file_with_a_name_that_no_file_has_is_explained():
    with raising(UsageError, "ValueError"), user_code.explain_user_errors("it raised"):
        exec(compile("raise ValueError('said')", "f" * 5000, "exec"))


def test_a_file_that_ends_the_process_is_refused(tmp_path):
    said = broken(tmp_path, "import sys\nsys.exit('enough')\n")
    assert said == "SystemExit: enough (mine.py, line 2)."


def test_files_of_the_same_name_have_modules_of_their_own(tmp_path):
    kinds = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"class Mine:\n    name = {name!r}\n")
        kinds.append(user_code.kind(str(tmp_path / name / "mine.py"), "Mine"))
    assert [kind.name for kind in kinds] == ["one", "other"]
    for kind, name in zip(kinds, ("one", "other"), strict=True):
        assert user_code.text_of(kind) == f"{tmp_path}/{name}/mine.py:Mine"
        assert user_code.kind(f"{tmp_path}/{name}/mine.py", "Mine") is kind

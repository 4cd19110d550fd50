"""Downloads: from folders of this machine by file:// addresses, so that no network is needed."""

import hashlib
from pathlib import Path

import pytest
from support.wording import raising

from dure.errors import DataError
from dure_jobs.data.download import Published, fetch
from dure_jobs.data.location import find

BODY = bytes(range(256)) * 3000


def home(folder: Path, body: bytes = BODY) -> str:
    folder.mkdir()
    (folder / "set.gz").write_bytes(body)
    return folder.as_uri()


def published(*homes: str) -> Published:
    return Published("set.gz", len(BODY), hashlib.sha256(BODY).hexdigest(), homes)


def test_fetches_the_published_bytes_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = fetch(published(home(tmp_path / "home")), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "set.gz"
    assert path.read_bytes() == BODY
    assert [each.name for each in path.parent.iterdir()] == ["set.gz"]
    assert capfd.readouterr() == ("", "")


def test_the_next_home_is_tried(tmp_path: Path) -> None:
    wrong = home(tmp_path / "wrong", BODY[::-1])
    path = fetch(published((tmp_path / "absent").as_uri(), wrong, home(tmp_path / "right")), tmp_path)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("body", "said"),
    [(BODY[::-1], "sha256"), (BODY[:-1], "got 767,999"), (BODY + b"x" * 10**6, "got 768,001")],
)
def test_wrong_bytes_leave_what_was_there(tmp_path: Path, body: bytes, said: str) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (target / "set.gz").write_bytes(b"before")
    with raising(DataError, said):
        fetch(published(home(tmp_path / "home", body)), target)
    assert {each.name: each.read_bytes() for each in target.iterdir()} == {"set.gz": b"before"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"cannot write into {tmp_path}/file"):
        fetch(published(home(tmp_path / "home")), tmp_path / "file")


def test_find_prefers_the_first_folder(tmp_path: Path) -> None:
    for name in ("one/y", "two/x"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    folders = (tmp_path / "one", tmp_path / "two")
    assert find(folders, ("x", "y")) == tmp_path / "one" / "y"
    assert find(folders, ("z",)) is None

from pathlib import Path

from support.wording import raising

from dure.errors import DataError
from dure.job.data.location import data_root


def test_the_root_is_the_flag_then_the_environment_then_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    environ = {"DURE_DATA": str(tmp_path / "b"), "XDG_CACHE_HOME": "/cache"}
    assert data_root(tmp_path / "a", environ) == tmp_path / "a"
    assert data_root(None, environ) == tmp_path / "b"
    assert data_root(None, {"XDG_CACHE_HOME": "/cache", "DURE_DATA": ""}) == Path("/cache/dure/data")
    assert data_root(None, {}) == Path.home() / ".cache" / "dure" / "data"


def test_a_named_root_must_exist(tmp_path: Path) -> None:
    with raising(DataError, "--data"):
        data_root(tmp_path / "absent", {})
    with raising(DataError, "DURE_DATA"):
        data_root(None, {"DURE_DATA": str(tmp_path / "absent")})

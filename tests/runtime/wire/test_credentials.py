"""Credentials: a key that others may read is no key."""

import os
import secrets

import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.run.process_main import LaunchSpec
from dure.runtime.wire import Credentials

KEY = secrets.token_bytes(32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_the_content_of_a_private_file_is_the_key(file, mode):
    file.chmod(mode)
    assert Credentials.of_file(file).key == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(UsageError, match=rf"{file} has mode {mode:04o}.*Write chmod 600 {file}"):
        Credentials.of_file(file)


@pytest.mark.parametrize(("length", "held"), [(0, "0"), (31, "31"), (5000, "more than 4096")])
def test_a_key_of_the_wrong_length_is_refused(file, length, held):
    content = bytes(length)
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"holds {held} bytes, a key has 32 to 4096. Make one: .*chmod 600"):
        Credentials.of_file(file)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    with raising(UsageError, "regular"):
        Credentials.of_file(tmp_path / "fifo")
    with raising(UsageError):
        Credentials.of_file(tmp_path)
    with raising(UsageError, "missing"):
        Credentials.of_file(tmp_path / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file):
    os.chown(file, 65534, 65534)
    with raising(UsageError, "user 65534"):
        Credentials.of_file(file)


def test_keys_are_random_long_and_shown_nowhere():
    one, other = Credentials.drawn(), Credentials.drawn("checksum")
    assert one.key != other.key
    assert len(one.key) == 32
    assert Credentials.of(other.plain()) == other
    start = LaunchSpec.of(
        name="worker 0", run="run", incarnation=0, driver=["127.0.0.1", 1], credentials=one.plain(), fault_settings={}
    )
    for shown in (repr(one), str(one), repr(start)):
        assert one.key.hex() not in shown
        assert repr(one.key) not in shown
    with raising(ValueError, "least 32"):
        Credentials(b"key")

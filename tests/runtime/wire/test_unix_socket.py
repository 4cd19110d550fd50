"""The short way between processes of one machine."""

import socket
import sys

import pytest

from dure.runtime.wire.reactor import connect_unix, is_loopback, is_mine, listen_unix, unix_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")


def family_of_call(world):
    server, _, port = world.server()
    caller = world.wire("worker 0")
    world.join(caller, server, port)
    return caller._hosts["server 0"].connection.sock.family


def test_loopback_goes_over_a_unix_socket_unless_it_should_not(world):
    assert family_of_call(world) is socket.AF_UNIX
    world.unix = False
    assert family_of_call(world) is socket.AF_INET


def test_a_name_that_is_taken_leaves_tcp(world):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(unix_name(port))
        assert listen_unix(port) is None
        server = world.wire("server 0")
        assert server.listen(port=port) == port
    assert connect_unix(port) is None


def test_both_ends_belong_to_one_user(world):
    left, right = socket.socketpair()
    with left, right:
        assert is_mine(left)
        assert is_mine(right)
    assert is_loopback("127.0.0.1")
    assert not is_loopback("192.168.1.1")
    assert not is_loopback("localhost.example.org")

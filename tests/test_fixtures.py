"""What conftest promises every test."""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_network_in_an_unmarked_test_fails(family: socket.AddressFamily) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        for call in (sock.bind, sock.connect, lambda where: sock.sendto(b"", where)):
            with pytest.raises(pytest.fail.Exception, match="not marked network"):
                call(("localhost", 9))


async def test_streams_in_an_unmarked_test_fail() -> None:
    with pytest.raises(pytest.fail.Exception, match="not marked network"):
        await asyncio.open_connection("127.0.0.1", 9)


async def test_subprocess_and_socket_pair_are_no_network() -> None:
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"x")
        assert right.recv(1) == b"x"


@pytest.mark.network
def test_network_in_a_marked_test_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


def test_generator_repeats_with_the_seed(seed: int, rng: random.Random) -> None:
    assert rng.random() == random.Random(seed).random()


def test_state_directory_is_a_temporary_one(tmp_path: object) -> None:
    assert os.environ["GPULAYER_HOME"].startswith(str(tmp_path))


@given(st.integers())
def test_property_tests_accept_the_automatic_fixtures(number: int) -> None:
    assert "RANK" not in os.environ

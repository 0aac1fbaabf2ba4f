"""The first failure by cause, and the words for it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from gpulayer_mesh.core.failure import (
    describe,
    exit_code,
    first_failure,
    is_consequence,
    is_failure,
)
from gpulayer_mesh.core.jobspec import MemoryKill, RankState, RankStatus
from job_cases import exited, running

# Last lines as torch 2.13 prints them.
GLOO = (
    "[rank0]:     work.wait()",
    "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [10.0.0.2]:46181",
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited "
    "or there was a network error, NCCL version 2.27.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    "Last error:",
    "socketPollConnect: Connection refused",
)
STORE = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
    "trying to connect to (10.0.0.1, 29400).",
)
ABORT = (
    "terminate called after throwing an instance of 'gloo::IoException'",
    "  what():  [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by "
    "peer",
)
BIND = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29400, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
    "already in use",
)
VALUE = ("Traceback (most recent call last):", "ValueError: bad batch")
# The user's own error, then what the interpreter's shutdown adds.
NOISY = (
    "KeyError: 'label'",
    "[W1130 12:00:00 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl: Connection reset",
)
WRAPPED = ("gloo: Connection closed by peer", "my_lib.errors.TrainingError: epoch 3 failed")


@pytest.mark.parametrize("tail", [GLOO, NCCL, STORE, ABORT, ("BrokenPipeError: Broken pipe",)])
def test_lost_peer_is_a_consequence(tail: tuple[str, ...]) -> None:
    assert is_consequence(exited(0, 1, *tail))
    assert is_consequence(exited(0, None, *tail, signal=6))


@pytest.mark.parametrize("tail", [VALUE, NOISY, WRAPPED, BIND, (), ("some words",)])
def test_a_reason_of_its_own_is_a_cause(tail: tuple[str, ...]) -> None:
    assert not is_consequence(exited(0, 1, *tail))


def test_a_signal_from_outside_is_a_cause_whatever_was_printed_before() -> None:
    assert not is_consequence(exited(0, None, *GLOO, signal=9))
    assert not is_consequence(exited(0, None, *GLOO, signal=11))


def test_cause_wins_over_arrival_order() -> None:
    ranks = [
        ("box-0", exited(0, 1, *GLOO, age=2.0)),
        ("box-1", exited(1, 7, *VALUE, age=1.0)),
        ("box-2", exited(2, 1, *NCCL, age=3.0)),
        ("box-3", running(3)),
    ]
    for order in itertools.permutations(ranks):
        found = first_failure(order)
        assert found is not None
        assert (found.rank, found.node, found.code) == (1, "box-1", 7)
        assert found.tail == VALUE
        assert found.reason == "exit code 7"


def test_rank_0_that_cannot_bind_is_named_not_those_who_could_not_connect() -> None:
    found = first_failure([("b", exited(1, 1, *STORE, age=9.0)), ("a", exited(0, 1, *BIND))])
    assert found is not None
    assert found.rank == 0


def test_among_causes_the_oldest_then_the_lowest_rank() -> None:
    found = first_failure([("a", exited(0, 1, age=1.0)), ("b", exited(1, 2, age=5.0))])
    assert found is not None
    assert found.rank == 1
    found = first_failure([("b", exited(1, 2, age=1.0)), ("a", exited(0, 1, age=1.0))])
    assert found is not None
    assert found.rank == 0


def test_stopped_successful_and_running_ranks_are_no_failures() -> None:
    ranks = [
        exited(0, 0),
        exited(1, None, signal=15, stopped=True),
        exited(2, 1, stopped=True),
        running(3),
        RankStatus(4, RankState.WAITING),
    ]
    assert not any(is_failure(status) for status in ranks)
    assert first_failure(("box", status) for status in ranks) is None


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (exited(0, 7), 7, "exit code 7"),
        (exited(0, 137), 137, "exit code 137 (a command inside it was killed by SIGKILL)"),
        (exited(0, None), 1, "exit code unknown"),
        (exited(0, None, signal=11), 139, "killed by signal 11 (SIGSEGV): native code touched"),
        (exited(0, None, signal=7), 135, "killed by signal 7 (SIGBUS): shared memory"),
        (exited(0, None, signal=6), 134, "destroy_process_group()"),
        (exited(0, None, signal=15), 143, "sent by something outside of this job"),
        (exited(0, None, signal=64), 192, "killed by signal 64 (unknown signal)"),
        (
            exited(0, 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
            1,
            "exit code 1 (the GPU ran out of memory)",
        ),
    ],
)
def test_every_end_has_its_code_and_words(status: RankStatus, code: int, words: str) -> None:
    assert exit_code(status) == code
    assert words in describe(status)


@pytest.mark.parametrize(
    ("kill", "peak_mib", "limit_mib", "words"),
    [
        (
            MemoryKill.YES,
            12390,
            16384,
            "killed by the kernel for memory: peak 12.1 GiB of 16.0 GiB (signal 9, SIGKILL)",
        ),
        (
            MemoryKill.LIKELY,
            150,
            1024,
            "killed by signal 9 (SIGKILL): probably by the kernel, for that machine had just run "
            "out of memory; peak 150 MiB of 1.0 GiB",
        ),
        (
            MemoryKill.NO,
            1023,
            None,
            "killed by signal 9 (SIGKILL): by somebody or a program such as systemd-oomd, not by "
            "the kernel for memory; peak 1023 MiB",
        ),
        (
            None,
            None,
            None,
            "killed by signal 9 (SIGKILL): by the kernel when memory runs out, or by somebody; "
            "peak unknown",
        ),
    ],
)
def test_kill_is_told_with_what_is_known_of_memory(
    kill: MemoryKill | None, peak_mib: int | None, limit_mib: int | None, words: str
) -> None:
    status = RankStatus(
        3,
        RankState.EXITED,
        signal=9,
        memory_peak_mib=peak_mib,
        memory_limit_mib=limit_mib,
        memory_kill=kill,
    )
    assert describe(status) == words
    assert exit_code(status) == 137


def test_function_that_left_no_result_failed_whatever_its_exit_code() -> None:
    status = replace(exited(1, 0, "working"), no_result=True)
    assert is_failure(status)
    found = first_failure([("box-0", exited(0)), ("box-1", status)])
    assert found is not None
    assert (found.rank, found.code, found.tail) == (1, 1, ("working",))
    assert found.reason.startswith("ended without a result: something called os._exit(0)")

"""Which rank failed first, and what its end means in words.

When one rank fails, its peers fail a moment later with "connection closed by peer". Arrival order
says little (reports travel), so candidates are ranked by cause: a rank whose last lines only tell
of a lost peer comes after one that has a reason of its own; then the one that ended longest ago;
then the lowest rank. Ranks we stopped are never failures. Pure functions over `RankStatus`; ages
must already be on one clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpulayer_mesh.core.jobspec import Failure, MemoryKill, RankState, RankStatus

# What torch, Gloo, NCCL and the socket layer say about a peer that went away (torch 2.10 to 2.13).
_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken ?pipe|econnreset|gloo"
    r"|nccl communicator was aborted|nccl ?remote|remote process exit"
    r"|distnetworkerror|distbackenderror|diststoreerror|socket (has )?timed out|socket timeout"
    r"|(sendbytes|recvvalue|recv|send) failed|failed to (recv|send)\b"
    r"|timed out waiting for clients|watchdog caught collective",
    re.IGNORECASE,
)
# The same exception types also tell of a cause of one's own.
_OWN_CAUSE = re.compile(r"eaddrinuse|address already in use|permission denied|no space left", re.I)
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:\w+\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?::|$)"
)
# Exceptions through which torch and the socket layer speak; any other type is the rank's own.
_CARRIERS = re.compile(r"^(Runtime|OS|System|EOF|Timeout|BrokenPipe|Connection\w*|Dist\w+)Error$")
_TAIL_LINES = 12  # from the end, where no exception stands; a script may print such words earlier
# Deaths a lost peer can cause: C++ exceptions end in abort, a closed pipe in SIGPIPE.
_SIGABRT, _SIGPIPE = 6, 13
_GPU_MEMORY = re.compile(
    r"(cuda|hip|mps).{0,20}out of memory|torch\.OutOfMemoryError", re.IGNORECASE
)
# Of Linux; macOS differs in 7 (SIGEMT) and 10 (SIGBUS).
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1, SIGBUS on macOS",
    11: "SIGSEGV",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
}


def ended_well(status: RankStatus) -> bool:
    """Return whether a rank came to its end, and a function to its result."""
    return status.exit_code == 0 and not status.no_result


def is_failure(status: RankStatus) -> bool:
    """Return whether a rank ended badly by itself."""
    if status.state is not RankState.EXITED or status.stopped:
        return False
    return not ended_well(status)


def is_consequence(status: RankStatus) -> bool:
    """Return whether a failed rank's last words only tell that a peer went away."""
    if status.signal not in (None, _SIGABRT, _SIGPIPE):
        return False
    tail = [line.strip() for line in status.tail if line.strip()]
    for index in range(len(tail) - 1, -1, -1):
        found = _EXCEPTION.match(tail[index])
        if found is not None:
            if not _CARRIERS.match(found[1]):
                return False
            tail = tail[index:]
            break
    else:
        tail = tail[-_TAIL_LINES:]
    text = "\n".join(tail)
    return _PEER_LOST.search(text) is not None and _OWN_CAUSE.search(text) is None


def exit_code(status: RankStatus) -> int:
    """Return the code the caller's process takes: the rank's, or 128 + signal."""
    if status.signal is not None:
        return 128 + status.signal
    if status.exit_code is None or status.no_result:
        return 1
    return status.exit_code


def describe(status: RankStatus) -> str:
    """Say in one clause how a rank ended and what probably caused it."""
    if status.no_result:
        return "ended without a result: something called os._exit(0) before the function returned"
    if status.signal is None:
        code = status.exit_code
        text = "exit code unknown" if code is None else f"exit code {code}"
        if any(_GPU_MEMORY.search(line) for line in status.tail):
            return f"{text} (the GPU ran out of memory)"
        if code is not None and code - 128 in _SIGNALS and code > 128:
            return f"{text} (a command inside it was killed by {_SIGNALS[code - 128]})"
        return text
    name = _SIGNALS.get(status.signal, "unknown signal")
    if status.memory_kill is MemoryKill.YES:
        return f"killed by the kernel for memory: {_memory(status)} (signal 9, SIGKILL)"
    return f"killed by signal {status.signal} ({name}){_likely_cause(status, name)}"


def first_failure(ranks: Iterable[tuple[str, RankStatus]]) -> Failure | None:
    """Pick the failure that explains the others.

    Args:
        ranks: (node name, status) of every rank known, ages on the keeper's clock.
    """
    failed = [(node, status) for node, status in ranks if is_failure(status)]
    if not failed:
        return None
    node, first = min(
        failed,
        key=lambda item: (is_consequence(item[1]), -(item[1].ended_age_s or 0.0), item[1].rank),
    )
    return Failure(first.rank, node, exit_code(first), describe(first), first.tail, first.hopeless)


def _likely_cause(status: RankStatus, name: str) -> str:
    if name == "SIGKILL":
        match status.memory_kill:
            case MemoryKill.LIKELY:
                who = "probably by the kernel, for that machine had just run out of memory"
            case MemoryKill.NO:
                who = "by somebody or a program such as systemd-oomd, not by the kernel for memory"
            case _:
                who = "by the kernel when memory runs out, or by somebody"
        return f": {who}; {_memory(status)}"
    if name == "SIGABRT":
        return (
            ": native code aborted; with Gloo this also happens to a rank that ends right after a "
            "collective without torch.distributed.destroy_process_group()"
        )
    if name == "SIGSEGV":
        return ": native code touched invalid memory"
    if name == "SIGBUS":
        return ": shared memory (/dev/shm) may be full"
    if name == "SIGILL":
        return ": this CPU lacks an instruction the program was built for"
    if name == "SIGXCPU":
        return ": the CPU time limit of this machine was reached"
    if name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        return ": sent by something outside of this job"
    return ""


def _memory(status: RankStatus) -> str:
    peak, limit = _size(status.memory_peak_mib), _size(status.memory_limit_mib)
    return f"peak {peak or 'unknown'}{f' of {limit}' if limit else ''}"


def _size(mib: int | None) -> str:
    if mib is None:
        return ""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"

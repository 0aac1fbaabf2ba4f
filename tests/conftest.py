"""Fixtures for all tests: one seed, no network unless marked, a home of its own, test LANs.

`GPULAYER_TEST_SEED=N` repeats a run's randomness; every failure prints the number.
`--configurations N` draws N times as many random configurations where a test is marked for it.
`GPULAYER_REQUIRE_LAN=1` (set in CI) turns the skip of LAN tests into a failure.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lan as lan_module
import pytest
from lan import DEFAULT_HOSTS, Lan

SEED = int(os.environ.get("GPULAYER_TEST_SEED") or random.SystemRandom().randrange(2**32))
LAN_FIXTURES = {"lan", "make_lan"}
LOG_TAIL_LINES = 40  # of each program on a LAN, shown when its test fails

MakeLan = Callable[..., Lan]
_open_lans: list[Lan] = []


def pytest_configure() -> None:
    # Programs inherit what is ignored: under nohup, or in the background of some shells, none of
    # ours would notice a closed terminal or an interrupt.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--configurations",
        type=int,
        default=1,
        metavar="N",
        help="draw N times as many random configurations to compare with Lightning",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Number the configurations of a test: the first of a longer run are those of a short one."""
    for mark in metafunc.definition.iter_markers("configurations"):
        (count,) = mark.args
        numbers = range(count * metafunc.config.getoption("configurations"))
        metafunc.parametrize("number", numbers)


def pytest_report_header() -> str:
    return f"GPULAYER_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LAN_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.lan)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"GPULAYER_TEST_SEED={SEED}"))
        for log in [log for lan in _open_lans for log in lan.logs()]:
            lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            report.sections.append((f"{log.parent.parent.name}: {log.name}", "\n".join(lines)))
    return report


@pytest.fixture
def seed() -> int:
    """The run's seed; printed when a test fails."""
    return SEED


@pytest.fixture
def rng() -> random.Random:
    """A fresh generator from the run's seed."""
    return random.Random(SEED)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests off the user's mesh, and out of the job that may have started pytest."""
    for name in os.environ:
        if name.startswith("GPULAYER_") and not name.startswith(("GPULAYER_TEST", "GPULAYER_REQ")):
            monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPULAYER_HOME", str(tmp_path / "gpulayer-home"))


@pytest.fixture(autouse=True)
def socket_guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that uses the network without the marker `network` or `lan`."""
    if request.node.get_closest_marker("network") or request.node.get_closest_marker("lan"):
        return

    def guarded(name: str) -> Callable[..., Any]:
        real = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                pytest.fail(f"socket.{name}{args} in a test not marked network", pytrace=True)
            return real(self, *args)

        return call

    for name in ("bind", "connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, guarded(name))


@pytest.fixture(scope="module")
def make_lan() -> Iterator[MakeLan]:
    """Build LANs by host names; all are removed after the module's last test."""
    if reason := lan_module.why_unavailable():
        if os.environ.get("GPULAYER_REQUIRE_LAN"):
            pytest.fail(f"no test LAN: {reason}")
        pytest.skip(f"no test LAN: {reason}")
    with ExitStack() as stack:

        def make(hosts: Sequence[str] = DEFAULT_HOSTS) -> Lan:
            lan = Lan(hosts)
            stack.callback(_open_lans.remove, lan)
            _open_lans.append(lan)
            return stack.enter_context(lan)

        yield make


@pytest.fixture(scope="module")
def lan(make_lan: MakeLan) -> Lan:
    """A laptop and three boxes, shared by the tests of a module."""
    return make_lan()

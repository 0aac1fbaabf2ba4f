"""Where a benchmark's figures go: to the terminal, and to a log that has them line by line."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks take."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--log", type=Path, help="also write the result there")
    return made


class Report:
    """Lines that are printed and, with a log, written at once: a run that is broken off keeps them.

    It begins with the command and the machine.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
        self.say(
            f"$ python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
            f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        )

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            if self._log is not None:
                with self._log.open("a") as file:
                    file.write(f"{line}\n")

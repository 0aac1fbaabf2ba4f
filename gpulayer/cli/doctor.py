"""The command `doctor`: gathers facts, has them judged, prints the verdicts."""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace

from gpulayer_mesh import checkup
from gpulayer_mesh.config import default_name
from gpulayer_mesh.core.diagnosis import Severity
from gpulayer_mesh.core.doctor import examine
from gpulayer_mesh.errors import ExitCode

from gpulayer import env
from gpulayer.ui import Ui
from gpulayer.views import duration, report_json, report_lines


def doctor(args: Namespace, ui: Ui) -> int:
    """Print what is wrong; exits with 1 if anything is an error."""
    started = time.monotonic()
    facts = asyncio.run(checkup.examine(env.home()))
    report = examine(facts)
    took_s = time.monotonic() - started
    here = facts.name or default_name()
    if args.json:
        ui.data([json.dumps(report_json(report, here, took_s=took_s))])
    else:
        ui.data(report_lines(report, here))
        ui.note(f"looked for {duration(took_s)}")
    bad = any(verdict.severity is Severity.ERROR for verdict in report.verdicts)
    return ExitCode.FAILED if bad else ExitCode.OK

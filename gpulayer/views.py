"""What tables and JSON show of a mesh, a job and a plan: values in, lines or plain data out.

Tables fit `width` columns: empty columns vanish, the widest shrinkable ones are clipped. JSON forms
carry `schema`; fields are only ever added under one number, `docs/cli.md` lists them.

Nothing here prints, waits or knows where a value came from.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer_mesh.client import Queued
    from gpulayer_mesh.core.diagnosis import Report
    from gpulayer_mesh.core.jobspec import Failure, JobRecord, JobSpec, RankStatus
    from gpulayer_mesh.core.logrecord import LogRecord
    from gpulayer_mesh.core.placement import Plan
    from gpulayer_mesh.core.types import Blocked, Link, MemberSnapshot, Snapshot
    from gpulayer_mesh.errors import Refusal, Unreached, Versions

    from gpulayer.services import Service

SCHEMA = 1
TABLE_WIDTH = 100  # columns; half of a common screen
_TAIL_LINES = 20  # a traceback with its cause, on one screen
_REFUSED = 10  # nodes that a plan explains; a refused request explains all
_VERSIONS = 20  # nodes whose versions are shown
_CLIP_MIN = 6  # columns that a clipped cell keeps


SGR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_CONTROL = re.compile(
    # Strings: OSC (title, links, clipboard), DCS, SOS, PM, APC. An introducer ends the one before
    # it, so that a flood of unfinished ones costs linear time.
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: cursor, erase, modes
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"  # C0 without tab, DEL, C1
    r"|[\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # line breaks and direction overrides of Unicode
)


def clean(text: str, *, colour: bool = False) -> str:
    """Return `text` with nothing left in it that could move, hide or retitle anything.

    With `colour`, SGR sequences stay and are reset at the end.
    """
    if text.isascii() and text.isprintable():
        return text
    if not colour or "\x1b" not in text:
        return _CONTROL.sub("", text)
    plain = SGR.split(text)
    marks = SGR.findall(text)
    parts = [_CONTROL.sub("", plain[0])]
    for mark, piece in zip(marks, plain[1:], strict=True):
        parts += (mark, _CONTROL.sub("", piece))
    return "".join(parts) + ("\x1b[0m" if marks else "")


def cells(text: str) -> int:
    """Return how many terminal columns `text` takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip(text: str, width: int) -> str:
    """Shorten `text` to `width` columns, the cut marked by an ellipsis."""
    if cells(text) <= width:
        return text
    while text and cells(text) > width - 1:
        text = text[:-1]
    return text + "…"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    width: int = TABLE_WIDTH,
    shrink: Iterable[int] = (),
) -> list[str]:
    """Lay out rows in aligned columns, at most `width` wide.

    `shrink` holds the columns that may be clipped, all others are kept whole while they fit.
    """
    body = [[clean(cell) for cell in row] for row in rows]
    used = [i for i in range(len(header)) if any(row[i] for row in body)]
    lines = [[header[i] for i in used], *([row[i] for i in used] for row in body)]
    widths = [max(cells(line[k]) for line in lines) for k in range(len(used))]
    soft = [k for k, i in enumerate(used) if i in set(shrink)]
    gap = 2
    while sum(widths) + gap * (len(widths) - 1) > width:
        widest = max(soft, key=lambda k: widths[k], default=None)
        if widest is not None and widths[widest] > max(_CLIP_MIN, cells(lines[0][widest])):
            widths[widest] -= 1
        elif gap > 1:
            gap = 1
        else:
            break
    padded = (
        (" " * gap).join(_pad(cell, w) for cell, w in zip(line, widths, strict=True))
        for line in lines
    )
    return [clip(line.rstrip(), width) for line in padded]


def _pad(text: str, width: int) -> str:
    text = clip(text, width)
    return text + " " * (width - cells(text))


# Units


def duration(seconds: float | None) -> str:
    """Show a span in at most six characters: `0.4s`, `12s`, `3m05s`, `2h10m`, `5d`."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d"


def size(count: float) -> str:
    """Show bytes in powers of 1000: `340 B`, `34 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.1f} {unit}" if count < 9.95 and unit != "B" else f"{count:.0f} {unit}"


def mbit(bytes_s: int) -> str:
    """Show a bandwidth in Mbit/s: `940`, `9.4`."""
    value = bytes_s * 8 / 1e6
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def counted(number: int, word: str) -> str:
    """Return `1 node`, `2 nodes`, `2 processes`."""
    plural = word + ("es" if word.endswith("s") else "s")
    return f"{number} {word if number == 1 else plural}"


def ranges(numbers: Iterable[int]) -> str:
    """Return `0, 2-5` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def minor(version: str | None) -> str:
    """Return `2.13` for `2.13.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2]) if version else "-"


# Mesh


def status_lines(snapshot: Snapshot, *, width: int = TABLE_WIDTH) -> list[str]:
    """Return the table of `gpulayer mesh status`."""
    here = _links_here(snapshot)
    rows = [
        _status_row(m, m.node == snapshot.answered_by, here.get(m.node)) for m in _by_name(snapshot)
    ]
    header = "NODE STATE ROLES GPUS CPU MEM ZONE LINK MBIT/S AGE JOBS LOAD SEEN TORCH/PY"
    return table(header.split(), rows, width=width, shrink=(0, 3, 6))


def problem_lines(snapshot: Snapshot) -> list[str]:
    """Return what stands below that table: what torch cannot do, which devices are blocked."""
    lines = []
    for m in _by_name(snapshot):
        if m.caps is None:
            continue
        problems = list(m.caps.torch.problems) if m.caps.torch else []
        problems += [
            f"device {d.index} is blocked: {d.blocked}" for d in m.caps.devices if d.blocked
        ]
        lines += [f"{m.name}: {problem}" for problem in problems]
    return lines


def _links_here(snapshot: Snapshot) -> dict[str, Link]:
    """Return the measured links of the member that answered, by the other end."""
    nodes = [m.node for m in snapshot.members]
    found = {}
    for link in snapshot.links:
        ends = (nodes[link.a], nodes[link.b])
        if snapshot.answered_by in ends:
            found[ends[ends[0] == snapshot.answered_by]] = link
    return found


def _status_row(m: MemberSnapshot, answering: bool, measured: Link | None) -> tuple[str, ...]:
    caps, load = m.caps, m.load
    memory_mib = load.memory_available_mib if load else caps.memory_available_mib if caps else 0
    link = f"{m.via} {m.rtt_ms:.1f}ms" if m.rtt_ms is not None else m.via
    return (
        m.name,
        m.state.value if m.state else "no agent",
        ",".join(role.value for role in m.roles) if len(m.roles) == 1 else _initials(m),
        _gpus(m),
        str(caps.cpus) if caps else "-",
        f"{memory_mib / 1024:.0f}/{caps.memory_total_mib / 1024:.0f}G" if caps else "-",
        m.zone,
        "here" if answering else link or "-",
        mbit(measured.bytes_s) if measured and measured.bytes_s else "",
        duration(measured.age_s) if measured and measured.bytes_s else "",
        str(len(m.grants)),
        f"{load.cpu_percent:.0f}%" if load else "-",
        "now" if answering else duration(m.heard_s),
        f"{minor(caps.torch.version if caps.torch else None)}/{minor(caps.python)}"
        if caps
        else "-",
    )


def _initials(m: MemberSnapshot) -> str:
    return "+".join(role.value[0] for role in m.roles) or "-"


def _gpus(m: MemberSnapshot) -> str:
    if m.caps is None:
        return "-"
    from gpulayer_mesh.core.devicecare import unfit

    granted = {index for grant in m.grants for index in grant.devices}
    models: dict[str, list[bool]] = {}
    for device in m.caps.devices:
        model = re.sub(r"^(NVIDIA|AMD|Apple)\s+|GeForce\s+", "", device.name)
        models.setdefault(model, []).append(device.index not in granted and unfit(device) is None)
    shown = (f"{sum(free)}/{len(free)} {model}" for model, free in models.items())
    return ", ".join(shown) or "-"


def _by_name(snapshot: Snapshot) -> list[MemberSnapshot]:
    def key(m: MemberSnapshot) -> list[tuple[int, str]]:  # node-2 before node-10
        return [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", m.name)
        ]

    return sorted(snapshot.members, key=lambda m: (key(m), m.node))


def status_json(snapshot: Snapshot, *, answered_ms: float) -> dict[str, Any]:
    """Return what `gpulayer mesh status --json` prints."""
    names = {m.node: m.name for m in snapshot.members}
    return {
        "schema": SCHEMA,
        "mesh": snapshot.mesh,
        "roster_epoch": snapshot.roster_epoch,
        "answered_by": {
            "node": snapshot.answered_by,
            "name": names.get(snapshot.answered_by, ""),
        },
        "answered_ms": round(answered_ms, 1),
        "nodes": [_node_json(m) for m in _by_name(snapshot)],
        "links": [
            {
                "nodes": [snapshot.members[link.a].node, snapshot.members[link.b].node],
                "names": [snapshot.members[link.a].name, snapshot.members[link.b].name],
                "rtt_ms": None if link.rtt_us is None else link.rtt_us / 1000,
                "mbit_s": None if link.bytes_s is None else round(link.bytes_s * 8 / 1e6, 1),
                "mtu": link.mtu,
                "age_s": link.age_s if link.bytes_s is not None else None,
                "source": None if link.source is None else link.source.value,
            }
            for link in snapshot.links
        ],
    }


def _node_json(m: MemberSnapshot) -> dict[str, Any]:
    caps, load = m.caps, m.load
    torch = caps.torch if caps else None
    granted = {index: grant.job for grant in m.grants for index in grant.devices}
    return {
        "node": m.node,
        "name": m.name,
        "state": m.state.value if m.state else None,
        "since_s": round(m.since_s, 3),
        "heard_s": None if m.heard_s is None else round(m.heard_s, 3),
        "roles": [role.value for role in m.roles],
        "zone": m.zone,
        "zone_inferred": m.zone_inferred,
        "addresses": [
            f"[{a.host}]:{a.port}" if ":" in a.host else f"{a.host}:{a.port}" for a in m.addresses
        ],
        "via": m.via,
        "rtt_ms": None if m.rtt_ms is None else round(m.rtt_ms, 3),
        "cpus": caps.cpus if caps else None,
        "memory_total_mib": caps.memory_total_mib if caps else None,
        "memory_available_mib": load.memory_available_mib
        if load
        else caps.memory_available_mib
        if caps
        else None,
        "disk_free_mib": caps.disk_free_mib if caps else None,
        "cpu_percent": load.cpu_percent if load else None,
        "os": caps.os if caps else None,
        "python": caps.python if caps else None,
        "gpulayer": caps.gpulayer if caps else None,
        "torch": torch.version if torch else None,
        "torch_backends": list(torch.backends) if torch else [],
        "torch_problems": list(torch.problems) if torch else [],
        "accelerators": [a.value for a in torch.accelerators] if torch else [],
        "devices": [
            {
                "kind": d.kind.value,
                "index": d.index,
                "name": d.name,
                "uuid": d.uuid,
                "memory_total_mib": d.memory_total_mib,
                "memory_free_mib": d.memory_free_mib,
                "busy_pids": d.busy_pids,
                "busy_by": [{"pid": one.pid, "name": one.name} for one in d.busy_by],
                "blocked": _blocked_json(d.blocked),
                "job": granted.get(d.index),
            }
            for d in (caps.devices if caps else ())
        ],
        "jobs": [
            {"job": g.job, "processes": g.processes, "devices": list(g.devices)} for g in m.grants
        ],
    }


def _blocked_json(blocked: Blocked | None) -> dict[str, Any] | None:
    if blocked is None:
        return None
    return {
        "reason": str(blocked),
        "processes": [
            {"pid": one.pid, "name": one.name, "job": one.job, "memory_mib": one.memory_mib}
            for one in blocked.processes
        ],
        "more": blocked.more,
        "unseen_mib": blocked.unseen_mib,
    }


def refusal_lines(
    refusals: Sequence[Refusal], counted: Sequence[str] = (), width: int = TABLE_WIDTH
) -> list[str]:
    """Return one row per node: those that count, then the others and why they do not."""
    if not refusals:
        return []
    rows = [(name, "yes", "") for name in counted]
    rows += [(r.node, "no" if r.for_ever else "not now", r.reason) for r in refusals]
    return table(("NODE", "COUNTS", "WHY NOT"), rows, width=width, shrink=(0, 2))


def version_lines(versions: Sequence[Versions], width: int = TABLE_WIDTH) -> list[str]:
    """Return one row per node where versions differ, and what would make them alike."""
    if not versions:
        return []
    from gpulayer_mesh.core.versions import fix

    rows = [(one.node, one.torch, one.python, one.gpulayer) for one in versions[:_VERSIONS]]
    header = ("NODE", "TORCH", "PYTHON", "GPULAYER")
    lines = table(header, rows, width=width, shrink=(0, 1))
    if len(versions) > _VERSIONS:
        lines.append(f"and {len(versions) - _VERSIONS} more nodes")
    return [*lines, clean(fix(versions))]


def unreached_lines(unreached: Sequence[Unreached], width: int = TABLE_WIDTH) -> list[str]:
    """Return one row per direction in which a job's ranks could not connect."""
    if not unreached:
        return []
    rows = [
        (
            one.source,
            one.target,
            one.host,
            ",".join(map(str, one.ports)),
            one.what,
            "works" if one.back else "fails too",
        )
        for one in unreached
    ]
    header = ("FROM", "TO", "ADDRESS", "TCP PORTS", "WHAT HAPPENS", "BACK")
    return table(header, rows, width=width, shrink=(0, 1, 4))


# Jobs


def plan_lines(plan: Plan, name: str, *, here: str = "", width: int = TABLE_WIDTH) -> list[str]:
    """Return where a job goes and why, and why not to every other node."""
    per_node = {slot.processes for slot in plan.slots}
    nodes = counted(len(plan.slots), "node")
    if len(per_node) == 1:
        shape = f"{nodes} x {counted(per_node.pop(), 'process')}"
    else:
        shape = f"{nodes}, {counted(plan.world_size, 'process')}"
    rows = []
    first = 0
    for slot, (node, reason) in zip(plan.slots, plan.chosen, strict=True):
        ranks = range(first, first + slot.processes)
        first += slot.processes
        if slot.node == here:
            reason = f"this machine: if it sleeps, the job stops; {reason}"
        rows.append(("  rank" if len(ranks) == 1 else "  ranks", ranges(ranks), node, reason))
    lines = [f"plan for {clean(name)}: {shape} on {plan.accelerator.value}"]
    lines += table(("", "", "", ""), rows, width=width, shrink=(2, 3))[1:]
    lines += [clip(clean(f"  not {r.node}: {r.reason}"), width) for r in plan.refused[:_REFUSED]]
    if len(plan.refused) > _REFUSED:
        lines.append(f"  not {len(plan.refused) - _REFUSED} more nodes")
    lines += [f"  note: {clean(warning)}" for warning in plan.warnings]
    found = version_lines(plan.versions, width - len("    "))
    return lines + ["  note: versions differ", *(f"    {line}" for line in found)] * bool(found)


def restart_lines(spec: JobSpec, names: Mapping[str, str]) -> list[str]:
    """Return what a job that may start again can survive; nothing for another.

    Args:
        names: what nodes are called.
    """
    if not spec.restarts:
        return []
    from gpulayer_mesh.core.restarts import VOTERS_MIN

    watching = [names.get(node, node[:8]) for node in spec.voters[len(spec.slots) :]]
    head = f"starts again after a failure, up to {counted(spec.restarts, 'time')}"
    if len(spec.voters) < VOTERS_MIN:
        machines = "a machine that is lost ends the job: that takes three machines"
        return [f"{head}, where a rank failed; {machines}"]
    return [f"{head}" + (f"; copies also on {', '.join(watching)}" if watching else "")]


def restarting_line(record: JobRecord) -> str:
    """Return why an attempt ended, and that another one is being started."""
    spec = record.spec
    why = "it failed" if record.failure is None else _failed(record.failure)
    return f"{why}; restarting ({spec.restart + 1} of {spec.restarts})"


def attempt_line(spec: JobSpec) -> str:
    """Return where an attempt after the first runs, and what it is called."""
    nodes = ", ".join(dict.fromkeys(rank_nodes(spec)))
    return f"restart {spec.restart} runs as job {spec.id} on {nodes}"


def _failed(failure: Failure) -> str:
    if failure.rank is None:
        reason = failure.reason.removeprefix(f"node {failure.node}: ")
        return f"node {failure.node} failed: {reason}"
    return f"rank {failure.rank} on {failure.node} failed: {failure.reason}"


def rank_nodes(spec: JobSpec) -> list[str]:
    """Return the node name of each rank."""
    return [slot.name for slot in spec.slots for _ in range(slot.processes)]


def job_lines(
    records: Sequence[JobRecord], queued: Sequence[Queued] = (), *, width: int = TABLE_WIDTH
) -> list[str]:
    """Return the table of `gpulayer jobs`; what waits stands first and says why."""
    rows = [
        (
            one.ticket.job,
            f"queued #{one.position}",
            one.ticket.name,
            "-",
            f"needs {one.ticket.needs}; {one.ticket.why}",
            one.ticket.submitter_name,
            "-",
            "-",
        )
        for one in queued
    ]
    rows += [
        (
            r.spec.id,
            _state(r),
            r.spec.name,
            str(len(rank_nodes(r.spec))),
            ",".join(slot.name for slot in r.spec.slots),
            r.spec.submitter_name,
            duration(_ran_s(r)),
            "-" if r.ended_age_s is None else f"{duration(r.ended_age_s)} ago",
        )
        for r in records
    ]
    return table(
        ["JOB", "STATE", "NAME", "RANKS", "NODES", "FROM", "RAN", "ENDED"],
        rows,
        width=width,
        shrink=(2, 4, 5),
    )


def silent_lines(records: Sequence[JobRecord], snapshot: Snapshot) -> list[str]:
    """Return which nodes of jobs that are not over cannot be reached, and for how long."""
    from gpulayer_mesh.core.jobspec import OVER
    from gpulayer_mesh.core.types import NodeState

    silent = {
        member.node: member.since_s if member.heard_s is None else member.heard_s
        for member in snapshot.members
        if member.state is not None and member.state is not NodeState.ALIVE
    }
    return [
        f"job {record.spec.id}: {clean(slot.name)} has not answered for "
        f"{duration(silent[slot.node])}"
        for record in records
        if record.state not in OVER
        for slot in record.spec.slots
        if slot.node in silent
    ]


def _state(record: JobRecord) -> str:
    """Return a job's state; of an attempt that another one follows, which that is."""
    state, spec = record.state.value, record.spec
    if state != "restarting" and not record.successor:
        return state
    word = "restarted" if record.successor else state
    return f"{word} {spec.restart + 1}/{spec.restarts}"


def service_lines(services: Sequence[Service], *, width: int = TABLE_WIDTH) -> list[str]:
    """Return the table of `gpulayer service list`."""
    rows = [
        (
            one.name,
            one.state.state if one.state else "no answer",
            one.node,
            str(one.state.port) if one.state and one.state.port else "-",
            str(one.state.restarts) if one.state else "-",
            (one.state.last if one.state else "") or "-",
            duration(_ran_s(one.record)),
            one.record.spec.id,
        )
        for one in services
    ]
    heads = ["SERVICE", "STATE", "NODE", "PORT", "RESTARTS", "LAST END", "RUNS", "JOB"]
    return table(heads, rows, width=width, shrink=(0, 2, 5))


def services_json(services: Sequence[Service]) -> dict[str, Any]:
    """Return what `gpulayer service list --json` prints."""
    return {
        "schema": SCHEMA,
        "services": [
            {
                "name": one.name,
                "job": one.record.spec.id,
                "node": one.node,
                "state": one.state.state if one.state else None,
                "port": one.state.port if one.state else None,
                "restarts": one.state.restarts if one.state else None,
                "last_end": one.state.last if one.state else None,
                "ran_s": round(_ran_s(one.record), 3),
            }
            for one in services
        ],
    }


def _ran_s(record: JobRecord) -> float:
    return record.age_s - (record.ended_age_s or 0.0)


def job_json(record: JobRecord) -> dict[str, Any]:
    """Return one job as `--json` prints it. Environment and arguments stay with the job."""
    spec, failure = record.spec, record.failure
    names = rank_nodes(spec)
    return {
        "job": spec.id,
        "name": spec.name,
        "kind": spec.kind.value,
        "state": record.state.value,
        "cause": record.cause,
        "exit_code": exit_code(record),
        "accelerator": spec.accelerator.value,
        "submitter": spec.submitter_name,
        "submitted_at": spec.submitted_at,
        "ran_s": round(_ran_s(record), 3),
        "ended_ago_s": None if record.ended_age_s is None else round(record.ended_age_s, 3),
        "nodes": [
            {
                "node": slot.node,
                "name": slot.name,
                "processes": slot.processes,
                "devices": list(slot.devices),
            }
            for slot in spec.slots
        ],
        "ranks": [
            {
                "rank": s.rank,
                "node": names[s.rank] if s.rank < len(names) else "",
                "state": s.state.value,
                "pid": s.pid,
                "exit_code": s.exit_code,
                "signal": s.signal,
                "stopped": s.stopped,
            }
            for s in _statuses(record)
        ],
        "failure": None
        if failure is None
        else {
            "rank": failure.rank,
            "node": failure.node,
            "code": failure.code,
            "reason": failure.reason,
            "tail": list(failure.tail),
        },
        "queue": None,
        "restart": spec.restart,
        "restarts": spec.restarts,
        "origin": spec.origin or None,
        "successor": record.successor or None,
        "waiting": record.waiting or None,
    }


def queued_json(one: Queued) -> dict[str, Any]:
    """Return a job that waits as `--json` prints it, with every field of one that has started."""
    ticket = one.ticket
    return {
        "job": ticket.job,
        "name": ticket.name,
        "kind": None,
        "state": "pending",
        "cause": "",
        "exit_code": None,
        "accelerator": None,
        "submitter": ticket.submitter_name,
        "submitted_at": None,
        "ran_s": 0.0,
        "ended_ago_s": None,
        "nodes": [],
        "ranks": [],
        "failure": None,
        "queue": {"position": one.position, "needs": ticket.needs, "why": ticket.why},
        "restart": 0,
        "restarts": None,
        "origin": None,
        "successor": None,
        "waiting": None,
    }


def jobs_json(records: Sequence[JobRecord], queued: Sequence[Queued] = ()) -> dict[str, Any]:
    """Return what `gpulayer jobs --json` prints."""
    return {
        "schema": SCHEMA,
        "jobs": [*map(queued_json, queued), *map(job_json, records)],
    }


def log_json(spec: JobSpec, line: LogRecord) -> dict[str, Any]:
    """Return one line of `gpulayer logs --json`, which prints one object per record."""
    nodes = rank_nodes(spec)
    return {
        "schema": SCHEMA,
        "job": spec.id,
        "rank": line.rank,
        "node": nodes[line.rank] if line.rank < len(nodes) else "",
        "seq": line.seq,
        "time": line.wall,
        "stream": {1: "out", 2: "err"}.get(line.stream, "note"),
        "text": line.data.decode("utf-8", "replace"),
    }


def exit_code(record: JobRecord) -> int | None:
    """Return what a command that waited for this job exits with, None while it runs."""
    match record.state.value:
        case "succeeded":
            return 0
        case "failed":
            return record.failure.code if record.failure else 1
        case "cancelled":
            return 130
    return None


def outcome_lines(record: JobRecord) -> tuple[list[str], tuple[str, ...]]:
    """Return how a job ended: our words, then the lines that must come last."""
    spec, failure = record.spec, record.failure
    head = f"job {spec.id} {record.state.value}"
    took = f"after {duration(_ran_s(record))}"
    if spec.restart:
        took += f", restart {spec.restart} of {spec.restarts}"
    nodes = dict.fromkeys(rank_nodes(spec))
    where = f"{counted(len(rank_nodes(spec)), 'rank')} on {', '.join(nodes)}"
    if failure is None:
        cause = f": {record.cause}" if record.cause else ""
        return [f"{head} {took}{cause} ({where})"], ()
    others: dict[str, list[int]] = {}
    for status in _statuses(record):
        if status.rank != failure.rank:
            others.setdefault(_ending(status), []).append(status.rank)
    lines = [f"{head} {took} ({where})"]
    for ending, ranks in others.items():
        lines.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {ending}")
    lines.append(_failed(failure))
    return lines, failure.tail[-_TAIL_LINES:]


def _statuses(record: JobRecord) -> list[RankStatus]:
    return sorted((s for r in record.reports for s in r.ranks), key=lambda s: s.rank)


def _ending(status: RankStatus) -> str:
    if status.state.value != "exited":
        return "end not reported"
    if status.stopped:
        return "stopped"
    if status.signal is not None:
        return f"killed by signal {status.signal}"
    if status.no_result:
        return "ended without a result"
    return "finished" if status.exit_code == 0 else f"exit code {status.exit_code}"


# The doctor


def report_lines(report: Report, here: str) -> list[str]:
    """Return what `gpulayer doctor` prints: each verdict with its fix, then what was looked at.

    Args:
        here: what this machine is called.
    """
    lines = []
    for verdict in report.verdicts:
        where = verdict.subject or here
        lines.append(f"{verdict.severity}: {verdict.name} on {where}: {verdict.finding}")
        lines.append(f"  fix: {verdict.fix}")
    if not report.verdicts:
        lines.append("nothing is wrong")
    lines.append(f"checked: {', '.join(report.checked) or 'nothing'}")
    for why in dict.fromkeys(report.unchecked.values()):
        checks = [check for check, other in report.unchecked.items() if other == why]
        lines.append(f"not checked: {', '.join(checks)}: {why}")
    return [clean(line) for line in lines]


def report_json(report: Report, here: str, *, took_s: float) -> dict[str, Any]:
    """Return what `gpulayer doctor --json` prints."""
    return {
        "schema": SCHEMA,
        "here": here,
        "verdicts": [
            {
                "name": verdict.name.value,
                "severity": verdict.severity.value,
                "node": verdict.subject or here,
                "here": not verdict.subject,
                "finding": verdict.finding,
                "fix": verdict.fix,
            }
            for verdict in report.verdicts
        ],
        "checked": [check.value for check in report.checked],
        "unchecked": {check.value: why for check, why in report.unchecked.items()},
        "took_s": round(took_s, 3),
    }

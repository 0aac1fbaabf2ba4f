"""Asks the interpreter of the ranks what it can really do. Run as a script, never imported.

`python -P torch_probe.py key|prove|imports`. It prints one JSON object per line as it goes, so a
crash or hang in a driver costs only what was not yet said:

- key: Python's version; torch's version and the file that changes with it. torch is not imported.
- prove: a matrix product on every accelerator, compared with the right answer; backends.
- imports: which of the names on stdin (a JSON list) cannot be imported.

It imports the standard library and torch, nothing of ours: the interpreter may be another one.
`-P` instead of `-I`: ranks see the user's own site-packages, so the probe must.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def key() -> None:
    say(python=platform.python_version())
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        changes = Path(spec.origin).with_name("version.py")
        stamp = changes.stat().st_mtime_ns if changes.exists() else 0
        version = importlib.metadata.version("torch")
        say(torch=version, path=str(changes), mtime_ns=stamp)


def imports() -> None:
    missing = []
    for name in json.load(sys.stdin):
        # Only top-level names: finding a.b would run the code of a.
        if not name.isidentifier():
            missing.append(name)
            continue
        try:
            if importlib.util.find_spec(name) is None:
                missing.append(name)
        except ValueError:
            pass  # in sys.modules without a spec, as __main__: it is there
    say(missing=missing)


def prove() -> None:
    os.nice(10)  # importing torch takes seconds of CPU; the agent comes first
    try:
        import torch
    except Exception as e:
        say(problem=f"torch: {first_line(e)}")
        return
    say(torch=torch.__version__)
    if works(torch, "cpu"):
        say(works="cpu")
    prove_cuda(torch)
    prove_mps(torch)
    prove_backends(torch)


def works(torch: Any, device: str) -> bool:
    """Multiply two small matrices there; drivers that load may still fail at the first kernel."""
    try:
        a = torch.arange(64, dtype=torch.float32, device=device).reshape(8, 8)
        got = float((a @ torch.eye(8, device=device)).sum())
    except Exception as e:
        say(problem=f"{device}: {first_line(e)}")
        return False
    if got != 2016.0:  # 0 + 1 + ... + 63
        say(problem=f"{device}: a matrix product gave {got} instead of 2016")
        return False
    return True


def prove_cuda(torch: Any) -> None:
    kind = "rocm" if torch.version.hip else "cuda"
    try:
        if not torch.cuda.is_available():
            return
        count = torch.cuda.device_count()
    except Exception as e:
        say(problem=f"{kind}: {first_line(e)}")
        return
    good = False
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        uuid = getattr(found, "uuid", None)  # since torch 2.4
        uuid = "" if uuid is None or kind == "rocm" else f"GPU-{uuid}"
        if works(torch, f"cuda:{index}"):
            good = True
            memory_mib = found.total_memory // 2**20
            say(
                device={
                    "kind": kind,
                    "index": index,
                    "name": found.name,
                    "uuid": uuid,
                    "memory_total_mib": memory_mib,
                }
            )
        elif uuid:
            say(failed=uuid)
    if good:
        say(works=kind)


def prove_mps(torch: Any) -> None:
    if torch.backends.mps.is_available() and works(torch, "mps"):
        say(works="mps")
        name = f"Apple {platform.processor() or platform.machine()} GPU"
        say(device={"kind": "mps", "index": 0, "name": name})


def prove_backends(torch: Any) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        say(problem="torch.distributed: not in this build")
        return
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        if getattr(distributed, f"is_{name}_available", bool)():
            say(backend=name)


def first_line(error: BaseException) -> str:
    """CUDA's messages go on for a page about how to debug kernels."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0][:200]


if __name__ == "__main__":
    {"key": key, "prove": prove, "imports": imports}[sys.argv[1]]()
    say(done=True)

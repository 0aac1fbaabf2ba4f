"""Pack a folder of source for a job: its files, their hashes, any chunk of them on demand.

Nothing is copied: a chunk is read from the original file when it is asked for and checked against
its hash. `scan` tells which packages a script needs on the nodes, before anything is sent.

This module does not know who needs a chunk, how it travels, or what is ignored (`ignore` does).
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from gpulayer_mesh.core.manifest import (
    BUNDLE_MAX,
    CHUNK_BYTES,
    MANIFEST_MAX,
    Entry,
    EntryKind,
    Manifest,
    pack_manifest,
    path_problem,
    tree_problem,
    unique_chunks,
)
from gpulayer_mesh.errors import BundleError

from gpulayer.ignore import IGNORE_FILE, UNREADABLE_HINT, Skipped, Walk

SOFT_LIMIT = 100 * 1000 * 1000  # bytes; more is rarely source, and takes 10 s on 100 Mbit/s
MANY_FILES = 10_000  # a warning: this is a data set more often than source
LISTED = 10  # largest files in an error
MODULES_MAX = 2_000  # local modules followed when looking for imports
SOURCE_MAX = 2 * 1024 * 1024  # bytes of one module; larger is generated


@dataclass(frozen=True, slots=True)
class Bundle:
    """A packed folder."""

    root: Path
    manifest: Manifest
    manifest_bytes: bytes
    sha256: bytes  # of `manifest_bytes`; goes into the job spec
    total_bytes: int  # of all files
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]
    _sources: dict[str, Path] = field(repr=False)  # manifest path -> original
    _chunks: dict[bytes, tuple[Path, int, int]] = field(
        repr=False
    )  # hash -> (path, offset, length)

    @property
    def files(self) -> int:
        return len(self._sources)

    @property
    def chunks(self) -> tuple[bytes, ...]:
        """Every different chunk hash, in the order of the manifest (`manifest.unique_chunks`)."""
        return tuple(unique_chunks(self.manifest))

    def summary(self) -> str:
        """One line: "214 files, 3.1 MB, skipped: data/ (gitignore) 18 GB"."""
        plural = "" if self.files == 1 else "s"
        text = f"{self.files} file{plural}, {human(self.total_bytes)}"
        shown = [s for s in self.skipped if s.reason not in ("git", "cache")]
        named = [
            f"{s.path} ({s.reason})" + (f" {human(s.size)}" if s.size is not None else "")
            for s in shown[:8]
        ]
        if len(shown) > 8:
            named.append(f"{len(shown) - 8} more")
        return f"{text}, skipped: {', '.join(named)}" if named else text

    def read_chunk(self, sha256: bytes) -> bytes:
        """Return one chunk.

        Raises:
            BundleError: unknown, or its file changed since it was packed.
        """
        found = self._chunks.get(sha256)
        if found is None:
            raise BundleError(f"no chunk {sha256.hex()[:8]} in this bundle")
        path, offset, length = found
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as e:
            raise BundleError(f"cannot read {str(path)!r}: {e.strerror}") from e
        if hashlib.sha256(data).digest() != sha256:
            raise BundleError(
                f"{str(path)!r} changed after it was packed", hint="start the job again"
            )
        return data

    def why_skipped(self, path: str) -> str | None:
        """Return the rule that left a path out, None if none did."""
        for skipped in self.skipped:
            if path == skipped.path or (
                skipped.path.endswith("/") and f"{path}/".startswith(skipped.path)
            ):
                return skipped.reason
        return None

    def source(self, path: str) -> Path | None:
        """Return the original of a bundled file."""
        return self._sources.get(path)

    def has_python(self, folder: str) -> bool:
        """Whether a folder of the bundle holds modules."""
        return any(name.startswith(f"{folder}/") and name.endswith(".py") for name in self._sources)

    def left_behind(self, path: str) -> bool:
        """Whether a path exists here but was skipped."""
        return (
            path not in self._sources
            and self.why_skipped(path) is not None
            and os.path.lexists(self.root / path)
        )


def pack(
    root: Path, extra_files: Mapping[str, Path] | None = None, *, limit_bytes: int = SOFT_LIMIT
) -> Bundle:
    """Choose, check and hash the files below `root`.

    Args:
        root: the folder that becomes the job's working folder.
        extra_files: more files by their path in the bundle; no rule applies to them.
        limit_bytes: refuse more than this; never more than the hard limit of 2 GB.

    Raises:
        BundleError: not a folder, too large, an unsafe name, a symlink that leaves the folder, or
            a file that cannot be read or changes while it is read.
    """
    root = root.resolve()
    if not root.is_dir():
        raise BundleError(f"{str(root)!r} is not a folder")
    walk = Walk(root)
    walk.run()
    sources = walk.files
    for name, path in (extra_files or {}).items():
        if name in sources:
            raise BundleError(f"extra file {name!r} is already in {str(root)!r}")
        sources[name] = path
    _check_names(
        [*(Entry(name) for name in sources), *(Entry(n, EntryKind.DIR) for n in walk.empty)]
    )
    sizes = {name: _stat(path).st_size for name, path in sources.items()}
    _check_size(sizes, limit_bytes)
    entries, chunks = _hash(sources)
    entries += [Entry(path, EntryKind.DIR) for path in walk.empty]
    manifest = Manifest(tuple(sorted(entries, key=lambda entry: entry.path)))
    packed, sha256 = pack_manifest(manifest)
    if len(packed) > MANIFEST_MAX:
        raise BundleError(f"the list of {len(entries)} files takes {human(len(packed))}")
    warnings: tuple[str, ...] = ()
    if len(sources) > MANY_FILES:
        warnings = (f"{len(sources)} files: if this is a data set, name it in {IGNORE_FILE}",)
    skipped = tuple(sorted(walk.skipped, key=lambda s: (not s.path.endswith("/"), s.path)))
    return Bundle(
        root, manifest, packed, sha256, sum(sizes.values()), skipped, warnings, sources, chunks
    )


def human(size: int) -> str:
    """Format bytes: "3.1 MB"."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    return (
        f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 10 else f"{value:.1f} {units[0]}"
    )


# Checks and hashes


def _check_names(entries: list[Entry]) -> None:
    hint = f"rename it, or name it in {IGNORE_FILE}"
    for entry in entries:
        problem = path_problem(entry.path)
        if problem is not None:
            raise BundleError(f"file name {entry.path!r} {problem}", hint=hint)
    problem = tree_problem(entries)
    if problem is not None:
        raise BundleError(problem, hint=hint)


def _check_size(sizes: Mapping[str, int], limit_bytes: int) -> None:
    limit = min(limit_bytes, BUNDLE_MAX)
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:LISTED]
    lines = "".join(f"\n  {human(size):>7}  {name}" for name, size in largest)
    raise BundleError(
        f"the folder holds {human(total)}, more than {human(limit)}; largest:{lines}",
        hint=f"name what the job does not need in {IGNORE_FILE}",
    )


def _stat(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as e:
        raise BundleError(f"cannot read {str(path)!r}: {e.strerror}", hint=UNREADABLE_HINT) from e
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(f"{str(path)!r} is not a regular file")
    return found


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_ino, found.st_size


def _hash(
    sources: Mapping[str, Path],
) -> tuple[list[Entry], dict[bytes, tuple[Path, int, int]]]:
    entries = []
    chunks: dict[bytes, tuple[Path, int, int]] = {}
    for name, path in sources.items():
        before = _stat(path)
        whole = hashlib.sha256()
        hashes = []
        offset = 0
        try:
            with path.open("rb") as file:
                while offset <= before.st_size and (data := file.read(CHUNK_BYTES)):
                    whole.update(data)
                    digest = hashlib.sha256(data).digest()
                    hashes.append(digest)
                    chunks.setdefault(digest, (path, offset, len(data)))
                    offset += len(data)
        except OSError as e:
            raise BundleError(
                f"cannot read {str(path)!r}: {e.strerror}", hint=UNREADABLE_HINT
            ) from e
        after = _stat(path)
        if offset != before.st_size or _identity(before) != _identity(after):
            raise BundleError(
                f"{str(path)!r} changed while it was packed",
                hint=f"wait for its writer, or name it in {IGNORE_FILE}",
            )
        executable = bool(before.st_mode & stat.S_IXUSR)
        entries.append(
            Entry(name, EntryKind.FILE, offset, executable, whole.digest(), tuple(hashes))
        )
    return entries, chunks


# What a script needs


@dataclass(frozen=True, slots=True)
class Scan:
    """What reading a script and its local modules tells, without running anything."""

    imports: tuple[str, ...] = ()  # third-party packages it cannot do without
    notes: tuple[str, ...] = ()  # skipped files and folders that it names in a string


def top_level_imports(bundle: Bundle, argv: Sequence[str], cwd: str = "") -> tuple[str, ...]:
    """Return the third-party packages a script cannot do without; see `scan`."""
    return scan(bundle, argv, cwd).imports


def scan(bundle: Bundle, argv: Sequence[str], cwd: str = "") -> Scan:
    """Read a script and the local modules it imports.

    Only imports that surely run count: not those in a `try` that catches their failure, under a
    condition, or inside a function.

    Args:
        argv: arguments of the interpreter: a script, `-m NAME` or `-c CODE`, options before them.
        cwd: the working folder, inside the bundle.

    Raises:
        BundleError: the script is missing, or imports a local module that was skipped.
    """
    kind, what = _program(argv)
    base = f"{cwd}/" if cwd else ""
    root = cwd  # of sys.path[0]
    if kind == "code":
        return _follow(bundle, cwd, what.encode(), cwd)
    if kind == "module":
        path = base + what.replace(".", "/")
        script = next(
            (p for p in (f"{path}/__main__.py", f"{path}.py") if bundle.source(p)), f"{path}.py"
        )
        if bundle.source(script) is None and not bundle.left_behind(script):
            return Scan((what.partition(".")[0],))  # an installed one: `-m pytest`
    elif kind == "script" and not what.startswith("/"):
        script = os.path.normpath(base + what)
        root = script.rpartition("/")[0]
    else:
        return Scan()  # a path of the node, or standard input
    source = bundle.source(script)
    if source is None:
        reason = bundle.why_skipped(script)
        raise BundleError(
            f"script {script!r} is " + (f"skipped ({reason})" if reason else "not in the folder"),
            hint=f"add '!{script}' to {IGNORE_FILE}"
            if reason
            else f"the folder is {str(bundle.root)!r}: is the name right, and the script in it?",
        )
    return _follow(bundle, root, script, cwd)


def _program(argv: Sequence[str]) -> tuple[str, str]:
    """What a python command line runs: ("module" | "code" | "script" | "", its text)."""
    left = list(argv)
    while left:
        argument = left.pop(0)
        for flag, kind in (("m", "module"), ("c", "code")):
            if re.fullmatch(f"-[bBdEhiIOPqsSuvVx]*{flag}.*", argument, re.DOTALL):
                attached = argument.partition(flag)[2]
                return kind, attached or (left[0] if left else "")
        if argument in ("-X", "-W", "--check-hash-based-pycs"):
            del left[:1]
        elif not argument.startswith("-"):
            return "script", argument
    return "", ""


def _follow(bundle: Bundle, root: str, start: str | bytes, cwd: str) -> Scan:
    """Read a program (path in the bundle, or code) and every local module it surely imports."""
    found: set[str] = set()
    notes: dict[str, None] = {}
    queue: list[str | bytes] = [start]
    seen: set[str | bytes] = {start}
    while queue and len(seen) <= MODULES_MAX:
        current = queue.pop()
        tree = _parse(bundle, current)
        if tree is None:
            continue  # the interpreter of the job will say it better
        path = current if isinstance(current, str) else f"{root}/-c"
        for name in _imports(tree, path, root):
            local = _resolve(bundle, name, root)
            queue += [p for p in local if p not in seen]
            seen.update(local)
            top = name.partition(".")[0]
            if not local and top not in sys.stdlib_module_names:
                found.add(top)
        notes |= dict.fromkeys(_named(bundle, tree, path, cwd))
    return Scan(tuple(sorted(found)), tuple(notes))


def _parse(bundle: Bundle, code: str | bytes) -> ast.Module | None:
    try:
        if isinstance(code, str):
            source = bundle.source(code)
            if source is None or source.stat().st_size > SOURCE_MAX:
                return None
            code = source.read_bytes()
        return ast.parse(code)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _named(bundle: Bundle, tree: ast.Module, path: str, cwd: str) -> Iterator[str]:
    """Tell of skipped files that a module names: they will not be there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        text = node.value
        if not text.strip("./") or len(text) > 255 or "\n" in text or text.startswith("/"):
            continue
        name = os.path.normpath(f"{cwd}/{text}" if cwd else text)
        if not name.startswith("..") and bundle.left_behind(name):
            yield f"{path} names {text!r}, which stays here ({bundle.why_skipped(name)})"


def _imports(tree: ast.Module, path: str, root: str) -> Iterator[str]:
    """Yield absolute dotted names one module surely imports, the `from` names included."""
    inside = path.removeprefix(f"{root}/") if root else path
    package = inside.split("/")[:-1]
    for node in _sure(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.level == 0:
            # "from a import b": b may be a module; `_resolve` takes the longest that exists.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif node.level <= len(package):
            base = package[: len(package) - node.level + 1]
            parts = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def _sure(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.ClassDef | ast.With) or _is_main(node):
            yield from _sure(node.body)
        elif isinstance(node, ast.Try):
            if not any(_catches_import(handler) for handler in node.handlers):
                yield from _sure(node.body)
            yield from _sure(node.finalbody)


def _is_main(node: ast.stmt) -> TypeGuard[ast.If]:
    """Whether this is `if __name__ == "__main__":`."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.left, ast.Name)
        and node.test.left.id == "__name__"
        and isinstance(node.test.ops[0], ast.Eq)
    )


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {t.id if isinstance(t, ast.Name) else getattr(t, "attr", "") for t in types}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _resolve(bundle: Bundle, name: str, root: str) -> list[str]:
    """Return the bundle's files that importing a module runs; none when it is not local.

    Raises:
        BundleError: it is here but was skipped.
    """
    found: list[str] = []
    stem = root
    for part in name.split("."):
        stem = f"{stem}/{part}" if stem else part
        candidates = (f"{stem}/__init__.py", f"{stem}.py")
        here = next((path for path in candidates if bundle.source(path)), None)
        if here is not None:
            found.append(here)
            if here == candidates[1]:
                break
            continue
        lost = next((path for path in candidates if bundle.left_behind(path)), None)
        if lost is not None:
            raise BundleError(
                f"the job imports {name!r}, but {lost} is skipped ({bundle.why_skipped(lost)})",
                hint=f"add '!{lost}' to {IGNORE_FILE}",
            )
        if bundle.has_python(stem):
            found.append(stem)  # a namespace package: no file of its own
        elif not bundle.left_behind(stem):
            break
    return found

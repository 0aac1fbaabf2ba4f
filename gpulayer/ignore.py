"""Which files of a folder belong to a job: git's rules, ours, and what is never shipped.

Where git is there it decides, so matching is git's own; elsewhere `.gitignore` files are read with
`pathspec`. `.gpulayerignore` files add to either, and `!` in them brings a path back. Symlinks
inside the tree become what they point to. This module reads names and sizes, never content.
"""

from __future__ import annotations

import os
import re
import subprocess
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpulayer_mesh.core.manifest import FILES_MAX
from gpulayer_mesh.errors import BundleError
from pathspec import GitIgnoreSpec, RegexPattern

GIT_S = 60.0  # a cold disk with a large tree; then the rules of pathspec are used
IGNORE_FILE_MAX = 1024 * 1024  # bytes; larger is not a list of patterns
MEASURE_MAX = 20_000  # entries looked at to tell the size of what was skipped

IGNORE_FILE = ".gpulayerignore"
UNREADABLE_HINT = (
    f"make it readable, or name it in the {IGNORE_FILE} of the folder that the job starts in"
)
# Never shipped, whatever any rule says.
_NEVER = {
    ".git": "git",
    ".hg": "version control",
    ".svn": "version control",
    "__pycache__": "cache",
    ".mypy_cache": "cache",
    ".ruff_cache": "cache",
    ".pytest_cache": "cache",
    ".hypothesis": "cache",
    ".ipynb_checkpoints": "cache",
    ".tox": "virtual environment",
    ".nox": "virtual environment",
    "node_modules": "packages",
    "gpulayer_jobs": "results of earlier jobs",
    "gpulayer_logs": "results of earlier jobs",
    ".DS_Store": "cache",
}
_CHECKPOINTS = (".ckpt",)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or folder left out; nothing below a skipped folder is listed."""

    path: str  # relative; a folder ends in "/"
    reason: str  # "gitignore", "secret", "virtual environment", ...
    size: int | None = None  # bytes; None: not measured


class _Patterns:
    """The patterns of one ignore file; the last match wins.

    pathspec lets a pattern for a folder match what is inside; git does not, it just never looks
    into an ignored folder. The walk does the same, so only exact matches count here.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        # Last first: (ignores, only folders, its regex, matches exactly or also all content).
        self._rules: list[tuple[bool, bool, re.Pattern[str], bool]] = []
        for line in lines:
            text = line.rstrip(" ")
            if text.endswith("\\") and text != line:
                text += " "  # an escaped space at the end is meant
            dirs_only = text.endswith("/")
            try:
                (pattern,) = GitIgnoreSpec.from_lines([text.removesuffix("/")]).patterns
            except ValueError:
                continue  # git passes over what is no pattern
            if isinstance(pattern, RegexPattern) and pattern.regex and pattern.include is not None:
                # Without this group the pattern ended in "/**": everything below matches.
                exact = "ps_d" in pattern.regex.groupindex
                self._rules.insert(0, (pattern.include, dirs_only, pattern.regex, exact))

    @property
    def brings_back(self) -> bool:
        return any(not ignores for ignores, _, _, _ in self._rules)

    def verdict(self, path: str, is_dir: bool) -> bool | None:
        """True: ignored, False: brought back, None: not mentioned."""
        for ignores, dirs_only, regex, exact in self._rules:
            if is_dir or not dirs_only:
                found = regex.fullmatch(path) if exact else regex.match(path)
                if found is not None:
                    return ignores
        return None


# Shipped only when a `!` rule of a .gpulayerignore names them, and so are checkpoints.
_UNLESS_ASKED = _Patterns(
    [
        ".env",
        ".env.*",
        "!.env.example",
        "!.env.sample",
        "!.env.template",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        ".netrc",
        ".pypirc",
        ".ssh/",
        ".aws/",
    ]
)


class _Rules:
    """The ignore files of one kind along a path; deeper files come before upper ones."""

    def __init__(self, name: str, levels: tuple[tuple[str, _Patterns], ...] = ()) -> None:
        self._name = name
        self._levels = levels  # (prefix with "/", patterns), deepest first

    def enter(self, folder: Path, prefix: str) -> _Rules:
        """Return the rules that hold inside a folder."""
        path = folder / self._name
        try:
            if not path.is_file() or path.stat().st_size > IGNORE_FILE_MAX:
                return self
            lines = path.read_text("utf-8", "surrogateescape").split("\n")
            patterns = _Patterns(line.removesuffix("\r") for line in lines)
        except (OSError, ValueError) as e:
            raise BundleError(f"cannot use {str(path)!r}: {e}", hint=UNREADABLE_HINT) from e
        return _Rules(self._name, ((prefix, patterns), *self._levels))

    @property
    def brings_back(self) -> bool:
        return any(patterns.brings_back for _, patterns in self._levels)

    def verdict(self, path: str, is_dir: bool) -> bool | None:
        """True: ignored, False: brought back, None: not mentioned."""
        for prefix, patterns in self._levels:
            found = patterns.verdict(path.removeprefix(prefix), is_dir)
            if found is not None:
                return found
        return None


class Walk:
    """One pass over the tree; fills `files`, `empty` and `skipped`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        self.empty: list[str] = []
        self.skipped: list[Skipped] = []
        self.warnings: list[str] = []
        self._links: list[tuple[str, Path]] = []  # symlinks to folders inside the tree
        self._git_ignored: set[str] = set()  # relative, folders with "/"
        self._measured = 0

    def run(self) -> None:
        """Look at every file once."""
        git = None if self._ask_git(self.root, "") else _Rules(".gitignore")
        self._folder(self.root, "", git, _Rules(IGNORE_FILE), False)
        self._resolve_links()

    def _folder(
        self, folder: Path, prefix: str, git: _Rules | None, ours: _Rules, ignored: bool
    ) -> None:
        """Walk one folder; `ignored`: git ignores it, only what is brought back counts."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as e:
            raise BundleError(
                f"cannot read {str(folder)!r}: {e.strerror}", hint=UNREADABLE_HINT
            ) from e
        if git is not None:
            git = git.enter(folder, prefix)
        ours = ours.enter(folder, prefix)
        if prefix and git is None and not ignored and any(e.name == ".git" for e in entries):
            self._ask_git(folder, prefix)  # a submodule or nested repository has its own rules
        before = self._found()
        for entry in entries:
            self._entry(entry, prefix + entry.name, git, ours, ignored)
        if prefix and not ignored and self._found() == before:
            # Scripts write into folders they expect to be there, empty or not.
            self.empty.append(nfc(prefix.removesuffix("/")))

    def _found(self) -> int:
        return len(self.files) + len(self.empty) + len(self._links)

    def _entry(
        self,
        entry: os.DirEntry[str],
        path: str,
        git: _Rules | None,
        ours: _Rules,
        ignored: bool,
    ) -> None:
        is_dir = entry.is_dir(follow_symlinks=False)
        shown = f"{path}/" if is_dir else path
        reason = _never(entry, is_dir)
        if reason is not None:
            self._skip(shown, reason)
            return
        asked = ours.verdict(path, is_dir)
        if asked is True:
            self._skip(shown, IGNORE_FILE)
            return
        by_git = git.verdict(path, is_dir) if git is not None else shown in self._git_ignored
        ignored = (ignored or by_git is True) and asked is None
        if asked is None and not ignored:
            reason = _unless_asked(path, is_dir)
            if reason is not None:
                self._skip(shown, reason)
                return
        if is_dir:
            if ignored and not ours.brings_back:
                self._skip(shown, "gitignore", self._measure(entry))
                return
            before = self._found()
            self._folder(Path(entry.path), f"{path}/", git, ours, ignored)
            if ignored and self._found() == before:
                self._skip(shown, "gitignore", self._measure(entry))
            return
        if ignored:
            self._skip(shown, "gitignore")
        elif entry.is_symlink():
            self._link(path, Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            self._add(path, Path(entry.path))
        else:
            self._skip(shown, "not a regular file")

    def _add(self, path: str, source: Path) -> None:
        name = nfc(path)
        if name in self.files:
            raise BundleError(f"two files are called {name!r} once Unicode is normalized")
        self.files[name] = source
        if len(self.files) > FILES_MAX:
            raise BundleError(
                f"more than {FILES_MAX} files below {str(self.root)!r}",
                hint=f"name data folders in {IGNORE_FILE}",
            )

    def _skip(self, shown: str, reason: str, size: int | None = None) -> None:
        self.skipped.append(Skipped(nfc(shown), reason, size))

    def _link(self, path: str, link: Path) -> None:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            self._skip(path, "broken symlink")
            return
        if not target.is_relative_to(self.root):
            raise BundleError(
                f"symlink {path!r} points out of the folder, to {str(target)!r}",
                hint=f"name it in {IGNORE_FILE}, or copy what the job needs",
            )
        if not target.is_dir():
            inside = target.relative_to(self.root).as_posix()
            if any(part in _NEVER for part in inside.split("/")) or _unless_asked(inside, False):
                self._skip(path, "points to a skipped file")
            elif target.is_file():
                self._add(path, target)
            else:
                self._skip(path, "not a regular file")
        elif link.is_relative_to(target):
            raise BundleError(
                f"symlink {path!r} points to a folder that contains it",
                hint=f"name it in {IGNORE_FILE}",
            )
        else:
            self._links.append((path, target))

    def _resolve_links(self) -> None:
        """Give a linked folder the files its target has, links inside of it included."""
        for _ in range(len(self._links) + 1):
            before = len(self.files)
            for path, target in self._links:
                inside = nfc(target.relative_to(self.root).as_posix())
                for name in [n for n in self.files if n.startswith(f"{inside}/")]:
                    self.files.setdefault(nfc(path) + name.removeprefix(inside), self.files[name])
            if len(self.files) == before:
                return
            if len(self.files) > FILES_MAX:
                break
        raise BundleError(
            f"symlinks lead into a circle, or to {FILES_MAX} files: {self._links[0][0]!r}"
        )

    def _ask_git(self, folder: Path, prefix: str) -> bool:
        """Learn from git what it ignores below `folder`; False where git has no say."""
        command = ["git", "-C", str(folder), "ls-files", "-z", "--others", "--ignored"]
        try:
            found = subprocess.run(
                [*command, "--exclude-standard", "--directory"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=GIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if found.returncode != 0:
            return False
        names = [os.fsdecode(name) for name in found.stdout.split(b"\0") if name]
        if "./" in names:
            return False  # the folder itself is ignored by a repository around it
        self._git_ignored.update(prefix + name for name in names)
        return True

    def _measure(self, entry: os.DirEntry[str]) -> int | None:
        """Size of a skipped folder, None when it takes too long to find out."""
        total = 0
        for folder, _, names in os.walk(entry.path):
            self._measured += len(names) + 1
            if self._measured > MEASURE_MAX:
                return None
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except OSError:
                    continue
        return total


def _never(entry: os.DirEntry[str], is_dir: bool) -> str | None:
    reason = _NEVER.get(entry.name)
    if reason is not None:
        return reason
    if (is_dir or entry.is_symlink()) and any(
        os.path.lexists(os.path.join(entry.path, mark)) for mark in ("pyvenv.cfg", "conda-meta")
    ):
        return "virtual environment"
    if is_dir and os.path.lexists(os.path.join(entry.path, "identity.key")):
        return "gpulayer state"
    if not is_dir and entry.name.endswith((".pyc", ".pyo")):
        return "cache"
    return None


def _unless_asked(path: str, is_dir: bool) -> str | None:
    if _UNLESS_ASKED.verdict(path, is_dir) is True:
        return "secret"
    return "checkpoint" if not is_dir and path.endswith(_CHECKPOINTS) else None


def nfc(path: str) -> str:
    return unicodedata.normalize("NFC", path)  # macOS may store file names decomposed

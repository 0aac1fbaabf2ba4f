"""Packing a folder: what goes in, what stays out, what is refused, what a script needs."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from gpulayer_mesh.core.manifest import EntryKind, open_manifest
from gpulayer_mesh.errors import BundleError

from gpulayer import ignore
from gpulayer.bundle import Bundle, human, pack, scan, top_level_imports

MIB = 1024 * 1024
Tree = Callable[[Mapping[str, str | bytes]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    def make(files: Mapping[str, str | bytes]) -> Path:
        root = tmp_path / "my prøject (1)"
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        root.mkdir(exist_ok=True)
        return root

    return make


@pytest.fixture(params=["git", "no git"])
def repo(request: pytest.FixtureRequest, tree: Tree) -> Tree:
    """A tree once inside a git repository, once without."""

    def make(files: Mapping[str, str | bytes]) -> Path:
        root = tree(files)
        if request.param == "git":
            git(root, "init", "-q")
        return root

    return make


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", root, *args], capture_output=True, check=True)
    return os.fsdecode(done.stdout)


def files(bundle: Bundle) -> set[str]:
    return {e.path for e in bundle.manifest.entries if e.kind is EntryKind.FILE}


def folders(bundle: Bundle) -> set[str]:
    return {e.path for e in bundle.manifest.entries if e.kind is EntryKind.DIR}


def test_every_byte_can_be_read_back_by_hash(tree: Tree) -> None:
    big = random.Random(1).randbytes(2 * MIB + 5)
    root = tree(
        {"træin v2.py": "print(1)\n", "data/big.bin": big, "empty.txt": "", "a  b.txt": "x"}
    )
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "results").mkdir()
    bundle = pack(root)
    assert open_manifest(bundle.manifest_bytes, sha256=bundle.sha256) == bundle.manifest
    assert folders(bundle) == {"results"}
    by_path = {e.path: e for e in bundle.manifest.entries}
    assert {p for p, e in by_path.items() if e.executable} == {"run.sh"}
    for path in files(bundle):
        content = b"".join(bundle.read_chunk(chunk) for chunk in by_path[path].chunks)
        assert content == (root / path).read_bytes()
        assert hashlib.sha256(content).digest() == by_path[path].sha256
    assert bundle.total_bytes == sum((root / p).stat().st_size for p in files(bundle))
    assert len(bundle.chunks) == len(set(bundle.chunks)) == 6


def test_same_content_is_packed_once_and_packing_repeats(tree: Tree) -> None:
    root = tree({"a.txt": "same", "b.txt": "same"})
    first = pack(root)
    assert len(first.chunks) == 1
    assert pack(root).sha256 == first.sha256


def test_git_noise_caches_environments_and_results_never_travel(repo: Tree) -> None:
    root = repo(
        {
            "train.py": "",
            "pkg/__pycache__/x.pyc": "",
            "pkg/mod.py": "",
            ".mypy_cache/x": "",
            "my-venv/pyvenv.cfg": "",
            "my-venv/lib/x.py": "",
            "gpulayer_jobs/k7f2/x": "",
            "last.ckpt": "x" * 100,
        }
    )
    bundle = pack(root)
    assert files(bundle) == {"train.py", "pkg/mod.py"}
    assert "my-venv/ (virtual environment)" in bundle.summary()
    assert "last.ckpt (checkpoint)" in bundle.summary()


def test_secrets_stay_unless_asked(repo: Tree) -> None:
    secrets = {
        ".env": "K=1",
        ".env.local": "",
        "server.pem": "",
        "deploy.key": "",
        "id_ed25519": "",
    }
    root = repo({"train.py": "", "id_map.py": "", ".env.example": "", **secrets})
    assert files(pack(root)) == {"train.py", "id_map.py", ".env.example"}
    (root / ".gpulayerignore").write_text("!.env\n!server.pem\n")
    assert files(pack(root)) & secrets.keys() == {".env", "server.pem"}


def test_ignored_folder_is_skipped_and_named_with_its_size(repo: Tree) -> None:
    root = repo({"train.py": "", ".gitignore": "data/\n", "data/x.bin": b"\0" * 3000})
    bundle = pack(root)
    assert files(bundle) == {"train.py", ".gitignore"}
    assert bundle.summary().endswith("skipped: data/ (gitignore) 3.0 kB")


def test_nested_gitignore_and_negation_match_git(repo: Tree) -> None:
    root = repo(
        {
            ".gitignore": "*.log\nlog*\n!logging.py\n/build\n",
            "logging.py": "",
            "a.log": "",
            "sub/.gitignore": "!keep.log\nbuild\n",
            "sub/keep.log": "",
            "sub/build/x": "",
            "sub/deep/build/x": "",
            "build/x": "",
            "src/data/__init__.py": "",
        }
    )
    assert files(pack(root)) == {
        ".gitignore",
        "logging.py",
        "sub/.gitignore",
        "src/data/__init__.py",
    } | ({"sub/keep.log"})


def test_our_ignore_file_adds_and_brings_back(repo: Tree) -> None:
    root = repo(
        {
            ".gitignore": "data/\n*.bin\n",
            ".gpulayerignore": "notes/\n!data/small.csv\n",
            "data/small.csv": "1",
            "data/large.csv": "2",
            "notes/todo.md": "",
            "weights.bin": "",
            "sub/.gpulayerignore": "!*.bin\n",
            "sub/weights.bin": "",
        }
    )
    found = files(pack(root))
    assert {"data/small.csv", "sub/weights.bin"} <= found
    assert not found & {"data/large.csv", "notes/todo.md", "weights.bin"}


def test_tracked_but_ignored_and_uncommitted_files_travel(tree: Tree) -> None:
    root = tree({".gitignore": "*.cfg\n", "tracked.cfg": "1", "other.cfg": "", "new.bin": b"\0\1"})
    git(root, "init", "-q")
    git(root, "add", "-f", "tracked.cfg")
    assert files(pack(root)) == {".gitignore", "tracked.cfg", "new.bin"}


def test_folder_ignored_by_the_repository_around_it_is_packed(tree: Tree) -> None:
    root = tree({".gitignore": "scratch/\n", "scratch/train.py": ""})
    git(root, "init", "-q")
    assert files(pack(root / "scratch")) == {"train.py"}


def test_nested_repository_follows_its_own_rules(tree: Tree) -> None:
    root = tree({"train.py": "", "lib/.gitignore": "out/\n", "lib/a.py": "", "lib/out/x": ""})
    git(root, "init", "-q")
    git(root / "lib", "init", "-q")
    assert files(pack(root)) == {"train.py", "lib/.gitignore", "lib/a.py"}


def test_symlinks_inside_are_resolved(repo: Tree) -> None:
    root = repo({"src/mod.py": "x = 1", "src/.env": "", "train.py": ""})
    (root / "link.py").symlink_to("src/mod.py")
    (root / "code").symlink_to("src")
    (root / "secret").symlink_to("src/.env")
    (root / "dangling").symlink_to("nowhere")
    found = files(pack(root))
    assert found == {"src/mod.py", "train.py", "link.py", "code/mod.py"}


def test_symlink_to_the_outside_is_refused_by_name(repo: Tree, tmp_path: Path) -> None:
    root = repo({"train.py": ""})
    (tmp_path / "elsewhere").mkdir()
    (root / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"symlink 'data' points out of the folder") as caught:
        pack(root)
    assert ".gpulayerignore" in (caught.value.hint or "")
    (root / ".gpulayerignore").write_text("data\n")
    assert "train.py" in files(pack(root))


def test_symlink_circles_are_refused(tree: Tree) -> None:
    root = tree({"a/x": "", "b/y": ""})
    (root / "a" / "up").symlink_to(root)
    with pytest.raises(BundleError, match="contains it"):
        pack(root)
    (root / "a" / "up").unlink()
    (root / "a" / "to_b").symlink_to(root / "b")
    (root / "b" / "to_a").symlink_to(root / "a")
    with pytest.raises(BundleError, match="circle"):
        pack(root)


def test_fifo_is_skipped(tree: Tree) -> None:
    root = tree({"train.py": ""})
    os.mkfifo(root / "pipe")
    bundle = pack(root)
    assert files(bundle) == {"train.py"}
    assert bundle.why_skipped("pipe") == "not a regular file"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a:b.txt", "colon"),
        ("con.py", "Windows"),
        ("tab\there", "control"),
        (b"\xff.txt", "Unicode"),
    ],
)
def test_unsafe_names_are_refused(tree: Tree, name: str | bytes, why: str) -> None:
    root = tree({"train.py": ""})
    (root / os.fsdecode(name)).write_text("")
    with pytest.raises(BundleError, match=why):
        pack(root)


def test_names_that_differ_only_in_case_are_refused(tree: Tree) -> None:
    with pytest.raises(BundleError, match="differ only in case"):
        pack(tree({"Model.py": "", "model.py": ""}))


def test_decomposed_names_are_composed(tree: Tree) -> None:
    root = tree({"cafe\u0301.py": "x"})
    bundle = pack(root)
    assert files(bundle) == {"caf\u00e9.py"}
    assert bundle.read_chunk(bundle.chunks[0]) == b"x"


def test_too_large_lists_the_ten_largest(tree: Tree) -> None:
    root = tree({f"f{i:02}.bin": b"x" * (1000 * (i + 1)) for i in range(12)})
    with pytest.raises(BundleError) as caught:
        pack(root, limit_bytes=50_000)
    lines = caught.value.message.splitlines()
    assert lines[0] == "the folder holds 78 kB, more than 50 kB; largest:"
    assert [line.split()[-1] for line in lines[1:]] == [f"f{i:02}.bin" for i in range(11, 1, -1)]


def test_changed_file_is_noticed_when_read(tree: Tree) -> None:
    root = tree({"a.py": "one"})
    bundle = pack(root)
    (root / "a.py").write_text("two")
    with pytest.raises(BundleError, match="changed after it was packed"):
        bundle.read_chunk(bundle.chunks[0])
    with pytest.raises(BundleError, match="no chunk"):
        bundle.read_chunk(b"\0" * 32)


def test_file_that_changes_while_packing_is_refused(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree({"grows.log": "one"})
    real = hashlib.sha256

    def append(data: bytes = b"") -> object:
        with (root / "grows.log").open("ab") as file:
            file.write(b"more")
        return real(data)

    monkeypatch.setattr("gpulayer.bundle.hashlib.sha256", append)
    with pytest.raises(BundleError, match="changed while it was packed"):
        pack(root)


def test_extra_files_are_added_whatever_the_rules_say(tree: Tree, tmp_path: Path) -> None:
    root = tree({"train.py": "", ".gitignore": "*.bin\n"})
    extra = tmp_path / "w.bin"
    extra.write_bytes(b"weights")
    bundle = pack(root, {".gpulayer/resume.ckpt": extra})
    assert ".gpulayer/resume.ckpt" in files(bundle)
    assert bundle.source(".gpulayer/resume.ckpt") == extra
    with pytest.raises(BundleError, match="already"):
        pack(root, {"train.py": extra})
    with pytest.raises(BundleError, match="not relative"):
        pack(root, {"../x": extra})


def test_missing_root_and_empty_root(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        pack(tmp_path / "no")
    assert pack(tmp_path).manifest.entries == ()


def test_matching_equals_git_on_random_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 pattern trees: git's own listing, ours with git, and ours without git agree."""
    names = ["a", "b", "log", "x.log", "data", "keep.py", "[z]"]
    pieces = ["a", "b", "*", "**", "lo?", "*.log", "data", "[ab]", "[!a]", "keep.py", "\\[z\\]"]
    rng = random.Random(7)

    def pattern() -> str:
        body = "/".join(rng.choice(pieces) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        before = rng.choice(["", "", "", "!"]) + rng.choice(["", "", "/"])
        return before + body + rng.choice(["", "", "/"]) + rng.choice(["", "", "", "  "])

    for number in range(300):
        root = tmp_path / f"tree{number}"
        for _ in range(12):
            path = root.joinpath(*(rng.choice(names) for _ in range(rng.randint(1, 4))))
            if not any(parent.is_file() for parent in path.parents) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("")
        for folder in [root, *(p for p in sorted(root.rglob("*")) if p.is_dir())]:
            if folder == root or rng.random() < 0.3:
                lines = [pattern() for _ in range(rng.randint(1, 4))]
                (folder / ".gitignore").write_text("\n".join(lines))
    git(tmp_path, "init", "-q")
    listed = git(tmp_path, "ls-files", "-co", "--exclude-standard", "-z")
    expected = set(listed.split("\0")) - {""}
    assert len(expected) > 1000
    assert files(pack(tmp_path)) == expected
    monkeypatch.setattr(ignore.Walk, "_ask_git", lambda *_: False)
    assert files(pack(tmp_path)) == expected


def test_imports_follow_local_modules_and_leave_out_the_optional(tree: Tree) -> None:
    root = tree(
        {
            "train.py": """
import os, numpy as np
import torch.nn as nn
from pkg.model import Net
from helpers import *
import namespace.part
try:
    import wandb
except ImportError:
    wandb = None
try:
    import yaml
finally:
    pass
if TYPE_CHECKING:
    import pandas
if os.name == "nt":
    import winreg2
def main():
    import matplotlib
if __name__ == "__main__":
    import typer
    main()
""",
            "pkg/__init__.py": "from . import registry\nfrom .sub.deep import thing\n",
            "pkg/model.py": "import torchvision\nfrom ..outside import x\n",
            "pkg/registry.py": "import attrs\n",
            "pkg/sub/__init__.py": "",
            "pkg/sub/deep.py": "import einops\nfrom .. import model\n",
            "pkg/unused.py": "import never\n",
            "helpers.py": "import sklearn.svm\n",
            "namespace/part.py": "import scipy\n",
            "datasets/readme.txt": "",
        }
    )
    wanted = "attrs einops numpy scipy sklearn torch torchvision typer yaml"
    assert top_level_imports(pack(root), ["-u", "train.py", "--x"]) == tuple(wanted.split())


def test_a_folder_without_modules_does_not_hide_a_package(tree: Tree) -> None:
    root = tree({"train.py": "import datasets\n", "datasets/readme.txt": ""})
    assert top_level_imports(pack(root), ["train.py"]) == ("datasets",)


def test_module_and_code_forms(tree: Tree) -> None:
    root = tree(
        {
            "src/pkg/train.py": "from . import util\nimport torch\n",
            "src/pkg/util.py": "import numpy\n",
            "src/app/__main__.py": "import rich\n",
        }
    )
    bundle = pack(root)
    assert top_level_imports(bundle, ["-m", "pkg.train"], "src") == ("numpy", "torch")
    assert top_level_imports(bundle, ["-mapp"], "src") == ("rich",)
    assert top_level_imports(bundle, ["-W", "error", "-m", "pytest", "-q"]) == ("pytest",)
    assert top_level_imports(bundle, ["-c", "import pkg.util, jax"], "src") == ("jax", "numpy")
    assert top_level_imports(bundle, ["src/pkg/util.py"]) == ("numpy",)
    assert top_level_imports(bundle, ["/opt/tool.py"]) == ()


def test_importing_a_skipped_module_is_an_error(repo: Tree) -> None:
    root = repo(
        {
            "train.py": "import src.x.data.load\n",
            ".gitignore": "data/*\n",
            "src/x/data/load.py": "",
            "src/x/__init__.py": "",
        }
    )
    assert top_level_imports(pack(root), ["train.py"]) == ()  # "data/*" is anchored: as in git
    (root / ".gitignore").write_text("data/\n")
    with pytest.raises(BundleError, match=r"src/x/data/load.py is skipped \(gitignore\)"):
        top_level_imports(pack(root), ["train.py"])


def test_skipped_or_missing_script_is_an_error(repo: Tree) -> None:
    root = repo({".gitignore": "train.py\n", "train.py": ""})
    with pytest.raises(BundleError, match=r"'train.py' is skipped \(gitignore\)"):
        top_level_imports(pack(root), ["train.py"])
    with pytest.raises(BundleError, match="not in the folder"):
        top_level_imports(pack(root), ["tren.py"])


def test_naming_a_skipped_file_is_told(repo: Tree) -> None:
    root = repo(
        {".gitignore": "data/\n", "data/x.csv": "", "train.py": "open('data/x.csv')\nopen('no')\n"}
    )
    notes = scan(pack(root), ["train.py"]).notes
    assert notes == ("train.py names 'data/x.csv', which stays here (gitignore)",)


def test_script_with_a_syntax_error_is_left_to_the_interpreter(tree: Tree) -> None:
    assert top_level_imports(pack(tree({"train.py": "def ("})), ["train.py"]) == ()


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (3100, "3.1 kB"), (18 * 10**9, "18 GB")]
)
def test_human_sizes(size: int, text: str) -> None:
    assert human(size) == text


def test_unreadable_folder_is_named_with_what_to_do(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree({"train.py": "", "private/x": ""})
    scandir = os.scandir

    def refuse(folder: Path) -> object:
        if Path(folder).name == "private":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BundleError, match=r"cannot read .*private': Permission") as caught:
        pack(root)
    assert ".gpulayerignore" in (caught.value.hint or "")
    (root / ".gpulayerignore").write_text("private/\n")
    assert pack(root).files == 2


def test_script_that_is_not_there_names_the_folder_that_was_searched(tree: Tree) -> None:
    root = tree({"train.py": ""})
    with pytest.raises(BundleError, match=r"script 'nope\.py' is not in the folder") as caught:
        scan(pack(root), ["nope.py"])
    assert repr(str(root)) in (caught.value.hint or "")

"""Who may import what, and which constructs nobody may use, read from the source itself.

ruff keeps the clock, the network and files out of `core/` by name; here it is an allow-list, and
the rest of the import table of docs/architecture.md. Imports inside functions count as well.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"gpulayer": ROOT / "gpulayer", "gpulayer_mesh": ROOT / "mesh" / "gpulayer_mesh"}
MODULES = {
    ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): (path)
    for package, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}

# What gives the same answer every time and touches nothing outside the process.
PURE = {"__future__", "base64", "binascii", "bisect", "collections", "dataclasses", "datetime"}
PURE |= {"enum", "fnmatch", "functools", "hashlib", "heapq", "hmac", "ipaddress", "itertools"}
PURE |= {"math", "operator", "re", "statistics", "string", "struct", "types", "typing"}
PURE |= {"unicodedata", "cryptography", "msgpack", "msgspec"}
READS_CLOCK = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
# These put the others together and may import those after them; all other modules of runtime/
# stand alone.
WIRING = ["agent", "startup", "jobdoor", "servicedoor", "restarts", "ground", "hosting"]
WIRING += ["partwatch", "agreements", "succession", "copies", "restoring", "staging", "gossip"]
WIRING += ["links", "peers"]
ENVIRONMENT_READERS = {"gpulayer.env", "gpulayer_mesh.config"}
# Runs in a rank's own process, and takes away there what brought it.
ENVIRONMENT_READERS |= {"gpulayer_mesh.rank_hook.sitecustomize"}
# Asks torch in a process of its own what it can really do.
TORCH_IN_MESH = {"gpulayer_mesh.runtime.torch_probe"}
SITE = {"sitecustomize"}  # the environment's own, where it has one
# They run code found in data, or unpack what a stranger packed.
NEVER_IMPORTED = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NEVER_IMPORTED |= {"tarfile", "zipfile", "torch.distributed.rpc"}
NEVER_CALLED = {"eval", "exec", "os.system", "os.popen"}
# torch pickles whatever passes through these.
NEVER_CALLED |= {"all_gather_object", "broadcast_object_list", "gather_object"}
NEVER_CALLED |= {"scatter_object_list", "send_object_list", "recv_object_list"}


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Yield each imported module (or name in a module) of ours or others', with its line."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in MODULES else base), node.lineno


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(modules: str, allowed: object) -> list[str]:
    """Return 'file:line imports x' for the imports of matching modules that are not allowed."""
    assert callable(allowed)
    return [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {module}"
        for name in MODULES
        if re.fullmatch(modules, name)
        for module, line in imports(name)
        if not allowed(name, module)
    ]


def test_core_is_pure() -> None:
    def allowed(name: str, module: str) -> bool:
        if module == "random":  # the type of the generator that is passed in
            return name == "gpulayer_mesh.core.types"
        return module.split(".")[0] in PURE or within(
            module, "gpulayer_mesh.core", "gpulayer_mesh.errors"
        )

    assert offences(r"gpulayer_mesh\.core(\..*)?", allowed) == []


def test_runtime_modules_do_not_know_each_other() -> None:
    ours = ("gpulayer_mesh.core", "gpulayer_mesh.errors", "gpulayer_mesh.config")
    ours += ("gpulayer_mesh.clock", "gpulayer_mesh.files", "gpulayer_mesh.sockets")
    ours += ("gpulayer_mesh.shim", "gpulayer_mesh.groups")
    runtime = "gpulayer_mesh.runtime."

    def allowed(name: str, module: str) -> bool:
        if not within(module, "gpulayer_mesh") or module == "gpulayer_mesh":
            return True
        wiring = name.removeprefix(runtime)
        if not module.startswith(runtime) or wiring not in WIRING:
            starts = wiring in WIRING and module == "gpulayer_mesh.starting"
            return starts or within(module, *ours)
        return module.removeprefix(runtime) not in WIRING[: WIRING.index(wiring) + 1]

    assert offences(r"gpulayer_mesh\.runtime\..*", allowed) == []


def test_starting_reaches_nodes_through_its_caller_only() -> None:
    ours = ("gpulayer_mesh.core", "gpulayer_mesh.errors", "gpulayer_mesh.groups")

    def allowed(name: str, module: str) -> bool:
        return not within(module, "gpulayer_mesh") or within(module, *ours)

    assert offences(r"gpulayer_mesh\.starting", allowed) == []


def test_what_runs_in_ranks_and_beside_them_is_standard_library_only() -> None:
    def allowed(name: str, module: str) -> bool:
        return module.split(".")[0] in sys.stdlib_module_names | SITE

    assert offences(r"gpulayer_mesh\.(shim|files|rank_hook\..*)", allowed) == []


def test_mesh_knows_neither_gpulayer_nor_torch() -> None:
    def allowed(name: str, module: str) -> bool:
        return not within(module, "gpulayer") and (
            not within(module, "torch") or name in TORCH_IN_MESH
        )

    assert offences(r"gpulayer_mesh\b.*", allowed) == []


def test_torch_is_imported_in_pytorch_only() -> None:
    def allowed(name: str, module: str) -> bool:
        # `values` makes a tensor where one was sent, and is imported by no command.
        sent = name == "gpulayer.values" and module == "torch"
        return sent or not within(module, "torch", "gpulayer.pytorch")

    assert offences(r"gpulayer(?!\.pytorch)(\..*)?", allowed) == []


def test_pytorch_reaches_the_mesh_through_the_launcher() -> None:
    def allowed(name: str, module: str) -> bool:
        mesh = within(module, "gpulayer_mesh.client", "gpulayer_mesh.runtime", "aiohttp")
        return not mesh and not within(module, "gpulayer.cli")

    assert offences(r"gpulayer\.pytorch(\..*)?", allowed) == []


def test_nothing_imports_the_command_line() -> None:
    allowed = lambda _, module: not within(module, "gpulayer.cli")  # noqa: E731
    assert offences(r"gpulayer(?!\.cli)(?!\.__main__)(\..*)?", allowed) == []


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    provided = {"pynvml": "nvidia-ml-py"}

    def allowed(name: str, module: str) -> bool:
        top = module.split(".")[0]
        known = top in sys.stdlib_module_names | SITE or top in PACKAGES
        return known or provided.get(top, top).lower() in declared

    assert offences(r".*", allowed) == []


def test_what_runs_code_from_data_is_not_imported() -> None:
    allowed = lambda _, module: not within(module, *NEVER_IMPORTED)  # noqa: E731
    assert offences(r".*", allowed) == []


@pytest.mark.parametrize("name", MODULES)
def test_no_dangerous_call(name: str) -> None:
    found = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call):
            function = dotted(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            # model.eval() is another thing.
            if function in NEVER_CALLED or function.split(".")[-1] in NEVER_CALLED - {"eval"}:
                found.append((node.lineno, function))
            if function in READS_CLOCK and within(name, "gpulayer_mesh.core"):
                found.append((node.lineno, function))
            if keywords.get("shell", "False") != "False":
                found.append((node.lineno, "shell=True"))
            if function == "torch.load" and keywords.get("weights_only") != "True":
                found.append((node.lineno, "torch.load without weights_only=True"))
    assert found == []


@pytest.mark.parametrize("name", sorted(set(MODULES) - ENVIRONMENT_READERS))
def test_environment_is_read_in_one_place(name: str) -> None:
    used = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    found = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(TREES[name])
        if (isinstance(node, ast.Attribute) and dotted(node) in used)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {f"os.{alias.name}" for alias in node.names} & used
        )
    ]
    assert found == []

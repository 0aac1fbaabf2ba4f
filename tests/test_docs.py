"""What README and docs say is run or compared with the code: commands, scripts, links, tables.

Every command in them is run here, or named below with the test that runs it; no third kind exists.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from ast import Constant, parse, walk
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpulayer_mesh.config import DEFAULT_PORT, agent_config
from gpulayer_mesh.core.diagnosis import Named
from gpulayer_mesh.errors import ExitCode

from gpulayer import cli
from gpulayer.localmesh import LocalMesh

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NODES = 2  # of the mesh below; what the pages ask for is cut down to it
DEADLINE_S = 180.0  # three imports of torch on a busy machine with two cores

# Run here, on that mesh.
RUN = ["gpulayer mesh status", "gpulayer run --nodes 3 -- hostname"]
# Run by another file: the test's name, or a script's line.
LAN_TEST = "tests/e2e/test_three_machines.py"
ELSEWHERE = {
    "scripts/quickstart": (".ci/run", "scripts/quickstart"),
    "scripts/test": (".ci/run", "scripts/test"),
    "scripts/test tests/core -k roster": (".ci/run", "scripts/test"),
    "sudo scripts/lan --hosts 4": ("tests/lan.py", "scripts/lan"),  # what it builds, e2e runs on
    "gpulayer mesh local --nodes 3 -- python docs/examples/digits.py": (
        "scripts/quickstart",
        "gpulayer mesh local --nodes 3 -- python docs/examples/digits.py",
    ),
    "gpulayer mesh create": ("tests/e2e/meshes.py", '"mesh", "create"'),
    "gpulayer mesh invite --uses 3": ("tests/e2e/meshes.py", '"mesh", "invite", "--uses"'),
    "gpulayer-agent --join gpl1-...": ("tests/e2e/meshes.py", '"--join", line'),
    "gpulayer doctor": ("tests/e2e/test_doctor.py", '"doctor", "--json"'),
    "python train.py": (LAN_TEST, "def test_trainer_on_three_machines_equals_one_process"),
}
# Complete scripts of the pages: the only line that the launching process prints, or the file that
# comes home.
PRINTED = {
    "train.py": r"y = \d\.\d\d x \+ \d\.\d\d",
    "trained.py": r"32 steps, val_loss \d\.\d{4}",
    "squares.py": r"sum of squares: 30",
}
BROUGHT = {"launched.py": "total.txt", "looped.py": "model.pt", "survives.py": "state.pt"}

PROMPT = re.compile(r"(?:[a-z]+(?:-\d)?)?\$ +(.+)")
PROGRAMS = re.compile(r"(?:gpulayer|gpulayer-agent|python3?|pip|sudo|scripts/\w+|\./\S+)(?: .*|)")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def commands(self) -> Iterator[str]:
        """Yield the command lines; in a block without a language, those that look like one."""
        for row in self.text.splitlines():
            if self.language == "sh":
                found = row if row.strip() and not row.startswith("#") else None
            elif self.language == "console":
                found = match[1] if (match := PROMPT.fullmatch(row)) else None
            else:
                found = row if PROGRAMS.fullmatch(row) else None
            if found is not None:
                yield re.sub(r"\s{2,}#.*", "", found).strip()


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def section(page: str, heading: str) -> str:
    """Return what stands below a second-level heading."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)",
        (ROOT / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None, f"{page} has no section {heading!r}"
    return found[1]


def first_column(text: str) -> list[list[str]]:
    """Return the code spans in the first cell of each table row."""
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return [found for row in rows if (found := re.findall(r"`([^`]+)`", row))]


BLOCKS = blocks()
SCRIPT_BLOCKS = {
    match[1]: block
    for block in BLOCKS
    if not block.page.endswith("from-lightning.md")  # tests/pytorch/test_from_lightning.py
    and block.language == "python"
    and (match := re.match(r"# (\S+\.py)\n", block.text))
}


# --- commands ------------------------------------------------------------------------------------


def test_every_command_of_the_pages_is_run_here_or_in_a_named_test() -> None:
    commands = {command for block in BLOCKS for command in block.commands()}
    assert commands - set(RUN) - set(ELSEWHERE) == set()
    assert (set(RUN) | set(ELSEWHERE)) - commands == set(), "no page has these any more"
    for file, text in ELSEWHERE.values():
        assert text in (ROOT / file).read_text(), f"{file} does not run {text!r}"


def test_every_block_has_a_language_whose_commands_are_found() -> None:
    assert {block.language for block in BLOCKS} <= {"", "sh", "console", "python"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist_with_their_options(page: Path) -> None:
    text = spans(prose(page)) + [
        command for block in BLOCKS if ROOT / block.page == page for command in block.commands()
    ]
    for span in text:
        words = span.split(" -- ")[0].split()
        if words[0] == "gpulayer-agent":
            unknown = {word for word in words if word.startswith("--")} - agent_options()
        elif words[0] == "gpulayer" and len(words) > 1:
            unknown = unknown_words(cli._parser(), words[1:])
        else:
            continue
        assert unknown == set(), f"{span!r}"


def unknown_words(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """Return the options and subcommands among `words` that do not exist."""
    for number, word in enumerate(words):
        choices = subcommands(parser)
        if word.startswith("-"):
            if word not in options(parser):
                return {word}
        elif word.isupper() or word == "...":
            return set()  # a placeholder for any command
        elif choices:
            if word not in choices:
                return {word}
            return unknown_words(choices[word], words[number + 1 :])
    return set()


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def leaves(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each command with its options and the metavars of its positional arguments."""
    choices = subcommands(parser)
    for name, one in choices.items():
        yield from leaves(one, f"{path} {name}")
    if not choices:
        given = {a.metavar for a in parser._actions if not a.option_strings}
        yield path, options(parser) - {"-h", "--help"}, {str(metavar) for metavar in given}


def agent_options() -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(sys.stdout, "write", said.append)
        with pytest.raises(SystemExit):
            agent_config(["--help"], {})
    return set(re.findall(r"--[a-z-]+", "".join(said))) - {"--help"}


def test_reference_has_every_command_option_and_argument() -> None:
    commands = list(leaves(cli._parser(), "gpulayer"))
    commands.append(("gpulayer-agent", agent_options(), set()))
    for command, known, arguments in commands:
        text = section("docs/cli.md", command)
        written = {word for span in spans(text) for word in re.findall(r"--?[a-z][a-z-]*", span)}
        # `--join` and the like may be mentioned in the section of another command
        assert known <= written, command
        shown = {word for span in spans(text) for word in span.split()}
        assert arguments <= shown, command
    titles = re.findall(r"^## (gpulayer.*)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert set(titles) == {command for command, _, _ in commands}
    assert options(cli._parser()) - {"-h", "--help"} <= set(
        spans((ROOT / "docs/cli.md").read_text())
    )


def test_reference_has_every_exit_code() -> None:
    codes = re.findall(r"^\| (\d+) \|", section("docs/cli.md", "Exit codes"), re.MULTILINE)
    assert [int(code) for code in codes] == sorted(ExitCode)


def test_port_is_the_one_that_agents_use() -> None:
    for page, heading in (("docs/cli.md", "gpulayer-agent"), ("docs/lan.md", "Ports")):
        assert f"{DEFAULT_PORT}" in section(page, heading)


def constants() -> set[str]:
    """Return every string in the sources, joined as the parser joins them."""
    sources = [*(ROOT / "gpulayer").rglob("*.py"), *(ROOT / "mesh").rglob("*.py")]
    return {
        node.value
        for source in sources
        for node in walk(parse(source.read_text()))
        if isinstance(node, Constant) and isinstance(node.value, str)
    }


def test_reference_has_every_environment_variable() -> None:
    ours = {name for text in constants() for name in re.findall(r"GPULAYER_[A-Z]+", text)}
    page = (ROOT / "docs/cli.md").read_text()
    assert {name for name in ours if f"`{name}`" not in page} == set()


def test_sentences_that_help_is_offered_for_are_said_by_the_code() -> None:
    said = constants()
    others = {"FileNotFoundError"}  # Python's
    for row in first_column(section("docs/lan.md", "When it does not work")):
        for sentence in set(row) - others:
            assert any(sentence in text for text in said), sentence


def test_every_verdict_of_the_doctor_has_its_symptom_and_its_fix() -> None:
    rows = re.findall(
        r"^\| (.*?) \| `(.*?)` \| (.+) \|$", section("docs/doctor.md", "By symptom"), re.M
    )
    assert sorted(name for _, name, _ in rows) == sorted(Named)


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "python"],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_python_block_compiles(block: Block) -> None:
    compile(block.text, f"{block.page}:{block.line}", "exec")


def test_reference_has_every_argument() -> None:
    from gpulayer import submit
    from gpulayer.pytorch import Runtime, Trainer, launch

    for page, heading, described in (
        ("pytorch/launch", "launch", launch),
        ("pytorch/launch", "Runtime", Runtime),
        ("pytorch/trainer", "Trainer", Trainer),
        ("functions", "submit", submit),
    ):
        parameters = [
            name
            for name, parameter in inspect.signature(described).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        tables = section(f"docs/{page}.md", heading).split("| argument | meaning |")
        assert len(tables) == 2, heading
        rows = first_column(tables[1].split("\n\n")[0])
        assert [row[0] for row in rows] == parameters, heading


@pytest.mark.parametrize(
    "name", ["EarlyStopping", "Timer", "LearningRateMonitor", "ModelCheckpoint", "StepMonitor"]
)
def test_reference_has_every_argument_of_a_callback(name: str) -> None:
    import gpulayer.pytorch

    page = section("docs/pytorch/trainer.md", "Trainer")
    tables = page.split(f"| argument of `{name}` | meaning |")
    rows = first_column(tables[1].split("\n\n")[0])
    described = inspect.signature(getattr(gpulayer.pytorch, name)).parameters
    taken = [k for k, one in described.items() if one.kind is not one.VAR_KEYWORD]
    assert [row[0] for row in rows] == taken


def test_reference_has_every_name_of_a_job() -> None:
    from gpulayer import Job

    rows = first_column(section("docs/functions.md", "Job").split("| name | what it is |")[1])
    written = {re.split(r"\W", row[0])[0] for row in rows}
    assert written == {"id"} | {name for name in dir(Job) if not name.startswith("_")}


def test_reference_has_every_name_of_runtime() -> None:
    from gpulayer.pytorch import Runtime

    runtime = Runtime("cpu")
    table = section("docs/pytorch/launch.md", "Runtime").split("| name | what it is |")[1]
    written = {
        re.split(r"\W", name)[0] for row in first_column(table.split("\n\n")[0]) for name in row
    }
    assert written == {name for name in dir(runtime) if not name.startswith("_")}


# --- links and tree ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = page if not path else page.parent / path
            assert linked.exists(), target
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in slugs, target


def test_tree_of_the_readme_is_the_tree() -> None:
    (tree,) = re.findall(r"```\n(.*?)```", section("README.md", "What is where"), re.DOTALL)
    named = set()
    folder = ""
    for row in tree.splitlines():
        names, _ = re.split(r"\s{2,}", row.strip(), maxsplit=1)
        if not row.startswith(" "):
            folder = names
        for name in names.split():
            path = folder if name == folder else f"{folder}{name}"
            assert (ROOT / path).exists(), path
            named.add(path.rstrip("/"))
    packages = {
        str(init.parent.relative_to(ROOT))
        for top in ("gpulayer", "mesh")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert packages <= named
    assert {"tests", "benchmarks", "docs", "docs/examples", "scripts"} <= named


# --- what is run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAYER_HOME", str(tmp_path_factory.mktemp("user")))
        local = LocalMesh(tmp_path_factory.mktemp("mesh"), NODES)
        try:
            asyncio.run(local.start())
            yield local
        finally:
            local.stop()


def run(mesh: LocalMesh, folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"GPULAYER_HOME": str(mesh.home), "PATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def cut_down(text: str) -> str:
    return re.sub(r"(?<=nodes[= ])\d+", str(NODES), text)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", RUN)
def test_command_runs(mesh: LocalMesh, tmp_path: Path, command: str) -> None:
    run(mesh, tmp_path, shlex.split(cut_down(command)))


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(SCRIPT_BLOCKS))
def test_complete_script_runs(mesh: LocalMesh, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(cut_down(SCRIPT_BLOCKS[name].text))
    done = run(mesh, tmp_path, ["python", name])
    assert "Warning" not in done.stderr
    if name in BROUGHT:
        (home,) = (tmp_path / "gpulayer_jobs").iterdir()
        assert (home / BROUGHT[name]).stat().st_size > 0
    else:
        (ours,) = [row for row in done.stdout.splitlines() if not row.startswith("[")]
        assert re.fullmatch(PRINTED[name], ours), ours


def test_every_complete_script_has_an_expectation() -> None:
    assert set(SCRIPT_BLOCKS) == set(PRINTED) | set(BROUGHT)

"""Where a call runs, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpulayer_mesh.core.jobspec import (
    DISCONNECT_MIN_S,
    RESTARTS_MAX,
    WAIT_MAX_S,
    JobKind,
)
from gpulayer_mesh.core.types import Accelerator
from gpulayer_mesh.errors import ConfigError, NoMeshError
from one_weight import OneWeight, Validated, loader, trainer

from gpulayer import cli, launcher
from gpulayer.launcher import JobOutcome
from gpulayer.pytorch import Trainer, arguments, is_launcher_process, launch, launching
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.launching import Choice, Where, choose
from gpulayer.pytorch.precision import canonical
from gpulayer.pytorch.runtime import Runtime


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, gpulayer.pytorch as p; assert 'torch' not in sys.modules; "
        "assert p.is_launcher_process(); assert 'torch' not in sys.modules; "
        "p.Module; assert 'torch' in sys.modules; "
        "from gpulayer.pytorch import launch; assert callable(launch)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_trainer_does_not_import_what_only_jobs_need() -> None:
    code = (
        "import sys; from gpulayer.pytorch import Trainer; Trainer(max_epochs=1); "
        "found = {name.split('.')[0] for name in sys.modules}; "
        "assert not {'msgspec', 'msgpack', 'aiohttp', 'platformdirs'} & found, found; "
        "core = {name for name in sys.modules if name.startswith('gpulayer_mesh.core.')}; "
        "assert core <= {'gpulayer_mesh.core.ownfiles'}, core"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("hidden", [False, True])
def test_importing_the_trainer_does_not_import_what_torch_does_without(hidden: bool) -> None:
    # Torch may import numpy itself; None: it finds none, and works without.
    code = (
        "import sys; "
        + ("sys.modules['numpy'] = None; " if hidden else "")
        + "import torch.utils.data; before = set(sys.modules); "
        "from gpulayer.pytorch import ModelCheckpoint, Trainer; Trainer(max_epochs=1); "
        "found = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "assert 'numpy' not in found"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_random_states_hold_numpys_once_it_is_there() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; "
        "import torch; from gpulayer.pytorch import seeding; cpu = torch.device('cpu'); "
        "bare = seeding.states(cpu); assert 'numpy' not in bare; del sys.modules['numpy']; "
        "seeding.seed_everything(1); import numpy as np; held = seeding.states(cpu); "
        "drawn = np.random.rand(); seeding.restore(bare, cpu); assert np.random.rand() != drawn; "
        "seeding.restore(held, cpu); assert np.random.rand() == drawn"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


# -- the decision --------------------------------------------------------------------------------


class Machine:
    """Stands for a machine's accelerators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "arguments", "expected"),
    [
        (0, (1, "auto", "auto", "auto"), Choice(Where.HERE, 1, "cpu")),
        (0, (1, 2, "cpu", "auto"), Choice(Where.LOCAL, 2, "cpu")),
        (0, (1, 1, "cuda", "auto"), Choice(Where.PEERS)),
        (0, (1, 1, "gpu", "auto"), Choice(Where.PEERS)),
        (0, (3, 1, "cpu", "auto"), Choice(Where.PEERS)),
        (0, (1, 1, "cpu", "mesh"), Choice(Where.PEERS)),
        (0, (1, 1, "cpu", ("box-1", "box-2")), Choice(Where.PEERS)),
        (1, (1, "auto", "auto", "auto"), Choice(Where.HERE, 1, "cuda")),
        (4, (1, "auto", "auto", "auto"), Choice(Where.LOCAL, 4, "cuda")),
        (4, (1, 8, "cuda", "auto"), Choice(Where.PEERS)),
        (4, (1, 2, "gpu", "local"), Choice(Where.LOCAL, 2, "cuda")),
    ],
)
def test_where_a_call_runs(
    cuda: int, arguments: Any, expected: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, cuda)
    assert choose(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, "cuda", "local"), "no cuda"),
        ((2, 1, "cpu", "local"), "this machine alone"),
        ((1, 1, "tpu", "auto"), "unknown accelerator"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(
    arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    with pytest.raises(ArgumentError, match=message):
        choose(*arguments)


@pytest.mark.parametrize(
    "arguments", [(2, 1, "mps", "auto"), (1, 2, "mps", "mesh"), (1, 2, "auto", "auto")]
)
def test_mps_in_several_processes_is_refused_in_one_sentence(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, mps=True)
    with pytest.raises(ArgumentError, match=r"^mps trains in one process only") as caught:
        choose(*arguments)
    assert "\n" not in str(caught.value)


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, "32-true"), (32, "32-true"), ("32", "32-true"), ("bf16-mixed", "bf16-mixed")],
)
def test_names_of_precision(given: Any, meant: str) -> None:
    assert canonical(given) == meant


@pytest.mark.parametrize(("given", "meant"), [(16, "16-mixed"), ("bf16", "bf16-mixed")])
def test_short_names_of_precision_warn(given: Any, meant: str) -> None:
    with pytest.warns(UserWarning, match=meant):
        assert canonical(given) == meant


@pytest.mark.parametrize("given", [8, "64-true", 64, "16-true", "bf16-true", "half"])
def test_other_precisions_are_refused_by_name(given: Any) -> None:
    with pytest.raises(ArgumentError, match=str(given)):
        Trainer(precision=given)


@pytest.mark.parametrize(
    ("accelerator", "precision"), [("cpu", "16-mixed"), ("mps", "16-mixed"), ("mps", "bf16-mixed")]
)
def test_precision_that_a_device_lacks_is_an_error_at_once(
    accelerator: str, precision: str
) -> None:
    with pytest.raises(ArgumentError, match=f"{precision}' is not supported on {accelerator}"):
        Trainer(accelerator=accelerator, precision=precision)
    with pytest.raises(ArgumentError, match="not supported on cpu"):
        Runtime("cpu", "16-mixed")


def test_automatic_accelerator_is_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    with pytest.raises(ArgumentError, match="not supported on cpu"):
        trainer(accelerator="auto", precision="16-mixed").fit(OneWeight(), loader(1))


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_epochs", -2),
        ("max_steps", -2),
        ("num_nodes", 0),
        ("devices", 0),
        ("devices", [0, 1]),
        ("limit_train_batches", 1.5),
        ("limit_val_batches", -1),
        ("val_check_interval", 1.5),
        ("val_check_interval", 0),
        ("check_val_every_n_epoch", 0),
        ("num_sanity_val_steps", -2),
        ("accumulate_grad_batches", 0),
        ("gradient_clip_algorithm", "l1"),
        ("strategy", "deepspeed"),
    ],
)
def test_impossible_values_are_refused_at_construction(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Trainer(**{name: value})


def test_float_interval_contradicts_counting_across_epochs() -> None:
    with pytest.raises(ArgumentError, match="fraction"):
        Trainer(val_check_interval=1.0, check_val_every_n_epoch=None)
    Trainer(check_val_every_n_epoch=None)


def test_arguments_that_do_not_exist_are_refused_by_name_with_a_hint() -> None:
    with pytest.raises(TypeError, match=r"'overfit_batches' \(use limit_train_batches\)"):
        Trainer(overfit_batches=1)
    with pytest.raises(TypeError, match="'colour'"):
        Trainer(colour="red")


def test_several_training_loaders_are_refused() -> None:
    with pytest.raises(ArgumentError, match="list"):
        trainer().fit(OneWeight(), [loader(1), loader(1)])


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(ArgumentError, match="int, which yields no batches"):
        trainer().fit(OneWeight(), 5)
    with pytest.raises(ArgumentError, match="int, which yields no batches"):
        trainer().validate(Validated(), [loader(1), 5])


@pytest.mark.parametrize("target", [7, [1], None])
def test_impossible_target_is_refused(target: Any) -> None:
    with pytest.raises(ArgumentError, match="target is a name or a list of names"):
        Trainer(target=target)


def test_names_of_the_other_api_are_explained() -> None:
    with pytest.raises(TypeError, match=r"'nodes' \(machines are num_nodes here\)"):
        Trainer(nodes=3)
    with pytest.raises(TypeError, match=r"'num_nodes' \(machines are nodes here\)"):
        launch(num_nodes=3)
    with pytest.raises(ConfigError, match="unknown accelerator 'tpu'"):
        launcher.accelerator_of("tpu")


def test_several_validation_loaders_need_an_index() -> None:
    with pytest.raises(ArgumentError, match="dataloader_idx"):
        trainer().fit(Validated(), loader(1), [loader(1), loader(1)])


# -- launch --------------------------------------------------------------------------------------


class Launched(Exception):
    """Carries the request out of a launcher that is not to run."""


def recorded(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []

    def request(**fields: Any) -> dict[str, Any]:
        return fields

    def run_job(fields: dict[str, Any]) -> JobOutcome:
        calls.append(("mesh", fields))
        return JobOutcome("j", code, Path("out"))

    def run_local(fields: dict[str, Any], *, processes: int) -> JobOutcome:
        calls.append((f"local x{processes}", fields))
        return JobOutcome("j", code, Path("out"))

    monkeypatch.setattr(launcher, "script_request", request)
    monkeypatch.setattr(launcher, "run_job", run_job)
    monkeypatch.setattr(launcher, "run_local", run_local)
    return calls


@pytest.mark.parametrize(
    ("arguments", "where", "kind"),
    [
        ({"nodes": 3}, "mesh", JobKind.DISTRIBUTED),
        ({}, "mesh", JobKind.DISTRIBUTED),
        ({"devices": 1}, "mesh", JobKind.COMMAND),
        ({"devices": 2, "accelerator": "cpu"}, "local x2", JobKind.DISTRIBUTED),
        ({"target": "local"}, "local x1", JobKind.COMMAND),
        ({"accelerator": "cpu"}, "local x1", JobKind.COMMAND),
        ({"target": "box-1", "accelerator": "cpu"}, "mesh", JobKind.DISTRIBUTED),
    ],
)
def test_launch_submits_and_exits_with_the_code_of_the_job(
    arguments: dict[str, Any], where: str, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    calls = recorded(monkeypatch, code=7)
    with pytest.raises(SystemExit) as caught:
        launch(**arguments)
    assert caught.value.code == 7
    [(chosen, fields)] = calls
    assert (chosen, fields["kind"]) == (where, kind)


def test_launch_hands_on_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    monkeypatch.setenv("TOKEN", "t0ken")
    with pytest.raises(SystemExit):
        launch(
            2,
            4,
            "gpu",
            ["box-1", "!box-2"],
            env={"A": "1"},
            secrets=["TOKEN"],
            detach=True,
            restarts=2,
        )
    with pytest.raises(SystemExit):
        launch(2, on_disconnect=600)
    assert [fields["on_disconnect_s"] for _, fields in calls] == [None, 600.0]
    fields = calls[0][1]
    assert fields["nodes"] == 2
    assert fields["devices"] == 4
    assert fields["accelerator"] is Accelerator.CUDA
    assert fields["target"] == ("box-1", "!box-2")
    assert (fields["env"], fields["secrets"]) == ({"A": "1"}, {"TOKEN": "t0ken"})
    assert fields["detach"]
    assert fields["restarts"] == 2


@pytest.mark.parametrize("asked", [{"target": "local"}, {"devices": 2, "accelerator": "cpu"}])
def test_restarts_without_a_mesh_are_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    calls = recorded(monkeypatch)
    with pytest.raises(ArgumentError, match="restarts=3 needs the mesh") as caught:
        launch(restarts=3, **asked)
    assert caught.value.hint is not None
    assert "gpulayer mesh local" in caught.value.hint
    model, used = OneWeight(), Trainer(accelerator="cpu", devices=1, restarts=1)
    with pytest.raises(ArgumentError, match="restarts=1 needs the mesh"):
        used.fit(model, loader(2))
    assert calls == []


def test_launcher_is_missed_on_the_mesh_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    calls = recorded(monkeypatch)
    with pytest.raises(ArgumentError, match="on_disconnect=60 needs the mesh"):
        launch(on_disconnect=60, target="local")
    model, used = OneWeight(), Trainer(accelerator="cpu", devices=1, on_disconnect=60)
    with pytest.raises(ArgumentError, match="on_disconnect=60 needs the mesh"):
        used.fit(model, loader(2))
    assert calls == []
    assert arguments.DISCONNECT_MIN_S == DISCONNECT_MIN_S
    assert arguments.WAIT_MAX_S == WAIT_MAX_S
    for value in ("stop", 9.9, True, None, 1e8, float("nan")):
        with pytest.raises(ArgumentError, match='on_disconnect must be "keep" or 10 to'):
            launch(3, on_disconnect=value)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match='on_disconnect must be "keep" or 10 to'):
            Trainer(on_disconnect=value)  # type: ignore[arg-type]


def test_restarts_are_as_many_as_a_job_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {arguments.RESTARTS_MAX, cli._RESTARTS_MAX} == {RESTARTS_MAX}
    for value in (-1, RESTARTS_MAX + 1, True, 1.0, "2"):
        with pytest.raises(ArgumentError, match=r"restarts must be 0 to 20, got"):
            launch(3, restarts=value)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"restarts must be 0 to 20, got"):
            Trainer(restarts=value)  # type: ignore[arg-type]


def test_local_ranks_are_told_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cuda=2)
    calls = recorded(monkeypatch)
    with pytest.raises(SystemExit):
        launch()
    [(chosen, fields)] = calls
    assert (chosen, fields["accelerator"]) == ("local x2", Accelerator.CUDA)


def test_notebook_is_refused_at_once_and_not_by_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    with pytest.raises(ConfigError, match="notebook"):
        launch(nodes=3)


@pytest.mark.parametrize(
    "variables", [{"GPULAYER_JOB": "0123456789"}, {"RANK": "1", "WORLD_SIZE": "2"}]
)
def test_launch_returns_at_once_in_a_rank(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch)
    assert is_launcher_process()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not is_launcher_process()
    launch(nodes=3)
    assert calls == []


def test_errors_before_the_start_become_their_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: Any) -> Any:
        raise NoMeshError("this machine is in no mesh", hint="join one")

    monkeypatch.setattr(launcher, "script_request", lambda **fields: fields)
    monkeypatch.setattr(launcher, "run_job", refuse)
    with pytest.raises(SystemExit) as caught:
        launching.run(Choice(Where.PEERS))
    assert caught.value.code == 5
    assert isinstance(caught.value.__cause__, NoMeshError)
    assert "this machine is in no mesh" in capsys.readouterr().err

"""`Timer`, `max_time` and validation by time, on a clock that the tests hold."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import beside_lightning
import pytest
import torch
from beside_lightning import Clock
from one_weight import OneWeight, Validated, loader, trainer
from ranks import Ranks
from torch import Tensor

from gpulayer.pytorch import Timer, Trainer, cadence
from gpulayer.pytorch.arguments import ArgumentError

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:there is no validation loader")
FORMS = ["00:00:00:05", " 0:00:00:05 ", timedelta(seconds=5), {"seconds": 5}]
WRONG = ["00:00:01", "1:0:0:1", "00:00:00:1.5", "00:00:00:5", "5", "", 5]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the clocks of our modules."""
    found = Clock()
    for module in ("timer", "loop"):
        monkeypatch.setattr(f"gpulayer.pytorch.{module}.time", found)
    return found


@pytest.fixture
def both_clocks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop Lightning's clocks, too."""
    beside_lightning.oracle()
    for module in (
        "callbacks.timer", "loops.training_epoch_loop", "loops.fit_loop", "loops.evaluation_loop",
    ):  # fmt: skip
        monkeypatch.setattr(f"pytorch_lightning.{module}.time", clock)
    return clock


class Timed(Validated):
    """Each training step takes a second, each validation step two."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 2
        super().validation_step(batch, batch_idx)


def timers(trained: Trainer) -> list[Timer]:
    return [one for one in trained.callbacks if isinstance(one, Timer)]


# -- the forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_time(form: Any) -> None:
    assert Timer(form).time_remaining() == 5
    (timer,) = timers(trainer(max_time=form))
    assert timer.time_remaining() == 5
    assert trainer(val_check_interval=form).val_check_interval == timedelta(seconds=5)


def test_days_hours_minutes_and_seconds() -> None:
    expected = timedelta(days=123, hours=4, minutes=5, seconds=6).total_seconds()
    assert Timer("123:04:05:06").time_remaining() == expected


@pytest.mark.parametrize("form", WRONG)
def test_other_forms_are_refused(form: Any) -> None:
    with pytest.raises(ArgumentError, match='duration must be "DD:HH:MM:SS", a timedelta or a'):
        Timer(form)
    with pytest.raises(ArgumentError, match='max_time must be "DD:HH:MM:SS", a timedelta or a d'):
        trainer(max_time=form)
    if isinstance(form, str):
        with pytest.raises(ArgumentError, match='val_check_interval must be "DD:HH:MM:SS"'):
            trainer(val_check_interval=form)


def test_unknown_interval_and_stage_are_refused() -> None:
    with pytest.raises(ArgumentError, match='"step" or "epoch", not \'batch\''):
        Timer("00:00:00:01", interval="batch")
    with pytest.raises(ArgumentError, match="unknown stage 'fit'"):
        Timer().time_elapsed("fit")


# -- the end -------------------------------------------------------------------------------------


def test_time_counts_validation_and_ends_after_the_batch(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Timed(clock)
    # 3 steps, a validation of 2 s and no 4th: 5 s are over, and a stop validates at once
    trained = trainer(max_time="00:00:00:06", max_epochs=None, val_check_interval=3)
    trained.fit(model, loader(), loader(1))
    assert model.calls == [("train", i) for i in range(3)] + [
        ("val", 0), ("train", 3), ("val", 0)
    ]  # fmt: skip
    assert (trained.global_step, trained.current_epoch, trained.should_stop) == (4, 1, True)
    (timer,) = timers(trained)
    assert (timer.time_elapsed(), timer.time_remaining()) == (8, -2)
    assert timer.time_elapsed("validate") == 2  # the last one
    assert capsys.readouterr().out == "time limit reached after 0:00:06: training stops\n"


def test_interval_of_epochs_lets_the_epoch_end(clock: Clock) -> None:
    model = OneWeight()
    timer = Timer("00:00:00:03", interval="epoch", verbose=False)
    trained = trainer(callbacks=timer, max_epochs=9)
    model.on_train_batch_start = lambda *_: setattr(clock, "now", clock.now + 1)  # type: ignore[assignment]
    trained.fit(model, loader(2))
    assert (trained.current_epoch, timer.time_elapsed()) == (2, 4)


def test_minima_hold_the_end_back(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    trained = trainer(max_time="00:00:00:01", max_epochs=9, min_steps=5)
    trained.fit(Timed(clock), loader(3))
    assert trained.global_step == 5
    assert capsys.readouterr().out.count("time limit") == 1


def test_a_timer_alone_takes_the_default_limit_of_epochs_away(clock: Clock) -> None:
    for arguments in ({"max_time": {"hours": 1}}, {"callbacks": Timer()}):
        model = OneWeight()
        trained = trainer(max_epochs=None, **arguments)

        def stop(batch: Any, batch_idx: int, trained: Any = trained) -> None:
            assert trained._max_epochs == -1
            trained.should_stop = True

        model.on_train_batch_start = stop  # type: ignore[assignment]
        trained.fit(model, loader())


def test_explicit_timer_wins_over_max_time() -> None:
    timer = Timer("00:00:00:07")
    with pytest.warns(UserWarning, match="max_time is ignored"):
        trained = trainer(max_time="00:00:00:01", callbacks=timer)
    assert timers(trained) == [timer]


def test_max_time_stays_in_a_trial_run(clock: Clock) -> None:
    model = Timed(clock)
    trained = trainer(max_time="00:00:00:02", fast_dev_run=5)
    trained.fit(model, loader(), loader(1))
    assert trained.global_step == 2


# -- state ---------------------------------------------------------------------------------------


def test_time_in_the_state_is_subtracted(clock: Clock) -> None:
    timer = Timer("00:00:00:05")
    timer.load_state_dict({"time_elapsed": {"train": 3.0}})
    trained = trainer(callbacks=timer, max_epochs=9)
    trained.fit(Timed(clock), loader())
    assert trained.global_step == 2
    assert timer.state_dict()["time_elapsed"]["train"] == 5


def test_no_time_left_trains_nothing_unless_there_are_minima(clock: Clock) -> None:
    for minimum, steps in ((None, 0), (1, 7)):
        timer = Timer("00:00:00:05", verbose=False)
        timer.load_state_dict({"time_elapsed": {"train": 5.0}})
        trained = trainer(callbacks=timer, max_epochs=9, min_epochs=minimum)
        trained.fit(Timed(clock), loader())
        assert trained.global_step == steps


def test_time_goes_on_in_the_next_fit(clock: Clock) -> None:
    timer = Timer("00:00:00:05", verbose=False)
    trained = trainer(callbacks=timer, max_epochs=1)
    trained.fit(Timed(clock), loader(3))
    clock.now += 100  # between two fits is no training
    trained.max_epochs = 9
    trained.fit(Timed(clock), loader(3))
    assert trained.global_step == 5


def test_time_after_a_failure_is_no_training(clock: Clock) -> None:
    class Fails(Timed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise KeyError

    timer = Timer("00:00:00:05")
    with pytest.raises(KeyError):
        trainer(callbacks=timer).fit(Fails(clock), loader())
    clock.now += 100
    assert timer.time_elapsed() == 1


# -- validation by time --------------------------------------------------------------------------


def test_validation_comes_when_the_time_since_the_last_one_has_passed(clock: Clock) -> None:
    model = Timed(clock)
    trained = trainer(val_check_interval={"seconds": 3}, max_epochs=2, num_sanity_val_steps=1)
    trained.fit(model, loader(5), loader(1))
    done = [kind for kind, _ in model.calls]
    step = ["train"]
    # across epochs, from the end of the validation on; none at the end of the training
    assert done == ["val", *step * 3, "val", *step * 3, "val", *step * 3, "val", *step]


def test_validation_by_time_waits_for_a_validating_epoch(clock: Clock) -> None:
    model = Timed(clock)
    trained = trainer(val_check_interval="00:00:00:03", check_val_every_n_epoch=2, max_epochs=4)
    trained.fit(model, loader(2), loader(1))
    done = [kind for kind, _ in model.calls]
    # due after 3 s, in the second epoch; then after 3 s more, but the third epoch has none
    assert done == ["train"] * 3 + ["val"] + ["train"] * 4 + ["val"] + ["train"]


def test_trial_run_validates_at_its_end(clock: Clock) -> None:
    model = Timed(clock)
    trainer(val_check_interval="01:00:00:00", fast_dev_run=2).fit(model, loader(), loader())
    assert [kind for kind, _ in model.calls] == ["train"] * 2 + ["val"] * 2


# -- Lightning's behaviour -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.configurations(30)
def test_same_as_lightning(number: int, seed: int, both_clocks: Clock, tmp_path: Path) -> None:
    rng = random.Random(f"{seed}/timer/{number}")
    pick = rng.choice
    plan = beside_lightning.Plan(
        samples=pick([2, 5]), clock=both_clocks, train_s=pick([0.25, 1, 3]), val_s=pick([0, 1, 4])
    )
    duration: Any = pick(["00:00:00:05", timedelta(seconds=0), {"seconds": 9}, {"minutes": 5}])
    interval = pick(["step", "step", "epoch"])
    explicit = pick([True, True, False])
    elapsed = pick([0, 0, 0, 3, 5])
    arguments = {
        "max_epochs": pick([2, 6]),
        "max_steps": pick([-1, -1, 4]),
        "min_epochs": pick([None, None, 1, 2]),
        "min_steps": pick([None, None, 7]),
        "val_check_interval": pick([1.0, 2, 0.5, "00:00:00:02", {"seconds": 5}]),
        "check_val_every_n_epoch": pick([1, 1, 2]),
        "num_sanity_val_steps": pick([0, 1]),
        "log_every_n_steps": pick([1, 2]),
        "fast_dev_run": pick([False, False, False, 3]),
    }
    if not explicit:
        arguments["max_time"] = duration

    def make(home: Any) -> Any:
        if not explicit:
            return None
        timer = home.Timer(duration, interval, verbose=False)
        timer.load_state_dict({"time_elapsed": {"train": elapsed}})
        return timer

    def read(timer: Any) -> Any:
        if timer is None:
            return None
        stages = ("train", "validate", "test")
        return (
            timer.state_key,
            timer.state_dict(),
            timer.time_remaining(),
            [(timer.start_time(stage), timer.end_time(stage)) for stage in stages],
        )

    theirs, ours = beside_lightning.both(tmp_path, plan, make, read, **arguments)
    described = {key: value for key, value in vars(plan).items() if key != "clock"}
    beside_lightning.same(theirs, ours, duration, interval, elapsed, arguments, described)


# -- several ranks -------------------------------------------------------------------------------


class Wire:
    """Carries rank 0's words: the first that uses it is rank 0."""

    world_size = 2

    def __init__(self, said: list[list[int]], rank: int) -> None:
        self.said = said
        self.rank = rank
        self.count = 0

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if self.rank == 0:
            self.said.append(tensor.tolist())
        self.count += 1
        return torch.tensor(self.said[self.count - 1])


def test_ranks_look_after_the_same_batches_whatever_their_clocks_say(rng: random.Random) -> None:
    said: list[list[int]] = []
    answers, looks = [], []
    for rank in range(2):
        clock = Clock()
        wire = Wire(said, rank)
        asks = cadence.Cadence(wire, clock.monotonic)
        end = clock.now + 20
        answers.append([])
        looks.append([])
        for _ in range(1000):
            clock.now += rng.choice([0.001, 0.01, 0.3]) * (1 if rank == 0 else 10)
            answers[rank].append(asks.after_batch(lambda e=end, c=clock: e - c.now))  # type: ignore[misc]
            looks[rank].append(wire.count)
    assert answers[0] == answers[1]
    assert looks[0] == looks[1]
    assert True in answers[0]
    assert looks[0][-1] < 300  # about 100 s at rank 0's pace


def test_looks_come_once_a_second_and_closer_to_the_limit() -> None:
    assert cadence.next_look(passed=1, spent_s=0.25, left_s=60) == 4
    assert cadence.next_look(passed=4, spent_s=1.0, left_s=0.75) == 3
    assert cadence.next_look(passed=4, spent_s=1.0, left_s=0.1) == 1
    assert cadence.next_look(passed=1, spent_s=30.0, left_s=60) == 1
    assert cadence.next_look(passed=1, spent_s=1e-4, left_s=60) == cadence.MOST_BATCHES
    assert cadence.next_look(passed=1, spent_s=0.0, left_s=60) == cadence.MOST_BATCHES
    assert cadence.next_look(passed=4, spent_s=1.0, left_s=-3) == 4
    assert cadence.next_look(passed=0, spent_s=9.0, left_s=60) == 1  # pace not known yet


@pytest.mark.network
@pytest.mark.slow
def test_ranks_with_other_clocks_stop_and_validate_together(tmp_path: Path) -> None:
    body = """
    import gpulayer.pytorch.loop, gpulayer.pytorch.timer

    class Clock:
        now = 0.0
        def monotonic(self):
            return self.now

    clock = gpulayer.pytorch.loop.time = gpulayer.pytorch.timer.time = Clock()
    looks, did = [], []
    broadcast = Runtime.broadcast

    def counted(self, tensor, source=0):
        looks.append(fit.global_step)
        return broadcast(self, tensor, source)

    Runtime.broadcast = counted

    class Model(Net):
        def training_step(self, batch, batch_idx):
            clock.now += 0.25 if RANK == 0 else 40.0
            did.append("train")
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            did.append("val")

    with_timer = dict(max_time={"seconds": 3}, limit_val_batches=0)
    for arguments in (with_timer, dict(val_check_interval={"seconds": 1}, max_steps=14)):
        fit = trainer(max_epochs=None, **arguments)
        fit.fit(Model(), DataLoader(samples(20), 2), DataLoader(samples(2), 1))
        looks.append("end")
        did.append(fit.global_step)
    tell(looks=looks, did=did)
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    told = ranks.told()
    assert ranks.told(1) == told
    assert told["looks"] == [0, 1, 5, 9, 12, "end", 1, 4, 8, 12, "end"]
    step = ["train"]
    assert told["did"] == [
        *step * 12, 12, *step * 4, "val", *step * 4, "val", *step * 4, "val", *step * 2, 14
    ]  # fmt: skip

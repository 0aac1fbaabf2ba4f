"""Ranks that meet, part, and stop together: verdicts, simulated ranks, and real ones."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import Ranks

from gpulayer.pytorch import lockstep
from gpulayer.pytorch.lockstep import (
    Apart,
    Lockstep,
    Pace,
    Post,
    Standstill,
    all_came,
    behind,
    odd_weights,
    proposal,
    slowest,
    stop_together,
    stops_after,
)

# -- verdicts -------------------------------------------------------------------------------------


def test_ranks_have_met_when_all_came_after_as_many_batches() -> None:
    assert all_came(1, 7, [Post(7, met=1), Post(7, met=1)])


def test_late_rank_is_waited_for() -> None:
    assert not all_came(1, 7, [Post(7, met=1), Post(6)])
    assert not all_came(1, 7, [Post(7, met=1), Post(7)])  # long in hooks after its last batch


def test_rank_that_left_the_meeting_may_be_anywhere() -> None:
    assert all_came(1, 7, [Post(7, met=1), Post(9, met=1, left=1)])
    assert all_came(1, 7, [Post(7, met=1), Post(14, met=2, left=1)])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Post(8), "rank 1 went on with batch 8"),
        (Post(6, met=1), "rank 1 ended the epoch after batch 6"),
        (Post(8, met=1), "rank 1 ended the epoch after batch 8"),
        (Post(7, stops=7), "rank 1 went on with batch 7"),  # it waits in its epoch
    ],
)
def test_rank_that_trains_otherwise_is_named(other: Post, text: str) -> None:
    with pytest.raises(Apart, match=rf"rank 0 ended the epoch after batch 7, {text}"):
        all_came(1, 7, [Post(7, met=1), other])


def test_machines_are_named_with_their_ranks() -> None:
    posts = [Post(7, met=1, node="box-1"), Post(8, node="box-2"), Post(8, node="box-3")]
    with pytest.raises(Apart, match="ranks 1 on box-2, 2 on box-3 went on with batch 8"):
        all_came(1, 7, posts)


def test_stop_is_for_all_or_nobody() -> None:
    assert stop_together(9, [Post(9, stops=9), Post(9, stops=9)]) is True
    assert stop_together(9, [Post(9, stops=9), Post(10)]) is False
    assert stop_together(9, [Post(9, stops=9), Post(9)]) is None
    assert stop_together(9, [Post(9, stops=9), Post(9, stops=7)]) is None


def test_wish_to_stop_counts_at_the_meeting_to_which_it_came() -> None:
    assert stops_after(3, [Post(met=3), Post(met=3, ends=3)])
    assert not stops_after(3, [Post(met=3), Post(met=4, left=3, ends=4)])


def test_proposal_lies_ahead_of_what_ranks_train_until_they_hear_of_it() -> None:
    posts = [Post(20), Post(22)]
    assert proposal(posts, 0.01, 1) == 22  # the batch in hand lasts long
    assert proposal(posts, 100.0, 1) == 22 + 125
    assert proposal(posts, 100.0, 3) > proposal(posts, 100.0, 2) > 22 + 125


@pytest.mark.parametrize(
    ("own_s", "found"),
    [
        ((0.1, 0.1, 0.11), None),
        ((0.1, 0.1, 0.2), "slowest rank 2 on c 2.0x"),
        ((0.5, 0.1, 0.2), "slowest rank 0 on a 3.3x"),
        ((0.1, None, None), None),
        ((None, None, None), None),
    ],
)
def test_slow_rank_must_stand_out(own_s: Sequence[float | None], found: str | None) -> None:
    posts = [Post(own_s=one, node=node) for one, node in zip(own_s, "abc", strict=True)]
    assert slowest(posts) == found


@pytest.mark.parametrize(
    ("posts", "ranks"),
    [
        ([Post(7, reached=7), Post(7, reached=7)], []),
        ([Post(7, reached=7), Post(7, reached=6)], [1]),  # in its forward pass
        ([Post(7, reached=6), Post(6, reached=6)], [1]),  # loads its batch
        ([Post(7, reached=7), Post(7, met=1, reached=7)], [0]),  # in a hook at the end of the epoch
        ([Post(7, collectives=9), Post(7, collectives=10)], [0]),
        ([Post(9, met=1, left=1), Post(8, met=1), Post(9, met=1, left=1)], [1]),
    ],
)
def test_ranks_behind_are_those_for_which_the_first_wait(
    posts: list[Post], ranks: list[int]
) -> None:
    assert behind(posts) == ranks


def test_standstill_is_looked_into_after_a_minute_and_then_now_and_then() -> None:
    still = Standstill()
    looks = [at for at in range(0, 200) if still.is_long(float(at), (0, 3, 3, 0))]
    assert looks == [60, 75, 90, 105, 120, 135, 150, 165, 180, 195]
    assert not any(still.is_long(200.0 + at, (0, at, at, 0)) for at in range(200))


def test_only_the_first_of_those_who_wait_speaks_and_once() -> None:
    posts = [Post(6, node="a"), Post(7, reached=7, node="b"), Post(7, reached=7, node="c")]
    said = [Standstill().for_whom(rank, posts) for rank in range(3)]
    assert said == [
        None,
        "waiting for rank 0 on a for 60 s, at batch 6 (counted over all epochs)",
        None,
    ]
    still = Standstill()
    assert [still.for_whom(1, posts) is None for _ in range(3)] == [False, True, True]
    assert still.for_whom(1, [*posts[:2], Post(7, reached=6, node="c")]) is not None
    assert still.for_whom(1, posts[1:] * 2) is None  # all are equally far


def test_odd_weights_are_those_of_the_fewest() -> None:
    same, other, rounded = (10.0, 1.0), (10.1, 1.0), (10.000001, 1.000001)
    assert odd_weights([Post(weights=same), Post(weights=rounded), Post(weights=same)]) == []
    assert odd_weights([Post(weights=same), Post(weights=other), Post(weights=same)]) == [1]
    assert odd_weights([Post(weights=other), Post(weights=same), Post(weights=same)]) == [0]
    assert odd_weights([Post(weights=same), Post(weights=other)]) == [1]
    assert odd_weights([Post(), Post()]) == []
    assert odd_weights([Post(weights=(0.0, 0.0)), Post(weights=(0.0, 0.0))]) == []


def test_pace_is_measured_over_windows() -> None:
    pace = Pace()
    for now_s, batches, own_s in [(0.0, 0, 0.0), (0.1, 5, 0.1), (1.0, 10, 0.5), (2.0, 10, 0.5)]:
        pace.look(now_s, batches, own_s)
    assert (pace.batches_per_s, pace.own_s) == (10.0, 0.05)


# -- simulated ranks ------------------------------------------------------------------------------


class Rank:
    """A rank in virtual time: trains, and hears of proposals with delays."""

    def __init__(self) -> None:
        self.batches = 0
        self.stops = 0
        self.plan: int | None = None
        self.waiting = False
        self.stopped: int | None = None

    def post(self) -> Post:
        return Post(self.batches, stops=self.stops)


def simulated(seed: int, world: int) -> tuple[list[int | None], int]:
    """Return after which batch each rank stopped, and how many proposals that took.

    Batches of all ranks begin together, as gradients make them; threads tick with random pauses,
    some of them far too long.
    """
    rng = random.Random(seed)
    ranks = [Rank() for _ in range(world)]
    step_s = 10 ** rng.uniform(-2.5, 1)
    starved = rng.random() * 0.3
    open_, attempts, planned = False, 0, 0
    events: list[tuple[float, int, str, int]] = []
    for rank in range(world):
        heapq.heappush(events, (rng.uniform(0, 0.5), rank, "tick", rank))
        heapq.heappush(events, (step_s, world + rank, "batch", rank))
        ranks[rank].batches = 1
    asked_s = rng.uniform(0, 3)
    number = 2 * world
    while any(one.stopped is None for one in ranks):
        now, _, kind, rank = heapq.heappop(events)
        assert now < 1000 * max(step_s, 1.0), "no end"
        me = ranks[rank]
        posts = [one.post() for one in ranks]
        number += 1
        if kind == "tick":
            if rank == 0 and now >= asked_s and not open_:
                attempts += 1
                planned, open_ = proposal(posts, 1 / step_s, attempts), True
                me.plan = planned
            elif rank > 0 and planned and me.plan != planned:
                me.plan = planned
            pause = rng.uniform(1, 8) if rng.random() < starved else rng.uniform(0.5, 0.6)
            heapq.heappush(events, (now + pause, number, "tick", rank))
            continue
        if me.stopped is not None:
            continue
        if kind == "batch" and not me.waiting:
            if any(one.batches < me.batches for one in ranks):  # gradients wait for the others
                heapq.heappush(events, (now + step_s / 4, number, "batch", rank))
                continue
            if me.plan is not None and me.batches == me.plan:
                me.waiting, me.stops = True, me.batches
            elif me.plan is not None and me.batches > me.plan and rank == 0 and planned == me.plan:
                open_, me.plan = False, None
        if me.waiting:
            verdict = stop_together(me.batches, [one.post() for one in ranks])
            if verdict is None:
                heapq.heappush(events, (now + 0.01, number, "batch", rank))
                continue
            if verdict:
                me.stopped = me.batches
                continue
            me.waiting, me.stops = False, 0
            if rank == 0:
                open_, me.plan = False, None
        me.batches += 1
        heapq.heappush(events, (now + step_s * rng.uniform(0.9, 1.1), number, "batch", rank))
    return [one.stopped for one in ranks], attempts


@pytest.mark.parametrize("seed", range(100))
def test_simulated_ranks_stop_after_one_batch(seed: int) -> None:
    stopped, attempts = simulated(seed, world=2 + seed % 4)
    assert len(set(stopped)) == 1, (seed, stopped)
    assert attempts <= 12, (seed, attempts)


# -- threads over one store -----------------------------------------------------------------------


class Shared:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]


class Trained:
    """A loop of so many epochs that trains nothing."""

    def __init__(self, store: Shared, rank: int, world: int, deadline_s: float = 20.0) -> None:
        self.batches = 0
        self.plan = float("inf")
        self.said: list[str] = []
        self.lockstep = Lockstep(
            store, rank, world, f"box-{rank}", batches=lambda: self.batches, collectives=lambda: 0,
            plan_stop=lambda batch: setattr(self, "plan", batch), say=self.said.append,
            deadline_s=deadline_s,
        )  # fmt: skip

    def run(self, epochs: int, length: int, barrier: threading.Barrier) -> int:
        for _ in range(epochs):
            for _ in range(length):
                barrier.wait(20.0)  # as gradients
                self.batches += 1
                if self.batches >= self.plan:
                    planned, self.plan = self.plan, float("inf")
                    if self.batches > planned:
                        self.lockstep.missed()
                    elif self.lockstep.stops_here(self.batches):
                        return self.batches
            if self.lockstep.meet((1.0, 2.0)) != (False, []):
                return self.batches
        return self.batches


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_signal_to_one_rank_stops_all_after_one_batch(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "PAUSE_S", 0.02)
    store, world = Shared(), 3
    barrier = threading.Barrier(world)
    loops = [Trained(store, rank, world) for rank in range(world)]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(one.run(10**6, length, barrier)))
        for one in loops
    ]
    try:
        for thread in threads:
            thread.start()
        loops[1].lockstep.ask_to_stop(15)
        for thread in threads:
            thread.join(60.0)
    finally:
        for one in loops:
            one.lockstep.close()
    assert len(found) == world
    assert len(set(found)) == 1
    assert {one.lockstep.signal() for one in loops} == {15}


def test_rank_that_never_comes_is_waited_for_with_a_deadline() -> None:
    store = Shared()
    loops = [Trained(store, rank, 2, deadline_s=0.2) for rank in range(2)]
    try:
        with pytest.raises(Apart, match="not all ranks came to the end of an epoch within 0 s"):
            loops[0].lockstep.meet()
    finally:
        for one in loops:
            one.lockstep.close()


def test_oversized_post_is_refused() -> None:
    store = Shared()
    one = Trained(store, 0, 2)
    store.set("at/1", " " * 2000)
    try:
        with pytest.raises(RuntimeError, match="posted 2000 bytes"):
            one.lockstep.posts()
    finally:
        one.lockstep.close()


# -- real ranks -----------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            """
            class Share(torch.utils.data.IterableDataset):
                def __iter__(self):
                    return iter([torch.ones(4)] * (6 if RANK else 9))

            class Sum(Net):
                def loss(self, batch):
                    return self.layers(batch).mean()

            trainer().fit(Sum(), DataLoader(Share(), 1))
            """,
            "rank 1 ended the epoch after batch 6",
        ),
        (
            """
            class Stops(Net):
                def on_train_batch_end(self, outputs, batch, batch_idx):
                    if RANK == 0 and batch_idx == 2:
                        self.trainer.should_stop = True

            trainer().fit(Stops(), DataLoader(samples(64), 4))
            """,
            "rank 0 ended the epoch after batch 3, rank 1 went on with batch 4",
        ),
        (
            """
            class Stops(Net):
                def on_train_batch_end(self, outputs, batch, batch_idx):
                    if RANK == 1 and batch_idx == 3:
                        self.trainer.should_stop = True

                def validation_step(self, batch, batch_idx):
                    self.log("val", self.loss(batch))

            trainer(max_epochs=2).fit(
                Stops(), DataLoader(samples(64), 4), DataLoader(samples(8), 4)
            )
            """,
            "rank 0 went on with batch 5, rank 1 ended the epoch after batch 4",
        ),
        (
            """
            class Short:
                def __len__(self):
                    return 5

                def __iter__(self):
                    return iter([(torch.ones(2, 4), torch.ones(2, 1))] * (3 if RANK else 5))

            class Validates(Net):
                def validation_step(self, batch, batch_idx):
                    pass

            trainer().fit(Validates(), Short(), DataLoader(samples(8), 4))
            """,
            "rank 0 went on with batch 4, rank 1 ended the epoch after batch 3",
        ),
        (
            """
            class Stops(Net):
                def on_train_epoch_end(self):
                    self.trainer.should_stop = RANK == 1

            trainer(max_epochs=3).fit(Stops(), DataLoader(samples(16), 4))
            """,
            "whether training ends with epoch 0 differs between ranks: rank 0: False, rank 1: True",
        ),
        (
            """
            class Leaves(Net):
                def on_train_batch_start(self, batch, batch_idx):
                    return -1 if RANK == 1 and batch_idx == 2 else None

            trainer().fit(Leaves(), DataLoader(samples(64), 4))
            """,
            "rank 0 went on with batch 3, rank 1 ended the epoch after batch 2",
        ),
        (
            """
            class Leaves(Net):
                def on_train_batch_start(self, batch, batch_idx):
                    return -1 if RANK == 0 and self.trainer.current_epoch and batch_idx == 7 else 0

            trainer(max_epochs=3).fit(Leaves(), DataLoader(samples(64), 4))
            """,
            "rank 0 ended the epoch after batch 15, rank 1 went on with batch 16",
        ),
        (
            """
            class Share(torch.utils.data.IterableDataset):
                def __iter__(self):
                    return iter([torch.ones(4)] * (0 if RANK else 9))

            trainer().fit(Net(), DataLoader(Share(), 1))
            """,
            "the training loader of rank 1 yielded no batch in epoch 0",
        ),
        (
            """
            class Validates(Net):
                def validation_step(self, batch, batch_idx):
                    self.log("val", self.loss(batch), sync_dist=True)

            val = None if RANK else DataLoader(samples(8), 4)
            trainer(num_sanity_val_steps=2).fit(Validates(), DataLoader(samples(64), 4), val)
            """,
            "whether there is a validation differs between ranks: rank 0: True, rank 1: False",
        ),
        (
            """
            class Validates(Net):
                def validation_step(self, batch, batch_idx):
                    self.log("val", self.loss(batch), sync_dist=True)

            val = [] if RANK else [next(iter(DataLoader(samples(8), 8)))]
            trainer(num_sanity_val_steps=2).fit(Validates(), DataLoader(samples(64), 4), val)
            """,
            "which validation loaders have batches differs between ranks: "
            "rank 0: [True], rank 1: []",
        ),
        (
            """
            class Tests(Net):
                def test_step(self, batch, batch_idx, dataloader_idx=0):
                    self.log("test", self.loss(batch), sync_dist=True)

            batch = next(iter(DataLoader(samples(8), 8)))
            trainer().test(Tests(), [[batch], [] if RANK else [batch]])
            """,
            "which test loaders have batches differs between ranks: "
            "rank 0: [True, True], rank 1: [True, False]",
        ),
    ],
    ids=[
        "uneven loader",
        "should_stop in a batch",
        "should_stop and validation",
        "short loader and validation",
        "should_stop after an epoch",
        "left by a hook",
        "left by a hook at the last batch",
        "empty loader",
        "no validation loader",
        "no validation loaders in a list",
        "empty test loader",
    ],
)
def test_ranks_that_part_are_named_and_do_not_hang(body: str, text: str, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "two", body, world=2)
    assert any(text in output for output in ranks.output)
    assert any(code == 1 for code in ranks.codes)


@pytest.mark.network
def test_all_ranks_may_leave_an_epoch_at_a_batch_that_a_slow_one_is_still_at(
    tmp_path: Path,
) -> None:
    body = """
    import time

    class Leaves(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                time.sleep(1.5 * (RANK == self.trainer.current_epoch))
                return -1

    used = trainer(max_epochs=2)
    used.fit(Leaves(), DataLoader(samples(64), 4))
    tell(steps=used.global_step, epochs=used.current_epoch)
    """
    ranks = Ranks(tmp_path / "two", body, world=2).check()
    assert ranks.told(1) == {"steps": 4, "epochs": 2}


@pytest.mark.network
def test_rank_for_which_the_others_wait_is_named_and_waited_for(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path / "two",
        """
        import time
        from gpulayer.pytorch import lockstep
        lockstep.BEHIND_S = 1.0

        class Late(Net):
            def training_step(self, batch, batch_idx):
                if RANK == 0 and batch_idx == 1:
                    deadline = time.monotonic() + 60
                    while not os.path.exists("said") and time.monotonic() < deadline:
                        time.sleep(0.05)
                return super().training_step(batch, batch_idx)

        says = lockstep.Standstill.for_whom

        def for_whom(self, *given):
            text = says(self, *given)
            if text is not None:
                open("said", "w").close()
            return text

        lockstep.Standstill.for_whom = for_whom
        trainer(max_epochs=2).fit(Late(), DataLoader(samples(16), 4))
        tell(done=True)
        """,
        world=2,
    ).check()
    said = "gpulayer: waiting for rank 0 for 1 s, at batch 2 (counted over all epochs)"
    assert said in ranks.output[1]
    assert "waiting" not in ranks.output[0]
    assert ranks.told(0) == ranks.told(1) == {"done": True}


@pytest.mark.network
def test_rank_that_changes_its_weights_alone_is_named(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path / "two",
        """
        warnings.simplefilter("default")

        class Odd(Net):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                if RANK == 1 and self.trainer.current_epoch == 1 and batch_idx == 1:
                    with torch.no_grad():
                        self.layers[0].weight.add_(0.5)

        trainer(max_epochs=4).fit(Odd(), DataLoader(samples(16), 4))
        """,
        world=2,
    ).check()
    assert ranks.output[0].count("weights of rank 1 differ") == 1
    assert "after epoch 1: every rank must" in ranks.output[0]
    assert "differ" not in ranks.output[1]

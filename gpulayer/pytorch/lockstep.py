"""What the ranks of a fit tell each other beside the training: where they are, and when to stop.

A thread of each rank writes its place into the store of the process group twice a second. Training
does not wait for that: nothing happens per step, and there is no collective. It serves three ends:

- *Meeting.* Ranks must train equally many batches, or they wait for each other in collectives that
  do not match. At the end of an epoch they meet; a rank that trains on meanwhile is seen by its
  place, and the error names it. A rank that is merely late is waited for.
- *Stopping.* After a signal to any rank, rank 0 proposes a batch a little ahead. Whoever has
  trained it waits: if all come, they stop there; if one has gone on, for it heard too late, all go
  on and rank 0 proposes another. Both are seen by everyone, so nobody stops alone. At a meeting
  they stop if any rank came with the wish.
- *Pace.* What each rank needs for a batch until its backward pass, where it begins to wait for the
  others, tells who is slow. Where nothing goes on for a minute, a rank that waits names those it
  waits for; that ends nothing, for one of them may be at work on something long.

Verdicts are pure functions of what ranks posted. Does not know what a batch is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

PAUSE_S = 0.5  # between two posts
MARGIN_S = 2.5 * PAUSE_S  # in which every rank hears of a proposal
POST_MOST = 1000  # characters; the store belongs to the job's ranks, yet a limit costs nothing
BEHIND_S = 60.0  # without progress; a shorter wait is part of many trainings
BEHIND_LOOK_S = 15.0  # from then on, between looks at the others
SLOW = 1.2  # times the median: a slower rank is worth a word
Place = tuple[int, int, int, int]  # counts of what all ranks do in the same order
_STOP, _STOP_AFTER = "stop", "stop after"
WEIGHTS_APART = 1e-4  # relative; ranks on different hardware round differently


@dataclass(frozen=True, slots=True)
class Post:
    """What one rank tells.

    Args:
        batches: whose training this rank has begun, in all epochs.
        met: the number of the last meeting that it has come to.
        left: the number of the last meeting that it has left.
        stops: the batch after which it waits to stop; 0: none.
        ends: the number of the meeting to which it came with the wish to stop.
        own_s: seconds per batch before the backward pass; None: not known.
        node: the machine's name.
        weights: two numbers that depend on all weights, as of the last meeting.
        reached: the last batch with whose backward pass it has begun.
        collectives: how many of the Runtime's it has begun.
    """

    batches: int = 0
    met: int = 0
    left: int = 0
    stops: int = 0
    ends: int = 0
    own_s: float | None = None
    node: str | None = None
    weights: tuple[float, float] | None = None
    reached: int = 0
    collectives: int = 0

    @property
    def place(self) -> Place:
        """How far it is; whoever is ahead waits for the others."""
        return self.met, self.batches, self.reached, self.collectives


class Apart(RuntimeError):
    """Ranks have not trained the same batches."""


def all_came(number: int, batches: int, posts: Sequence[Post]) -> bool:
    """Return whether every rank has come to a meeting, after as many batches as this one.

    Raises:
        Apart: one trained another number of batches, or goes on training.
    """
    others = [post for post in posts if post.left < number]
    came = [post for post in others if post.met >= number]
    late = [post for post in others if post.met < number]
    if any(post.batches != batches for post in came) or any(
        post.batches > batches or (post.stops and post.stops == batches) for post in late
    ):
        raise Apart(_who_is_where(number, posts))
    return not late


def _who_is_where(number: int, posts: Sequence[Post]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        if post.met >= number:
            where = f"ended the epoch after batch {post.batches}"
        else:
            where = f"went on with batch {post.batches}"
        groups.setdefault(where, []).append(rank)
    parts = [f"{_named(ranks, posts)} {where}" for where, ranks in groups.items()]
    return (
        f"ranks part: {', '.join(parts)} (counted over all epochs). All must train equally many: "
        "look for a loader that yields less on one rank, or for should_stop set or "
        "on_train_batch_start returning -1 on some ranks only"
    )


def stop_together(batch: int, posts: Sequence[Post]) -> bool | None:
    """Return whether all ranks stop after a batch; False: one has gone on; None: wait."""
    if any(post.batches > batch for post in posts):
        return False
    return True if all(post.stops == batch for post in posts) else None


def proposal(posts: Sequence[Post], batches_per_s: float, attempt: int) -> int:
    """Return the batch after which to stop: one that ranks reach after they have heard of it.

    Args:
        attempt: counted from 1; each looks further ahead.
    """
    ahead = int(batches_per_s * MARGIN_S * attempt) + attempt - 1
    return max(post.batches for post in posts) + ahead


def stops_after(number: int, posts: Sequence[Post]) -> bool:
    """Return whether training ends with this meeting, to which all have come."""
    return any(post.ends == number for post in posts)


def slowest(posts: Sequence[Post]) -> str | None:
    """Name the rank that needs longest for its own part of a batch, if it stands out."""
    known = {rank: post.own_s for rank, post in enumerate(posts) if post.own_s}
    if len(known) < 2:
        return None
    rank = max(known, key=known.__getitem__)
    usual = median(value for other, value in known.items() if other != rank)
    if known[rank] < SLOW * usual:
        return None
    return f"slowest {_named([rank], posts)} {known[rank] / usual:.1f}x"


def behind(posts: Sequence[Post]) -> list[int]:
    """Return the ranks for which those that are ahead wait."""
    ahead = max(post.place for post in posts)
    return [rank for rank, post in enumerate(posts) if post.place != ahead]


def odd_weights(posts: Sequence[Post]) -> list[int]:
    """Return the ranks whose weights are not those of most ranks; or rank 0's of halves."""
    known = [(rank, post.weights) for rank, post in enumerate(posts) if post.weights is not None]
    if not known:
        return []
    same = [[other for other, theirs in known if _close(mine, theirs)] for _rank, mine in known]
    most = max(same, key=len)  # the first of equals: it holds rank 0
    return [rank for rank, _weights in known if rank not in most]


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(
        a == b or abs(a - b) <= WEIGHTS_APART * max(abs(one[0]), abs(other[0]), 1e-30)
        for a, b in zip(one, other, strict=True)
    )


def _named(ranks: Sequence[int], posts: Sequence[Post]) -> str:
    named = [
        f"{rank} on {posts[rank].node}" if posts[rank].node else str(rank) for rank in ranks[:8]
    ]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


class Store(Protocol):
    """The part of torch's store that is needed; `multi_get` waits for values that are not there."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Lockstep:
    """One rank's side of it.

    Args:
        store: shared by the ranks of this fit, and by nobody else.
        batches: returns how many batches this rank has begun.
        collectives: as in `Post`.
        plan_stop: takes the batch after which the loop asks `stops_here`.
        say: told for whom the others wait.
        deadline_s: how long ranks that do not come are waited for.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        node: str | None,
        *,
        batches: Callable[[], int],
        collectives: Callable[[], int],
        plan_stop: Callable[[int], None],
        say: Callable[[str], None],
        deadline_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"at/{number}" for number in range(world_size)]
        self._node = node
        self._batches = batches
        self._collectives = collectives
        self._plan_stop = plan_stop
        self._say = say
        self._deadline_s = deadline_s
        self._everyone = False  # whether all ranks have posted at least once
        self._met = self._left = self._stops = self._ends = 0
        self._weights: tuple[float, float] | None = None
        self._asked: int | None = None  # the signal that this rank was sent
        self._planned = 0  # the batch that was proposed last
        self._attempts = 0
        self._open = False  # whether that proposal still stands
        self._pace = Pace()
        self.own_s = 0.0  # the loop adds each batch's part before backward
        self.reached = 0  # it sets to the batch whose part that was
        self._still = Standstill()
        # A post must not overwrite a newer one, so what is posted is taken and written in one go.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpulayer-lockstep", daemon=True)
        self._post()
        self._thread.start()

    # -- the loop's side ---------------------------------------------------------------------

    def meet(self, weights: tuple[float, float] | None = None) -> tuple[bool, list[int]]:
        """Wait for all ranks at the end of an epoch.

        Args:
            weights: see `Post`.

        Returns:
            whether training ends here, and the ranks whose weights are not the others'.

        Raises:
            Apart: a rank has trained other batches, or did not come.
        """
        if self._asked is not None:
            self._store.set(_STOP, str(self._asked))
        with self._lock:
            self._met += 1
            self._weights = weights
            if self._asked is not None:
                self._ends = self._met
        self._post()
        posts: list[Post] = []

        def came() -> bool:
            nonlocal posts
            posts = self.posts()
            return bool(posts) and all_came(self._met, self._batches(), posts)

        self._wait(came, "to the end of an epoch")
        with self._lock:
            self._left = self._met
        self._post()
        return stops_after(self._met, posts), odd_weights(posts)

    def ask_to_stop(self, signal: int) -> None:
        """Have all ranks stop after the same batch; may be called in a signal handler."""
        self._asked = signal

    def stops_here(self, batch: int) -> bool:
        """Return whether all ranks stop after this batch, the last this rank has trained.

        Raises:
            Apart: a rank did not come.
        """
        with self._lock:
            self._stops = batch
        self._post()
        verdict: bool | None = None

        def decided() -> bool:
            nonlocal verdict
            posts = self.posts()
            verdict = stop_together(batch, posts) if posts else None
            return verdict is not None

        self._wait(decided, "to the batch after which to stop")
        if not verdict:
            self.missed()
        return bool(verdict)

    def missed(self) -> None:
        """Go on after a proposal of which some rank heard too late; rank 0 makes another."""
        with self._lock:
            self._stops = 0
            self._open = False

    def signal(self) -> int | None:
        """Return the signal for which ranks stop."""
        if self._asked is None and self._store.check([_STOP]):
            return int(self._store.multi_get([_STOP])[0])
        return self._asked

    def posts(self) -> list[Post]:
        """Return what all ranks have posted; nothing while one has not yet."""
        if not self._everyone:
            self._everyone = self._store.check(self._keys)
        if not self._everyone:
            return []
        return [_read(text) for text in self._store.multi_get(self._keys)]

    def slowest(self) -> str | None:
        """Name the rank that the others wait for, if one stands out."""
        return slowest(self.posts())

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _wait(self, until: Callable[[], bool], where: str) -> None:
        end_s = time.monotonic() + self._deadline_s
        pause_s = 0.0005
        while not until():
            if time.monotonic() > end_s:
                raise Apart(f"not all ranks came {where} within {self._deadline_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S)

    # -- the thread's side -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(PAUSE_S):
            try:
                self._tick()
            except RuntimeError:  # the store went with rank 0: how that ended is told elsewhere
                return

    def _tick(self) -> None:
        post = self._post()
        if self._still.is_long(time.monotonic(), post.place) and (posts := self.posts()):
            text = self._still.for_whom(self._rank, posts)
            if text is not None:
                self._say(text)
        if self._asked is not None:
            self._store.set(_STOP, str(self._asked))
        if self._rank == 0:
            if not self._open and self._store.check([_STOP]) and (posts := self.posts()):
                self._attempts += 1
                self._open = True
                self._planned = proposal(posts, self._pace.batches_per_s, self._attempts)
                self._store.set(_STOP_AFTER, str(self._planned))
                self._plan_stop(self._planned)
        elif self._store.check([_STOP_AFTER]):
            planned = int(self._store.multi_get([_STOP_AFTER])[0])
            if planned != self._planned:
                self._planned = planned
                self._plan_stop(planned)

    def _post(self) -> Post:
        with self._lock:
            batches = self._batches()
            self._pace.look(time.monotonic(), batches, self.own_s)
            post = Post(batches, self._met, self._left, self._stops, self._ends,
                        self._pace.own_s, self._node, self._weights, self.reached,
                        self._collectives())  # fmt: skip
            self._store.set(self._keys[self._rank], json.dumps(asdict(post)))
        return post


class Standstill:
    """How long one rank has been at one place, and for whom."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._look_s = 0.0  # when to look at the others
        self._said: set[tuple[int, ...]] = set()

    def is_long(self, now_s: float, place: Place) -> bool:
        """Take the place as it is now; return whether it is time to look at the others."""
        if place != self._place:
            self._place, self._look_s = place, now_s + BEHIND_S
        if now_s < self._look_s:
            return False
        self._look_s = now_s + BEHIND_LOOK_S
        return True

    def for_whom(self, mine: int, posts: Sequence[Post]) -> str | None:
        """Say for whom those that are ahead wait, if this rank is the first of these; once each."""
        ranks = behind(posts)
        first = next(rank for rank in range(len(posts)) if rank not in ranks)
        if not ranks or first != mine or tuple(ranks) in self._said:
            return None
        self._said.add(tuple(ranks))
        at = min(posts[rank].batches for rank in ranks)
        named = _named(ranks, posts)
        return f"waiting for {named} for {BEHIND_S:.0f} s, at batch {at} (counted over all epochs)"


class Pace:
    """How fast batches pass, between looks that are some time apart."""

    def __init__(self) -> None:
        self.batches_per_s = 0.0
        self.own_s: float | None = None
        self._since: tuple[float, int, float] | None = None

    def look(self, now_s: float, batches: int, own_s: float) -> None:
        """Take the counts as they are now."""
        if self._since is None:
            self._since = now_s, batches, own_s
            return
        then_s, before, own_before_s = self._since
        if now_s - then_s < PAUSE_S / 2 or batches == before:
            return
        self.batches_per_s = (batches - before) / (now_s - then_s)
        self.own_s = (own_s - own_before_s) / (batches - before) or None
        self._since = now_s, batches, own_s


def _read(text: bytes) -> Post:
    if len(text) > POST_MOST:
        raise RuntimeError(f"a rank posted {len(text)} bytes, more than {POST_MOST}")
    fields: dict[str, Any] = json.loads(text)
    weights = fields["weights"]
    return Post(**{**fields, "weights": None if weights is None else (weights[0], weights[1])})

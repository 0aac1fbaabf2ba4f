"""What several machines are worth, from DDP's own figures of the first steps."""

from __future__ import annotations

from typing import Any

import torch

from gpulayer.pytorch.pace import SAMPLES, STEPS, Pace, gradient_bytes, verdict


def figures(iteration: int, comm_s: float, overlap_s: float) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "backward_comm_time": int(comm_s * 1e9),
        "backward_compute_comm_overlap_time": int(overlap_s * 1e9),
    }


def said(pace: Pace, comm_s: float, step_s: float, window: int = 1) -> list[str]:
    """Run batches until the first steps are over; return what was said."""
    found = []
    for batch in range(100):
        now_s = batch * step_s / window + (100.0 if batch > 12 else 0.0)  # a validation between
        line = pace.batch(now_s, figures(batch // window, comm_s, 0.1))
        if line is not None:
            found.append(line)
        if pace.over:
            assert batch <= STEPS * window
            return found
    raise AssertionError("the first steps never end")


def test_slow_network_is_said_once_with_ratio_and_levers() -> None:
    (line,) = said(Pace(3, 1, 100_000_000), comm_s=0.9, step_s=1.0)
    assert line == (
        "3 machines train 0.6x as fast as one: of a step's 1.0 s, 800 ms are spent waiting for "
        "100.0 MB of gradients; what helps: num_nodes=1, which is faster, a larger "
        'accumulate_grad_batches, larger batches, target="zone:NAME"'
    )


def test_step_of_several_batches_waits_once() -> None:
    (line,) = said(Pace(2, 4, 1_000_000), comm_s=0.6, step_s=1.0, window=4)
    assert line.startswith("2 machines train 1.0x as fast as one: of a step's 1.0 s, 500 ms")


def test_good_scaling_is_not_worth_a_word() -> None:
    assert said(Pace(3, 1, 1), comm_s=0.15, step_s=1.0) == []
    assert verdict(0.0, 0.0, 2, 1) is None


def test_nothing_is_said_where_ddp_times_nothing() -> None:
    pace = Pace(2, 1, 1)
    for batch in range(STEPS + 1):
        assert not pace.over
        assert pace.batch(float(batch), {"iteration": batch}) is None
    assert pace.over


def test_real_ddp_gives_the_figures_that_are_read() -> None:
    """These names are torch's own, and private."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped: Any = DistributedDataParallel(torch.nn.Linear(4, 4))
        pace = Pace(2, 1, 1)
        for batch in range(STEPS):
            pace.batch(float(batch), wrapped._get_ddp_logging_data())
            if pace.over:
                break
            wrapped(torch.ones(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert len(pace._waited_s) == SAMPLES


def test_gradients_are_those_of_parameters_that_train() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(2))
    model[0].bias.requires_grad = False
    assert gradient_bytes(model) == 4 * 4 * 4

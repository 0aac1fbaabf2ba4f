"""Several ranks as real processes over gloo: equal to one process, exact, and no hang.

Each test writes a script and runs it once per rank with torchrun's variables.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from ranks import Ranks

pytestmark = [pytest.mark.network, pytest.mark.slow]


def test_two_ranks_follow_one_process_with_the_same_global_batches(tmp_path: Path) -> None:
    body = """
    from torch.utils.data import DistributedSampler

    class Interleaved:
        '''The order in which two ranks with batches of 2 see the samples, as one stream.'''
        def __len__(self): return 16
        def set_epoch(self, epoch): self.epoch = epoch
        def __iter__(self):
            shares = []
            for rank in range(2):
                sampler = DistributedSampler(range(16), 2, rank, seed=1)
                sampler.set_epoch(self.epoch)
                shares.append(list(sampler))
            return iter([shares[r][2 * i + j] for i in range(4) for r in (0, 1) for j in (0, 1)])

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch), sync_dist=True, on_step=True, on_epoch=True)
            self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
            self.log("largest", batch[0].max(), reduce_fx="max", sync_dist=True)

    order = {"sampler": Interleaved()} if WORLD == 1 else {"shuffle": True}
    model, fit = Model(), trainer(max_epochs=3, gradient_clip_val=1.0)
    fit.fit(model, DataLoader(samples(16), 4 // WORLD, **order), DataLoader(samples(7, 1), 2))
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    tell(metrics=metrics, steps=fit.global_step)
    """
    one = Ranks(tmp_path / "one", body, 1).check()
    two = Ranks(tmp_path / "two", body, 2).check()
    losses = one.column("loss_step")
    assert len(losses) == 12
    assert two.column("loss_step") == pytest.approx(losses, abs=1e-5)
    assert two.column("loss_epoch") == pytest.approx(one.column("loss_epoch"), abs=1e-5)
    # 7 samples on 2 ranks: each counts once, although the ranks have 2 batches and 2 of unlike size
    assert two.column("val_epoch") == pytest.approx(one.column("val_epoch"), abs=1e-5)
    assert two.column("count") == [7.0] * 3
    assert two.told()["metrics"] == pytest.approx(
        one.told()["metrics"] | {"val": one.told()["metrics"]["val"]}, abs=1e-5
    )
    assert two.told(1) == two.told(0)


def test_rank_without_a_validation_batch_does_not_hang_and_counts_once(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def validation_step(self, batch, batch_idx):
            self.log("seen", batch[0].mean(), sync_dist=True, on_step=True, on_epoch=True)

    fit = trainer(num_sanity_val_steps=2, max_epochs=2)
    data = samples(1, 1)
    fit.fit(Model(), DataLoader(samples(4), 2, shuffle=True), DataLoader(data, 2))
    tell(seen=float(fit.callback_metrics["seen"]), true=float(data.tensors[0].mean()))
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    for rank in (0, 1):
        told = ranks.told(rank)
        assert told["seen"] == pytest.approx(told["true"], abs=1e-6)


def test_ranks_share_the_samples_reshuffle_each_epoch_and_draw_differently(
    tmp_path: Path,
) -> None:
    body = """
    class Model(Net):
        def training_step(self, batch, batch_idx):
            seen[self.current_epoch] += batch[2].tolist()
            if batch_idx == 0:
                drawn.append(torch.rand(1).item())
            return self.loss(batch)

    seen, drawn = [[], []], []
    numbered = TensorDataset(*samples(12).tensors, torch.arange(12))
    model = Model()
    before = [p.sum().item() for p in model.parameters()]
    trainer(max_epochs=2).fit(model, DataLoader(numbered, 2))
    tell(seen=seen, drawn=drawn, before=before, after=[p.sum().item() for p in model.parameters()])
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    first, second = ranks.told(0), ranks.told(1)
    for epoch in (0, 1):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == list(range(12))
    assert first["seen"][0] != first["seen"][1]
    assert first["before"] == second["before"]
    assert first["after"] == second["after"]
    assert set(first["drawn"]).isdisjoint(second["drawn"])


def test_accumulation_communicates_once_per_window(tmp_path: Path) -> None:
    body = """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    buckets = []

    class Model(Net):
        def on_train_start(self):
            def count(state, bucket):
                buckets.append(self.trainer.global_step)
                return allreduce_hook(None, bucket)
            wrapped.register_comm_hook(None, count)

    from gpulayer.pytorch import runtime
    def prepare(self, module, original=runtime.Runtime.prepare):
        global wrapped
        wrapped = original(self, module)
        return wrapped
    runtime.Runtime.prepare = prepare
    fit = trainer(accumulate_grad_batches=3)
    fit.fit(Model(), DataLoader(samples(14), 1, shuffle=True))
    tell(buckets=buckets, steps=fit.global_step)
    """
    told = Ranks(tmp_path / "ranks", body, 2).check().told()
    assert told["steps"] == 3  # 7 batches per rank
    assert told["buckets"] == [0, 1, 2]


def test_failing_rank_ends_the_others_with_its_traceback(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def training_step(self, batch, batch_idx):
            if RANK == 1 and batch_idx == 1:
                raise ValueError("boom on rank 1")
            return super().training_step(batch, batch_idx)

    trainer(max_epochs=100).fit(Model(), DataLoader(samples(16), 2, shuffle=True))
    """
    ranks = Ranks(tmp_path / "ranks", body, 2)
    assert ranks.codes == [1, 1]
    assert "ValueError: boom on rank 1" in ranks.output[1].strip().splitlines()[-1]


def test_unused_parameters_are_named_with_the_switch(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(2, 2)

    trainer(strategy=os.environ.get("STRATEGY", "ddp")).fit(
        Model(), DataLoader(samples(16), 2, shuffle=True)
    )
    """
    ranks = Ranks(tmp_path / "ranks", body, 2)
    assert ranks.codes == [1, 1]
    last = ranks.output[0].strip().splitlines()[-1]
    assert "spare.weight, spare.bias" in last
    assert "ddp_find_unused_parameters_true" in last
    body = body.replace('"STRATEGY", "ddp"', '"STRATEGY", "ddp_find_unused_parameters_true"')
    Ranks(tmp_path / "searching", body, 2).check()


def test_runtime_for_a_loop_of_ones_own(tmp_path: Path) -> None:
    body = """
    with Runtime("cpu", "bf16-mixed") as runtime:
        model = runtime.prepare(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = runtime.loader(DataLoader(samples(10), 2))
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                with runtime.autocast():
                    loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                runtime.backward(loss)
                runtime.step(optimizer, max_norm=1.0)
        runtime.barrier()
        tell(
            batches=len(loader),
            rows=len(runtime.loader(DataLoader(samples(3)), pad=False)),
            any=[runtime.any(runtime.rank == 1), runtime.any(False)],
            mean=runtime.mean(torch.tensor(float(runtime.rank))).item(),
            sent=runtime.broadcast(torch.tensor(float(runtime.rank + 5)), source=1).item(),
            texts=runtime.gather_text("é" * runtime.rank),
            weight=sum(p.sum().item() for p in model.parameters()),
        )
        try:
            runtime.agree("the answer", runtime.rank)
        except RuntimeError as error:
            assert "rank 0: 0, rank 1: 1" in str(error)
        else:
            raise AssertionError
    assert not torch.distributed.is_initialized()
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    first, second = ranks.told(0), ranks.told(1)
    assert first == second | {"rows": 2}
    assert second["rows"] == 1
    assert (first["batches"], first["any"], first["mean"], first["sent"]) == (
        3, [True, False], 0.5, 6.0,
    )  # fmt: skip
    assert first["texts"] == ["", "é"]


def test_devices_on_this_machine_need_no_mesh(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("batches", torch.zeros(1))

        def training_step(self, batch, batch_idx):
            self.batches += 1
            return super().training_step(batch, batch_idx)

    model = Model()
    fit = trainer(devices=2, max_epochs=2, default_root_dir=None)
    fit.fit(model, DataLoader(samples(16), 2, shuffle=True))
    assert WORLD == 1
    with open("after.txt", "a") as file:
        file.write("once")
    tell(batches=model.batches.item(), steps=fit.global_step, epoch=fit.current_epoch,
         loss=float(fit.callback_metrics["loss"]), logs=str(fit.log_dir))
    """
    ranks = Ranks(tmp_path / "laptop", body, 1).check()
    told = ranks.told()
    assert (told["batches"], told["steps"], told["epoch"]) == (8, 8, 2)
    assert (ranks.path / "after.txt").read_text() == "once"
    with (Path(told["logs"]) / "metrics.csv").open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["loss_epoch"]) == told["loss"]


def test_failure_on_this_machine_ends_the_script_with_its_code(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1:
                sys.exit(7)
            return super().training_step(batch, batch_idx)

    trainer(devices=2).fit(Model(), DataLoader(samples(16), 2, shuffle=True))
    raise AssertionError("not reached")
    """
    ranks = Ranks(tmp_path / "laptop", body, 1)
    assert ranks.codes == [7], ranks.output


def test_ranks_with_different_seeds_share_samples_by_rank_zeros(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path,
        """
        warnings.simplefilter("always")
        seed_everything(5 + RANK)

        class Seen(Net):
            seen, tested = [], []

            def training_step(self, batch, batch_idx):
                self.seen += batch[1].flatten().tolist()
                return super().training_step(batch, batch_idx)

            def test_step(self, batch, batch_idx):
                self.tested += batch[1].flatten().tolist()

        with warnings.catch_warnings(record=True) as caught:
            model = Seen()
            used = trainer()
            used.fit(model, DataLoader(samples(16), 2, shuffle=True))
            used.test(model, DataLoader(samples(16), 2, shuffle=True))
        said = [str(one.message) for one in caught if "seed" in str(one.message)]
        tell(seen=model.seen, tested=model.tested, said=said, all=samples(16).tensors[1].tolist())
        """,
        2,
    ).check()
    told = [ranks.told(rank) for rank in (0, 1)]
    for which in ("seen", "tested"):
        assert sorted(told[0][which] + told[1][which]) == sorted(n for (n,) in told[0]["all"])
    assert told[1]["said"] == []
    assert len(told[0]["said"]) == 2
    assert "differ between ranks (rank 0: 5, rank 1: 6)" in told[0]["said"][0]


def test_ranks_that_read_the_same_data_are_told(tmp_path: Path) -> None:
    body = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([sample for sample in samples(8)][RANK * SHARDED :: 1 + SHARDED])

    caught = {}
    for SHARDED in (0, 1):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trainer().fit(Net(), DataLoader(Stream(), 2))
        caught[SHARDED] = [str(w.message) for w in found if "ranks 0, 1 train on" in str(w.message)]
    tell(equal=len(caught[0]), shared=len(caught[1]))
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    assert ranks.told(0) == {"equal": 1, "shared": 0}
    assert ranks.told(1) == {"equal": 0, "shared": 0}

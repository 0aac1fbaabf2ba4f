"""`Runtime`: the device, the process group, and what several ranks do together.

For scripts with a loop of their own: `prepare` wraps a model for data-parallel training, `loader`
shares out a DataLoader, `autocast`, `backward` and `step` apply the precision. Does not know
modules with hooks, nor where a script was started.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from gpulayer.env import RankEnv, rank_env
from gpulayer.pytorch import data, ending, launching, seeding
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.precision import Precision, canonical

# Inside a job the keeper ends all ranks when one is lost, so a collective may wait: rank 0 may
# validate or download alone for hours. Elsewhere torch's own default of 30 minutes applies.
JOB_TIMEOUT_S = 24 * 3600.0
_KINDS = ("auto", "cpu", "gpu", "cuda", "rocm", "mps")
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Process groups that were closed, kept to the end: a DDP model that holds the last reference to one
# joins its threads with the GIL held, and waits forever for one that wants the GIL (torch 2.13).
_closed: list[Any] = []
_stores = itertools.count()
_LOCAL = RankEnv(
    job=None,
    call=None,
    rank=0,
    local_rank=0,
    world_size=1,
    node_rank=0,
    accelerator=None,
    node=None,
    output_dir=None,
)


def local_kind(accelerator: str) -> str | None:
    """Return what `accelerator` is on this machine: "cuda", "mps", "cpu"; None: not here."""
    if accelerator not in _KINDS:
        raise launching.unknown_accelerator(accelerator)
    present = {
        "cuda": torch.cuda.is_available(),  # on AMD cards too: torch gives them this name
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    wanted = {
        "auto": ("cuda", "mps", "cpu"),
        "gpu": ("cuda", "mps"),
        "rocm": ("cuda",) if torch.version.hip is not None else (),
    }.get(accelerator, (accelerator,))
    return next((kind for kind in wanted if present[kind]), None)


def refuse_mps(kind: str | None, processes: int | str, nodes: int) -> None:
    """Raise where MPS is to be used by more than one process."""
    if kind == "mps" and (nodes > 1 or (processes != "auto" and int(processes) > 1)):
        raise ArgumentError(
            f"mps trains in one process only, not {processes} devices on {nodes} nodes: PyTorch "
            "has no collectives for it",
            hint='use accelerator="cpu", or machines with cuda',
        )


class Runtime:
    """This process's place in a job.

    Args:
        accelerator: "auto" takes what the job was granted, else cuda, mps, cpu.
        precision: "32-true" (default), "bf16-mixed", or on cuda "16-mixed".
        timeout_s: of collectives; default 24 h in a GPUlayer job, else torch's.
        find_unused_parameters: let DDP search for parameters without a gradient at every step.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        precision: str | int | None = None,
        *,
        timeout_s: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        place = rank_env() or _LOCAL
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.world_size = place.world_size
        self.node_rank = place.node_rank
        self.node = place.node
        self._nodes = place.nodes
        self.device = _device(accelerator, place)
        refuse_mps(self.device.type, place.world_size, 1)
        self.precision = Precision(canonical(precision), self.device)
        self._output_dir = place.output_dir
        self._find_unused = find_unused_parameters
        self._owns_group = False
        self._collectives = 0  # begun here, for whoever wants to know who waits for whom
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not dist.is_initialized():
            if timeout_s is None and place.job is not None:
                timeout_s = JOB_TIMEOUT_S
            cuda = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                timeout=None if timeout_s is None else datetime.timedelta(seconds=timeout_s),
                device_id=self.device if cuda else None,
            )
            self._owns_group = True
            ending.pause_at_exit()
            atexit.register(self.close)

    # -- place -------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.precision.scaler

    @property
    def output_dir(self) -> Path:
        """Return the directory whose files come home: $GPULAYER_OUT in a job, else `.`."""
        return self._output_dir or Path.cwd()

    # -- training ----------------------------------------------------------------------------

    def prepare(self, module: nn.Module) -> nn.Module:
        """Move a module to the device and, with several ranks, wrap it for data parallelism."""
        module.to(self.device)
        if self.world_size == 1:
            return module
        return DistributedDataParallel(
            module,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=self._find_unused,
        )

    def equalise(self, module: nn.Module) -> None:
        """Give all ranks rank 0's parameters and buffers, without wrapping the module."""
        if self.world_size > 1:
            with torch.no_grad():
                for tensor in itertools.chain(module.parameters(), module.buffers()):
                    dist.broadcast(tensor, 0)

    def loader(
        self, loader: DataLoader[Any], *, shuffle: bool | None = None, pad: bool = True
    ) -> DataLoader[Any]:
        """Return this rank's share of a loader; call `set_epoch` on its sampler each epoch.

        Args:
            shuffle: default: as the loader does.
            pad: repeat samples so that all ranks have equally many; False for evaluation.
        """
        if self.world_size == 1 or not data.shardable(loader):
            return loader
        return data.shard(
            loader,
            self.rank,
            self.world_size,
            shuffle=not data.sequential(loader) if shuffle is None else shuffle,
            pad=pad,
            seed=seeding.sampler_seed(),
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for forward pass and loss."""
        return self.precision.autocast()

    def backward(self, loss: Tensor) -> None:
        """Run backward, scaled under 16-mixed."""
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> None:
        """Step an optimizer, after clipping its gradients to a 2-norm of `max_norm`."""
        if max_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    # -- together ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self._collectives += 1
            dist.barrier()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the sum, min or max of `tensor` over all ranks; the argument is not changed."""
        tensor = tensor.detach().to(self.device, copy=True)
        if self.world_size > 1:
            self._collectives += 1
            dist.all_reduce(tensor, _OPS[op])
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of `tensor` over all ranks."""
        return self.all_reduce(tensor) / self.world_size

    def any(self, flag: bool) -> bool:
        """Return whether any rank says yes; the same on all. Waits for the device."""
        if self.world_size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(int(flag), device=self.device), "max").item())

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return `source`'s tensor; all ranks pass one of the same shape and type."""
        tensor = tensor.detach().to(self.device, copy=True)
        if self.world_size > 1:
            self._collectives += 1
            dist.broadcast(tensor, source)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, stacked in rank order; all pass one of the same shape."""
        tensor = tensor.detach().to(self.device).contiguous()
        if self.world_size == 1:
            return tensor[None]
        # As bytes: gloo gathers neither bool nor complex.
        mine = tensor.flatten().view(torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._collectives += 1
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).view(tensor.dtype).reshape(-1, *tensor.shape)

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order, on all ranks."""
        if self.world_size == 1:
            return [text]
        # As bytes in tensors: torch's gather of objects would unpickle what peers send.
        mine = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        size = torch.tensor([len(mine)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        self._collectives += 1
        dist.all_gather(sizes, size)
        lengths = [int(one) for one in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine.to(self.device)
        everyone = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return [
            bytes(one[:n].cpu().numpy()).decode()[:-1]
            for one, n in zip(everyone, lengths, strict=True)
        ]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on rank 0; nothing on the others.

        One rank after the other sends, so that rank 0 holds what is gathered once only.
        """
        if self.world_size == 1:
            return [data]
        sizes = [int(text) for text in self.gather_text(str(len(data)))]
        if self.rank > 0:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device), 0)
            return []
        found = [data]
        for rank in range(1, self.world_size):
            received = torch.empty(sizes[rank], dtype=torch.uint8, device=self.device)
            dist.recv(received, rank)
            found.append(received.cpu().numpy().tobytes())
        return found

    def agree(self, what: str, value: Any) -> None:
        """Raise on all ranks where a value that must be equal is not."""
        agreed(what, gathered(self, value))

    def store(self, name: str) -> Any:
        """Return a new `torch.distributed.Store` that all ranks share; None for a single rank.

        Every rank must ask, for equal names in the same order.
        """
        if self.world_size == 1:
            return None
        # A connection of its own: a thread that waits in the group's would hold up the group.
        group: Any = dist.group.WORLD
        shared = group.get_group_store().clone()
        return PrefixStore(f"{name}/{next(_stores)}", shared)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the process group if this runtime opened it. May be called twice."""
        if not self._owns_group:
            return
        self._owns_group = False
        atexit.unregister(self.close)
        if dist.is_initialized():
            _closed.append(dist.group.WORLD)
            dist.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def gathered(runtime: Runtime, value: Any) -> list[Any]:
    """Return what every rank has, in rank order, on all ranks; it must be plain data."""
    return [json.loads(text) for text in runtime.gather_text(json.dumps(value))]


def agreed(what: str, everyone: list[Any]) -> None:
    """Raise where a value that must be equal on all ranks is not."""
    if any(one != everyone[0] for one in everyone):
        raise RuntimeError(f"{what} differs between ranks: {by_rank(everyone)}")


def by_rank(everyone: list[Any]) -> str:
    """Return what every rank has, in words."""
    return ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(everyone))


def _device(accelerator: str, place: RankEnv) -> torch.device:
    if accelerator == "auto" and place.accelerator is not None:
        accelerator = place.accelerator
    kind = local_kind(accelerator)
    if kind is None:
        raise ArgumentError(
            f"accelerator {accelerator!r} is not on this machine"
            + (f" ({place.node})" if place.node else "")
        )
    if kind != "cuda":
        return torch.device(kind)
    # A rank that was given its own card alone sees it as number 0.
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())

"""`shortcuts` against torch's own methods: gradients, errors, and that overriding them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpulayer.pytorch import Module, Trainer, shortcuts


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def raised(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "scalar": lambda net: net(torch.ones(4, 3)).square().mean(),
    "one element": lambda net: net(torch.ones(1, 3)),
    "several elements": lambda net: net(torch.ones(4, 3)),
    "small": lambda net: net(torch.ones(4, 3)).sum() * 1e-38,
    "nan": lambda net: net(torch.ones(4, 3)).sum().log() * float("nan"),
    "double": lambda net: net(torch.ones(4, 3)).double().sum(),
    "bfloat16": lambda net: net(torch.ones(4, 3)).bfloat16().sum(),
    "complex": lambda net: net(torch.ones(4, 3)).sum() * 1j,
    "integer": lambda net: torch.tensor(1),
    "no gradient": lambda net: torch.tensor(1.0),
    "leaf": lambda net: next(net.parameters()),
    "parameter": lambda net: nn.Parameter(torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("divisor", [1, 3, 7, 64])
def test_backward_is_the_one_of_the_tensor(
    name: str, hooked: bool, before: bool, divisor: int
) -> None:
    def outcome(backward: Callable[[Tensor], None]) -> Any:
        net = network()
        if before:  # gradients add up
            LOSSES["scalar"](net).backward()  # type: ignore[no-untyped-call]
        loss = LOSSES[name](net)
        if hooked and loss.requires_grad:
            loss.register_hook(lambda grad: grad.mul_(3))  # type: ignore[no-untyped-call]
        result = raised(lambda: backward(loss))
        again = raised(lambda: backward(loss))  # the graph is freed
        grads = [None if p.grad is None else repr(p.grad.tolist()) for p in net.parameters()]
        return result, again, grads, None if not loss.is_leaf else repr(loss.grad)

    def plainly(loss: Tensor) -> None:
        (loss if divisor == 1 else loss / divisor).backward()  # type: ignore[no-untyped-call]

    assert outcome(lambda loss: shortcuts.backward(loss, divisor)) == outcome(plainly)


def test_changed_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    loss = LOSSES["scalar"](network())
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "backward", lambda self: calls.append("tensor"))
        shortcuts.backward(loss)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", lambda *args, **more: calls.append("autograd"))
        shortcuts.backward(loss)
    with monkeypatch.context() as patch:
        patch.setattr(shortcuts, "_run_backward", None)  # a torch without it
        patch.setattr(Tensor, "backward", lambda self: calls.append("torch's"))
        shortcuts.backward(loss)
    assert calls == ["tensor", "autograd", "torch's"]


def test_backward_of_a_subclass_and_under_a_mode_is_seen() -> None:
    seen = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), more: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, kinds, args, more or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, kinds: Any, args: Any = (), more: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(more or {}))

    loss = LOSSES["scalar"](network())
    shortcuts.backward(loss.as_subclass(Watched))
    assert seen.count(Tensor.backward) == 1
    seen.clear()
    loss = LOSSES["scalar"](network())
    with Mode():
        shortcuts.backward(loss)
    assert seen.count(Tensor.backward) == 1


def test_zero_grad_forgets_gradients_of_every_group() -> None:
    net = network()
    first, *others = net.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)
    LOSSES["scalar"](net).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in net.parameters())
    shortcuts.zero_grad(optimizer)
    assert all(p.grad is None for p in net.parameters())


def test_own_zero_grad_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("class")

    shortcuts.zero_grad(Own(network().parameters(), lr=0.1))
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer.zero_grad = lambda set_to_none=True: calls.append("instance")  # type: ignore[method-assign]
    shortcuts.zero_grad(optimizer)
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: calls.append("torch"))
    shortcuts.zero_grad(torch.optim.SGD(network().parameters(), lr=0.1))
    assert calls == ["class", "instance", "torch"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore")
def test_fit_is_the_one_of_torchs_methods(
    name: str, window: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            told.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    class Shown(Net):
        def on_before_backward(self, loss: Any) -> None:
            assert (loss.grad_fn.name() == "DivBackward0") == (window > 1)

    def run(kind: type[Net] = Net) -> Any:
        told.clear()
        model = kind()
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, accumulate_grad_batches=window, precision=precision,
        )  # fmt: skip
        torch.manual_seed(2)
        trainer.fit(model, torch.randn(7, 4, 3))
        return (
            [p.tolist() for p in model.parameters()],
            [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            repr(trainer.optimizers[0].state_dict()),
            list(told),
        )

    told: list[float] = []
    found = run()
    assert run(Shown) == found
    assert len(found[-1]) == 14
    monkeypatch.setattr(shortcuts, "backward", lambda loss, n: (loss / n).backward())
    monkeypatch.setattr(shortcuts, "zero_grad", lambda optimizer: optimizer.zero_grad())
    assert run() == found

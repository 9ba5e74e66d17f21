"""One case: a model, spread over ranks, trained in eager mode and compiled with the same data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .models import MODELS
from .wraps import WRAPS

__all__ = ["VARIANTS", "Answer", "Case", "compare"]

VARIANTS = ("static", "dynamic", "checkpoint", "accumulate", "restored", "autocast")

#: Batch sizes and lengths of the steps, where they change.
_SIZES = ((4, 8), (4, 12), (6, 8), (6, 12), (2, 10), (4, 8))

#: In float64; and under autocast to bfloat16, of whose rounding each way has its own, how much worse than eager mode.
_TOLERANCE, _ROUNDED = 1e-12, 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """Names of a model, of a way to spread it over ranks, and of what else is asked of it."""

    model: str
    wrap: str
    variant: str

    def __str__(self) -> str:
        return f"{self.model}/{self.wrap}/{self.variant}"

    @staticmethod
    def of(text: str) -> Case:
        """From its text."""
        return Case(*text.split("/"))

    @property
    def ranks(self) -> int:
        """How many processes it needs."""
        return WRAPS[self.wrap].ranks

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as equal; see :class:`Answer`."""
        return _ROUNDED if self.variant == "autocast" else _TOLERANCE

    def possible(self) -> bool:
        """Whether there is such a thing."""
        wrap = WRAPS[self.wrap]
        return self.variant in (wrap.variants or VARIANTS) and wrap.fits(MODELS[self.model])


@dataclass(frozen=True, slots=True)
class Answer:
    """``difference``: the largest of losses, parameters and buffers, as a share of what eager mode has, at least 1;
    under autocast instead how far all of them are from those of a training in float64, as a share of eager mode's.
    ``graphs``: that were compiled. ``collectives``: in these graphs. ``eager``: why graphs ran in eager mode."""

    difference: float
    graphs: int
    collectives: int
    eager: list[str]


def compare(case: Case, steps: int, folder: Path, options: dict[str, Any]) -> Answer:
    """Train both ways. Raises whatever a compile raises."""
    import aotkit

    with _settings(case):
        want = _train(case, steps, folder / "eager", None)
        torch._dynamo.reset()
        recorder = aotkit.Recorder()
        dynamic = case.variant == "dynamic"
        chosen = {"rank_timeout": 60, **options, "observer": recorder}

        def compiled(net: nn.Module) -> Callable[..., Any]:
            return torch.compile(net, backend="aotkit", dynamic=dynamic, options=chosen)

        with _backward(case, lambda graph: torch.compile(graph, backend="aotkit", dynamic=dynamic, options=chosen)):
            got = _train(case, steps, folder / "compiled", compiled)
    if case.variant == "autocast":
        exact = _train(replace(case, variant="static"), steps, folder / "exact", None)
        difference = _error(got, exact) / _error(want, exact)
    else:
        pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
        difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
    externs = [call for graph in recorder.graphs for call in getattr(graph.report, "externs", ())]
    collectives = sum(call.count for call in externs if "c10d" in call.target and "wait" not in call.target)
    return Answer(difference, len(recorder.graphs), collectives, sorted(set(recorder.fallbacks)))


def _error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5


@contextlib.contextmanager
def _settings(case: Case) -> Iterator[None]:
    with torch._dynamo.config.patch(**WRAPS[case.wrap].settings):
        yield


def _backward(case: Case, compiler: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Where the backward pass is compiled as a whole, if it is."""
    from torch._dynamo import compiled_autograd

    if not WRAPS[case.wrap].compiles_backward:
        return contextlib.nullcontext()
    return compiled_autograd._enable(compiler)


class _Trainer:
    """A model, spread over ranks, with its optimizer."""

    def __init__(self, case: Case, compiled: Callable[[nn.Module], Callable[..., Any]] | None) -> None:
        self.case, self.model, self.wrap = case, MODELS[case.model], WRAPS[case.wrap]
        torch.manual_seed(0)
        mesh = self.wrap.mesh()
        net = self.model.build()
        if case.variant == "autocast":
            net = net.float()  # of float64 nothing is cast
        net = self.wrap.divide(net, self.model, mesh)
        if case.variant == "checkpoint":
            _checkpoint(self.model.blocks(net))
        self.net = self.wrap.apply(net, self.model, mesh)
        self.run = self.net if compiled is None else compiled(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def step(self, number: int) -> torch.Tensor:
        """One step of the optimizer; the loss."""
        self.optimizer.zero_grad()
        parts = 2 if self.case.variant == "accumulate" else 1
        total = torch.zeros((), dtype=torch.float64)
        for part in range(parts):
            with self._exchanging(part + 1 == parts):
                total += self._forward_backward(number, part) / parts
        self.optimizer.step()
        return total

    def _exchanging(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """Where gradients are exchanged, or wait for those of another batch; in the graph they wait for nobody."""
        return contextlib.nullcontext() if now or self.wrap.waits is None else self.wrap.waits(self.net)

    def _forward_backward(self, number: int, part: int) -> torch.Tensor:
        each = dist.get_world_size() // self.wrap.data_ranks
        torch.manual_seed(1000 * number + 100 * part + dist.get_rank() // each)
        size = _SIZES[number % len(_SIZES)] if self.case.variant == "dynamic" else _SIZES[0]
        x, labels = self.model.batch(*size)
        rounded = self.case.variant == "autocast"
        x = x.float() if rounded and x.is_floating_point() else x
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            loss = self.model.loss(self.run(x), labels)
        (loss if self.wrap.averages else loss / self.wrap.data_ranks).backward()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """For `torch.distributed.checkpoint`."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if self.wrap.by_rank:
            return {f"rank{dist.get_rank()}": dict(self._own_tensors())}
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _parameters(self) -> Sequence[torch.Tensor]:
        """Not the module's: torch takes those that are split from it while it is in DDP."""
        return list(self.optimizer.param_groups[0]["params"])

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has, momentum too."""
        for number, parameter in enumerate(self._parameters()):
            own = self.optimizer.state[parameter]
            momentum = own.setdefault("momentum_buffer", torch.zeros_like(parameter))
            yield f"parameter{number}", _local(parameter.data)
            yield f"momentum{number}", _local(momentum)
        for number, buffer in enumerate(self.net.buffers()):
            yield f"buffer{number}", buffer

    def restore(self, folder: Path) -> None:
        """What another one saved there."""
        import torch.distributed.checkpoint as saved
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        saved.load(state, checkpoint_id=str(folder))
        if self.wrap.by_rank:  # loaded in place
            return
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers."""
        for value in (*self._parameters(), *self.net.buffers()):
            yield (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def _local(value: Any) -> torch.Tensor:
    """This rank's part, or all of it, in the same memory."""
    return value.to_local() if hasattr(value, "to_local") else value


def _train(
    case: Case, steps: int, folder: Path, compiled: Callable[[nn.Module], Callable[..., Any]] | None
) -> Sequence[torch.Tensor]:
    """Losses, and then all that the model holds."""
    import torch.distributed.checkpoint as saved

    trainer, losses = _Trainer(case, compiled), []
    for number in range(steps):
        if case.variant == "restored" and number == steps // 2:
            saved.save(trainer.state(), checkpoint_id=str(folder))
            trainer = _Trainer(case, compiled)
            trainer.restore(folder)
        losses.append(trainer.step(number))
    return [torch.stack(losses), *trainer.whole()]


def _checkpoint(blocks: Sequence[tuple[nn.Module, str]]) -> None:
    """Each block is computed again in the backward. Batch norms update their running statistics a second time then."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for holder, name in blocks:
        setattr(holder, name, checkpoint_wrapper(holder.get_submodule(name)))

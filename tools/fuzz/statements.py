"""What statements of programs are made of: templates over a name ``X`` and another name ``Y``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPUTE", "DETACHED_WRITES", "RANDOM", "RANDOM_WRITES", "RARE_WRITES", "RESHAPES", "VIEWS_BY_KIND"]
__all__ += ["VIEW_WRITES", "WRITES", "Statement"]

COMPUTE = (
    "X * 2", "X + 1", "X + Y", "X * Y", "X - Y", "X.sin()", "X.tanh()", "X.sum()", "X.clone()", "X.contiguous()",
    "torch.where(X != 0, X, Y)", "X.sum(0)", "X.to(torch.float64)", "X.to(torch.float32)", "torch.zeros(4)", "-X",
    "X.neg()", "torch.cat([X, Y])", "torch.stack([X, Y])", "X.flip(0)", "torch.empty_like(X).copy_(Y)", "X.clone().t()",
    "torch.ones(3, 4)", "X.matmul(Y)", "X.cumsum(0)", "X.clone().detach()", "X.abs()", "torch.zeros_like(X)",
    "X.clone().square()", "X.clone().sin()", "X.mT.clone() * Y", "X.clone() * X.clone()", "X.clone().tanh()",
    "X.mean(-1, keepdim=True)", "X.square()", "X.repeat(2, 1)", "X.new_ones(4)", "X.logcumsumexp(0)",
    "X.conj() * Y", "torch._neg_view(X) + Y", "X.conj().imag + 1", "X.resolve_conj()", "X.conj().matmul(Y)",
)  # fmt: skip

#: Draws of random numbers; most are made in the order in which the elements lie in memory.
RANDOM = (
    "torch.nn.functional.dropout(X, 0.5)", "torch.rand_like(X)", "torch.randn_like(X)",
    "torch.bernoulli(X.sin().abs())",
    "torch.poisson(X.abs())", "torch.nn.functional.dropout(X.mT, 0.25)", "torch.rand_like(X.mT)", "X.clone().normal_()",
    "torch.randint_like(X, 9)", "torch.nn.functional.alpha_dropout(X, 0.5)", "torch.empty_like(X).uniform_()",
    "torch.nn.functional.dropout1d(X, 0.5)", "torch.rand_like(X[..., ::2])",
)  # fmt: skip
RANDOM_WRITES = (
    "X.bernoulli_(0.5)", "X.bernoulli_(Y.sin().abs())", "X.normal_()", "X.uniform_(1, 2)", "X.exponential_()",
    "X.random_(0, 9)", "X.copy_(torch.rand_like(X))", "X.geometric_(0.5)", "X.log_normal_()", "X.cauchy_()",
)  # fmt: skip

#: What eager does with X itself; whether X is a view decides what kind of write it is.
WRITES = (
    "X.add_(1)", "X.mul_(2)", "X.mul_(Y)", "X.add_(Y)", "X.copy_(Y)", "X.zero_()", "X.fill_(0.5)", "X.sin_()",
    "X.index_put_((torch.arange(2),), Y)", "X.index_fill_(0, torch.arange(1), 0.5)", "X.masked_fill_(X != 0, 0.25)",
    "X.clamp_(min=0)", "X.neg_()", "X.addcmul_(X, Y)", "X.copy_(X.flip(0))", "X.sub_(Y)", "X.lerp_(Y, 0.5)",
    "X.add_(Y, alpha=2)", "X.square_()", "X[:] = Y", "X.copy_(X.clone())",
)  # fmt: skip
VIEW_WRITES = (
    "X[1:] = Y", "X[0] = 1", "X[0] = Y", "X[..., ::2] = 0.25", "X[..., 0] = Y", "X[:2].add_(Y)", "X[1:].mul_(2)",
    "X.t().mul_(2)", "X.view(-1)[0] = 2", "X.diagonal().zero_()", "X.t().copy_(Y)", "X.unbind(0)[0].add_(Y)",
    "X.swapaxes(0, 1).sin_()", "X.flatten().add_(1)", "X.unsqueeze(0).mul_(2)", "X[..., 1:].t().add_(1)",
    "X.select(-1, 0).copy_(Y)", "X.narrow(0, 0, 2).mul_(Y)", "X.split(2)[0].add_(1)",
    "torch._neg_view(X).mul_(2)", "torch._neg_view(X)[0] = Y", "X.conj().mul_(2)", "X.conj()[..., 0] = Y",
    "X.conj().imag.add_(1)", "X[1 - X.size(0)] = Y", "X[X.size(0) - 5] = 1", "X[1 - X.size(0):].add_(1)",
    "X.narrow(0, 1 - X.size(0), 1).mul_(2)",
)  # fmt: skip
DETACHED_WRITES = (
    "X.detach().mul_(2)", "X.detach().copy_(Y)", "X.data.add_(1)", "X.detach()[0] = 2", "X.detach().add_(Y)",
    "X.data.mul_(2)", "X.data.copy_(Y)",
)  # fmt: skip
#: Refused by design, or refused by eager itself most of the time; tried rarely.
RARE_WRITES = ("torch.add(X, 1, out=Y)",)

VIEWS_BY_KIND: dict[str, tuple[str, ...]] = {
    "flatten": ("X.view(-1)", "X.reshape(-1)", "X.flatten()", "X.view(2, -1)", "X.reshape(2, -1)", "X.view_as(X)"),
    "slice": ("X[1:]", "X[:, 1:]", "X[:2]", "X.narrow(0, 0, 2)", "X[..., :-1]", "X[:]"),
    "step": ("X[..., ::2]", "X[::2]", "X[1::2]"),
    "select": ("X[0]", "X.select(0, 1)", "X[-1]", "X.select(-1, 1)", "X[..., 0]"),
    "transpose": ("X.t()", "X.permute(1, 0)", "X.transpose(0, 1)", "X.swapaxes(0, -1)", "X.permute(2, 0, 1)", "X.mT"),
    "size one": ("X.unsqueeze(0)", "X.squeeze()", "X[None]", "X[:, None]", "X.unsqueeze(-1)", "X.squeeze(0)"),
    "expand": (
        "X.expand(2, 4)", "X.unsqueeze(-1).expand(3, 4, 2)", "X.expand_as(Y)", "X.expand_as(X)",
        "X.unsqueeze(0).expand(2, 3, 4)", "X.unsqueeze(0).expand(1, 3, 4)", "X.unsqueeze(0).expand(2, 4)",
    ),
    "diagonal": ("X.diagonal()", "X.diagonal(1)", "X.diagonal(-1)"),
    "as_strided": ("X.as_strided((2, 2), (2, 1))", "X.as_strided((3,), (1,), 1)", "X.as_strided((2,), (2,))"),
    "multi": ("X.unbind(0)[0]", "X.unbind(0)[-1]", "X.split(2)[0]", "X.chunk(2, -1)[-1]", "X.tensor_split(2)[1]"),
    "detach": ("X.detach()", "X.data"),
    "dtype": (
        "torch.view_as_real(torch.view_as_complex(X))", "X.view(torch.int32)", "torch.view_as_real(X)", "X.real",
        "X.imag", "X.view(torch.float32)",
    ),
    "lazy": ("torch._neg_view(X)", "X.conj()", "X.conj().imag", "X.mH", "torch._neg_view(X)[1:]", "X.conj().real"),
    "position": (
        "X[1 - X.size(0)]", "X[X.size(0) - 5]", "X[1 - X.size(0):]", "X[:1 - X.size(0)]", "X[..., -X.size(-1)]",
        "X.narrow(0, 1 - X.size(0), 1)", "X.select(0, -X.size(0))", "X[X.size(0) - 6:X.size(0) - 1]",
        "X.diagonal(1 - X.size(0))",
    ),
    "unfold": ("X.unfold(0, 2, 2)", "X.unfold(-1, 2, 2)", "X.unfold(0, 2, 1)", "X.unfold(-1, 1, 1)"),
}  # fmt: skip

RESHAPES = (
    "X.t_()", "X.unsqueeze_(0)", "X.squeeze_()", "X.transpose_(0, 1)", "X.unsqueeze_(-1)", "X.swapaxes_(0, -1)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statement:
    """``role``: compute, view or write; ``kind`` of view or write, empty: decided by what ``target`` is."""

    text: str
    role: str = "compute"
    kind: str = ""
    target: str = ""

    def under_no_grad(self) -> Statement:
        return Statement(f"with torch.no_grad():\n    {self.text}", self.role, self.kind, self.target)

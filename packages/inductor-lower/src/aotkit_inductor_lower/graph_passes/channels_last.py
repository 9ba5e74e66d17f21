"""Pass: convolutions read and write images with their channels together.

Before ``convolution(x, w)`` of contiguous tensors. After ``convolution(clone(x, channels_last), clone(w,
channels_last))``; elementwise ops, norms and pooling follow the layout of what they read, and what leaves the graph, or
goes into an op that might look at strides, gets the layout that it had. oneDNN otherwise reorders around each
convolution, and kernels of ours need it. Requires images of float32 or bfloat16 on the CPU, and that few images need a
copy (``_MOST_COPIED``).

A joint graph of a forward and a backward is laid out before it is split, so that both agree about what is saved: a
gradient of a convolution is another that reads and writes images with their channels together. Weights are reordered
for that once each step, and their gradients get the layout of the weights.

Note [Layouts as a plan]
    The strides of what follows are those of ATen's own fake kernels, run again on the new arguments, or are known. They
    are first computed for the whole graph, so that it stays as it is where the copies would cost more than they save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node, map_arg

from ..ops.aten import is_view
from ..passes import Pass, PassContext
from ..target import Capabilities, on_host
from .node_facts import before_writes, escaping_nodes
from .rewriting import rewriting

__all__ = ["JOINT_PASS", "PASS", "gains_in_training", "has_convolutions", "prefer_channels_last"]

aten = torch.ops.aten
_CONVOLUTION = aten.convolution.default
_BACKWARD = aten.convolution_backward.default
_NORM = aten._native_batch_norm_legit_no_training.default
_MOST_COPIED = 0.25  # copied bytes of images, as a share of what the convolutions read and write
_HEAVY = 2.0  # times the size of its images, see :func:`_is_heavy`
_OWN_PART = 0.2  # of the images, see :func:`gains_in_training`
_FEW_TAPS, _CHANNELS = 9, 64
_TYPES = torch.float32, torch.bfloat16
_NAMES = """
    native_batch_norm _native_batch_norm_legit max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d mean sum amax cat
    permute transpose unsqueeze squeeze slice select expand clone copy_ upsample_nearest2d upsample_bilinear2d
    constant_pad_nd relu _native_batch_norm_legit_no_training convolution _native_batch_norm_legit_functional
    native_batch_norm_backward max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward
    upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward
    convolution_backward native_layer_norm native_layer_norm_backward view _unsafe_view _unsafe_index mm addmm bmm
    linalg_vector_norm var_mean var
"""
_IMAGE_TO_IMAGE = frozenset((aten._unsafe_index.Tensor, aten.constant_pad_nd.default))
_VIEWS_OF_SIZES = frozenset((aten.view.default, aten._unsafe_view.default))
# Elementwise, though not all of their tags say so.
_GRADIENTS = """
    hardtanh_backward threshold_backward leaky_relu_backward elu_backward hardswish_backward hardsigmoid_backward
    gelu_backward silu_backward mish_backward softplus_backward sigmoid_backward tanh_backward
"""


def _overloads(names: str) -> frozenset[torch._ops.OpOverload]:
    packets = (getattr(aten, name) for name in names.split())
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_FOLLOWS, _ELEMENTWISE = _overloads(_NAMES), _overloads(_GRADIENTS)


def has_convolutions(graph: Graph) -> bool:
    """Whether there is anything to lay out."""
    return bool(graph.find_nodes(op="call_function", target=_CONVOLUTION))


def gains_in_training(graph: Graph, target: Capabilities) -> bool:
    """Whether a joint graph of a forward and a backward is faster with channels together: where those convolutions that
    are faster in that layout read and write a large part of all images. (Measured by `python -m tools.bench --modes
    train --models mobilenet unet resnet` with and without `AOTKIT_DISABLE=channels-last`: in float32 on a processor
    with AMX MobileNetV2 and a U-Net gain a fifth, a ResNet of few channels nothing; on Zen 4 the ResNet gains a fifth
    and the U-Net a thirtieth of its memory; with `--precision autocast` all three gain 40 to 60 % on a processor with
    AMX, 20 to 40 % on one that has only AVX-512's bfloat16.)"""
    own = every = 0
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        if _suits(node):
            size = sum(map(_numel, _images(node)))
            every += size
            own += size if _has_kernel(node, target) else 0
    return own > _OWN_PART * every


def _has_kernel(node: Node, target: Capabilities) -> bool:
    results, of_group, *taps = (_known(size) for size in _value(node.args[1]).shape)
    groups, tiled = node.args[8], any(form.startswith("amx") for form in target.contraction_forms)
    if _value(node).dtype is torch.bfloat16:  # oneDNN's own
        return target.narrow_convolutions
    if groups == 1 and target.wide_convolutions:
        return True
    if groups != 1:
        return of_group == 1 and taps[0] * taps[1] <= _FEW_TAPS
    return tiled and results >= _CHANNELS and of_group >= _CHANNELS and taps[0] * taps[1] > 1


def prefer_channels_last(graph: Graph, fuel: int) -> int:
    """Run the pass; 1 if the graph was changed."""
    convolutions = [node for node in graph.nodes if node.target in (_CONVOLUTION, _BACKWARD) and _suits(node)]
    if fuel < 1 or not convolutions or not torch.backends.mkldnn.is_available():
        return 0
    if not set(convolutions) <= set(before_writes(graph)):
        return 0  # a copy must not be made of another value than was convolved
    plan = _Plan(graph, frozenset(convolutions))
    if not plan.make():
        return 0
    plan.apply()
    return 1


def _suits(node: Node) -> bool:
    """Whether oneDNN runs this convolution, on images of more than one place, and gains by the layout.

    Groups of several channels do not, so they only follow.
    """
    first = _first_tensor(node)
    values: list[Any] = [arg.meta.get("val") for arg in node.args[: first + 2] if isinstance(arg, Node)]
    if not all(isinstance(v, torch.Tensor) and v.dim() == 4 and v.dtype in _TYPES for v in values):
        return False
    image, transposed, groups = values[first], *(node.args[first + place] for place in (6, 8))
    values = values[first:]
    if not on_host(image) or transposed or not (groups == 1 or values[1].shape[1] == 1):
        return False
    return not (any(isinstance(size, int) and size == 1 for size in image.shape[2:]) or _is_heavy(node))


def _is_heavy(node: Node) -> bool:
    """Whether a convolution has weights that are much larger than its images, as in the last stages of a network.

    They would be reordered twice in each step, and their gradients once; to reorder the images is little beside that.
    """
    image, weight = (_value(arg) for arg in node.args[_first_tensor(node) : _first_tensor(node) + 2])
    if weight.dim() != 4 or weight.is_contiguous(memory_format=torch.channels_last):
        return False
    result = node.meta["val"] if node.target is _CONVOLUTION else _value(node.args[0])
    return _numel(weight) > _HEAVY * (_numel(image) + _numel(result))


class _Plan:
    """New fake values of nodes, and copies to be made: (source, memory format) -> nodes that read the copy."""

    def __init__(self, graph: Graph, convolutions: frozenset[Node]) -> None:
        self.graph = graph
        self.convolutions = convolutions
        self.values: dict[Node, Any] = {}
        self.copies: dict[tuple[Node, torch.memory_format], list[Node]] = {}
        first = _value(next(iter(convolutions)).args[0])
        self.mode = first.fake_mode if isinstance(first, FakeTensor) else None

    def make(self) -> bool:
        """Whether the new layout is possible and pays."""
        if self.mode is None or any(_depends_on_data(node.meta.get("val")) for node in self.graph.nodes):
            return False
        env = self.mode.shape_env
        with self.mode, nullcontext() if env is None else env.suppress_guards(), torch.no_grad():
            possible = all(self._visit(node) for node in self.graph.nodes)
        return (
            possible
            and bool(self.values or self.copies)
            and self._copied_bytes() <= _MOST_COPIED * self._convolved_bytes()
        )

    def _visit(self, node: Node) -> bool:
        if node in self.convolutions:
            for arg in dict.fromkeys(node.args[: _first_tensor(node) + 2]):
                assert isinstance(arg, Node)
                self._in_format(arg, node)
            self._note(node, _with_channels_together(node.meta["val"]))
            return True
        changed = [arg for arg in node.all_input_nodes if arg in self.values]
        if not changed:
            return True
        if node.target in (_CONVOLUTION, _BACKWARD) and _is_heavy(node):
            return all(self._restore(arg, node) for arg in changed)
        if node.op == "call_function" and (node.target in _FOLLOWS or _is_elementwise(node) or _is_getitem(node)):
            if self._run(node):
                return True
        elif node.op == "output" and not self._own_memory(changed):
            return False
        return all(self._restore(arg, node) for arg in changed)

    def _in_format(self, arg: Node, reader: Node) -> None:
        if not self.values.get(arg, arg.meta["val"]).is_contiguous(memory_format=torch.channels_last):
            self.copies.setdefault((arg, torch.channels_last), []).append(reader)

    def _restore(self, arg: Node, reader: Node) -> bool:
        old = arg.meta["val"]
        if not isinstance(old, torch.Tensor):
            return False
        for layout in (torch.contiguous_format, torch.channels_last):
            if (layout is torch.contiguous_format or old.dim() == 4) and old.is_contiguous(memory_format=layout):
                self.copies.setdefault((arg, layout), []).append(reader)
                return True
        return False

    def _run(self, node: Node) -> bool:
        """Follow the layout of the arguments; ``False`` where these can't be viewed that way."""

        def value(arg: Node) -> Any:
            return self.values.get(arg, arg.meta.get("val"))

        new = _of_same_layout(node, value)
        if new is None:
            assert callable(node.target)
            try:
                new = node.target(*map_arg(node.args, value), **map_arg(node.kwargs, value))
            except (RuntimeError, ValueError):
                if node.target not in _VIEWS_OF_SIZES:
                    raise
                return False
        self._note(node, new)
        return True

    def _note(self, node: Node, new: Any) -> None:
        if _strides(new) != _strides(node.meta.get("val")):
            self.values[node] = _with_strides_of(node.meta["val"], new)

    def _own_memory(self, returned: list[Node]) -> bool:
        """Whether no two outputs share the memory of one of these: a copy for each would part them."""
        escaping = escaping_nodes(self.graph)
        views = (user for node in returned for user in node.users if user in escaping)
        return not any(_is_view(node) for node in returned) and not any(_is_view(user) for user in views)

    def _copied_bytes(self) -> int:
        return sum(_numel(_value(source)) for (source, _) in self.copies if not _is_weight(source))

    def _convolved_bytes(self) -> int:
        return sum(_numel(arg) for node in self.convolutions for arg in _images(node))

    def apply(self) -> None:
        """Change the graph."""
        for node, value in self.values.items():
            node.meta["val"] = value
        for (source, memory_format), readers in self.copies.items():
            again = [reader for reader in readers if reader.target is _BACKWARD and source.op == "placeholder"]
            once = [reader for reader in readers if reader not in again]
            if once:
                self._copy(source, memory_format, once)
            if again:
                self._copy(source, memory_format, again, in_backward=bool(once))

    def _copy(
        self, source: Node, memory_format: torch.memory_format, readers: list[Node], in_backward: bool = False
    ) -> None:
        """A copy before the first of its readers. What is copied of an input is copied again in a backward: the input
        is there for nothing, while a copy would be memory that the forward leaves to it."""
        with self.graph.inserting_before(readers[0]):
            copy = self.graph.call_function(aten.clone.default, (source,), {"memory_format": memory_format})
        if source.op != "placeholder":
            copy.meta.update(source.meta)
        if in_backward:
            copy.meta["partitioner_tag"] = "must_be_in_backward"
        assert self.mode is not None
        with self.mode, torch.no_grad():
            copy.meta["val"] = _like(source.meta["val"], memory_format)
        for reader in readers:
            reader.replace_input_with(source, copy)


def _of_same_layout(node: Node, value: Callable[[Node], Any]) -> Any:
    """What needs no fake kernel: elementwise ops on images laid out alike, norms, parts of tuples. Else None."""
    old: Any = node.meta.get("val")
    if _is_getitem(node):
        return value(node.args[0])[node.args[1]]  # type: ignore[arg-type,index]
    if node.target is _NORM:
        image = value(node.args[0])  # type: ignore[arg-type]
        return (_laid_out(old[0], image.stride()), *old[1:])
    if node.target in _IMAGE_TO_IMAGE:  # their fake kernels refuse symbolic sizes, some of them
        (first, *_) = node.args
        images = _is_image(old) and isinstance(first, Node) and _is_image(value(first))
        return _like(old, torch.channels_last) if images else None
    if not _is_elementwise(node) or not isinstance(old, torch.Tensor) or "memory_format" in node.kwargs:
        return None
    given = [i for i in map(value, node.all_input_nodes) if isinstance(i, torch.Tensor)]  # and numbers, in `div`
    if any(tuple(i.shape) != tuple(old.shape) or i.stride() != given[0].stride() for i in given):
        return None
    return _laid_out(old, given[0].stride())


def _is_image(value: Any) -> bool:
    """Whether it has four dimensions. (One whose layout changed has its channels together.)"""
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _with_strides_of(old: Any, new: Any) -> Any:
    """What was there, laid out anew. Types stay: ATen's fake kernel of a batch norm says that statistics of bfloat16
    images are bfloat16, while its real one writes float32."""
    if isinstance(old, torch.Tensor):
        return _laid_out(old, new.stride()) if old.stride() != new.stride() else old
    return tuple(map(_with_strides_of, old, new)) if isinstance(old, list | tuple) else old


def _laid_out(value: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _like(value: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device, memory_format=memory_format)


def _first_tensor(node: Node) -> int:
    """The place of the image among the arguments: a gradient has that of the result before it."""
    return int(node.target is _BACKWARD)


def _images(node: Node) -> list[torch.Tensor]:
    """What a convolution or its gradients read and write, weights apart."""
    if node.target is _CONVOLUTION:
        return [_value(node.args[0]), node.meta["val"]]
    written = node.meta["val"][0]
    return [_value(node.args[0]), _value(node.args[1]), *([] if written is None else [written])]


def _value(arg: Any) -> Any:
    return arg.meta["val"]


def _with_channels_together(value: Any) -> Any:
    """Images and weights in that layout; what has other dimensions as it is."""
    if isinstance(value, torch.Tensor):
        return _like(value, torch.channels_last) if value.dim() == 4 else value
    return tuple(map(_with_channels_together, value)) if isinstance(value, list | tuple) else value


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    tagged = torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags
    return bool(tagged) or target in _ELEMENTWISE


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and not _is_getitem(node) and is_view(node)


def _is_weight(node: Node) -> bool:
    """Whether it is a weight of convolutions only, or the gradient of one: small beside what it is applied to."""
    if _is_getitem(node):
        (source, number) = node.args
        return isinstance(source, Node) and source.target is _BACKWARD and number in (1,)
    return all(
        user.target in (_CONVOLUTION, _BACKWARD) and node not in user.args[: _first_tensor(user) + 1]
        for user in node.users
    )


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.stride())
    return tuple(map(_strides, value)) if isinstance(value, list | tuple) else None


def _depends_on_data(value: Any) -> bool:
    """Whether a size or a number has no known value, so that nothing can be asked about it."""
    if isinstance(value, torch.Tensor):
        return any(map(_depends_on_data, value.shape))
    return isinstance(value, torch.SymInt) and not value.node.has_hint()


def _numel(value: torch.Tensor) -> int:
    """Elements, with the hint of a dynamic size."""
    return math.prod(map(_known, value.shape))


def _known(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint or 1


def _gains(ctx: PassContext) -> bool:
    return ctx.target.capabilities.channels_last


JOINT_PASS = Pass(
    "channels-last",
    rewriting(prefer_channels_last),
    why="a forward and its backward agree on the layout of the images that one leaves to the other",
    when=_gains,
)
PASS = Pass(
    "channels-last",
    rewriting(prefer_channels_last),
    why="convolutions are faster where images have their channels together",
    after=("common-subexpressions",),
    when=_gains,
)

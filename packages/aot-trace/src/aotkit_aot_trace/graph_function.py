"""An FX graph as a function to capture, with its nodes' stack traces and tags carried over."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from aotkit_functionalize import DataDependent, FunctionalLayer, OverlappingWrite, Unsupported
from aotkit_functionalize.subclasses import is_subclass, rebuild, tensors_inside
from aotkit_functionalize.tracing import below_functional_layer, has_data_mutation, is_functional, to_functional

from . import _torch_compat as compat
from .checkpointed_writes import HIDDEN_WRITERS, all_nodes, is_checkpoint, run_region
from .float_orders import FloatOrders
from .index_numbers import select_numbers
from .launches import checking_launches
from .recorded_backwards import refusing_second_derivatives
from .recorded_views import VIEWS, RecordedViews, cannot_be_a_view

__all__ = ["GraphFunction"]

# The derivatives of these write to a part of a gradient. The dispatcher's functionalization then takes its sizes wrong.
_WRITERS_IN_THE_BACKWARD = frozenset({"fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn"})
_POWERS = frozenset({"pow", "pow_", "float_power"})
# The derivative is the difference of nearly equal numbers: of float16 and bfloat16 it is rounded once, at its end.
_CANCELLING = frozenset({"special_i0e"})
_ORDINARY_NAMESPACES = ("aten", "prims", "prim", "prim_ops", "inductor")


class GraphFunction:
    """Runs ``graph`` node by node so that what is recorded carries the node's stack trace, module stack and tags.

    Args:
        graph: for example the graph module that ``torch.compile`` hands to a backend.
        arguments: makes the graph's arguments from the captured function's, for example to put duplicates back.
        lifted: the graph's parameters are replaced by arguments of the captured function while it runs.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        arguments: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
        *,
        lifted: bool = False,
    ) -> None:
        self.graph = checking_launches(refusing_second_derivatives(graph))
        self.arguments = arguments
        for name, parameter in graph.named_parameters():
            if parameter.requires_grad and not lifted:
                raise Unsupported(
                    f"parameter {name} of the graph requires grad but is not one of its inputs",
                    "the gradient with respect to it would be lost",
                    "Lift parameters to inputs of the graph",
                )

    def __call__(self, *flat_args: Any) -> Any:
        args = flat_args if self.arguments is None else self.arguments(flat_args)
        compat.forget_sizes()
        with compat.preserve_node_meta():
            return _Runner(self.graph).run(*args)

    def preferred_layer(self) -> FunctionalLayer:
        """The cheap layer unless a higher-order or a mutating custom operator occurs, or one that it gets wrong."""
        return (
            FunctionalLayer.MODE if any(_needs_mode(n) for n in all_nodes(self.graph)) else FunctionalLayer.DISPATCHER
        )

    def needs_python_dispatcher(self) -> bool:
        """Whether sizes depend on data, at which C++ code would look, or a checkpointed region drops out: the Python
        dispatcher takes dropout apart without an in-place operation, which selective checkpointing does not allow."""
        if any("unbacked_bindings" in n.meta for n in all_nodes(self.graph)):
            return True
        if not any(is_checkpoint(n) for n in all_nodes(self.graph)):
            return False
        return any("dropout" in compat.called_name(n) for n in all_nodes(self.graph))


def _writes_hidden(graph: Any, node: torch.fx.Node) -> bool:
    """Whether the node updates running statistics though its schema doesn't say so.

    The dispatcher's functionalization passes such calls through as they are. Torch's Python dispatcher replaces them by
    variants that say so; it is too slow to be on always.
    """
    if is_checkpoint(node):
        body = getattr(graph, str(cast(torch.fx.Node, node.args[0]).target))
        return any(n.op == "call_module" or compat.called_name(n) in HIDDEN_WRITERS for n in all_nodes(body))
    return node.op == "call_module" or compat.called_name(node) in HIDDEN_WRITERS


def _attribute(node: torch.fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _needs_mode(node: torch.fx.Node) -> bool:
    target = node.target
    if is_subclass(node.meta.get("example_value")) or (node.op == "get_attr" and is_subclass(_attribute(node))):
        return True  # see Note [Subclasses need the mode]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return not is_checkpoint(node)
    if compat.called_name(node) in _WRITERS_IN_THE_BACKWARD:
        return True
    overloads: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        overloads = [target]
    elif isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    own = [o for o in overloads if o.namespace not in _ORDINARY_NAMESPACES]
    return any(o._schema.is_mutable or compat.has_effects(o) for o in own)


def _is_one_hot(node: torch.fx.Node) -> bool:
    """Whether the node is ``one_hot`` of a known number of classes, which looks at the elements only to refuse them."""
    classes = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes", -1)
    return compat.called_name(node) == "one_hot" and isinstance(classes, int) and classes > 0


def _one_hot(args: Any, kwargs: Any) -> torch.Tensor:
    """A scatter, which refuses classes out of range when the graph runs."""

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if tensor.dtype is not torch.int64:
            raise Unsupported(f"one_hot of a tensor of {tensor.dtype}", "it takes int64 indices", "Convert it")
        empty = tensor.new_zeros((*tensor.shape, num_classes))
        return empty.scatter(-1, tensor.unsqueeze(-1), 1)

    return one_hot(*args, **kwargs)


def _without_gradient(x: torch.Tensor) -> bool:
    """Whether eager mode takes the kernel that is for the CPU only, keeps nothing for a gradient, and knows of no
    subclass, transform of ``torch.func`` or forward gradient."""
    if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()) or is_subclass(x):
        return False
    wrapped: Any = torch._C._functorch  # type: ignore[attr-defined]
    if wrapped.is_functorch_wrapped_tensor(x):
        return False
    return torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is None


def _makes_tensor_of_numbers(node: torch.fx.Node) -> bool:
    """Whether the node is ``torch.Tensor([1, 2])`` or its like: torch's tracer isn't told of what these make."""
    legacy = node.target is torch.Tensor or isinstance(node.target, type(torch.LongTensor))
    if not legacy or len(node.args) != 1 or node.kwargs:
        return False
    (data,) = node.args
    numbers = not any(isinstance(used.meta.get("example_value"), torch.Tensor) for used in node.all_input_nodes)
    return isinstance(data, list | tuple) and not isinstance(data, torch.Size) and numbers


def _tensor_of_numbers(kind: Any, args: Any) -> torch.Tensor:
    (data,) = args
    return torch.tensor(data, dtype=torch.get_default_dtype() if kind is torch.Tensor else kind.dtype)


def _in_float32(target: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Of a float16 or bfloat16, computed and differentiated in float32; of other types as it is."""
    x: Any = args[0] if args else None
    if len(args) != 1 or kwargs or x.dtype not in (torch.float16, torch.bfloat16):
        return cast(torch.Tensor, target(*args, **kwargs))
    return cast(torch.Tensor, target(x.float()).to(x.dtype))


class _Runner(torch.fx.Interpreter):
    """An interpreter that names the user's line when a node cannot be captured, and lifts tensor attributes.

    Note [Floats that have to be known]
        A float of Dynamo stays a symbol where it is an argument of an operator. One that a size or a condition
        depends on, or that an operator's C++ code wants to look at, is known from there on: Dynamo gets a guard.
        But 0 is known to that node only: the guard holds for -0.0, too, and by its sign others tell them apart.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.constants: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self.float_orders = FloatOrders()
        self.views = RecordedViews()
        self.given: Sequence[Any] = ()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.given = args
        result = super().run(*args, **kwargs)
        self.views.check(tree_leaves(result))
        for name, _, value in self.constants.values():
            if has_data_mutation(value):
                raise Unsupported(
                    f"tensor attribute {name} of the graph is mutated",
                    "it is not one of the graph's inputs, so the new value would be lost",
                    "Lift it to an input of the graph",
                )
        return result

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            result = self._run_by_kind(n)
            if "unbacked_bindings" in n.meta:
                compat.rebind_sizes(n, result)
            self.float_orders.follow(n, self.env, result)
            return result
        except Unsupported as refusal:
            raise refusal.at(n.meta.get("stack_trace")) from refusal.__cause__
        except compat.DATA_DEPENDENT_ERRORS as error:
            raise data_dependent(error, n.meta.get("stack_trace")) from error
        except RuntimeError as error:
            located = not_functional(error, n.meta.get("stack_trace"))
            raise located or _not_recorded(n, error) from error

    def _run_by_kind(self, n: torch.fx.Node) -> Any:
        if _writes_hidden(self.module, n):
            with compat.enable_python_dispatcher():
                return self._run_region(n) if is_checkpoint(n) else super().run_node(n)
        if is_checkpoint(n):
            return self._run_region(n)
        if _is_one_hot(n):
            return _one_hot(*self.fetch_args_kwargs_from_env(n))
        if _makes_tensor_of_numbers(n):
            return _tensor_of_numbers(n.target, self.fetch_args_kwargs_from_env(n)[0])
        if compat.called_name(n) in _CANCELLING:
            return _in_float32(n.target, *self.fetch_args_kwargs_from_env(n))
        if compat.called_name(n) == "max_pool1d" and _without_gradient(self.env[n.all_input_nodes[0]]):
            result = self._run_known(n)
            return result.contiguous() if isinstance(result, torch.Tensor) else result  # a tuple has places as well
        if n.target in VIEWS:
            return self._run_view(n)
        return self._run_known(n)

    def _run_view(self, n: torch.fx.Node) -> Any:
        """A view in a graph of ATen operators, see Note [Views of copies]."""
        try:
            return self._run_known(n)
        except (RuntimeError, ValueError) as error:
            if not cannot_be_a_view(error):
                raise
            (source,) = n.all_input_nodes[:1]
            value, given = self.env[source], [*self.given, *(constant for _, _, constant in self.constants.values())]
            self.env[source] = self.views.copy_of(value, given, _not_recorded(n, error))
            try:
                return self._run_known(n)
            finally:
                self.env[source] = value

    def _run_region(self, n: torch.fx.Node) -> Any:
        arguments, _ = self.fetch_args_kwargs_from_env(n)

        def run(body: torch.fx.GraphModule) -> Any:
            (body_node,) = n.args[:1]
            self.env[cast(torch.fx.Node, body_node)] = body
            return super(_Runner, self).run_node(n)

        return run_region(n, arguments, run)

    def _run_known(self, n: torch.fx.Node) -> Any:
        """Run the node; see Note [Floats that have to be known]."""
        numbers = [used for used in n.all_input_nodes if isinstance(self.env[used], torch.SymFloat | torch.SymInt)]
        given = {used: self.env[used] for used in numbers if isinstance(self.env[used], torch.SymFloat)}
        try:
            return self._run_with_known(n, numbers)
        finally:
            self.env.update({used: number for used, number in given.items() if compat.is_zero(self.env[used])})

    def _run_with_known(self, n: torch.fx.Node, numbers: list[torch.fx.Node]) -> Any:
        if numbers and compat.called_name(n) in _POWERS:
            # The derivative compares the exponent with 0, in C++.
            self.env.update({used: compat.known(self.env[used]) for used in numbers if used is not n.args[0]})
        if not any(isinstance(self.env[used], torch.SymFloat) for used in numbers):
            return compat.with_known_float(super().run_node(n))
        try:
            return compat.with_known_float(super().run_node(n))
        except (RuntimeError, TypeError):
            self.env.update({used: compat.known(self.env[used]) for used in numbers})
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (operator.getitem, operator.setitem) and isinstance(args[0], torch.Tensor):
            args = (*select_numbers(args[0], args[1]), *args[2:])
        elif target is torch.arange and any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            compat.allow_numbers()
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._constant(str(target), value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        named = [*module.named_parameters(), *module.named_buffers()]
        lifted = {name: self._constant(f"{target}.{name}", value) for name, value in named}
        with compat.replaced_tensors(module, lifted):
            return super().call_module(target, args, kwargs)

    def _constant(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor attribute as a functional tensor; the recording refers to the attribute itself."""
        if is_functional(value) or not compat.is_recording():
            return value
        if is_subclass(value):
            return self._constant_subclass(name, value)
        if id(value) not in self.constants:
            with below_functional_layer():
                plain = compat.lift_constant(value)
            self.constants[id(value)] = (name, value, to_functional(plain))
        return self.constants[id(value)][2]

    def _constant_subclass(self, name: str, value: Any) -> Any:
        """The same of a tensor subclass: a wrapper over the functional tensors of those inside it."""
        inside = list(tensors_inside(value))
        if all(is_functional(tensor) for tensor in inside):
            return value
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
            raise Unsupported(
                f"tensor attribute {name} of the graph is a {type(value).__name__}",
                "what a tensor subclass does is made functional by FunctionalLayer.MODE only",
                "Lift it to an input of the graph",
            )
        return rebuild(value, iter([self._constant(name, tensor) for tensor in inside]))


def data_dependent(error: Exception, stack_trace: str | None) -> DataDependent:
    """The refusal for an operation whose result depends on the elements of a tensor."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataDependent(
        "a size or a Python number depends on the elements of a tensor",
        f"its value is not known while the function is captured ({reason})",
        "Compute it outside of the compiled region, or use an operation of fixed size such as torch.where",
        stack_trace=stack_trace,
    )


# What C++ code says that reads elements of a functional or a fake tensor.
_NO_ELEMENTS = ("its data is not allocated yet", "Cannot access data pointer of Tensor")
_NO_ARGUMENT = "argument of type: <class "  # what torch's tracer says of what a node can't be given
_FUNCTIONALIZATION_WORDS = (
    "unctionalization",
    "unctionalizing",
    "internal overlap",
    "refers to a single memory location",
    "as_strided() is non-compositional",
    "as_strided_scatter: sizes",
)


def not_functional(error: RuntimeError, stack_trace: str | None) -> Unsupported | None:
    """The refusal for what torch's functionalization or its fake tensors gave up on, ``None`` for any other error."""
    text = str(error)
    if any(words in text for words in _NO_ELEMENTS):
        return data_dependent(error, stack_trace)
    if isinstance(error, NotImplementedError) and text.startswith(_NO_ARGUMENT):
        kind = text.removeprefix(_NO_ARGUMENT).strip("<>'").split(".")[-1]
        return Unsupported(
            f"an operation takes a {kind}",
            f"graphs of torch {torch.__version__} hold no such arguments",
            "Leave the operation out of the compiled region, or use a later torch",
            stack_trace=stack_trace,
        )
    if isinstance(error, Unsupported) or not any(word in text for word in _FUNCTIONALIZATION_WORDS):
        return None
    overlap = re.match(r"While executing (\w+), .*internal overlap", text, re.DOTALL)
    if overlap:
        refusal = OverlappingWrite(f"a view made by {overlap[1]}()")
        return refusal.at(stack_trace)
    return Unsupported(
        "an in-place operation cannot be replaced by a functional one",
        text.splitlines()[0],
        "Use the operation that returns a new tensor instead",
        stack_trace=stack_trace,
    )


def _not_recorded(node: torch.fx.Node, error: Exception) -> Unsupported:
    """The refusal for an error of an operation that Dynamo has run without one."""
    return Unsupported(
        f"{node.name} cannot be captured",
        str(error).partition("\n")[0],
        "Leave the operation out of the compiled region",
        stack_trace=node.meta.get("stack_trace"),
    )


def closed_over(error: AssertionError, stack_trace: str | None) -> Unsupported | None:
    """The refusal for a real tensor that reached an operation without being an argument, or ``None``."""
    if "convert all Tensors to FakeTensors" not in str(error):
        return None
    return Unsupported(
        "the function uses a tensor that is not one of its arguments",
        "it would be frozen into the graph as a constant, and its gradient lost",
        "Pass it as an argument",
        stack_trace=stack_trace,
    )

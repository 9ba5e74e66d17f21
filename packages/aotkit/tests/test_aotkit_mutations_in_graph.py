"""``keep_inference_input_mutations``: graphs that write to their inputs, and what stays outside of them.

torch 2.13's own stack moves the version counter of such an input twice for one write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotkit
from aotkit_functionalize import GraphMetadata, records

aten = torch.ops.aten


def compiled_in_graph(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    return aotkit.aot_function(fn, compiler, keep_inference_input_mutations=True), graphs


def copies(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=aten.copy_.default)


def outputs(graph: torch.fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def add_twice(x: Tensor) -> Tensor:
    x.add_(1)
    x.mul_(2)
    return x * 3


def add_and_return(x: Tensor) -> Tensor:
    return x.add_(1)


def add_and_return_view(x: Tensor) -> Tensor:
    x.add_(1)
    return x.view(-1)


def hidden(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x * 3


def transposed(x: Tensor) -> Tensor:
    x.mul_(2)
    x.t_()
    return x * 3


def onto_itself(x: Tensor) -> Tensor:
    x.copy_(x)
    return x * 3


def silent(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x.detach() * 3


@pytest.mark.covers("F1.13", "F1.14", "F1.17")
@pytest.mark.parametrize(
    ("fn", "grad", "written", "returned"),
    [
        (add_twice, False, 1, 1),
        (add_and_return, False, 1, 0),  # the caller gets the input itself
        (add_and_return_view, False, 1, 0),
        (hidden, False, 0, 2),  # the version counter must not move
        (transposed, False, 0, 2),  # the sizes have to change first
        (silent, True, 1, 1),  # it requires grad, but was written to where grad mode is off
        (onto_itself, False, 0, 1),
    ],
)
def test_an_input_is_written_to_in_the_graph_where_autograd_has_no_interest_in_it(
    fn: Callable[[Tensor], Tensor], grad: bool, written: int, returned: int
) -> None:
    x = torch.randn(3, 3, requires_grad=grad)
    twin = x.detach().clone().requires_grad_(grad)
    compiled, graphs = compiled_in_graph(fn)
    got, want = compiled(x), fn(twin)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x, twin)
    assert x._version == twin._version
    assert (got is x) == (want is twin)
    assert (got.untyped_storage()._cdata == x.untyped_storage()._cdata) == (fn in (add_and_return, add_and_return_view))
    (graph,) = graphs
    assert len(copies(graph)) == written and len(outputs(graph)) == returned


@pytest.mark.covers("F1.15")
@pytest.mark.parametrize("keep", [True, False])
def test_a_copy_of_an_input_onto_itself_leaves_no_node(keep: bool) -> None:
    def fn(p: Tensor) -> Tensor:
        with torch.no_grad():
            p.copy_(p)
        return p.new_ones(3)

    graphs: list[torch.fx.GraphModule] = []
    compiled = aotkit.aot_function(
        fn, lambda graph, inputs: graphs.append(graph) or graph, keep_inference_input_mutations=keep
    )
    empty = torch.randn(3)
    empty.untyped_storage().resize_(0)  # nothing may read or write it
    before = empty._version
    torch.testing.assert_close(compiled(empty), torch.ones(3))
    assert empty._version == before + 1
    targets = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert not any("copy" in target for target in targets)


@pytest.mark.covers("F1.15")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::4],
        lambda t: t[:, :1],
        lambda t: t[1:2],
        lambda t: t[:1, ::2],
        lambda t: t.t()[:1],
        lambda t: t[::2],
    ],
)
def test_a_copy_onto_itself_of_a_part_of_a_tensor_changes_nothing(view: Callable[[Tensor], Tensor], grad: bool) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        x.copy_(x)
        return [x.sin()]

    wholes = [torch.linspace(0, 3, 16, dtype=torch.float64).view(4, 4).requires_grad_(grad) for _ in range(2)]
    parts = [view(whole.clone()) for whole in wholes]
    got, want = aotkit.aot_function(fn, lambda graph, inputs: graph)(parts[0]), fn(parts[1])
    torch.testing.assert_close([*got, parts[0]], [*want, parts[1]])
    if grad:
        for part in parts:
            part.square().sum().backward()
        torch.testing.assert_close(wholes[0].grad, wholes[1].grad)


@pytest.mark.covers("F1.16")
@pytest.mark.parametrize("fn", [add_twice, add_and_return, transposed])
@pytest.mark.parametrize("keep", [True, False])
def test_inference_tensors_are_written_to_though_they_have_no_version(
    fn: Callable[[Tensor], Tensor], keep: bool
) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 3)
        twin = x.clone()
        compiled = aotkit.aot_function(fn, lambda graph, inputs: graph, keep_inference_input_mutations=keep)
        torch.testing.assert_close(compiled(x), fn(twin))
        torch.testing.assert_close(x, twin)
        assert x.is_inference() and x.stride() == twin.stride()


@pytest.mark.covers("F1.16")
@pytest.mark.parametrize("detached", [True, False])
def test_a_base_of_several_inputs_is_written_to_in_the_graph(detached: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        a.add_(b.sum())
        return b + 1

    def make() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 4)
        pair = [x, x[1:]]
        return [p.detach() for p in pair] if detached else pair

    compiled, graphs = compiled_in_graph(fn)
    ours, eager = make(), make()
    torch.testing.assert_close(compiled(*ours), fn(*eager))
    torch.testing.assert_close(ours, eager)
    assert [t._version for t in ours] == [t._version for t in eager]
    assert len(copies(graphs[0])) == 1


@pytest.mark.covers("F1.62")
def test_the_copy_at_the_end_names_the_line_of_the_write() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aotkit.aot_module_simplified(
            graph, inputs, lambda g, i: graphs.append(g) or g, keep_inference_input_mutations=True
        )

    torch.compile(add_twice, backend=backend)(torch.randn(3, 3))
    (copy,) = copies(graphs[0])
    assert "x.mul_(2)" in copy.meta["stack_trace"] and "add_twice" in copy.meta["stack_trace"]


def test_the_records_say_which_inputs_the_graph_writes_to() -> None:
    from aotkit_aot_trace import capture, mutations_in_graph

    captured = capture(lambda x, y: [x.add_(1) + y, y.data.mul_(2)][:1], [torch.ones(2), torch.ones(2)])
    assert captured.metadata.num_mutated == 2
    _, metadata = mutations_in_graph(captured.graph, captured.metadata)
    first, second = metadata.inputs
    assert first.mutation is second.mutation is records.MutationKind.DATA
    assert first.updated_output is None and second.updated_output == 0 and metadata.num_mutated == 1
    assert GraphMetadata.from_json(metadata.to_json()) == metadata


def test_one_value_is_copied_into_two_inputs() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        new = torch.softmax(x + y, -1)
        x.copy_(new)
        y.copy_(new)
        return x.sum()

    mine = [torch.rand(5, 5, dtype=torch.float64) for _ in range(2)]
    theirs = [x.clone() for x in mine]
    got = torch.compile(f, backend="aotkit", options={"fallback": "error"})(*mine)
    torch.testing.assert_close([got, *mine], [f(*theirs), *theirs])


def test_a_copy_of_an_input_onto_itself_that_is_returned_is_memory_of_its_own() -> None:
    x = torch.arange(4.0)
    (got,) = aotkit.aot_function(lambda x: [torch.ops.aten.copy.default(x, x)], lambda graph, inputs: graph)(x)
    x.zero_()
    assert torch.equal(got, torch.arange(4.0))

"""The examples of docs/architecture.md: one function followed through every stage, and one kernel for both targets.

    python -m tools.architecture_example            print both sections
    python -m tools.architecture_example --update   write them into docs/architecture.md

The text between the markers of the page is what this prints; a test compares them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SECTIONS = ("example", "layer norm")  # as the markers in the page name them


def example(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    """A linear map, gelu and softmax; `running` is a buffer that the function updates."""
    hidden = F.gelu(x @ weight + bias)
    running.add_(1)
    return F.softmax(hidden, dim=-1)


def stages() -> Iterator[tuple[str, str, str]]:
    """(title with a sentence, language of the block, text) of each stage."""
    from aotkit_aot_trace import capture
    from aotkit_inductor_lower import (
        LowerOptions,
        compile_graph,
        decompositions,
        lower_graph,
        print_program,
        schedule_program,
    )
    from aotkit_partition import PartitionOptions, partition
    from aotkit_runtime_wrappers import bind, build_plan, prepare_inputs

    torch.manual_seed(0)
    inputs = [torch.randn(8, 16), torch.randn(16, 64, requires_grad=True), torch.randn(64, requires_grad=True)]
    inputs.append(torch.zeros(()))
    plan = prepare_inputs(inputs)
    yield "**Prepare.** Duplicated and overlapping arguments are found; here there are none.", "text", str(plan)

    captured = capture(lambda *args: [example(*args)], plan.select(inputs), decompositions=decompositions())
    yield "**Capture.** One run gives the joint graph:", "python", readable(captured.graph)
    yield "and, from the same run, what the caller must see:", "text", str(captured.metadata)

    options = PartitionOptions(mutated_inputs=(3,))
    parts = partition(captured.graph, captured.metadata.num_forward_outputs, options)
    yield "**Partition.** Forward and backward, with reasons:", "text", str(parts.report)
    yield "The forward returns the user's outputs and then what it saves:", "python", readable(parts.forward)

    lowered = lower_graph(parts.forward, name="forward")
    yield "**Lower.** One loop nest per operation, views as index maps:", "text", print_program(lowered)
    scheduled, _ = schedule_program(lowered)
    yield "**Schedule.** Fused; the matrix product stays an ATen call:", "text", print_program(scheduled)

    to_aten = LowerOptions(contractions="aten")  # who computes a product, and why, depends on the processor
    forward, backward = (compile_graph(part, options=to_aten) for part in (parts.forward, parts.backward))
    yield (
        "**Generate and bind.** One object file from LLVM text; what runs in Python is this:",
        "python",
        source(forward),
    )
    yield "**Report.** Of the forward:", "text", str(forward.report())

    saved = len(parts.saved_names) - parts.num_saved_symints
    wrappers = build_plan(captured.metadata, input_plan=plan, num_saved_tensors=saved)
    yield "**Wrap.** The plan around the compiled code:", "text", str(wrappers)
    call = bind(wrappers, forward, backward)
    yield "and the function that is generated from it:", "python", str(call.source)  # type: ignore[attr-defined]
    check(call, inputs)


def source(compiled: object) -> str:
    """The emitted Python of a compiled graph."""
    return str(compiled._bound.source)  # type: ignore[attr-defined]


def check(call: object, inputs: list[torch.Tensor]) -> None:
    """The example is a real one: the bound callable gives eager's output, gradients and buffer."""
    results = []
    for run in (lambda args: example(*args), lambda args: call(list(args))[0]):  # type: ignore[operator]
        args = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        output = run(args)
        output.square().sum().backward()
        results.append((output.detach(), args[1].grad, args[2].grad, args[3]))
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, eager)


def readable(graph: torch.fx.GraphModule) -> str:
    """The graph's code without the machine's paths."""
    text = graph.print_readable(print_output=False)
    return re.sub(r"# File: \S*/(\S+?):(\d+) in (\w+), code:", r"# \1:\2 in \3:", text)


def section(name: str) -> str:
    """A section as Markdown."""
    from tools.architecture_layer_norm import layer_norm_levels, source_of_layer_norm

    source = source_of_example() if name == "example" else source_of_layer_norm()
    lines = ["```python", *source, "```", ""]
    for title, language, text in stages() if name == "example" else layer_norm_levels():
        body = "\n".join(line.rstrip() for line in re.sub(r"\S*/tools/", "tools/", text.strip("\n")).splitlines())
        lines += [title, "", f"```{language}", body, "```", ""]
    return "\n".join(lines)


def source_of_example() -> list[str]:
    """The lines of `example`."""
    import inspect

    return inspect.getsource(example).rstrip().splitlines()


def marked(name: str, text: str) -> str:
    """A section between its markers, as it stands in the page."""
    return f"<!-- {name}: begin -->\n\n{text}\n<!-- {name}: end -->"


def updated_page(page: str, sections: str) -> str:
    """The page with what is between its markers replaced by what is between those of ``sections``."""
    for name in SECTIONS:
        pattern = re.compile(f"<!-- {name}: begin -->.*<!-- {name}: end -->", re.DOTALL)
        found = pattern.search(sections)
        if found is None or pattern.search(page) is None:
            raise SystemExit(f"no section {name!r}")
        page = pattern.sub(lambda _, found=found: found[0], page)  # type: ignore[misc]
    return page


def main() -> int:
    """Print, or update the page."""
    text = "\n\n".join(marked(name, section(name)) for name in SECTIONS)
    if "--update" in sys.argv[1:]:
        PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

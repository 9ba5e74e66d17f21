"""What generated code does where its results cannot tell: threads, units of work, masks, vectors, loads made once."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, interpret_program
from aotkit_inductor_lower.ir import LoopNest
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.kernel_ir.walk import expressions
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import Call
from aotkit_inductor_lower.targets.cpu import emit_kernel, generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

IR = {torch.float32: "f32", torch.float64: "f64", torch.int8: "i8", torch.int64: "i64", torch.bfloat16: "bf16"}


def declare(name: str, tensor: Tensor, kind: str) -> str:
    sizes, strides = ", ".join(map(str, tensor.shape)), ", ".join(map(str, tensor.stride()))
    return f"buffer {name} : {str(tensor.dtype)[6:]}[{sizes}] strides [{strides}] {kind} on cpu"


def program(inputs: dict[str, Tensor], outputs: dict[str, Tensor], nests: str, extra: str = "") -> str:
    """IR text over buffers shaped like the given tensors."""
    lines = ["aotkit-ir 2", "program test", *(f"input {name}" for name in inputs)]
    lines += [declare(name, t, "input") for name, t in inputs.items()]
    lines += [declare(name, t, "output") for name, t in outputs.items()]
    lines += [line for line in extra.splitlines() if line.strip()]
    return "\n".join(lines) + "\n" + nests.strip("\n") + f"\nreturn {', '.join(outputs)}\n"


def llvm(text: str, bits: int) -> str:
    return generate(parse_program(text), generic_machine(bits), keep_text=True).text


def check(text: str, *inputs: Tensor) -> None:
    """The kernels on this processor and the lesser ones give what the interpreter gives."""
    parsed = parse_program(text)
    want = interpret_program(parsed, [x.clone() for x in inputs])
    for bits in sorted({128, host_machine().vector_bits}):
        run = bind_program(generate(parsed, generic_machine(bits)))
        for got, expected in zip(run(list(inputs)), want, strict=True):
            bound = 1e-3 if expected.dtype is torch.float32 else None  # of numbers up to a thousand or so
            torch.testing.assert_close(got, expected, rtol=bound and 1e-5, atol=bound)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).mul(20).to(dtype)


# -- threads ---------------------------------------------------------------------------------------------

SCALED = """
loop scaled(i0 < ROWS, i1 < 64):
  stage():
    %a = load x[i0, i1] : f32
    %b = add %a, %a : f32
    store o[i0, i1] = %b
"""
# Each row of o takes in all rows of one chunk of x.
CHUNKS = """
loop zero(i0 < 8, i1 < 64):
  stage():
    %z = const 0.0 : f32
    store o[i0, i1] = %z
loop scaled(i0 < 8, i1 < PART):
  stage(r0 < 64):
    %a = load x[PART*i0 + i1, r0] : f32
    store o[i0, r0] += %a
"""


def launches(text: str, kernel: str) -> list[str]:
    """How a kernel is called: on several threads, or with all its units at once."""
    calls = re.findall(rf"call i32 @(?:run_units\(ptr )?@?kernel_{kernel}\(?.*", llvm(text, 256))
    return ["threads" if "i32 %threads" in call else "alone" for call in calls]


@pytest.mark.parametrize(
    ("nest", "rows", "found"),
    [
        (SCALED, 8, "alone"),  # too little for a second thread
        (SCALED, 2000, "threads"),
        (CHUNKS, 8, "alone"),
        (CHUNKS, 4000, "threads"),  # sums of one chunk of rows stay in one thread
        (CHUNKS.replace("store o[i0, r0] +=", "store o[0, r0] +="), 4000, "alone"),
        (CHUNKS.replace("store o[i0, r0] +=", "store o[i1, r0] +=").replace("8", "500"), 4000, "alone"),
    ],
)
def test_kernels_run_on_several_threads_where_that_pays_and_is_right(nest: str, rows: int, found: str) -> None:
    x = numbers(rows, 64)
    sizes = 8 if "500" not in nest else 500
    out = x if nest is SCALED else torch.empty(sizes, 64)
    text = program({"x": x}, {"o": out}, nest.replace("ROWS", str(rows)).replace("PART", str(rows // sizes)))
    assert launches(text, "scaled") == [found]
    check(text, x)


@pytest.mark.parametrize(
    ("loops", "body", "out", "units"),
    [
        # elements beside each other: blocks of about 4096, of whole vectors
        ("i0 < 4096", "{b}store o[i0] = %b", (4096,), 1),
        ("i0 < 4097", "{b}store o[i0] = %b", (4097,), 2),
        ("i0 < 40000", "{b}store o[i0] = %b", (40000,), 10),
        # a square of two vectors of 16 in one unit: its lines of what is written are whole
        ("i0 < 64, i1 < 96", "{t}store o[i0, i1] = %b", (64, 96), 2),
        ("i0 < 65, i1 < 96", "{t}store o[i0, i1] = %b", (65, 96), 3),
    ],
)
def test_units_of_work_fill_the_nearest_cache(loops: str, body: str, out: tuple[int, ...], units: int) -> None:
    index, shape = ("i1, i0", out[::-1]) if len(out) == 2 else ("i0", out)
    load = f"%b = load x[{index}] : f32\n    "
    x, nest = numbers(*shape), f"loop moved({loops}):\n  stage():\n    " + body.format(b=load, t=load)
    parsed = parse_program(program({"x": x}, {"o": torch.empty(out)}, nest))
    (step,) = (s for s in parsed.steps if isinstance(s, LoopNest))
    kernel = kernel_of(step, {b.name: b for b in parsed.buffers})
    assert emit_kernel(kernel, generic_machine(512), {}).units == units
    check(program({"x": x}, {"o": torch.empty(out)}, nest), x)


def test_a_unit_of_columns_is_the_shorter_the_longer_they_are() -> None:
    for rows, units in ((1, 1), (10, 11), (40, 42), (4000, 125)):
        nest = f"""
loop total(i0 < 4000):
  stage(r0 < {rows}):
    %a = load x[r0, i0] : f32
    %b = reduce sum %a : f32
  stage():
    store o[i0] = %b
"""
        parsed = parse_program(program({"x": torch.empty(rows, 4000)}, {"o": torch.empty(4000)}, nest))
        (step,) = (s for s in parsed.steps if isinstance(s, LoopNest))
        kernel = kernel_of(step, {b.name: b for b in parsed.buffers})
        assert emit_kernel(kernel, generic_machine(512), {}).units == units


# -- vectors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.bfloat16])
def test_masked_accesses_are_vectors_where_the_processor_has_them(dtype: torch.dtype) -> None:
    """Narrow types need AVX-512. The mask ends within a vector: whole ones on either side need none."""
    x = numbers(40, dtype=dtype)
    nest = f"""
loop shifted(i0 < 100):
  stage():
    %i = index i0 : i64
    %n = const 37 : i64
    %m = lt %i, %n : bool
    %a = load x[i0] mask %m other {"1" if dtype is torch.int8 else "1.0"} : {IR[dtype]}
    store o[i0] = %a
"""
    text = program({"x": x}, {"o": torch.empty(100, dtype=dtype)}, nest)
    narrow = dtype.itemsize < 4
    assert {bits: "@llvm.masked.load.v" in llvm(text, bits) for bits in (256, 512)} == {256: not narrow, 512: True}
    check(text, x)


def test_a_square_is_turned_over_in_registers_on_its_way_out_and_in() -> None:
    x = numbers(48, 64)
    for load, store in (("i1, i0", "i0, i1"), ("i0, i1", "i1, i0")):
        loops = "i0 < 64, i1 < 48" if load == "i1, i0" else "i0 < 48, i1 < 64"
        nest = f"loop turned({loops}):\n  stage():\n    %a = load x[{load}] : f32\n    store o[{store}] = %a"
        text = program({"x": x}, {"o": torch.empty(64, 48)}, nest)
        assert "extractelement" not in llvm(text, 256) and "shufflevector" in llvm(text, 256)
        check(text, x)
    x = numbers(2, 3, 33, 48)
    nest = """
loop turned(i0 < 2, i1 < 3, i2 < 48, i3 < 33):
  stage():
    %a = load x[i0, i1, i3, i2] : f32
    store o[i0, i1, i2, i3] = %a
"""
    check(program({"x": x}, {"o": torch.empty(2, 3, 48, 33)}, nest), x)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, "i32"), (torch.float64, "i64"), (torch.int8, "i32")])
def test_places_are_as_wide_as_what_they_go_with(dtype: torch.dtype, width: str) -> None:
    x = numbers(9, 256, dtype=dtype)
    nest = f"""
loop place(i0 < 9):
  stage(r0 < 256):
    %a = load x[i0, r0] : {IR[dtype]}
    %m = reduce argmax %a : i64
  stage():
    store o[i0] = %m
"""
    text = program({"x": x}, {"o": torch.empty(9, dtype=torch.int64)}, nest)
    carried = set(re.findall(r"phi <\d+ x (i32|i64)>", llvm(text, 512)))
    assert carried == {width}
    check(text, x)


@pytest.mark.parametrize(("op", "instruction"), [("exp", "mask.scalef.ps.512"), ("erf", "permvar.sf.512")])
def test_functions_use_what_avx512_has_for_them(op: str, instruction: str) -> None:
    x = numbers(64)
    nest = f"loop f(i0 < 64):\n  stage():\n    %a = load x[i0] : f32\n    %b = {op} %a : f32\n    store o[i0] = %b"
    text = program({"x": x}, {"o": x}, nest)
    assert {bits: instruction in llvm(text, bits) for bits in (256, 512)} == {256: False, 512: True}


def test_a_row_of_unknown_length_is_walked_over_in_blocks_vectors_and_elements() -> None:
    text = """aotkit-ir 2
program rows
symbol $s0 = input 0 size 1
input x
buffer x : float32[30, $s0] strides [$s0, 1] input on cpu
buffer o : float32[30] strides [1] output on cpu
loop largest(i0 < 30):
  stage(r0 < $s0):
    %a = load x[i0, r0] : f32
    %d = reduce max %a : f32
  stage():
    store o[i0] = %d
return o
"""
    assert re.findall(r"%r_\d+\.next = add i64 %r_\d+, (\d+)", llvm(text, 256)) == ["16", "8", "1"]
    for columns in (1, 7, 8, 23, 24, 16, 40):
        check(text, numbers(30, columns))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65])
def test_a_rest_of_one_element_is_computed_by_itself(size: int) -> None:
    """Two doubles are a vector of the oldest processors."""
    x = numbers(size, dtype=torch.float64)
    body = "  stage():\n    %a = load x[i0] : f64\n    %b = mul %a, %a : f64\n    store o[i0] = %b"
    check(program({"x": x}, {"o": x}, f"loop square(i0 < {size}):\n{body}"), x)
    known = program({"x": x}, {"o": x}, f"loop square(i0 < $s0):\n{body}")
    unknown = known.replace("input x\n", "symbol $s0 = input 0 size 0\ninput x\n").replace(f"[{size}]", "[$s0]")
    bound = bind_program(generate(parse_program(unknown), generic_machine(128)), redzones=True)
    assert torch.equal(bound([x])[0], x * x)


@pytest.mark.parametrize("sizes", [(5, 0), (0, 5), (2, 0, 3), (4, 1, 0)])
def test_loops_over_nothing_store_nothing(sizes: tuple[int, ...]) -> None:
    x = numbers(*sizes)
    at = ", ".join(f"i{k}" for k in range(len(sizes)))
    loops = ", ".join(f"i{k} < {n}" for k, n in enumerate(sizes))
    body = f"  stage():\n    %a = load x[{at}] : f32\n    store o[{at}] = %a"
    check(program({"x": x}, {"o": x}, f"loop copied({loops}):\n{body}"), x)
    ranges = loops.replace("i", "r")
    total = f"""
loop total(i0 < 1):
  stage({ranges}):
    %a = load x[{at.replace("i", "r")}] : f32
    %s = reduce sum %a : f32
  stage():
    store o[i0] = %s
"""
    check(program({"x": x}, {"o": torch.empty(1)}, total), x)


@pytest.mark.parametrize("size", [1, 40, 64])
def test_all_elements_may_be_added_to_one(size: int) -> None:
    x = numbers(size, dtype=torch.float64)
    nest = f"""
loop zero(i0 < 9):
  stage():
    %z = const 0.0 : f64
    store o[i0] = %z
loop total(i0 < {size}):
  stage():
    %a = load x[i0] : f64
    store o[3] += %a
"""
    check(program({"x": x}, {"o": torch.empty(9, dtype=torch.float64)}, nest), x)


# -- loops -----------------------------------------------------------------------------------------------


def test_what_a_loop_does_not_change_is_loaded_before_it() -> None:
    x, b = numbers(6, 40), numbers(6)
    nest = """
loop scaled(i0 < 6):
  stage(r0 < 40):
    %a = load x[i0, r0] : f32
    %b = load b[i0] : f32
    %c = mul %a, %b : f32
    %d = reduce sum %c : f32
  stage():
    store o[i0] = %d
"""
    text = program({"x": x, "b": b}, {"o": b}, nest)
    (inner,) = re.findall(r"\nr_\d+\.loop:\n(.*?)\nr_\d+\.done:", llvm(text, 256), re.DOTALL)
    assert "= load <8 x float>" in inner and "= load float" not in inner
    check(text, x, b)


def test_a_loop_that_may_be_empty_loads_nothing_before_it() -> None:
    text = """aotkit-ir 2
program empty
symbol $s0 = input 0 size 1
input x
input b
buffer x : float32[3, $s0] strides [$s0, 1] input on cpu
buffer b : float32[$s0] strides [1] input on cpu
buffer o : float32[3] strides [1] output on cpu
loop scaled(i0 < 3):
  stage(r0 < $s0):
    %a = load x[i0, r0] : f32
    %b = load b[0] : f32
    %c = mul %a, %b : f32
    %d = reduce sum %c : f32
  stage():
    store o[i0] = %d
return o
"""
    for columns in (0, 1, 37):
        check(text, numbers(3, columns), numbers(columns))


def test_what_is_looked_up_is_not_masked() -> None:
    """Lanes beyond a loop would look up what is nowhere."""
    x, at = numbers(70), torch.arange(24) * 2
    nest = """
loop lookup(i0 < 24):
  stage():
    %i = load at[i0] : i64
    %a = load x[%i + i0] : f32
    store o[i0] = %a
"""
    text = program({"x": x, "at": at}, {"o": torch.empty(24)}, nest)
    assert "llvm.masked.store" not in llvm(text, 512)
    assert "llvm.masked.store" in llvm(text.replace("[%i + i0]", "[2*i0]"), 512)


def test_temporaries_of_types_without_kernels_have_memory_of_their_own() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ x.t() @ x
        return y, torch.view_as_real(y[1:]) * 2

    x = torch.complex(numbers(5, 4), numbers(5, 4)).to(torch.complex128)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x))
    for got, want in zip(compiled([x]), f(x), strict=True):
        torch.testing.assert_close(got, want)


def test_positions_below_zero_are_rounded_down() -> None:
    for size, bits in ((2, 128), (8, 128), (8, 512), (100, 512)):
        nest = f"""
loop positions(i0 < {size}):
  stage():
    %q = index (i0 - 1) // 8 : i64
    %r = index (i0 - 1) % 8 : i64
    %s = index (-i0) // 8 : i64
    %t = index (-i0) % 8 : i64
    store q[i0] = %q
    store r[i0] = %r
    store s[i0] = %s
    store t[i0] = %t
"""
        at = torch.arange(size) - 1
        text = program({"x": at}, dict.fromkeys("qrst", at), nest)
        got = bind_program(generate(parse_program(text), generic_machine(min(bits, host_machine().vector_bits))))([at])
        back = -torch.arange(size)
        for values, want in zip(got, (at // 8, at % 8, back // 8, back % 8), strict=True):
            assert torch.equal(values, want)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 101])
def test_positions_are_divided_by_sizes_known_at_run_time_only(size: int) -> None:
    at, text = (
        torch.arange(size),
        """aotkit-ir 2
program divided
symbol $s0 = input 0 size 0
input x
buffer x : int64[$s0] strides [1] input on cpu
buffer o : int64[$s0, 100, 4] strides [400, 4, 1] output on cpu
loop divided(i0 < $s0, i1 < 100):
  stage():
    %a = index i1 // $s0 : i64
    %b = index i1 % $s0 : i64
    %c = index (-i1) // $s0 : i64
    %d = index (-i1) % $s0 : i64
    store o[i0, i1, 0] = %a
    store o[i0, i1, 1] = %b
    store o[i0, i1, 2] = %c
    store o[i0, i1, 3] = %d
return o
""",
    )
    i = torch.arange(100)
    want = torch.stack([i // size, i % size, -i // size, -i % size], 1).expand(size, 100, 4) if size else None
    for bits in sorted({128, host_machine().vector_bits}):
        (got,) = bind_program(generate(parse_program(text), generic_machine(bits)))([at])
        assert torch.equal(got, want if want is not None else torch.empty(0, 100, 4, dtype=torch.int64))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_no_position_is_divided_by_zero_before_a_loop_that_is_empty(size: int) -> None:
    text = """aotkit-ir 2
program summed
symbol $s0 = input 0 size 0
input x
buffer x : int64[$s0] strides [1] input on cpu
buffer o : int64[100] strides [1] output on cpu
loop summed(i0 < 100):
  stage(r0 < $s0):
    %a = index i0 // $s0 + r0 : i64
    %b = reduce sum %a : i64
  stage():
    store o[i0] = %b
return o
"""
    want = (torch.arange(100) // max(size, 1))[:, None].add(torch.arange(size)).sum(1)
    for bits in sorted({128, host_machine().vector_bits}):
        (got,) = bind_program(generate(parse_program(text), generic_machine(bits)))([torch.arange(size)])
        assert torch.equal(got, want)


@pytest.mark.parametrize(("size", "left"), [(7, 0), (8, 0), (9, 2)])
def test_divisions_of_what_is_smaller_are_none(size: int, left: int) -> None:
    nest = f"""
loop positions(i0 < {size}):
  stage():
    %q = index i0 // 8 : i64
    %r = index i0 % 8 : i64
    store q[i0] = %q
    store r[i0] = %r
"""
    at = torch.arange(size)
    parsed = parse_program(program({"x": at}, {"q": at, "r": at}, nest))
    (step,) = (s for s in parsed.steps if isinstance(s, LoopNest))
    kernel = kernel_of(step, {b.name: b for b in parsed.buffers})
    calls = [a for e in expressions(kernel) for monomial, _ in e.terms for a in monomial if isinstance(a, Call)]
    assert len(calls) == left
    check(program({"x": at}, {"q": at, "r": at}, nest), at)


def test_sums_over_two_loops_are_as_exact_as_over_one() -> None:
    """Short rows apart, many of them: each row's sum is added up by itself."""
    x = torch.full((300, 256), 1.1)
    nest = """
loop total(i0 < 1):
  stage(r0 < 300, r1 < 200):
    %a = load x[r0, r1] : f32
    %d = reduce sum %a : f32
  stage():
    store o[i0] = %d
"""
    text = program({"x": x}, {"o": torch.empty(1)}, nest)
    want = x[:, :200].double().sum()
    (got,) = bind_program(generate(parse_program(text), generic_machine(128)))([x])
    assert abs(got.double() - want).item() <= 1e-6 * want.item()


@pytest.mark.parametrize(("rows", "chunks"), [(128, False), (129, True)])
def test_sums_of_many_rows_are_added_up_in_chunks(rows: int, chunks: bool) -> None:
    x = torch.rand(rows, 256, generator=torch.Generator().manual_seed(rows))
    nest = f"""
loop total(i0 < 1):
  stage(r0 < {rows}, r1 < 200):
    %a = load x[r0, r1] : f32
    %d = reduce sum %a : f32
  stage():
    store o[i0] = %d
"""
    text = program({"x": x}, {"o": torch.empty(1)}, nest)
    assert ("chunk" in llvm(text, 128)) == chunks
    check(text, x)

"""The module of one graph: kernels, the code that splits them over threads, and segments."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernel_ir.bounds import lower_bound
from ...kernel_ir.launches import Combo, KernelText, Launch, Region
from ...symbolic import Call, Expr, Symbol
from .machine import Machine
from .parallel_regions import GRAIN, most_threads
from .region_text import REGION_IMPORTS, RegionCall, region_body, region_runtime
from .render.emitter import Emitter, Ssa, imm

__all__ = ["Combo", "Launch", "ModuleText"]

_RUN_UNITS = """
; Runs units [0, %units) of a kernel on up to %threads threads of torch's OpenMP runtime, each a contiguous share.
define internal i32 @run_units(ptr %kernel, ptr %frame, ptr %slots, i64 %units, i64 %work, i32 %threads) {
entry:
  %any = icmp sgt i64 %units, 0
  br i1 %any, label %count, label %none
none:
  ret i32 0
count:
  %threads64 = sext i32 %threads to i64
  %worth = udiv i64 %work, GRAIN
  %limit = call i64 @llvm.umin.i64(i64 %worth, i64 %units)
  %most = call i64 @llvm.umin.i64(i64 %limit, i64 %threads64)
  %several = icmp ugt i64 %most, 1
  br i1 %several, label %parallel, label %alone
alone:
  %status = call i32 %kernel(ptr %frame, ptr %slots, i64 0, i64 %units)
  ret i32 %status
parallel:
PARALLEL
}
"""

_PARALLEL = """  %job = alloca %job_type
  store ptr %kernel, ptr %job
  %job.frame = getelementptr %job_type, ptr %job, i32 0, i32 1
  store ptr %frame, ptr %job.frame
  %job.slots = getelementptr %job_type, ptr %job, i32 0, i32 2
  store ptr %slots, ptr %job.slots
  %job.units = getelementptr %job_type, ptr %job, i32 0, i32 3
  store i64 %units, ptr %job.units
  %job.status = getelementptr %job_type, ptr %job, i32 0, i32 4
  store i32 0, ptr %job.status
  %count32 = trunc i64 %most to i32
  call void @GOMP_parallel(ptr @thread_body, ptr %job, i32 %count32, i32 0)
  %joined = load i32, ptr %job.status
  ret i32 %joined"""

_THREAD_BODY = """
%job_type = type { ptr, ptr, ptr, i64, i32 }
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()

define internal void @thread_body(ptr %job) {
  %kernel = load ptr, ptr %job
  %job.frame = getelementptr %job_type, ptr %job, i32 0, i32 1
  %frame = load ptr, ptr %job.frame
  %job.slots = getelementptr %job_type, ptr %job, i32 0, i32 2
  %slots = load ptr, ptr %job.slots
  %job.units = getelementptr %job_type, ptr %job, i32 0, i32 3
  %units = load i64, ptr %job.units
  %id32 = call i32 @omp_get_thread_num()
  %count32 = call i32 @omp_get_num_threads()
  %id = sext i32 %id32 to i64
  %count = sext i32 %count32 to i64
  %scaled = mul i64 %units, %id
  %low = udiv i64 %scaled, %count
  %scaled.next = add i64 %scaled, %units
  %high = udiv i64 %scaled.next, %count
  %status = call i32 %kernel(ptr %frame, ptr %slots, i64 %low, i64 %high)
  %job.status = getelementptr %job_type, ptr %job, i32 0, i32 4
  %old = atomicrmw or ptr %job.status, i32 %status monotonic
  ret void
}
"""


_RUN_COMBO = """
; Runs units [%low, %high) of several launches of a kernel, counted through all of them: member m's are those from
; %starts[m] to %starts[m + 1], its frame entries the m-th %width of %slots.
define internal i32 @run_combo(ptr %kernel, ptr %frame, ptr %slots, i64 %width, ptr %starts, i64 %low, i64 %high) {
entry:
  %any = icmp slt i64 %low, %high
  br i1 %any, label %member, label %done
member:
  %m = phi i64 [ 0, %entry ], [ %m.next, %next ]
  %m.next = add i64 %m, 1
  %first.at = getelementptr i64, ptr %starts, i64 %m
  %first = load i64, ptr %first.at
  %end.at = getelementptr i64, ptr %starts, i64 %m.next
  %end = load i64, ptr %end.at
  %from = call i64 @llvm.smax.i64(i64 %low, i64 %first)
  %to = call i64 @llvm.smin.i64(i64 %high, i64 %end)
  %has = icmp slt i64 %from, %to
  br i1 %has, label %run, label %next
run:
  %offset = mul i64 %m, %width
  %own = getelementptr i32, ptr %slots, i64 %offset
  %own.low = sub i64 %from, %first
  %own.high = sub i64 %to, %first
  %status = call i32 %kernel(ptr %frame, ptr %own, i64 %own.low, i64 %own.high)
  br label %next
next:
  %more = icmp slt i64 %end, %high
  br i1 %more, label %member, label %done
done:
  ret i32 0
}
"""


class ModuleText:
    """Collects functions and renders the module's LLVM text."""

    def __init__(self, name: str, target: Machine) -> None:
        self.name, self.target = name, target
        self.declarations: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._names: set[str] = set()
        self._segments: list[str] = []
        self._tables: list[str] = []
        self._combos: list[str] = []
        self._regions: list[str] = []
        self._launches = False

    def add_kernel(self, wanted: str, kernel: KernelText) -> str:
        """The function for ``kernel``; an equal one is shared. Gives its name."""
        identity = "\n".join(line.split(" ; ")[0] for line in kernel.body.split("\n") if not line.startswith("  ;"))
        known = self._functions.get(identity)
        if known is not None:
            return known.split("(", 1)[0].rsplit("@", 1)[1]
        name = wanted
        while name in self._names:
            name += "_"
        self._names.add(name)
        self._functions[identity] = f"define internal i32 @{name}{kernel.body}"
        return name

    def add_segment(self, name: str, calls: Sequence[Combo | Region], size_slots: dict[Symbol, int]) -> None:
        """``i32 name(ptr frame, i32 threads)``: the launches in order; a failing one ends it.

        The status is ``(position + 1) * 256 + error bits``.
        """
        lines = [f"define i32 @{name}(ptr %frame, i32 %threads) {{", "entry:"]
        em = Emitter(self.declarations)
        sizes = _Sizes(em, size_slots)
        position = 0
        for call in calls:
            if isinstance(call, Region):
                self._add_region(em, name, position, call)
            elif len(call.members) > 1:
                self._add_combo(em, name, position, call)
            else:
                self._add_launch(em, name, position, call.members[0], sizes)
            position += sum(len(c.members) for c in (call.calls if isinstance(call, Region) else (call,)))
        lines += em.lines()
        lines += ["  ret i32 0", "}"]
        self._segments.append("\n".join(lines))

    def _add_launch(self, em: Emitter, name: str, position: int, launch: Launch, sizes: _Sizes) -> None:
        table = self._table(f"{name}.slots{position}", "i32", launch.slots)
        units, work = sizes.value(launch.kernel.units), sizes.value(launch.kernel.work)
        if units.constant == 0:
            return
        function = f"@{launch.function}"
        if launch.kernel.short is not None:
            kernel, condition = launch.kernel.short
            most = next((factor for monomial, factor in condition.terms if not monomial), 0)
            short = em.pure("i1", f"icmp sle i64 {sizes.value(most - condition).text}, {most}")
            own = sizes.value(kernel.units), sizes.value(kernel.work)
            function = em.pure("ptr", f"select i1 {short.text}, ptr @{launch.short}, ptr {function}").text
            units, work = (
                em.pure("i64", f"select i1 {short.text}, {a.typed}, {b.typed}")
                for a, b in zip(own, (units, work), strict=True)
            )
        em.effect(f"%status{position} = {self._call(function, table, launch.kernel.parallel, units, work)}")
        self._end_if_failed(em, position, f"or i32 %status{position}, {(position + 1) * 256}")

    def _end_if_failed(self, em: Emitter, position: int, code: str) -> None:
        """The segment returns ``code`` if the status of a call is not 0."""
        em.effect(f"%bad{position} = icmp ne i32 %status{position}, 0")
        em.effect(f"br i1 %bad{position}, label %failed{position}, label %next{position}")
        em.effect(f"\nfailed{position}:")
        em.effect(f"%code{position} = {code}")
        em.effect(f"ret i32 %code{position}")
        em.effect(f"\nnext{position}:")

    def _add_region(self, em: Emitter, name: str, position: int, region: Region) -> None:
        """A call of a function ``name.region``, which each thread runs as a whole, see Note [Parallel regions]."""
        calls, at = [], position
        for call, wait in zip(region.calls, region.waits, strict=True):
            launch = call.members[0]
            if len(call.members) > 1:
                function, table, units, _ = self._combo(name, at, call)
            else:
                function, units = launch.function, launch.kernel.units.constant or 0
                table = self._table(f"{name}.slots{at}", "i32", launch.slots)
            failing = at if launch.kernel.reports else None
            calls.append(RegionCall(function, table, units, most_threads(call), wait, failing))
            at += len(call.members)
        function = f"{name}.region{position}"
        self._regions.append(region_body(function, calls))
        self._launches = True
        most = max(call.most for call in calls)
        em.comment(
            f"{len(calls)} calls in one parallel region, {sum(region.waits)} of them after a wait of all threads"
        )
        status = f"call i32 @run_region(ptr @{function}, ptr %frame, i32 {min(most, 1 << 30)}, i32 %threads)"
        em.effect(f"%status{position} = {status}")
        self._end_if_failed(em, position, f"add i32 %status{position}, 0")

    def _combo(self, name: str, position: int, combo: Combo) -> tuple[str, str, int, int]:
        """A function ``name.combo``, itself of a kernel's form, that runs all members, of which none fails; its frame
        entries, units and work."""
        first, starts, work = combo.members[0], [0], 0
        for member in combo.members:
            starts.append(starts[-1] + (member.kernel.units.constant or 0))
            work += member.kernel.work.constant or 0
        slots = self._table(f"{name}.slots{position}", "i32", [s for m in combo.members for s in m.slots])
        table = self._table(f"{name}.starts{position}", "i64", starts)
        function = f"{name}.combo{position}"
        self._combos.append(
            f"define internal i32 @{function}(ptr %frame, ptr %slots, i64 %low, i64 %high) {{\n"
            f"  %status = call i32 @run_combo(ptr @{first.function}, ptr %frame, ptr %slots, i64 {len(first.slots)}, "
            f"ptr {table}, i64 %low, i64 %high)\n  ret i32 %status\n}}"
        )
        return function, slots, starts[-1], work

    def _add_combo(self, em: Emitter, name: str, position: int, combo: Combo) -> None:
        """A call of all members of a combo."""
        function, slots, units, work = self._combo(name, position, combo)
        first, parallel = combo.members[0], most_threads(combo) > 1
        call = self._call(f"@{function}", slots, parallel, imm(units), imm(work))
        how = "at once" if parallel else f"one after the other: {combo.in_order or 'they have little to do'}"
        em.comment(f"{len(combo.members)} launches of {first.function}, {how}")
        em.effect(f"%status{position} = {call}")

    def _table(self, name: str, kind: str, entries: Sequence[int]) -> str:
        inside = ", ".join(f"{kind} {entry}" for entry in entries)
        self._tables.append(f"@{name} = private constant [{len(entries)} x {kind}] [{inside}]")
        return f"@{name}"

    def _call(self, function: str, table: str, parallel: bool, units: Ssa, work: Ssa) -> str:
        """The call of a kernel's units, on several threads if that may pay."""
        threaded = parallel and self.target.threads
        if (threaded and (work.constant or GRAIN * 2) >= GRAIN * 2) or units.constant is None:
            self._launches = True
            how = f"{units.typed}, {work.typed}, i32 {'%threads' if threaded else '1'}"
            return f"call i32 @run_units(ptr {function}, ptr %frame, ptr {table}, {how})"
        return f"call i32 {function}(ptr %frame, ptr {table}, i64 0, {units.typed})"

    def imports(self) -> tuple[str, ...]:
        """Functions outside the module that it calls. Complete once :meth:`render` was called."""
        outside = (name for name, text in self.declarations.items() if text.startswith("declare "))
        names = {name for name in outside if not name.startswith("llvm.")}
        if self._launches and self.target.threads:
            names |= {"GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"}
        if self._regions:
            names |= set(REGION_IMPORTS)
        return tuple(sorted(names))

    def render(self) -> str:
        """The whole module."""
        runtime = ""
        if self._launches:
            self.declarations["llvm.umin.i64"] = "declare i64 @llvm.umin.i64(i64, i64)"
            parallel = _PARALLEL if self.target.threads else "  br label %alone"
            runtime = _RUN_UNITS.replace("GRAIN", str(GRAIN)).replace("PARALLEL", parallel)
            if self.target.threads:
                runtime = _THREAD_BODY + runtime
        if self._regions:
            self.declarations["llvm.umin.i32"] = "declare i32 @llvm.umin.i32(i32, i32)"
            runtime += region_runtime(self.target.triple)
        if self._combos:
            for name in ("llvm.smin.i64", "llvm.smax.i64"):
                self.declarations[name] = f"declare i64 @{name}(i64, i64)"
            runtime += _RUN_COMBO + "\n".join(self._combos)
        parts = [
            f"; {self.name}, for {self.target.cpu}, {self.target.vector_bits}-bit vectors",
            f'target triple = "{self.target.triple}"',
            "@zero_element = private constant [16 x i8] zeroinitializer, align 16",
            *self._tables,
            *sorted(self.declarations.values()),
            *(f"\n{text}" for text in self._functions.values()),
            runtime,
            *(f"\n{text}" for text in (*self._regions, *self._segments)),
        ]
        text = "\n".join(parts) + "\n"
        return text + "!0 = !{i32 1}\n" if "!nontemporal" in text else text


class _Sizes:
    """Size expressions evaluated from the frame, in a segment's entry."""

    def __init__(self, em: Emitter, slots: dict[Symbol, int]) -> None:
        self._em, self._slots = em, slots

    def value(self, expr: Expr) -> Ssa:
        em = self._em
        total = Ssa("0", "i64")
        for monomial, factor in expr.terms:
            product = Ssa(str(factor), "i64")
            for atom in monomial:
                product = em.mul(product, self._atom(atom))
            total = em.add(total, product)
        return total

    def _atom(self, atom: Symbol | Call) -> Ssa:
        em = self._em
        if isinstance(atom, Symbol):
            entry = em.pure("ptr", f"getelementptr i64, ptr %frame, i64 {self._slots[atom]}")
            return em.pure("i64", f"load i64, ptr {entry.text}", entry)
        args = [self.value(arg) for arg in atom.args]
        if atom.fn == "isqrt":
            return em.square_root(args[0])
        if atom.fn in ("floordiv", "mod"):
            if lower_bound(atom.args[0]) < 0:  # a size is not negative, but -(-n // 3) is one
                return self._floor(atom.fn, *args)
            return em.unsigned("udiv" if atom.fn == "floordiv" else "urem", args[0], args[1])
        result = args[0]
        for other in args[1:]:
            result = em.minimum(result, other) if atom.fn == "min" else em.maximum(result, other)
        return result

    def _floor(self, fn: str, a: Ssa, b: Ssa) -> Ssa:
        """Division rounding down; a divisor of zero (an empty range) counts as one."""
        em = self._em
        b = em.maximum(b, imm(1))
        rest = em.pure("i64", f"srem i64 {a.text}, {b.text}", a, b)
        below = em.pure("i64", f"ashr i64 {rest.text}, 63", rest)  # -1 where the rest is negative, else 0
        if fn == "mod":
            return em.add(rest, em.pure("i64", f"and i64 {below.text}, {b.text}", below, b))
        return em.add(em.pure("i64", f"sdiv i64 {a.text}, {b.text}", a, b), below)

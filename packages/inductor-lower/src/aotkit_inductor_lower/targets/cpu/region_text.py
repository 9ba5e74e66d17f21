"""The text of parallel regions: how threads enter one, share units in it and wait for each other.

Note [Waits of a region]
    Threads count up one number when they arrive; the last tells the others by another, in a line of memory of its own,
    which wait is over. Waits are numbered from one, so neither is ever set back. A thread whose call fails leaves, and
    says that the last of all waits is over: the others leave at their next one. Who waits long lets another thread run
    from time to time. With two threads a wait takes 0.15 microseconds, and one of the OpenMP runtime 0.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["REGION_IMPORTS", "RegionCall", "region_body", "region_runtime"]

REGION_IMPORTS = ("sched_yield",)
SPINS = 4096  # turns of a waiting thread between two at which another one may run
_FAILED = (1 << 31) - 1

_RUNTIME = """
; What the threads of a parallel region share: the region's function, the frame, the status; how many threads arrived at
; waits; which wait is over.
%region_type = type { ptr, ptr, i32, [44 x i8], i32, [60 x i8], i32, [60 x i8] }
declare i32 @sched_yield()
PAUSE_DECLARATION

; Runs a region on up to %most threads of torch's OpenMP runtime, and no more than %threads.
define internal i32 @run_region(ptr %body, ptr %frame, i32 %most, i32 %threads) noinline {
entry:
  %region = alloca %region_type, align 64
  store ptr %body, ptr %region
  %region.frame = getelementptr %region_type, ptr %region, i32 0, i32 1
  store ptr %frame, ptr %region.frame
  %region.status = getelementptr %region_type, ptr %region, i32 0, i32 2
  store i32 0, ptr %region.status
  %region.arrived = getelementptr %region_type, ptr %region, i32 0, i32 4
  store i32 0, ptr %region.arrived
  %region.over = getelementptr %region_type, ptr %region, i32 0, i32 6
  store i32 0, ptr %region.over
  %count = call i32 @llvm.umin.i32(i32 %most, i32 %threads)
  %several = icmp sgt i32 %count, 1
  br i1 %several, label %parallel, label %alone
parallel:
  call void @GOMP_parallel(ptr @region_thread, ptr %region, i32 %count, i32 0)
  br label %done
alone:
  call void %body(ptr %region, ptr %frame, i64 0, i64 1)
  br label %done
done:
  %status = load i32, ptr %region.status
  ret i32 %status
}

define internal void @region_thread(ptr %region) {
  %body = load ptr, ptr %region
  %region.frame = getelementptr %region_type, ptr %region, i32 0, i32 1
  %frame = load ptr, ptr %region.frame
  %id32 = call i32 @omp_get_thread_num()
  %count32 = call i32 @omp_get_num_threads()
  %id = sext i32 %id32 to i64
  %count = sext i32 %count32 to i64
  call void %body(ptr %region, ptr %frame, i64 %id, i64 %count)
  ret void
}

; Runs the share of thread %id of %count in %units units of a kernel, which at most %most threads share.
define internal i32 @run_share(ptr %kernel, ptr %frame, ptr %slots, i64 %units, i64 %most, i64 %id, i64 %count)
    noinline {
entry:
  %parts = call i64 @llvm.umin.i64(i64 %most, i64 %count)
  %has = icmp ult i64 %id, %parts
  br i1 %has, label %run, label %none
run:
  %scaled = mul i64 %units, %id
  %low = udiv i64 %scaled, %parts
  %scaled.next = add i64 %scaled, %units
  %high = udiv i64 %scaled.next, %parts
  %status = call i32 %kernel(ptr %frame, ptr %slots, i64 %low, i64 %high)
  ret i32 %status
none:
  ret i32 0
}

; Waits until all %count threads arrived here, at wait %number of a region. False if a call failed.
define internal i1 @region_wait(ptr %region, i32 %number, i64 %count) noinline {
entry:
  %arrived = getelementptr %region_type, ptr %region, i32 0, i32 4
  %over = getelementptr %region_type, ptr %region, i32 0, i32 6
  %count32 = trunc i64 %count to i32
  %all = mul i32 %number, %count32
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel
  %after = add i32 %before, 1
  %last = icmp eq i32 %after, %all
  br i1 %last, label %tell, label %look
tell:
  store atomic i32 %number, ptr %over release, align 4
  ret i1 true
look:
  %turn = phi i32 [ 0, %entry ], [ %turn.next, %again ]
  %seen = load atomic i32, ptr %over acquire, align 4
  %ready = icmp sge i32 %seen, %number
  br i1 %ready, label %done, label %spin
spin:
  PAUSE
  %turn.next = add i32 %turn, 1
  %masked = and i32 %turn.next, MASK
  %long = icmp eq i32 %masked, 0
  br i1 %long, label %yield, label %again
yield:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %look
done:
  %fine = icmp ne i32 %seen, FAILED
  ret i1 %fine
}

; A call of a region failed: nothing behind the next wait is run.
define internal void @region_failed(ptr %region, i32 %status) noinline {
  %region.status = getelementptr %region_type, ptr %region, i32 0, i32 2
  %old = atomicrmw or ptr %region.status, i32 %status monotonic
  %over = getelementptr %region_type, ptr %region, i32 0, i32 6
  store atomic i32 FAILED, ptr %over release, align 4
  ret void
}
"""

_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ""), "aarch64": ("llvm.aarch64.hint", "i32 1")}


@dataclass(frozen=True, slots=True)
class RegionCall:
    """A call of a region: the function and its frame entries, how many units it has and how many threads share these
    at most. ``wait``: threads wait before it; ``position``: of its launch in the segment, if it may fail."""

    function: str
    table: str
    units: int
    most: int
    wait: bool
    position: int | None


def region_runtime(triple: str) -> str:
    """What all regions of a module call."""
    function, operand = _PAUSES.get(triple.split("-", 1)[0], ("", ""))
    declaration = f"declare void @{function}({operand[:3]})" if function else ""
    pause = f"call void @{function}({operand})" if function else "; no pause"
    text = _RUNTIME.replace("PAUSE_DECLARATION", declaration).replace("PAUSE", pause)
    return text.replace("MASK", str(SPINS - 1)).replace("FAILED", str(_FAILED))


def region_body(name: str, calls: Sequence[RegionCall]) -> str:
    """``void name(ptr region, ptr frame, i64 id, i64 count)``: what each thread of a region does."""
    lines = [
        f"define internal void @{name}(ptr %region, ptr %frame, i64 %id, i64 %count) {{",
        "entry:",
        "  %first = icmp eq i64 %id, 0",
    ]
    waits, alone = 0, False
    for number, call in enumerate(calls):
        if alone and (call.wait or call.most > 1):
            lines += [f"  br label %together{number}", f"together{number}:"]
            alone = False
        if call.wait:
            waits += 1
            lines += [
                f"  %go{number} = call i1 @region_wait(ptr %region, i32 {waits}, i64 %count)",
                f"  br i1 %go{number}, label %step{number}, label %leave",
                f"step{number}:",
            ]
        if call.most == 1 and not alone:
            behind = _behind(calls, number)
            lines += [f"  br i1 %first, label %alone{number}, label %{behind}", f"alone{number}:"]
            alone = True
        lines += _call(number, call)
    lines += ["  br label %leave", "leave:", "  ret void", "}"]
    return "\n".join(lines)


def _behind(calls: Sequence[RegionCall], number: int) -> str:
    """Where the calls of the first thread alone end that begin with a number."""
    for k in range(number + 1, len(calls)):
        if calls[k].wait or calls[k].most > 1:
            return f"together{k}"
    return "leave"


def _call(number: int, call: RegionCall) -> Iterator[str]:
    units = f"i64 {call.units}"
    if call.most > 1:
        share = f"{units}, i64 {call.most}, i64 %id, i64 %count"
        how = f"@run_share(ptr @{call.function}, ptr %frame, ptr {call.table}, {share})"
    else:
        how = f"@{call.function}(ptr %frame, ptr {call.table}, i64 0, {units})"
    yield f"  %status{number} = call i32 {how}"
    if call.position is not None:
        yield f"  %bad{number} = icmp ne i32 %status{number}, 0"
        yield f"  br i1 %bad{number}, label %failed{number}, label %next{number}"
        yield f"failed{number}:"
        yield f"  %code{number} = or i32 %status{number}, {(call.position + 1) * 256}"
        yield f"  call void @region_failed(ptr %region, i32 %code{number})"
        yield "  br label %leave"
        yield f"next{number}:"

"""Kernel text back to kernels, see Note [Kernel text] in :mod:`.print`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ..ir import Origin
from ..ir.parse_instr import STRING, WORD, InstrParser
from ..symbolic.text import scan_expr
from .nodes import (
    LOOP_KINDS,
    PARAM_KINDS,
    SERIAL,
    STORAGES,
    TAILS,
    Kernel,
    KernelCall,
    KernelModule,
    Loop,
    LoopMap,
    Param,
    Scratch,
    Stmt,
)
from .print import KERNEL_TEXT_VERSION

__all__ = ["parse_kernel", "parse_module"]

_WIDTH = re.compile(r"\d+")
_INTERLEAVE = re.compile(r"x(\d+)\b")


def parse_module(text: str) -> KernelModule:
    """The module that :func:`.print_module` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    return parser.whole(parser.module)


def parse_kernel(text: str) -> Kernel:
    """The kernel that :func:`.print_kernel` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    return parser.whole(parser.kernel)


class _Parser(InstrParser):
    """Modules, kernels and their loops."""

    def module(self) -> KernelModule:
        self.scan.expect("aotkit-kernel")
        version = self.integer()
        if version != KERNEL_TEXT_VERSION:
            raise self.scan.error(f"text of version {version}; this package reads version {KERNEL_TEXT_VERSION}")
        self.finish_line()
        self.scan.expect("module")
        name = self.name()
        self.finish_line()
        kernels: list[Kernel] = []
        calls: list[KernelCall] = []
        while self.scan.text.lstrip().startswith("kernel "):
            kernels.append(self.kernel())
        while self.take_word("call"):
            calls.append(self.call())
        return KernelModule(name, tuple(kernels), tuple(calls))

    def call(self) -> KernelCall:
        step = self.name()
        self.scan.expect("=")
        self.scan.expect("kernel")
        kernel = self.integer()
        arguments = [("$" if self.scan.take("$") else "") + self.name() for _ in self.items("(", ")")]
        line = self.token(STRING, "a quoted source line") if self.take_word("line") else ""
        self.finish_line()
        return KernelCall(step, kernel, tuple(arguments), line)

    def items(self, opening: str, closing: str) -> Iterator[None]:
        """One for each item of a list between two brackets, with commas between them."""
        self.scan.expect(opening)
        first = True
        while not self.scan.take(closing):
            if not first:
                self.scan.expect(",")
            first = False
            yield

    # -- kernels ---------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        margin = self.indent()
        if not self.take_word("kernel"):
            raise self.scan.error(f"expected a kernel, found {self.scan.rest()!r}")
        name = self.name()
        params = tuple(self.param() for _ in self.items("(", ")"))
        self.scan.expect("index")
        index_type = self.one_of_dtypes()
        ordered = self.take_word("ordered")
        self.finish_line()
        origin = self.origin() if self.take_word("origin") else Origin()
        config = tuple((self.name(), self.integer()) for _ in self.list_after("config"))
        scratch = tuple(self.scratch() for _ in self.list_after("scratch"))
        grid = tuple(self.loop_head() for _ in self.list_after("grid"))
        body, versions = self.body(margin), []
        while self.indent() > margin and self.take_word("version"):
            condition = scan_expr(self.scan)
            self.finish_line()
            versions.append((condition, self.kernel()))
        return Kernel(name, params, scratch, grid, body, ordered, index_type, tuple(versions), config, origin)

    def list_after(self, word: str) -> Iterator[None]:
        """One for each item of a line that starts with ``word``, if this one does."""
        if not self.take_word(word):
            return
        yield
        while self.scan.take(","):
            yield
        self.finish_line()

    def param(self) -> Param:
        if self.scan.take("$"):
            name = self.name()
            self.scan.expect(":")
            return Param(name, self.one_of(PARAM_KINDS, "a kind of number"))
        name, dtype = self.name(), self.dtype()
        written, aligned, nontemporal = (self.take_word(word) for word in ("written", "aligned", "nontemporal"))
        also = []
        if self.take_word("also"):
            also.append(self.one_of_dtypes())
            while self.scan.rest()[:1] not in (",", ")", ""):
                also.append(self.one_of_dtypes())
        return Param(name, "memory", dtype, written, aligned, nontemporal, tuple(also))

    def scratch(self) -> Scratch:
        name, dtype = self.name(), self.dtype()
        self.scan.expect("[")
        extent = scan_expr(self.scan)
        self.scan.expect("]")
        return Scratch(name, dtype, extent, self.one_of(STORAGES, "a storage"))

    # -- loops -----------------------------------------------------------------------------------

    def body(self, margin: int) -> tuple[Stmt, ...]:
        """The statements that stand further to the right than ``margin``."""
        found: list[Stmt] = []
        while self.indent() > margin and not self.scan.text.lstrip().startswith("version "):
            if self.take_word("loop"):
                here = self.indent()
                loop = self.loop_head()
                self.scan.expect(":")
                self.finish_line()
                found.append(replace(loop, body=self.body(here)))
                continue
            instr = self.instr()
            if instr is None:
                raise self.scan.error(f"expected an instruction or a loop, found {self.scan.rest()!r}")
            found.append(instr)
            self.finish_line()
        return tuple(found)

    def indent(self) -> int:
        text = self.scan.text
        return len(text) - len(text.lstrip())

    def loop_head(self) -> Loop:
        symbol = self.token(WORD, "a loop variable")
        self.scan.expect("<")
        return Loop(symbol, scan_expr(self.scan), (), self.map())

    def map(self) -> LoopMap:
        if self.scan.rest()[:1] in (",", ":", ""):
            return SERIAL
        kind = self.one_of(LOOP_KINDS, "a kind of loop")
        width = self.scan.match(_WIDTH)
        interleave = self.scan.match(_INTERLEAVE)
        block = self.name() if self.take_word("of") else ""
        tail = next((tail for word, tail in TAILS.items() if self.take_word(word)), TAILS["exact"])
        return LoopMap(kind, int(width[0]) if width else 1, int(interleave[1]) if interleave else 1, block, tail)

"""IR text back to IR, see Note [IR text] in :mod:`.print`. Written by hand; nothing is evaluated."""

from __future__ import annotations

from dataclasses import replace

from .._size_text import SizeTextError, scan_size, write_size
from ..symbolic.text import ScanError, scan_expr
from .nodes import (
    PRECISIONS,
    Alias,
    Arg,
    Buffer,
    BufferKind,
    BufferRef,
    Contraction,
    ExternCall,
    Instr,
    Literal,
    LoopNest,
    Operand,
    Origin,
    Precision,
    Program,
    Range,
    Stage,
    Step,
    SymInput,
)
from .parse_instr import NAME, PATH, STRING, WORD, InstrParser, unquote
from .print import IR_TEXT_VERSION, LITERAL_KINDS, RESERVED

__all__ = ["parse_nest", "parse_program"]

_BUFFER_KINDS = {kind.value: kind for kind in BufferKind}
_PRECISIONS: dict[str, Precision] = {precision: precision for precision in PRECISIONS}


def parse_program(text: str) -> Program:
    """The program that :func:`print_program` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    return parser.whole(parser.program)


def parse_nest(text: str) -> LoopNest:
    """The loop nest that :func:`print_nest` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    return parser.whole(parser.nest)


class _Parser(InstrParser):
    """Programs and their steps."""

    # -- program ---------------------------------------------------------------------------------

    def program(self) -> Program:
        self.scan.expect("aotkit-ir")
        version = self.integer()
        if version != IR_TEXT_VERSION:
            raise self.scan.error(f"IR text of version {version}; this package reads version {IR_TEXT_VERSION}")
        self.finish_line()
        self.scan.expect("program")
        name = self.name()
        self.finish_line()
        sources: list[tuple[str, int, str, int]] = []
        computed: list[tuple[str, str]] = []
        inputs: list[str] = []
        buffers: list[Buffer] = []
        steps: list[Step] = []
        while not self.take_word("return"):
            if self.take_word("symbol"):
                sources.append(self.symbol_source())
            elif self.take_word("size"):
                computed.append(self.computed_size())
            elif self.take_word("input"):
                inputs.append(("$" if self.scan.take("$") else "") + self.name())
                self.finish_line()
            elif self.take_word("buffer"):
                buffers.append(self.buffer())
            else:
                steps.append(self.step())
        outputs: list[BufferRef | SymInput | None] = []
        while not self.scan.at_end():
            if outputs:
                self.scan.expect(",")
            outputs.append(self.output())
        self.finish_line()
        return Program(
            name, tuple(inputs), tuple(buffers), tuple(steps), tuple(outputs), tuple(sources), tuple(computed)
        )

    def symbol_source(self) -> tuple[str, int, str, int]:
        self.scan.expect("$")
        name = self.name()
        self.scan.expect("=")
        self.scan.expect("input")
        source = (name, self.integer(), self.name(), self.integer())
        self.finish_line()
        return source

    def computed_size(self) -> tuple[str, str]:
        self.scan.expect("$")
        name = self.name()
        self.scan.expect("=")
        try:
            tree, self.scan.position = scan_size(self.scan.text, self.scan.position)
        except SizeTextError as error:
            raise ScanError(error.message, error.position) from None
        self.finish_line()
        return name, write_size(tree)

    def buffer(self) -> Buffer:
        name = self.name()
        self.scan.expect(":")
        dtype, sizes = self.name(), self.exprs()
        self.scan.expect("strides")
        strides = self.exprs()
        kind = self.one_of(_BUFFER_KINDS, "a buffer kind")
        self.scan.expect("on")
        device = self.token(PATH, "a device")
        self.finish_line()
        return Buffer(name, dtype, sizes, strides, kind, device)

    def output(self) -> BufferRef | SymInput | None:
        if self.take_word("none"):
            return None
        arg = self.arg()
        if not isinstance(arg, BufferRef | SymInput):
            raise self.scan.error("an output is a buffer, sym(...) or none")
        return arg

    def step(self) -> Step:
        if self.take_word("extern"):
            step: Step = self.extern()
        elif self.take_word("alias"):
            step = self.alias()
        elif self.scan.text.lstrip().startswith("loop "):
            return self.nest()
        elif self.take_word("contraction"):
            return self.contraction()
        else:
            known = "a buffer, loop, contraction, extern, alias or return"
            raise self.scan.error(f"expected {known}, found {self.scan.rest()!r}")
        self.finish_line()
        return replace(step, origin=self.origin()) if self.take_word("origin") else step

    # -- extern calls and aliases ----------------------------------------------------------------

    def extern(self) -> ExternCall:
        name = self.name()
        self.scan.expect(":")
        results: list[str | None] = []
        if not self.scan.take("()"):
            results.append(self.result_name())
            while self.scan.take(","):
                results.append(self.result_name())
        self.scan.expect("=")
        target = self.token(PATH, "an operator name")
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        self.scan.expect("(")
        while not self.scan.take(")"):
            if args or kwargs:
                self.scan.expect(",")
            keyword = self.keyword()
            if keyword is not None:
                kwargs.append((keyword, self.arg()))
            else:
                args.append(self.arg())
        mutates: list[str] = []
        if self.take_word("mutates"):
            mutates.append(self.name())
            while self.scan.take(","):
                mutates.append(self.name())
        reason = self.token(STRING, "a quoted reason") if self.take_word("reason") else ""
        return ExternCall(name, target, tuple(args), tuple(kwargs), tuple(results), tuple(mutates), reason)

    def result_name(self) -> str | None:
        return None if self.take_word("_") else self.name()

    def keyword(self) -> str | None:
        """The name of ``name=``, if that comes next."""
        position = self.scan.position
        found = self.scan.match(NAME)
        if found is not None and self.scan.take("="):
            return unquote(found[0])
        self.scan.position = position
        return None

    def arg(self) -> Arg:
        if self.scan.take("["):
            items: list[Arg] = []
            while not self.scan.take("]"):
                if items:
                    self.scan.expect(",")
                items.append(self.arg())
            return tuple(items)
        position = self.scan.position
        found = self.scan.match(NAME)
        if found is not None and self.scan.take("("):
            if found[0] == "sym":
                result: Arg = SymInput(scan_expr(self.scan))
            elif found[0] == "item":
                result = BufferRef(self.name(), number=True)
            else:
                result = Literal(unquote(found[0]), self.scalar())
            self.scan.expect(")")
            return result
        if found is not None and found[0] not in RESERVED:
            return BufferRef(unquote(found[0]))
        self.scan.position = position
        value = self.scalar()
        return Literal(LITERAL_KINDS[type(value)], value)

    def alias(self) -> Alias:
        name = self.name()
        self.scan.expect(":")
        result = self.name()
        reuses = self.take_word("reuses")
        if not reuses:
            self.scan.expect("=")
        base = self.name()
        self.scan.expect("+")
        return Alias(name, result, base, scan_expr(self.scan), reuses=reuses)

    # -- loop nests ------------------------------------------------------------------------------

    def nest(self) -> LoopNest:
        if not self.take_word("loop"):
            raise self.scan.error(f"expected a loop, found {self.scan.rest()!r}")
        name, outer = self.name(), self.ranges()
        self.finish_line()
        origin = self.origin() if self.take_word("origin") else Origin()
        stages: list[Stage] = []
        while self.take_word("stage"):
            ranges = self.ranges()
            self.finish_line()
            stages.append(Stage(ranges, self.body()))
        return LoopNest(name, outer, tuple(stages), origin)

    def body(self) -> tuple[Instr, ...]:
        """The instructions from here on."""
        found: list[Instr] = []
        while (instr := self.instr()) is not None:
            found.append(instr)
            self.finish_line()
        return tuple(found)

    def ranges(self) -> tuple[Range, ...]:
        """Those of a loop or a stage, which end its line."""
        result = self.loops()
        self.scan.expect(":")
        return result

    def loops(self) -> tuple[Range, ...]:
        self.scan.expect("(")
        result: list[Range] = []
        while not self.scan.take(")"):
            if result:
                self.scan.expect(",")
            symbol = self.token(WORD, "a loop variable")
            self.scan.expect("<")
            result.append(Range(symbol, scan_expr(self.scan)))
        return tuple(result)

    # -- contractions ----------------------------------------------------------------------------

    def contraction(self) -> Contraction:
        name = self.name()
        batch, rows, columns, reduced = (self.group(word) for word in ("batch", "rows", "columns", "reduced"))
        self.scan.expect("in")
        accumulate = self.one_of_dtypes()
        precision = self.one_of(_PRECISIONS, "a precision")
        self.scan.expect(":")
        self.finish_line()
        origin = self.origin() if self.take_word("origin") else Origin()
        left, right, total = (self.part(word) for word in ("left", "right", "sum"))
        library = None
        if self.take_word("library"):
            library = replace(self.extern(), origin=origin)
            self.finish_line()
        ranges = batch, rows, columns, reduced
        result, epilogue = total.value, total.body
        return Contraction(name, *ranges, left, right, accumulate, precision, result, epilogue, library, origin)

    def group(self, word: str) -> tuple[Range, ...]:
        self.scan.expect(word)
        return self.loops()

    def part(self, word: str) -> Operand:
        """``word %value:`` and the instructions below."""
        self.scan.expect(word)
        value = self.value()
        self.scan.expect(":")
        self.finish_line()
        return Operand(self.body(), value)

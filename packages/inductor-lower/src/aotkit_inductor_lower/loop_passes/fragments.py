"""Parts of a program that run by themselves: a product with what is computed before and after it, to be measured.

Note [What is measured]
    A kernel of ours takes in what comes before and after a product, and ATen's call does not. So what is compared is
    not one product with another: it is the steps around it, once with ATen's call in them and once with the
    contraction, each fused as the graph would have it. Around it are the nests whose results a contraction takes in, if
    there are any, and elementwise nests behind it, one after the other as the first reads the last. Whatever else they
    read is an input of the fragment, and what something else reads of them is an output.

    Buffers and steps are numbered in a fragment, so that those of equal layers are equal, and their text is what a
    measured time is kept by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import identity_store, numel, traps
from ..ir import Alias, Arg, Buffer, BufferKind, BufferRef, Contraction, ExternCall, LoopNest, Origin, Program, Step
from ..ir.walk import buffers_of, map_contraction, map_nest, ranges_within, step_reads, step_writes, with_buffers

__all__ = ["Fragments"]

MOST = 8  # nests behind a product: kernels take in few, and what is behind these is the same in both
_OWN = (BufferKind.TEMPORARY, BufferKind.OUTPUT, BufferKind.SCRATCH)


@dataclass(frozen=True, slots=True)
class Fragments:
    """Cuts fragments out of a program. ``constants``: buffers that stay constants in them; others become inputs.
    ``returned``: buffers whose memory the caller gets."""

    program: Program
    buffers: Mapping[str, Buffer]
    dependencies: Dependencies
    views: Mapping[str, Alias]
    constants: Set[str]
    returned: Set[str]

    @staticmethod
    def of(program: Program, constants: Set[str] = frozenset()) -> Fragments:
        """Analyze a program."""
        views = {step.result: step for step in program.steps if isinstance(step, Alias)}
        dependencies = Dependencies.of(program)
        returned = {dependencies.root[out.name] for out in program.outputs if isinstance(out, BufferRef)}
        return Fragments(program, buffers_of(program), dependencies, views, constants, returned)

    def around(
        self,
        position: int,
        results: Sequence[str],
        ways: Sequence[Sequence[Step]],
        *,
        made: Sequence[Buffer] = (),
        before: Sequence[Step] = (),
        alone: bool = False,
    ) -> tuple[Program, ...] | str:
        """A program for each of the ``ways`` to compute the same ``results``, that of the step at a position, with what
        comes behind it unless it is ``alone``; or why there is none. ``made``: buffers of ways that the program does
        not have. ``before``: steps of the program that some of the ways have, too."""
        behind = [] if alone else self._behind(position, results)
        inside = {position, *behind}
        inside.update(k for step in before for name in step_writes(step) for k in self.dependencies.writers[name])
        known = {**self.buffers, **{buffer.name: buffer for buffer in made}}
        names = _Names()
        cut = []
        for steps in ways:
            steps = list(self._with_views([*steps, *(self.program.steps[k] for k in behind)]))
            why = _unmeasurable(steps, known)
            if why:
                return why
            cut.append(self._program(steps, known, inside, names))
        return tuple(cut)

    def _behind(self, position: int, results: Sequence[str]) -> list[int]:
        """The positions of elementwise nests behind a step of one result, each of which reads the result of the one
        before."""
        found: list[int] = []
        while len(results) == 1 and len(found) < MOST:
            (name,) = results
            readers = sorted(k for k in self._readers(name) if k > position and self._is_elementwise(k, name))
            if not readers:
                break
            position = readers[0]
            found.append(position)
            results = step_writes(self.program.steps[position])
        return found

    def _readers(self, name: str) -> list[int]:
        """Who reads a buffer, itself or through views."""
        found: list[int] = []
        for position in self.dependencies.readers.get(name, ()):
            step = self.program.steps[position]
            found += self._readers(step.result) if isinstance(step, Alias) else [position]
        return found

    def _is_elementwise(self, position: int, name: str) -> bool:
        step = self.program.steps[position]
        if not isinstance(step, LoopNest) or traps(step) or identity_store(step, self.buffers) is None:
            return False
        (result,) = step.writes
        own = self.buffers[result].kind in _OWN and len(self.dependencies.writers[result]) == 1
        return own and numel(self.buffers[result]) == numel(self.buffers[name])

    def _with_views(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The steps, with views of constants and of what they compute before they are read."""
        steps = list(steps)
        kept = {*self.constants, *(name for step in steps for name in step_writes(step))}
        done: set[str] = set()
        for step in steps:
            for name in step_reads(step):
                chain = self._chain(name)
                if chain and chain[0].base in kept:
                    yield from (view for view in chain if view.result not in done)
                    done.update(view.result for view in chain)
            yield step

    def _chain(self, name: str) -> list[Alias]:
        """The views through which a buffer shows another one, the first of that one first."""
        found: list[Alias] = []
        while name in self.views:
            found.append(self.views[name])
            name = found[-1].base
        return found[::-1]

    def _program(self, steps: Sequence[Step], known: Mapping[str, Buffer], inside: Set[int], names: _Names) -> Program:
        written = {name for step in steps for name in step_writes(step)}
        read = {name for step in steps for name in step_reads(step)}
        inputs: list[str] = []
        outputs: list[str] = []
        buffers: list[Buffer] = []
        for name in dict.fromkeys(name for step in steps for name in (*step_reads(step), *step_writes(step))):
            buffer, kind = known[name], BufferKind.TEMPORARY
            if name not in written:
                kind = BufferKind.CONSTANT if name in self.constants else BufferKind.INPUT
                inputs += [names[name]] if kind is BufferKind.INPUT else []
            elif buffer.kind is BufferKind.SCRATCH:
                kind = buffer.kind
            elif name not in self.views and (name not in read or self._leaves(name, inside)):
                kind = BufferKind.OUTPUT
                outputs.append(names[name])
            buffers.append(replace(buffer, name=names[name], kind=kind))
        renamed = tuple(_renamed(step, number, names) for number, step in enumerate(steps))
        outputs.sort(key=lambda name: int(name[1:]))  # the same order, in whichever a way writes them
        return Program("fragment", tuple(inputs), tuple(buffers), renamed, tuple(map(BufferRef, outputs)))

    def _leaves(self, name: str, inside: Set[int]) -> bool:
        """Whether something else reads a buffer, or the caller."""
        if name not in self.buffers:
            return False
        return self.dependencies.root[name] in self.returned or not inside >= set(self._readers(name))


@dataclass(slots=True)
class _Names:
    """Numbers in the place of names of buffers."""

    known: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.known.setdefault(name, f"b{len(self.known)}")


def _unmeasurable(steps: Sequence[Step], buffers: Mapping[str, Buffer]) -> str:
    """Why steps are not measured; nothing if they are."""
    names = {name for step in steps for name in (*step_reads(step), *step_writes(step))}
    loops = [loop.size for step in steps if isinstance(step, LoopNest | Contraction) for loop in ranges_within(step)]
    sizes = [size for name in names for size in (*buffers[name].sizes, *buffers[name].strides)]
    if any(size.constant is None for size in (*sizes, *loops)):
        return "a size is known at run time only, and the faster one of one size need not be that of another"
    if any(buffers[name].device != "cpu" for name in names):
        return "something of it is on another device"
    if any(isinstance(step, ExternCall) and step.mutates for step in steps):
        return "it writes to what it is given"
    return ""


def _renamed(step: Step, number: int, names: _Names) -> Step:
    """A step of a fragment, without where it is from."""
    own = {name: names[name] for name in (*step_reads(step), *step_writes(step))}
    step = replace(step, name=f"s{number}", origin=Origin())
    if isinstance(step, LoopNest):
        return map_nest(step, lambda instr: with_buffers(instr, own))
    if isinstance(step, Alias):
        return replace(step, result=own[step.result], base=own[step.base])
    if isinstance(step, ExternCall):
        kwargs = tuple((key, _argument(arg, own)) for key, arg in step.kwargs)
        results = tuple(None if name is None else own[name] for name in step.results)
        args = tuple(_argument(arg, own) for arg in step.args)
        return replace(step, args=args, kwargs=kwargs, results=results, reason="")
    library = None if step.library is None else _renamed(step.library, number, names)
    return replace(map_contraction(step, lambda instr: with_buffers(instr, own)), library=library)  # type: ignore[arg-type]


def _argument(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_argument(each, names) for each in arg)
    return replace(arg, name=names[arg.name]) if isinstance(arg, BufferRef) else arg

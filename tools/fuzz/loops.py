"""Random loop programs: scheduled, generated and run between redzones, against the interpreter.

python -m tools.fuzz.loops --programs 2000 --target cpu:x86-64-v3
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

import torch

from aotkit_inductor_lower import LowerOptions, bind_program, interpret_program, print_program, schedule_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.targets.select import named_target

__all__ = ["check_program", "main"]


def check_program(seed: int, target: str = "cpu") -> str | None:
    """What is wrong with the results of the seed's program, unscheduled and scheduled; ``None`` if nothing is.

    Odd seeds hold only what is exact in any order, and must agree to the bit.
    """
    options = RandomOptions(exact_only=seed % 2 == 1, nests=2 + seed % 5)
    program = random_program(seed, options)
    scheduled, _ = schedule_program(program)
    for form, tried in (("as it is", program), ("scheduled", scheduled)):
        made = named_target(target).generate(tried, normalize(linearize(tried)), LowerOptions())
        run = bind_program(made, redzones=True)
        for sizes in range(2 if program.symbol_sources else 1):
            inputs = random_inputs(program, seed + 1000 * sizes, options)
            try:
                found = run(list(inputs))
            except (RuntimeError, IndexError) as error:
                return f"{form}: {type(error).__name__}: {error}"
            for position, (want, got) in enumerate(zip(interpret_program(program, inputs), found, strict=True)):
                assert isinstance(want, torch.Tensor)
                problem = difference(want, got, exact=options.exact_only)
                if problem is not None:
                    return f"{form}, result {position}: {problem}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many; print the first of each kind of failure. Returns 1 if there was one."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.loops", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--target", default="cpu", help="cpu, cpu:NAME with a level of x86-64, or interpreter")
    chosen = parser.parse_args(arguments)
    begin, failures = time.monotonic(), Counter[str]()
    for seed in range(chosen.seed, chosen.seed + chosen.programs):
        problem = check_program(seed, chosen.target)
        if problem is not None:
            kind = problem.split(":")[0].split(",")[0]
            if not failures[kind]:
                print(f"program {seed}: {problem}\n{print_program(random_program(seed))}")
            failures[kind] += 1
    print(f"{chosen.programs} programs in {time.monotonic() - begin:.0f} s: {sum(failures.values())} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Mutation testing: small faults are put into the sources, one at a time, and the package's own tests must notice.

    python -m tools.mutants run --group loop-passes --sample 60   # goes on where it was stopped
    python -m tools.mutants report --group loop-passes --diffs    # what was found so far, with the survivors

Why neither mutmut nor cosmic-ray: cosmic-ray starts the whole test command for each mutant, and mutmut forks, but
after it has rewritten all sources, and it selects tests by function. Importing torch, our packages and 60 test files
takes ten times as long as the test that kills a mutant, and a function of a lowering is reached by thousands of
tests, its odd line by few. Here everything is imported and collected once. A mutant is a fork of that process in
which `__code__` of the mutated function is exchanged (:mod:`.patch`). It runs the tests that reach the mutated lines
(:mod:`.coverage`), the fastest first, up to the first failure, which takes less than a second. Faults in what runs at
import are put in by an import hook, in a fork of a process that has imported third parties only.

What is mutated is in :mod:`.operators`. The sample is stable: sites are ranked by a hash of seed and text, so a
change of one function exchanges the mutants of that function only. Verdicts of code that is moved or renamed follow it
(:mod:`.follow`). Survivors that no test can kill are listed in `equivalent.toml`, each with its reason.
"""

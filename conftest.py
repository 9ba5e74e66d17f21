"""What every test of the repository starts from: the same random numbers, whatever ran before it."""

import gc
import hashlib
import importlib.util
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until all is imported, see `pytest_collection_finish`

import torch  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed-shift",
        type=int,
        default=0,
        help="added to every seed: with other numbers, a bound that holds by luck shows itself",
    )
    parser.addoption("--part", type=int, nargs=2, metavar=("I", "N"), help="every N-th of the tests, from the I-th on")
    whole = "all tests marked `nightly`, and all parameters of tests marked `sample`"
    parser.addoption("--whole", action="store_true", help=whole)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """The frontend empties the processor's caches after each compile, to measure how long the guards take.

    And it has the collector look through all objects that are young, a twentieth of the time that the tests take, and
    writes its and the incumbent's settings as text for a log of all compiles, which is a hundredth.
    """
    with pytest.MonkeyPatch.context() as patch:
        for settings in ("_get_dynamo_config_for_logging", "_scrubbed_inductor_config_for_logging"):
            patch.setattr(f"torch._dynamo.utils.{settings}", lambda: None, raising=False)
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            yield


@pytest.fixture(scope="session")
def equal_kernels_are_compiled_once() -> Iterator[None]:
    """LLVM makes the same object code of the same text for the same processor: the second time it is taken from before.

    The text is made each time, and the code loaded. A third of what the CPU target's tests have LLVM compile they have
    had compiled before: with other options, for other inputs, or when a cache was emptied.
    """
    from aotkit_inductor_lower.targets.cpu import generate

    compile_text, made = generate.compile_text, dict[tuple[bytes, Any], bytes]()

    def compile_once(text: str, target: Any) -> bytes:
        key = hashlib.sha256(text.encode()).digest(), target
        if key not in made:
            made[key] = compile_text(text, target)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "compile_text", compile_once)
        yield


@pytest.fixture(scope="session")
def _interpreter() -> Iterator[Callable[[], None]]:
    """Quickens Triton's interpreter, as soon as something has imported it."""
    quicken, done = _tool("triton_interpreter").quicken, False

    def look() -> None:
        nonlocal done
        done = done or quicken(patch)

    with pytest.MonkeyPatch.context() as patch:
        yield look


@pytest.fixture
def quick_interpreter(_interpreter: Callable[[], None]) -> None:
    """Triton's interpreter takes less time for the same results; see tools/triton_interpreter.py."""
    _interpreter()


@pytest.fixture(scope="session")
def warm_processes() -> Any:
    """The module tools/warm_python.py, which is not on the path of a package's tests."""
    return _tool("warm_python")


def _tool(name: str) -> Any:
    """A module of tools/ by its file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def warm_python(warm_processes: Any) -> Iterator[Any]:
    """``warm_python.run([script, ..], cwd=.., env=..)`` starts Python with torch and the compiler already imported.

    For tests that need a process of their own and are not about what is imported there; see tools/warm_python.py.
    """
    processes = warm_processes.WarmPython()
    yield processes
    processes.close()


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples in every run: what is found by chance belongs to `nox -s fuzz`."""
    shift = config.getoption("--seed-shift", default=0)
    if shift:
        _shift_seeds(shift)
    _ask_no_device_that_is_not_there()
    torch.manual_seed(0)  # for the tensors that test files make while they are imported
    # pytest listens to every logger that does not propagate. Torch formats each graph and the stack of each message for
    # this one as soon as it has a listener, which would be a twentieth of all tests' time.
    logging.getLogger("torch.__trace").propagate = True
    try:
        from hypothesis import settings
    except ImportError:
        return  # some packages' tests do without it
    settings.register_profile("same-examples", derandomize=True, deadline=None)
    settings.load_profile("same-examples")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Of logs, warnings are kept: torch traces itself at DEBUG, and a failure would print hundreds of empty lines.

    The option `log_level` would set the root's level six times a test, each time emptying what every logger remembers.
    """
    if plugin := session.config.pluginmanager.get_plugin("logging-plugin"):
        for handler in (plugin.caplog_handler, plugin.report_handler):
            handler.setLevel(logging.WARNING)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `sample` a part stays, of those marked `nightly` none; tests marked `gpu` say what they lack."""
    if not config.getoption("--emulate", default=None):
        _mark_thinned(items)
    if not config.getoption("--whole", default=False):
        _keep_samples(config, items)
    if part := config.getoption("--part", default=None):
        first, step = part
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % step != first])
        items[:] = items[first::step]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def _mark_thinned(items: list[pytest.Item]) -> None:
    """Functions of tools/thinned_tests.txt are samples: every so many-th parameter, or of those that a mark leaves.

    Under emulation all of these run, and together call each kind of kernel. How the list is made says Note [Tests that
    are thinned] in tools/times_of_tests.py.
    """
    lines = (Path(__file__).parent / "tools" / "thinned_tests.txt").read_text(encoding="utf-8").splitlines()
    every = {name: int(number) for number, _, name in (line.partition(" ") for line in lines)}
    for item in items:
        if number := every.get(item.nodeid.partition("[")[0]):
            own = item.get_closest_marker("sample")
            arguments = (own.args, own.kwargs) if own else ((), {})
            item.add_marker(pytest.mark.sample(*arguments[0], **arguments[1], every=number), append=False)


def _sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of a test function's cases that its mark leaves; every so many-th begins elsewhere for each function."""
    mark = cases[0].get_closest_marker("sample")
    assert mark is not None
    if mark.args:
        cases = cases[: mark.args[0]]
    elif ways := mark.kwargs.get("ways"):
        cases = _covering(cases, ways)
    every = mark.kwargs.get("every", 1)
    first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode()) % every
    return cases[first::every] or cases[:1]


def _keep_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``sample(n)``: the first n parameters; ``sample(ways=n)``: see `_covering`; ``every=n``; ``nightly``: none."""
    drawn = dict[str, list[pytest.Item]]()
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("nightly"):
            drawn.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set[pytest.Item]()
    for cases in drawn.values():
        kept.update(_sample(cases))
    drawn_or_nightly = {item for item in items if any(map(item.get_closest_marker, ("sample", "nightly")))}
    left_out = [item for item in items if item in drawn_or_nightly and item not in kept]
    if left_out:
        items[:] = [item for item in items if item not in drawn_or_nightly or item in kept]
        config.hook.pytest_deselected(items=left_out)


def _covering(cases: list[pytest.Item], ways: int) -> list[pytest.Item]:
    """Few cases in which each combination occurs that any ``ways`` of a test's arguments have together.

    With one way each value of each argument occurs, with two each pair of values of any two. The same cases in every
    process: always the first of those that have most of what is missing and, among these, values that are rarest yet,
    so that of a product of operators and types not all operators get the same type. Which one is the first hangs on the
    test's name, so that two tests of the same product have not the same cases.
    """
    first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode()) % len(cases)
    cases = cases[first:] + cases[:first]
    values = {case: _values(case) for case in cases}
    of = {case: set(combinations(values[case], min(ways, len(values[case])))) for case in cases}
    missing, chosen, times = set[object]().union(*of.values()), list[pytest.Item](), Counter[object]()
    while missing:
        best = max(cases, key=lambda case: (len(of[case] & missing), -sum(times[each] for each in values[case])))
        missing -= of[best]
        times.update(values[best])
        chosen.append(best)
    return chosen


def _values(case: Any) -> list[tuple[str, type, object]]:
    return [(name, type(each), _hashed(each)) for name, each in case.callspec.params.items()]


def _hashed(value: object) -> object:
    """A value, or which object it is if it has no hash."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def pytest_collection_finish() -> None:
    """What is imported now stays: the collector need not look through a million objects again and again.

    And torch's tables of operators look for the test that asks for samples, in each frame of the stack and with its
    source: of unittest's tests only, and slower than most of ours.
    """
    for name in ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core"):
        if name in sys.modules:
            sys.modules[name].extract_test_fn = lambda: None
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _ask_no_device_that_is_not_there() -> None:
    """Seeding asks all kinds of devices, and of one that is not there torch keeps who asked: half a millisecond."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            for module in (device, getattr(device, "random", None)):
                if hasattr(module, "_lazy_call"):
                    module._lazy_call = lambda *_, **__: None


def _shift_seeds(shift: int) -> None:
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(int(number) + shift)

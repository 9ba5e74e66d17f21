"""The size check: what is measured, what is reported, and that exceptions only shrink."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tools.check_sizes import Size, function_lines, long_parts, main, measure, parameter_count, problems_of
from tools.workspace import PACKAGES, ROOT, import_name

LIMITS = {"file_lines": 10, "function_lines": 5}


def parse_function(text: str) -> ast.FunctionDef:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return node


def test_the_docstring_does_not_count_as_lines_of_a_function() -> None:
    assert function_lines(parse_function('def f():\n    """One\n    two."""\n    return 1\n')) == 2


def test_self_does_not_count_as_a_parameter_and_stars_do() -> None:
    assert parameter_count(parse_function("def f(self, a, /, b, *args, c, **kwargs): ...")) == 5


def test_methods_and_nested_functions_are_measured_under_their_full_name() -> None:
    names = {size.where for size in measure("class A:\n    def f(self):\n        def g(): ...\n", "x.py")}
    assert names == {"x.py", "x.py::A.f", "x.py::A.f.g"}


def test_a_function_inside_a_branch_is_measured() -> None:
    assert Size("parameters", "x.py::f", 2) in set(measure("if True:\n    def f(a, b): ...\n", "x.py"))


def test_a_lowering_rule_takes_what_its_operator_takes() -> None:
    text = "@TABLE.lowers(aten.x.default)\ndef f(a, b): ...\n@other\ndef g(a): ...\n"
    counted = [size.where for size in measure(text, "x.py") if size.kind == "parameters"]
    assert counted == ["x.py::g"]


def test_what_is_over_a_limit_is_reported() -> None:
    problems, _ = problems_of([Size("parameters", "x.py::f", 4)], 3, {})
    assert problems == ["x.py::f: 4 parameters, allowed are 3"]


def test_an_exception_allows_the_recorded_size_and_not_more() -> None:
    allowed = {"x.py::f": 4}
    assert problems_of([Size("parameters", "x.py::f", 4)], 3, allowed)[0] == []
    assert problems_of([Size("parameters", "x.py::f", 5)], 3, allowed)[0]


@pytest.mark.parametrize("sizes", [[], [Size("parameters", "x.py::f", 2)], [Size("parameters", "x.py::f", 4)]])
def test_an_exception_larger_than_needed_is_reported(sizes: list[Size]) -> None:
    problems, needed = problems_of(sizes, 3, {"x.py::f": 6})
    assert problems == ["x.py::f: the exception of 6 parameters is no longer needed"]
    assert needed.get("x.py::f", 0) in (0, 4)


def test_long_files_and_functions_are_named() -> None:
    sizes = [Size("file_lines", "x.py", 11), Size("function_lines", "x.py::f", 5), Size("function_lines", "x.py::g", 6)]
    assert [text.partition(",")[0] for text in long_parts(sizes, LIMITS)] == ["x.py: 11 lines", "x.py::g: 6 lines"]


@pytest.fixture
def small_repository(tmp_path: Path) -> Path:
    for name in PACKAGES:
        source = tmp_path / "packages" / name / "src" / import_name(name)
        source.mkdir(parents=True)
        (source / "__init__.py").write_text("")
    (tmp_path / "tools").mkdir()
    for name in ("budgets.toml", "size_exceptions.toml"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    (tmp_path / "tools" / "size_exceptions.toml").write_text("[parameters]\n")
    return tmp_path


def function(parameters: int) -> str:
    return f"def f({', '.join(f'a{n}' for n in range(parameters))}): ...\n"


def test_a_long_file_is_a_warning(small_repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_file = small_repository / "packages" / "cache" / "src" / "aotkit_cache" / "long.py"
    long_file.write_text("x = 1\n" * 501)
    assert main([], small_repository) == 0
    assert "warning: packages/cache/src/aotkit_cache/long.py: 501 lines" in capsys.readouterr().out


def test_the_command_fails_on_many_parameters_and_shrink_adds_no_exception(small_repository: Path) -> None:
    assert main([], small_repository) == 0
    (small_repository / "packages" / "cache" / "src" / "aotkit_cache" / "wide.py").write_text(function(9))
    assert main([], small_repository) == 1
    assert main(["--shrink"], small_repository) == 1


def test_shrink_lowers_an_exception(small_repository: Path) -> None:
    where = "packages/cache/src/aotkit_cache/wide.py"
    (small_repository / where).write_text(function(10))
    exceptions = small_repository / "tools" / "size_exceptions.toml"
    exceptions.write_text(f'[parameters]\n"{where}::f" = 12\n')
    assert main([], small_repository) == 1
    assert main(["--shrink"], small_repository) == 0
    assert f'"{where}::f" = 10' in exceptions.read_text()
    assert main([], small_repository) == 0

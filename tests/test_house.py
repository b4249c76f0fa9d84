"""The house rules that a machine can check: who imports whom, sizes, names, docstrings, dependencies.

Every rule is a function over source text that answers with what breaks it, and is shown a few lines that do break it,
so that a rule which has gone blind fails too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "offloadz"
PYTHON = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h", ".inl"))

ROOMS = ("plan", "memory", "runtime", "model", "train")
"""From below to above: each may import itself and what is left of it."""
TOP = ("cli", "check", "audit", "bench", "report", "__main__", "__init__")
ABOVE_PLAN = ("command.py", "question.py", "catalogue.py")
"""Files of plan/ that turn a configuration into a question; they import `config` inside functions or for types."""
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_BARE_METHOD_LINES = 400, 80, 10
FORBIDDEN_WORDS = ("manager", "engine", "handler", "coordinator", "context", "utils")
PLACEMENT_WORDS = ("placement", "parameters", "gradients", "optimizer", "activations", "unified", "tier", "route")
IN_OTHERS = {"huggingface_hub": "transformers", "markupsafe": "jinja2"}
"""Imported packages that a declared one cannot be installed without."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imported modules, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong_imports(room: str, file: str, tree: ast.AST) -> list[str]:
    """Imports of a file in `room` (or at the top) that go up or across."""
    allowed = {"offloadz"} if room == "train" else set()
    if room in ROOMS:
        allowed |= {f"offloadz.{below}" for below in ROOMS[: ROOMS.index(room) + 1]}
        allowed |= {"offloadz.config"} if room == "train" or (room == "plan" and file in ABOVE_PLAN) else set()
    elif room == "config":
        allowed = {"offloadz.config", "offloadz.plan.errors", "offloadz.plan.words"}
    else:
        allowed = {f"offloadz.{name}" for name in (*ROOMS, *TOP, "config")}
    found = [name for name in imports(tree) if name.split(".")[0] == "offloadz"]
    return [n for n in found if not any(n == a or (a != "offloadz" and n.startswith(a + ".")) for a in allowed)]


def long_functions(tree: ast.AST, most: int = MOST_FUNCTION_LINES) -> list[str]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions}
    return [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > most]


def long_native_functions(text: str, most: int = MOST_FUNCTION_LINES) -> list[str]:
    """Functions at the left margin (clang-format puts them there, inside namespaces too)."""
    found, start, name = [], 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        opens = line.endswith("{") and line[0] not in " #/}"
        if opens and not re.match(r"(namespace|extern|struct|enum|class)\b", line):
            start, name = number, line
        elif start and line.startswith("}"):
            if number - start + 1 > most:
                found.append(f"{name}: {number - start + 1} lines")
            start = 0
    return found


def undocumented(tree: ast.Module) -> list[str]:
    """The module, public functions and classes without a docstring, and public methods beyond a few lines."""
    found = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and not ast.get_docstring(inner):
                lines = (inner.end_lineno or 0) - inner.lineno + 1
                found += [f"{node.name}.{inner.name}"] if lines > MOST_BARE_METHOD_LINES else []
    return found


def defined_names(tree: ast.AST) -> set[str]:
    """Names that a file gives to something: functions, classes, arguments, variables."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def forbidden(names: set[str]) -> list[str]:
    """Names with one of the words that say nothing about what a thing does."""
    words = {name: re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower()) for name in names}
    return sorted(name for name, parts in words.items() if set(parts) & set(FORBIDDEN_WORDS))


def branches_on_placement(tree: ast.AST) -> list[str]:
    """`if` and `match` statements, and conditional expressions that ask for a placement."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Match):
            found.append(f"line {node.lineno}: a statement")
        elif isinstance(node, ast.IfExp):
            asked = {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
            asked |= {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            found += [f"line {node.lineno}: asks for {word}" for word in asked & set(PLACEMENT_WORDS)]
    return found


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_file(path: Path) -> None:
    """One file of the package against every rule."""
    tree, text = tree_of(path), path.read_text(encoding="utf-8")
    assert wrong_imports(room_of(path), path.name, tree) == []
    assert len(text.splitlines()) <= MOST_FILE_LINES
    assert long_functions(tree) == []
    assert undocumented(tree) == []
    assert forbidden(defined_names(tree) | {path.stem}) == []


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name)
def test_native_file(path: Path) -> None:
    """One native file: sizes, a comment near its top, no header of torch or (but for the module itself) Python."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_FILE_LINES
    assert long_native_functions(text) == []
    assert "//" in "".join(text.splitlines()[:15])
    assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", text)
    assert path.name == "module.cpp" or "Python.h" not in text


def test_plan_runs_without_torch() -> None:
    """plan/ names torch only inside the one function that is asked for unknown families, and answers without it."""
    for path in (PACKAGE / "plan").glob("*.py"):
        named = [n for n in imports(tree_of(path)) if n.split(".")[0] in ("torch", "transformers", "numpy")]
        assert path.name == "families.py" or named == []
    code = (
        "import sys; from offloadz.config import load_config; from offloadz.plan.question import question;"
        "plan = question(load_config('examples/quickstart.toml')).answer(); assert plan.fits;"
        "sys.exit(int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_import_starts_nothing() -> None:
    """`import offloadz` loads no torch and starts no thread."""
    code = (
        "import sys, threading, offloadz; assert 'torch' not in sys.modules;"
        "assert threading.active_count() == 1; assert set(offloadz.__all__) <= {*vars(offloadz), *offloadz._ROOMS}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_actions_have_no_branches_a_plan_could_answer() -> None:
    for name in ("actions.py", "device_actions.py"):
        assert branches_on_placement(tree_of(PACKAGE / "runtime" / name)) == []


def test_no_pickle() -> None:
    """No pickle is read or written, nor what goes through it."""
    for path in PYTHON:
        text = path.read_text(encoding="utf-8")
        assert not {"pickle", "shelve", "marshal", "dill"} & {n.split(".")[0] for n in imports(tree_of(path))}, path
        assert not re.search(r"torch\.(load|save)\(", text), path


def test_dependencies() -> None:
    """What is imported is declared, if only as an extra; what is declared has its reason in docs/log.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["report"] + extras["liger"]
    names = {re.split(r"[<>=\[; ]", line)[0].replace("-", "_") for line in declared}
    used = {n.split(".")[0] for path in PYTHON for n in imports(tree_of(path))} - {"offloadz"}
    foreign = {n for n in used if n not in sys.stdlib_module_names}
    assert {n for n in foreign if IN_OTHERS.get(n, n) not in names} == set()
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert {n for n in names if f"| `{n}` |" not in log} == set()


def test_rules_see_what_breaks_them() -> None:
    """Each rule against lines that break it."""
    up = ast.parse("def f():\n    from offloadz.model.run import Run")
    assert wrong_imports("runtime", "x.py", up) == ["offloadz.model.run"]
    assert wrong_imports("train", "x.py", up) == []
    assert wrong_imports("config", "x.py", ast.parse("import offloadz.plan.search")) == ["offloadz.plan.search"]
    assert wrong_imports("plan", "spec.py", ast.parse("import offloadz.config")) == ["offloadz.config"]
    assert wrong_imports("model", "x.py", ast.parse("import offloadz.cli, offloadz")) == ["offloadz.cli", "offloadz"]
    assert long_functions(ast.parse("def f():\n" + "    x = 1\n" * 80)) == ["f: 81 lines"]
    assert long_native_functions("namespace n {\nint f() {\n" + "  a();\n" * 80 + "}\n}\n") == ["int f() {: 82 lines"]
    assert undocumented(ast.parse("def f(): pass\nclass _G: pass")) == ["the module", "f"]
    assert forbidden({"SlotManager", "file_utils", "ioEngine", "managed", "text_of"}) == [
        "SlotManager", "file_utils", "ioEngine",
    ]  # fmt: skip
    assert len(branches_on_placement(ast.parse("if a: pass\nb = 1 if x.placement.unified else 2"))) == 3

"""The shape of the code: imports run one way, slow libraries stay where they belong, public names are held."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dualstore

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "errors", "shapes", "schema", "keys", "bulk", "half", "thrift", "spool", "part", "log", "steps", "joint", "ranks", "rates",
    "coefficients", "writer", "rewind", "index", "database", "kernels", "rows", "sums", "scan", "scores", "repeats", "sketch",
    "explain", "best", "search", "topk", "result", "probes", "sharing", "adaptive", "weights", "parameters", "scoring",
    "ranking", "totals", "votes", "relations", "stiffness", "gains", "verify", "summary", "store", "merge", "capture", "datasets",
    "experiments", "hf", "lightning",
)  # fmt: skip
ONLY_IN = {
    "duckdb": {"database"},
    "torch": {"capture", "experiments", "hf"},
    "rich": set(),
    "click": set(),
    "polars": {"result"},
    "transformers": {"hf"},
    "lightning": {"lightning"},
    "matplotlib": {"experiments"},
}


def imports(path: Path) -> list[str]:
    """Modules that a file imports when it runs; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and "or" not in ast.unparse(node.test):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def modules() -> list[tuple[str, Path]]:
    """(name, file) of every module of the library; those of capture are named capture."""
    files = sorted((ROOT / "dualstore").rglob("*.py"))
    names = [(file.relative_to(ROOT / "dualstore").parts[0].removesuffix(".py"), file) for file in files]
    return [(name, file) for name, file in names if name != "__init__"]


@pytest.mark.parametrize(("name", "file"), modules(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_imports_run_one_way_along_the_pipeline(name: str, file: Path) -> None:
    assert name in ORDER, f"put {name} into its place in ORDER"
    inside = [module.split(".")[1] for module in imports(file) if module.startswith("dualstore.")]
    later = [module for module in inside if ORDER.index(module) >= ORDER.index(name) and module != name]
    assert not later, f"{file}: imports {later}, which come later"


@pytest.mark.parametrize(("name", "file"), modules(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_heavy_libraries_are_imported_in_their_place_only(name: str, file: Path) -> None:
    for module in imports(file):
        library = module.split(".")[0]
        assert name in ONLY_IN.get(library, {name}), f"{file} imports {library}"


def test_nothing_in_the_library_imports_the_command_line() -> None:
    assert not [file for _, file in modules() if any(module.startswith("dualstore.cli") for module in imports(file))]


def test_the_public_names_are_these() -> None:
    assert dualstore.__all__ == sorted(dualstore.__all__)
    for name in dualstore.__all__:
        assert getattr(dualstore, name) is not None
    assert not {name for name in dualstore.__all__ if (ROOT / "dualstore" / f"{name}.py").exists()}


def test_reading_a_store_imports_no_slow_library() -> None:
    code = "import sys, dualstore, dualstore.cli; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in found
    assert not {"torch", "duckdb", "polars", "jaxtyping", "rich"} & set(found)


def test_every_statement_says_purpose_in_and_out() -> None:
    for file in (ROOT / "sql").glob("*.sql"):
        head = [line.split(":")[0] for line in file.read_text().splitlines() if line.startswith("--")]
        assert head == ["-- purpose", "-- in", "-- out"], file

"""The distribution holds what is on disk, and the sources keep to their limits of size."""

import ast
import tomllib
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMESPACE = "pop_engine"
FOLDERS = ("configs", "plugins", "builder", "runtime", "tools")
SOURCES = sorted(path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 50


def setuptools_table() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def listed_packages() -> list[str]:
    packages = setuptools_table()["packages"]
    assert isinstance(packages, list)
    return packages


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def test_every_folder_with_code_is_a_listed_package() -> None:
    """An unlisted one drops out of the wheel, and nothing says so."""
    on_disk = {path.parent for path in SOURCES if path.parts[len(ROOT.parts)] != "tests"}
    assert {folder_of(package) for package in listed_packages()} == on_disk
    assert len(listed_packages()) == len(set(listed_packages()))


def test_every_listed_package_is_typed_and_mapped() -> None:
    for package in listed_packages():
        assert (folder_of(package) / "__init__.py").is_file(), package
        assert (folder_of(package) / "py.typed").is_file(), package
    mapping = setuptools_table()["package-dir"]
    assert mapping == {f"{NAMESPACE}.{folder}": folder for folder in FOLDERS}


def test_the_namespace_has_no_init_file() -> None:
    """Ours is a PEP 420 namespace: an __init__.py at the root would close it."""
    assert not (ROOT / "__init__.py").exists()


def test_presets_and_markers_are_package_data() -> None:
    data = setuptools_table()["package-data"]
    assert isinstance(data, dict)
    assert "py.typed" in data["*"]
    assert "presets/*.yaml" in data[f"{NAMESPACE}.configs"]
    on_disk = {path.name for path in (ROOT / "configs" / "presets").iterdir()}
    installed = {entry.name for entry in resources.files("pop_engine.configs").joinpath("presets").iterdir()}
    assert on_disk == installed
    assert {Path(name).suffix for name in on_disk} == {".yaml"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_size_of_files_and_functions(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert len(content.splitlines()) <= MAX_FILE_LINES
    functions = (n for n in ast.walk(ast.parse(content)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}

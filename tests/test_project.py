"""The project itself: who imports whom, what is declared, what README promises."""

import ast
import csv
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minivit"
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TWINS = {"in_numpy": "numpy", "in_jax": "jax"}
STANDARD = set(sys.stdlib_module_names)


def imports(path):
    """Absolute names of all that a module of the package imports, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names) if node.level else [base]


MODULES = sorted(PACKAGE.rglob("*.py"))
BELOW_THE_TWINS = (
    "shapes",
    "variants",
    "params",
    "optim",
    "datasets",
    "checkpoint",
    "dialects",
    "images",
    "machine",
    "masking",
    "architecture",
    "augmentation",
    "command",
    "folders",
    "options",
    "recipes",
    "states",
    "synthetic",
)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    inside = path.relative_to(PACKAGE).parts
    names = {name for name in imports(path) if name.split(".")[0] not in STANDARD}
    if inside[0] in TWINS:
        plain = ("minivit.shapes", "minivit.interpolation")
        allowed = (TWINS[inside[0]], f"minivit.{inside[0]}", *plain)
        # One function that NumPy lacks, and of SciPy no more.
        names -= {"scipy.special"} if inside == ("in_numpy", "mlp.py") else set()
        assert all(name.startswith(allowed) for name in names), names
    elif path.stem in BELOW_THE_TWINS or (inside[0] == "figures" and path.stem != "__main__"):
        assert not any(n.startswith(("jax", "minivit.in_", "minivit.engine")) for n in names), names
    if path.stem in ("shapes", "interpolation", "machine", "__init__") and len(inside) == 1:
        assert not names
    others = ("lessons", "tests", "torch", "flax", "optax", "einops", "timm", "vit_pytorch")
    if inside != ("peers.py",):  # what the benchmark compares with, where it is installed
        assert not any(name.startswith(others) for name in names)
    assert "minivit.peers" not in names or inside == ("contestants.py",)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("minivit", ["jax", "numpy", "matplotlib"]),
        ("minivit.in_numpy", ["jax", "matplotlib"]),
        ("minivit.engine_numpy", ["jax", "matplotlib"]),
        ("minivit.train", ["jax", "matplotlib"]),
        ("minivit.figures", ["jax", "matplotlib.pyplot"]),
    ],
)
def test_importing_is_light(module, absent):
    """In a process of its own: --help and the NumPy twin do not wait for JAX."""
    code = f"import {module}, sys; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def split_requirement(line):
    """Name and range."""
    return re.match(r"([A-Za-z0-9_-]+)(.*)", line.replace(" ", "")).groups()


def test_environment_yml_is_pyproject():
    """Conda names two packages otherwise; the ranges must be the same."""
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert conda["channels"] == ["conda-forge"]
    theirs = dict(split_requirement(line) for line in conda["dependencies"])
    assert theirs.pop("python") == PROJECT["requires-python"]
    theirs.pop("pip")
    theirs["matplotlib"] = theirs.pop("matplotlib-base")
    extras = PROJECT["optional-dependencies"]
    ours = PROJECT["dependencies"] + extras["lessons"] + extras["dev"]
    ours = dict(split_requirement(line) for line in ours if not line.startswith("minivit["))
    assert theirs == ours


def test_readme_has_the_two_commands():
    """.ci/run reads them from there; and no placeholder was left."""
    assert not re.search(r"^[A-Z]{3,}$", README, re.M)
    commands = [line for line in README.splitlines() if line.startswith("pip install -e")]
    assert commands == [
        "pip install -e . && python -m minivit.train --tiny",
        "pip install -e '.[dev]' && pytest",
    ]


def test_readme_links_and_letters():
    """Every file that README names exists, and the letters are those of the package."""
    import minivit

    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", README):
        assert (ROOT / (target[0] or target[1])).exists(), target
    letters = re.search(r"B batch.*?R width of pre_logits", " ".join(minivit.__doc__.split()))[0]
    assert letters in " ".join(README.split())


def recorded(name):
    """The rows of a file of results."""
    with open(ROOT / "data" / name, newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_of_the_first_command():
    """The accuracy that README promises, and how much longer NumPy takes."""
    jax, numpy = recorded("tiny.csv")
    assert f"**{float(jax['accuracy']):.1f} %**" in README
    ratio = float(numpy["seconds"]) / float(jax["seconds"])
    said = f"gradients: {float(numpy['accuracy']):.1f} %, in {ratio:.1f} times the time"
    assert said in " ".join(README.split())


def test_numbers_of_other_image_sizes():
    """README's table is what was recorded, and nothing else."""
    found = []
    for line in re.findall(r"^\| `(.*)$", README, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        if re.match(r"(corners|bilinear|bicubic|random)", line):
            columns = [("56x56", "0"), ("56x56", "300"), ("28x56", "0"), ("28x56", "300")]
            name = cells[0].split("`")[0]
            found += [
                (size, name, steps, cell.removesuffix(" %"))
                for (size, steps), cell in zip(columns, cells[1:], strict=False)
                if cell
            ]
    rows = [tuple(row.values()) for row in recorded("resolutions.csv")]
    assert sorted(found) == sorted(rows[1:])
    assert f"({rows[0][-1]} % at 28x28)" in README


def test_numbers_of_few_shot():
    """README's table is what was recorded."""
    rows = {}
    for row in recorded("few_shot.csv"):
        rows.setdefault(row["features"], []).append(f"{row['accuracy']} ± {row['deviation']}")
    assert len(rows) == 5
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in README


@pytest.mark.parametrize("name", ["families.csv", "masked.csv"])
def test_numbers_over_seeds(name):
    """Each cell of README's tables is the mean and the deviation of the runs that were recorded."""
    runs = {}
    for *what, _, accuracy in (row.values() for row in recorded(name)):
        runs.setdefault(tuple(what), []).append(float(accuracy))
    plain = README.replace("*", "")
    for what, values in runs.items():
        cell = f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f}"
        assert f"| {cell} |" in plain, what


def test_numbers_of_the_benchmark():
    """README's table of speeds has the medians that were recorded, to two digits."""
    plain = README.replace("*", "")
    rows = [row for row in recorded("bench.csv") if row["config"] != "B/16"]
    for name in ("minivit JAX", "timm compiled", "vit-pytorch"):
        ratios = {
            (row["what"], row["config"]): f"{float(row['ratio']):.2f}"
            for row in rows
            if row["contestant"] == name
        }
        order = [(what, c) for what in ("train", "forward") for c in ("tiny", "tiny/4", "Ti/16")]
        assert f"| {' | '.join(ratios[key] for key in order)} |" in plain, name


def test_the_map_is_complete():
    """Each module of the package has its line in `minivit.__doc__`."""
    import minivit

    for path in PACKAGE.iterdir():
        if path.stem.startswith("__"):
            continue
        assert re.search(rf"^    {path.stem}\b", minivit.__doc__, re.M), path.stem


def test_no_pickle_and_no_empty_assert():
    """CKP-04: arrays are read without pickle everywhere; ruff sees to asserts (B015, PT)."""
    for path in MODULES:
        text = path.read_text()
        assert "pickle=True" not in text
        assert "import pickle" not in text


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_are_short(path):
    """Fifty lines at most, and in the twins 45 with documentation and backward pass."""
    limit = 45 if path.parent.name in TWINS else 50
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < limit, node.name

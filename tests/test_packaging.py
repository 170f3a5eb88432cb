"""Packaging: the sdist builds, the wheel holds only the package, metadata agree."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from peers import peer
from programs import PYTHON, ended

import megapack

ROOT = Path(__file__).parents[1]


def _setup(*words: object) -> None:
    environment = {**os.environ, "MEGAPACK_NO_EXTENSION": "1"}
    ended(sys.executable, "setup.py", "--quiet", *words, cwd=ROOT, env=environment)


def _tracked(*patterns: str) -> list[Path]:
    """Return files of the checkout, without built or installed ones."""
    folders = ("megapack", "csrc", "docs", "tests", "benchmarks", "examples", "launch", ".github")
    places = [ROOT.glob, *((ROOT / folder).rglob for folder in folders)]
    return sorted({path for find in places for pattern in patterns for path in find(pattern)})


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return names in the source distribution, without its folder."""
    out = tmp_path_factory.mktemp("sdist")
    _setup("egg_info", "--egg-base", out, "sdist", "-d", out)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        return {name.partition("/")[2] for name in file.getnames()}


def test_sdist_has_all_files_of_a_build(sdist: set[str]) -> None:
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/bindings/stubs.py"}
    needed |= {"megapack/compare/templates/page.css", "megapack/compare/templates/run.html"}
    for folder, pattern in (("csrc", "*.[ch]pp"), ("megapack", "*.py")):
        found = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}
        assert len(found) > 50
        needed |= found
    assert needed <= sdist


def test_sdist_has_examples_but_no_tests(sdist: set[str]) -> None:
    programs = {"launch/pretrain.py", "launch/slurm.sh", "examples/pytorch_loop.py"}
    assert programs | {"configs/demo_cpu.yaml"} <= sdist
    stray = {name for name in sdist if re.match(r"tests|benchmarks|runs|demo|\.", name)}
    assert not stray
    assert not {name for name in sdist if name.endswith((".so", ".pyc", ".pyi"))}


def _wheel(folder: Path) -> Path:
    """Build a wheel without the extension."""
    _setup(
        *("egg_info", "--egg-base", folder),
        *("build", "--build-base", folder / "build"),
        *("bdist_wheel", "--bdist-dir", folder / "wheel", "-d", folder),
    )
    (archive,) = folder.glob("*.whl")
    return archive


def test_wheel_has_only_the_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(_wheel(tmp_path)) as file:
        names = set(file.namelist())
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        commands = file.read(entry).decode()
    assert "megapack-build = megapack.cli.main:main" in commands
    for name in ("pretrain", "evaluate", "export", "teacher", "probe"):
        assert f"megapack-{name} = megapack.command_line:{name}" in commands
    assert "[pytest11]\nmegapack = megapack.pytest_plugin" in commands
    # megapack/configs is a link to configs: one copy in the checkout, files in a wheel.
    recipes = {f"megapack/configs/{path.name}" for path in ROOT.glob("configs/*.yaml")}
    assert len(recipes) > 5 and recipes <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "megapack").rglob("*.py")}
    pages = {str(p.relative_to(ROOT)) for p in ROOT.glob("megapack/compare/templates/*")}
    assert len(pages) == 5
    assert sources | pages | {"megapack/py.typed", "megapack/_core.pyi"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops <= {"megapack", entry.partition("/")[0]}


@pytest.mark.parametrize("name", ["pretrain", "evaluate", "export", "teacher", "probe"])
def test_a_program_without_torch_ends_in_one_line(name: str) -> None:
    """It runs with a torch that is not there; the message says what to install."""
    code = f"import sys; sys.modules['torch'] = None; from megapack.command_line import {name}; "
    done = ended(*PYTHON, f"{code}sys.exit({name}())", status=1)
    (line,) = done.stderr.splitlines()
    assert "torch" in line and "train" in line


def _only(name: str, folder: Path) -> None:
    """Link an installed distribution and those that it needs into a folder."""
    waiting, known = [name], set()
    while waiting:
        try:
            installed = distribution(waiting.pop())
        except PackageNotFoundError:  # of another platform
            continue
        if installed.name in known:
            continue
        known.add(installed.name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            (folder / top).exists() or (folder / top).symlink_to(installed.locate_file(top))
        needs = [Requirement(text) for text in installed.requires or ()]
        waiting += [one.name for one in needs if not one.marker or one.marker.evaluate()]


PROBE = """
import sys, torch
from torch import nn
from megapack.probe import __file__, probe

class Mean(nn.Module):
    def forward(self, x, cu_seqlens):
        return x.cumsum(1) / (1 + torch.arange(x.shape[1])[:, None])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.state = nn.Embedding(9, 4), Mean()
    def forward(self, input_ids, cu_seqlens):
        return self.state(self.embed(input_ids), cu_seqlens)

model = Model()
batch = {"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 4, 9])}
print(__file__)
print(probe(lambda batch: model.embed(batch["input_ids"]), batch))
print(probe(model, batch).leaks[0].layer)
print({"numpy", "yaml", "transformers", "xxhash", "megapack._core"} & {*sys.modules})
"""


def test_the_probe_of_a_wheel_runs_with_torch_alone(tmp_path: Path) -> None:
    """The environment has torch, and none of the dependencies of the wheel."""
    peer("torch")
    ended(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    _only("torch", packages)
    with zipfile.ZipFile(_wheel(tmp_path)) as archive:
        archive.extractall(packages)
    for name in ("numpy", "transformers", "yaml"):
        assert not (packages / name).exists()
    printed = ended(python, "-I", "-c", PROBE, cwd=tmp_path).stdout.splitlines()
    assert printed[0] == str(packages / "megapack" / "probe" / "__init__.py")
    assert printed[1].startswith("2 documents are independent")
    assert printed[2:] == ["state", "set()"]


CORE = {
    "module.cpp": '#include "a.hpp"\n#include <Python.h>\nPyMODINIT_FUNC PyInit__core() {'
    " static PyModuleDef core{}; return PyModuleDef_Init(&core); }",
    "a.cpp": '#include "a.hpp"\n#include "b.hpp"\nint a() { return b(); }',
    "b.cpp": '#include "b.hpp"\nint b() { return 1; }',
    "a.hpp": "int a();",
    "b.hpp": "int b();",
}


def test_build_compiles_only_changed_sources(tmp_path: Path) -> None:
    """Run setup.py on three small sources."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    project = '[project]\nname = "megapack"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "csrc" / "bindings").mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / "bindings" / "stubs.py", tmp_path / "csrc" / "bindings")
    for name, text in CORE.items():
        (tmp_path / "csrc" / name).write_text(f"{text}\n")

    def ages() -> dict[Path, int]:
        """Return object or extension -> time of its build."""
        found = (path for path in tmp_path.rglob("*") if path.suffix in (".o", ".so"))
        return {path: path.stat().st_mtime_ns for path in found}

    def build(**environment: str) -> dict[Path, int]:
        env = {**os.environ, "MEGAPACK_WERROR": "1", **environment}
        ended(sys.executable, "setup.py", "--quiet", "build_ext", cwd=tmp_path, env=env)
        return ages()

    def compiled(**environment: str) -> set[str]:
        """Return the objects that a build makes; check that a second build makes none."""
        before = ages()
        after = build(**environment)
        assert build(**environment) == after
        (binary,) = (path for path in after if path.suffix == ".so")
        assert after[binary] == max(after.values())
        return {path.stem for path in after if path != binary and after[path] != before.get(path)}

    assert compiled() == {"module", "a", "b"}
    (tmp_path / "csrc" / "b.cpp").touch()
    assert compiled() == {"b"}
    (tmp_path / "csrc" / "b.hpp").touch()
    assert compiled() == {"a", "b"}
    assert compiled(MEGAPACK_WERROR="0") == {"module", "a", "b"}  # other flags
    (types,) = tmp_path.rglob("_core.pyi")
    (tmp_path / "megapack").mkdir()
    ended(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", cwd=tmp_path)
    assert (tmp_path / "megapack" / "_core.pyi").read_text() == types.read_text()
    assert "Types of the C++ extension" in types.read_text()


def test_no_text_says_pip_install_megapack() -> None:
    """The package is not published, so `pip install megapack` fails."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("megapack/**/*.py")]
    assert len(files) > 100
    wrong = re.compile(r"pip3? install[^\n]*['\" ]megapack\b")
    told = [f"{path}: {hit[0]}" for path in files for hit in wrong.finditer(path.read_text())]
    assert not told


def test_demo_installs_gigatoken() -> None:
    """Otherwise the demo prints twice that gigatoken would be faster."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"-e '\.\[([\w,-]*train[\w,-]*)\]'", makefile)
    assert "gigatoken" in extras.split(",")


def test_version_is_defined_once() -> None:
    """A second place would be forgotten at a release. The changelog lists all versions."""
    wanted = re.escape(megapack.__version__)
    found = []
    for path in _tracked("*.py", "*.toml", "*.cfg", "*.cff", "*.yml", "*.hpp", "Makefile"):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^\W*_*version[_\W].*\b{wanted}\b", text, re.MULTILINE | re.IGNORECASE):
            found.append(str(path.relative_to(ROOT)))
    assert found == ["megapack/__init__.py"]
    assert f"## {megapack.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_python_versions_agree_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    minors = re.findall(r"Python :: 3\.(\d+)", project)
    assert minors == ["10", "11", "12", "13"]
    assert 'requires-python = ">=3.10,<3.14"' in project
    (wheels,) = re.findall(r'^build = "(.*)"', project, re.MULTILINE)
    assert re.findall(r"cp3(\d+)-", wheels) == minors
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert tests["jobs"]["data"]["strategy"]["matrix"]["python"] == [f"3.{m}" for m in minors]


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    said = ended("make", "help", cwd=ROOT).stdout
    lines = dict(re.findall(r"^make (\S+) +(\S.{10,})$", said, re.MULTILINE))
    targets = set(re.findall(r"^([a-z][\w%-]*):", makefile, re.MULTILINE)) - {"bench-%"}
    assert len(targets) > 18 and set(lines) == targets | {"bench-NAME"}
    assert all(len(line) <= 100 for line in said.splitlines())


def _lint(*command: str) -> None:
    # Find the programs of this environment even if it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended(*command, cwd=ROOT, env={**os.environ, "PATH": path})


def test_workflows_pass_their_linter() -> None:
    """zizmor: permissions, credentials, expressions; the schema: keys and values."""
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    assert [Path(file).stem for file in files] == ["docs", "tests", "wheels"]
    _lint("zizmor", "--offline", "--quiet", ".github")
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        _lint("check-jsonschema", "--builtin-schema", schema, *files)


def test_workflows_call_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    called = set(re.findall(r"run: make ([\w-]+)", "\n".join(texts)))
    assert {"test", "test-data", "docs"} <= called
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/feature.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_citation_and_issue_forms_follow_their_schema(schema: str, file: str) -> None:
    _lint("check-jsonschema", "--builtin-schema", f"vendor.{schema}", file)


def test_urls_of_the_repository_are_one() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (repository,) = re.findall(r'^Repository = "(.*)"', project, re.MULTILINE)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert settings["extra"]["repository"] == citation["repository-code"] == repository
    assert f'Documentation = "{settings["site_url"]}"' in project
    for page in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert f"{repository}/security/advisories/new" in (ROOT / page).read_text()

"""Pages of the site, generated from docstrings, parsers, dataclasses and results; its build."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import report
import site_hook
import tables
from programs import ended

import megapack
from megapack.cli.main import COMMANDS as COMMANDS_OF_BUILD
from megapack.data.blend import Ramp, Source, Stage
from megapack.integrations.rows.open_rows import Manifest
from megapack.tokenization.pipeline.plan import BuildConfig
from megapack.training.config import PretrainConfig

ROOT = Path(__file__).parents[1]
COMMANDS = [f"megapack-build {name}" for name in COMMANDS_OF_BUILD]
COMMANDS += [f"megapack-{name}" for name in ("pretrain", "evaluate", "export", "teacher")]
REPOSITORY = "https://host/megapack"


@pytest.fixture(scope="session")
def made() -> dict[str, str]:
    """Return page -> markdown; imports griffe and all commands."""
    return site_hook.made_pages()


# ---- API, commands, configuration ----------------------------------------------------------------


@pytest.mark.pages
@pytest.mark.parametrize("package", site_hook.PACKAGES)
def test_api_of_a_package_shows_every_public_name_once(package: str, made: dict[str, str]) -> None:
    public = set(importlib.import_module(f"megapack.{package}").__all__)
    page = made[f"api/{package}.md"]
    shown = re.findall(r"^::: [\w.]+\.(\w+)$|^- \[`(\w+)`\]", page, re.MULTILINE)
    names = [one or other for one, other in shown]
    assert len(names) == len(set(names)) and set(names) == public


@pytest.mark.pages
def test_api_begins_with_the_top_level_names_and_documents_them_there(made: dict[str, str]) -> None:
    shown = re.findall(r"^::: [\w.]+\.(\w+)$", made["api/megapack.md"], re.MULTILINE)
    assert set(shown) == set(megapack.__all__) - {"__version__"}
    assert "::: megapack.packing.pack.pack\n" in made["api/megapack.md"], (
        "the function, not its file"
    )


@pytest.mark.pages
def test_api_has_the_integrations_that_guides_name(made: dict[str, str]) -> None:
    hosts = {"megatron", "gpt_neox", "megatron_deepspeed", "transformers", "planned", "verl"}
    assert {f"api/hosts/{host}.md" for host in hosts} <= set(made)
    assert "::: megapack.integrations.hosts.transformers.PackedTrainer" in "\n".join(made.values())


@pytest.mark.pages
@pytest.mark.parametrize("command", COMMANDS)
def test_command_page_has_every_option_with_its_help(command: str, made: dict[str, str]) -> None:
    page = made[f"commands/{command.replace(' ', '_')}.md"]
    actions = site_hook.parsers()[command]._actions
    options = [a for a in actions if a.help != "==SUPPRESS==" and a.dest != "help"]
    assert options
    for action in options:
        name = (action.option_strings or [str(action.metavar or action.dest)])[-1]
        assert re.search(rf"^`.*{re.escape(name)}.*\n:   \S", page, re.MULTILINE), name


def _nested(cls: type) -> list[type]:
    sections = [key.section for key in site_hook.keys(cls) if key.section]
    return [cls, *(found for section in sections for found in _nested(section))]


CONFIGURATIONS = [*_nested(PretrainConfig), BuildConfig, Manifest, Source, Stage, Ramp]


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=lambda cls: cls.__name__)
def test_configuration_key_says_its_meaning_and_its_default(cls: type) -> None:
    keys = {key.name: key for key in site_hook.keys(cls)}
    assert list(keys) == [field.name for field in dataclasses.fields(cls)]
    for field in dataclasses.fields(cls):
        key = keys[field.name]
        assert len(key.meaning.split()) > 1, f"{cls.__name__}.{field.name} says nothing"
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert float(key.default) == field.default


@pytest.mark.pages
def test_configuration_page_says_types_defaults_units_as_yaml_does(made: dict[str, str]) -> None:
    everything = "\n".join(made.values())
    meanings = [key.meaning for cls in CONFIGURATIONS for key in site_hook.keys(cls)]
    assert all(" ".join(meaning.split()) in everything for meaning in meanings)
    keys = {key.name: key for key in site_hook.keys(PretrainConfig)}
    assert (keys["num_steps"].type, keys["num_steps"].default) == ("int | null", "null")
    assert keys["run_dir"].default == ""
    page = made["configuration/training.md"]
    head = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("`")}
    assert "`bf16 | fp32`, default `bf16`" in head["engine.precision"]
    assert "`int` tokens, required" in head["data.micro_batch_tokens"]
    assert "distill.alpha" in head, "the keys of an optional section"


@pytest.mark.pages
def test_home_page_begins_with_a_banner_of_readme(made: dict[str, str]) -> None:
    """Title, three buttons, for whom, the picture; the links of features are cards."""
    banner, _, rest = made["index.md"].partition("\n## ")
    assert banner.count(".md-button }") + banner.count(".md-button--primary }") == 3
    order = ["# megapack", ".md-button", "**Use it if**", "**Do not use it if**", "packing.svg"]
    assert [banner.index(part) for part in order] == sorted(banner.index(part) for part in order)
    assert rest.index('<div class="grid cards" markdown>') > rest.index("## What it does")


def test_meanings_that_stand_on_the_command_line_alone_are_found() -> None:
    keys = {key.name: key for key in site_hook.keys(BuildConfig)}
    assert "JSON Lines" in keys["inputs"].meaning and keys["verify_fraction"].default == "0.0"


# ---- links and navigation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "page", "wanted"),
    [
        ("../CONTRIBUTING.md#words", "stability.md", "contributing.md#words"),
        ("../README.md", "guides/pytorch.md", "../README.md"),  # a missing page: mkdocs reports it
        ("../../README.md#install", "guides/pytorch.md", "../index.md#install"),
        ("docs/guides/pytorch.md", "index.md", "guides/pytorch.md"),
        ("docs/images/packing.svg", "index.md", "images/packing.svg"),
        ("../setup.py", "faq.md", f"{REPOSITORY}/blob/main/setup.py"),
        ("../examples", "faq.md", "examples.md"),
        ("../configs", "faq.md", f"{REPOSITORY}/tree/main/configs"),
        ("#here", "faq.md", "#here"),
        ("https://a.b/c", "faq.md", "https://a.b/c"),
    ],
)  # fmt: skip
def test_link_leads_to_the_site_or_the_repository(link: str, page: str, wanted: str) -> None:
    assert site_hook.relink(f"[a]({link})", page, REPOSITORY) == f"[a]({wanted})"
    code = f"```python\nx[0](../README.md)\n```\n[a]({link})"
    assert site_hook.relink(code, page, REPOSITORY).startswith("```python\nx[0](../README.md)\n")


def test_navigation_patterns_take_what_no_other_entry_names() -> None:
    pages = ["index.md", "b.md", "a.md", "guides/y.md", "guides/x.md", "guides/deep/z.md"]
    entries = [{"Home": "index.md"}, {"Start": ["b.md", "*.md"]}, {"Guides": ["guides/*.md"]}]
    assert site_hook.navigation(entries, pages) == [
        {"Home": "index.md"},
        {"Start": ["b.md", "a.md"]},
        {"Guides": ["guides/x.md", "guides/y.md"]},
    ]


@pytest.mark.pages
def test_navigation_has_every_page_once(made: dict[str, str]) -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    pages = sorted({*written, *made})
    named = list(site_hook._leaves(site_hook.navigation(settings["nav"], pages)))
    assert len(written) > 20 and sorted(named) == pages


# ---- the build -----------------------------------------------------------------------------------


class _Fetched(HTMLParser):
    """Parser that collects addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = dict(attrs)
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(given.get("href", ""))
        elif tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")


@pytest.mark.pages
def test_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """mkdocs checks links, anchors and navigation; in a strict build warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended(*command, cwd=ROOT, env=environment)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        reader = _Fetched()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found and not [a for a in reader.found if "//" in a], page


# ---- results -------------------------------------------------------------------------------------


def test_results_pages_are_what_the_command_writes_of_the_logged_runs() -> None:
    pages = report.pages_of(report.newest_runs(report.LOGGED))
    written = {path.stem: path.read_text(encoding="utf-8") for path in report.LOGGED.glob("*.md")}
    assert written == pages, "run `make bench-report`"


@pytest.mark.parametrize("page", sorted(report.LOGGED.glob("*.md")), ids=lambda page: page.stem)
def test_results_tables_are_narrow_and_say_once_what_they_were_measured_with(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert max(len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows) <= 8
    assert text.count("numpy 2.") == 1


def test_results_count_every_claim_that_does_not_hold() -> None:
    verdicts = [
        claim["agrees"]
        for name, run in report.newest_runs(report.LOGGED).items()
        if name.startswith("papers-")
        for claim in run["results"]["claims"]
    ]
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    counts = " | ".join(str(verdicts.count(v)) for v in ("yes", "no", "undecided"))
    assert f"| all | {counts} |" in page
    failed = page.partition("## What did not hold")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| (?!claimed)", failed, re.MULTILINE)) == verdicts.count("no") > 9


def test_results_mark_wide_spreads_and_memory_below_zero() -> None:
    rows = [
        {"side": "a", "seconds": 2.0, "spread_%": 330.0, "private_bytes": -2_392_064},
        {"side": "b", "seconds": 1.0, "spread_%": 3.0, "private_bytes": 13_275_136},
    ]
    assert list(tables.table(rows, "")) == [
        "| side | seconds | private MB |",
        "|---|---|---|",
        "| a \\* | 2 | not measurable |",
        "| b | 1 | 13.3 |",
        "",
        "Spread of the windows (quartiles over the median): at most 3 %, but for \\*: a 330 %. "
        "Do not build on these.",
        "",
    ]


def test_results_of_a_wide_table_are_told_apart_in_every_part() -> None:
    rows = [
        {"side": side, "pages": pages, **{f"m{i}": i + 0.5 if i < 9 else None for i in range(10)}}
        for side in "ab" for pages in ("cold", "warm")
    ]  # fmt: skip
    for row, factor in zip(rows, range(4), strict=True):
        row.update({f"m{i}": (i + 0.5) * factor for i in range(9)})
    lines = list(tables.table(rows, ""))
    heads = [line for line in lines if line.startswith("| side")]
    assert [re.findall(r"m\d", head) for head in heads] == [
        ["m0", "m1", "m2", "m3", "m4"], ["m5", "m6", "m7", "m8"]
    ]  # fmt: skip
    assert all(head.startswith("| side | pages |") for head in heads)


@pytest.mark.parametrize(
    ("value", "text"),
    [(42_496_732, "42.5M"), (1_000_000_000, "1G"), (0.18421, "0.184"), (131_072, "131,072"),
     (9_999, "9,999"), (12_345, "12,300"), (1.0009, "1.00"), (1.0, "1"), (99.96, "100"),
     (999_600.0, "1.00M"), (2.7e-05, "2.7e-05"), (0.0, "0"), (True, "yes"), (None, ""), ("a", "a")],
)  # fmt: skip
def test_results_have_three_digits(value: Any, text: str) -> None:
    assert tables.rounded(value) == text

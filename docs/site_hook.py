"""Hook of mkdocs (``mkdocs.yml``): generates the pages that are not files of docs/.

- ``outer_pages``: pages outside of docs/; ``home``: README.md with a banner and cards
- ``api_pages``: the public names of every package, filled in by mkdocstrings
- ``command_pages``: every command, from its argparse parser
- ``configuration_pages``: every key of the configurations, from the dataclasses
- ``navigation``: the pages of each entry of ``nav``, found by pattern
- ``relink``: points links that leave docs/ at pages of the site or at the repository

    relink("[words](../CONTRIBUTING.md#words)", "stability.md", REPOSITORY)
    # -> "[words](contributing.md#words)"
    relink("[a loop](../examples/pytorch_loop.py)", "quickstart.md", REPOSITORY)
    # -> "[a loop](https://github.com/megapack/megapack/blob/main/examples/pytorch_loop.py)"
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import inspect
import posixpath
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import megapack
from megapack.json_schema import field_docstrings

ROOT = Path(__file__).parents[1]
PACKAGES = ("storage", "packing", "planning", "compare", "data", "attention")
# Page of the repository -> page of the site, for pages outside of docs/.
OUTER = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "launch/README.md": "launch.md",
    "csrc/README.md": "csrc.md",
}


# ---- the hook ------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Make anchors like the repository's host, so that one link works on both."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and resolve the navigation."""
    from mkdocs.structure.files import File  # noqa: PLC0415

    for uri, text in made_pages().items():
        files.append(File.generated(config, uri, content=text))
    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = navigation(config.nav, pages)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page from any folder."""
    return relink(markdown, page.file.src_uri, config.extra["repository"])


def on_page_content(html: str, **_: Any) -> str:
    """Remove what docstrings and tables need in source: ``::`` before code, ``\\|`` in code."""
    html = html.replace("::</p>", ":</p>")
    return re.sub(r"<t[dh].*?</t[dh]>", lambda m: m[0].replace("\\|", "|"), html, flags=re.DOTALL)


def made_pages() -> dict[str, str]:
    """Return page of the site -> its markdown."""
    return {**outer_pages(), **api_pages(), **command_pages(), **configuration_pages()}


def anchor(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading: ``"Steps, and ranks"`` -> ``"steps-and-ranks"``."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", separator)


def outer_pages() -> dict[str, str]:
    """Return the pages of the repository outside of docs/."""
    pages = {uri: (ROOT / path).read_text(encoding="utf-8") for path, uri in OUTER.items()}
    return pages | {"index.md": home(pages["index.md"])}


def home(readme: str) -> str:
    """Return README with its head as a banner, and its two lists of bold entries as cards."""
    head, begin, rest = readme.partition("\n## ")
    match = re.fullmatch(r"(# .*?)\n\n(!\[.*?\]\(.*?\))\n\n(- \*\*.*)\n", head, re.DOTALL)
    assert match is not None, "README.md begins with title, text, picture and a list of two"
    features = re.compile(r"(?<=## What it does\n\n)- .*?(?=\n\n)", re.DOTALL)
    cards = '<div class="grid cards" markdown>\n\n{}\n\n</div>'
    rest, found = features.subn(lambda match: cards.format(match[0]), rest)
    assert found, "README.md has a list of features"
    about, picture, use = match.groups()
    columns = (f"{about}\n\n{BUTTONS}\n\n{use}", picture)
    banner = "\n".join(f"<div markdown>\n\n{column}\n\n</div>" for column in columns)
    banner = f'<div class="banner" markdown>\n{banner}\n</div>\n'
    return f"---\nhide: [navigation, toc]\n---\n{banner}{begin}{rest}"


# Links are relative to README.md.
BUTTONS = """[Get started](docs/quickstart.md){ .md-button .md-button--primary }
[How it works](docs/concepts.md){ .md-button }
[API](api/megapack.md){ .md-button }"""


def navigation(entries: Sequence[Any], pages: Sequence[str]) -> list[Any]:
    """Replace patterns by the matching pages that no other entry names, sorted by name."""
    named = set(_leaves(entries))

    def found(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [
                {title: inner if isinstance(inner, str) else navigation_of(inner)}
                for title, inner in entry.items()
            ]
        if "*" not in entry:
            return [entry]
        fitting = [
            page
            for page in pages
            if fnmatch.fnmatch(page, entry)
            and page.count("/") == entry.count("/")
            and page not in named
        ]
        return sorted(fitting, key=lambda page: page.removesuffix(".md"))

    def navigation_of(inner: Any) -> list[Any]:
        return [page for entry in inner for page in found(entry)]

    return navigation_of(entries)


def _leaves(entries: Sequence[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            for inner in entry.values():
                yield from _leaves([inner] if isinstance(inner, str) else inner)
        else:
            yield entry


# ---- links ---------------------------------------------------------------------------------------


def relink(markdown: str, page: str, repository: str) -> str:
    """Rewrite the relative links of a page for its place on the site."""
    origins = {uri: path for path, uri in OUTER.items()}
    folder = posixpath.dirname(origins.get(page, f"docs/{page}"))

    def moved(match: re.Match[str]) -> str:
        name, hash_, part = match[1].partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, name))
        readme = f"{path}/README.md"
        uri = OUTER.get(path) or OUTER.get(readme)
        if uri is None and path.startswith("docs/") and not path.endswith(".py"):
            uri = path.removeprefix("docs/")
        if uri is not None:
            return f"]({posixpath.relpath(uri, posixpath.dirname(page) or '.')}{hash_}{part})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports the dead link
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({repository}/{kind}/main/{path}{hash_}{part})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\]\(([^)\s]+)\)", moved, part) for part in parts[::2]]
    return "".join(parts)


# ---- API -----------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """Return a page per package: its docstring, then its public names, each once.

    Sources are parsed, not imported: hosts need not be installed.
    """
    import griffe  # noqa: PLC0415

    tree = griffe.load("megapack", search_paths=[str(ROOT)])
    shown: set[str] = set()
    # The names that most programs use come first, in the order in which the docstring names them.
    about = str(megapack.__doc__)
    names = sorted(megapack._HOME, key=lambda name: about.find(f"``{name}``") % len(about))
    homes = {name: _member(tree[_inside(megapack._HOME[name])], name) for name in names}
    pages = {"api/megapack.md": _api_page("megapack", about, homes, shown)}
    for name in [*PACKAGES, *integrations()]:
        module = tree[name]
        homes = {public: _member(module, public) for public in public_names(module)}
        title = module.path.rpartition("hosts.")[2]  # a host's path is too long for the menu
        about = f"`{module.path}`\n\n{module.docstring.value}"
        uri = f"api/{name.replace('integrations.hosts.', 'hosts/')}.md"
        pages[uri] = _api_page(title, about, homes, shown)
    return pages


def integrations() -> list[str]:
    """Return the modules of megapack.integrations.hosts that a page or an example names."""
    places = ("README.md", "docs/**/*.md", "examples/*.py")
    texts = [path.read_text(encoding="utf-8") for place in places for path in ROOT.glob(place)]
    found = re.compile(r"\bmegapack\.integrations\.hosts(?:\.| import )([a-z_]+)")
    named = {name for text in texts for name in found.findall(text)}
    folder = ROOT / "megapack" / "integrations" / "hosts"
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
    return ["integrations", *(f"integrations.hosts.{name}" for name in sorted(named & modules))]


def public_names(module: Any) -> list[str]:
    """Return ``__all__``; else the names that a package imports from itself or a module defines."""
    if module.exports:
        return [str(name) for name in module.exports]
    return [
        name
        for name, member in module.members.items()
        if not name.startswith("_")
        and (
            member.is_alias and member.target_path.startswith(module.path)
            if module.is_init_module
            else not member.is_alias
        )
    ]


def _member(module: Any, name: str) -> Any:
    """Return the member of a module; of a submodule with the same name (``pack``), its member."""
    member = module[name]
    return member[name] if member.is_module and name in member.members else member


def _inside(module: str) -> str:
    return module.removeprefix("megapack.")


def _api_page(title: str, about: str, homes: dict[str, Any], shown: set[str]) -> str:
    lines = [f"# {title}", "", *prose(inspect.cleandoc(about))]
    for public, member in homes.items():
        home = member.final_target if member.is_alias else member
        if home.path in shown:
            first = home.docstring.value.partition("\n")[0] if home.docstring else ""
            lines += [f"- [`{public}`][{home.path}]: {first}"]
        else:
            table = home.is_attribute and len(str(home.value)) > 60
            lines += [f"::: {home.path}", *([_VALUE_LEFT_OUT] if table else []), ""]
        shown.add(home.path)
    return "\n".join(lines)


# Hide the values of tables: they are long.
_VALUE_LEFT_OUT = "    options:\n        show_attribute_values: false"


# ---- commands ------------------------------------------------------------------------------------


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return every command by name."""
    from megapack.cli.main import COMMANDS, build_parser  # noqa: PLC0415

    found = {f"megapack-build {name}": build_parser(name) for name in COMMANDS}
    for name in ("pretrain", "evaluate", "export", "teacher"):
        module = importlib.import_module(f"megapack.training.{name}")
        found[f"megapack-{name}"] = module.build_parser()
    return found


def command_pages() -> dict[str, str]:
    from megapack.cli import main  # noqa: PLC0415

    lines = ["# megapack-build", "", inspect.cleandoc(main.__doc__ or ""), ""]
    for name, (_, about) in main.COMMANDS.items():
        lines += [f"[`megapack-build {name}`](megapack-build_{name}.md)", f":   {about}", ""]
    pages = {"commands/megapack-build.md": "\n".join(lines)}
    for name, parser in parsers().items():
        pages[f"commands/{name.replace(' ', '_')}.md"] = "\n".join(_command(name, parser))
    return pages


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"# {name}", "")
    yield from prose(parser.description or "")
    usage = _without_ansi(parser.format_usage()).removeprefix("usage: ").strip()
    yield from ("## Usage", "", "```text", re.sub(r"\n +", "\n    ", usage), "```", "")
    for group in parser._action_groups:
        hidden = (argparse.SUPPRESS, "show this help message and exit")
        actions = [action for action in group._group_actions if action.help not in hidden]
        if actions:
            title = str(group.title)
            yield from (f"## {title[:1].upper()}{title[1:]}", "")
            yield from prose(group.description or "")
        for action in actions:
            yield from (f"{_invocation(parser, action)}", f":   {_help(parser, action)}", "")
    yield from prose(parser.epilog or "")


def _invocation(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return all spellings of an option, such as `--buckets L,L,...`."""
    formatter = parser._get_formatter()
    text = _without_ansi(formatter._format_action_invocation(action))
    return ", ".join(f"`{one}`" for one in text.split(", --")).replace("`, `", "`, `--")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return escaped(parser._get_formatter()._expand_help(action)) if action.help else ""


def _without_ansi(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def prose(text: str) -> Iterator[str]:
    """Convert terminal text to markdown; indented lines become blocks."""
    for indented, lines in _blocks(text.splitlines()):
        body = textwrap.dedent("\n".join(lines)).strip("\n")
        yield from (("```text", body, "```", "") if indented else (escaped(body), ""))


def _blocks(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield runs of lines with or without indent; empty lines belong to the previous run."""
    block: list[str] = []
    indented = False
    for line in lines:
        if line.strip() and line.startswith("  ") != indented:
            if block:
                yield indented, block
            block, indented = [], line.startswith("  ")
        block.append(line)
    if block:
        yield indented, block


def escaped(text: str) -> str:
    """Escape emphasis, links and tags of markdown, except in code; format options as code."""
    text = re.sub(r"(?<![\w`-])--[a-z][\w-]*(?!`)\b", r"`\g<0>`", text)
    parts = re.split(r"(`+[^`]+`+)", text)
    parts[::2] = [re.sub(r"([*_<>\[\]|~])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


# ---- configuration -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a configuration."""

    name: str
    type: str
    default: str
    """Default as in YAML; empty if the key is required."""
    meaning: str
    section: type | None
    """The configuration class of its value, if it has keys."""


def configuration_pages() -> dict[str, str]:
    from megapack.data.blend import Source, Stage  # noqa: PLC0415
    from megapack.integrations.rows.open_rows import Manifest  # noqa: PLC0415
    from megapack.tokenization.pipeline.plan import BuildConfig  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    return {
        "configuration/training.md": _configuration(
            "Training",
            "The YAML of `megapack-pretrain --config`, key by key; `--set optimizer.lr=1e-4` "
            "overrides one, `--dry-run --show-config` prints them all.",
            _sections("", PretrainConfig),
        ),
        "configuration/manifest.md": _configuration(
            "Manifest of a blend",
            "Several datasets in one run: `data.blend` of `megapack-pretrain`, or the data path of "
            "other trainers. YAML or JSON; paths are relative to the file.",
            [
                *_sections("", Manifest),
                *_sections("sources", Source),
                *_sections("stages", Stage),
            ],
        ),
        "configuration/build.md": _configuration(
            "Build",
            "Options of `megapack-build tokenize`, in Python "
            "(`megapack.tokenization.pipeline.plan.BuildConfig`).",
            [("", BuildConfig)],
        ),
    }


def _sections(name: str, cls: type) -> list[tuple[str, type]]:
    """Return a section and those inside it: path of the key, class."""
    inner = [(f"{name}.{key.name}".lstrip("."), key.section) for key in keys(cls) if key.section]
    return [(name, cls), *(one for path, section in inner for one in _sections(path, section))]


def _configuration(title: str, about: str, sections: Sequence[tuple[str, type]]) -> str:
    lines = [f"# {title}", "", about, ""]
    for name, cls in sections:
        about = prose(inspect.cleandoc(cls.__doc__ or ""))
        lines += [f"## {name} {{ #of-{name} }}" if name else "## Top level", "", *about]
        for key in keys(cls):
            path = f"{name}.{key.name}" if name else key.name
            default = f"default `{key.default}`" if key.default else "required"
            unit = f" {unit_of(key.name)}" if unit_of(key.name) else ""
            kind = "section" if key.section else f"`{key.type}`{unit}, {default}"
            lines += [f'`{path}` <span class="key" markdown>{kind}</span> {{ #{path} }}']
            link = f" [Its keys](#of-{path})." if key.section else ""
            lines += [f":   {' '.join(key.meaning.split())}{link}", ""]
    return "\n".join(lines)


def unit_of(name: str) -> str:
    """Return the unit in a name: ``micro_batch_tokens`` -> ``"tokens"``."""
    last = name.rpartition("_")[2]
    return last if last in ("tokens", "steps", "seconds", "minutes", "bytes", "epochs") else ""


def keys(cls: type) -> list[Key]:
    """Return the fields of a configuration class, with their docstrings."""
    hints = typing.get_type_hints(cls)
    meanings = field_docstrings(cls)
    helps = _build_helps() if cls.__name__ == "BuildConfig" else {}
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        section = next((one for one in options if dataclasses.is_dataclass(one)), None)
        meaning = meanings.get(field.name) or helps.get(field.name) or ""
        if section and not meaning:
            meaning = inspect.cleandoc(section.__doc__ or "")
        found.append(Key(field.name, spelled(hint), _default(field), meaning, section))
    return found


def _build_helps() -> dict[str, str]:
    """Return field of BuildConfig -> help of its option."""
    from megapack.cli.main import build_parser  # noqa: PLC0415
    from megapack.tokenization.pipeline.plan import OPTIONS  # noqa: PLC0415

    parser = build_parser("tokenize")
    helps = {action.dest: _help(parser, action) for action in parser._actions}
    return {field: helps[option] for field, option in OPTIONS.items()} | helps


def spelled(hint: Any) -> str:
    """Return a type as in source: ``tuple[int, ...] | None``."""
    if hint is types.NoneType:
        return "null"
    if typing.get_origin(hint) is Literal:
        return " | ".join("null" if v is None else str(v) for v in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(spelled(one) for one in typing.get_args(hint))
    if typing.get_args(hint):
        inner = ", ".join("..." if one is ... else spelled(one) for one in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__}[{inner}]"
    return getattr(hint, "__name__", str(hint))


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a value as in YAML."""
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "as below" if dataclasses.is_dataclass(made) else str(made)
    if field.default is dataclasses.MISSING:
        return ""
    value = field.default
    words = {None: "null", True: "true", False: "false", (): "[]", "": '""'}
    if isinstance(value, (bool, str, tuple, type(None))) and value in words:
        return words[value]
    return str(list(value) if isinstance(value, tuple) else value)

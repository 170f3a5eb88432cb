"""Pages: code blocks run (tests/pages.py), commands, options, links and quoted messages exist, and
the tables of concepts are measured.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import needs_torch  # noqa: F401
import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from lengths import LAWS
from pages import GIVEN, ROOT, SHELLS, Block, Reader, blocks_of, pages, prepare, with_table
from programs import ended
from site_hook import anchor

from megapack.cli.main import COMMANDS, build_parser, main
from megapack.data import PackedDataset, Schedule, build_loader, check_token_ids
from megapack.errors import MegapackError, require
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


BLOCKS = [block for page in pages() for block in blocks_of(page)]


# --- the blocks of code ---------------------------------------------------------------------------


@pytest.mark.pages
@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS}), ids=relative)
def test_blocks_of_a_page_run(page: Path) -> None:
    """Run the blocks of a page one after the other, as a reader copies them."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    ended(sys.executable, Path(__file__).with_name("pages.py"), page, env=environment)


def test_pages_have_blocks_and_skip_few() -> None:
    """Guard: the other tests must not pass because they find no blocks."""
    code = [block for block in BLOCKS if block.language in (*SHELLS, "python")]
    run = [block for block in code if not {"not run", "slow"} & set(block.said)]
    assert {"README.md", "concepts.md", "transformers.md"} <= {block.page.name for block in run}
    assert len(code) > 40 and len(run) > len(code) / 2


def test_a_block_says_its_language_and_why_it_is_not_run() -> None:
    known = (*SHELLS, "python", "text", "yaml", "json", "cpp")
    for block in BLOCKS:
        assert block.language in known, f"{block.name} is {block.language or 'without a language'}"
        assert set(block.said) <= {"not run", "slow", "smaller", "given"}, block.name
        assert block.said.get("given") in {None, *GIVEN}, block.name
        for why in ("not run", "slow"):
            assert len(block.said.get(why, "12345678")) >= 8, f"{block.name} says no reason"


def test_no_indented_code_blocks() -> None:
    """A block that is only indented would not run in these tests."""
    for page in pages():
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^[^\s*\-\d>].*\n\n {4}\S", text, re.MULTILINE), page


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_is_read_by_its_language(block: Block) -> None:
    if block.language in SHELLS:
        assert block.commands.strip(), block.name
        subprocess.run(["bash", "-n"], input=block.commands, text=True, check=True)
    elif block.language == "python":
        compile(block.text, block.name, "exec")
    elif block.language == "json":
        text = block.text.strip()
        json.loads(text if text.startswith("{") else f"{{{text.rstrip(',')}}}")
    elif block.language == "yaml":
        assert yaml.safe_load(block.text)


def _page(folder: Path, text: str) -> Reader:
    page = folder / "page.md"
    page.write_text(textwrap.dedent(text))
    reader = Reader(folder, slow=False)
    for block in blocks_of(page):
        reader.read(Block(ROOT / "page.md", block.line, block.language, block.text, block.said))
    assert not reader.printed
    return reader


def test_blocks_share_the_state_of_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a page share Python names and the folder."""
    monkeypatch.setitem(GIVEN, "the number b", lambda: {"b": 1})
    reader = _page(tmp_path, """
        ```bash
        mkdir made && cd made
        ```
        <!-- smaller: 524_288 -> 4 -->
        <!-- given: the number b -->
        ```python
        a = 524_288
        ```
        ```python
        open(f"{a + b}", "w").close()
        print(a + b)
        ```
        ```text
        5
        ```
        ```console
        $ ls .
        7     # a remark; other numbers
        ```
        <!-- not run: it would fail, as it says -->
        ```bash
        false
        ```
    """)  # fmt: skip
    assert reader.folder == tmp_path / "made" and (tmp_path / "made" / "5").exists()


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nfalse\ntrue\n```\n",
        "```python\nraise AssertionError\n```\n",
        "```python\nprint(1)\n```\n```text\n2\n```\n",
        "```python\nprint(1)\n```\n",
        "```console\n$ echo two words\nother words\n```\n",
        "<!-- smaller: 8 -> 4 -->\n```python\na = 7\n```\n",
    ],
)
def test_a_page_that_does_not_hold_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        _page(tmp_path, text)


# --- commands and options -------------------------------------------------------------------------

PLACES = ("launch/*.sh", "configs/*.yaml", "examples/*.py", "megapack/cli/*.py")
FILES = sorted({*pages(), *(path for place in PLACES for path in ROOT.glob(place))})
# A command at the beginning of a line, possibly after a prompt or a comment sign; it extends to the
# first line that does not end in a backslash (doubled in a docstring).
COMMAND = re.compile(
    r"^[ \t]*(?:[#$*>][ \t]+)?megapack-build[ \t]+(?=[a-z])((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE
)
INLINE = re.compile(r"`megapack-build\s+([^`]+)`")
ASSIGNED = re.compile(r"^([A-Z_]+)=(?:\$\{\w+:-)?([\w,./-]+)\}?", re.MULTILINE)


def _words(text: str, variables: dict[str, str]) -> list[str]:
    """Return the words of a shell command up to a comment, with variables replaced."""
    joined = re.sub(r"\\+\n[ \t]*#?", " ", text)
    # ${NAME##*,} is the last element of a list.
    lasts = {name: value.rpartition(",")[2] for name, value in variables.items()}
    joined = re.sub(r"\$\{(\w+)##\*,\}", lambda match: lasts.get(match[1], match[0]), joined)
    joined = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), joined)
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word and set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return words


def _commands(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8")
    variables = dict(ASSIGNED.findall(text))
    return [_words(match[1], variables) for match in COMMAND.finditer(text)]


CASES = [(path, words) for path in FILES for words in _commands(path)]


def _assert_options_exist(path: Path, name: str, words: list[str]) -> None:
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = named - set(build_parser(name)._option_string_actions)
    assert not unknown, f"{path}: megapack-build {name} has no {unknown}"


def test_every_command_is_documented() -> None:
    """Every command is documented; the tests below must not pass because they find none."""
    assert {words[0] for _, words in CASES} == set(COMMANDS)
    for name in ("tokenize", "compare", "pack"):
        assert any(path.name == "README.md" and words[0] == name for path, words in CASES)


@pytest.mark.parametrize(
    ("path", "words"), CASES, ids=[f"{path.relative_to(ROOT)}-{words[0]}" for path, words in CASES]
)
def test_documented_commands_parse(
    path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The real parser accepts every documented command."""
    name, *rest = words
    assert name in COMMANDS, f"{path}: megapack-build {name}"
    if rest == ["--help"]:
        return
    if "..." in rest:  # incomplete on purpose: check only the options that are named
        _assert_options_exist(path, name, rest)
        return
    try:
        build_parser(name).parse_args(rest)
    except SystemExit:
        pytest.fail(f"{path}: megapack-build {shlex.join(words)}\n{capsys.readouterr().err}")


def test_options_in_running_text_exist() -> None:
    """As in `megapack-build compare --html`; such a command may be incomplete."""
    found = [(path, *said.split()) for path in FILES for said in INLINE.findall(path.read_text())]
    for path, name, *rest in found:
        assert name in COMMANDS, f"{path}: megapack-build {name}"
        _assert_options_exist(path, name, rest)
    assert any(word.startswith("--") for _, _, *rest in found for word in rest)


def test_targets_of_make_and_extras_of_pip_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    targets = set(re.findall(r"(?:^(?:\$ )?|`)(?:[A-Z_]+=\S+ )*make ([\w-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        bench = ROOT / "benchmarks" / f"{target.removeprefix('bench-')}.py"
        known = re.search(rf"^(?:.* )?{target}\b.*:", makefile, re.MULTILINE) or bench.is_file()
        assert known, f"make {target}"
    offered = metadata("megapack").get_all("Provides-Extra")
    extras = re.findall(r"(?:\.|whl\)?|megapack)\[((?:[\w-]+,?)+)\]", text)
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in offered, extra


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    script, picture = (ROOT / "docs" / "images" / f"packing.{kind}" for kind in ("py", "svg"))
    subprocess.run([sys.executable, str(script), str(tmp_path / "drawn.svg")], check=True)
    assert (tmp_path / "drawn.svg").read_text() == picture.read_text()


def test_readme_table_equals_the_logs() -> None:
    """To update it after new measurements: python tests/pages.py --measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("| task |") == 1
    assert text == with_table(text)


# --- links and lengths ----------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_links_of_pages_lead_somewhere() -> None:
    checked = 0
    for page in [*pages(), *ROOT.glob("docs/results*.md"), *ROOT.glob("docs/results/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in _anchors(target), f"{page}: {link}"
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("place", "limit"),
    [("README.md", 160), ("docs/quickstart.md", 80), ("docs/faq.md", 120),
     ("docs/troubleshooting.md", 120), ("docs/guides/*.md", 135), ("CHANGELOG.md", 60)],
)  # fmt: skip
def test_pages_are_short(place: str, limit: int) -> None:
    found = list(ROOT.glob(place))
    assert found
    for page in found:
        assert len(page.read_text().splitlines()) <= limit, page


# --- troubleshooting ------------------------------------------------------------------------------


def _messages() -> list[str]:
    """Return the quoted message of each row; ... stands for a name or a number."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [row.replace("\\|", "|") for row in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)]


def _pattern(message: str) -> str:
    return ".*".join(re.escape(part.strip()) for part in message.split("..."))


@pytest.fixture(scope="module")
def said() -> str:
    """Return all strings of the package except docstrings, one per line; ~ replaces values."""
    found = []
    for path in (ROOT / "megapack").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if id(node) not in docs:
                values = [part.value if isinstance(part, ast.Constant) else "~" for part in parts]
                found.append("".join(value for value in values if isinstance(value, str)))
    return "\n".join(text.replace("\n", " ") for text in found)


@pytest.mark.parametrize("message", _messages())
def test_a_message_of_troubleshooting_stands_in_the_code(message: str, said: str) -> None:
    assert re.search(_pattern(message), said), message


def _tokenize(path: str, tokenizer: str = "bytes", prefix: str = "new") -> Callable[[], object]:
    words = ("tokenize", "--input", path, "--tokenizer", tokenizer, "--output-prefix", prefix)
    return partial(main, words)


def _load(**options: Any) -> None:
    data = PackedDataset("corpus", "corpus.samples")
    schedule = Schedule(data, tokens_per_step=1024)
    build_loader(data, schedule, data_parallel_rank=0, **options)


def _write(path: str, content: bytes, then: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        Path(path).write_bytes(content)
        then()

    return run


def _locked() -> None:
    with IndexedDatasetBuilder("taken", np.uint16):
        _tokenize("docs.jsonl", prefix="taken")()


def _cut() -> None:
    Path("cut.idx").write_bytes(Path("corpus.idx").read_bytes())
    Path("cut.bin").write_bytes(Path("corpus.bin").read_bytes()[:-100])
    IndexedDataset("cut")[299]


def _of_another_version() -> None:
    content = bytearray(Path("corpus.samples").read_bytes())
    content[8] = 1
    Path("old.samples").write_bytes(content)
    PackedDataset("corpus", "old.samples")


PROVOKED: dict[str, Callable[[], object]] = {
    "needs the package": lambda: require("no_such_package", "a test"),
    "no tokenizer at": _tokenize("docs.jsonl", "gpt2"),
    "would be one document": _write("part-00000", b'{"text": "a"}\n' * 9, _tokenize("part-00000")),
    "repair the input": _write("bad.jsonl", b'{"text": \n', _tokenize("bad.jsonl")),
    "exists already": _tokenize("docs.jsonl", prefix="corpus"),
    "is being written by": _locked,
    ".bin is truncated": _cut,
    "the index was packed from": lambda: PackedDataset("corpus", pack([5, 6, 7], buckets=[8])),
    "has format version": _of_another_version,
    "holds token id": lambda: check_token_ids(PackedDataset("corpus", "corpus.samples"), 50),
    "a draw of": lambda: Schedule(PackedDataset("corpus", "corpus.samples"), tokens_per_step=700),
    "a micro batch of": lambda: _load(data_parallel_size=1, micro_batch_tokens=256),
    "ranks do not divide": lambda: _load(data_parallel_size=3, micro_batch_tokens=512),
}


@pytest.mark.pages
@pytest.mark.parametrize("begin", PROVOKED)
def test_a_message_of_troubleshooting_is_what_a_user_reads(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (message,) = [text for text in _messages() if text.startswith(begin)]
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        PROVOKED[begin]()
        printed = capsys.readouterr().err  # of a command
    except MegapackError as error:
        printed = str(error)
    assert re.search(_pattern(message), " ".join(printed.split())), printed


# --- concepts -------------------------------------------------------------------------------------

FIVE = [1024, 2048, 4096, 8192, 16384]


@pytest.mark.pages
@pytest.mark.parametrize(
    ("row", "strategy", "buckets", "options"),
    [
        ("`pad`, one document per sample of 4096", "pad", [4096], {}),
        ("`concat`, 1024", "concat", [1024], {}),
        ("`concat`, 4096", "concat", [4096], {}),
        ("`concat`, 16384", "concat", [16384], {}),
        ("`best_fit_decreasing`, 16384", "best_fit_decreasing", [16384], {}),
        ("`bucket_llm`, pools of 3,000 documents", "bucket_llm", FIVE, {"pool_size": 3000}),
        ("`bucket`, the default", "bucket", FIVE, {}),
    ],
)
def test_concepts_table_of_ten_million_documents_holds_for_half_a_million(
    row: str, strategy: str, buckets: list[int], options: dict[str, int]
) -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    padding, truncated, joined = (cell.strip(" %") for cell in line.split("|")[2:5])
    lengths = LAWS["fineweb_edu_like"](500_000)
    metrics = pack(lengths, strategy, buckets=buckets, **options).metrics()
    assert 100 * metrics["padding_ratio"] == pytest.approx(float(padding), rel=0.02, abs=0.01)
    assert 100 * metrics["truncation_ratio"] == pytest.approx(float(truncated), rel=0.08)
    assert metrics["concatenation_ratio"] == pytest.approx(float(joined), rel=0.02)

"""Control characters of foreign text never reach a terminal, a log line or a page."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import tempfile
import unicodedata
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from programs import PYTHON
from tqdm import tqdm

from megapack.cli.main import main
from megapack.errors import PrintableStream, printable
from megapack.storage import IndexedDatasetBuilder

HOSTILE = "a\x1b[2J\x1b]0;t\x07b\x00\x7f\x9b31m\u202ec\u200b\ufeff\u2066\u2028d\re\bf\U000e0041g"
NAME = HOSTILE.replace("\x00", "") + "$x^"
# What rich itself writes: colors, and the cursor moves of a progress bar.
STYLES = re.compile(r"\x1b\[([0-9;]*m|\?25[lh]|2K|1A)|\r(?=\x1b\[)")


def visible(text: str) -> bool:
    """Return whether only line breaks and visible characters remain."""
    invisible = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return not any(unicodedata.category(c) in invisible and c != "\n" for c in text)


def test_carriage_return_of_progress_bars_is_kept() -> None:
    below = io.StringIO()
    stream = PrintableStream(below)
    with tqdm(total=2, file=stream, ncols=40, mininterval=0) as bar:
        bar.update(2)
    stream.write("a\rb")  # anywhere else it would hide the text before it
    assert below.getvalue().count("\r") > 1 and "\\u000d" not in below.getvalue()[:-9]
    assert below.getvalue().endswith("a\\u000db")


@given(st.text(st.characters(), max_size=40))
def test_every_invisible_character_is_escaped(text: str) -> None:
    assert visible(printable(text))
    assert printable(printable(text)) == printable(text)
    assert json.loads(f'"{printable(chr(0x7F))}"') == "\x7f"


RUN_ALL = """
import json, sys
from megapack.cli.main import main
for command in json.load(open(sys.argv[1])):
    print("=====", flush=True)
    try:
        main(command)
    except SystemExit:
        pass
"""


def on_a_terminal(commands: list[list[str]]) -> str:
    """Run commands whose stdout and stderr are one pseudo-terminal; return what they print."""
    here, there = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux: the other end was closed
            while data := os.read(here, 1 << 16):
                chunks.append(data)

    reader = Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(commands, file)
        file.flush()
        process = [*PYTHON, RUN_ALL, file.name]
        subprocess.run(process, stdout=there, stderr=there, env=environment, check=True)
    os.close(there)
    reader.join()
    os.close(here)
    return b"".join(chunks).decode("utf-8", errors="surrogateescape").replace("\r\n", "\n")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder whose names and texts hold control characters."""
    root = tmp_path_factory.mktemp("hostile") / NAME
    root.mkdir()
    lines = [json.dumps({"text": HOSTILE * 3, HOSTILE: 1}) for _ in range(20)]
    (root / f"{NAME}.jsonl").write_text("\n".join(lines) + "\n")
    (root / "bad.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n" + HOSTILE + "\n")
    (root / f"{NAME}.yaml").write_text(yaml.safe_dump({"sources": {HOSTILE: {"prefix": NAME}}}))
    (root / f"{NAME}.idx").write_bytes(HOSTILE.encode() * 9)
    with IndexedDatasetBuilder(root / "good", np.uint16, metadata={"note": HOSTILE}) as builder:
        builder.add_documents(np.arange(200), [0, 50, 120, 200])
    assert main(["pack", str(root / "good"), "--buckets", "64"]) == 0
    return root


COMMANDS = """
tokenize --input {root}/{name}.jsonl --tokenizer {root}/{name} --output-prefix {root}/o
tokenize --input {root}/bad.jsonl --tokenizer bytes --output-prefix {root}/o
pack {root}/{name} --buckets 64
pack {root}/good --buckets 64 --output {root}/{name}.samples
compare {root}/good --max-length 64
inspect {root}/good {root}/good.samples --sample 0
inspect {root}/{name}.idx
trace --blend {root}/{name}.yaml --document {name}:1
verify {root}/good {root}/{name}
repair {root}/{name}
merge {root}/good {root}/{name} --output {root}/m
upload {root}/good {name}://x
export {root}/good.samples --format {name}
import {root}/{name}.idx {root}/i
report {root}/{name}
simulate {root}/{name}
proxy {root}/{name}.yaml {root}/p --scale 1/4
mixtures {root}/{name}.yaml {root}/p --scale 1/4
train-tokenizer --input {root}/{name} --output {root}/t
arrange {root}/{name}.json --output {root}/ar.json
{name} {name}
""".strip()


def test_no_command_prints_a_control_character(hostile: Path) -> None:
    commands = [
        [word.format(root=hostile, name=NAME) for word in line.split(" ")]
        for line in COMMANDS.split("\n")
    ]
    printed = on_a_terminal(commands).split("=====\n")[1:]
    assert len(printed) == len(commands)
    for command, text in zip(commands, printed, strict=True):
        assert text.strip() and "Traceback" not in text, command
        assert visible(STYLES.sub("", text)), (command[0], text)

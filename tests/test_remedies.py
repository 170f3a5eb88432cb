"""Remedies in error messages are applied, and work at once.

Errors say ``...; set NAME to VALUE, or NAME to VALUE and NAME to VALUE``, ``did you mean 'NAME'?``,
``add --set KEY=VALUE`` or ``as in --suffix .py``. The tests read the remedy and apply it.
"""

from __future__ import annotations

import gzip
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from commands import build, printed
from programs import PYTHON, ended

from megapack import (
    BucketBatchSampler,
    IndexedDataset,
    IndexedDatasetBuilder,
    PackedDataset,
    SampleIndex,
    Schedule,
    pack,
)
from megapack.data import ScheduleConfig
from megapack.data.run import DataConfig, OpenRun
from megapack.errors import ArgumentError, ConfigError, IndexMismatchError
from megapack.packing import STRATEGIES, find_strategy
from megapack.training.command import read_config
from megapack.training.engine.inputs import Inputs

NAMES = {"the number of ranks": "data_parallel_size"}


def remedies(message: str) -> list[dict[str, Any]]:
    """Return the settings of each remedy that a message names."""
    text = message.rpartition("; set ")[2].partition(" (a row")[0]
    text = re.sub(r", which gives \d+ of \d+ ranks an empty micro batch", "", text)
    found = []
    for remedy in re.split(r",? or ", text):
        settings: dict[str, Any] = {}
        names: list[str] = []
        for part in remedy.split(" and "):
            name, to, value = part.partition(" to ")
            names.append(NAMES.get(name, name))
            if to:  # "A and B to 4" sets both
                settings |= dict.fromkeys(names, True if value == "true" else int(value))
                names = []
        assert settings and not names, message
        found.append(settings)
    return found


def applied(make: Callable[..., object], **settings: Any) -> int:
    """Call a function; if it raises, apply each remedy of its error. Return their number."""
    try:
        make(**settings)
    except ConfigError as error:
        named = remedies(str(error))
        for remedy in named:
            try:
                make(**{**settings, **remedy})
            except ConfigError as again:
                pytest.fail(f"{error}\n  after {remedy}: {again}")
        return len(named)
    return 0


CLASSES = {"PackedDataset": PackedDataset, "SampleIndex": SampleIndex}  # of remedies in Python


def write_text() -> None:
    """Write a dataset ``text`` of two documents and its samples into the current folder."""
    with IndexedDatasetBuilder("text") as builder:
        for length in (300, 500):
            builder.add_document(range(length))
    pack([300, 500], buckets=[512]).save("text.samples")


BUCKETS = ([512, 1024, 4096], [7, 16], [24, 36, 100], [64])


@pytest.mark.parametrize("buckets", BUCKETS, ids=str)
def test_sizes_of_steps(buckets: list[int]) -> None:
    index = pack(np.arange(1, 3 * buckets[-1], 3), buckets=buckets)
    num_applied = 0
    sizes = (1, 100, 1000, 4096, 5 * buckets[-1])
    for tokens, row in itertools.product(sizes, (None, 10, 100, 4096, 5000)):
        num_applied += applied(
            lambda **fields: Schedule(index, **fields), tokens_per_step=tokens, row_tokens=row
        )
    for tokens, draw in itertools.product(sizes, (1, 96, 1000, 8192)):
        settings = {"tokens_per_step": tokens, "mix": "micro_step", "micro_step_tokens": draw}
        if tokens % draw == 0:  # else ScheduleConfig, which has no buckets, names the divisors
            num_applied += applied(lambda **fields: Schedule(index, **fields), **settings)
        num_applied += applied(ScheduleConfig, **settings)
    assert num_applied > 10


def test_the_largest_bucket_is_named_at_once() -> None:
    index = pack(np.arange(1, 9000), buckets=[512, 1024, 2048, 4096])
    with pytest.raises(ConfigError, match="samples of 512; set tokens_per_step to 4096, or"):
        Schedule(index, tokens_per_step=1000)


def test_rows_are_offered_with_their_padding() -> None:
    index = pack(np.arange(1, 9000), buckets=[512, 1024, 2048, 4096])
    rows = r"row_tokens to 5000 \(a row holds as many whole samples as fit; up to 18% is padding\)$"
    with pytest.raises(ConfigError, match=f"set tokens_per_step to 28672, or {rows}"):
        Schedule(index, tokens_per_step=30000)
    with pytest.raises(ConfigError, match=r"row_tokens to 4096$"):  # without padding
        Schedule(index, tokens_per_step=8192, row_tokens=1024)


@pytest.mark.parametrize("name", ["text", "text.samples"])
def test_a_schedule_of_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    for given in (name, Path(name), [name]):
        with pytest.raises(ConfigError, match="is the name of a file: give ") as error:
            Schedule(given, tokens_per_step=1024)  # type: ignore[arg-type]
        source = eval(str(error.value).partition("give ")[2], dict(CLASSES))
        assert Schedule(source, tokens_per_step=1024).num_steps() == 1


@pytest.mark.parametrize("as_path", [False, True], ids=["str", "Path"])
def test_an_index_before_its_dataset(
    as_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    with pytest.raises(
        ConfigError, match=r"is 'text\.samples', which is the name of an in"
    ) as error:
        PackedDataset(*(Path(n) if as_path else n for n in ("text.samples", "text")))
    assert len(eval(str(error.value).partition("as in ")[2], dict(CLASSES))) == 2


def test_buckets_as_text() -> None:
    with pytest.raises(ArgumentError) as error:
        pack(np.arange(1, 3000), buckets="512,1024")  # type: ignore[arg-type]
    buckets = eval(str(error.value).partition("as in ")[2])
    assert pack(np.arange(1, 3000), buckets=buckets).bucket_capacity.tolist() == [512, 1024]


@pytest.mark.parametrize("buckets", BUCKETS, ids=str)
def test_sizes_of_micro_batches(buckets: list[int]) -> None:
    index = pack(np.arange(1, 3 * buckets[-1], 3), buckets=buckets)
    largest = buckets[-1]

    def sampler(**options: Any) -> BucketBatchSampler:
        step = {name: options.pop(name, None) for name in ("tokens_per_step", "micro_step_tokens")}
        mix = "step" if step["micro_step_tokens"] is None else "micro_step"
        schedule = Schedule(index, row_tokens=4096, mix=mix, **step)
        return BucketBatchSampler(schedule, data_parallel_rank=0, **options)

    num_applied = 0
    draws: tuple[dict[str, int], ...] = ({}, {"micro_step_tokens": 12 * 4096})
    for draw, ranks, tokens, size in itertools.product(
        draws, (1, 3, 5, 7, 16), (1, 100, largest, 4096), (1, 2)
    ):
        if ranks % size:
            continue
        num_applied += applied(
            sampler,
            tokens_per_step=24 * 4096,
            **draw,
            data_parallel_size=ranks,
            micro_batch_tokens=tokens,
            sequence_parallel_size=size,
        )
    assert num_applied > 10


@pytest.mark.parametrize(("ranks", "fitting"), [(16, 131072), (3, 24576)])
def test_ranks_that_do_not_divide_a_step(ranks: int, fitting: int) -> None:
    """More tokens per step come first: the number of GPUs is given, and pad_last wastes some."""
    index = pack(np.arange(1, 9000), buckets=[1024, 8192])
    problem = f"{ranks} ranks do not divide the 4 micro batches of 8192 tokens in tokens_per_step "
    for make in (
        lambda: BucketBatchSampler(
            Schedule(index, tokens_per_step=32768),
            data_parallel_rank=0,
            data_parallel_size=ranks,
            micro_batch_tokens=8192,
        ),
        lambda: DataConfig(
            prefix="docs", index="docs.samples", tokens_per_step=32768, micro_batch_tokens=8192
        ).check_ranks(ranks),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        assert f"{problem}32768; set tokens_per_step to {fitting}, or" in str(error.value)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_ranks_that_do_not_divide_a_step_in_groups(group: int) -> None:
    """The sizes of a configuration are checked before its data are opened."""

    def check(data_parallel_size: int, **sizes: Any) -> None:
        config = DataConfig(prefix="docs", index="docs.samples", **sizes)
        config.check_ranks(data_parallel_size, group)

    num_applied = sum(
        applied(
            check,
            data_parallel_size=group * groups,
            tokens_per_step=step,
            micro_batch_tokens=tokens,
        )
        for groups, step, tokens in itertools.product((5, 7, 9), (16, 20, 24, 36), (1, 2, 4))
        if step % tokens == 0
    )
    assert num_applied > 10


KEYS = ("data.tokens_per_step", "data.micro_step_tokens", "data.micro_batch_tokens")


@pytest.mark.parametrize(("key", "value"), itertools.product(KEYS, (1, 1000, 3000, 12288)))
def test_sizes_on_the_command_line(key: str, value: int) -> None:
    """The error names --set, not the file of the recipe; another --set repairs it."""
    override = f"{key}={value}"

    def read(**settings: Any) -> None:
        read_config("demo_cpu", [override, *(f"data.{k}={v}" for k, v in settings.items())])

    try:
        read()
    except ConfigError as error:
        assert str(error).startswith(f"--set {override}: ") and ".yaml" not in str(error)
        assert applied(read) >= 1


@pytest.mark.parametrize("kind", ["samples", "blend"])
@pytest.mark.parametrize("tokens", [100, 1000, 3000, 5000, 12288])
def test_micro_batches_fit_the_samples_at_once(
    tokens: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first remedy fits the buckets, too: 1024 divides the step, and 4,096 does not fit it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a few words\n" * 9000)
    printed("tokenize", "--input", "text.txt", "--tokenizer", "bytes", "--output-prefix", "mine")
    printed("pack", "mine", "--buckets", "512,4096")
    data = ["data.prefix=mine", "data.index=mine.samples"]
    if kind == "blend":
        (tmp_path / "all.yaml").write_text("sources: [{prefix: mine, index: mine.samples}]")
        data = ["data.prefix=null", "data.index=null", "data.blend=all.yaml"]
    data += ["data.valid_prefix=null", "evaluation.every=null"]
    with pytest.raises(ConfigError) as error:
        read_config("demo_cpu", [*data, f"data.micro_batch_tokens={tokens}"])
    (size,) = re.findall(r"set micro_batch_tokens to (\d+)", str(error.value))
    config = read_config("demo_cpu", [*data, f"data.micro_batch_tokens={size}"])
    OpenRun(config).sampler(rank=0, num_ranks=1)


def test_data_next_to_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's index and held-out documents belong to its own data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a few words\n" * 5000)
    printed("tokenize", "--input", "text.txt", "--tokenizer", "bytes", "--output-prefix", "mine")
    printed("pack", "mine", "--buckets", "512,1024")
    with pytest.raises(ConfigError) as error:
        Inputs(read_config("demo_cpu", ["data.prefix=mine"]))
    settings = re.findall(r"--set (\S+=[^\s;]+)", str(error.value))
    assert settings == [
        "data.index=mine.samples",
        "data.valid_prefix=null",
        "evaluation.every=null",
    ]
    assert Inputs(read_config("demo_cpu", ["data.prefix=mine", *settings])).num_steps == 160


def test_a_recipe_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        Inputs(read_config("demo_cpu"))
    settings = re.findall(r"--set (\S+=[^\s;]+)", str(error.value))
    assert settings == [
        "data.prefix=PREFIX",
        "data.index=PREFIX.samples",
        "data.valid_prefix=null",
        "evaluation.every=null",
    ]
    (tmp_path / "text.txt").write_text("a few words\n" * 5000)
    printed("tokenize", "--input", "text.txt", "--tokenizer", "bytes", "--output-prefix", "mine")
    printed("pack", "mine", "--buckets", "512,1024")
    Inputs(read_config("demo_cpu", [each.replace("PREFIX", "mine") for each in settings]))


@pytest.mark.parametrize(
    ("taken", "skipped", "remedies"),
    [
        ("notes.txt", ".py", [" .txt", " .py", " .txt .py"]),
        ("NOTES.TXT", ".Py", [" .txt", " .py", " .txt .py"]),
        ("notes.txt.zstd", ".rst.GZ", [" .txt.zstd", " .rst.gz", " .txt.zstd .rst.gz"]),
        ("notes.txt", ".5 [a copy]", [" .txt"]),
    ],
    ids=["code", "upper case", "compressed", "no suffix"],
)
def test_a_folder_of_which_most_would_be_skipped(
    tmp_path: Path, taken: str, skipped: str, remedies: list[str]
) -> None:
    """A folder of code with a few texts is refused; notes next to data are not. A broken link among
    the skipped files has no size."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    compress = {".zstd": zstandard.compress, ".GZ": gzip.compress}
    for name in (taken, *(f"{i}{skipped}" for i in range(12))):
        text = f"some words of {name}\n".encode() * 9
        (corpus / name).write_bytes(compress.get(Path(name).suffix, bytes)(text))
    (corpus / "dangling.log").symlink_to(tmp_path / "missing")
    command = ["tokenize", "--input", corpus, "--tokenizer", "bytes"]
    error = printed(*command, "--output-prefix", tmp_path / "out", status=2)
    assert "only 1 file (" in error and " would be read, and 13 files (" in error
    assert re.findall(r"--suffix((?: \.[\w.]+)+)", error) == remedies
    for remedy in remedies:
        printed(*command, "--output-prefix", tmp_path / remedy, "--suffix", *remedy.split())
    (corpus / "large.jsonl").write_text('{"text": "a long one"}\n' * 999)
    printed(*command, "--output-prefix", tmp_path / "other")


@pytest.mark.parametrize(
    "words",
    [
        ("pakc", "--help"),
        ("pack", "--hlep"),
        ("pack", "x", "--bukets", "512", "--json"),
        ("simulate", "x.npy", "--world-size", "8"),
        ("compare", "x", "--bucket", "512", "--strategis", "pad"),
        ("tokenize", "--inputs", "x", "--on-eror=skip"),
        ("train-tokenizer", "--input", "x", "--typ", "bpe-json"),
        ("import", "x", "--output-prefix", "y", "--link", "copi"),
    ],
    ids=" ".join,
)
def test_words_of_the_command_line(words: tuple[str, ...]) -> None:
    """Errors take one line; the suggested word gives another error, or none."""
    for _ in words:
        done = build(*words)
        match = re.search(r"(\S+); did you mean '(\S+)'\?", done.stderr)
        if match is None:
            break
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        wrong = match[1].strip("'")
        wrong = re.search(r"'(\S+)' is unknown", done.stderr)[1] if wrong == "unknown" else wrong  # type: ignore[index]
        changed = tuple(re.sub(f"^{re.escape(wrong)}(?==|$)", match[2], word) for word in words)
        assert changed != words, done.stderr
        words = changed
    else:
        pytest.fail(f"the remedies of {words} do not end")
    assert "unknown" not in done.stderr


@pytest.mark.parametrize("words", [("--data-prefix", "text"), ("text",)], ids=len)
def test_buckets_separated_by_spaces(words: tuple[str, ...]) -> None:
    with_commas = "--buckets 512 1024: separate them by commas, 512,1024"
    assert with_commas in printed("pack", *words, "--buckets", "512", "1024", status=2)
    pretrain = [*PYTHON[:1], "-m", "megapack.training.pretrain", "--buckets", "512", "1024"]
    assert with_commas in ended(*pretrain, status=2).stderr


def test_a_missing_file_next_to_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words\n" * 500)
    printed(
        "tokenize",
        "--input",
        tmp_path / "text.txt",
        "--tokenizer",
        "bytes",
        "--output-prefix",
        tmp_path / "text",
    )
    printed("pack", tmp_path / "text", "--buckets", "512")
    for words, similar in (
        (("inspect", tmp_path / "txt.samples"), "text.samples"),
        (
            (
                "tokenize",
                "--input",
                tmp_path / "txt.txt",
                "--tokenizer",
                "bytes",
                "--output-prefix",
                "x",
            ),
            "text.txt",
        ),
    ):
        error = printed(*words, status=1)
        assert f"did you mean '{tmp_path / similar}'?" in error and "Errno" not in error
    assert "mean" not in printed("inspect", tmp_path / "no" / "folder", status=1)
    missing = build("verify", tmp_path / "nowhere.samples").stdout
    assert "nowhere.samples: MISSING" in missing and "check the path" in missing


def test_a_text_that_is_not_tokenized_yet(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a few words"}\n' * 50)
    error = printed("pack", text, "--buckets", "512", status=1)
    command = re.search(r"`megapack-build (tokenize --input \S+) \.\.\.`", error)
    assert command is not None, error
    prefix = tmp_path / "text"
    printed(*command[1].split(), "--tokenizer", "bytes", "--output-prefix", prefix)
    printed("pack", prefix, "--buckets", "512")


def test_the_only_key_with_text_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"id": 5, "content": "a few words"}\n' * 50)
    words = ("tokenize", "--input", text, "--tokenizer", "bytes", "--output-prefix", tmp_path / "x")
    option = re.search(r"give (--json-key \S+?)\)", printed(*words, status=1))
    assert option is not None
    printed(*words, *option[1].split())


def test_an_index_of_another_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    pack([300, 500], buckets=[512]).save(
        "text.samples", source=IndexedDataset("text"), overwrite=True
    )
    with IndexedDatasetBuilder("code") as builder:
        builder.add_document(range(9))
    with pytest.raises(IndexMismatchError) as error:
        PackedDataset("code", "text.samples")
    name = re.search("give the dataset (.*), or pack code again", str(error.value))
    assert name is not None, error
    PackedDataset(name[1], "text.samples")


def test_a_damaged_dataset_is_repaired_by_the_command_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    Path("a text.bin").write_bytes(Path("text.bin").read_bytes()[:-100])
    Path("a text.idx").write_bytes(Path("text.idx").read_bytes())
    command = re.search("-> `megapack-build (.*)`", build("verify", "a text").stdout)
    assert command is not None
    printed(*shlex.split(command[1]))
    assert "a text: sound" in printed("verify", "a text")


def test_most_documents_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    note = build("pack", "text", "--buckets", "16", "--output", "short.samples").stderr
    command = re.search("megapack-build (compare .*)", note)
    assert command is not None and "100.00 % of the documents are longer" in note
    assert "recommended" in printed(*command[1].split())
    assert "longer" not in build("pack", "text", "--buckets", "512", "--overwrite").stderr


def test_devices_are_named_in_either_case() -> None:
    words = ("compare", "--lengths", "no.npy", "--gpu")
    for name in ("H100", "rtx-4090", "MI300X"):
        assert "no.npy" in printed(*words, name, status=1)


def test_names_of_strategies_and_orders() -> None:
    for name in STRATEGIES:
        with pytest.raises(ConfigError) as error:
            find_strategy(name[:-1])
        find_strategy(re.search("did you mean '(.*)'", str(error.value))[1])  # type: ignore[index]
    index = pack(np.arange(1, 100), buckets=[64])
    with pytest.raises(ConfigError, match="did you mean 'uniform'") as error:
        Schedule(index, tokens_per_step=64, order="unifrom")

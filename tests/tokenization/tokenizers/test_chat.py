"""Only the assistant's tokens carry loss, with role headers and with chat templates."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
from peers import peer
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megapack import IndexedDataset
from megapack.cli.main import main
from megapack.errors import ConfigError, DataError
from megapack.storage.columns import INTERPRETED
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.streams import InputFile
from megapack.tokenization.pipeline.run import BuildResult
from megapack.tokenization.tokenizers import chat_template, template_chats
from megapack.tokenization.tokenizers.chat_template import ChatTemplate
from megapack.tokenization.tokenizers.coding import Chat, TemplateError
from megapack.tokenization.tokenizers.train import train_tokenizer

from ..helpers import Build, write_jsonl

Messages = list[dict[str, Any]]
TokenizerWith = Callable[[str], Path]

HEADERS = {"chat_format": "headers"}
MARKERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which loop?\n"},
    {"role": "assistant", "content": "for i in range(3):\n    print(i)\n"},
    {"role": "user", "content": "  Why? \u00e9\u4e2d"},
    {"role": "assistant", "content": "Because."},
]


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    tokens = IndexedDataset(prefix)
    labels = tokens.columns["labels"]
    assert labels.spec == INTERPRETED["labels"]
    each_labels = np.split(labels.rows, tokens.document_offsets[1:-1])
    return [(t.tolist(), n.tolist()) for t, n in zip(tokens[:], each_labels, strict=True)]


def learned_text(tokens: list[int], labels: list[int]) -> str:
    """Return the text with loss, runs separated by ``~``; check that labels equal tokens."""
    assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
    runs = itertools.groupby(labels, lambda label: label == -100)
    return "~".join(text_of(list(run)) for outside, run in runs if not outside)


SPECIAL = ("<|endoftext|>", "<|begin_of_text|>", *MARKERS)


def text_of(ids: list[int]) -> str:
    """Return the text of ids of ``byte_json``: 0 to 255 are bytes, then ``SPECIAL``."""
    return b"".join(bytes([i]) if i < 256 else SPECIAL[i - 256].encode() for i in ids).decode()


@pytest.fixture
def byte_json(tmp_path: Path) -> str:
    """Make a tokenizer with readable ids: bytes, then the tokens of ``SPECIAL``."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table of bytes
    others = [byte for byte in range(256) if byte not in plain]
    character = {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    tokenizer = Tokenizer(models.BPE({character[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    path = tmp_path / "bytes.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    single = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": single}])


@pytest.fixture
def build_chats(run_build: Build) -> Build:
    def build(chats: Path | list[Any], tokenizer: object, **options: Any) -> BuildResult:
        return run_build(chats, tokenizer=tokenizer, **{"messages_key": "messages", **options})

    return build


@pytest.mark.parametrize(
    ("loss", "learned"),
    [(None, "assistant<|end_header_id|>\n\n"), ("content", "")],  # a turn's first token is given
)
def test_loss_of_role_headers_is_on_turns_or_contents(
    tmp_path: Path, chats: Path, build_chats: Build, byte_json: str, loss: str | None, learned: str
) -> None:
    build_chats(chats, byte_json, **HEADERS, chat_loss=loss)
    tokens, labels = documents(tmp_path / "out")[0]
    text = "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>" for m in CHAT
    )
    assert text_of(tokens) == text
    answers = [learned + m["content"] + "<|eot_id|>" for m in CHAT if m["role"] == "assistant"]
    assert learned_text(tokens, labels) == "~".join(answers)


def test_role_headers_are_refused_without_marker_tokens(
    tmp_path: Path, chats: Path, build_chats: Build, byte_json: str, sp_model: Path, corpus: Path
) -> None:
    """A marker was split into pieces: 19 bytes instead of <|start_header_id|>."""
    for tokenizer in ("bytes", sp_model):
        with pytest.raises(ConfigError, match=r"no token <\|start_header_id\|>.*pieces; ") as no:
            build_chats(chats, tokenizer, **HEADERS)
        assert "--chat-format template" not in str(no.value), "it has no template"
        command = str(no.value).partition("train one: megapack-build ")[2]
    trained = tmp_path / "chat.model"
    words = shlex.split(command.replace("...", str(corpus)).replace(trained.name, str(trained)))
    assert main([*words, "--vocab-size", "400", "--sample-bytes", "200K"]) == 0
    build_chats(chats, trained, **HEADERS, output_prefix=tmp_path / "trained")
    tree = json.loads(Path(byte_json).read_bytes())
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] != "<|eot_id|>"]
    lacking = tmp_path / "lacking.json"
    lacking.write_text(json.dumps(tree))
    for backend in ("tokenizers", "gigatoken"):
        with pytest.raises(ConfigError, match=r"lacking\.json has no token <\|eot_id\|>.* 10 p"):
            build_chats(chats, lacking, backend=backend, **HEADERS)
    assert not list(tmp_path.glob("out*.bin"))


def test_role_header_markers_need_not_be_special_tokens(
    tmp_path: Path, chats: Path, build_chats: Build, source_files: list[InputFile]
) -> None:
    """A sentencepiece model may write a space before a text: the token is then the second one."""
    path = tmp_path / "m.model"
    options: dict[str, Any] = {"read": ReadOptions(), "faults": Faults("skip"), "vocab_size": 400}
    options |= {"sample_bytes": 1 << 18, "special_tokens": MARKERS}
    train_tokenizer(source_files, str(path), **options)
    for prefix in (False, True):
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(path.read_bytes())
        proto.normalizer_spec.add_dummy_prefix = prefix
        path.write_bytes(proto.SerializeToString())
        build_chats(chats, path, **HEADERS, overwrite=True)
        tokens = IndexedDataset(tmp_path / "out")[1].tolist()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert tokens.count(processor.piece_to_id("<|eot_id|>")) == 2


def source_code_of_section_8(messages: Messages, encode: Callable[[str], list[int]]) -> Any:
    """Run the article's loop; align its shifted labels with their tokens."""
    tokens: list[int] = []
    shifted: list[int] = []
    for turn in messages:
        ids = encode(
            f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n{turn['content']}<|eot_id|>"
        )
        tokens += ids
        shifted += ids[1:] + [-100] if turn["role"] == "assistant" else [-100] * len(ids)
    return tokens, [-100, *shifted[:-1]]


@pytest.mark.parametrize("backend", ["tokenizers", "auto"])
def test_role_headers_equal_the_article(
    tmp_path: Path, chats: Path, bpe_json: Path, build_chats: Build, backend: str
) -> None:
    build_chats(chats, bpe_json, **HEADERS, backend=backend)
    tokenizer = Tokenizer.from_file(str(bpe_json))
    expected = source_code_of_section_8(
        CHAT, lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    assert documents(tmp_path / "out")[0] == expected


def test_end_token_has_loss_only_after_an_answer_with_loss(
    tmp_path: Path, build_chats: Build, byte_json: str
) -> None:
    chats = [{"messages": CHAT}, {"messages": [*CHAT, {"role": "user", "content": "?"}]}]
    build_chats(chats, byte_json, append_eod=True, prepend_bos=True, **HEADERS)
    answered, asked = documents(tmp_path / "out")
    assert (answered[0][0], answered[1][0]) == (257, -100)
    assert (answered[0][-1], answered[1][-1]) == (256, 256)
    assert (asked[0][-1], asked[1][-1]) == (256, -100)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] == 'assistant' %}\n"
    "A: {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}\n"
    "{{ message['role'] | upper }}: {{ message['content'] | trim }}\n"
    "{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer_with(tmp_path: Path, bpe_json: Path) -> TokenizerWith:
    """Make a tokenizer directory with a chat template."""

    def make(template: str) -> Path:
        directory = tmp_path / "tokenizer"
        directory.mkdir(exist_ok=True)
        tokenizer = Tokenizer.from_file(str(bpe_json))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            "chat_template": template,
            "bos_token": "<|begin_of_text|>",
            "eos_token": {"content": "<|endoftext|>", "lstrip": False},
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    return make


def transformers_tokenizer(directory: Path, template: str) -> Any:
    return peer("transformers").PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=template,
        bos_token="<|begin_of_text|>",
        eos_token="<|endoftext|>",
    )


def test_template_with_marks_equals_transformers(
    tmp_path: Path, chats: Path, build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    directory = tokenizer_with(MARKED)
    build_chats(chats, directory)
    host = transformers_tokenizer(directory, MARKED)
    expected = host.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    tokens, labels = documents(tmp_path / "out")[0]
    assert tokens == expected["input_ids"]
    masks = expected["assistant_masks"]
    assert labels == [t if m else -100 for t, m in zip(tokens, masks, strict=True)]
    assert 0 < sum(masks) < len(masks)


def test_template_without_marks_finds_answers_by_comparison(
    tmp_path: Path, chats: Path, build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    directory = tokenizer_with(CHATML)
    build_chats(chats, directory)
    host = transformers_tokenizer(directory, CHATML)
    tokens, labels = documents(tmp_path / "out")[0]
    assert tokens == host.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    ids = [label for label in labels if label != -100]
    answers = [m["content"] for m in CHAT if m["role"] == "assistant"]
    assert host.decode(ids) == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert tokens[-1] == host.convert_tokens_to_ids("\u010a"), "a line end after <|im_end|>"
    assert labels[-1] == -100, "which no model writes"
    build_chats(chats, directory, chat_loss="turn", overwrite=True)
    labels = documents(tmp_path / "out")[1][1]
    assert host.decode([label for label in labels if label != -100]) == "assistant\nb<|im_end|>"


REFUSED: list[tuple[str, dict[str, Any], type, str]] = [  # template, options, error, message
    (MARKED, {"prepend_bos": True}, ConfigError, "leave out --prepend-bos"),  # it occurs twice
    ("{{ messages | length }}" + CHATML, {}, DataError, r"ts\.jsonl:1: unusable chat .*headers"),
    (
        "{{ messages | tojson(sorted=1) }}",
        {},
        DataError,
        r"ts\.jsonl:1: .* failed \(line 1 of .*so",
    ),
    ("ok\n{% if %}", {}, ConfigError, "line 2 of the chat template of .* cannot be compiled: "),
    (
        "{{ strftime_now('%d') }}",
        {},
        DataError,
        "line 1 of the chat template .*'strftime_now' is un",
    ),
]


def test_unusable_template_is_refused(
    chats: Path, build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    for template, options, error, message in REFUSED:
        with pytest.raises(error, match=message):
            build_chats(chats, tokenizer_with(template), **options, overwrite=True)


def test_template_may_refuse_conversations(
    build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    no_tools = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    directory = tokenizer_with(no_tools + CHATML)
    chats = [{"messages": [{"role": "tool", "content": "x"}, CHAT[2]]}, {"messages": CHAT}]
    with pytest.raises(DataError, match=r"x\.jsonl:1: unusable chat .*no tools"):
        build_chats(chats, directory)
    result = build_chats(chats, directory, on_error="skip", overwrite=True)
    assert result.totals.skipped == {"unusable chat": 1}


def test_tokenizer_without_template_is_refused(
    chats: Path, bpe_json: Path, sp_model: Path, build_chats: Build
) -> None:
    for tokenizer, message in ((bpe_json, "has no chat template"), (sp_model, "belong to")):
        with pytest.raises(ConfigError, match=rf"{message}.*--chat-format headers"):
            build_chats(chats, tokenizer)


BAD_CHATS: list[tuple[Any, str]] = [
    ([], "the list of messages is empty"),
    (["hello"], "message 0 is not of the form"),
    ([{"role": 5, "content": "x"}], "message 0 is not of the form"),
    ([{"role": "user"}], "content of message 0 is null; role headers need a string"),
    ([{"role": "user", "content": None}], "content of message 0 is null"),
    (
        [{"role": "user", "content": "", "tool_calls": [{}]}],
        "role headers cannot express the tool_ca",
    ),
    ([{"role": "user", "content": "\ud800"}], "a message contains half a surrogate pair"),
]


def test_json_beyond_pythons_limits_is_refused() -> None:
    tools = json.dumps([{"name": "\ud800"}])
    for text, reason in (
        ('[{"role": "user", "content": ' + "1" * 5000 + "}]", "4300 digits"),
        (json.dumps({"messages": CHAT, "tools": tools}), "half a surrogate pair"),
        (json.dumps({"messages": CHAT, "tools": "["}), "tools is a string that is not JSON"),
        (json.dumps({"messages": CHAT, "tools": "[" * 10**6}), "is not JSON .*recursion"),
    ):
        with pytest.raises(DataError, match=reason):
            Chat.read(text)


def test_invalid_conversation_is_refused(
    tmp_path: Path, build_chats: Build, byte_json: str
) -> None:
    for messages, reason in BAD_CHATS:
        lines = (json.dumps({"messages": value}) + "\n" for value in (CHAT, messages))
        (tmp_path / "x.jsonl").write_text("".join(lines))  # may contain half a surrogate pair
        with pytest.raises(DataError, match=rf"x\.jsonl:2: unusable chat \({reason}"):
            build_chats(tmp_path / "x.jsonl", byte_json, **HEADERS, overwrite=True)


def test_conversations_without_an_answer_are_dropped_and_counted(
    tmp_path: Path, build_chats: Build, byte_json: str
) -> None:
    result = build_chats([{"messages": CHAT[:2]}, {"messages": CHAT}], byte_json, **HEADERS)
    assert result.totals.skipped == {"chat without assistant": 1}
    assert len(documents(tmp_path / "out")) == 1
    with pytest.raises(DataError, match=r"x\.jsonl:1: wrong type .*'n' is a number, not a list"):
        build_chats([{"n": 5}], byte_json, messages_key="n", overwrite=True, **HEADERS)


def test_chats_of_parquet_with_a_split(tmp_path: Path, build_chats: Build, byte_json: str) -> None:
    chats = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
             for i in range(60)]  # fmt: skip
    corpus = tmp_path / "x.parquet"
    pq.write_table(pa.table({"conversation": chats}), corpus, row_group_size=10)
    options = {"split": "80,20", "shard_bytes": 300, **HEADERS}
    build_chats(corpus, byte_json, messages_key="conversation", **options)
    train = documents(tmp_path / "out_train")
    assert len(train) == 48
    for i, (tokens, labels) in enumerate(train):
        learned = learned_text(tokens, labels)
        assert learned.endswith(f"<|end_header_id|>\n\na{i}<|eot_id|>")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": None}}}]
TOOLED = "{% if tools is not none %}{{ tools | tojson }}{% endif %}" + CHATML


def texts(prefix: Path, directory: Path) -> list[str]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [
        tokenizer.decode(t.tolist(), skip_special_tokens=False) for t in IndexedDataset(prefix)[:]
    ]


def chatml(*messages: dict[str, Any]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_template_receives_tools(
    tmp_path: Path, build_chats: Build, tokenizer_with: TokenizerWith, kind: str
) -> None:
    """Tools as a list, as JSON in a string, as null, and missing, in one corpus."""
    records = [{"messages": CHAT, "schemas": tools} for tools in (json.dumps(TOOLS), None, "[]")]
    corpus: Any = [{"schemas": TOOLS, "messages": CHAT}, {"messages": CHAT}, *records[2:]]
    if kind == "parquet":
        corpus = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist(records), corpus)
    directory, plain = tokenizer_with(TOOLED), chatml(*CHAT)
    build_chats(corpus, directory, tools_key="schemas")
    expected = [json.dumps(TOOLS) + plain, plain, "[]" + plain]
    assert texts(tmp_path / "out", directory) == expected
    build_chats(corpus, directory, tools_key="", overwrite=True)
    assert texts(tmp_path / "out", directory) == [plain] * 3


def test_template_variables_are_never_ignored_silently(
    tmp_path: Path, build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    directory = tokenizer_with("{% if mode is defined %}{{ mode }} {{ date }}{% endif %}" + CHATML)
    records = [{"messages": CHAT, "mode": "fast", "other": 1}, {"messages": CHAT, "mode": None}]
    message = r"x\.jsonl:1: unusable chat \(it has 'mode', which the chat"
    with pytest.raises(DataError, match=message):
        build_chats(records, directory)
    plain = chatml(*CHAT)
    for words, expected in (
        (("mode", 'date="today"'), ["fast today" + plain, plain]),
        (("mode=",), [plain, plain]),
        (("mode=1",), ["1 " + plain, "1 " + plain]),
    ):
        build_chats(records, directory, template_variables=words, overwrite=True)
        assert texts(tmp_path / "out", directory) == expected
    with pytest.raises(ConfigError, match="reads no 'other' from documents; it reads: date, mode"):
        build_chats(records, directory, template_variables=("other",))
    tools, tokenizer = [{"messages": CHAT, "tools": TOOLS}], header_tokenizer(directory)
    for chat_format, reason in (("template", "reads no"), ("headers", "express")):
        with pytest.raises(DataError, match=rf"x\.jsonl:1: unusable chat .*{reason} tools"):
            build_chats(tools, tokenizer, chat_format=chat_format, overwrite=True)


def header_tokenizer(directory: Path) -> str:
    """Add the markers of role headers to a tokenizer directory."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def test_clock_needs_a_date(
    tmp_path: Path, chats: Path, build_chats: Build, tokenizer_with: TokenizerWith
) -> None:
    directory = tokenizer_with("{{ strftime_now('%d %b %Y') }}" + CHATML)
    build_chats(chats, directory, template_variables=("strftime_now=2026-01-31",))
    assert texts(tmp_path / "out", directory)[0].startswith("31 Jan 2026<|im_start|>")


# Template -> reason why it cannot be rendered.
FAILING = {
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}": "recursion",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "recursion",
    "{% for i in range(99) %}{{ 'x' * 99999 }}{% endfor %}": "writes more than 1,000,000",
    "{{ messages | random }}": "random and lipsum give different text",
    "{{ [1, 2] | random }}": "random and lipsum give different text",
    "{{ lipsum() }}": "random and lipsum give different text",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ [] + '' }}": "TypeError: can only concatenate list",
    "{% set x %}a{% generation %}b{% endgeneration %}{% endset %}{{ x }}": "move it out",
}


@pytest.mark.parametrize("template", FAILING)
def test_error_of_a_template_names_its_line(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_CHARACTERS", 10**6)
    compiled = ChatTemplate("\n\n" + template, "the chat template of t")
    with pytest.raises(TemplateError) as raised:
        compiled.render(messages=CHAT)
    assert "the chat template of t" in str(raised.value)
    assert FAILING[template] in str(raised.value)
    if FAILING[template] != "move it out" and "writ" not in FAILING[template]:
        assert str(raised.value).startswith("line 3 of ")


GROWING = "{% set n = namespace(a=[1], b=[1]) %}{% for _ in range(40) %}{% set n.a = [n.a, n.a] %}"
# Template that needs too much of a resource: Python loops, C loops, one large allocation.
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "1 s of CPU",
    GROWING + "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}": "1 s of CPU",
    GROWING + "{% endfor %}{{ n.a | tojson }}": "1 s of CPU|GiB of memory",
    "{{ 'x' * 10**10 }}": "GiB of memory",
    "{{ 'x' | center(10000000000) }}": "GiB of memory",
    "{{ 10 ** (10 ** (8 + messages | length)) }}": "1 s of CPU|GiB of memory",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_template_ends_the_build_and_names_the_conversation(
    build_chats: Build,
    tokenizer_with: TokenizerWith,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
) -> None:
    """Also with --on-error skip: on a faster machine the conversation might pass."""
    monkeypatch.setitem(template_chats._LIMITS, "seconds", 1)
    hostile = "{% if messages[0].content == 'now' %}" + template + "{% endif %}" + CHATML
    trigger = [{"role": "user", "content": "now"}, CHAT[2]]
    chats = [{"messages": messages} for messages in (CHAT, trigger, CHAT)]
    with pytest.raises(ConfigError, match=rf"x\.jsonl:2: .*more than .*({HOSTILE[template]})") as e:
        build_chats(chats, tokenizer_with(hostile), on_error="skip")
    assert "\n" not in str(e.value)


def test_template_that_does_not_end_at_compile_time_is_refused(
    chats: Path, build_chats: Build, tokenizer_with: TokenizerWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jinja applies filters to constants when it compiles."""
    monkeypatch.setitem(template_chats._LIMITS, "seconds", 1)
    directory = tokenizer_with("{{ ('a ' | center(99999999) | wordwrap(1) | wordcount) }}" + CHATML)
    with pytest.raises(ConfigError, match=r"cannot be compiled: it needs more than .*another temp"):
        build_chats(chats, directory)

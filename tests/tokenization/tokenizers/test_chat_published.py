"""Published chat templates give the tokens, and the assistant's masks, that transformers gives.

The templates are those that TRL ships, or with CHAT_TEMPLATES=FOLDER all .jinja files of a folder.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peers import peer
from tokenizers import Tokenizer, processors

from megapack.errors import ConfigError, DataError
from megapack.tokenization.tokenizers.chat_template import ChatTemplate, clock, normalized
from megapack.tokenization.tokenizers.coding import ASSISTANT, Chat, CodedChat
from megapack.tokenization.tokenizers.template_chats import TemplateChats
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

Messages = list[dict[str, Any]]

DAY = "2026-01-31"
HOST_SPECIALS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


user, system, answer = (partial(turn, role) for role in ("user", "system", ASSISTANT))


def result(content: str, name: str = "add", **more: Any) -> dict[str, Any]:
    return turn("tool", content, name=name, **more)


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def schema(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


ADD = schema("add", "adds", a={"type": "number"}, b={"type": "number"})
CITY, DAYS = {"type": "string", "description": "where"}, {"type": "integer", "enum": [1, 2]}
TOOLS = [schema("weather", 'in \u00c4gypten & <"so">', city=CITY, days=DAYS), ADD]
LOOP = "for i in range(3):\n    print(i)\n"
THOUGHT = "<think>\nhm\n</think>\n\nanswer"
DOCUMENTS = [{"title": "T", "text": "body \u00fc"}, {"title": "U", "text": "x"}]
CALLS = [call("weather", {"city": "x"}, id="call0001a"), call("add", {"a": 1}, id="call00002")]

# (messages, other variables)
CHATS: list[tuple[Messages, dict[str, Any]]] = [
    ([user("hi"), answer("yo")], {}),
    ([system("Be brief."), user("Which?\n"), answer(LOOP), user(" Why?"), answer("So.")], {}),
    ([user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")], {}),
    ([user("hi"), answer(None)], {}),
    ([user("hi"), {"role": ASSISTANT}], {}),
    ([user("w?"), answer(None, tool_calls=None), user("?"), answer("x", name=None)], {}),
    ([user("w?"), answer(None, tool_calls=[call("add", {"a": 1, "b": 2})]), result("3"),
      answer("3")], {"tools": TOOLS}),
    ([user("w?"), answer("", tool_calls=CALLS), result("a", "weather", tool_call_id="call0001a"),
      result("b", tool_call_id="call00002"), answer("done"), user("thx"), answer("np")],
     {"tools": TOOLS}),
    ([system("s"), user("w?"), answer("I look", tool_calls=[call("add", {"a": 1, "b": None})]),
      result("3"), answer("3")], {"tools": [ADD]}),
    ([user("w?"), answer(None, tool_calls=[call("add", '{"a": 1}')]), result("3"), answer("3")],
     {"tools": [ADD]}),
    ([system("sys"), user("hello"), answer("no tool")], {"tools": TOOLS}),
    ([user("hello"), answer("no tool")], {"tools": []}),
    ([user("q"), answer("a", reasoning_content="I think so.")], {}),
    ([user("q"), answer("a", thinking="an older name")], {}),
    ([user("q"), answer("a", reasoning="r"), user("p"), answer("b", reasoning_content="s\n")], {}),
    ([user("q"), answer(THOUGHT)], {}),
    ([user("q"), answer(THOUGHT), user("r"), answer("plain")], {}),
    ([user("q"), answer("a")], {"enable_thinking": False}),
    ([user("q"), answer("a", reasoning_content="because")], {"enable_thinking": True}),
    ([system("s"), user("q"), answer("a", reasoning_content="r", tool_calls=[call("add", {})]),
      result("3"), answer("3", reasoning_content="so")], {"tools": [ADD], "enable_thinking": True}),
    ([user(parts("part one", " part two")), answer(parts("answer"))], {}),
    ([system(parts("sys")), user([{"type": "image"}, *parts("l")]), answer(parts("b", "c"))], {}),
    ([user([]), answer("x")], {}),
    ([user("emoji \U0001f600\U0001f468\u200d\U0001f469 end"), answer("\U0001f600 fin \U0001f600")],
     {}),
    ([user("   spaces   "), answer("  \n lead and trail \n\n")], {}),
    ([user("<|im_end|> {{ 7*7 }} {% raw %}"), answer("<|im_start|>assistant\n<|eot_id|>")], {}),
    ([user(""), answer("")], {}),
    ([answer("starts"), user("then"), answer("ends")], {}),
    ([user("a"), user("b"), answer("c"), answer("d")], {}),
    ([user("what?"), answer("see"), user("open")], {}),
    ([turn("developer", "dev"), user("q"), answer("a")], {}),
    ([user("use them"), answer("ok")], {"documents": DOCUMENTS}),
    ([user("c"), answer("q", weight=0, extra={"deep": [1, None]})], {}),
]  # fmt: skip


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Day:
        return cls.fromisoformat(DAY)


def published() -> list[Path]:
    folder = os.environ.get("CHAT_TEMPLATES")
    trl = folder or Path(peer("trl").__file__).parent / "chat_templates"
    return sorted(Path(trl).rglob("*.jinja"))


def tokenizer_with(directory: Path, template: str, bpe_json: Path) -> TokenizerFiles:
    """Make a byte-level BPE tokenizer with every <|...|> of the template as one token."""
    tokenizer = Tokenizer.from_file(str(bpe_json))
    # Like Llama 3 and Qwen: transformers' masks need offsets that cover white space.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = re.findall(r"<\|\w+\|>", template)
    tokenizer.add_special_tokens(sorted({*HOST_SPECIALS.values(), "<|im_start|>", *special}))
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**HOST_SPECIALS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return TokenizerFiles.open(str(directory))


def whole_characters(mask: list[int], offsets: list[tuple[int, int]]) -> list[int]:
    """Extend transformers' mask: it ends inside an answer's last character if that is several
    tokens.
    """
    mask = list(mask)
    for i in range(1, len(mask)):
        if offsets[i] == offsets[i - 1]:
            mask[i] |= mask[i - 1]
    return mask


class Sides:
    """One template, rendered by megapack and by transformers."""

    def __init__(self, template: str, directory: Path, bpe_json: Path) -> None:
        self.files = tokenizer_with(directory, template, bpe_json)
        self.host = peer("transformers").AutoTokenizer.from_pretrained(directory)
        self.template = ChatTemplate(template, "it")
        self.marks = MARKS.search(template) is not None
        self.coders: dict[tuple[str, ...], TemplateChats] = {}

    def outcome(self, messages: Messages, extra: dict[str, Any]) -> str:
        """Tokens and masks on both sides, or texts where the labels are not known."""
        options = {"tools": None, **extra}
        try:
            ours = self.our_tokens(messages, extra)
        except DataError:
            text = self.our_text(messages, extra)
            try:
                expected = self.host.apply_chat_template(messages, tokenize=False, **options)
            except Exception:  # the template's, or what Python says about its expressions
                expected = None
            assert text == expected and (text is None or not self.marks)
            return "both refuse" if text is None else "equal text, labels refused"
        ids = self.host.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=self.marks, **options
        )
        assert ours.ids.tolist() == ids["input_ids"]
        if not self.marks:
            return "equal tokens"
        mask = whole_characters(ids["assistant_masks"], ids.encodings[0].offsets)
        assert ours.learned.astype(int).tolist() == mask
        return "equal tokens and masks"

    def our_text(self, messages: Messages, extra: dict[str, Any]) -> str | None:
        given = {"tools": None, "documents": None, "add_generation_prompt": False}
        given |= {"messages": normalized(messages), "strftime_now": clock(DAY)}
        try:
            return self.template.render(**{**HOST_SPECIALS, **given, **extra}).text
        except DataError:
            return None

    def our_tokens(self, messages: Messages, extra: dict[str, Any]) -> CodedChat:
        reads = self.template.variables
        variables = {name: value for name, value in extra.items() if name in reads}
        words = tuple(name for name in variables if name != "tools")
        words += (f"strftime_now={DAY}",) if "strftime_now" in reads else ()
        if words not in self.coders:
            self.coders[words] = TemplateChats(self.files, "content", words)
        coder = self.coders[words]
        return coder.code(coder.render(Chat(messages, variables)))


def test_published_templates_equal_transformers(
    tmp_path: Path, bpe_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer("transformers")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(utils, "datetime", Day)
    paths = published()
    assert len(paths) >= 20 and len(CHATS) >= 30
    total: Counter[str] = Counter()
    marked = 0
    for path in paths:
        sides = Sides(path.read_text(encoding="utf-8"), tmp_path / path.stem, bpe_json)
        for i, (messages, extra) in enumerate(CHATS):
            try:
                total[sides.outcome(messages, extra)] += 1
            except Exception as error:
                raise AssertionError(f"{path.name}, conversation {i}: {error}") from error
        marked += sides.marks
    print(f"{len(paths)} templates ({marked} with marks) x {len(CHATS)}: {dict(total)}")
    assert total["both refuse"] < sum(total.values()) // 4
    assert total["equal tokens and masks"] > 20 * marked > 0


def test_answers_without_marks_end_with_their_turn(tmp_path: Path, bpe_json: Path) -> None:
    """Without marks, the loss equals that of the publisher's template with marks."""
    by_name = {path.stem: path.read_text(encoding="utf-8") for path in published()}
    if "qwen2_5" not in by_name:
        pytest.skip("another folder than TRL's")
    for name in ("qwen2_5", "llama3"):
        files = tokenizer_with(tmp_path / name, by_name[name], bpe_json)
        coder = TemplateChats(files, "content")
        end = {"qwen2_5": "<|im_end|>", "llama3": "<|eot_id|>"}[name]
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        for messages, extra in CHATS[:3]:
            ids, learned = coder.code(coder.render(Chat(messages, extra)))
            runs = [m["content"] + end for m in messages if m["role"] == ASSISTANT]
            if name == "llama3":  # it trims
                runs = [m["content"].strip() + end for m in messages if m["role"] == ASSISTANT]
            learned_text = tokenizer.decode(ids[learned].tolist(), skip_special_tokens=False)
            assert learned_text == "".join(runs)


def test_tool_use_template_is_chosen_as_by_transformers(tmp_path: Path, bpe_json: Path) -> None:
    """Tools decide; the files are those of save_pretrained."""
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer_with(tmp_path / "t", loop, bpe_json)
    more = tmp_path / "t" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | tojson }}" + loop)
    files = TokenizerFiles.open(str(tmp_path / "t"))
    assert set(files.file_digests) >= {"chat_template.jinja", "tool_use.jinja"}
    host = peer("transformers").AutoTokenizer.from_pretrained(tmp_path / "t")
    messages = [user("hi"), answer("yo")]
    coder = TemplateChats(files, "content")
    for tools in (None, [], [ADD]):
        ours = coder.code(coder.render(Chat(messages, {"tools": tools})))
        expected = host.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
        assert ours.ids.tolist() == expected


def test_unknown_template_variables_are_refused(tmp_path: Path, bpe_json: Path) -> None:
    template = "{{ x }}{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    files = tokenizer_with(tmp_path / "t", template, bpe_json)
    for word, reason in (
        ("y", "reads no 'y' from documents; it reads: x"),
        ("messages", "reads no 'messages'"),
        ("messages=[]", "reads no 'messages'"),  # was a TypeError
        ("tools=[{}]", "reads no 'tools'"),  # was left out without a word
        ("x=oops", "must be JSON .a string with its quotes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            TemplateChats(files, "content", [word])

"""Random tokenizers, and texts built from their own tokens.

- random_tokenizer: a tokenizer.json; ``usual`` prefers what published tokenizers consist of
- random_text: text of a tokenizer's tokens, glued to letters, spaces, marks and each other
- train_sentencepiece: a tiny sentencepiece model with random options
"""

from __future__ import annotations

import io
import random
from typing import Any

import sentencepiece
from tokenizers import pre_tokenizers

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES_RE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}|{SPACES_RE}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN3 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES_RE}"
)
KNOWN = [GPT2, LLAMA3, QWEN2, QWEN3, O200K]
OTHER = [
    LLAMA3.replace(r"[\r\n]+|\s+(", r"[\r\n]|\s+("),
    r"\s+",
    r"\d",
    r"[a-c]+|x",
    r"\p{N}{1,3}",
    " ",
]
REGEXES = [*KNOWN, *OTHER, r"(?<=a)b"]
MARKS = ["\u0338", "\u0301", "\u0308", "\u200d", "\ufe0f"]
LETTERS = [
    *"abcABxyzk",
    "\u00e9",
    "\u00df",
    "\u0130",
    "\u4e2d",
    "\u6587",
    "\U0001f600",
    "\u212b",
    "\ufb01",
]
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\u2581", "\u3000", "\r\n"]
OTHERS = [*"01.,<>|_-'", "'s", "<", ">", "\u0660"]


def words(rng: random.Random, alphabet: list[str]) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(1, 5)))


def merges_of(
    rng: random.Random, alphabet: list[str], number: int
) -> tuple[dict[str, int], list[list[str]]]:
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = []
    for _ in range(number):
        a, b = rng.choice(list(vocab)), rng.choice(list(vocab))
        if a + b not in vocab and len(a + b) < 10:
            vocab[a + b] = len(vocab)
            merges.append([a, b])
    for _ in range(rng.choice([0, 0, 5])):  # tokens that no merge makes
        vocab.setdefault(words(rng, alphabet), len(vocab))
    for _ in range(rng.choice([0, 0, 10])):  # a token that several merges make
        text = rng.choice(list(vocab))
        cuts = [i for i in range(1, len(text)) if text[:i] in vocab and text[i:] in vocab]
        if cuts and [text[: cuts[0]], text[cuts[0] :]] not in merges:
            merges.append([text[: cuts[0]], text[cuts[0] :]])
    order = list(range(len(vocab)))
    if rng.random() < 0.4:
        rng.shuffle(order)
        rng.shuffle(merges)
    if rng.random() < 0.05:  # the rank of a repeated merge is that of its last place
        merges += rng.choices(merges, k=9)
    return dict(zip(vocab, order, strict=True)), merges


def normalizer(rng: random.Random, usual: bool) -> Any:
    kinds: list[Any] = [
        None,
        None,
        {"type": "NFC"},
        {"type": "NFC"},
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    if usual:
        return rng.choice(kinds)
    kinds += [
        {"type": "NFD"},
        {"type": "NFKC"},
        {"type": "NFKD"},
        {"type": "Lowercase"},
        {"type": "StripAccents"},
        {"type": "Strip", "strip_left": rng.random() < 0.5, "strip_right": rng.random() < 0.5},
        {"type": "Prepend", "prepend": rng.choice(["\u2581", "a", " "])},
        {
            "type": "Replace",
            "pattern": {"Regex": rng.choice([r" {2,}", r"\s+", "a+"])},
            "content": rng.choice([" ", "", "\u2581"]),
        },
        {
            "type": "BertNormalizer",
            "clean_text": rng.random() < 0.5,
            "handle_chinese_chars": rng.random() < 0.5,
            "strip_accents": rng.choice([None, True, False]),
            "lowercase": rng.random() < 0.5,
        },
        {"type": "Nmt"},
        {"type": "ByteLevel"},
    ]
    if rng.random() < 0.4:
        return {
            "type": "Sequence",
            "normalizers": [n for n in rng.choices(kinds, k=rng.randint(0, 3)) if n],
        }
    return rng.choice(kinds)


def byte_level(rng: random.Random, usual: bool) -> Any:
    return {
        "type": "ByteLevel",
        "add_prefix_space": rng.random() < 0.3,
        "trim_offsets": rng.random() < 0.5,
        "use_regex": rng.random() < 0.7,
    }


def split(rng: random.Random, usual: bool) -> Any:
    if usual and rng.random() < 0.7:
        return {
            "type": "Split",
            "pattern": {"Regex": rng.choice(KNOWN)},
            "behavior": "Isolated",
            "invert": False,
        }
    behaviors = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    pattern = (
        {"Regex": rng.choice(REGEXES)}
        if rng.random() < 0.8
        else {"String": rng.choice([" ", "a", "\u2581"])}
    )
    return {
        "type": "Split",
        "pattern": pattern,
        "behavior": rng.choice(behaviors),
        "invert": rng.random() < 0.2,
    }


def pre_tokenizer(rng: random.Random, usual: bool) -> Any:
    metaspace = {
        "type": "Metaspace",
        "replacement": "\u2581" if rng.random() < 0.9 else "_",
        "prepend_scheme": rng.choice(["always", "never", "first"]),
        "split": rng.random() < 0.5,
    }
    level = byte_level(rng, usual)
    without = {**level, "use_regex": False, "add_prefix_space": rng.random() < 0.1}
    usuals: list[Any] = [
        level,
        {"type": "Sequence", "pretokenizers": [split(rng, usual), without]},
        metaspace,
        None,
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": rng.random() < 0.5}, level],
        },
    ]
    if usual:
        return rng.choice(usuals[:3] + usuals[1:2])
    kinds = [
        *usuals,
        split(rng, usual),
        {"type": "Whitespace"},
        {"type": "WhitespaceSplit"},
        {"type": "BertPreTokenizer"},
        {"type": "Digits", "individual_digits": rng.random() < 0.5},
        {"type": "Punctuation", "behavior": rng.choice(["Isolated", "Removed", "Contiguous"])},
        {"type": "UnicodeScripts"},
        {"type": "CharDelimiterSplit", "delimiter": rng.choice(" a_")},
    ]
    if rng.random() < 0.4:
        return {
            "type": "Sequence",
            "pretokenizers": [k for k in rng.choices(kinds, k=rng.randint(0, 3)) if k],
        }
    return rng.choice(kinds)


def added_tokens(rng: random.Random, vocab: dict[str, int], simple: bool) -> list[Any]:
    result: list[Any] = []
    contents: set[str] = set()
    size = len(vocab)
    for _ in range(rng.choice([0, 1, 2, 3, 6])):
        parts = [*LETTERS, *SPACES, *OTHERS, *MARKS, *(t for t in contents)]
        content = (
            rng.choice(
                [
                    lambda: f"<|{words(rng, LETTERS[:9])}|>",
                    lambda parts=parts: words(rng, parts),
                    lambda: rng.choice(SPACES) * rng.randint(1, 4),
                    lambda: rng.choice(list(vocab)),
                    lambda: words(rng, LETTERS[:9]),
                    lambda: f"<{words(rng, LETTERS[:5])}",
                ]
            )()
            if not simple
            else f"<|{words(rng, LETTERS[:9])}|>"
        )
        if not content or content in contents:
            continue
        contents.add(content)

        def flag(p: float) -> bool:
            return rng.random() < p

        p = 0 if simple or flag(0.5) else 0.4
        token = vocab.get(content, size)
        size += token == size
        result.append(
            {
                "id": token,
                "content": content,
                "single_word": flag(p),
                "lstrip": flag(p),
                "rstrip": flag(p),
                "normalized": flag(p),
                "special": flag(0.6),
            }
        )
    return result


def random_tokenizer(rng: random.Random, usual: bool = False) -> dict[str, Any]:
    kind = rng.choice(
        [
            "bytes",
            "bytes",
            "bytes",
            "fallback",
            "fallback",
            "chars",
            "unigram",
            "wordpiece",
            "wordlevel",
        ]
        if not usual
        else ["bytes", "bytes", "fallback"]
    )
    pre = pre_tokenizer(rng, usual)
    norm = normalizer(rng, usual)
    chars = [*dict.fromkeys([*LETTERS, *"01.,<>|_-' ", "\u2581", *MARKS])]
    decoder = None
    if kind == "bytes":
        vocab, merges = merges_of(rng, sorted(pre_tokenizers.ByteLevel.alphabet()), 300)
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rng.random() < 0.3,
            "vocab": vocab,
            "merges": merges,
        }
        decoder = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        while usual and (pre is None or pre["type"] == "Metaspace"):
            pre = pre_tokenizer(rng, usual)
        if usual and norm and norm["type"] != "NFC":
            norm = None
    elif kind in ("fallback", "chars"):
        alphabet = (
            ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
            if kind == "fallback"
            else []
        )
        vocab, merges = merges_of(rng, chars, 200)
        start = len(alphabet)
        vocab = {
            **{t: i for i, t in enumerate(alphabet)},
            **{t: i + start for t, i in vocab.items()},
        }
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>" if kind == "fallback" else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": rng.random() < 0.5,
            "byte_fallback": kind == "fallback",
            "ignore_merges": rng.random() < 0.3,
            "vocab": vocab,
            "merges": merges,
        }
        if usual:
            if rng.random() < 0.5:
                pre = None
            else:
                norm = None
                while pre is None or pre["type"] != "Metaspace":
                    pre = pre_tokenizer(rng, usual)
            if norm and norm["type"] == "NFC":
                norm = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    elif kind == "unigram":
        vocab, _ = merges_of(rng, chars, 100)
        model = {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], *([t, -rng.random() * 9] for t in vocab)],
            "byte_fallback": False,
        }
        vocab = {"<unk>": 0, **{t: i + 1 for t, i in vocab.items()}}
    elif kind == "wordpiece":
        vocab, _ = merges_of(rng, chars, 100)
        tokens = ["[UNK]", *vocab, *(f"##{t}" for t in vocab)]
        vocab = {t: i for i, t in enumerate(tokens)}
        model = {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": rng.choice([5, 100]),
            "vocab": vocab,
        }
    else:
        tokens = ["[UNK]", *dict.fromkeys(words(rng, LETTERS) for _ in range(50))]
        vocab = {t: i for i, t in enumerate(tokens)}
        model = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": vocab}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(rng, vocab, usual and rng.random() < 0.5),
        "normalizer": norm,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def random_text(rng: random.Random, contents: list[str]) -> str:
    nonempty = [c for c in contents if c]
    parts = []
    pools = [LETTERS, SPACES, OTHERS, MARKS, nonempty or LETTERS]
    for _ in range(rng.randint(0, 14)):
        part = rng.choice(rng.choices(pools, [4, 2, 2, 1, 5])[0])
        r = rng.random()
        if r < 0.05:
            part = part.upper()
        elif r < 0.1:
            part = part[: rng.randint(0, len(part))]
        parts.append(part)
    return "".join(parts)


def contents_of(tree: dict[str, Any], rng: random.Random) -> list[str]:
    vocab = tree["model"]["vocab"]
    tokens = list(vocab) if isinstance(vocab, dict) else [t for t, _ in vocab]
    added = [t["content"] for t in tree["added_tokens"]]
    return added * 3 + rng.sample(tokens, min(8, len(tokens)))


def train_sentencepiece(rng: random.Random) -> tuple[bytes, list[str]]:
    """Return a model, and its symbols."""
    symbols = [
        words(rng, [*"abc<>|_ ", "\u00e9", "\u2581"]).strip() for _ in range(rng.randint(0, 3))
    ]
    control = [f"<{words(rng, LETTERS[:5])}>" for _ in range(rng.randint(0, 2))]
    user = [symbol for symbol in dict.fromkeys(symbols) if symbol and symbol not in control]
    sentences = ["".join(rng.choices([*LETTERS[:9], " "], k=40)) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type=rng.choice(["bpe", "bpe", "bpe", "unigram"]),
        vocab_size=330,
        hard_vocab_limit=False,
        user_defined_symbols=user,
        control_symbols=list(dict.fromkeys(control)),
        byte_fallback=rng.random() < 0.8,
        normalization_rule_name=rng.choice(["identity"] * 4 + ["nmt_nfkc", "nfkc_cf"]),
        add_dummy_prefix=rng.random() < 0.5,
        remove_extra_whitespaces=rng.random() < 0.3,
        treat_whitespace_as_suffix=rng.random() < 0.2,
        split_by_whitespace=rng.random() < 0.8,
        split_digits=rng.random() < 0.5,
        minloglevel=2,
    )
    return model.getvalue(), [*user, *control, "<s>", "</s>", "<unk>"]

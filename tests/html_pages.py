"""Parsing of HTML pages for tests."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Nesting(HTMLParser):
    """Parser that fails on wrongly nested tags and collects text and attributes."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def words_of(page: str) -> str:
    """Return the text of a page, with one space between words."""
    return " ".join(" ".join(Nesting(page).text).split())


def assert_stands_alone(page: str) -> None:
    """Check nesting and numbers; nothing may be fetched, and colours must follow the theme."""
    parsed = Nesting(page)
    assert page.startswith("<!DOCTYPE html>") and parsed.open == []
    tags = {tag for tag, _, _ in parsed.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"<script|https?:|url\(|@import", page)
    named = [a for a in parsed.attributes if a[1] in ("src", "href", "xlink:href", "srcset")]
    ids = {f"#{value}" for _, key, value in parsed.attributes if key == "id"}
    assert {tag for tag, _, _ in named} <= {"use"}, "markers of the same plot"
    assert all(value in ids for _, _, value in named)
    charts = page[page.index("</style>") :]
    assert not re.search(r"\b(nan|inf)\b", charts.lower())
    assert "var(--blue)" in charts and not re.search(r"(fill|stroke): #(?!000000)", charts)

"""HTML pages as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser


class Nesting(HTMLParser):
    """Fails on a tag that is closed out of order; collects text and attributes."""

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


def ids_of(parsed: Nesting) -> list[tuple[str, str, str | None]]:
    return [a for a in parsed.attributes if a[1] == "id"]

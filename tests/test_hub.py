"""Address of the connection to the model hub: its own or a proxy's, each a real local port."""

from __future__ import annotations

import socket

import pytest

from megapack.hub import hub_answers

MIRROR = "http://127.0.0.1:{open}"


@pytest.mark.parametrize(
    ("answers", "settings"),
    [
        (True, {"HF_ENDPOINT": MIRROR}),
        (False, {"HF_ENDPOINT": "http://127.0.0.1:{closed}"}),
        (False, {"HF_ENDPOINT": MIRROR, "HF_HUB_OFFLINE": "1"}),
        (True, {"https_proxy": "http://user:secret@127.0.0.1:{open}"}),
        (True, {"https_proxy": "127.0.0.1:{open}"}),
        (True, {"all_proxy": "127.0.0.1:{open}"}),
        (True, {"HF_ENDPOINT": "http://a.invalid", "http_proxy": "http://127.0.0.1:{open}"}),
        (False, {"HF_ENDPOINT": MIRROR, "http_proxy": "127.0.0.1:{closed}"}),
        (False, {"HF_ENDPOINT": MIRROR, "http_proxy": "127.0.0.1:port"}),
        (True, {"HF_ENDPOINT": MIRROR, "http_proxy": "127.0.0.1:{closed}", "no_proxy": "*"}),
        (True, {"HF_ENDPOINT": MIRROR, "all_proxy": "127.0.0.1:{closed}", "no_proxy": "127.0.0.1"}),
        (True, {"HF_ENDPOINT": MIRROR, "https_proxy": "127.0.0.1:{closed}"}),
    ],
)
def test_the_address_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, answers: bool, settings: dict[str, str]
) -> None:
    for kind in ("http", "https", "all", "no"):
        for name in (f"{kind}_proxy", f"{kind.upper()}_PROXY"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with socket.socket() as listening, socket.socket() as closed:
        for one in (listening, closed):
            one.bind(("127.0.0.1", 0))
        listening.listen()
        ports = {"open": listening.getsockname()[1], "closed": closed.getsockname()[1]}
        for name, value in settings.items():
            monkeypatch.setenv(name, value.format_map(ports))
        assert hub_answers() == answers


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://a", 80), ("https://a", 443), ("http://a:8080", 8080), ("https://a:8443", 8443)],
)
def test_the_port_follows_the_scheme(monkeypatch: pytest.MonkeyPatch, url: str, port: int) -> None:
    """The usual ports need an administrator's rights, so the connection is not made here."""
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], _: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("no_proxy", "*")
    assert not hub_answers()
    assert asked == [("a", port)]

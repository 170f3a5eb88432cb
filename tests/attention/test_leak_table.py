"""megapack-probe: verdicts, reasons and exit statuses for models of transformers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from megapack.attention.leak_table import architectures, findings, main, read_configuration


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_restarting_positions_are_safe_until_a_mask_of_ones_is_added(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = "position_ids,mask of ones,numbered mask,position_ids and use_cache"
    status, found = run(capsys, "llama", "--attention", "sdpa", "--boundaries", ways)
    verdicts = {finding["boundaries"]: finding["verdict"] for finding in found}
    assert verdicts == {
        "position_ids": "safe",
        "mask of ones": "leaks",
        "numbered mask": "leaks",
        "position_ids and use_cache": "leaks",
    }
    assert found[1]["detail"] == "model.layers.0.self_attn (attention_mask)"
    assert status == 1


def test_a_kernel_that_is_not_installed_is_refused_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = run(capsys, "llama", "--attention", "no_such_kernel")
    assert status == 3 and {finding["verdict"] for finding in found} == {"refused"}
    assert "no_such_kernel" in found[0]["detail"]


def test_a_local_configuration_is_read_and_printed_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    place = str(tmp_path / "config.json")
    words = ["--attention", "eager,sdpa", "--boundaries", "4-D mask", "--dtype", "bfloat16"]
    assert main([place, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{place}, bfloat16" and lines[1].split() == ["eager", "sdpa"]
    assert lines[2].split() == ["4-D", "mask", "safe", "safe"]


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client of huggingface_hub would retry for half a minute."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    asked: list[dict[str, Any]] = []
    real = AutoConfig.from_pretrained

    def from_pretrained(*names: Any, **options: Any) -> Any:
        asked.append(options)
        return real(*names, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert main(["nobody/no-such-model"]) == 1
    assert [options["local_files_only"] for options in asked] == [True]
    assert "'nobody/no-such-model' is not an architecture" in capsys.readouterr().err


def test_a_threshold_of_rope_between_documents_is_found() -> None:
    configuration = read_configuration("llama")
    configuration.rope_parameters = {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0,
    }  # fmt: skip
    (finding,) = findings(
        "llama", configuration, attention=["sdpa"], boundaries=["position_ids"],
        dtype=torch.float32,
    )  # fmt: skip
    assert (finding.verdict, finding.detail) == ("leaks", "model.rotary_emb (position_ids)")


@pytest.mark.parametrize(
    "words",
    [[], ["llama", "--all"], ["llama", "--boundaries", "no_such"], ["llama", "--dtype", "f"]],
)
def test_a_wrong_command_line_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/folder"]) == 1
    assert "'/no/such/folder' is not an architecture" in capsys.readouterr().err
    assert {"llama", "mamba", "qwen3_next"} <= {*architectures()}

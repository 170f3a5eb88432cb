"""The backend is chosen once, with a reason; what cannot be honoured is refused, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megapack.attention import AttentionNeeds, alibi_slopes, choose_backend, varlen_attention
from megapack.attention.flash import FLASH2
from megapack.attention.problem import ScoreRule
from megapack.errors import ConfigError


def _needs(**changes: object) -> AttentionNeeds:
    values: dict[str, object] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "head_dim": 64,
        "num_heads": 4,
        "num_key_value_heads": 2,
    }
    return AttentionNeeds(**{**values, **changes})  # type: ignore[arg-type]


def test_the_cpu_takes_sdpa_and_says_why_not_the_faster_ones() -> None:
    choice = choose_backend(_needs())
    assert choice.name == "sdpa"
    assert "flash2: it runs on CUDA devices, not on cpu" in choice.reason
    assert "eager" not in choice.reason  # only what would have been preferred


def test_a_soft_cap_on_the_cpu_takes_the_formula() -> None:
    choice = choose_backend(_needs(softcap=True))
    assert choice.name == "eager" and "no soft cap" in choice.reason


def test_a_backend_that_was_asked_for_is_taken_or_refused_with_the_able_ones() -> None:
    assert choose_backend(_needs(), "eager").name == "eager"
    with pytest.raises(ConfigError, match=r"flash2.*not on cpu; able here: sdpa, eager"):
        choose_backend(_needs(), "flash2")
    with pytest.raises(ConfigError, match=r"'sdpa' cannot serve .*softcap.*able here: eager"):
        choose_backend(_needs(softcap=True), "sdpa")
    with pytest.raises(ConfigError, match=r"'flush' is unknown; choose one of auto, flash3"):
        choose_backend(_needs(), "flush")


def test_flash3_never_serves_alibi() -> None:
    with pytest.raises(ConfigError, match="flash-attn 3 has no ALiBi"):
        choose_backend(_needs(alibi=True), "flash3")


def test_old_flash_attn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "flash_attn_interface.py").touch()
    about = tmp_path / "flash_attn-2.6.3.dist-info"
    about.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needs = _needs(device=torch.device("cuda"), dtype=torch.bfloat16)
    for version, refusal in (
        ("2.6.3", "flash-attn 2.6.3 is older than 2.8"),
        ("2.8.3.post1", None),
        ("3.0.0b1", None),
    ):
        (about / "METADATA").write_text(f"Name: flash-attn\nVersion: {version}\n")
        assert FLASH2.refusal(needs) == refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 4, "backend": "nope"}, "'nope' is unknown"),
        ({"softcap": 1.0}, "cannot apply a soft cap"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "int32"),
        ({"key": torch.zeros(4, 3, 8), "value": torch.zeros(4, 3, 8)}, "cannot share"),
        ({"value": torch.zeros(4, 1, 8)}, "must be"),
        ({"alibi_slopes": torch.ones(3)}, "one slope per head"),
        ({"causal": False, "window": 2}, "sliding window without causal"),
        ({"window": -1}, "0 \\(off\\) or more"),
    ],
)
def test_call_that_no_backend_honours_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(4, 4, 8),
        "key": torch.zeros(4, 2, 8),
        "value": torch.zeros(4, 2, 8),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "max_seqlen": 4,
        "backend": "sdpa",
    }
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**arguments, **changes})  # type: ignore[arg-type]


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot share"):
        _needs(num_heads=5)
    with pytest.raises(ValueError, match="0 \\(off\\) or more"):
        ScoreRule(scale=1.0, softcap=-1.0)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert torch.allclose(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    twelve = alibi_slopes(12)  # eight of the power below, then every other of sixteen
    assert torch.allclose(twelve[:8], alibi_slopes(8))
    assert torch.allclose(twelve[8:], alibi_slopes(16)[0:8:2])
    with pytest.raises(ValueError, match="at least 1"):
        alibi_slopes(0)

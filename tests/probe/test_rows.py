"""The probe finds boundaries that are wrong, masks that are shifted and windows that are lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from reference.trees import fields, tree_of
from torch import Tensor, nn

from megapack.attention import TreeSegments, tree_mask
from megapack.data import TreeBatch, tree_batch
from megapack.errors import ConfigError
from megapack.planning import Tree
from megapack.probe import SegmentPlaces, check_rows

BOUNDS = (0, 5, 6, 13, 17, 19, 24)


def make_batch(window: int | None = None, *, per_row: bool = False) -> dict[str, Any]:
    """Return six segments in two rows of 12 tokens; the last is padding."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 50, (24,), generator=generator)
    labels = torch.roll(tokens, -1)
    labels[torch.tensor(BOUNDS[1:]) - 1] = -100
    labels[19:] = -100
    cuts = {24}
    for begin, end in pairwise(BOUNDS):
        cuts |= {*range(begin, end, window or 24)}
    ends = torch.tensor(sorted(cuts | ({12} if per_row else set())), dtype=torch.int32)
    if per_row:
        rows = [ends[(ends >= low) & (ends <= low + 12)] - low for low in (0, 12)]
        ends = torch.stack([nn.functional.pad(x, (0, 13 - len(x)), value=12) for x in rows])
    return {
        "tokens": tokens.view(2, 12),
        "labels": labels.view(2, 12),
        "loss_mask": (labels >= 0).float().view(2, 12),
        "cu_seqlens": ends,
    }


class TinyModel(nn.Module):
    """One layer of causal attention inside the given segments, and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(50, 16)
            self.project = nn.Linear(16, 16)
            self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        of = torch.bucketize(torch.arange(len(x)), ends, right=True)
        see = (of[:, None] == of) & torch.ones(len(x), len(x)).tril().bool()
        scores = (self.project(x) @ x.T / 4).masked_fill(~see, -torch.inf)
        logits: Tensor = self.head(x + scores.softmax(-1) @ x)
        return logits


Spoil = Callable[[Tensor], Tensor]


def logits_of(spoil: Spoil = lambda ends: ends) -> Callable[[dict[str, Any]], Tensor]:
    model = TinyModel()

    def forward(batch: dict[str, Any]) -> Tensor:
        segments = SegmentPlaces.of(batch)
        ends = torch.cat([segments.begins, torch.tensor([24])])
        return model(batch["tokens"], spoil(ends))

    return forward


def losses_of(shift: int) -> Callable[[dict[str, Any]], Tensor]:
    model = logits_of()

    def forward(batch: dict[str, Any]) -> Tensor:
        labels = batch["labels"].flatten().clamp(min=0)
        losses = nn.functional.cross_entropy(model(batch), labels, reduction="none")
        return losses * batch["loss_mask"].flatten().roll(shift)

    return forward


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_a_forward_that_keeps_documents_apart_passes(window: int | None, per_row: bool) -> None:
    batch = make_batch(window, per_row=per_row)
    kept = {name: value.clone() for name, value in batch.items()}
    state = torch.get_rng_state()
    assert check_rows(logits_of(), batch) >= 0
    assert check_rows(losses_of(0), batch) >= 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(batch[name], value) for name, value in kept.items())


WRONG = [(at, wrong) for at in range(1, 6) for wrong in ("missing", "late", "early")]
WRONG.remove((2, "early"))  # before a one-token document: that boundary would be missing


@pytest.mark.parametrize(("at", "wrong"), WRONG)
def test_a_wrong_boundary_is_found(at: int, wrong: str) -> None:
    def spoil(ends: Tensor) -> Tensor:
        if wrong == "missing":
            return torch.cat([ends[:at], ends[at + 1 :]])
        return ends + (torch.arange(len(ends)) == at) * (1 if wrong == "late" else -1)

    with pytest.raises(ConfigError, match="another document"):
        check_rows(logits_of(spoil), make_batch(), host="a host")


def test_a_lost_window_is_found() -> None:
    with pytest.raises(ConfigError, match="another document"):
        check_rows(logits_of(lambda _: torch.tensor(BOUNDS)), make_batch(window=2))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_is_found(shift: int) -> None:
    with pytest.raises(ConfigError, match="shifted twice"):
        check_rows(losses_of(shift), make_batch())


def test_a_look_ahead_is_found() -> None:
    plain = logits_of()

    def forward(batch: dict[str, Any]) -> Tensor:
        made = plain(batch)
        made[7] += made[9]  # inside the segment of tokens 6 to 12
        return made

    with pytest.raises(ConfigError, match="what comes after it"):
        check_rows(forward, make_batch())


def test_outputs_that_do_not_depend_on_the_batch_are_refused() -> None:
    fixed = logits_of()(make_batch()).detach()
    with pytest.raises(ConfigError, match="do not depend on the batch"):
        check_rows(lambda _: fixed, make_batch())


def test_infinite_outputs_do_not_hide_leaks() -> None:
    """Logits of ids that no token has are -inf in some hosts; a model that diverged gives nan."""

    def masked(spoil: Spoil) -> Callable[[dict[str, Any]], Tensor]:
        model = logits_of(spoil)
        return lambda batch: nn.functional.pad(model(batch), (0, 2), value=-torch.inf)

    assert check_rows(masked(lambda ends: ends), make_batch()) >= 0
    with pytest.raises(ConfigError, match="another document"):
        check_rows(masked(lambda ends: ends[::2]), make_batch())
    with pytest.raises(ConfigError, match="a host gives outputs that are not finite"):
        check_rows(lambda batch: logits_of()(batch) * torch.nan, make_batch(), host="a host")


def test_losses_of_padding_need_not_change() -> None:
    batch = make_batch()
    batch["cu_seqlens"] = torch.tensor([0, 19, 24], dtype=torch.int32)
    assert check_rows(losses_of(0), batch) >= 0


@pytest.mark.parametrize("one_token_each", [False, True])
def test_batch_without_labels_gets_labels_for_the_probe(
    one_token_each: bool,
) -> None:
    batch = make_batch()
    batch["labels"], batch["loss_mask"] = torch.full((2, 12), -100), torch.zeros(2, 12)
    if one_token_each:
        batch["cu_seqlens"] = torch.arange(25, dtype=torch.int32)
    assert check_rows(losses_of(0), batch) >= 0
    with pytest.raises(ConfigError, match=r"another document|shifted"):
        check_rows(losses_of(1), batch)


# --- documents that depend on how long others, or the row, are ---


def scaled_logits(
    scale: Callable[[Tensor, int], Any], threshold: int = 0
) -> Callable[[dict[str, Any]], Tensor]:
    """Return a forward whose logits depend on the longest position or the number of tokens."""
    plain = TinyModel()

    def forward(batch: dict[str, Any]) -> Tensor:
        segments = SegmentPlaces.of(batch)
        ends = torch.cat([segments.begins, torch.tensor([batch["tokens"].numel()])])
        positions = torch.arange(batch["tokens"].numel()) - segments.begins.repeat_interleave(
            segments.padded_lengths
        )
        found = scale(positions, batch["tokens"].numel())
        return plain(batch["tokens"], ends) * (1.0 if found <= threshold else found)

    return forward


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("threshold", [0, 3, 4])
def test_dependence_on_the_longest_document_is_found(threshold: int, per_row: bool) -> None:
    """The longest segment has 7 tokens (6 in separate rows): position 6."""
    forward = scaled_logits(lambda positions, _: int(positions.max()), threshold)
    batch = make_batch(per_row=per_row)
    for any_length in (False, True):
        with pytest.raises(ConfigError, match="depends on the lengths of other documents"):
            check_rows(forward, batch, any_length=any_length)
        beyond = scaled_logits(lambda positions, _: int(positions.max()), 6)
        assert check_rows(beyond, batch, any_length=any_length) >= 0


def test_dependence_on_the_row_length_is_found() -> None:
    forward = scaled_logits(lambda _, tokens: tokens)
    with pytest.raises(ConfigError, match="when it is alone"):
        check_rows(forward, make_batch(), any_length=True)


def test_the_batch_of_the_longest_documents_is_cut() -> None:
    forward = scaled_logits(lambda positions, _: int(positions.max()), 8)
    longest = {**make_batch(), "cu_seqlens": torch.tensor([0, 12, 24], dtype=torch.int32)}
    assert check_rows(forward, make_batch()) >= 0
    with pytest.raises(ConfigError, match="depends on the lengths of other documents"):
        check_rows(forward, make_batch(), longest=longest)


@pytest.mark.parametrize(("longest", "count"), [(None, 6), (make_batch(), 7)])
def test_the_number_of_forwards_does_not_depend_on_the_batch(longest: Any, count: int) -> None:
    for any_length in (False, True):
        for batch in (make_batch(), make_batch(window=2)):
            calls: list[int] = []
            plain = scaled_logits(lambda _, tokens: 0)

            def forward(
                asked: dict[str, Any], calls: list[int] = calls, plain: Any = plain
            ) -> Tensor:
                calls.append(1)
                made: Tensor = plain(asked)
                return made

            check_rows(forward, batch, longest=longest, any_length=any_length)
            assert len(calls) == count


def told_by_text(batch: dict[str, Any]) -> Tensor:
    """Return which labels a host that derives them from tokens has: only next tokens."""
    return (batch["loss_mask"] != 0) & (batch["labels"] == batch["tokens"].roll(-1).view(2, 12))


@pytest.mark.parametrize("joined", [False, True])
def test_host_that_derives_labels_from_text_is_probed(joined: bool) -> None:
    model = logits_of((lambda ends: torch.cat([ends[:2], ends[3:]])) if joined else lambda e: e)
    batch = make_batch()

    def forward(asked: dict[str, Any]) -> Tensor:
        following = asked["tokens"].flatten().roll(-1)
        losses = nn.functional.cross_entropy(model(asked), following, reduction="none")
        return losses * told_by_text(asked).flatten()

    options: dict[str, Any] = {"counted": told_by_text}
    if not joined:
        assert check_rows(forward, batch, **options) >= 0
        return
    with pytest.raises(ConfigError, match="another document"):
        check_rows(forward, batch, **options)


# --- packed prefix trees ---


def tree_of_branches() -> dict[str, Any]:
    """A prefix of 4 tokens with three branches, the second with two more, a root, and padding."""
    prompt = [7, 3, 9, 4]
    inner = [*prompt, 8, 8, 5]
    sequences = [[*prompt, 5, 6, 7], [*inner, 1, 2], [*inner, 3, 4, 9], [*prompt, 9, 9], [1, 2, 3]]
    tree = Tree(**fields(tree_of(dict(enumerate(sequences)))))
    return dict(tree_batch(tree, sequences, pad_to=tree.num_tokens + 2))


def mask_of(batch: dict[str, Any]) -> Tensor:
    return tree_mask(TreeSegments.of(batch), batch["tokens"].shape[1])[0, 0]


def tree_forward(
    mask_of: Callable[[dict[str, Any]], Tensor] = mask_of, *, losses: bool = False
) -> Callable[[dict[str, Any]], Tensor]:
    """Return a layer of attention under a mask, or its losses."""
    model = TinyModel()

    def forward(batch: dict[str, Any]) -> Tensor:
        x = model.embed(batch["tokens"][0]) + batch["position_ids"][0, :, None] / 8
        scores = (model.project(x) @ x.T / 4).masked_fill(~mask_of(batch), -torch.inf)
        logits: Tensor = model.head(x + scores.softmax(-1) @ x)
        if losses:
            return -TreeBatch(batch).log_probs(logits) * (batch["loss_weights"][0] != 0)
        return logits

    return forward


@pytest.mark.parametrize("outputs", ["logits", "losses"])
def test_a_forward_that_attends_to_paths_passes(outputs: Any) -> None:
    batch = tree_of_branches()
    forward = tree_forward(losses=outputs == "losses")
    assert check_rows(forward, batch) >= 0
    batch["loss_weights"] *= 0  # then the probe weighs every token that is predicted
    assert check_rows(forward, batch) >= 0


def test_visible_tokens_of_other_branches_are_found() -> None:
    """One wrong entry of the mask, at every third place that must not be visible. A run shows it if
    it changes the key and nothing that the query may see; paths alone show a few more."""
    batch = tree_of_branches()
    mask = mask_of(batch)
    runs = (
        [3, 4, 5, 6, 10, 11, 12, 15, 16, 17],  # odd branches, also those with branches
        [0, 1, 2, 7, 8, 9, 13, 14, 18, 19, 20, 21],  # even leaves
        [1, 8, 14, 16, 19, 21],  # the middle of every leaf
    )
    hidden, missed, shown = (~mask).nonzero().tolist()[::3], set(), set()
    for query, key in hidden:

        def leaking(batch: dict[str, Any], query: int = query, key: int = key) -> Tensor:
            mask = mask_of(batch)
            mask[query, key] = True
            return mask

        if any(key in run and not mask[query, run].any() for run in runs):
            shown.add((query, key))
        try:
            check_rows(tree_forward(leaking), batch)
        except ConfigError:
            pass
        else:
            missed.add((query, key))
    assert not missed & shown
    assert len(missed) < len(hidden) / 2 < len(shown)


def test_paths_that_lack_their_prefix_are_found() -> None:
    def nodes_only(batch: dict[str, Any]) -> Tensor:
        documents = TreeSegments.of_documents(batch["cu_seqlens_q"], batch["max_seqlen_q"])
        return tree_mask(documents, batch["tokens"].shape[1])[0, 0]

    with pytest.raises(ConfigError, match=r"when its path is alone.*kv_index and the depths"):
        check_rows(tree_forward(nodes_only), tree_of_branches())

"""Several datasets in one run: the manifest that lists them, as it is written.

- ``BlendConfig``, ``load_blend``: the manifest. ``Source``: one dataset of it.
- ``Stage``, ``Ramp``: what changes from a step on.
- ``Mixture``: the same beside sources that are open; ``PackedDataset`` is given its fields.
- ``HostOptions``: keys that only hosts ask for.

    sources:                       # YAML or JSON; paths are relative to this file
      - {name: web,  prefix: web/docs,  index: web/docs.samples,  weight: 0.6}
      - {name: code, prefix: code/docs, index: code/docs.samples, weight: 0.2, valid_prefix: code/v}
      - {name: chat, prefix: chat/docs, index: chat/docs.samples, weight: 0.1, labels: chat/turns}
      - {name: math, index: math.shards.json, weight: 0.1}      # many datasets as one source
      - {name: late, prefix: late/docs, index: late/docs.samples, weight: 0}  # not yet
    max_epochs: 4                  # no source is repeated more often: such a run is refused, or
    run_tokens: 10_000_000_000     # over so many tokens the others take what a source is short of
    attention_window: 2048
    fim: {rate: 0.5, sentinels: {prefix: 7, suffix: 8, middle: 9}}     # fill-in-the-middle
    stages:
      - {from_tokens: 2_000_000_000, tokens_per_step: 1048576}
      - {from_step: 9000, skip_steps: 200}                      # skips what steps 9000 to 9199 drew
      - {from_step: 9500, attention_window: 8192, window_steps: 2000}
      - {from_step: 12000, weights: {web: 0.5, late: 0.5}, order: grow-p2, loss_weights: {late: 2}}
      - {from_step: 14000, weights: {late: 1}, ramp: {until_step: 15000}}    # little by little
      - {from_step: 15000, exclude: {web: takedown.txt}, fim_rates: {code: 0.9}}

What a stage does not say stays as it was (``megapack.data.program``). The same file serves launch/
and the hosts of ``megapack.integrations``, which also pack sources that have no index and form rows
(``HostOptions``: launch/ reads past these keys). The blend happens inside every bucket, so that all
ranks still have the same bucket at every micro step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megapack.config import check_positive, check_range, load_config, whole_numbers
from megapack.data.fim import FimConfig
from megapack.data.sample_order import Scores
from megapack.data.steps import Loss
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex, is_shard_manifest, load_index
from megapack.storage.address import path_in


@dataclass(frozen=True, kw_only=True)
class Source:
    """One dataset of a blend."""

    prefix: str | None = None
    """Path of the .bin/.idx pair, without the ending; None: a shard manifest names them."""
    index: str | None = None
    """Path of its .samples, or of a shard manifest (many datasets, packed by one
    ``megapack-build pack``); None, for hosts that pack: by the manifest's strategy."""
    shards: tuple[int, ...] | None = None
    """Shards ``[first, last)`` of a shard manifest, so that shards added later can be another
    source; None: all."""
    weight: float | None = None
    """Share of the tokens seen in training; None for all sources: by their sizes. 0: nothing, until
    a stage gives the source another weight."""
    max_epochs: float | None = None
    """``BlendConfig.max_epochs`` of this source; None: that of the manifest."""
    name: str | None = None
    """For stages and reports; None: the prefix, or the shard manifest."""
    labels: str = "auto"
    """Prefix of a label dataset, token by token beside the tokens, -100 where there is no loss.
    ``auto``: <prefix>.labels where that exists; ``none``: every token has its label."""
    token_weights: str = "auto"
    """Prefix of a dataset of loss weights, token by token beside the tokens: of every token the
    factor on the loss of predicting it. ``auto``: <prefix>.weights where that exists; ``none``: 1
    for all."""
    loss_weight: float = 1.0
    """Factor on the loss of its labels: each counts like so many in the mean over a step. The loss
    denominator is the sum of these factors, so equal factors change nothing."""
    fim_rate: float | None = None
    """Share of its documents that are told with their middle at the end; None: ``fim.rate`` of the
    manifest."""
    valid_prefix: str | None = None
    """Held-out documents of the same kind, for ``launch/``: its evaluations tell their loss beside
    those of the other sources. Hosts have validation data of their own."""
    valid_index: str | None = None
    """Their .samples; None: packed on the fly."""
    scores: str | None = None
    """A .npy of one number per document, by which every epoch is ordered instead of shuffled
    (``megapack.data.sample_order``)."""
    score_order: Literal["ascending", "descending"] = "ascending"
    """Whether the lowest or the highest scores come first."""

    def __post_init__(self) -> None:
        check_range(f"source {self.title!r}", at_least=0, weight=self.weight)
        check_range(f"source {self.title!r}", at_least=0, at_most=1, fim_rate=self.fim_rate)
        check_positive(
            f"source {self.title!r}", loss_weight=self.loss_weight, max_epochs=self.max_epochs
        )
        sharded = self.index is not None and is_shard_manifest(self.index)
        if sharded == (self.prefix is not None):
            raise ConfigError(
                f"source {self.title!r} needs a prefix, or a shard manifest as its index, and not "
                "both"
            )
        if self.shards is not None and not (sharded and len(self.shards) == 2):
            raise ConfigError(
                f"source {self.title!r} has shards {list(self.shards)}; that is [first, end] of a "
                "shard manifest"
            )
        if self.scores is None and self.score_order != "ascending":
            raise ConfigError(
                f"source {self.title!r} has score_order {self.score_order} and no scores; give "
                "their file, too"
            )
        if self.valid_index is not None and self.valid_prefix is None:
            raise ConfigError(
                f"source {self.title!r} has a valid_index and no valid_prefix; give the documents "
                "that it is an index of, too"
            )

    def relative_to(self, folder: Path) -> Source:
        """The source with paths relative to the manifest's folder; addresses stay."""
        names = ["prefix", "index", "labels", "token_weights", "valid_prefix", "valid_index"]
        names += ["scores"]
        given = {name: getattr(self, name) for name in names}
        paths: dict[str, Any] = {
            name: path_in(folder, path)
            for name, path in given.items()
            if path is not None
            and not (name in ("labels", "token_weights") and path in ("auto", "none"))
        }
        return replace(self, **paths)

    @property
    def title(self) -> str:
        """Its name in stages and reports."""
        return self.name or self.prefix or str(self.index)

    def open_index(self) -> SourceIndex:
        """Its samples. Raises as ``load_index`` does."""
        assert self.index is not None
        return load_index(self.index, self.shards)

    @property
    def by_score(self) -> Scores | None:
        """Its order by score, if it has one."""
        return None if self.scores is None else Scores(path=self.scores, order=self.score_order)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """How the weights of a stage are reached; they hold from the end of the ramp on.

    Over n steps the share of a source goes from a to b as a + (b - a) f(t / n), with f(x) = x
    (linear) or (1 - cos(pi x)) / 2 (cosine). The steps are cut into pieces of equal length, each a
    stage of its own with an exact blend; its shares are the means of a + (b - a) f over its steps.

    So at the end of every piece the blend has followed f, and between two ends it is at most
    |b - a| n / (8 pieces^2) steps' worth of tokens from it (linear; pi / 2 times that for cosine):
    what a function of slope s and mean 0 adds up to over a length h is at most s h^2 / 8. With 32
    pieces that is |b - a| n / 8192. To this comes what every stage may be off, 1.69 samples per
    bucket.
    """

    until_step: int | None = None
    """The first step that has the stage's own weights."""
    until_tokens: int | None = None
    """Instead of until_step: the first step before which so many tokens were taken."""
    shape: Literal["linear", "cosine"] = "linear"
    """f, by which the weights go from the old ones to the new."""
    pieces: int = 32
    """How many stages of constant weights the ramp is cut into."""

    def __post_init__(self) -> None:
        if (self.until_step is None) == (self.until_tokens is None):
            raise ConfigError("a ramp ends at until_step or at until_tokens: give one of them")
        whole_numbers("ramp", self, "until_step", "until_tokens", "pieces", above=0)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Changes from a step on. Everything but where it begins may be left out."""

    from_step: int | None = None
    """The first step of the stage, counted from the beginning of the run."""
    from_tokens: int | None = None
    """Instead of from_step: the first step before which so many tokens were taken, with padding."""
    weights: dict[str, float] | None = None
    """Source name -> share of the tokens; a source that is not named is not drawn."""
    tokens_per_step: int | None = None
    """As in ``megapack.data.steps.StepConfig``, like all down to ``micro_step_tokens``."""
    order: str | None = None
    """How buckets follow each other from here on."""
    num_cycles: int | None = None
    """Goes with order: a stage that gives another order and not this takes the order's own."""
    mix: Literal["step", "micro_step"] | None = None
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """Tokens that all ranks take from one bucket at a time."""
    skip_steps: int = 0
    """Skip exactly the samples that steps ``from_step`` to ``from_step + skip_steps - 1`` draw in
    the run without this skip. Other stages may begin among these steps; the settings of this stage
    apply to them. The samples count as seen and return in the next epoch."""
    exclude: dict[str, str] | None = None
    """Source name -> file of document ids, .npy of integers or text with one per line: masked from
    here to the end of the run (``megapack.data.sources``)."""
    ramp: Ramp | None = None
    """The weights are reached step by step; None: at once. Later stages without weights leave the
    ramp going."""
    loss_weights: dict[str, float] | None = None
    """Source name -> ``Source.loss_weight`` from here on; that of a source not named stays."""
    fim_rates: dict[str, float] | None = None
    """Source name -> ``Source.fim_rate`` from here on; that of a source not named stays."""
    attention_window: int | None = None
    """Attention stays inside pieces of so many tokens of a segment (``Window``); 0: inside
    segments, as without a window."""
    window_steps: int = 0
    """The window goes in so many steps from the one before to this one, on a line."""

    def __post_init__(self) -> None:
        if (self.from_step is None) == (self.from_tokens is None):
            raise ConfigError("a stage begins at from_step or at from_tokens: give one of them")
        names = ("from_step", "from_tokens", "tokens_per_step", "num_cycles", "micro_step_tokens")
        whole_numbers(str(self), self, *names)
        rest = ("skip_steps", "attention_window", "window_steps")
        whole_numbers(str(self), self, *rest, at_least=0)
        if self.window_steps and not self.attention_window:
            raise ConfigError(
                f"{self} has window_steps {self.window_steps} and attention_window "
                f"{self.attention_window}; give the window it goes to"
            )
        if self.exclude == {}:
            raise ConfigError(f"{self} has an empty exclude; name a source and its file")
        if self.weights == {}:
            raise ConfigError(f"{self} has empty weights; name at least one source")
        if self.ramp is not None and self.weights is None:
            raise ConfigError(f"{self} has a ramp and no weights; give those to reach")

    def relative_to(self, folder: Path) -> Stage:
        """The stage with paths relative to the manifest's folder."""
        if self.exclude is None:
            return self
        files = {name: str(folder / path) for name, path in self.exclude.items()}
        return replace(self, exclude=files)

    def __str__(self) -> str:
        if self.from_tokens is None:
            return f"the stage from step {self.from_step}"
        return f"the stage from {self.from_tokens} tokens"


@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """Sources and how often each may be repeated."""

    sources: tuple[Source, ...]
    """What the run draws from, one entry a dataset."""
    max_epochs: float | None = None
    """A run that would repeat a source more often is refused; None: no limit. With ``run_tokens``
    the weight of a source gives way instead, and the others have what is left over."""
    run_tokens: int | None = None
    """Tokens of the whole run, steps x tokens_per_step, for which weights keep to ``max_epochs``
    (``megapack.data.program.within_epochs``); equal weights are UniMax's then. What lies behind has
    the weights as they are written."""
    stages: tuple[Stage, ...] = ()
    """Changes at later steps, in order."""
    attention_window: int | None = None
    """Until a stage says otherwise: attention stays inside pieces of so many tokens of a segment
    (``megapack.data.stage_settings.Window``). None: inside segments."""
    fim: FimConfig | None = None
    """Fill-in-the-middle (``megapack.data.fim``). None: documents are told as they are."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a manifest needs at least one source")
        check_positive("manifest", max_epochs=self.max_epochs, run_tokens=self.run_tokens)
        if self.run_tokens is not None and set(self.limits) == {None}:
            raise ConfigError(
                f"the manifest has run_tokens {self.run_tokens} and no max_epochs that weights "
                "could keep to in them: give it to the manifest, or to a source"
            )
        check_range("manifest", at_least=0, attention_window=self.attention_window)
        drawn = [source for source in self.sources if source.weight != 0]
        bare = [source.title for source in drawn if source.weight is None]
        if 0 < len(bare) < len(drawn):
            raise ConfigError(f"source {bare[0]!r} has no weight, others have: give all or none")
        for source in self.sources:
            if source.weight == 0 and not self.stages:
                raise ConfigError(
                    f"source {source.title!r} has weight 0 and no stage gives it another; leave it "
                    "out to switch it off"
                )

    @property
    def limits(self) -> list[float | None]:
        """``max_epochs`` of every source."""
        return [
            self.max_epochs if source.max_epochs is None else source.max_epochs
            for source in self.sources
        ]

    def relative_to(self, folder: Path) -> BlendConfig:
        """The manifest with paths relative to its folder."""
        return replace(
            self,
            sources=tuple(source.relative_to(folder) for source in self.sources),
            stages=tuple(stage.relative_to(folder) for stage in self.stages),
            fim=self.fim and self.fim.relative_to(folder),
        )


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a run says of its sources, beside their documents and samples."""

    weights: Sequence[float | None] | None = None
    """Shares of tokens; None: in proportion to the tokens. A source of weight 0 is not drawn until
    a stage gives it another."""
    names: Sequence[str] | None = None
    """For stages and reports; None: the files."""
    stages: Sequence[Stage] = ()
    """Changes at later steps."""
    decided: Sequence[Stage] = ()
    """Stages that the run appended by its own rules (``megapack.data.run.Decision``), in the order
    in which they were made; each changes weights, skips steps, or both."""
    scores: Sequence[Scores | None] | None = None
    """Order by score, one per source; None, also in the list: shuffled."""
    max_epochs: float | Sequence[float | None] | None = None
    """How often a source is repeated at most, one for all or one per source; None: no limit."""
    run_tokens: int | None = None
    """Tokens for which weights keep to ``max_epochs``; None: a run that does not is refused."""
    loss_weights: Sequence[float] | None = None
    """Factors on the loss of every source's labels; None: 1 for all."""
    loss: Loss = "token_mean"
    """What a step's loss is the mean of (``megapack.data.sampler``)."""
    attention_window: int | None = None
    """Until a stage says otherwise, tokens (``Window``); None or 0: none."""
    fim: FimConfig | None = None
    """Fill-in-the-middle (``megapack.data.fim``); None: none."""
    fim_rates: Sequence[float | None] | None = None
    """Share of every source's documents; None, also in the list: ``fim.rate``."""

    def of(self, names: Sequence[str]) -> Mixture:
        """The same with names where it has none.

        Raises:
            ConfigError: not one of each per source, or a limit that is not above 0.
        """
        none, limits = [None] * len(names), self.max_epochs
        given: dict[str, Sequence[Any]] = {
            "names": self.names or names,
            "weights": none if self.weights is None else self.weights,
            "scores": self.scores or none,
            "max_epochs": limits if isinstance(limits, Sequence) else [limits] * len(names),
            "loss_weights": none if self.loss_weights is None else self.loss_weights,
            "fim_rates": none if self.fim_rates is None else self.fim_rates,
        }
        for what, of_sources in given.items():
            if len(of_sources) != len(names):
                raise ConfigError(
                    f"{len(of_sources)} {what} for {len(names)} indices; give one for each"
                )
        check_positive("the run", run_tokens=self.run_tokens)
        for name, limit in zip(given["names"], given["max_epochs"], strict=True):
            check_positive(f"source {name!r}", max_epochs=None if limit == math.inf else limit)
        weights = [None if weight is None else float(weight) for weight in given["weights"]]
        usual = 0.0 if self.fim is None else self.fim.rate
        return replace(
            self,
            names=list(given["names"]),
            weights=None if self.weights is None else weights,
            scores=list(given["scores"]),
            max_epochs=list(given["max_epochs"]),
            fim_rates=[usual if rate is None else float(rate) for rate in given["fim_rates"]],
        )

    @property
    def largest_fim_rates(self) -> list[float]:
        """Of every source the largest rate that it has in some stage."""
        begin = zip(self.names or (), self.fim_rates or (), strict=True)
        later = [stage.fim_rates or {} for stage in self.stages]
        return [max([rate or 0.0, *(of.get(name, 0.0) for of in later)]) for name, rate in begin]


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Keys of a manifest that only hosts ask for: how they pack, and form rows of samples."""

    strategy: str = "bucket"
    """How sources without an index are packed; a name of ``megapack.packing.STRATEGIES``."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the strategy (``megapack-build pack --help`` lists them)."""
    buckets: tuple[int, ...] | None = None
    """Capacities in tokens, each a divisor of the sequence length; None: ``default_buckets``."""
    order: str = "proportional"
    """How buckets follow each other: proportional, or a length curriculum."""
    seed: int | None = None
    """None: the host's seed."""
    rows_per_block: int | None = None
    """Rows that share a bucket, a multiple of micro batch size x data-parallel size; None: the
    host's global batch size."""
    attention: Literal["document", "group"] = "document"
    """Reach of attention: its own document, or the documents of its group that stand before it
    (indices packed with ``--groups``)."""
    cu_seqlens: Literal["auto", "exact", "padded"] = "auto"
    """Exact length (one row per micro batch) or padded to sequence length + 1 (several rows)."""
    align: int | None = None
    """Segments start at multiples of this; None: 2 x context_parallel_size where that exceeds 1."""
    cache_directory: str | None = None
    """Where the sample index lies; None: the host's cache path, else beside the first source."""
    node_local: bool = False
    """The cache directory is a disk of each node, not shared: one process of each node builds."""


@dataclass(frozen=True, kw_only=True)
class _WholeManifest(HostOptions, BlendConfig):
    """All keys that a manifest may have."""


def load_blend(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> BlendConfig:
    """Read a manifest. Raises ConfigError and OSError as ``load_config`` does."""
    return load_config(_WholeManifest, Path(path), overrides).relative_to(Path(path).parent)

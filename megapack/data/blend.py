"""Manifest of a run with several datasets.

- ``BlendConfig``, ``load_blend``: the manifest. ``Source``: one of its datasets.
- ``Stage``, ``Ramp``: changes from a step on.
- ``Mixture``: settings of a blend whose sources are open; arguments of ``PackedDataset``.
- ``HostOptions``: keys that only hosts use.

    sources:                       # YAML or JSON; paths are relative to this file
      - {name: web,  prefix: web/docs,  index: web/docs.samples,  weight: 0.6}
      - {name: code, prefix: code/docs, index: code/docs.samples, weight: 0.2, valid_prefix: code/v}
      - {name: chat, prefix: chat/docs, index: chat/docs.samples, weight: 0.1, labels: none}
      - {name: math, index: math.shards.json, weight: 0.1}      # many datasets as one source
      - {name: late, prefix: late/docs, index: late/docs.samples, weight: 0}  # see stages
    columns: [experts, rewards]    # data per token; {rewards: fill}: some sources may lack it
    max_epochs: 4                  # a run that would repeat a source more often is refused
    run_tokens: 10_000_000_000     # instead, lower its weight so that it lasts for these tokens
    attention_window: 2048
    fim: {rate: 0.5, sentinels: {prefix: 7, suffix: 8, middle: 9}}     # fill-in-the-middle
    stages:
      - {from_tokens: 2_000_000_000, tokens_per_step: 1048576}
      - {from_step: 9000, skip_steps: 200}                      # skips what steps 9000 to 9199 drew
      - {from_step: 9500, attention_window: 8192, window_steps: 2000}
      - {from_step: 12000, weights: {web: 0.5, late: 0.5}, order: grow-p2, loss_weights: {late: 2}}
      - {from_step: 14000, weights: {late: 1}, ramp: {until_step: 15000}}    # gradually
      - {from_step: 15000, exclude: {web: takedown.txt}, fim_rates: {code: 0.9}}

A stage keeps all settings that it does not name (``megapack.data.program``). launch/ and the hosts
of ``megapack.integrations`` read the same file; hosts also pack sources without an index and form
rows (``HostOptions``, which launch/ ignores). Sources are blended inside every bucket, so that all
ranks have the same bucket at every micro step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from megapack.calls import checked_call
from megapack.config import check_positive, check_range, load_config, whole_numbers
from megapack.data.documents import SourceDocuments, open_source
from megapack.data.fim import FimConfig, open_fim
from megapack.data.sample_order import Scores
from megapack.data.stage_settings import Window
from megapack.data.steps import Loss
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex, is_shard_manifest, load_index
from megapack.storage.address import path_in
from megapack.storage.columns import LABELS, WEIGHTS

B = TypeVar("B", bound="BlendConfig")


@checked_call
@dataclass(frozen=True, kw_only=True)
class Source:
    """One dataset of a blend."""

    prefix: str | None = None
    """Path of the .bin/.idx pair, without the ending; None: a shard manifest names the pairs."""
    index: str | None = None
    """Path of its .samples, or of a shard manifest (many datasets, packed by one
    ``megapack-build pack``); None: a host packs it by the manifest's strategy."""
    shards: tuple[int, ...] | None = None
    """Shards ``[first, last)`` of a shard manifest, so that shards added later can be a
    separate source; None: all."""
    weight: float | None = None
    """Share of the tokens seen in training; None for all sources: in proportion to their sizes. A
    weight of 0: not drawn until a stage gives the source another weight; its held-out documents are
    evaluated anyway."""
    max_epochs: float | None = None
    """``max_epochs`` of this source; None: ``BlendConfig.max_epochs``."""
    name: str | None = None
    """Name in stages and reports; None: the prefix, or the shard manifest."""
    labels: Literal["auto", "none"] = "auto"
    """``auto``: the labels are the column ``labels`` of the documents, if there is one; ``none``:
    labels are the next tokens."""
    token_weights: Literal["auto", "none"] = "auto"
    """``auto``: the factors on the loss of each token are the column ``weights``, if there is one;
    ``none``: 1 for all."""
    loss_weight: float = 1.0
    """Factor on the loss of its labels. The loss denominator is the sum of all factors, so equal
    factors change nothing."""
    fim_rate: float | None = None
    """Share of documents that fill-in-the-middle transforms; None: ``fim.rate`` of the manifest."""
    valid_prefix: str | None = None
    """Held-out documents of the same kind, for ``launch/``, which reports their loss separately.
    Hosts have their own validation data."""
    valid_index: str | None = None
    """Path of their .samples; None: packed on the fly."""
    scores: str | None = None
    """A .npy with one number per document; every epoch is ordered by it, not shuffled
    (``megapack.data.sample_order``)."""
    score_order: Literal["ascending", "descending"] = "ascending"
    """Lowest or highest scores first."""

    def __post_init__(self) -> None:
        subject = f"source {self.title!r}"
        check_range(subject, at_least=0, weight=self.weight)
        check_range(subject, at_least=0, at_most=1, fim_rate=self.fim_rate)
        check_positive(subject, loss_weight=self.loss_weight, max_epochs=self.max_epochs)
        is_sharded = self.index is not None and is_shard_manifest(self.index)
        if is_sharded == (self.prefix is not None):
            raise ConfigError(f"{subject} needs a prefix, or a shard manifest as index, not both")
        if self.shards is not None and not (is_sharded and len(self.shards) == 2):
            raise ConfigError(
                f"{subject} has shards {list(self.shards)}; give [first, end] of a shard manifest"
            )
        if self.scores is None and self.score_order != "ascending":
            raise ConfigError(
                f"{subject} has score_order {self.score_order} and no scores; give their file, too"
            )
        if self.valid_index is not None and self.valid_prefix is None:
            raise ConfigError(f"{subject} has valid_index, but no valid_prefix: give that, too")

    def relative_to(self, folder: Path) -> Source:
        """Return the source with paths relative to the manifest's folder; addresses are
        unchanged."""
        names = ["prefix", "index", "valid_prefix", "valid_index", "scores"]
        paths = {name: getattr(self, name) for name in names}
        resolved: dict[str, Any] = {
            n: path_in(folder, p) for n, p in paths.items() if p is not None
        }
        changed = {n: path for n, path in resolved.items() if path != paths[n]}
        return replace(self, **changed) if changed else self

    @property
    def title(self) -> str:
        """Name of the source in stages and reports."""
        return self.name or self.prefix or str(self.index)

    def open_documents(self) -> SourceDocuments:
        """Return its documents, memory-mapped. Raises the errors of ``open_source``."""
        uses = {LABELS: self.labels, WEIGHTS: self.token_weights}
        ignored = [name for name, use in uses.items() if use == "none"]
        return open_source(self.prefix, None if self.prefix else self.open_index(), ignored)

    def open_index(self) -> SourceIndex:
        """Return its samples. Raises the errors of ``load_index``."""
        assert self.index is not None
        return load_index(self.index, self.shards)

    @property
    def by_score(self) -> Scores | None:
        """Order by score; None if it has no scores."""
        return None if self.scores is None else Scores(path=self.scores, order=self.score_order)


@checked_call
@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Gradual change to the weights of a stage.

    Over n steps the share of a source goes from a to b as a + (b - a) f(t / n), with f(x) = x
    (linear) or (1 - cos(pi x)) / 2 (cosine). The ramp consists of pieces of equal length, each a
    stage with an exact blend; its shares are the means of a + (b - a) f over its steps.

    At the end of every piece the tokens drawn match f. Between two ends they differ by at most
    |b - a| n / (8 pieces^2) steps' worth of tokens (linear; pi / 2 times that for cosine), since
    the integral of a function of slope s and mean 0 over a length h is at most s h^2 / 8. With 32
    pieces that is |b - a| n / 8192, plus the 1.69 samples per bucket of every stage.
    """

    until_step: int | None = None
    """First step with the stage's final weights."""
    until_tokens: int | None = None
    """Instead of until_step: number of tokens before that step."""
    shape: Literal["linear", "cosine"] = "linear"
    """f, the shape of the change."""
    pieces: int = 32
    """Number of stages of constant weights that approximate the ramp."""

    def __post_init__(self) -> None:
        if (self.until_step is None) == (self.until_tokens is None):
            raise ConfigError("a ramp ends at until_step or at until_tokens: give one of them")
        whole_numbers("ramp", self, "until_step", "until_tokens", "pieces", above=0)


@checked_call
@dataclass(frozen=True, kw_only=True)
class Stage:
    """Changes from a step on; only the first step is required."""

    from_step: int | None = None
    """First step of the stage, numbered from the start of the run."""
    from_tokens: int | None = None
    """Instead of from_step: number of tokens before that step, with padding."""
    weights: dict[str, float] | None = None
    """Source name -> share of the tokens; a source that is not named is not drawn."""
    tokens_per_step: int | None = None
    """See ``megapack.data.steps.StepConfig``, for all fields down to ``micro_step_tokens``."""
    order: str | None = None
    """Order of the buckets."""
    num_cycles: int | None = None
    """Cycles of the order per epoch; None with a different order: that order's default."""
    mix: Literal["step", "micro_step"] | None = None
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """Tokens that all ranks take from one bucket at a time."""
    skip_steps: int = 0
    """Skip exactly the samples that steps ``from_step`` to ``from_step + skip_steps - 1`` draw in
    the run without this skip. Other stages may begin among these steps; the settings of this stage
    apply to them. Once step ``from_step`` is taken, a resume refuses new stages within this range,
    because they would change what was skipped. The samples count as seen and return in the next
    epoch."""
    exclude: dict[str, str] | None = None
    """Source name -> file of document ids (.npy of integers, or text with one per line) to mask
    until the end of the run (``megapack.data.sources``)."""
    ramp: Ramp | None = None
    """Gradual change to the weights; None: at once. Later stages without weights do not end it."""
    loss_weights: dict[str, float] | None = None
    """Source name -> ``Source.loss_weight``; other sources keep theirs."""
    fim_rates: dict[str, float] | None = None
    """Source name -> ``Source.fim_rate``; other sources keep theirs."""
    attention_window: int | None = None
    """Limits attention to pieces of this many tokens of a segment (``Window``); 0: no window,
    attention is limited to segments."""
    window_steps: int = 0
    """Number of steps in which the window changes linearly from the previous window to this one."""

    def __post_init__(self) -> None:
        if (self.from_step is None) == (self.from_tokens is None):
            raise ConfigError("a stage begins at from_step or at from_tokens: give one of them")
        names = ("from_step", "from_tokens", "tokens_per_step", "num_cycles", "micro_step_tokens")
        whole_numbers(str(self), self, *names)
        optional = ("skip_steps", "attention_window", "window_steps")
        whole_numbers(str(self), self, *optional, at_least=0)
        if self.window_steps and not self.attention_window:
            raise ConfigError(
                f"{self} has window_steps {self.window_steps} and attention_window "
                f"{self.attention_window}; give the window that they end with"
            )
        if self.exclude == {}:
            raise ConfigError(f"{self} has an empty exclude; name a source and its file")
        if self.weights == {}:
            raise ConfigError(f"{self} has empty weights; name at least one source")
        if self.ramp is not None and self.weights is None:
            raise ConfigError(f"{self} has a ramp and no weights; give the weights at its end")

    def window_after(self, before: Window | None, begin: int) -> Window | None:
        """Return the attention window from the stage's first step on; ``before``: previous window.
        Raises ConfigError if it would have to grow from no window."""
        if self.attention_window is None:
            return before
        if not self.window_steps:
            return Window(self.attention_window) if self.attention_window else None
        if before is None:
            raise ConfigError(
                f"{self} has window_steps {self.window_steps}, but no earlier window to grow from; "
                "give an attention_window to the stage before, or to the manifest"
            )
        return Window(self.attention_window, before.at(begin), begin, self.window_steps)

    def relative_to(self, folder: Path) -> Stage:
        if self.exclude is None:
            return self
        files = {name: str(folder / path) for name, path in self.exclude.items()}
        return replace(self, exclude=files)

    def __str__(self) -> str:
        if self.from_tokens is None:
            return f"the stage from step {self.from_step}"
        return f"the stage from {self.from_tokens} tokens"


@checked_call
@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """Sources of a run, limits on their epochs, and stages."""

    sources: tuple[Source, ...]
    """One entry per dataset."""
    max_epochs: float | None = None
    """Most epochs of a source; a run with more is refused. None: no limit. With ``run_tokens``,
    the weights of sources at their limit are lowered instead, in favor of the others."""
    run_tokens: int | None = None
    """Tokens of the whole run, steps x tokens_per_step, within which the weights respect
    ``max_epochs`` (``megapack.data.program.within_epochs``); with equal weights this is UniMax.
    Later tokens use the weights as written."""
    stages: tuple[Stage, ...] = ()
    """Changes at later steps, in order."""
    attention_window: int | None = None
    """Limits attention to pieces of this many tokens of a segment, up to the first stage with a new
    window (``megapack.data.stage_settings.Window``). None: to segments."""
    fim: FimConfig | None = None
    """Fill-in-the-middle (``megapack.data.fim``). None: off."""
    columns: tuple[str, ...] | dict[str, str] = ()
    """Columns that batches carry (``megapack.storage.columns``): a list of names, which all sources
    must have; or name -> ``require``, or ``fill``: a source without it gives the fill value."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a manifest needs at least one source")
        check_positive("manifest", max_epochs=self.max_epochs, run_tokens=self.run_tokens)
        if self.run_tokens is not None and set(self.limits) == {None}:
            raise ConfigError(
                f"the manifest has run_tokens {self.run_tokens} and no max_epochs: give it to the "
                "manifest, or to a source"
            )
        check_range("manifest", at_least=0, attention_window=self.attention_window)
        drawn = [source for source in self.sources if source.weight != 0]
        bare = [source.title for source in drawn if source.weight is None]
        if 0 < len(bare) < len(drawn):
            raise ConfigError(f"source {bare[0]!r} has no weight, but others do: give all or none")
        for source in self.sources:
            if source.weight == 0 and not self.stages and source.valid_prefix is None:
                raise ConfigError(
                    f"source {source.title!r} has weight 0, no stage gives it another, and it has "
                    "no valid_prefix to score; leave it out to switch it off"
                )

    @property
    def limits(self) -> list[float | None]:
        return [self.max_epochs if s.max_epochs is None else s.max_epochs for s in self.sources]

    @property
    def mixture(self) -> Mixture:
        """Settings of the blend, to be used with its open sources."""
        sources = self.sources
        weights = [source.weight for source in sources]
        return Mixture(
            weights=None if set(weights) == {None} else weights,
            names=[source.title for source in sources],
            held_out=[source.valid_prefix is not None for source in sources],
            scores=[source.by_score for source in sources],
            loss_weights=[source.loss_weight for source in sources],
            fim=self.fim,
            fim_rates=[source.fim_rate for source in sources],
            max_epochs=self.limits,
            run_tokens=self.run_tokens,
            stages=self.stages,
            attention_window=self.attention_window,
            columns=self.columns,
        )

    def without_fim(self: B) -> B:
        """Return the manifest without fill-in-the-middle, for example for held-out documents."""
        sources = tuple(replace(source, fim_rate=None) for source in self.sources)
        return replace(self, sources=sources, fim=None)

    def fim_rooms(self, datasets: Sequence[SourceDocuments]) -> list[int]:
        """Return for every source the number of tokens by which its documents may grow."""
        if self.fim is None:
            return [0] * len(datasets)
        room, mixture = open_fim(self.fim, datasets).room, self.mixture
        return [room if rate else 0 for rate in mixture.of(mixture.names or ()).largest_fim_rates]

    def relative_to(self, folder: Path) -> BlendConfig:
        """Return the manifest with paths relative to its folder."""
        return replace(
            self,
            sources=tuple(source.relative_to(folder) for source in self.sources),
            stages=tuple(stage.relative_to(folder) for stage in self.stages),
            fim=self.fim and self.fim.relative_to(folder),
        )


@checked_call
@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Settings of a run for its sources, one value per source; part of ``PackedDataset``."""

    weights: Sequence[float | None] | None = None
    """Shares of tokens; None: in proportion to the tokens. A source of weight 0 is not drawn until
    a stage changes its weight."""
    names: Sequence[str] | None = None
    """Names in stages and reports; None: the file names."""
    held_out: Sequence[bool] | None = None
    """Whether each source has held-out documents; only these may have weight 0 in every stage."""
    stages: Sequence[Stage] = ()
    """Changes at later steps."""
    decided: Sequence[Stage] = ()
    """Stages that the run appended by its own rules (``megapack.data.run.Decision``), in the order
    of the decisions; each changes weights, skips steps, or both."""
    scores: Sequence[Scores | None] | None = None
    """Order by score; None, for all or for one source: shuffled."""
    max_epochs: float | Sequence[float | None] | None = None
    """Most epochs of a source, one for all or one per source; None: no limit."""
    run_tokens: int | None = None
    """Tokens within which weights respect ``max_epochs``; None: a run above that limit is
    refused."""
    loss_weights: Sequence[float] | None = None
    """Factors on the loss of every source's labels; None: 1 for all."""
    loss: Loss = "token_mean"
    """How the loss of a step is averaged (``megapack.data.sampler``)."""
    attention_window: int | None = None
    """Attention window of the first stage, tokens (``Window``); None or 0: none."""
    fim: FimConfig | None = None
    """Fill-in-the-middle (``megapack.data.fim``); None: off."""
    fim_rates: Sequence[float | None] | None = None
    """Share of every source's documents; None, for all or for one: ``fim.rate``."""
    columns: Sequence[str] | Mapping[str, str] = ()
    """Columns that batches carry, see ``BlendConfig``."""

    def of(self, names: Sequence[str]) -> Mixture:
        """Return the mixture with one value per source; use ``names`` if it has no names. Raises
        ConfigError if numbers of values and sources differ, or a limit is not above 0."""
        none, limits = [None] * len(names), self.max_epochs
        columns: dict[str, Sequence[Any]] = {
            "names": self.names or names,
            "weights": none if self.weights is None else self.weights,
            "scores": self.scores or none,
            "max_epochs": limits if isinstance(limits, Sequence) else [limits] * len(names),
            "loss_weights": none if self.loss_weights is None else self.loss_weights,
            "fim_rates": none if self.fim_rates is None else self.fim_rates,
        }
        for field_name, values in columns.items():
            if len(values) != len(names):
                raise ConfigError(
                    f"{len(values)} {field_name} for {len(names)} indices; give one for each"
                )
        check_positive("the run", run_tokens=self.run_tokens)
        for name, limit in zip(columns["names"], columns["max_epochs"], strict=True):
            check_positive(f"source {name!r}", max_epochs=None if limit == math.inf else limit)
        weights = [None if weight is None else float(weight) for weight in columns["weights"]]
        default = 0.0 if self.fim is None else self.fim.rate
        return replace(
            self,
            names=list(columns["names"]),
            weights=None if self.weights is None else weights,
            scores=list(columns["scores"]),
            max_epochs=list(columns["max_epochs"]),
            fim_rates=[default if rate is None else float(rate) for rate in columns["fim_rates"]],
        )

    def every_sample_once(self) -> Mixture:
        """Return the mixture of a finite schedule: unweighted, without stages or transformation."""
        plain = replace(self, weights=None, run_tokens=None, stages=(), decided=())
        return replace(plain, fim=None, fim_rates=None)

    def check_fim_rates(self, by: str, rates: Sequence[float]) -> None:
        """Raise ConfigError unless the rates of all sources are valid; ``by`` names their
        origin."""
        named = zip(self.names or (), rates, strict=True)
        check_range(by, at_least=0, at_most=1, **{f"fim rate of {n!r}": r for n, r in named})
        if self.fim is None and any(rates):
            raise ConfigError(
                f"{by} has a fim rate, but fim is not configured: give its sentinels (fim: "
                "{sentinels: ...} in the manifest), or leave the rate out"
            )

    @property
    def window(self) -> Window | None:
        """Attention window of the first stage. Raises ConfigError if it is invalid."""
        check_range("the run", at_least=0, attention_window=self.attention_window)
        return Window(self.attention_window) if self.attention_window else None

    @property
    def windows(self) -> list[int]:
        """All attention windows of the run and its stages, tokens."""
        windows = [self.attention_window, *(stage.attention_window for stage in self.stages)]
        return [window for window in windows if window]

    def check_alignment(self, alignment: int) -> None:
        """Raise ConfigError if an attention window is not a multiple of the alignment."""
        for window in self.windows:
            if window % alignment:
                raise ConfigError(
                    f"attention_window {window} is not a multiple of the alignment {alignment} (2 "
                    "x context parallel size), at which the pieces of a segment must begin; choose "
                    "a multiple"
                )

    @property
    def largest_fim_rates(self) -> list[float]:
        first = zip(self.names or (), self.fim_rates or (), strict=True)
        later = [stage.fim_rates or {} for stage in self.stages]
        return [max([rate or 0.0, *(r.get(name, 0.0) for r in later)]) for name, rate in first]


@dataclass(frozen=True, kw_only=True)
class HostOptions(BlendConfig):
    """Manifest of a blend with the keys that only hosts use, for packing and rows of samples."""

    strategy: str = "bucket"
    """Packing strategy of sources without an index; a name of ``megapack.packing.STRATEGIES``."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the strategy (``megapack-build pack --help`` lists them)."""
    buckets: tuple[int, ...] | None = None
    """Capacities in tokens, all divisors of the sequence length; None: ``default_buckets``."""
    order: str = "proportional"
    """Order of the buckets: proportional, or a length curriculum."""
    seed: int | None = None
    """Seed of the order; None: the host's seed."""
    rows_per_block: int | None = None
    """Rows that share a bucket, a multiple of micro batch size x data-parallel size; None: the
    host's global batch size."""
    attention: Literal["document", "group"] = "document"
    """Reach of attention: the token's document, or also earlier documents of its group (indices
    packed with ``--groups``)."""
    cu_seqlens: Literal["auto", "exact", "padded"] = "auto"
    """Exact length (one row per micro batch) or padded to sequence length + 1 (several rows)."""
    align: int | None = None
    """Segments start at multiples of this; None: 2 x context_parallel_size if that exceeds 1."""
    cache_directory: str | None = None
    """Folder of the sample index; None: the host's cache path, else that of the first source."""
    node_local: bool = False
    """The cache directory is on a local disk of each node, so one process of each node builds."""


def load_blend(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> BlendConfig:
    """Read a manifest. Raises the ConfigError and OSError of ``load_config``."""
    return load_config(HostOptions, Path(path), overrides).relative_to(Path(path).parent)

"""Mixtures tried on proxies: a design of weights, evidence of finished runs, a proposal.

- ``design``: sources and a prior -> mixtures to try.
- ``Trial``: a proxy with one mixture, in a folder named for its content.
- ``propose``: held-out losses of the trials -> ``Proposal``, weights with intervals.

RegMix (Liu et al. 2024, arXiv 2407.01492) trains small models on random mixtures, fits a regression
of their losses, and averages the best of many simulated mixtures; Olmix (arXiv 2602.12237) repeats
this when sources change, and reuses its measurements. Here a mixture maps digests of sources
(documents and samples) to weights, and a digest identifies a held-out set, too: a renamed source
keeps its evidence, and an added one had weight 0 before.

    design(["web", "code"], [0.8, 0.2], "one", number=0)
    # -> (0.8, 0.2), then twice and half of web, (0.89, 0.11) and (0.67, 0.33), then of code
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.config import check_known, check_positive, check_range, to_dict
from megapack.data.blend import BlendConfig, Source, Stage
from megapack.errors import ConfigError, DataError, require
from megapack.packing.proxy import positions
from megapack.packing.sharded import ShardedIndex, SourceIndex
from megapack.records import read_record
from megapack.storage import IndexedDataset
from megapack.storage.files import atomic_write
from megapack.training.config import PretrainConfig
from megapack.training.engine.directory import RunDirectory, read_jsonl
from megapack.training.proxy import BLEND, RUN, Proxy, explicit, write_config

Floats = NDArray[np.float64]
TRIAL, RUN_FOLDER = "mixture.json", "run"  # in the folder of a trial
_SMALLEST = 1e-5  # weight of a source in a mixture, if it is above 0
_FEWEST = 4  # trials of a regression
_CANDIDATES, _BEST, _RESAMPLES = 20_000, 100, 200
_ALPHAS = np.geomspace(1e-6, 1e2, 17)  # strengths of the ridge penalty, chosen by leave-one-out


def design(
    names: Sequence[str],
    prior: Sequence[float],
    kind: Literal["dirichlet", "one"] | Sequence[Mapping[str, float]],
    *,
    number: int,
    concentration: float = 1.0,
    seed: int = 0,
) -> list[tuple[float, ...]]:
    """Return mixtures, each with a weight per source and a sum of 1; the first is the prior. A
    source to which the prior gives 0 has 0 in all but listed mixtures.

    Args:
        kind: ``dirichlet``: random around the prior; ``one``: the prior with one source at twice
            and at half of its weight; or the mixtures themselves, as name -> weight.
        number: number of mixtures of ``dirichlet``, including the prior.
        concentration: parameter of ``dirichlet``: larger values stay closer to the prior; 1 with an
            equal prior gives the uniform distribution.
    """
    check_positive("mixtures", concentration=concentration)
    base = np.array(prior, np.float64) / math.fsum(prior)
    rows = [base]
    if kind == "dirichlet":
        drawn = candidates(base, number - 1, concentration, seed)
        rows += list(np.where(base > 0, np.maximum(drawn, _SMALLEST), 0.0))
    elif kind == "one":
        for source in np.flatnonzero(base).tolist():
            for factor in (2.0, 0.5):
                rows.append(base * np.where(np.arange(len(base)) == source, factor, 1.0))
    else:
        for mixture in kind:
            check_known("a mixture of the design", "source", mixture, names)
            check_range("a mixture of the design", at_least=0, **mixture)
            check_positive("a mixture of the design", weights=sum(mixture.values()))
            rows.append(np.array([mixture.get(name, 0.0) for name in names]))
    rows = [np.where(row > 0, np.maximum(row, _SMALLEST * row.sum()), 0.0) for row in rows]
    return list(dict.fromkeys(tuple((row / row.sum()).round(6).tolist()) for row in rows))


def candidates(base: Floats, number: int, concentration: float, seed: int) -> Floats:
    """Return (number, sources) random mixtures around one, of the same sources."""
    has_weight, rows = base > 0, np.zeros((max(0, number), len(base)))
    alpha = concentration * has_weight.sum() * base[has_weight]
    random = np.random.default_rng(seed)
    rows[:, has_weight] = random.dirichlet(np.maximum(alpha, 1e-3), len(rows))
    return rows


# ---- Trials --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """Identity of a trial: equal records are equal runs, even if sources have other names."""

    settings: str  # digest of everything but the mixture
    weights: dict[str, float]  # by digest of the source
    held_out: dict[str, str]  # name of the source in the run -> digest of its held-out set
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One mixture of a proxy."""

    folder: Path
    config: PretrainConfig
    blend: BlendConfig
    record: TrialRecord

    def write(self, title: str) -> None:
        """Write the run and its record, unless the run has ended. Their digest names the folder."""
        if self.losses is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_config(self.folder / BLEND, self.blend, title, overwrite=True)
            write_config(self.folder / RUN, self.config, title, overwrite=True)
            with atomic_write(self.folder / TRIAL, "w") as file:
                json.dump(to_dict(self.record), file, indent=1)

    @property
    def losses(self) -> dict[str, float] | None:
        """Held-out losses by name of the source, if the run has ended."""
        evidence = measured(self.folder) if (self.folder / TRIAL).exists() else None
        if evidence is None:
            return None
        named = self.record.held_out.items()
        return {name: evidence.losses[d] for name, d in named if d in evidence.losses}


@dataclass(frozen=True)
class Evidence:
    """Held-out losses of a finished trial, nats per token."""

    weights: Mapping[str, float]  # by digest of the source
    losses: Mapping[str, float]  # by digest of the held-out set


def measured(folder: Path, settings: str | None = None) -> Evidence | None:
    """Return the losses at the last step of the trial in a folder; None if it has other settings or
    has not ended."""
    record = read_record(TrialRecord, folder / TRIAL, remedy="remove its folder")
    log = RunDirectory(folder / RUN_FOLDER).evaluation
    if settings not in (None, record.settings) or not log.exists():
        return None
    last = [line for line in read_jsonl(log) if line["step"] == record.num_steps]
    if not last:
        return None
    losses = {record.held_out[name]: loss for name, loss in last[-1]["source_loss"].items()}
    return Evidence(record.weights, losses)


def evidence_in(folder: Path, settings: str) -> list[Evidence]:
    """Return the evidence of all finished trials with these settings, in a fixed order."""
    trials = (measured(path.parent, settings) for path in sorted(folder.glob(f"*/{TRIAL}")))
    return [evidence for evidence in trials if evidence is not None]


def trials_of(folder: Path, proxy: Proxy, rows: Sequence[Sequence[float]]) -> list[Trial]:
    """Return a trial per mixture of a proxy. Weights of stages change by the same factors; a stage
    loses sources of factor 0. Raises ConfigError if the run has no blend, no source has held-out
    documents, or a stage would lose all sources."""
    config, blend = proxy.config, proxy.blend
    if blend is None or len(blend.sources) < 2:
        raise ConfigError("mixtures need two sources or more: give data.blend, a manifest of them")
    digests = {
        source.title: _source_digest(source, image.samples.index)
        for source, image in zip(blend.sources, proxy.sources, strict=True)
    }
    if len(set(digests.values())) < len(blend.sources):
        raise ConfigError("two sources have the same name, or the same documents: leave one out")
    held_out = {
        source.title: _digest(*map(str, IndexedDataset(source.valid_prefix).content_digest))
        for source in blend.sources
        if source.valid_prefix is not None
    }
    if not held_out:
        raise ConfigError(
            "no source of the blend has held-out documents, whose losses rank the mixtures: "
            "give sources of the manifest a valid_prefix"
        )
    run, manifest = explicit(config), explicit(blend)
    del run["run_dir"], run["data"]["blend"], manifest["sources"]
    for stage in manifest.get("stages", ()):
        for field in {"weights", "loss_weights", "fim_rates", "exclude"} & set(stage):
            stage[field] = {digests[name]: value for name, value in stage[field].items()}
    settings = _digest(json.dumps([run, manifest], sort_keys=True))
    prior = prior_of(proxy)
    assert config.num_steps is not None
    trials = []
    for row in rows:
        weights = dict(zip(digests.values(), row, strict=True))
        trial_folder = folder / _digest(settings, json.dumps(weights, sort_keys=True))
        factors = {n: w / p for n, w, p in zip(digests, row, prior, strict=True) if p}
        stages = [_rescaled(stage, factors) for stage in blend.stages]
        drawn = {name for stage in stages for name in stage.weights or ()}
        sources = [
            replace(s, weight=w)
            for s, w in zip(blend.sources, row, strict=True)
            if w or s.valid_prefix is not None or s.title in drawn
        ]
        data = replace(config.data, blend=str(trial_folder / BLEND))
        trials.append(
            Trial(
                folder=trial_folder,
                config=replace(config, run_dir=str(trial_folder / RUN_FOLDER), data=data),
                blend=replace(blend, sources=tuple(sources), stages=tuple(stages)),
                record=TrialRecord(
                    settings=settings,
                    weights=weights,
                    held_out=held_out,
                    num_steps=config.num_steps,
                ),
            )
        )
    return trials


def _rescaled(stage: Stage, factors: Mapping[str, float]) -> Stage:
    """Return a stage with its weights times the factors of a mixture, by name of the source."""
    if stage.weights is None:
        return stage
    weights = {name: w * factors.get(name, 1.0) for name, w in stage.weights.items()}
    weights = {name: weight for name, weight in weights.items() if weight}
    if not weights:
        raise ConfigError(
            f"{stage} has only sources to which a mixture of the design gives 0 "
            f"({', '.join(stage.weights)}): give one of them a weight in the mixture"
        )
    return replace(stage, weights=weights)


def prior_of(proxy: Proxy) -> list[float]:
    """Return the weight of every source, with a sum of 1; without weights, its share of tokens."""
    assert proxy.blend is not None
    weights = [
        float(image.samples.num_tokens) if source.weight is None else source.weight
        for source, image in zip(proxy.blend.sources, proxy.sources, strict=True)
    ]
    return [weight / math.fsum(weights) for weight in weights]


def limits_of(proxy: Proxy) -> list[float]:
    """Return the largest weight with which each source keeps to its ``max_epochs``."""
    assert proxy.blend is not None
    if proxy.blend.run_tokens is not None:  # the run itself lowers the weights
        return [1.0] * len(proxy.sources)
    return [
        1.0 if limit is None else limit * positions(image.samples.index) / proxy.num_tokens
        for limit, image in zip(proxy.blend.limits, proxy.sources, strict=True)
    ]


def _source_digest(source: Source, index: SourceIndex) -> str:
    """Return the digest of a source's documents, samples and settings, without its name."""
    prefixes = [source.prefix]
    if isinstance(index, ShardedIndex):
        prefixes = [shard.prefix for shard in index.shards]
    contents = [
        text
        for prefix in prefixes
        if prefix is not None
        for text in (IndexedDataset(prefix).fingerprint, *IndexedDataset(prefix).content_digest)
    ]
    settings = explicit(source)
    for field in ("name", "prefix", "index", "shards", "weight", "valid_prefix", "valid_index"):
        settings.pop(field, None)
    return _digest(index.fingerprint, json.dumps(settings, sort_keys=True), *map(str, contents))


def _digest(*texts: str) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(texts).encode())


# ---- The proposal --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Mixture with the lowest predicted loss; arrays have a value per source."""

    weights: tuple[float, ...]
    low: tuple[float, ...]  # 5th and 95th percentile of the weights over resampled trials
    high: tuple[float, ...]
    loss: float  # predicted mean over the held-out sets, nats per token
    prior_loss: float  # predicted for the prior
    rank_correlation: float
    """Spearman's, of the trials' losses with predictions by all other trials."""
    num_trials: int
    num_ignored: int  # trials with a source that the run no longer has


def propose(
    evidence: Sequence[Evidence],
    sources: Sequence[str],
    held_out: Sequence[str],
    prior: Sequence[float],
    *,
    limits: Sequence[float],
    concentration: float = 1.0,
    seed: int = 0,
) -> Proposal:
    """Return the mixture with the lowest mean loss over held-out sets, as a regression predicts it.

    The logarithm of a set's loss is a ridge regression on the weights and their square roots
    (more of a source helps less and less). As in RegMix, the mixture is the mean of the best of
    many random ones, so it is inside the design. It is computed again for resampled trials.

    Args:
        evidence: finished trials; a held-out set needs at least three.
        sources: digests of the run's sources; a trial without one gave it the weight 0.
        held_out: digests of the held-out sets.
        prior: weights around which mixtures are drawn.
        limits: largest weight of each source (``max_epochs``).

    Raises DataError if there are too few trials, or no mixture is within the limits; MegapackError
    if scikit-learn is not installed.
    """
    usable = [
        e
        for e in evidence
        if not any(weight for digest, weight in e.weights.items() if digest not in sources)
    ]
    mixtures = np.array([[e.weights.get(d, 0.0) for d in sources] for e in usable])
    losses = np.array([[e.losses.get(d, math.nan) for d in held_out] for e in usable])
    if not usable or np.isfinite(losses).sum(axis=0).min() < _FEWEST:
        raise DataError(
            f"{len(usable)} finished trials have these settings and sources, and a regression "
            f"needs at least {_FEWEST} with every held-out set: start them (--run), or plan more "
            "(--number)"
        )
    base = np.array(prior, np.float64)
    drawn = np.vstack([base, candidates(base, _CANDIDATES, concentration, seed)])
    drawn = drawn[(drawn <= np.array(limits)).all(axis=1)]
    if not len(drawn):
        raise DataError("no mixture keeps all sources below max_epochs: raise it, or add data")
    fit = _Regression(mixtures, losses)
    weights = _best(drawn, fit.predict(mixtures, losses, drawn))
    random, resampled = np.random.default_rng(seed), []
    for _ in range(_RESAMPLES):
        rows = random.integers(0, len(usable), len(usable))
        if np.isfinite(losses[rows]).any(axis=0).all():
            means = fit.predict(mixtures[rows], losses[rows], drawn)
            resampled.append(_best(drawn, means))
    low, high = np.quantile(resampled, [0.05, 0.95], axis=0).tolist()
    predicted = fit.predict(mixtures, losses, np.stack([weights, base])).tolist()
    return Proposal(
        weights=tuple(weights.tolist()),
        low=tuple(low),
        high=tuple(high),
        loss=predicted[0],
        prior_loss=predicted[1],
        rank_correlation=_rank_correlation(fit, mixtures, losses),
        num_trials=len(usable),
        num_ignored=len(evidence) - len(usable),
    )


class _Regression:
    """Ridge regressions of losses (trials, held-out sets) on mixtures (trials, sources); nan: not
    measured. Leave-one-out chooses the penalty of each set."""

    def __init__(self, mixtures: Floats, losses: Floats) -> None:
        self._linear = require("sklearn.linear_model", "megapack-build mixtures", "scikit-learn")
        chosen = self._linear.RidgeCV(alphas=_ALPHAS)
        self._alphas = [_fitted(chosen, mixtures, of_set).alpha_ for of_set in losses.T]

    def predict(self, mixtures: Floats, losses: Floats, others: Floats) -> Floats:
        """Return the predicted mean loss of ``others`` over the sets, fitted to these trials."""
        models = [
            _fitted(self._linear.Ridge(alpha=alpha), mixtures, of_set)
            for alpha, of_set in zip(self._alphas, losses.T, strict=True)
        ]
        features = _features(others)
        mean: Floats = np.mean([np.exp(model.predict(features)) for model in models], axis=0)
        return mean


def _fitted(model: Any, mixtures: Floats, losses: Floats) -> Any:
    known = np.isfinite(losses)
    return model.fit(_features(mixtures[known]), np.log(losses[known]))


def _features(mixtures: Floats) -> Floats:
    return np.hstack([mixtures, np.sqrt(mixtures)])


def _best(mixtures: Floats, losses: Floats) -> Floats:
    best = mixtures[np.argsort(losses, kind="stable")[:_BEST]].mean(axis=0)
    normed: Floats = best / best.sum()
    return normed


def _rank_correlation(fit: _Regression, mixtures: Floats, losses: Floats) -> float:
    complete = np.flatnonzero(np.isfinite(losses).all(axis=1))
    left_out = [
        fit.predict(np.delete(mixtures, i, 0), np.delete(losses, i, 0), mixtures[[i]]).item()
        for i in complete
    ]
    ranks = np.argsort(np.argsort([left_out, losses[complete].mean(axis=1)]))
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(complete) > 2 else math.nan

"""Proxy of a run: its program, scaled down to fewer tokens, over documents of its sources.

- ``Scaling``: how a scale changes steps, tokens, and tokens per step.
- ``plan_proxy``: a configuration and a scale -> ``Proxy``, which ``write`` stores.

A run is a program over sources; so is its proxy. At scale 1/64 with the same tokens per step, a
stage from step 6400 begins at step 100; ramps, growing windows and warmup take a 64th of the steps;
every source keeps whole documents with a 64th of its tokens
(``megapack.packing.proxy``). So at the same fraction of both runs the mixture is the same, and
every source was repeated equally often.

    Scaling(share=Fraction(1, 64), per_step=Fraction(1, 8)).step(6400)    # -> 800: an 8th
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import yaml

from megapack.data.blend import BlendConfig, Source, Stage, load_blend
from megapack.data.report import check_epochs, plan_run
from megapack.data.schedule import Schedule
from megapack.data.sources import SampleSource
from megapack.data.stage_settings import Program
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.proxy import ProxySamples, shrink
from megapack.packing.sharded import SourceIndex, place
from megapack.storage.files import atomic_write, check_target
from megapack.training.config import PretrainConfig

C = TypeVar("C")
RUN, BLEND, SAMPLES = "run.yaml", "blend.yaml", "samples"  # in the folder of a proxy
_WRITERS = 16  # threads

# Fields that scale, in all classes of a configuration and of a manifest. Numbers of samples, epochs
# and cycles stay, and so do the steps between checkpoints and between lines of the log.
_STEPS = {"num_steps", "stop_at", "warmup_steps", "keep_every", "keep_steps", "from_step"}
_STEPS |= {"until_step", "skip_steps", "window_steps", "evaluation.every", "mixing.every"}
_TOKENS = {"run_tokens", "from_tokens", "until_tokens"}
_PER_STEP = {"tokens_per_step", "micro_step_tokens"}
_MAY_BE_ZERO = {"warmup_steps", "skip_steps", "window_steps"}


@dataclass(frozen=True)
class Rounding:
    """A number of steps that the scale does not divide."""

    key: str
    of: int  # in the run
    exact: float
    value: int  # in the proxy


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scale of a proxy: share of the run's tokens, and of its tokens per step."""

    share: Fraction
    per_step: Fraction
    rounded: list[Rounding] = dataclasses.field(default_factory=list)
    """Roundings of ``apply`` so far."""

    def step(self, step: int) -> int:
        """Return the nearest step of the proxy at the same fraction of both runs."""
        return math.floor(step * self.share / self.per_step + Fraction(1, 2))

    def apply(self, config: C, where: str = "", **changes: Any) -> C:
        """Return a configuration with its own fields scaled, and with ``changes``."""
        for field in fields(config):  # type: ignore[arg-type]
            value, name = getattr(config, field.name), f"{where}{field.name}"
            if field.name in changes:
                continue
            if isinstance(value, tuple) and field.name in _STEPS:
                changes[field.name] = tuple(self._scaled(field.name, name, each) for each in value)
            elif type(value) is int and value:
                changes[field.name] = self._scaled(field.name, name, value)
        return replace(config, **changes)  # type: ignore[type-var]

    def _scaled(self, name: str, where: str, value: int) -> int:
        if name in _TOKENS:
            return max(1, math.floor(value * self.share + Fraction(1, 2)))
        if name in _PER_STEP:
            return int(value * self.per_step)  # whole, see ``scaling_of``
        if not _STEPS & {name, where}:
            return value
        result = max(self.step(value), int(name not in _MAY_BE_ZERO))
        exact = value * self.share / self.per_step
        if result != exact:
            self.rounded.append(Rounding(where, value, float(exact), result))
        return result

    def stages(self, blend: BlendConfig) -> list[tuple[Stage, Stage]]:
        """Return the stages of a manifest and the proxy's, without skips of less than half a step
        of the proxy."""
        pairs = []
        for number, stage in enumerate(blend.stages):
            where = f"stages[{number}]."
            ramp = stage.ramp and self.apply(stage.ramp, f"{where}ramp.")
            image = self.apply(stage, where, ramp=ramp)
            if image != Stage(from_step=image.from_step, from_tokens=image.from_tokens):
                pairs.append((stage, image))
        return pairs

    def run(self, config: PretrainConfig, **data: Any) -> PretrainConfig:
        """Return the scaled configuration of a run, with changes of its section data."""
        for name in ("prefix", "valid_prefix", "valid_index"):
            if (path := getattr(config.data, name)) is not None:
                data[name] = place(path)
        return self.apply(
            config,
            data=self.apply(config.data, "data.", **data),
            learning_rate=self.apply(config.learning_rate, "learning_rate."),
            checkpoint=self.apply(config.checkpoint, "checkpoint.", mirror=None),
            evaluation=self.apply(config.evaluation, "evaluation."),
            mixing=self.apply(config.mixing, "mixing.") if config.mixing.rule else config.mixing,
        )


def scaling_of(
    config: PretrainConfig,
    stages: Sequence[Stage],
    capacities: Iterable[int],
    share: Fraction,
    tokens_per_step: int | None,
) -> tuple[Scaling, str]:
    """Return the scale of a proxy with ``tokens_per_step`` (None: those of the run), and the advice
    which tokens per step fit all ``capacities``. Raises ConfigError if tokens per step of a stage
    would not be whole."""
    whole = config.data.tokens_per_step
    sizes = [
        size
        for each in (config.data, *stages)
        for name in _PER_STEP
        if (size := getattr(each, name))
    ]
    tokens = whole if tokens_per_step is None else tokens_per_step
    # Every size, times tokens / whole, is to consist of whole samples (of whole rows if padded).
    common = whole * (config.data.row_tokens or math.lcm(*capacities))
    unit = math.lcm(*(common // math.gcd(common, size) for size in sizes))
    advice = f"give a multiple of {unit}, as in {max(1, round(tokens / unit)) * unit}"
    if tokens % (whole // math.gcd(*sizes)):
        given = ", ".join(map(str, sorted(set(sizes))))
        raise ConfigError(
            f"--tokens-per-step is {tokens}, and steps or micro steps of the run have {given} "
            f"tokens, which must scale to whole numbers: {advice}"
        )
    return Scaling(share=share, per_step=Fraction(tokens, whole)), advice


# ---- The proxy -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceImage:
    """A source in the run and in its proxy."""

    name: str
    samples: ProxySamples
    of_epochs: tuple[float, ...]  # of the run, from its start to the end of every stage
    epochs: tuple[float, ...]  # of the proxy

    @property
    def largest_difference(self) -> tuple[float, int]:
        """Largest relative deviation of the proxy's epochs from the run's at a stage's end, and
        the samples that the proxy had drawn by then; 0 and 0 if the run draws none."""
        pairs = zip(self.epochs, self.of_epochs, strict=True)
        num_samples = self.samples.index.num_samples
        differences = [(p / run - 1, round(p * num_samples)) for p, run in pairs if run]
        return max(differences, key=lambda pair: abs(pair[0]), default=(0.0, 0))


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A planned proxy. ``stages``: ends of all stages as (step of the run, step of the proxy)."""

    folder: Path
    scaling: Scaling
    config: PretrainConfig
    blend: BlendConfig | None
    stages: tuple[tuple[int, int], ...]
    sources: tuple[SourceImage, ...]
    num_tokens: int  # of all its steps, padding included

    def write(self, title: str, *, overwrite: bool = False) -> None:
        """Write the samples, blend.yaml and run.yaml. Files with this content are kept. Raises
        ConfigError if they exist with other content."""
        (self.folder / SAMPLES).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_WRITERS) as pool:  # they wait for the disk
            by_path = {source.samples.index.path: source.samples for source in self.sources}
            saved = [pool.submit(each.save, overwrite=overwrite) for each in by_path.values()]
            for each in saved:
                each.result()
        for name, config in ((BLEND, self.blend), (RUN, self.config)):
            if config is not None:
                write_config(self.folder / name, config, title, overwrite=overwrite)


def plan_proxy(
    config: PretrainConfig,
    share: Fraction,
    folder: Path,
    *,
    tokens_per_step: int | None = None,
    **options: Any,
) -> Proxy:
    """Return the proxy of a run; reads indices, and writes nothing.

    Args:
        share: tokens of the proxy / tokens of the run, above 0 and at most 1.
        folder: the proxy's folder; its configuration refers to files in it.
        tokens_per_step: tokens per step of the proxy; None: as in the run. With ``share``
            times those of the run, the proxy has as many steps as the run.
        options: arguments of ``shrink``: seed, groups, threads.

    Raises ConfigError if the scale is too small for the run; the error names one that works.
    """
    if config.checkpoint.branch_from is not None:
        raise ConfigError(
            f"checkpoint.branch_from is {config.checkpoint.branch_from}: a branch continues the "
            "data order of its trunk, which has no proxy; leave it out (--set "
            "checkpoint.branch_from=null)"
        )
    folder, data = Path(place(str(folder))), config.data
    if data.blend is not None:
        blend = load_blend(place(data.blend))  # with absolute paths
    else:
        prefix = data.prefix and place(data.prefix)
        blend = BlendConfig(sources=(Source(prefix=prefix, index=data.index),), fim=data.fim)
    indices = [_open(source) for source in blend.sources]
    run = _schedule(config, indices, blend)
    scaling, advice = scaling_of(config, blend.stages, run.capacities, share, tokens_per_step)
    num_steps = config.num_steps or run.num_steps(config.num_epochs)
    ends = _ends(run.program, num_steps, scaling)
    stages = scaling.stages(blend)
    written = [stage.from_step for stage, _ in stages if stage.from_step is not None]
    _check_ends(sorted({*ends, *written}), scaling)
    samples = [
        shrink(index, source.prefix, float(share), folder / SAMPLES / _digest(index), **options)
        for source, index in zip(blend.sources, indices, strict=True)
    ]
    used = {file for image in samples for file in image.group_files}
    for file in options.get("groups", ()):
        if file not in used:
            raise ConfigError(
                f"--group-file {file} has the groups of no source of this run: leave it out, or "
                "give the file that `pack --groups` read"
            )
    files = [str(image.index.path) for image in samples]
    sources = [
        replace(source, index=file, shards=None)
        for source, file in zip(blend.sources, files, strict=True)
    ]
    small = scaling.apply(blend, sources=tuple(sources), stages=tuple(s for _, s in stages))
    paths = {"index": files[0]} if data.blend is None else {"blend": str(folder / BLEND)}
    draws = [int(stage.config.draw_tokens * scaling.per_step) for stage in run.program]
    micro_batch = math.gcd(data.micro_batch_tokens, *draws)
    scaled = scaling.run(
        replace(config, run_dir=str(folder / "run"), num_steps=num_steps, num_epochs=1),
        micro_batch_tokens=micro_batch,
        **paths,
    )
    try:
        proxy = _schedule(scaled, [image.index for image in samples], small)
    except ConfigError as error:
        if tokens_per_step is None:
            raise
        subject = f"the proxy, with --tokens-per-step {tokens_per_step}"
        raise ConfigError(f"{subject}: {error}: {advice}") from error
    assert scaled.num_steps is not None
    check_epochs(proxy, scaled.num_steps)
    small_ends = [_near(proxy.program, scaling.step(end), scaled.num_steps) for end in ends]
    of_epochs, epochs = _epochs(run, ends), _epochs(proxy, small_ends)
    images = zip([s.title for s in blend.sources], samples, of_epochs, epochs, strict=True)
    return Proxy(
        folder=folder,
        scaling=scaling,
        config=scaled,
        blend=None if data.blend is None else small,
        stages=tuple(zip(ends, small_ends, strict=True)),
        sources=tuple(SourceImage(*image) for image in images),
        num_tokens=proxy.tokens_before(scaled.num_steps),
    )


def _open(source: Source) -> SourceIndex:
    if source.index is None:
        raise ConfigError(
            f"source {source.title!r} has no index: pack it (megapack-build pack {source.prefix} "
            "--buckets ...) and name the file in the manifest"
        )
    return source.open_index()


def _digest(index: SourceIndex) -> str:
    """Return the name of the files of a source's samples: a digest of documents and samples."""
    dataset = (index.source or {}).get("fingerprint") if isinstance(index, SampleIndex) else None
    return xxhash.xxh3_64_hexdigest(f"{index.fingerprint} of {dataset}".encode())


def _schedule(
    config: PretrainConfig, indices: Sequence[SourceIndex], blend: BlendConfig
) -> Schedule:
    # Scores change the order of samples, not how many of them a step draws.
    mixture = replace(blend.mixture, scores=None, loss=config.data.loss)
    samples = SampleSource(indices, mixture, attention=config.data.attention)
    return Schedule(samples, config.data.schedule(config.seed))


def write_config(path: Path, config: Any, title: str, *, overwrite: bool) -> None:
    """Write the fields of a configuration that differ from their defaults as YAML, below a comment.
    Raises ConfigError if the file exists with other content, without ``overwrite``."""
    text = f"# {title}\n" + yaml.dump(explicit(config), Dumper=_DUMPER, sort_keys=False)
    same = path.exists() and path.read_text(encoding="utf-8") == text
    difference = None if same else "it has other content"
    if check_target(path, overwrite=overwrite, difference=difference):
        with atomic_write(path, "w") as file:
            file.write(text)


# libyaml, if PyYAML was built with it, is many times faster.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def explicit(value: Any) -> Any:
    """Return a configuration as mappings and lists, without fields that have their defaults."""
    if isinstance(value, (tuple, list)):
        return [explicit(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    tree = {}
    for field in fields(value):
        default, item = field.default, getattr(value, field.name)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if item != default:
            tree[field.name] = explicit(item)
    return tree


# ---- Stages of both ------------------------------------------------------------------------------


def _ends(program: Program, num_steps: int, scaling: Scaling) -> list[int]:
    """Return the steps at which stages of the run end: the last one, and the begins of all others
    but pieces of ramps and skips that the proxy lacks."""
    ends = []
    for before, stage in pairwise(program):
        own = {name: getattr(stage, name) for name in ("begin", "skip_steps", "skipped")}
        is_skip = before._replace(**own) == stage and not scaling.step(stage.skip_steps)
        if stage.begin < num_steps and not is_skip and not (before.ramping and stage.ramping):
            ends.append(stage.begin)
    return [*ends, num_steps]


def _check_ends(ends: Sequence[int], scaling: Scaling) -> None:
    """Raise ConfigError if a stage would have no step in the proxy."""

    def missing(share: Fraction) -> tuple[int, int] | None:
        steps = replace(scaling, share=share).step
        return next(((a, b) for a, b in pairwise([0, *ends]) if steps(a) == steps(b)), None)

    lost = missing(scaling.share)
    if lost is None:
        return
    # A run of n steps has none in its proxy if that has less than half a step.
    smallest = min(1 / scaling.share, 2 * ends[-1] / scaling.per_step)
    fitting = (k for k in range(int(smallest), 0, -1) if missing(Fraction(1, k)) is None)
    scale = next((f"give --scale 1/{k}, the smallest that fits, or " for k in fitting), "")
    begin, end = lost
    steps = (end - begin) * scaling.share / scaling.per_step
    raise ConfigError(
        f"--scale is {scaling.share}: the stage from step {begin:,} to {end - 1:,} would have "
        f"{float(steps):.2g} of the proxy's {scaling.step(ends[-1]):,} steps; {scale}make "
        "steps smaller (--tokens-per-step)"
    )


def _near(program: Program, step: int, num_steps: int) -> int:
    """Return the first step of the stage that begins next to a step, if one does, else the step."""
    begins = [stage.begin for stage in program if abs(stage.begin - step) <= 1]
    begins = begins if step < num_steps else []
    return min(begins, key=lambda begin: abs(begin - step), default=step)


def _epochs(schedule: Schedule, steps: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the epochs of every source before each of the steps."""
    plans = [[source.epochs for source in plan_run(schedule, step).datasets] for step in steps]
    return list(zip(*plans, strict=True))

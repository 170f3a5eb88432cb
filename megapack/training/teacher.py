"""Write a teacher's most likely next tokens as columns of a dataset, for distillation.

    megapack-teacher --model teacher --data corpus
    torchrun --nproc-per-node 8 -m megapack.training.teacher --model teacher --data corpus

The model reads all documents, each alone; several share a forward, and attention does not cross
their boundaries. It adds two columns, ``of: target``: at every token, the ids that the teacher
found most likely at this place (``teacher_ids``, int32 [k]) and their log-probabilities at
temperature 1 over the data's vocabulary (``teacher_logits``, [k]); 1 minus the sum of their
probabilities is that of all other tokens. The first token of a document has no prediction: its row
is ids 0 and the number 1, which no log-probability is.

A document longer than --context is read in windows, each of which repeats the last --overlap tokens
of the one before. So a token is predicted from at least --overlap tokens before it, or from all
tokens of its document before it. With context 4 and overlap 2, a document of 8 tokens is

    tokens 0 1 2 3        -> predict 1 2 3 4
    tokens     2 3 4 5    ->             5 6
    tokens         4 5 6  ->                 7

Finished parts are kept next to the dataset: the same command continues after a kill, with any
number of ranks, and gives the same columns (on a CPU with the same OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megapack.config import check_positive, check_range
from megapack.data.documents import DatasetDocuments
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.column_edits import add_column
from megapack.storage.columns import ColumnSpec, check_column_name
from megapack.storage.files import atomic_write
from megapack.storage.locks import WriterLock, make_own_folder, remove_own_folder
from megapack.storage.metadata import sampled_checksum
from megapack.training.command import command_parser, run_command, set_rank_environment
from megapack.training.config import DistillConfig, EngineConfig, ModelConfig
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import model_configuration, position_limit
from megapack.training.model.loss import NO_TEACHER
from megapack.training.model.opening import check_document_positions, compute_dtype, open_model
from megapack.training.model.training_model import TrainingModel
from megapack.units import short, size

Ids = NDArray[np.int64]
_WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_SHOW_SECONDS = 10.0
_DIGEST_BYTES = 16


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(teach, build_parser().parse_args())


def teach(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    check_options(args)
    config = ModelConfig(pretrained=args.model, attention_backend=args.attention_backend)
    set_rank_environment(args.local_rank)
    datasets = [IndexedDataset(prefix) for prefix in args.data]
    jobs = [Job.of(dataset, args) for dataset in datasets]
    architecture = check_model(config, datasets, args)
    with connect_ranks(timeout_minutes=30) as world:
        precision: Any = args.precision or ("bf16" if world.device.type == "cuda" else "fp32")
        engine = EngineConfig(precision=precision)
        model, attention = open_model(config, engine, architecture, device=world.device)
        model.cast(compute_dtype(engine)).eval()
        device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        arithmetic = [precision, attention.name, device, torch.__version__, model.chunk_tokens]
        for job in jobs:
            job.run(model, world, arithmetic)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Check the options that need neither the data nor the model. Raises ConfigError."""
    names = ("top_k", "context", "forward_tokens", "part_tokens")
    check_positive("command line", **{f"--{n.replace('_', '-')}": getattr(args, n) for n in names})
    check_range("command line", at_least=0, below=args.context, **{"--overlap": args.overlap})
    if args.forward_tokens < args.context:
        raise ConfigError(
            f"--forward-tokens is {args.forward_tokens} and --context {args.context}; a forward "
            "has at least one window: raise --forward-tokens or lower --context"
        )
    if args.ids == args.logits:
        raise ConfigError(f"--ids and --logits are both {args.ids!r}; name two columns")
    for name in (args.ids, args.logits):
        check_column_name(name)
    for prefix in args.data:
        if is_remote(prefix):
            raise ConfigError(
                f"{prefix} is in an object store, and columns are added to local datasets; copy "
                "the dataset to a disk, and upload it with its columns (megapack-build upload)"
            )
    model = Path(args.model)
    if (model / "checkpoints").is_dir():
        raise ConfigError(
            f"{model} is a run; export its model (megapack-export {model}) and give --model "
            f"{model / 'model'}"
        )
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} has no config.json; give a transformers checkpoint")


def check_model(
    config: ModelConfig, datasets: Sequence[IndexedDataset], args: argparse.Namespace
) -> Any:
    """Return the transformers configuration of the teacher. Raises ConfigError if it lacks token
    ids of the data, positions for a window, or k token ids."""
    sizes = [dataset.vocab_size for dataset in datasets if dataset.vocab_size is not None]
    architecture = model_configuration(config, max(sizes, default=1))
    for dataset in datasets:
        _, largest = DatasetDocuments(dataset).largest_token_id(architecture.vocab_size)
        if largest >= architecture.vocab_size:
            raise ConfigError(
                f"{dataset.prefix} has token id {largest}, and {args.model} has ids below "
                f"{architecture.vocab_size}; teacher and data need the same tokenizer"
            )
        limit = dataset.vocab_size or architecture.vocab_size
        if args.top_k > limit:
            raise ConfigError(f"--top-k is {args.top_k}; {dataset.prefix} has {limit} token ids")
    longest = max((int(d.document_lengths.max(initial=0)) for d in datasets), default=0)
    window = min(longest, args.context)
    known = position_limit(architecture, window)
    if known is not None and window > known.tokens:
        raise ConfigError(
            f"--context is {args.context}, and {known.source} of {args.model} is {known.tokens}; "
            f"give --context {known.tokens} (and an --overlap below it)"
        )
    check_document_positions(architecture, window)
    return architecture


# ---- Windows, forward passes and parts: functions of the lengths alone ---------------------------


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Windows in the order of the tokens, grouped into forward passes, and these into parts.

    Attributes:
        begins, ends: (windows,) a window reads tokens ``begin`` to ``end - 1``.
        first_targets: (windows,) a window predicts tokens ``first_target`` to ``end``.
        forwards: (forwards + 1,) forward pass f begins at window ``forwards[f]``.
        parts: (parts + 1,) part p begins at forward pass ``parts[p]``.
        rows: (parts + 1,) part p writes the rows of the columns from ``rows[p]`` on.
    """

    begins: Ids
    ends: Ids
    first_targets: Ids
    forwards: Ids
    parts: Ids
    rows: Ids

    @staticmethod
    def of(
        lengths: NDArray[Any], *, context: int, overlap: int, forward_tokens: int, part_tokens: int
    ) -> WindowPlan:
        """Cut documents of these lengths (in tokens) into windows; fill forward passes in order."""
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        documents = np.flatnonzero(lengths > 1)
        # The last token of a document is predicted and predicts nothing.
        read = lengths[documents].astype(np.int64) - 1
        stride = context - overlap
        counts = 1 + np.maximum(0, -(-(read - context) // stride))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(offsets[documents], counts)
        begins = number * stride
        ends = np.minimum(begins + context, np.repeat(read, counts))
        targets = np.where(number == 0, 1, begins + overlap + 1)
        forwards = _filled(ends - begins, forward_tokens)
        per_forward = np.add.reduceat(ends - targets + 1, forwards[:-1]) if len(ends) else ends
        parts = _filled(per_forward, max(part_tokens, int(per_forward.max(initial=0))))
        begins, ends, targets = (first + x for x in (begins, ends, targets))
        inner = targets[forwards[parts[1:-1]]] if len(ends) else ends
        rows = np.concatenate([[0], inner, offsets[-1:]])
        return WindowPlan(
            begins=begins,
            ends=ends,
            first_targets=targets,
            forwards=forwards,
            parts=parts if len(ends) else np.zeros(2, np.int64),
            rows=rows,
        )


def _filled(sizes: Ids, capacity: int) -> Ids:
    """Return the boundaries of consecutive groups of at most ``capacity``, each of maximal size."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    boundaries = [0]
    while boundaries[-1] < len(sizes):
        room = ends[boundaries[-1]] + capacity
        boundaries.append(int(np.searchsorted(ends, room, side="right")) - 1)
    return np.array(boundaries, np.int64)


# ---- One dataset ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """Work on one dataset: its columns, its plan, and the settings that determine their values."""

    dataset: IndexedDataset
    ids: ColumnSpec
    logits: ColumnSpec
    plan: WindowPlan
    args: argparse.Namespace

    @staticmethod
    def of(dataset: IndexedDataset, args: argparse.Namespace) -> Job:
        """Plan the work on a dataset. Raises ConfigError if k is too large for a column."""
        shape = (args.top_k,)
        return Job(
            dataset=dataset,
            ids=ColumnSpec(dtype="int32", shape=shape, of="target"),
            logits=ColumnSpec(dtype=args.dtype, shape=shape, fill=NO_TEACHER, of="target"),
            plan=WindowPlan.of(
                dataset.document_lengths,
                context=args.context,
                overlap=args.overlap,
                forward_tokens=args.forward_tokens,
                part_tokens=args.part_tokens,
            ),
            args=args,
        )

    def identity(self, arithmetic: Sequence[Any]) -> dict[str, Any]:
        """Return all that determines the columns, as JSON values. Reads at most 1 MiB per file."""
        weights: dict[str, str] = {}
        model = Path(self.args.model)
        for path in sorted({p for pattern in _WEIGHTS for p in model.glob(pattern)}):
            with path.open("rb") as file:

                def read(begin: int, end: int, file: Any = file) -> bytes:
                    file.seek(begin)
                    return bytes(file.read(end - begin))

                weights[path.name] = sampled_checksum(path.stat().st_size, read)
        names = ("top_k", "dtype", "context", "overlap", "forward_tokens", "part_tokens")
        return {
            "model": weights,
            "documents": self.dataset.fingerprint,
            "tokens": self.dataset.content_digest[0],  # the meta file may be new
            "vocab_size": self.dataset.vocab_size,
            "arithmetic": list(arithmetic),
            **{name: getattr(self.args, name) for name in names},
        }

    def run(self, model: TrainingModel, world: World, arithmetic: Sequence[Any]) -> None:
        """Compute the missing parts, all ranks together; the first rank adds the columns."""
        described = world.on_first(lambda: self.identity(arithmetic))
        digest = xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())
        folder = Path(f"{self.dataset.prefix}.teacher-{digest}")
        with ExitStack() as stack:
            world.on_first(lambda: self.begin(folder, described, stack))
            missing = world.on_first(lambda: self.missing(folder))
            begin = shown = time.monotonic()
            for part in missing[world.rank :: world.size]:
                self.write(folder / f"{part:08d}", *self.compute(model, world.device, part))
                if world.is_first and time.monotonic() > shown + _SHOW_SECONDS:
                    shown = time.monotonic()
                    self.show(missing, self.missing(folder), shown - begin)
            world.gather(None)  # wait for the other ranks, without the timeout of collectives
            world.on_first(lambda: self.publish(folder, digest))

    def begin(self, folder: Path, described: dict[str, Any], stack: ExitStack) -> None:
        """Create or continue the folder of parts, and lock it until ``stack`` ends. Raises
        ConfigError if a column exists already or the disk is too small, LockedError if the same job
        is running."""
        prefix, names = self.dataset.prefix, (self.args.ids, self.args.logits)
        existing = [name for name in names if name in self.dataset.columns]
        # A folder with parts: the job was killed, perhaps while it added the columns.
        if existing and not (self.args.overwrite or folder.exists()):
            raise ConfigError(
                f"{prefix} has a column {existing[0]} already; give other names (--ids, --logits), "
                "or --overwrite to replace it"
            )
        stack.enter_context(WriterLock(folder, what="megapack-teacher"))
        make_own_folder(folder)
        with atomic_write(folder / "job.json", "w") as file:
            json.dump(described, file, indent=1)
        num_rows = self.tokens_in(self.missing(folder)) + self.dataset.num_tokens
        needed = num_rows * (self.ids.row_bytes + self.logits.row_bytes)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"{folder.parent} has {size(free)} free, and the columns and their parts need "
                f"{size(needed)}; free the space, or lower --top-k"
            )

    def show(self, at_start: Sequence[int], missing: Sequence[int], seconds: float) -> None:
        total, left = self.dataset.num_tokens, self.tokens_in(missing)
        speed = (self.tokens_in(at_start) - left) / seconds
        remaining = timedelta(seconds=round(left / speed)) if speed else "unknown time"
        print(
            f"{self.dataset.prefix}: {short(total - left)} of {short(total)} tokens, "
            f"{speed:,.0f} tok/s, {remaining} left",
            file=sys.stderr,
            flush=True,
        )

    def publish(self, folder: Path, digest: str) -> None:
        """Add the columns to the dataset, and remove the parts."""
        facts = {"model": Path(self.args.model).name, "job": digest}
        facts |= {name: getattr(self.args, name) for name in ("top_k", "context", "overlap")}
        lengths = self.dataset.document_lengths.tolist()
        for place, (name, spec) in enumerate(self.columns):
            rows = by_document((self.read(folder, part)[place] for part in self.parts), lengths)
            options: Any = {"overwrite": self.args.overwrite, "metadata": {"teacher": facts}}
            add_column(self.dataset.prefix, name, rows, spec, **options)
        remove_own_folder(folder)
        kinds = [f"{name} ({spec.dtype} [{self.args.top_k}])" for name, spec in self.columns]
        print(
            f"{self.dataset.prefix}: {' and '.join(kinds)} for {self.dataset.num_tokens:,} tokens"
        )

    # ---- Parts

    @property
    def columns(self) -> list[tuple[str, ColumnSpec]]:
        """Names and types of the columns, in the order of a part's content."""
        return [(self.args.ids, self.ids), (self.args.logits, self.logits)]

    @property
    def parts(self) -> range:
        return range(len(self.plan.rows) - 1)

    def tokens_in(self, parts: Sequence[int]) -> int:
        return int(np.diff(self.plan.rows)[np.asarray(parts, np.int64)].sum())

    def missing(self, folder: Path) -> list[int]:
        """Return the parts that are not on disk."""
        done = {path.name for path in folder.iterdir()}
        return [part for part in self.parts if f"{part:08d}" not in done]

    def compute(
        self, model: TrainingModel, device: torch.device, part: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows of both columns for one part. Raises DataError if a number is NaN."""
        plan, vocab_size = self.plan, self.dataset.vocab_size or model.configuration.vocab_size
        how: dict[str, Any] = {"k": self.args.top_k, "vocab_size": vocab_size}
        first_row, end_row = plan.rows[part : part + 2].tolist()
        ids, logits = (
            np.tile(spec.fill_row, (end_row - first_row, 1)).view(spec.numpy_dtype)
            for _, spec in self.columns
        )
        for forward in range(*plan.parts[part : part + 2].tolist()):
            windows = range(*plan.forwards[forward : forward + 2].tolist())
            arrays, positions_of_rows, rows = self.inputs(windows)
            longest = int(np.diff(arrays[2]).max())
            tensors = [torch.from_numpy(array).to(device) for array in arrays]
            tokens, position_ids, cu_seqlens = tensors
            best = model.most_likely(tokens, position_ids, cu_seqlens, longest, **how)
            chosen = torch.from_numpy(positions_of_rows).to(device)
            found, values = (table[chosen].cpu() for table in best)
            if bool(values.isnan().any()):
                raise DataError(
                    f"{self.args.model} gives NaN for tokens {rows[0]} to {rows[-1]} of "
                    f"{self.dataset.prefix}; try --precision fp32"
                )
            ids[rows - first_row] = found.numpy()
            logits[rows - first_row] = self.logits.rows(values)
        return ids, logits

    def inputs(self, windows: range) -> tuple[tuple[NDArray[Any], ...], Ids, Ids]:
        """Return tokens and position ids ``[1, T]`` and cu_seqlens of a forward pass, the positions
        whose outputs become rows, and the numbers of these rows."""
        plan, num_tokens = self.plan, self.args.forward_tokens
        tokens = np.zeros((1, num_tokens), np.int64)
        lengths, positions, rows, at = [], [], [], 0
        for window in windows:
            begin, end, first = (
                int(x[window]) for x in (plan.begins, plan.ends, plan.first_targets)
            )
            tokens[0, at : at + end - begin] = self.dataset.tokens[begin:end]
            lengths.append(end - begin)
            # The output at token i predicts token i + 1.
            positions.append(np.arange(at + first - 1 - begin, at + end - begin))
            rows.append(np.arange(first, end + 1))
            at += end - begin
        padding = num_tokens - at
        if padding:  # in segments no longer than a window: the model may have no more positions
            whole, rest = divmod(padding, self.args.context)
            lengths += [self.args.context] * whole + [rest] * bool(rest)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        position_ids = np.arange(num_tokens) - np.repeat(cu_seqlens[:-1], lengths)
        inputs = tokens, position_ids[None], cu_seqlens.astype(np.int32)
        return inputs, np.concatenate(positions), np.concatenate(rows)

    def write(self, path: Path, *columns: NDArray[Any]) -> None:
        """Write the rows of a part, and their checksum."""
        content = b"".join(rows.tobytes() for rows in columns)
        with atomic_write(path) as file:
            file.write(content)
            file.write(xxhash.xxh3_128_digest(content))

    def read(self, folder: Path, part: int) -> list[NDArray[Any]]:
        """Return the rows of a part, by column. Raises FormatError if it is damaged."""
        path = folder / f"{part:08d}"
        content = path.read_bytes()
        content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        num_rows, begin, columns = self.tokens_in([part]), 0, []
        if xxhash.xxh3_128_digest(content) != digest:
            raise FormatError(f"{path} is damaged; remove it and start the command again")
        for _, spec in self.columns:
            end = begin + num_rows * spec.row_bytes
            rows = np.frombuffer(content[begin:end], spec.numpy_dtype)
            columns.append(rows.reshape(num_rows, *spec.shape))
            begin = end
        return columns


def by_document(parts: Iterable[NDArray[Any]], lengths: Iterable[int]) -> Iterator[NDArray[Any]]:
    """Yield the rows of each document from rows that come in parts."""
    parts = iter(parts)
    rows, begin = next(parts), 0
    for length in lengths:
        taken = [rows[begin : begin + length]]
        begin += length
        while begin > len(rows):
            begin -= len(rows)
            rows = next(parts)
            taken.append(rows[:begin])
        yield taken[0] if len(taken) == 1 else np.concatenate(taken)


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("megapack-teacher", __doc__)
    columns = DistillConfig()
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the teacher, a transformers checkpoint")
    add("--data", required=True, nargs="+", metavar="PREFIX", help="datasets to add columns to")
    add("--top-k", type=int, default=64, metavar="K", help="tokens per row (default: 64)")
    dtypes, of = ["bfloat16", "float16", "float32"], "of the log-probabilities (default: bfloat16)"
    add("--dtype", choices=dtypes, default="bfloat16", help=of)
    add("--ids", default=columns.ids, metavar="NAME", help="column of ids (default: %(default)s)")
    add("--logits", default=columns.logits, metavar="NAME", help="default: %(default)s")
    add("--overwrite", action="store_true", help="replace columns of these names")
    add("--context", type=int, default=4096, help="tokens per window (default: 4096)")
    for name, default, meaning in (
        ("--overlap", 1024, "tokens that a window repeats of the one before"),
        ("--forward-tokens", 16384, "tokens of one forward, padding included"),
        ("--part-tokens", 1 << 18, "tokens after which a rank keeps its work on disk"),
    ):
        add(name, type=int, default=default, help=f"{meaning} (default: {default})")
    add("--precision", choices=["bf16", "fp32"], help="default: bf16 on CUDA, else fp32")
    add("--attention-backend", default="auto", help="as model.attention_backend")
    return parser


if __name__ == "__main__":
    sys.exit(main())

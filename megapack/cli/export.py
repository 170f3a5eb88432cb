"""Write packed samples in the file format of another trainer.

--format bridge: the packed parquet of Megatron-Bridge (packed_train_data_path), with the column
labels of the dataset if it has one. A row holds samples of one bucket, as many as fit the largest
bucket. A segment becomes one sequence, which Bridge splits into inputs and labels:

  document       5 6 7 8 | 9        a segment of 4 tokens and the next token of its document
  input_ids      5 6 7 8   9        inputs 5 6 7 8, labels 6 7 8 9
  loss_mask      0 1 1 0   0        per predicting token; Bridge never reads the last one
  seq_start_id   0                  first token of every sequence

NAME.metadata.json is written next to it (packed_metadata_path). If the samples were packed with
--alignment, their sequences are padded to it (pad_seq_to_mult) with --eod-token.

examples:
  megapack-build export chats.samples --format bridge --output train.idx.parquet
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import add_shared, token_id
from megapack.cli.datasets import local_file
from megapack.cli.output import Work, print_result
from megapack.errors import ConfigError, require
from megapack.packing import SampleIndex
from megapack.packing.verify import prefix_of_samples
from megapack.storage import IndexedDataset
from megapack.storage.columns import LABELS
from megapack.storage.dataset import check_converted
from megapack.storage.files import atomic_write, check_target
from megapack.units import count

SUFFIXES = (".parquet", ".pq")  # Bridge recognizes these
ROWS_PER_GROUP = 500  # as Bridge writes them; it reads a row group to get a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", metavar="SAMPLES", help="a .samples file of `pack`")
    parser.add_argument(
        "--format", choices=("bridge",), required=True, help="format of the output, see above"
    )
    add_shared(parser, "--output", required=True, help="its name ends in .parquet or .pq")
    add_shared(parser, "--eod-token", help="it pads aligned samples; a name needs --tokenizer")
    add_shared(parser, "--tokenizer", help="needed if --eod-token is a name")
    add_shared(parser, "--overwrite", "--json")


def run(args: argparse.Namespace) -> None:
    output = local_file(args.output, "--output")
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"--output is {output}; Bridge reads {' and '.join(SUFFIXES)}")
    metadata = output.with_name(output.name.partition(".")[0] + ".metadata.json")
    for path in (output, metadata):
        check_target(path, overwrite=args.overwrite, difference="it may hold something else")
    index = SampleIndex.load(args.samples)
    dataset = IndexedDataset(prefix_of_samples(args.samples, index))
    index.check_source(dataset)
    rows = packed_rows(dataset, index, token_id(args.eod_token, args.tokenizer))
    with (
        Work(f"exporting {count(index.num_samples)} samples") as work,
        atomic_write(output) as file,
    ):
        facts = _write(file, rows, index, work)
    with atomic_write(metadata, "w") as file:
        json.dump([facts], file)
    facts |= {"output": str(output), "metadata": str(metadata), "pad_seq_to_mult": index.alignment}
    counts = (f"{count(facts[f'num_{n}'])} {n}" for n in ("rows", "sequences", "labels"))
    sizes = f"packed_sequence_size={facts['pack_size']} pad_seq_to_mult={index.alignment}"
    print_result(args, facts, f"{output}: {', '.join(counts)}\n{sizes}")


class PackedRow(NamedTuple):
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    seq_start_id: NDArray[np.int32]


def packed_rows(
    dataset: IndexedDataset, index: SampleIndex, pad: int | None
) -> Iterator[PackedRow]:
    """Yield the samples of an index as rows, each of one bucket, by ascending capacity. ``pad`` is
    the id that fills aligned sequences. Raises ConfigError if it is missing or not an int32, if the
    dataset has columns other than labels, such as loss weights, which a mask of 0 and 1 cannot
    express, or if a label is not the next token."""
    check_converted(dataset.prefix, dataset.columns)
    others = [name for name in dataset.columns if name != LABELS]
    labels = dataset.columns[LABELS].rows if LABELS in dataset.columns else dataset.tokens
    if others:
        raise ConfigError(
            f"{dataset.prefix} has the columns {', '.join(others)}, and Bridge's parquet has only "
            "labels and a loss_mask of 0 and 1: train with another host, or remove them from a "
            "copy of the dataset (`megapack-build column remove`)"
        )
    if index.alignment > 1 and pad is None:
        raise ConfigError(
            f"{index.path} is aligned to {index.alignment} tokens, and Bridge's sequences are "
            "padded with the end token: give --eod-token"
        )
    if pad is not None and pad > np.iinfo(np.int32).max:
        raise ConfigError(f"--eod-token is {pad}, and Bridge's ids are int32")

    def sequence(
        document: int, begin: int, length: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the tokens of a segment, the next token of its document, and their loss mask."""
        first = int(dataset.document_offsets[document])
        end = min(begin + length + 1, int(dataset.document_lengths[document]))
        tokens = dataset.tokens[first + begin : first + end].astype(np.int32)
        label_tokens = labels[first + begin : first + end]
        mask = np.zeros(len(tokens), np.int8)
        mask[:-1] = label_tokens[1:] >= 0
        differs = mask[:-1].astype(bool) & (label_tokens[1:] != tokens[1:])
        if differs.any():
            raise ConfigError(
                f"document {document} has label {label_tokens[1:][differs][0]} for token "
                f"{tokens[1:][differs][0]}, and Bridge takes labels from tokens: train with "
                "another host, or write labels that are the token or -100"
            )
        padding = -(len(tokens) - 1) % index.alignment
        if padding:
            tokens = np.append(tokens, np.full(padding, pad, np.int32))
            mask = np.append(mask, np.zeros(padding, np.int8))
        return tokens, mask

    bounds, capacities = index.bucket_sample_offsets.tolist(), index.bucket_capacity.tolist()
    for begin, end, capacity in zip(bounds, bounds[1:], capacities, strict=False):
        # A row has the capacity of the largest bucket, so it holds several smaller samples.
        samples_per_row = capacities[-1] // capacity
        for first in range(begin, end, samples_per_row):
            samples = range(first, min(end, first + samples_per_row))
            sequences = [sequence(*segment) for i in samples for segment in index.sample(i)[1]]
            # A single token at the end of a document predicts nothing.
            row = [(tokens, mask) for tokens, mask in sequences if len(tokens) > 1]
            if row:
                tokens, masks = (np.concatenate(parts) for parts in zip(*row, strict=True))
                starts = np.cumsum([0, *(len(part) for part, _ in row[:-1])])
                yield PackedRow(tokens, masks, starts.astype(np.int32))


def _write(file: Any, rows: Iterator[PackedRow], index: SampleIndex, work: Work) -> dict[str, Any]:
    """Write the rows; return the metadata that Bridge reads, and counts."""
    arrow = require("pyarrow", "writing parquet")
    parquet = require("pyarrow.parquet", "writing parquet")
    types = {"input_ids": arrow.int32(), "loss_mask": arrow.int8(), "seq_start_id": arrow.int32()}
    schema = arrow.schema({name: arrow.list_(kind) for name, kind in types.items()})
    longest, sizes, sequences, labels = 0, [], [], 0
    largest = int(index.bucket_capacity[-1])
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            columns = zip(zip(*group, strict=True), types.values(), strict=True)
            arrays = [arrow.array(list(values), type=arrow.list_(kind)) for values, kind in columns]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            for row in group:
                inputs = np.diff(row.seq_start_id, append=len(row.input_ids)) - 1
                longest = max(longest, int(inputs.max()))
                sizes.append(int(inputs.sum()))
                sequences.append(len(inputs))
                labels += int(row.loss_mask.sum())
            work(len(sizes), index.num_samples)
    if not sizes:
        raise ConfigError(
            f"{index.path} has no sequence of two tokens or more: there is nothing to export"
        )
    return {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": max(sequences),
        "packing_factor": round(sum(sequences) / len(sizes), 2),
        "packing_efficiency": round(100 * sum(sizes) / len(sizes) / largest, 2),
        "pack_size": largest,
        "min_packed_seqlen": min(sizes),
        "num_rows": len(sizes),
        "num_sequences": sum(sequences),
        "num_labels": labels,
    }

"""Hosts read datasets in object stores as they read local ones: rows of Megatron, Trainer steps."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from object_store import Line
from patience import wait_until
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megapack import attention
from megapack.cli.main import main
from megapack.data import PackedDataset, Schedule
from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron.dataset import PackedDatasetBuilder, PackedGPTDataset
from megapack.integrations.hosts.megatron.storage import IndexedDataset
from megapack.integrations.hosts.transformers import MicroBatches, PackedTrainer
from megapack.packing.shard_packing import pack_shards, plan_packing
from tests.integrations.samples import Tokenizer
from tests.remote.far import address_of, put_dataset, write_packed

ROW, GLOBAL_BATCH = 512, 8


def source_of_shards(folder: Path) -> str:
    """Write two datasets as one source, local and remote; return the local manifest."""
    manifest = f"{folder}/web.shards.json"
    for seed, name in enumerate(("a", "b")):
        write_packed(folder / name, 400, seed)
    options = {"buckets": [64, 256, 512]}
    plan = plan_packing(manifest, [f"{folder}/a", f"{folder}/b"], options)
    pack_shards(plan, lambda _: None)
    assert main(["upload", manifest, f"s3://bucket/{folder.name}"]) == 0
    return manifest


def megatron_rows(data_path: str, **changes: Any) -> Any:
    """Return the training rows of megatron-core's own builder."""
    options: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": ROW,
        "blend": ([data_path], None),
        "split": "100,0,0",
        "path_to_cache": None,
        "tokenizer": Tokenizer(vocab_size=2**15, eod=0),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    settings = GPTDatasetConfig(**{**options, **changes})
    return PackedDatasetBuilder(PackedGPTDataset, [64, 0, 0], lambda: True, settings).build()[0]


def same_rows(ours: Any, theirs: Any) -> bool:
    return all(
        torch.equal(ours[i][name], theirs[i][name])
        for i in range(0, len(theirs), 5)
        for name in theirs[i]
    )


def manifest_of(folder: Path, name: str, source: str) -> str:
    path = folder / f"{name}.json"
    path.write_text(f'{{"sources": [{{{source}}}], "rows_per_block": {GLOBAL_BATCH}}}')
    return str(path)


def test_megatron_rows_of_an_address_and_of_shards(line: Line, tmp_path: Path) -> None:
    address, cache = put_dataset(tmp_path / "docs"), str(tmp_path / "packed")
    pairs = [(f'"prefix": "{prefix}"', cache) for prefix in (tmp_path / "docs", address)]
    near = source_of_shards(tmp_path)
    far = address_of(Path(near))
    pairs += [(f'"index": "{index}"', None) for index in (near, far)]
    built = [
        megatron_rows(manifest_of(tmp_path, f"of{i}", source), path_to_cache=where)
        for i, (source, where) in enumerate(pairs)
    ]
    line.counts.clear()
    assert len(built[1]) == 64 and same_rows(built[1], built[0])
    assert line.counts["GET"] > 0
    assert len(built[3]) == 64 and same_rows(built[3], built[2])
    batch = next(iter(DataLoader(built[3], batch_size=4)))
    assert torch.equal(batch["tokens"][3], built[2][3]["tokens"])


@pytest.mark.parametrize("line", ["gs"], indirect=True)
def test_megatron_dataset_at_an_address_is_pickled_for_workers(line: Line, tmp_path: Path) -> None:
    """megatron-core's own reader opens s3://, ours opens all other addresses."""
    address = put_dataset(tmp_path / "docs")
    near, far = IndexedDataset(str(tmp_path / "docs")), IndexedDataset(address)
    again = pickle.loads(pickle.dumps(far))
    assert type(again) is IndexedDataset and again.prefix == address
    assert again[7].tolist() == far[7].tolist() == near[7].tolist()


def test_invalid_addresses_are_refused_at_start(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs")
    source = manifest_of(tmp_path, "blend", f'"prefix": "{address}"')
    with pytest.raises(ConfigError, match="is an address: set cache_directory"):
        megatron_rows(source)
    assert not list(Path.cwd().glob("s3:*"))
    rows = megatron_rows(source, path_to_cache=str(tmp_path / "packed"))
    with pytest.raises(ConfigError, match="Megatron's --num-workers 0"):
        next(iter(DataLoader(rows, batch_size=4, num_workers=1)))


def test_next_rows_of_a_host_are_prefetched(line: Line, tmp_path: Path) -> None:
    """Read them as rank 1 of 2, two rows at a time."""
    address = put_dataset(tmp_path / "docs", 6000)
    source = manifest_of(tmp_path, "blend", f'"prefix": "{address}"')
    rows = megatron_rows(source, path_to_cache=str(tmp_path / "packed")).rows
    reads = rows.packed.remote_reads
    rows.micro_batch([2, 3])
    rows.micro_batch([6, 7])
    for i in (10, 11, 14, 15):
        [(tokens, blocks)] = reads._blocks(rows.samples_of(i))
        wait_until(partial(tokens.are_here, blocks), f"row {i} is not asked for")


def losses(index: str, out: Path) -> list[float]:
    """Return the inputs of four steps of transformers' Trainer."""
    attention.register("sdpa")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    options = {"max_position_embeddings": ROW, "attn_implementation": "megapack"}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2**15, **shape, **heads, **options))
    data = PackedDataset(None, index)
    schedule = Schedule(data, tokens_per_step=2 * ROW, seed=1)
    steps = {"max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    trainer = PackedTrainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), use_cpu=True, **steps, **quiet),
        train_dataset=MicroBatches(data, schedule, micro_batch_tokens=ROW),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_steps_are_equal(line: Line, tmp_path: Path) -> None:
    near = source_of_shards(tmp_path)
    here = losses(near, tmp_path)
    line.counts.clear()
    assert len(here) == 4 and losses(address_of(Path(near)), tmp_path) == here
    assert line.counts["GET"] > 0


def test_micro_batches_in_order_are_prefetched(line: Line, tmp_path: Path) -> None:
    """In any other order they are equal, too."""
    prefixes = tmp_path / "docs", put_dataset(tmp_path / "docs", 20_000)
    packed = [PackedDataset(prefix, f"{prefix}.samples") for prefix in prefixes]
    near, far = (
        MicroBatches(data, Schedule(data, tokens_per_step=2 * ROW), micro_batch_tokens=ROW)
        for data in packed
    )
    line.counts.clear()
    for i in range(10):
        assert torch.equal(far[i]["input_ids"], near[i]["input_ids"])
    most = 0.8 * (tmp_path / "docs.bin").stat().st_size  # ten need a fifth of the file at most
    wait_until(lambda: line.counts["bytes"] >= most, "nothing is fetched ahead")
    for i in (300, 7, 8):
        assert torch.equal(far[i]["input_ids"], near[i]["input_ids"])

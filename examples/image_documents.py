"""Documents with images: a tiny vision-language model on packed samples.

    python examples/image_documents.py

Makes documents of text and images (one color each; the next token is its name), packs them so that
no sample exceeds 128 tokens and 6 images, and trains a LLaVA of two layers on the CPU.

An image is a run of placeholder tokens. Column ``image`` has the row of the image in images.npy at
the first placeholder, and -1 elsewhere. A packed batch has the rows of its images in their
order, and ``inputs_of`` loads only these. Limiting the images of a sample limits the memory of the
vision encoder.

Loss and gradients equal those of the documents alone (tests/integrations/test_examples.py).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from megapack.data import PackedDataset, Schedule, block_diagonal_mask, build_loader, segment_ids
from megapack.packing import pack
from megapack.storage import ColumnSpec, IndexedDataset, IndexedDatasetBuilder

VOCAB_SIZE, IMAGE_TOKEN = 64, 63
PIXELS, PATCH = 8, 4  # per side
TOKENS_PER_IMAGE = (PIXELS // PATCH) ** 2
TOKENS, IMAGES = 128, 6  # capacities of a sample


def write_documents(folder: Path, count: int) -> None:
    """Write pages.bin/.idx with column image, pages.samples and images.npy."""
    chance = np.random.default_rng(0)
    num_images = np.where(chance.random(count) < 0.5, 0, chance.integers(1, 6, count))
    colors = chance.integers(1, 8, num_images.sum())
    channels = (colors[:, None] >> np.arange(3) & 1).astype(np.float32)
    np.save(folder / "images.npy", np.tile(channels[:, :, None, None], (1, 1, PIXELS, PIXELS)))
    column = ColumnSpec(dtype="int64", fill=-1)
    row = 0
    with IndexedDatasetBuilder(folder / "pages", np.uint16, columns={"image": column}) as builder:
        for images in num_images.tolist():
            tokens = ((chance.integers(20) + np.arange(chance.integers(60))) % 20 + 10).tolist()
            rows = [-1] * len(tokens)
            for _ in range(images):
                tokens += [IMAGE_TOKEN] * TOKENS_PER_IMAGE + [int(colors[row])]
                rows += [row] + [-1] * TOKENS_PER_IMAGE
                row += 1
            builder.add_document([*tokens, 0], columns={"image": [*rows, -1]})
    dataset = IndexedDataset(folder / "pages")
    lengths = dataset.document_lengths
    index = pack(lengths, buckets=TOKENS, second=num_images, second_capacity=IMAGES)
    index.save(folder / "pages.samples", source=dataset)


def build_model() -> LlavaForConditionalGeneration:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=PIXELS, patch_size=PATCH)
    text = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


def inputs_of(batch: Mapping[str, Any], images: NDArray[np.float32]) -> dict[str, torch.Tensor]:
    """Return the model's inputs: tokens, positions and a mask per document, and the images that
    column ``image`` lists, from a mapped array."""
    segments = segment_ids(batch["cu_seqlens"], batch["tokens"].numel())
    inputs = {
        "input_ids": batch["tokens"].long(),
        "position_ids": batch["position_ids"].long(),
        "attention_mask": block_diagonal_mask(segments),
    }
    rows = batch["image"][batch["image"] >= 0].numpy()
    if len(rows):
        inputs["pixel_values"] = torch.from_numpy(images[rows])
    return inputs


def sum_of_losses(
    model: LlavaForConditionalGeneration, batch: Mapping[str, Any], images: NDArray[np.float32]
) -> torch.Tensor:
    logits = model(**inputs_of(batch, images), use_cache=False).logits[0]
    labels = batch["labels"][0].masked_fill(batch["labels"][0] == IMAGE_TOKEN, -100)
    return F.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="sum")


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder), args.documents)
        dataset = PackedDataset(f"{folder}/pages", f"{folder}/pages.samples", columns=["image"])
        images = np.load(f"{folder}/images.npy", mmap_mode="r")
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses: list[float] = []
        schedule = Schedule(dataset, tokens_per_step=8 * TOKENS)
        loader = build_loader(
            dataset,
            schedule,
            data_parallel_rank=0,
            data_parallel_size=1,
            micro_batch_tokens=8 * TOKENS,
            num_steps=args.steps,
        )
        for batch in loader:
            labels = batch["labels"]
            num_labels = int(((labels >= 0) & (labels != IMAGE_TOKEN)).sum())
            loss = sum_of_losses(model, batch, images) / num_labels
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            num_images = int((batch["image"] >= 0).sum())
            print(f"step {batch['step']}  {num_images} images  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

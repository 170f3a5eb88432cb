"""A training loop as DeepSpeed's tutorial has it, which ``faults.py`` treats like megapack's.

    RANK=0 WORLD_SIZE=2 ... python benchmarks/faults_plain.py RUN_DIR NUM_STEPS SAVE_EVERY [NAN_AT]

deepspeed.initialize, forward, backward, step, save_checkpoint with the step as client state; at the
start load_checkpoint, and the data loader is advanced to that step. Nothing is added that the
tutorial does not have, and nothing left out. The first rank writes log.jsonl: of every step its
samples and its loss. NAN_AT k makes the gradients of step k no numbers.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH, BATCH = 64, 64, 4


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Rows of tokens with something to learn: a walk that begins anywhere."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        steps = torch.randint(3, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return i, (i + steps.cumsum(0)) % VOCAB


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]  # --local_rank
    run_dir, num_steps, every = Path(words[0]), int(words[1]), int(words[2])
    nan_at = int(words[3]) if len(words) > 3 else -1
    # It would be compiled; only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.5,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    data = Rows()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=1))
    _, state = engine.load_checkpoint(str(run_dir / "checkpoints"))
    start = 0 if state is None else state["step"]
    run_dir.mkdir(parents=True, exist_ok=True)
    for step, (ids, tokens) in itertools.islice(enumerate(loader), start, num_steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss * float("nan") if step == nan_at else loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            value = mean.item() / dist.get_world_size()
            with (run_dir / "log.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": step, "samples": ids.tolist(), "loss": value}) + "\n"
                )
        if (step + 1) % every == 0:
            state = {"step": step + 1}
            engine.save_checkpoint(str(run_dir / "checkpoints"), client_state=state)


if __name__ == "__main__":
    main()

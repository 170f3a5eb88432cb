"""Invalid configurations, the key that the error must name, and when the error appears.

    wrong_configurations.py CONFIG early      # or late

runs every early case through ``main()`` of megapack-pretrain, in this process, and prints a JSON
line for each: the outcome, and which heavy packages were imported by then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HEAVY = ("torch", "transformers", "deepspeed")


@dataclass(frozen=True)
class Case:
    """An invalid start."""

    words: tuple[str, ...]
    """``key=value`` for --set; other words go to the command line unchanged."""
    named: str
    """What the error must name."""
    late: bool = False
    """It takes the data or the model to see it, and so torch and others to be imported."""
    environment: dict[str, str] = field(default_factory=dict)
    yaml: str | bytes | None = None
    """Instead of the configuration."""
    blend: dict[str, Any] | None = None
    """A manifest of the training data, changed so."""

    @property
    def name(self) -> str:
        text = self.yaml if self.yaml is not None else self.blend
        more = [] if text is None else [str(text)]
        return " ".join([*self.words, *more, *(f"{k}={v}" for k, v in self.environment.items())])


def _table(text: str, *, late: bool = False) -> Iterator[Case]:
    """Parse lines "name | words of a case | words of another", or "key: value value"."""
    for line in filter(None, text.splitlines()):
        named, bar, rest = line.partition(" | ")
        key, _, values = line.partition(": ")
        if line.startswith("#"):
            continue
        if bar:
            cases = [(tuple(words.split()), named) for words in rest.split(" | ")]
        else:
            cases = [((f"{key}={value}",), key.rpartition(".")[2]) for value in values.split()]
        yield from (Case(*case, late=late) for case in cases)


EARLY = """
# keys that are not known
num_step | num_step=5
sed | sed=1 | checkpoint.allow_change=[sed]
overides | model.overides.x=1
tokens_per_stp | data.tokens_per_stp=1024
momentum | optimizer.momentum=0.9
warmup | learning_rate.warmup=3
did you mean 'learning_rate'? | schedule.kind=linear
did you mean 'attention_backend'? | model.attention=eager
evry | checkpoint.evry=3 | logging.evry=3 | evaluation.evry=3
zero | engine.zero=1
# numbers that are none, of another type, or outside of their range
seed: -1 99999999999999999999 true 1.5 .nan
distill.alpha: 0 -1 1.5 .nan
distill.temperature: 0 -1 .inf
logit | distill.logit=teacher
num_steps: 0 -4 2.5 true 9223372036854775807
num_epochs: 0 9223372036854775807
stop_at: 0 yes
run_dir: 7 null ''
model.vocab_size: 0 .inf 4611686018427387904
model.vocab_multiple: 0 true 4611686018427387904
model.overrides: 3
model.attention_backend: 7
data.tokens_per_step: 0 true 1e9 null 4611686018427387904
data.micro_batch_tokens: 0 300 -256 null
data.num_cycles: 0
data.row_tokens: 0
data.cost_window: 0 -3 9223372036854775807
data.check_ranks_every: -1 true
data.verify: 1
optimizer.lr: .nan 0 -1e-3 .inf fast true 1e300
optimizer.betas: [0.9] [0.9,1.0] [.nan,0.9] 0.9 [-0.1,0.9]
optimizer.eps: 0 .nan
optimizer.weight_decay: .nan -0.1
optimizer.clip: .nan -1 .inf
optimizer.max_skipped: -1
optimizer.decay_embeddings: 1
learning_rate.warmup_steps: -1
learning_rate.warmup_fraction: 1.5 .nan
learning_rate.min_ratio: -0.1 .nan
learning_rate.decay_fraction: 2
checkpoint.every: 0
checkpoint.keep: 0 true
checkpoint.asynchronous: 2
steps_per_print | engine.deepspeed.steps_per_print=0
evaluation.every: 0
evaluation.max_tokens: -1
evaluation.buckets: [0] 32 [true]
logging.every: 0
logging.tensorboard: maybe
logging.wandb_project: 7
engine.zero_stage: true 4 1.0
engine.sequence_parallel_size: 0 2
engine.loss_chunk_tokens: 0
engine.mlp_chunk_tokens: 0
engine.timeout_minutes: 0 .nan 1e300
engine.heartbeat_timeout_seconds: -1
engine.hang_timeout_seconds: .inf
# names of which there are a few
preset | model.preset=llama_tny | model.preset=null | model.pretrained=x
config | model.config=x | model.preset=null model.config.hidden_size=64
order | data.order=propotional
mix | data.mix=micro
positions | data.positions=documents
attention | data.attention=docs
label_boundary | data.label_boundary=turns
pad_last | data.pad_last=skip
kind | learning_rate.kind=cosin
resume | checkpoint.resume=always
allow_change | checkpoint.allow_change=seed
verify | checkpoint.verify=md5
precision | engine.precision=fp16
# what does not go together
micro_step_tokens | data.mix=micro_step | data.micro_step_tokens=256
micro_step_tokens | data.mix=micro_step data.micro_step_tokens=300
prefix | data.prefix=null | data.index=null | data.blend=blend.yaml
valid_index | data.valid_prefix=null data.valid_index=x
data | data=3
mlp_chunk_tokens | engine.mlp_chunk_tokens=64 engine.compile=true
offload_activations | engine.offload_activations=true
offload_activations | engine.offload_activations=true \
engine.activation_checkpointing=true engine.compile=true
wandb | logging.wandb_project=mine | --dry-run logging.wandb_project=mine
# of DeepSpeed's configuration, what is decided elsewhere
tokens_per_step | engine.deepspeed.train_batch_size=9
micro_batch_tokens | engine.deepspeed.train_micro_batch_size_per_gpu=2
gradient_accumulation_steps | engine.deepspeed.gradient_accumulation_steps=2
optimizer.clip | engine.deepspeed.gradient_clipping=1.0
optimizer | engine.deepspeed.optimizer.type=Adam
scheduler | engine.deepspeed.scheduler.type=WarmupLR
engine.zero_stage | engine.deepspeed.zero_optimization.stage=3
engine.precision | engine.deepspeed.fp16.enabled=true
engine.precision | engine.deepspeed.bf16.enabled=false
torch_autocast | engine.deepspeed.torch_autocast.enabled=true
data_types | engine.deepspeed.data_types.grad_accum_dtype=bf16
sequence_parallel_size | engine.deepspeed.sequence_parallel_size=2
gradient_allreduce_op | engine.deepspeed.gradient_allreduce_op=sum
engine.deepspeed.zero_optimization: 3 true null
engine.deepspeed.checkpoint: []
zero_optimization | optimizer.kind=muon engine.deepspeed.zero_optimization=3
load_universal | engine.deepspeed.checkpoint.load_universal=true
# the command line
--profile | --profile 5 | --profile 5:3 | --profile a:b
--profile | --dry-run --profile 0:1
--world-size | --dry-run --world-size 0 | --dry-run --world-size -1
--world-size | --world-size 4 | --dry-run --world-size two
--gpu-price | --dry-run --gpu-price -3 | --dry-run --gpu-price nan
--gpu-price | --gpu-price 2
--buckets | --dry-run --buckets 32 | --dry-run --lengths x.npy --buckets 0
--device | --device H100
--stop | --stop 3
seed | --set seed | seed.deeper=1
# the launcher
3 ranks | --dry-run --world-size 3
nothing.yaml | --config nothing.yaml
did you mean 'llama_1b_bucket'? (recipes: | --config llama_1b_buckets
did you mean 'h100'? (known: | --dry-run --device H1000
did you mean 'optimizer.lr'? | lr=1e-4
did you mean 'data.micro_batch_tokens'? | micro_batch_tokens=4096
# files that do not exist
nowhere | data.prefix=nowhere | data.index=nowhere.samples
nowhere | data.valid_prefix=nowhere
"""
LATE = """
# the data
--profile | --profile 100:200 | --profile 0:9
micro_batch_tokens | data.micro_batch_tokens=64
row_tokens | data.row_tokens=48
data.valid_prefix | evaluation.every=5 data.valid_prefix=null
# the model and the engine
zero_optimisation | engine.deepspeed.zero_optimisation.x=1
no_such_key | engine.deepspeed.no_such_key=1
stag | engine.deepspeed.zero_optimization.stag=1
reduce_bucket_size | engine.deepspeed.zero_optimization.reduce_bucket_size=x
devise | engine.deepspeed.zero_optimization.offload_optimizer.devise=cpu
verbos | engine.deepspeed.comms_logger.verbos=true
profile_stp | engine.deepspeed.flops_profiler.profile_stp=1
tag_validation | engine.deepspeed.checkpoint.tag_validation=Wran
communication_data_type | engine.deepspeed.communication_data_type=x
amp is set by engine.precision | engine.deepspeed.amp.enabled=true
curriculum_learning is set by data.order | engine.deepspeed.curriculum_learning.enabled=true
model | model.preset=null model.pretrained=./nowhere
nowhere | model.preset=null model.config=./nowhere
'qwen3' | model.preset=null model.config.model_type=qwen33
model.config.hiden_size | \
model.preset=null model.config.model_type=qwen3 model.config.hiden_size=64
tokenizer | model.tokenizer=./nowhere
vocabulary | model.vocab_size=10 model.vocab_multiple=1
largest bucket 128); pack into buckets of at most 64, or set \
model.overrides.max_position_embeddings=128 | model.overrides.max_position_embeddings=64
max_position_embeddings is 100, and the training data need 128 positions | \
model.preset=gpt2_tiny model.overrides.n_positions=100
attention_dropout | model.overrides.attention_dropout=0.1
"""


def _stage(**fields: Any) -> dict[str, Any]:
    return {"stages": [{"from_step": 3, **fields}]}


def _ramp(**fields: int) -> dict[str, Any]:
    return _stage(weights={"web": 1}, ramp={"until_step": 9, **fields})


BLENDS: list[tuple[str, dict[str, Any]]] = [
    ("surces", {"surces": []}),
    ("max_epochs", {"max_epochs": 0}),
    ("max_epochs", {"max_epochs": 0.01}),
    ("max_epochs", {"max_epochs": float("nan")}),
    ("from_stp", {"stages": [{"from_stp": 3}]}),
    ("from_step", {"stages": [{}]}),
    ("skip_steps", _stage(skip_steps=-1)),
    ("window_steps", _stage(window_steps=-1)),
    ("attention_window", _stage(attention_window=-8)),
    ("pieces", _ramp(pieces=0)),
    ("until_step", _ramp(until_step=-5)),
    ("web", _stage(weights={"web": -1})),
    ("web", _stage(loss_weights={"web": 0})),
    ("wep", _stage(weights={"wep": 1})),
    ("weights", _stage(weights={"web": float("nan")})),
    ("weights", _stage(weights={"web": True})),
    ("order", _stage(order="growp2")),
    ("attention_window", {"attention_window": -8}),
    ("micro_batch_tokens", _stage(tokens_per_step=640)),
]
SHARED, TWO = "engine.sequence_parallel_size=4", {"WORLD_SIZE": "2"}
CASES = [
    *_table(EARLY),
    # the launcher
    Case((), "3 ranks", environment={"WORLD_SIZE": "3"}),
    Case((), "RANK=5", environment={"RANK": "5", **TWO}),
    Case((), "WORLD_SIZE=two", environment={"WORLD_SIZE": "two"}),
    Case((), "MASTER_PORT", environment={"MASTER_PORT": ""}),
    Case((SHARED,), "sequence_parallel_size", environment=TWO),
    # the file
    Case((), "num_steps", yaml="run_dir: a\nnum_steps: 1\nnum_steps: 2\n"),
    Case((), "is not valid YAML", yaml="run_dir: [1\n"),
    Case((), "is not valid YAML", yaml=b"run_dir: \xff\xfe\n"),
    Case((), "mapping", yaml="- 1\n"),
    Case((), "missing key", yaml=""),
    *_table(LATE, late=True),
    *(Case((), named, late=True, blend=blend) for named, blend in BLENDS),
]


def run(case: Case, config: Path) -> dict[str, Any]:
    """Run a case in this process; return exit code, stderr, imports, seconds."""
    from megapack.training.pretrain import main  # noqa: PLC0415

    words = [part for word in case.words for part in _option(word)]
    sys.argv = ["megapack-pretrain", "--config", str(_config(case, config)), *words]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**ranks, "MASTER_PORT": "29599", **case.environment})
    with tempfile.TemporaryFile("w+") as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            code = main()
        except SystemExit as leaving:  # by the parser
            code = int(leaving.code or 0)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        lines = said.read().splitlines()
    return {
        "name": case.name,
        "code": code,
        "stderr": lines,
        "heavy": [name for name in HEAVY if name in sys.modules],
        "joined": "torch" in sys.modules and _joined(),
    }


def _option(word: str) -> Iterator[str]:
    """Return the ``a.b=c`` of --set."""
    key, equals, _ = word.partition("=")
    if equals and not key.startswith("-"):
        yield "--set"
    yield word


def _config(case: Case, config: Path) -> Path:
    """Write the configuration of a case."""
    path = config.with_name("wrong.yaml")
    if case.yaml is not None:
        path.write_bytes(case.yaml if isinstance(case.yaml, bytes) else case.yaml.encode())
    elif case.blend is not None:
        tree = yaml.safe_load(config.read_text())
        data = tree["data"]
        source = {"name": "web", "prefix": data.pop("prefix"), "index": data.pop("index")}
        data["blend"] = str(config.with_name("blend.yaml"))
        Path(data["blend"]).write_text(
            yaml.safe_dump({"sources": [{**source, "weight": 1.0}], **case.blend})
        )
        path.write_text(yaml.safe_dump(tree))
    else:
        return config
    return path


def _joined() -> bool:
    return bool(sys.modules["torch"].distributed.is_initialized())


if __name__ == "__main__":
    for one in CASES:
        if one.late == (sys.argv[2] == "late"):
            arguments = list(sys.argv)
            print(json.dumps(run(one, Path(sys.argv[1]))), flush=True)
            sys.argv = arguments

"""Configurations that cannot be, the key that the error must name, and when it is seen.

    wrong_configurations.py CONFIG early      # or late

gives every case that is seen early to ``main()`` of megapack-pretrain, in this one process, and
prints a JSON line for each: what happened, and which of the heavy packages were imported by then.
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
    """One wrong start."""

    words: tuple[str, ...]
    """``key=value`` for --set; the rest is the command line as it is."""
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


def _cases(named: str, *words: str, **more: Any) -> list[Case]:
    return [Case(tuple(text.split(" ")), named, **more) for text in words]


def _values(section: str, values: dict[str, str], **more: Any) -> list[Case]:
    """``field: "value value"``, each value for itself."""
    return [
        Case((f"{section}{name}={value}",), name, **more)
        for name, text in values.items()
        for value in text.split(" ")
    ]


def _ramp(**fields: int) -> dict[str, Any]:
    return {"from_step": 3, "weights": {"web": 1}, "ramp": {"until_step": 9, **fields}}


CASES = [
    # keys that are not known
    *_cases("num_step", "num_step=5"),
    *_cases("sed", "sed=1", "checkpoint.allow_change=[sed]"),
    *_cases("overides", "model.overides.x=1"),
    *_cases("tokens_per_stp", "data.tokens_per_stp=1024"),
    *_cases("momentum", "optimizer.momentum=0.9"),
    *_cases("warmup", "learning_rate.warmup=3"),
    *_cases("did you mean 'learning_rate'?", "schedule.kind=linear"),
    *_cases("did you mean 'attention_backend'?", "model.attention=eager"),
    *_cases("evry", "checkpoint.evry=3", "logging.evry=3", "evaluation.evry=3"),
    *_cases("zero", "engine.zero=1"),
    # numbers that are none, of another type, or outside of their range
    *_values(
        "",
        {
            "seed": "-1 99999999999999999999 true 1.5 .nan",
            "num_steps": "0 -4 2.5 true 9223372036854775807",
            "num_epochs": "0 9223372036854775807",
            "stop_at": "0 yes",
            "run_dir": "7 null ''",
        },
    ),
    *_values(
        "model.",
        {
            "vocab_size": "0 .inf 4611686018427387904",
            "vocab_multiple": "0 true 4611686018427387904",
            "overrides": "3",
            "attention_backend": "7",
        },
    ),
    *_values(
        "data.",
        {
            "tokens_per_step": "0 true 1e9 null 4611686018427387904",
            "micro_batch_tokens": "0 300 -256 null",
            "num_cycles": "0",
            "row_tokens": "0",
            "cost_window": "0 -3 9223372036854775807",
            "check_ranks_every": "-1 true",
            "verify": "1",
        },
    ),
    *_values(
        "optimizer.",
        {
            "lr": ".nan 0 -1e-3 .inf fast true 1e300",
            "betas": "[0.9] [0.9,1.0] [.nan,0.9] 0.9 [-0.1,0.9]",
            "eps": "0 .nan",
            "weight_decay": ".nan -0.1",
            "clip": ".nan -1 .inf",
            "max_skipped": "-1",
            "decay_embeddings": "1",
        },
    ),
    *_values(
        "learning_rate.",
        {
            "warmup_steps": "-1",
            "warmup_fraction": "1.5 .nan",
            "min_ratio": "-0.1 .nan",
            "decay_fraction": "2",
        },
    ),
    *_values("checkpoint.", {"every": "0", "keep": "0 true", "asynchronous": "2"}),
    *_cases("steps_per_print", "engine.deepspeed.steps_per_print=0"),
    *_values("evaluation.", {"every": "0", "max_tokens": "-1", "buckets": "[0] 32 [true]"}),
    *_values("logging.", {"every": "0", "tensorboard": "maybe", "wandb_project": "7"}),
    *_values(
        "engine.",
        {
            "zero_stage": "true 4 1.0",
            "sequence_parallel_size": "0 2",
            "loss_chunk_tokens": "0",
            "mlp_chunk_tokens": "0",
            "timeout_minutes": "0 .nan 1e300",
            "silence_seconds": "-1",
            "stall_seconds": ".inf",
        },
    ),
    # names of which there are a few
    *_cases("preset", "model.preset=llama_tny", "model.preset=null", "model.pretrained=x"),
    *_cases("config", "model.config=x", "model.preset=null model.config.hidden_size=64"),
    *_cases("order", "data.order=propotional"),
    *_cases("mix", "data.mix=micro"),
    *_cases("positions", "data.positions=documents"),
    *_cases("attention", "data.attention=docs"),
    *_cases("label_boundary", "data.label_boundary=turns"),
    *_cases("uneven", "data.uneven=skip"),
    *_cases("kind", "learning_rate.kind=cosin"),
    *_cases("resume", "checkpoint.resume=always"),
    *_cases("allow_change", "checkpoint.allow_change=seed"),
    *_cases("verify", "checkpoint.verify=md5"),
    *_cases("precision", "engine.precision=fp16"),
    # what does not go together
    *_cases("micro_step_tokens", "data.mix=micro_step", "data.micro_step_tokens=256"),
    *_cases("micro_step_tokens", "data.mix=micro_step data.micro_step_tokens=300"),
    *_cases("prefix", "data.prefix=null", "data.index=null", "data.blend=blend.yaml"),
    *_cases("valid_index", "data.valid_prefix=null data.valid_index=x"),
    *_cases("data", "data=3"),
    *_cases("mlp_chunk_tokens", "engine.mlp_chunk_tokens=64 engine.compile=true"),
    *_cases("offload_activations", "engine.offload_activations=true"),
    *_cases(
        "offload_activations",
        "engine.offload_activations=true engine.activation_checkpointing=true engine.compile=true",
    ),
    *_cases("wandb", "logging.wandb_project=mine"),
    # of DeepSpeed's configuration, what is decided elsewhere
    *_cases("tokens_per_step", "engine.deepspeed.train_batch_size=9"),
    *_cases("micro_batch_tokens", "engine.deepspeed.train_micro_batch_size_per_gpu=2"),
    *_cases("gradient_accumulation_steps", "engine.deepspeed.gradient_accumulation_steps=2"),
    *_cases("optimizer.clip", "engine.deepspeed.gradient_clipping=1.0"),
    *_cases("optimizer", "engine.deepspeed.optimizer.type=Adam"),
    *_cases("scheduler", "engine.deepspeed.scheduler.type=WarmupLR"),
    *_cases("engine.zero_stage", "engine.deepspeed.zero_optimization.stage=3"),
    *_cases("engine.precision", "engine.deepspeed.fp16.enabled=true"),
    *_cases("engine.precision", "engine.deepspeed.bf16.enabled=false"),
    *_cases("torch_autocast", "engine.deepspeed.torch_autocast.enabled=true"),
    *_cases("data_types", "engine.deepspeed.data_types.grad_accum_dtype=bf16"),
    *_cases("sequence_parallel_size", "engine.deepspeed.sequence_parallel_size=2"),
    *_cases("gradient_allreduce_op", "engine.deepspeed.gradient_allreduce_op=sum"),
    *_values("engine.deepspeed.", {"zero_optimization": "3 true null", "checkpoint": "[]"}),
    *_cases("zero_optimization", "optimizer.kind=muon engine.deepspeed.zero_optimization=3"),
    *_cases("load_universal", "engine.deepspeed.checkpoint.load_universal=true"),
    # the command line
    *_cases("--profile", "--profile 5", "--profile 5:3", "--profile a:b"),
    *_cases("--profile", "--dry-run --profile 0:1"),
    *_cases("--world-size", "--dry-run --world-size 0", "--dry-run --world-size -1"),
    *_cases("--world-size", "--world-size 4", "--dry-run --world-size two"),
    *_cases("--gpu-price", "--dry-run --gpu-price -3", "--dry-run --gpu-price nan"),
    *_cases("--gpu-price", "--gpu-price 2"),
    *_cases("--buckets", "--dry-run --buckets 32", "--dry-run --lengths x.npy --buckets 0"),
    *_cases("--device", "--device H100"),
    *_cases("--stop", "--stop 3"),
    *_cases("seed", "--set seed", "seed.deeper=1"),
    # the launcher
    *_cases("3 ranks", "--dry-run --world-size 3"),
    Case((), "3 ranks", environment={"WORLD_SIZE": "3"}),
    Case((), "RANK=5", environment={"RANK": "5", "WORLD_SIZE": "2"}),
    Case((), "WORLD_SIZE=two", environment={"WORLD_SIZE": "two"}),
    Case((), "MASTER_PORT", environment={"MASTER_PORT": ""}),
    Case(
        ("engine.sequence_parallel_size=4",),
        "sequence_parallel_size",
        environment={"WORLD_SIZE": "2"},
    ),
    # the file
    Case((), "num_steps", yaml="run_dir: a\nnum_steps: 1\nnum_steps: 2\n"),
    Case((), "is not valid YAML", yaml="run_dir: [1\n"),
    Case((), "is not valid YAML", yaml=b"run_dir: \xff\xfe\n"),
    Case((), "mapping", yaml="- 1\n"),
    Case((), "missing key", yaml=""),
    *_cases("nothing.yaml", "--config nothing.yaml"),
    *_cases("did you mean 'llama_1b_bucket'? (recipes: ", "--config llama_1b_buckets"),
    # the data
    *_cases("--profile", "--profile 100:200", "--profile 0:9", late=True),
    *_cases("nowhere", "data.prefix=nowhere", "data.index=nowhere.samples", late=True),
    *_cases("nowhere", "data.valid_prefix=nowhere", late=True),
    *_cases("micro_batch_tokens", "data.micro_batch_tokens=64", late=True),
    *_cases("row_tokens", "data.row_tokens=48", late=True),
    *[
        Case((), named, late=True, blend=blend)
        for named, blend in (
            ("surces", {"surces": []}),
            ("max_epochs", {"max_epochs": 0}),
            ("max_epochs", {"max_epochs": 0.01}),
            ("max_epochs", {"max_epochs": float("nan")}),
            ("from_stp", {"stages": [{"from_stp": 3}]}),
            ("from_step", {"stages": [{}]}),
            ("skip_steps", {"stages": [{"from_step": 3, "skip_steps": -1}]}),
            ("window_steps", {"stages": [{"from_step": 3, "window_steps": -1}]}),
            ("attention_window", {"stages": [{"from_step": 3, "attention_window": -8}]}),
            ("pieces", {"stages": [_ramp(pieces=0)]}),
            ("until_step", {"stages": [_ramp(until_step=-5)]}),
            ("web", {"stages": [{"from_step": 3, "weights": {"web": -1}}]}),
            ("web", {"stages": [{"from_step": 3, "loss_weights": {"web": 0}}]}),
            ("wep", {"stages": [{"from_step": 3, "weights": {"wep": 1}}]}),
            ("weights", {"stages": [{"from_step": 3, "weights": {"web": float("nan")}}]}),
            ("weights", {"stages": [{"from_step": 3, "weights": {"web": True}}]}),
            ("order", {"stages": [{"from_step": 3, "order": "growp2"}]}),
            ("attention_window", {"attention_window": -8}),
            ("micro_batch_tokens", {"stages": [{"from_step": 3, "tokens_per_step": 640}]}),
        )
    ],
    *_cases("data.valid_prefix", "evaluation.every=5 data.valid_prefix=null", late=True),
    # the model and the engine
    *_cases("zero_optimisation", "engine.deepspeed.zero_optimisation.x=1", late=True),
    *_cases("no_such_key", "engine.deepspeed.no_such_key=1", late=True),
    *_cases("stag", "engine.deepspeed.zero_optimization.stag=1", late=True),
    *_cases(
        "reduce_bucket_size", "engine.deepspeed.zero_optimization.reduce_bucket_size=x", late=True
    ),
    *_cases("devise", "engine.deepspeed.zero_optimization.offload_optimizer.devise=cpu", late=True),
    *_cases("verbos", "engine.deepspeed.comms_logger.verbos=true", late=True),
    *_cases("profile_stp", "engine.deepspeed.flops_profiler.profile_stp=1", late=True),
    *_cases("tag_validation", "engine.deepspeed.checkpoint.tag_validation=Wran", late=True),
    *_cases("communication_data_type", "engine.deepspeed.communication_data_type=x", late=True),
    *_cases("AMP", "engine.deepspeed.amp.enabled=true", late=True),
    *_cases("model", "model.preset=null model.pretrained=./nowhere", late=True),
    *_cases("nowhere", "model.preset=null model.config=./nowhere", late=True),
    *_cases("'qwen3'", "model.preset=null model.config.model_type=qwen33", late=True),
    *_cases(
        "model.config.hiden_size",
        "model.preset=null model.config.model_type=qwen3 model.config.hiden_size=64",
        late=True,
    ),
    *_cases("tokenizer", "model.tokenizer=./nowhere", late=True),
    *_cases("vocabulary", "model.vocab_size=10 model.vocab_multiple=1", late=True),
    *_cases(
        "largest bucket 128); pack into buckets of at most 64, or set "
        "model.overrides.max_position_embeddings=128",
        "model.overrides.max_position_embeddings=64",
        late=True,
    ),
    *_cases(
        "max_position_embeddings is 100, and the training data need 128 positions",
        "model.preset=gpt2_tiny model.overrides.n_positions=100",
        late=True,
    ),
    *_cases("attention_dropout", "model.overrides.attention_dropout=0.1", late=True),
]


def run(case: Case, config: Path) -> dict[str, Any]:
    """One case in this process: exit code, stderr, what was imported, seconds."""
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
        except SystemExit as leaving:  # of the parser
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
    """``a.b=c`` behind --set."""
    key, equals, _ = word.partition("=")
    if equals and not key.startswith("-"):
        yield "--set"
    yield word


def _config(case: Case, config: Path) -> Path:
    """The configuration of a case, beside that which it changes."""
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

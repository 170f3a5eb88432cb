"""Steps of numpy arrays for JAX: without torch, resumable, and trained on by the example."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import PYTHON, ended

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.errors import ConfigError, ResumeError
from megapack.integrations.dialects import GRAIN, MAXTEXT
from megapack.integrations.hosts.jax import PackedSteps
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

ROW, STEP = 64, 256
EXAMPLE = Path(__file__).parents[2] / "examples/jax_loop.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards, of 2 to 64 tokens, in buckets of 16 to 64."""
    prefix = tmp_path_factory.mktemp("jax") / "text"
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=1000) as builder:
        for length in np.minimum(rng.lognormal(3.0, 0.8, 400).astype(int) + 2, 150):
            builder.add_document((rng.integers(50) + np.arange(length)) % 50)
    dataset = IndexedDataset(prefix)
    index = pack(dataset.document_lengths, buckets=[16, 32, ROW])
    index.save(prefix.with_suffix(".samples"), source=dataset)
    return prefix


def opened(corpus: Path, framework: Any = "numpy", **options: Any) -> tuple[Any, Schedule]:
    dataset = PackedDataset(corpus, corpus.with_suffix(".samples"), framework=framework, **options)
    return dataset, Schedule(dataset, tokens_per_step=STEP, row_tokens=ROW)


STEPS_WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import numpy as np
from megapack import PackedDataset, Schedule
from megapack.data import build_loader
from megapack.integrations.hosts.jax import PackedSteps
data = PackedDataset(sys.argv[1], sys.argv[1] + ".samples", framework="numpy", num_mtp_targets=1)
schedule = Schedule(data, tokens_per_step=256, row_tokens=64)
options = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_tokens": 256}
batches = list(build_loader(data, schedule, **options))
assert len(batches) > 5 and all(isinstance(b["mtp_labels"], np.ndarray) for b in batches)
data = PackedDataset(sys.argv[1], sys.argv[1] + ".samples", framework="numpy")
steps = list(PackedSteps(data, Schedule(data, tokens_per_step=256, row_tokens=64)))
assert len(steps) == len(batches) and steps[0]["inputs"].shape == (4, 64)
assert "torch" not in sys.modules
"""


def test_batches_and_steps_of_numpy_never_import_torch(corpus: Path) -> None:
    ended(*PYTHON, STEPS_WITHOUT_TORCH, str(corpus))


@pytest.mark.parametrize("layout", ["stream", "rows"])
@pytest.mark.parametrize("options", [{}, {"num_mtp_targets": 2}, {"attention": "sample"}])
def test_arrays_hold_what_tensors_hold(corpus: Path, layout: Any, options: Any) -> None:
    def batches(framework: str) -> list[dict[str, Any]]:
        dataset, schedule = opened(corpus, framework, **options)
        ranks = {"data_parallel_rank": 1, "data_parallel_size": 2}
        return list(build_loader(dataset, schedule, micro_batch_tokens=128, layout=layout, **ranks))

    of_arrays, of_tensors = batches("numpy"), batches("torch")
    assert len(of_arrays) == len(of_tensors) > 5
    for arrays, tensors in zip(of_arrays, of_tensors, strict=True):
        assert arrays.keys() == tensors.keys()
        for name, value in arrays.items():
            assert type(value) in (np.ndarray, int, float), name
            assert np.array_equal(value, tensors[name]), name
            assert not isinstance(value, np.ndarray) or value.dtype == tensors[name].numpy().dtype


@pytest.mark.parametrize("dialect", [MAXTEXT, GRAIN], ids=lambda dialect: dialect.name)
def test_the_processes_of_a_step_have_its_rows_once(corpus: Path, dialect: Any) -> None:
    dataset, schedule = opened(corpus)
    alone = list(PackedSteps(dataset, schedule, dialect=dialect))
    shared = [
        list(
            PackedSteps(
                dataset, schedule, dialect=dialect, data_parallel_rank=i, data_parallel_size=2
            )
        )
        for i in range(2)
    ]
    for step, *parts in zip(alone, *shared, strict=True):
        # Ranks share samples, not rows, so compare the tokens with all that belongs to them.
        together = {name: np.concatenate([part[name] for part in parts]) for name in step}
        names = [name for name in step if "segment" not in name]
        contents = [sorted(zip(*(x[n].flat for n in names), strict=True)) for x in (step, together)]
        assert contents[0] == contents[1]
        assert {value.dtype for value in step.values()} == {np.dtype(np.int32)}
    assert {value.shape for step in alone for value in step.values()} == {(4, ROW)}


def test_a_state_continues_with_the_next_step_on_other_processes(corpus: Path) -> None:
    dataset, schedule = opened(corpus)
    whole = list(PackedSteps(dataset, schedule, num_steps=9))
    steps = PackedSteps(dataset, schedule, num_steps=9)
    for _ in range(4):
        next(steps)
    state = json.loads(json.dumps(steps.get_state()))
    resumed = PackedSteps(dataset, schedule, num_steps=9)
    resumed.set_state(state)
    later = list(resumed)
    assert len(later) == 5 and resumed.step == 9
    for expected, step in zip(whole[4:], later, strict=True):
        assert all(np.array_equal(step[name], expected[name]) for name in expected)
    halves = PackedSteps(dataset, schedule, num_steps=9, data_parallel_rank=1, data_parallel_size=2)
    halves.set_state(state)
    assert next(halves)["inputs"].shape == (2, ROW)
    other = Schedule(dataset, tokens_per_step=STEP, row_tokens=ROW, seed=7)
    with pytest.raises(ResumeError, match="seed"):
        PackedSteps(dataset, other).set_state(state)
    for damaged in (None, {}, {**state, "step": "x"}, {**state, "data.content": 1}):
        with pytest.raises(ResumeError, match=r"is damaged|this is not the state"):
            resumed.set_state(damaged)  # type: ignore[arg-type]
    steps.close()
    halves.close()


def test_a_state_of_other_bytes_is_refused(corpus: Path, tmp_path: Path) -> None:
    state = json.loads(json.dumps(PackedSteps(*opened(corpus)).get_state()))
    documents, other = IndexedDataset(corpus), tmp_path / "text"
    with IndexedDatasetBuilder(other, documents.dtype, vocab_size=1000) as builder:
        builder.add_documents(documents.tokens ^ 1, np.cumsum([0, *documents.document_lengths]))
    index = pack(documents.document_lengths, buckets=[16, 32, ROW])
    index.save(other.with_suffix(".samples"), source=IndexedDataset(other))
    steps = PackedSteps(*opened(other))
    with pytest.raises(ResumeError, match=r"data\.content was .* and is .*"):
        steps.set_state(state)
    steps.set_state(steps.get_state())


def test_what_jax_cannot_use_is_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="framework is 'jax'; it must be 'torch' or 'numpy'"):
        opened(corpus, "jax")
    dataset, schedule = opened(corpus)
    with pytest.raises(ConfigError, match="leave both out, and copy"):
        build_loader(
            dataset,
            schedule,
            micro_batch_tokens=STEP,
            data_parallel_rank=0,
            data_parallel_size=1,
            device="cpu",
        )
    with pytest.raises(ConfigError, match="open it with framework='numpy'"):
        PackedSteps(*opened(corpus, "torch"))
    with pytest.raises(ConfigError, match=f"add row_tokens={ROW}"):
        PackedSteps(dataset, Schedule(dataset, tokens_per_step=STEP))
    for size in (3, 8, 0, -1):
        with pytest.raises(ConfigError) as refusal:
            PackedSteps(dataset, schedule, data_parallel_size=size)
        text = str(refusal.value)
        assert f"data_parallel_size is {size}, and a step has 4 rows of 64 tokens" in text
        assert "one of [1, 2, 4]" in text and f"multiple of {max(1, size) * ROW}" in text
        assert "micro_batch_tokens" not in text, "PackedSteps has no such argument"
    for wrong in ({"data_parallel_size": "2"}, {"data_paralel_rank": 0}):
        with pytest.raises(ConfigError, match=r"PackedSteps: .*data_paral"):
            PackedSteps(dataset, schedule, **wrong)
    mixed = Schedule(
        dataset, tokens_per_step=STEP, row_tokens=ROW, mix="micro_step", micro_step_tokens=128
    )
    with pytest.raises(ConfigError, match="mix: step"):
        PackedSteps(dataset, mixed)


def test_the_example_learns_and_documents_alone_equal_their_rows(corpus: Path) -> None:
    jax = pytest.importorskip("jax")
    example = runpy.run_path(str(EXAMPLE))
    sizes = ["--tokens-per-step", "512", "--row-tokens", str(ROW), "--steps", "20"]
    losses = example["main"]([str(corpus), f"{corpus}.samples", *sizes])
    assert len(losses) == 20
    assert losses[0] == pytest.approx(np.log(1000), rel=0.15), "an untrained model knows nothing"
    assert max(losses[-3:]) < 0.9 * losses[0]

    parameters = example["initialize"](1000, ROW)
    forward = jax.jit(example["forward"])
    step = next(PackedSteps(*opened(corpus)))
    names = ("inputs", "inputs_position", "inputs_segmentation")
    tokens, positions, segmentation = (step[name] for name in names)
    packed = np.asarray(forward(parameters, tokens, positions, segmentation))
    num_documents = 0
    for row, numbers in enumerate(segmentation):
        for number in set(numbers.tolist()) - {0}:
            places = np.flatnonzero(numbers == number)
            alone = (tokens[row, places][None], np.arange(len(places))[None])
            logits = example["forward"](parameters, *alone, np.ones((1, len(places)), np.int32))
            assert np.abs(packed[row, places] - np.asarray(logits)[0]).max() < 1e-5
            num_documents += 1
    assert num_documents > len(tokens), "no row has two documents: nothing is compared"

"""Faults that the tests must notice: ``make mutants``, ``ONLY=name,... JOBS=2 make mutants``.

Each mutant is one small wrong edit of the product. It is applied to a copy of the tree, the copy is
built (one object), and the tests of its module are run there until the first one fails. A mutant
that all of them pass is a hole in the tests. Before, the same tests pass on a copy without any.

A mutant whose old text is not in its file exactly once is stale: give it the text that says the
same now, or another fault of the same idea. ``test_mutants.py`` looks for stale ones in every run
of the tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 900  # for the tests of a mutant; a hang is noticed, too
LEFT_OUT = (".git", ".venv*", "runs", "demo", "dist", "docs", "sanitizers", ".hypothesis")
NOTICED = "killed"


@dataclass(frozen=True)
class Mutant:
    """``old``, which is in ``file`` once, becomes ``new``; ``tests`` are paths and more arguments
    of pytest, and ``breaks`` says what would be wrong."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    breaks: str


# --- running them -------------------------------------------------------------------------------


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A tree with its built objects, of which one that changes is built again."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield copy


def finish(command: Sequence[str], cwd: Path, log: Path) -> int | None:
    """Exit status; None: it took longer than SECONDS. All that it started ends with it."""
    env = {**os.environ, "PYTHONPATH": str(cwd)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tried(copy: Path, tests: Sequence[str], build: bool) -> str:
    """What becomes of the tests in a copy: ``survived``, ``killed`` or ``broken``, and the log."""
    log = copy.parent / "log"
    if build:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        if finish(command, copy, log) != 0:
            return f"broken: it does not compile\n{log.read_text()[-2000:]}"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    status = finish([sys.executable, "-m", "pytest", *options, *tests], copy, log)
    if status == 0:
        return "survived"
    if status in (2, 3, 4, 5):  # of pytest: not a test that failed
        return f"broken: its tests do not run\n{log.read_text()[-2000:]}"
    return NOTICED


def judge(mutant: Mutant, root: Path) -> str:
    """``killed``, ``survived``, ``stale``, or ``broken`` and why."""
    with copy_of(root) as copy:
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"stale: its old text is {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new))
        return tried(copy, mutant.tests.split(), mutant.file.startswith("csrc"))


def run(mutants: Sequence[Mutant], root: Path, jobs: int) -> bool:
    """Print what becomes of each; whether all were killed."""
    paths = sorted({word for mutant in mutants for word in mutant.tests.split() if "/" in word})
    with copy_of(root) as copy:
        before = tried(copy, paths, (root / "csrc").exists())
    if before != "survived":
        print(f"the tests fail without any mutant: {before}")
        return False
    results = []
    width = max(len(mutant.name) for mutant in mutants)

    def one(mutant: Mutant) -> None:
        begin = time.monotonic()
        result = judge(mutant, root)
        results.append(result)
        spent = f"{time.monotonic() - begin:4.0f} s"
        print(f"{mutant.name:{width}}  {spent}  {result:8}  {mutant.breaks}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, mutants))
    print(f"{results.count(NOTICED)} of {len(mutants)} killed")
    return results == [NOTICED] * len(mutants)


# --- the list -----------------------------------------------------------------------------------

SCHEDULE = "tests/data/test_schedule.py tests/data/test_programs.py tests/data/test_stages.py"
DEALING = "tests/data/test_sampler.py tests/data/test_sequence_parallel.py"
GATHER = "tests/data/test_gather.py"
MASKING = "tests/data/test_exclusions.py"
RESUME = "tests/data/test_resume.py tests/data/test_stages.py"
STRATEGIES = "tests/packing/test_packing_strategies.py tests/packing/test_packing_laws.py"
PLANNER = "tests/planning"
BUILD = "tests/tokenization/build/test_plan.py"

MUTANTS = [
    # The order of buckets, the blend and the shuffle.
    Mutant(
        "bucket_key",
        "csrc/core/schedule/cycle_order.cpp",
        "Bucket bucket{counts[b], random_bits(key, b), 0.0,",
        "Bucket bucket{counts[b], random_bits(key, 0), 0.0,",
        SCHEDULE,
        "buckets of equal counts are drawn at the same times",
    ),
    Mutant(
        "first_swap_inverse",
        "csrc/core/schedule/cycle_order.cpp",
        "if (rank < moved) return unswapped_position(bucket, rank + 1);",
        "if (rank < moved) return unswapped_position(bucket, rank);",
        SCHEDULE + " tests/data/test_trace.py",
        "the steps of a sample, where the largest bucket was put first",
    ),
    Mutant(
        "first_swap_counts",
        "csrc/core/schedule/cycle_order.cpp",
        "if (0 < end && end <= swapped_at_) {",
        "if (0 < end && end < swapped_at_) {",
        SCHEDULE,
        "a cursor, at the draw where the largest bucket would have come",
    ),
    Mutant(
        "blend_rounding",
        "csrc/core/schedule/blend.cpp",
        "kBelowHalf = (std::uint64_t{1} << 63) - 1;",
        "kBelowHalf = (std::uint64_t{1} << 63);",
        "tests/data/test_blend_bound.py tests/data/test_programs.py",
        "ties between two sources go to the other one",
    ),
    Mutant(
        "blend_heavy_cursor",
        "csrc/core/schedule/blend.cpp",
        "{node.heavy, visit.begin - before.light, visit.places",
        "{node.heavy, visit.begin - light, visit.places",
        "tests/data/test_blend_bound.py tests/data/test_programs.py",
        "the heavier source begins a range at a wrong sample",
    ),
    Mutant(
        "blend_share_carry",
        "csrc/core/schedule/blend.cpp",
        "next < rest;  // a carry",
        "next <= rest;  // a carry",
        "tests/data/test_blend_bound.py tests/data/test_blend.py",
        "a source of weight 0 is drawn",
    ),
    Mutant(
        "shuffle_of_range",
        "csrc/core/schedule/permute.cpp",
        "epoch = (run.begin + done) / run.size;",
        "epoch = run.begin / run.size;",
        SCHEDULE,
        "a draw over the end of an epoch goes on in the old shuffle",
    ),
    Mutant(
        "shuffle_cycle_walk",
        "csrc/core/schedule/permute.cpp",
        "x = encrypt(x);\n        } while (x >= size_);",
        "x = encrypt(x);\n        } while (x > size_);",
        "tests/data/test_schedule.py tests/data/test_trace.py",
        "a sample that does not exist is drawn, in buckets of more than 1024",
    ),
    Mutant(
        "shuffle_inverse_rounds",
        "csrc/core/schedule/permute.cpp",
        "for (int i = 2 * kRounds; i > 0; i -= 2) {",
        "for (int i = 2 * kRounds; i > 2; i -= 2) {",
        "tests/data/test_trace.py",
        "the steps of a sample, in large buckets",
    ),
    Mutant(
        "shuffle_key",
        "megapack/data/streams.py",
        "return fold_key(seed, 1, capacity, dataset)",
        "return fold_key(seed, 1, dataset)",
        SCHEDULE,
        "buckets of as many samples are shuffled alike",
    ),
    Mutant(
        "draws_of_cycle",
        "megapack/data/draws.py",
        "return -(-samples // (self.num_cycles * self.samples_per_draw[bucket]))",
        "return samples // (self.num_cycles * self.samples_per_draw[bucket])",
        "tests/data/test_draws.py tests/data/test_schedule.py",
        "the last samples of an epoch come an epoch later",
    ),
    Mutant(
        "cycle_key",
        "megapack/data/draws.py",
        "key = fold_key(draws.seed, 2, cycle)",
        "key = fold_key(draws.seed, 2)",
        "tests/data/test_draws.py " + SCHEDULE,
        "every epoch draws buckets in the same order",
    ),
    # Programs: stages, ramps, cursors.
    Mutant(
        "stage_key",
        "megapack/data/stage.py",
        "seed=fold_key(seed, 4, self.begin) if self.begin else seed,",
        "seed=seed,",
        SCHEDULE,
        "stages repeat the order of the first one",
    ),
    Mutant(
        "stage_largest",
        "megapack/data/stage.py",
        "largest_first=self.buckets[-1].capacity > largest,",
        "largest_first=self.buckets[-1].capacity >= largest,",
        SCHEDULE,
        "every stage begins with the largest bucket",
    ),
    Mutant(
        "stage_cursors",
        "megapack/data/stage.py",
        "zip(keys, (stream.starts + stream.taken(end)).tolist(), strict=True)",
        "zip(keys, stream.taken(end).tolist(), strict=True)",
        SCHEDULE,
        "the third stage draws again what the first has drawn",
    ),
    Mutant(
        "stage_skips",
        "megapack/data/stage.py",
        "cursors = stages[-1].cursors(settings.begin + settings.skip_steps)",
        "cursors = stages[-1].cursors(settings.begin)",
        SCHEDULE,
        "skipped samples are drawn after all",
    ),
    Mutant(
        "stage_tokens",
        "megapack/data/resolve.py",
        "return last.begin + -(-missing // last.config.tokens_per_step)",
        "return last.begin + missing // last.config.tokens_per_step",
        SCHEDULE,
        "a stage from a number of tokens begins a step early",
    ),
    Mutant(
        "stage_other_order",
        "megapack/data/resolve.py",
        'changes.setdefault("num_cycles", None)',
        'changes.setdefault("num_cycles", before.num_cycles)',
        SCHEDULE,
        "a new order keeps the number of cycles of the old one",
    ),
    Mutant(
        "steps_of_epochs",
        "megapack/data/schedule.py",
        "return stage.begin + ceil(missing * stage.steps_per_epoch)",
        "return stage.begin + int(missing * stage.steps_per_epoch)",
        "tests/data/test_stages.py",
        "an epoch that ends inside a stage lacks its last step",
    ),
    Mutant(
        "ramp_mean",
        "megapack/data/ramp.py",
        "return (low + high) / (2 * length)",
        "return low / length",
        "tests/data/test_ramp.py",
        "a ramp lags by half a piece",
    ),
    Mutant(
        "window_growth",
        "megapack/data/window.py",
        "grown = (self.last - self.first) * passed // (unit * self.steps)",
        "grown = (self.last - self.first) * (passed + 1) // (unit * self.steps)",
        "tests/data/test_window.py",
        "an attention window grows a step early",
    ),
    Mutant(
        "times_of_samples",
        "megapack/data/epochs.py",
        "return epoch + (self.places(epoch, samples) < place)",
        "return epoch + (self.places(epoch, samples) <= place)",
        "tests/data/test_unseen.py",
        "the document that comes next counts as seen",
    ),
    # Dealing: equal work.
    Mutant(
        "no_exchange",
        "csrc/core/schedule/deal.cpp",
        "    dealer.exchange();\n",
        "",
        DEALING,
        "work is less equal than it can be",
    ),
    Mutant(
        "exchanged_loads",
        "csrc/core/schedule/deal.cpp",
        "        loads_[from] -= moved;\n",
        "",
        DEALING,
        "exchanges go on from a load that is gone",
    ),
    Mutant(
        "shortest_first",
        "csrc/core/schedule/deal.cpp",
        "return cost(a) > cost(b); });",
        "return cost(a) < cost(b); });",
        DEALING,
        "the costliest samples are dealt last, when nothing makes up for them",
    ),
    Mutant(
        "ranks_of_group",
        "megapack/data/sampler.py",
        "dealt.micro_batches(self.data_parallel_rank // shared)",
        "dealt.micro_batches(self.data_parallel_rank % (self.data_parallel_size // shared))",
        DEALING,
        "ranks that share a sample are not beside each other",
    ),
    Mutant(
        "work_of_ranks",
        "megapack/data/sampler.py",
        "rows.append(np.repeat(dealt.loads_of_micro_batches / shared, shared, axis=1))",
        "rows.append(np.tile(dealt.loads_of_micro_batches / shared, (1, shared)))",
        DEALING,
        "the work of one group is told of another",
    ),
    Mutant(
        "heaviest_first",
        "megapack/data/dealing.py",
        'groups[np.argsort(-costs[groups].sum(axis=1), kind="stable")]',
        'groups[np.argsort(costs[groups].sum(axis=1), kind="stable")]',
        DEALING,
        "the heaviest micro batch of a step comes last",
    ),
    Mutant(
        "window_cost",
        "megapack/data/counting.py",
        "(n % window) ** 2",
        "(n % window) * window",
        "tests/data/test_window.py",
        "the last piece of a segment costs as much as a whole one",
    ),
    # The gather.
    Mutant(
        "label_zero",
        "csrc/core/gather/kernels.cpp",
        "to[i] = label < 0 ? kNoLabel : label;",
        "to[i] = label <= 0 ? kNoLabel : label;",
        GATHER,
        "id 0 is never learned where labels are chosen",
    ),
    Mutant(
        "label_zero_counted",
        "csrc/core/gather/kernels.cpp",
        "total += static_cast<std::int64_t>(chosen[i]) >= 0;",
        "total += static_cast<std::int64_t>(chosen[i]) > 0;",
        GATHER,
        "the denominator lacks labels of id 0",
    ),
    Mutant(
        "label_of_cut",
        "csrc/core/gather/plan.cpp",
        "if (!segment.ends_document) return segment.token_begin + segment.length;",
        "if (!segment.ends_document) return segment.token_begin + segment.length - 1;",
        GATHER,
        "the last token of a cut document predicts itself",
    ),
    Mutant(
        "masked_last_label",
        "csrc/core/gather/fill.cpp",
        "piece.last_label_at, 1, labels + body);\n        mask[body] = 1.0F;",
        "piece.last_label_at, 1, labels + body);\n        mask[body] = 0.0F;",
        GATHER,
        "the last token of a cut document has a label that does not count",
    ),
    Mutant(
        "positions_of_documents",
        "csrc/core/gather/plan.cpp",
        "if (options_.positions == Positions::kDocument) first_position = segment.begin;",
        "if (options_.positions == Positions::kDocument) first_position = segment.token_begin;",
        GATHER,
        "positions count from the begin of the file",
    ),
    Mutant(
        "rows_of_cu_seqlens",
        "csrc/core/gather/plan.cpp",
        "if (per_row && at > 0 && at % plan.shape.row_tokens == 0)",
        "if (per_row && at > 0 && at % plan.shape.capacity == 0)",
        GATHER,
        "boundaries begin anew inside of a row",
    ),
    Mutant(
        "longest_room",
        "csrc/core/gather/plan.cpp",
        "longest = std::max(longest, segment.room);",
        "longest = std::max(longest, segment.length);",
        GATHER,
        "max_seqlen is smaller than an aligned segment",
    ),
    Mutant(
        "last_list",
        "csrc/core/gather/source.cpp",
        "source.excluded_by[at - source.excluded.begin()] <= lists;",
        "source.excluded_by[at - source.excluded.begin()] < lists;",
        MASKING,
        "documents of the newest list are still seen",
    ),
    Mutant(
        "cut_label_ahead",
        "csrc/core/gather/read_ahead.cpp",
        "segment.length + (segment.ends_document ? 0 : 1);",
        "segment.length;",
        "tests/data/test_read_ahead.py",
        "the label behind a cut is not asked for ahead",
    ),
    # Exclusions, resume, sources of many shards.
    Mutant(
        "list_digest",
        "megapack/data/exclusions.py",
        'f"{len(masked)} documents, xxh3 {digest}"',
        'f"{len(masked)} documents, xxh3 "',
        MASKING,
        "an edited list of as many documents passes for the old one",
    ),
    Mutant(
        "list_in_force",
        "megapack/data/exclusions.py",
        "(known[at] == documents) & (self.lists[source][at] <= num_lists)",
        "(known[at] == documents) & (self.lists[source][at] < num_lists)",
        MASKING,
        "work and labels are counted with documents of the newest list",
    ),
    Mutant(
        "past_sources",
        "megapack/data/resume.py",
        'if stage["from_step"] < step)',
        'if stage["from_step"] <= step)',
        RESUME,
        "a source that joins at the present step is refused",
    ),
    Mutant(
        "resumed_tokens",
        "megapack/data/resume.py",
        '+ missing // int(begin["tokens_per_step"])',
        '+ -(-missing // int(begin["tokens_per_step"]))',
        RESUME,
        "a step that was half seen is passed over",
    ),
    Mutant(
        "middle_of_step",
        "megapack/data/sampler.py",
        'int(state["step"]), int(state["micro_step"])',
        'int(state["step"]), 0',
        "tests/data/test_loader_processes.py tests/data/test_resume.py",
        "micro batches of a step that was begun come again",
    ),
    Mutant(
        "shard_of_sample",
        "csrc/core/gather/source.cpp",
        "std::upper_bound(runs.first_ids.begin(), runs.first_ids.end(), id);",
        "std::lower_bound(runs.first_ids.begin(), runs.first_ids.end(), id);",
        "tests/data/test_sharded_source.py",
        "the first sample of a shard is looked for in the one before",
    ),
    # Reading ahead of a store.
    Mutant(
        "asked_one_by_one",
        "megapack/data/fetch_ahead.py",
        "            num_asked = most\n",
        "            num_asked = 1\n",
        "tests/data/test_fetch_ahead.py",
        "every micro batch makes requests of its own",
    ),
    Mutant(
        "requests_of_blocks",
        "megapack/storage/remote/cache.py",
        "REQUEST_BYTES = 1 << 22",
        "REQUEST_BYTES = 1 << 14",
        "tests/remote/test_remote_reading.py -k blocks",
        "a request for every 16 KiB",
    ),
    Mutant(
        "gaps_of_requests",
        "megapack/storage/remote/sparse.py",
        "np.flatnonzero(np.diff(numbers) > 1 + gap)",
        "np.flatnonzero(np.diff(numbers) > 1)",
        "tests/remote/test_remote_reading.py -k blocks",
        "two requests where one would do",
    ),
    # The plan of a build.
    Mutant(
        "plan_of_inputs",
        "megapack/tokenization/build/plan.py",
        "[file.path, file.size, file.mtime_ns, file.format, file.compression]",
        "[file.path, file.size, file.format, file.compression]",
        BUILD,
        "parts of an edited input are taken for those of the old one",
    ),
    Mutant(
        "plan_of_libraries",
        "megapack/tokenization/build/plan.py",
        '"libraries": dict(self.libraries),\n            "bos"',
        '"libraries": sorted(self.libraries),\n            "bos"',
        BUILD,
        "shards of two versions of a tokenizer are joined",
    ),
    Mutant(
        "uint16_limit",
        "megapack/tokenization/build/plan.py",
        "_UINT16_VOCABULARY = 65500",
        "_UINT16_VOCABULARY = 65536",
        BUILD,
        "Megatron reads as int32 what was written as uint16",
    ),
    Mutant(
        "ordered_split",
        "megapack/tokenization/corpus/split.py",
        "at = [round(bound * float(num_documents)) for bound in bounds]",
        "at = [int(bound * float(num_documents)) for bound in bounds]",
        "tests/tokenization/corpus/test_split.py",
        "a document changes its split against megatron-core",
    ),
    # Packing strategies, the step planner.
    Mutant(
        "pools_seed",
        "csrc/core/packing/bucket.cpp",
        "random_for(run.seed, Purpose::kPools)",
        "random_for(0, Purpose::kPools)",
        STRATEGIES,
        "documents are dealt to pools alike, whatever the seed",
    ),
    Mutant(
        "head_begins",
        "csrc/core/packing/bucket.cpp",
        "place.begin = static_cast<Length>(place.begin + plan_.heads[h].tokens);",
        "place.begin = plan_.heads[h].tokens;",
        STRATEGIES,
        "a document of which two heads are taken repeats tokens",
    ),
    Mutant(
        "first_fit_space",
        "csrc/core/packing/fit_plan.cpp",
        "if (run.space >= length_) {",
        "if (run.space > length_) {",
        STRATEGIES,
        "a document that fits a bin exactly may open a new one",
    ),
    Mutant(
        "smallest_digit",
        "csrc/core/packing/decompose.cpp",
        "while (length >= capacities[0]) {",
        "while (length > capacities[0]) {",
        STRATEGIES,
        "rests of the smallest bucket's size are dropped",
    ),
    Mutant(
        "seamless_short",
        "csrc/core/packing/seamless.cpp",
        "tokens <= capacity : tokens < capacity;",
        "tokens < capacity : tokens <= capacity;",
        STRATEGIES,
        "the paper's placement and the published one change places",
    ),
    Mutant(
        "document_limit",
        "csrc/core/planning/groups.hpp",
        "const bool full = group.documents == rules_.max_documents;",
        "const bool full = group.documents > rules_.max_documents;",
        PLANNER,
        "a rank gets a document more than it may",
    ),
    Mutant(
        "micro_batches_left_out",
        "csrc/core/planning/groups.hpp",
        "if (group.documents > 0 && m < 0)",
        "if (m < 0)",
        PLANNER,
        "a plan counts micro batches without a document",
    ),
    # The file format, and what is learned of a batch.
    Mutant(
        "tokens_of_header",
        "megapack/packing/header.py",
        'placed - metrics["repeated_tokens"] + metrics["dropped_tokens"]',
        'placed + metrics["repeated_tokens"] - metrics["dropped_tokens"]',
        "tests/packing/test_packing_format.py",
        "sound files are refused, or contradictions pass",
    ),
    Mutant(
        "empty_segments",
        "csrc/core/index/laws.cpp",
        "begin >= 0 && begin <= limit && length > 0 && length <= limit - begin,",
        "begin >= 0 && begin <= limit && length >= 0 && length <= limit - begin,",
        "tests/packing/test_packing_index.py tests/packing/test_packing_damage.py",
        "verify passes segments without a token",
    ),
    Mutant(
        "step_denominator",
        "megapack/data/sampler.py",
        "num_step_label_tokens=num_labels,",
        "num_step_label_tokens=int(labels[: len(mine)].sum()),",
        DEALING,
        "losses are averaged per micro batch instead of per step",
    ),
    Mutant(
        "step_label_weight",
        "megapack/data/sampler.py",
        "label_weight = None if factors is None else float(labels @ factors.astype(float))",
        "label_weight = None if factors is None else float(labels.sum())",
        "tests/data/test_stages.py",
        "weighted losses are divided by labels that are not weighted",
    ),
    Mutant(
        "weights_of_gradients",
        "megapack/training/model/loss.py",
        "            slope *= label_weights[rows].unsqueeze(1)\n",
        "            slope = slope\n",
        "tests/training/test_loss.py",
        "the loss is weighted and its gradient is not",
    ),
]


def main() -> int:
    names = [name for name in os.environ.get("ONLY", "").split(",") if name]
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        print(f"no mutant is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    return 0 if run(chosen, ROOT, int(os.environ.get("JOBS") or 1)) else 1


if __name__ == "__main__":
    sys.exit(main())

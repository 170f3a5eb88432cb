"""Mutants of ``mutants.py`` as text: the file and its tests, then the edits of each mutant.

csrc/core/schedule/blend.cpp: blend
blend_rounding: ties between two sources go to the other one
- kBelowHalf = (std::uint64_t{1} << 63) - 1;
+ kBelowHalf = (std::uint64_t{1} << 63);
"""

# What a word behind a file stands for; other words are paths, and more arguments, of pytest.
TESTS = {
    "schedule": "tests/data/test_schedule.py tests/data/test_programs.py tests/data/test_stages.py",
    "blend": "tests/data/test_blend.py tests/data/test_programs.py",
    "dealing": "tests/data/test_sampler.py",
    "gather": "tests/data/test_gather.py",
    "masking": "tests/data/test_exclusions.py",
    "resume": "tests/data/test_stages.py",
    "strategies": "tests/packing/test_packing_strategies.py",
    "planner": "tests/planning",
    "plan": "tests/tokenization/pipeline/test_plan.py",
}

# "file: its tests", then of each mutant "name: what would be wrong", its old text and its new one.
LIST = """\
# The order of buckets, the blend and the shuffle.

csrc/core/schedule/cycle_order.cpp: schedule tests/data/test_questions.py
bucket_key: buckets of equal counts are drawn at the same times
- Bucket bucket{counts[b], random_bits(key, b), 0.0,
+ Bucket bucket{counts[b], random_bits(key, 0), 0.0,
first_swap_inverse: the steps of a sample, where the largest bucket was put first
- if (rank < shifted) return unswapped_position(bucket, rank + 1);
+ if (rank < shifted) return unswapped_position(bucket, rank);
first_swap_counts: a cursor, at the draw where the largest bucket would have come
- if (0 < end && end <= swapped_at_) {
+ if (0 < end && end < swapped_at_) {

csrc/core/schedule/blend.cpp: blend
blend_rounding: ties between two sources go to the other one
- kBelowHalf = (std::uint64_t{1} << 63) - 1;
+ kBelowHalf = (std::uint64_t{1} << 63);
blend_heavy_cursor: the heavier source begins a range at a wrong sample
- {node.heavy, visit.begin - before.light, visit.places
+ {node.heavy, visit.begin - light, visit.places
blend_share_carry: a source of weight 0 is drawn
- next < fraction;  // a carry
+ next <= fraction;  // a carry

csrc/core/schedule/permute.cpp: schedule tests/data/test_questions.py
shuffle_of_range: a draw across the end of an epoch continues the old shuffle
- epoch = (run.begin + done) / run.size;
+ epoch = run.begin / run.size;
shuffle_cycle_walk: a sample that does not exist is drawn, in buckets of more than 1024
- x = encrypt(x);
-         } while (x >= size_);
+ x = encrypt(x);
+         } while (x > size_);
shuffle_inverse_rounds: the steps of a sample, in large buckets
- for (int i = 2 * kRounds; i > 0; i -= 2) {
+ for (int i = 2 * kRounds; i > 2; i -= 2) {

megapack/data/bucket_streams.py: schedule
shuffle_key: buckets of as many samples are shuffled alike
- key = fold_key(seed, 1, capacity)
+ key = fold_key(seed, 1)

megapack/data/steps.py: schedule
draws_of_cycle: the last samples of an epoch come an epoch later
- return -(-samples // (self.num_cycles * self.samples_per_draw[bucket]))
+ return samples // (self.num_cycles * self.samples_per_draw[bucket])
cycle_key: every epoch draws buckets in the same order
- key = fold_key(draws.seed, 2, cycle)
+ key = fold_key(draws.seed, 2)

# Programs: stages, ramps, cursors.

megapack/data/schedule.py: schedule
stage_key: stages repeat the order of the first one
- self._key = fold_key(seed, 4, self.begin) if self.begin else seed
+ self._key = seed
stage_largest: every stage begins with the largest bucket
- largest_first=self.buckets[-1].capacity > largest,
+ largest_first=self.buckets[-1].capacity >= largest,
stage_cursors: the third stage draws again what the first has drawn
- of_bucket[stream.sources] = stream.starts + stream.taken(end)
+ of_bucket[stream.sources] = stream.taken(end)
stage_skips: skipped samples are drawn after all
- previous, first = skipped[-1], first + settings.skip_steps
+ previous = skipped[-1]

megapack/data/program.py: schedule
stage_tokens: a stage from a number of tokens begins a step early
- return last.begin + -(-missing // last.config.tokens_per_step)
+ return last.begin + missing // last.config.tokens_per_step
stage_other_order: a new order keeps the number of cycles of the old one
- changes.setdefault("num_cycles", None)
+ changes.setdefault("num_cycles", before.num_cycles)

megapack/data/schedule.py: tests/data/test_stages.py
steps_of_epochs: an epoch that ends inside a stage lacks its last step
- return stage.begin + ceil(missing * stage.steps_per_epoch)
+ return stage.begin + int(missing * stage.steps_per_epoch)

megapack/data/program.py: tests/data/test_window.py
ramp_mean: a ramp lags by half a piece
- return (low + high) / (2 * length)
+ return low / length

megapack/data/stage_settings.py: tests/data/test_window.py
window_growth: an attention window grows a step early
- num_units = (self.last - self.first) * elapsed // (unit * self.steps)
+ num_units = (self.last - self.first) * (elapsed + 1) // (unit * self.steps)

megapack/data/sample_order.py: tests/data/test_questions.py tests/data/test_programs.py
times_of_samples: the document that comes next counts as seen
- times: Ids = epoch + (self.positions(epoch, samples) < position)
+ times: Ids = epoch + (self.positions(epoch, samples) <= position)

# Assignment: equal work.

csrc/core/schedule/assign.cpp: dealing
no_exchange: work is less equal than it can be
-     assigner.exchange();
+
exchanged_loads: exchanges continue from a stale load
-         loads_[from] -= moved;
+
costliest_last: the costliest samples of a rank come last
- return std::make_pair(-cost(a), a) < std::make_pair(-cost(b), b);
+ return std::make_pair(cost(a), a) < std::make_pair(cost(b), b);

megapack/data/sampler.py: dealing
ranks_of_group: ranks that share a sample are not adjacent
- assignment.micro_batches(self.data_parallel_rank // shared)
+ assignment.micro_batches(self.data_parallel_rank % (self.data_parallel_size // shared))
work_of_ranks: the work of one group is reported for another
- rows.append(np.repeat(assignment.loads_of_micro_batches / shared, shared, axis=1))
+ rows.append(np.tile(assignment.loads_of_micro_batches / shared, (1, shared)))

megapack/data/sampler.py: dealing
heaviest_first: the heaviest micro batch of a step comes last
- groups[np.argsort(-costs[groups].sum(axis=1), kind="stable")]
+ groups[np.argsort(costs[groups].sum(axis=1), kind="stable")]

megapack/data/sources.py: masking
window_cost: the last piece of a segment costs as much as a whole one
- (n % size) ** 2
+ (n % size) * size

megapack/data/program.py: tests/data/test_repetition.py
limit_of_stage: a later stage may take again what the stages before it took of a source
- math.floor(limit - share * taken)
+ math.floor(limit)
limit_of_rest: sources below their share get that of the others
- unassigned, total_weight = unassigned - limit, total_weight - weights[d]
+ unassigned, total_weight = unassigned - limit, total_weight

megapack/data/program.py: tests/data/test_stages.py
rates_of_stage: a stage takes rates of fim that it does not name from the mixture
- mixture, last.fim_rates, str(stage)
+ mixture, mixture.fim_rates, str(stage)

megapack/data/fim.py: tests/data/test_fim.py
tables_by_size: tables of equal size count as equal
- xxhash.xxh3_128_hexdigest(tables)
+ len(tables)
chosen_labels: documents with chosen labels are turned round
- if dataset.has_labels:
+ if dataset.has_labels and not rate:
largest_of_sentinels: ids of parts are not checked
- return max(*self.sentinels, int(np.max(parts, initial=0)))
+ return max(self.sentinels)
fewer_parts: a side of a cut has two tokens at most
- for number in range(1, MOST_PARTS))
+ for number in range(1, MOST_PARTS - 1))

# Columns.

megapack/storage/columns.py: tests/storage/test_columns.py tests/storage/test_column_edits.py
bfloat16_ties: ties round up
- rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
+ rounded = (bits + 0x8000) >> 16
undone_rows: rows of a refused document stay in the buffer
- del self._buffer[num_bytes - num_written :]
+ del self._buffer[len(self._buffer) :]
minus_zero: a weight of -0.0 keeps its sign
- = np.abs(rows)
+ = rows
labels_of_any_fill: labels of padding may be ids
- if spec != needed:
+ if (spec.dtype, spec.shape, spec.of) != (needed.dtype, needed.shape, needed.of):

megapack/storage/index_writer.py: tests/storage/test_columns.py tests/storage/test_column_edits.py
stale_columns: columns of a replaced dataset stay
- return [column_path(prefix, name) for name in old.keys() - set(new)]
+ return []

megapack/storage/column_edits.py: tests/storage/test_column_edits.py
replaced_column: a meta file describes another file of its column
- if name in columns:  # no meta file may
+ if False:  # no meta file may
shifted_documents: labels of other documents of the same number of tokens are converted
- if not np.array_equal(dataset.document_lengths, read_document_lengths(prefix)):
+ if dataset.num_tokens != sum(read_document_lengths(prefix)):

# Groups.

megapack/packing/groups.py: tests/packing/test_packing_documents.py
group_border: a group that is cut leaves out the document that would just fill the bucket
- np.searchsorted(ends[low:high], limit, side="right")
+ np.searchsorted(ends[low:high], limit, side="left")
group_joined: adjacent groups of a sample become one
- (np.diff(group, prepend=-1) == 0) & (group >= 0)
+ (np.diff(group, prepend=-1) < 100) & (group >= 0)

megapack/packing/pack.py: tests/packing/test_packing_alignment.py
fim_room_cut: a document has no room that nevertheless is transformed
- before_room = true_length - (full_length > true_length)
+ before_room = true_length

csrc/core/gather/plan.cpp: gather
group_attention: all documents of a sample see each other
- options_.attention == Extent::kSample || segments_[i + 1].joined;
+ options_.attention != Extent::kDocument;
group_label: the last token of a group predicts the next group
- (label_boundary == Extent::kGroup && next->joined)
+ label_boundary == Extent::kGroup

csrc/core/gather/shard.cpp: masking
group_masked: a group of which the first document is masked sees the documents before it
- group_started = group_started && shard.joined.size() > 0
+ group_started = shard.joined.size() > 0

# The gather.

csrc/core/gather/fill.cpp: gather
label_zero: id 0 is never learned where labels are chosen
- to[i] = label < 0 ? kNoLabel : label;
+ to[i] = label <= 0 ? kNoLabel : label;
label_zero_counted: the denominator lacks labels of id 0
- total += static_cast<std::int64_t>(chosen[i]) >= 0;
+ total += static_cast<std::int64_t>(chosen[i]) > 0;

csrc/core/gather/plan.cpp: gather
label_of_cut: the last token of a cut document predicts itself
- if (!segment.ends_document) return {segment.token_begin + segment.length, -1};
+ if (!segment.ends_document) return {segment.token_begin + segment.length - 1, -1};
fim_label: a document before a transformed one predicts its first word, not the sentinel
- return {first.at, first.literal};
+ return {first.at, -1};

csrc/core/gather/fill.cpp: gather
masked_last_label: the last token of a cut document has a label that does not count
- weigh_labels(*piece.shard, last.at, 1, factor, label, mask);
+ weigh_labels(*piece.shard, last.at, 1, 0.0F * factor, label, mask);
column_literal: inserted tokens have the column's row of a token
- if (at < 0 || literal >= 0) return writer.fill(count);
+ if (at < 0 || literal > 1000) return writer.fill(count);
fim_weights: the token after a sentinel gets the weight of the one before
- fill_weights(weights_at(shard, run.at), run.length, factor, mask);
+ fill_weights(weights_at(shard, runs[0].at), run.length, factor, mask);

csrc/core/gather/fim.cpp: gather
fim_whole: documents that are cut are transformed
- const bool whole = segment.begin == 0 && segment.ends_document;
+ const bool whole = segment.begin == 0;
fim_one_token: a token that is cut twice loses a part
- second_ = {second_.token + 1, -1};
+ second_ = first_;

csrc/core/gather/plan.cpp: gather
positions_of_documents: positions count from the begin of the file
- if (options_.positions == Positions::kDocument) first_position = segment.begin;
+ if (options_.positions == Positions::kDocument) first_position = segment.token_begin;
rows_of_cu_seqlens: boundaries begin anew inside of a row
- if (per_row && at > 0 && at % plan.shape.row_tokens == 0)
+ if (per_row && at > 0 && at % plan.shape.capacity == 0)
longest_room: max_seqlen is smaller than an aligned segment
- longest = std::max(longest, segment.room);
+ longest = std::max(longest, segment.length);

csrc/core/gather/fill.cpp: tests/data/test_tree_gather.py
first_token_of_tree: a document's first token is predicted from nothing
- for (std::int64_t i = depth == 0 ? 1 : 0; i < piece.length; i += kBlock) {
+ for (std::int64_t i = 0; i < piece.length; i += kBlock) {
prefix_that_changed: documents with other tokens share a prefix
- std::memcmp(tokens + at * width, tokens + shared * width, count * width) == 0,
+ std::memcmp(tokens + at * width, tokens + shared * width, count * 0) == 0,

csrc/core/gather/plan.cpp: tests/data/test_tree_gather.py
branch_on_disk: the first token of a branch is predicted by the row before it
- before = keys.kv_index.back();
+ before = at - 1;

csrc/core/gather/shard.hpp: masking
last_list: documents of the newest list are still seen
- return list <= num_lists;
+ return list < num_lists;

csrc/core/gather/read_ahead.cpp: tests/data/test_read_ahead.py
cut_label_ahead: the label behind a cut is not asked for ahead
- segment.length + (segment.ends_document ? 0 : 1);
+ segment.length;

# Exclusions, resume, sources of many shards.

megapack/data/steps.py: masking
list_in_force: work and labels are counted with documents of the newest list
- first_lists <= self.num_lists
+ first_lists < self.num_lists

megapack/data/exclusions.py: masking
list_digest: an edited list of as many documents passes for the old one
- f"{len(masked)} documents, xxh3 {digest}"
+ f"{len(masked)} documents, xxh3 "

megapack/data/resume.py: resume
past_sources: a source that joins at the present step is refused
- if stage["from_step"] < step)
+ if stage["from_step"] <= step)
undrawn_sources: a source that is not drawn may not be replaced
- num_drawn = max(i + 1 for i, weight in enumerate(weights) if weight != 0)
+ num_drawn = len(weights)
undrawn_indices: data that were not drawn count at a resume
- compared = tuple(values[:num_drawn] for values in padded)
+ compared = tuple(padded)
resumed_tokens: a half-finished step is skipped
- + missing // int(begin["tokens_per_step"])
+ + -(-missing // int(begin["tokens_per_step"]))

megapack/data/sampler.py: tests/data/test_loader.py tests/data/test_stages.py
middle_of_step: micro batches of a step that was begun come again
- int(state["step"]), int(state["micro_step"])
+ int(state["step"]), 0

csrc/core/gather/shard.cpp: tests/data/test_sharded_source.py
shard_of_sample: the first sample of a shard is looked for in the one before
- std::upper_bound(runs.first_ids.begin(), runs.first_ids.end(), id);
+ std::lower_bound(runs.first_ids.begin(), runs.first_ids.end(), id);

# Reading ahead of a store.

megapack/data/loader.py: tests/data/test_read_ahead.py
asked_one_by_one: every micro batch makes separate requests
-             batches_per_request = batches_per_portion
+             batches_per_request = 1

megapack/storage/remote/cache.py: tests/remote/test_remote_reading.py -k blocks
requests_of_blocks: a request for every 16 KiB
- CHUNK_BLOCKS = 256
+ CHUNK_BLOCKS = 1

megapack/storage/remote/cache.py: tests/remote/test_remote_reading.py -k blocks
gaps_of_requests: two requests where one would do
- np.diff(numbers) > gap + 1
+ np.diff(numbers) > 1

megapack/storage/remote/cache.py: tests/remote/test_remote_cache.py -k goes_first
eviction_order: what was read long ago goes before what was read last
- (False, -at) if
+ (False, at) if

megapack/storage/locks.py: tests/cli/test_foreign_files.py -k build_folder
folders_of_others: a foreign folder is used, and later removed, as a build folder
- while not is_own_folder(path):
+ while not path.is_dir():

megapack/storage/remote/copies.py: tests/remote/test_remote_faults.py -k meta_file
meta_of_an_upload: the meta file of the previous dataset stays with the new one
-             remove_object(f"{address}.meta.json")
+             pass

megapack/storage/locks.py: tests/cli/test_foreign_files.py -k lock
mark_of_a_lock: a foreign file counts as a lock
- startswith(_LOCK_MARK)
+ startswith(b"")

megapack/storage/files.py: tests/storage/test_atomic.py -k foreign
proof_of_a_temporary: a foreign file is removed as a leftover
- if match[3] == _proof(
+ if match[3] or _proof(

megapack/storage/remote/client.py: tests/remote/test_remote_faults.py -k slow_line
slow_lines: a request that shares a slow line with others is cut before it is done
- {"timeout": REQUEST_TIMEOUT + retry_time,
+ {"timeout": REQUEST_TIMEOUT,

megapack/storage/remote/reader.py: tests/remote/test_remote_cache.py -k stays
pins_of_blocks: memory that another thread reads is given back
- free = pages[~self._pins.reshape(-1, PAGE_BLOCKS)[pages].any(axis=1)]
+ free = pages

# The plan of a build.

megapack/tokenization/pipeline/plan.py: plan
plan_of_inputs: parts of an edited input count as those of the old one
- [file.path, file.size, file.mtime_ns, file.format, file.compression]
+ [file.path, file.size, file.format, file.compression]
plan_of_libraries: shards of two versions of a tokenizer are joined
- "libraries": dict(self.libraries),
-             "verify
+ "libraries": sorted(self.libraries),
+             "verify
uint16_limit: Megatron reads as int32 what was written as uint16
- _UINT16_VOCABULARY = 65500
+ _UINT16_VOCABULARY = 65536

megapack/tokenization/corpus/token_values.py: tests/tokenization/pipeline/test_run.py
weights_of_table: a block without the weights key weighs 0
- replace(INTERPRETED[WEIGHTS], fill=1)
+ INTERPRETED[WEIGHTS]

megapack/tokenization/corpus/token_values.py: tests/tokenization/pipeline/test_token_columns.py
column_of_bos: an inserted token gets a row of the document
- np.repeat(fill, before, 0), rows, np.repeat(fill, after, 0)
+ np.repeat(fill, before, 0), rows, np.repeat(rows[-1:], after, 0)

megapack/tokenization/tokenizers/verified.py: tests/tokenization/tokenizers/test_equal_ids.py
guard_flags: documents with an added token that strips spaces go to gigatoken
- not any(map(token.get, _FLAGS))
+ not any(map(token.get, _FLAGS[:1]))
guard_overlaps: documents with added tokens that overlap go to gigatoken
- if not plain or content in overlapping:
+ if not plain:
guard_behavior: gigatoken runs a Split that removes what it finds
- known and split.get("behavior") == "Isolated" and
+ known and

megapack/tokenization/corpus/documents.py: tests/tokenization/corpus/test_split.py
ordered_split: a document changes its split against megatron-core
- positions = [round(bound * float(num_documents)) for bound in bounds]
+ positions = [int(bound * float(num_documents)) for bound in bounds]

# Packing strategies, the step planner.

csrc/core/packing/bucket.cpp: strategies
pools_seed: documents are assigned to pools without the seed
- random_for(run.seed, Purpose::kPools)
+ random_for(0, Purpose::kPools)
head_begins: a document of which two heads are taken repeats tokens
- place.begin = static_cast<Length>(place.begin + plan_.heads[h].tokens);
+ place.begin = plan_.heads[h].tokens;

csrc/core/packing/fit.cpp: strategies
first_fit_space: a document that fits a bin exactly may open a new one
- if (run.space >= length_)
+ if (run.space > length_)

csrc/core/packing/simple.cpp: strategies
smallest_digit: rests of the smallest bucket's size are dropped
- while (length >= capacities[0]) {
+ while (length > capacities[0]) {

csrc/core/packing/fit.cpp: strategies
seamless_short: the paper's placement and the published one change places
- tokens <= capacity : tokens < capacity;
+ tokens < capacity : tokens <= capacity;

csrc/core/planning/step_plan.cpp: planner
fewest_micro_batches: a plan has a micro batch more than its tokens need
- for (std::int64_t m = rounded(least_micro_batches(items, rules));;
+ for (std::int64_t m = rounded(least_micro_batches(items, rules) + 1);;
cost_caps_rounded: a rank's documents cost more than it may have
- std::ceil(std::ldexp(cost, exponent_[k] - shift_[k]))
+ 0.9 * std::floor(std::ldexp(cost, exponent_[k] - shift_[k]))

csrc/core/planning/tree_plan.cpp: tests/planning/test_trees.py
paths_of_chains: a chain of prefixes is planned with a square number of keys
- keys += nodes.depths[i] + nodes.lengths[i];
+ keys += nodes.lengths[i];
next_micro_batches: plans of trees skip numbers of micro batches
- m = rounded(m + 1 + m / 64)) {
+ m = rounded(m + 2 + m / 32)) {

csrc/core/planning/trees.cpp: tests/planning/test_trees.py
depth_of_paths: paths have a node more than their limit
- limit.push_back(level[i] <= max_depth ?
+ limit.push_back(level[i] <= max_depth + 1 ?

csrc/core/planning/balance.cpp: planner
exchange_gain: an exchange counts as gain although the other rank becomes the busiest
- const std::int64_t most = std::max(giver, taker);
+ const std::int64_t most = giver;
longest_path: of several kinds of cost one alone is balanced
- weights_[k] = std::max(kOne / 16, ratio >> 4);
+ weights_[k] = k == 0 ? kOne : kOne / 16;

csrc/core/planning/assignment.cpp: planner
document_limit: a rank gets a document more than it may
- change(items_.documents, 1, 0) > rules_.max_documents)
+ change(items_.documents, 1, 0) > rules_.max_documents + 1)
empty_bins: a rank is left without documents that would suffice for all
- if (empty.empty()) return;
+ if (!empty.empty()) return;
family_ranks: chunks of a group lie on several ranks
- m * rules_.num_ranks + rank->second);
+ m * rules_.num_ranks + (rank->second + m) % rules_.num_ranks);

megapack/planning/online.py: planner
window: documents are planned before the window is full
- if self._num_complete < self._window:
+ if self._num_complete < self._window // 2:
kept_documents: of documents that wait, some are given twice
- remaining = np.delete(np.arange(len(self._ids)), documents).tolist()
+ remaining = np.delete(np.arange(len(self._ids)), documents[1:]).tolist()
implied_costs: caps hold attention alone where no costs are given
- products = whole * (round(self._options["linear_cost_tokens"]) + whole)
+ products = whole * whole
add_as_it_was: a refused document changes the planner
- self.__dict__.update(before)
+ pass

megapack/planning/simulation.py: tests/planning/test_simulation.py
true_lengths: padding is useful work
- true = plan.lengths if documents is None else documents
+ true = plan.lengths
empty_in_groups: ranks wait for each other at empty micro batches
- return ready
+ m = len(assigned.first_rank) - 1

megapack/planning/step_plan.py: planner
group_denominator: documents without label tokens are counted in the mean
- num_means = len(np.unique(inverse[labels > 0]))
+ num_means = len(np.unique(inverse))

# The file format, and what is learned of a batch.

megapack/packing/file_format.py: tests/packing/test_packing_index.py
tokens_of_header: sound files are refused, or contradictions pass
- placed - metrics["repeated_tokens"] + metrics["dropped_tokens"]
+ placed + metrics["repeated_tokens"] - metrics["dropped_tokens"]

megapack/packing/trees.py: tests/packing/test_tree_packing.py
shared_of_neighbors: documents share more than their common prefix
- shared[first : members[-1] + 1], members[:-1] + 1 - first
+ shared[first : members[-1] + 1], members[1:] - first

megapack/packing/verify.py: tests/packing/test_tree_packing.py
tokens_of_trees: verify passes trees of a dataset that was built again
- if compared and recorded != array_checksum(dataset.tokens):
+ if compared and recorded == "":

megapack/packing/sample_index.py: tests/packing/test_packing_index.py
index_of_worker: a worker reads the samples of another index that took its place
- if index.fingerprint != fingerprint:
+ if index.num_samples < 0:

megapack/probe/detector.py: tests/probe
probe_of_nan: a model that gives nan passes for one that keeps documents apart
- bool((d.isfinite() | ~real[: len(d)]).all())
+ not d.isinf().any()

csrc/core/index/metrics.cpp: tests/packing/test_packing_index.py tests/packing
empty_segments: verify passes segments without a token
- begin >= 0 && begin <= limit && length > 0 && length <= limit - begin,
+ begin >= 0 && begin <= limit && length >= 0 && length <= limit - begin,

megapack/data/sampler.py: dealing tests/data/test_stages.py
step_denominator: losses are averaged per micro batch instead of per step
- num_step_label_tokens=weights.num_labels,
+ num_step_label_tokens=weights.num_labels // num_micro_steps,
step_label_weight: weighted losses are divided by labels that are not weighted
- float(of_samples @ totals.weight), float
+ float(totals.labels.sum()), float

megapack/training/autopilot.py: tests/training/test_autopilot.py -k "not autopilot_passes"
watch_forgets: single high losses add up to a spike
- [s for s in steps if s > begin] for
+ [s for s in steps if s > 0] for

megapack/training/engine/mirror.py: tests/training/test_branches.py -k ordered_by_tokens
mirror_order: the checkpoint with the largest step is restored, not the newest
- removesuffix(_MANIFEST_SUFFIX) for name in manifests), key=tokens_of)
+ removesuffix(_MANIFEST_SUFFIX) for name in manifests))

megapack/data/resume.py: tests/training/test_run_record.py
record_missing_key: a key that only one of two runs has is not compared
- sorted(current.keys() | saved.keys())
+ sorted(current.keys() & saved.keys())

megapack/training/model/loss.py: tests/training/test_loss.py
weights_of_gradients: the loss is weighted and its gradient is not
-             slope *= label_weights[rows].unsqueeze(1)
+             slope = slope

megapack/training/model/loss.py: tests/training/test_distill.py -k definition
distilled_without_teacher: tokens without a teacher lose a part of their cross entropy
-         alpha = teacher.alpha * has_teacher.to(losses.dtype)
+         alpha = torch.full_like(log_sum, teacher.alpha)
distilled_remainder: the slope of all other tokens has the size of the whole bucket
-     slope *= weight + alpha * by_bucket[:, -1:] / remainder
+     slope *= weight + alpha * by_bucket[:, -1:]

megapack/training/teacher.py: tests/training/test_teacher.py -k predicted_once
teacher_overlap: the first new token of a window is predicted by the window before, too
- targets = np.where(number == 0, 1, begins + overlap + 1)
+ targets = np.where(number == 0, 1, begins + overlap)

megapack/attention/segmentwise.py: tests/attention/test_tree.py -k definition
tree_masks: the mask of a node is aligned to the begin of its path
- return bias[:, :, -rows:, -keys:]
+ return bias[:, :, -rows:, :keys]

megapack/attention/problem.py: tests/attention/test_tree.py -k definition
tree_ends: branches see each other in dense masks and FlexAttention
- ends[node + 1], "amax")
+ ends[node + 1].amax().expand(len(node)), "amax")

megapack/data/trees.py: tests/data/test_tree_batch.py
tree_predecessors: the first token of a branch is predicted by the row before it
- before = self["predecessors"].clamp(min=0)
+ before = torch.arange(len(rows)).sub(1).clamp(min=0)

megapack/attention/routes.py: tests/attention/test_routes.py -k recomputed
recompute_without_routes: a recomputed layer uses the routes of the latest forward
-         self._set(routes)
+         self._set(former)

csrc/core/gather/fill.cpp: tests/data/test_batch_columns.py
column_target: the last token of a piece has the column's fill value, not the row of its target
- if (column.of_target) write(piece.last_label.at, piece.last_label.literal, 1);
+ if (column.of_target) write(-1, piece.last_label.literal, 1);

megapack/data/batch.py: tests/data/test_multi_token.py
mtp_across_segments: targets cross the ends of documents
-         inside = segments[:, depth:] == segments[:, :-depth]
+         inside = segments[:, depth:] >= segments[:, :-depth]
mtp_windows: targets cross attention windows where documents share attention
-         segments = segments + restarts
+         segments = restarts

megapack/training/model/training_model.py: tests/training/test_evaluate.py
validation_z_loss: the z-loss counts in validation, too
- z_loss=self.z_loss if self.training else 0.0,
+ z_loss=self.z_loss,

megapack/packing/proxy.py: tests/packing/test_proxy.py
proxy_waits: a long document enters a proxy of which it is a large part
- turns = np.maximum(ends - tokens, _LONG * tokens)
+ turns = ends - tokens
proxy_padding: the padding of small packings counts as repetition
- tokens /= ratio
+ tokens /= 1.0
proxy_scramble: proxies of all seeds have documents of the same places
- number ^= number * np.uint64(
+ number ^= 0 * np.uint64(

megapack/training/proxy.py: tests/training/test_proxy.py
proxy_rounding: stages of a proxy begin early
- return math.floor(step * self.share / self.per_step + Fraction(1, 2))
+ return math.floor(step * self.share / self.per_step)

csrc/core/packing/bucket_second.cpp: tests/packing/test_second.py
second_bucket: a document is put into a bucket whose second capacity it exceeds
- while (rules_.capacity(b).tokens < first.tokens || rules_.capacity(b).second < first.second)
+ while (rules_.capacity(b).tokens < first.tokens)
second_ratio: samples take the documents that lead away from the ratio of the pool
- used.second * tokens < used.tokens * second;
+ used.second * tokens > used.tokens * second;

megapack/packing/second.py: tests/packing/test_second.py
second_wide: second sizes of 2 GiB and more wrap
- narrow = sizes.max(initial=0) <= np.iinfo(np.int32).max
+ narrow = True

megapack/data/arrange.py: tests/packing/test_second.py -k arranged
second_arranged: samples of the second bucket get the second sizes of samples of the first
- numbers = ids - first[run] + first_in_shard[run]
+ numbers = ids - first[run]

megapack/training/mixtures.py: tests/training/test_mixtures.py -k "survives or renamed or not_ended"
mixture_unfinished: the losses of a run that was killed are evidence
- if line["step"] == record.num_steps]
+ if line["step"] <= record.num_steps]
mixture_settings: runs of another model or scale are evidence
- if settings not in (None, record.settings) or not log.exists():
+ if not log.exists():
mixture_removed: runs that gave a removed source no weight are ignored
- if not any(weight for digest, weight in e.weights.items() if digest not in sources)
+ if all(digest in sources for digest in e.weights)

megapack/cli/mixtures.py: tests/training/test_mixtures.py -k "kill or waits"
mixture_orphans: runs outlive a command that was killed
- return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
+ return None
mixture_waits: a run that another command finished is trained again
- if measured(folder) is None:
+ if not folder.is_file():

megapack/cli/audit.py: tests/training/test_audit.py -k "exclusions or without_a_line or statement"
audit_labels: exclusions and loss masks that were changed afterwards pass
- if (content.checksum, content.num_label_tokens) != logged[step]:
+ if content.checksum != logged[step][0]:
audit_lines: a log that was written again without a step passes
- missing = sorted(set(range(num_steps)) - logged.keys())
+ missing: list[int] = []
audit_tokens: the signed statement does not cover the tokens
- suffixes = (".idx", ".bin", ".col") if tokens else (".idx",)
+ suffixes = (".idx",)
audit_envelope: no other program can verify the signature
- return b"DSSEv1 %d %b %d %b" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)
+ return payload

megapack/training/engine/directory.py: tests/training/test_audit.py -k "is_named or resumed"
audit_chain: a line of a log may be removed or moved
- hashlib.sha256(chain.encode() + body)
+ hashlib.sha256(body)
audit_removed: checkpoints that the run itself removed count as lost
-                 parts["files"].pop(name, None)
+                 pass

megapack/training/start.py: tests/training/test_dry_run.py -k did_not_make
tokenizer_of_pair: the tokenizer that made the data counts as another one if it is two files
- for names in (["tokenizer.json"], ["vocab.json", "merges.txt"]):
+ for names in (["tokenizer.json"], ["vocab.json"], ["merges.txt"]):

megapack/tokenization/corpus/readers.py: tests/tokenization/corpus/test_readers.py
end_of_text: a text file ends after its first block
- if not file.compression and len(part) < num_bytes:
+ if not file.compression and len(part) <= num_bytes:

megapack/tokenization/pipeline/workspace.py: tests/tokenization/pipeline/test_run.py
digests_of_inputs: a build whose files were only touched starts again
- parts = [inputs[i : i + num_files] for
+ parts = [inputs[i : i + 1] for
"""

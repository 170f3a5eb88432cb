#include "core/gather/plan.hpp"

#include <algorithm>
#include <limits>

#include "core/base/check.hpp"

namespace megapack {
namespace {

std::int64_t align_up(std::int64_t n, std::int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

void check_shape(const GatherShape& shape, std::int64_t alignment, std::int64_t num_samples) {
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    check(shape.capacity > 0 && shape.num_rows > 0, "capacity ", shape.capacity, " and ",
          shape.num_rows, " rows must be positive");
    check(shape.row_tokens >= shape.capacity, "a row of ", shape.row_tokens,
          " tokens cannot hold a sample of ", shape.capacity, "; make the row longer");
    check(shape.row_tokens <= kLimit / shape.num_rows, shape.num_rows, " rows of ",
          shape.row_tokens, " tokens exceed what cu_seqlens can count (2^31 - 1)");
    check(alignment > 0 && shape.row_tokens % alignment == 0, "a row of ", shape.row_tokens,
          " tokens is not a multiple of the alignment ", alignment);
    const std::int64_t slots = shape.num_rows * shape.slots_per_row();
    check(num_samples <= slots, num_samples, " samples of ", shape.capacity, " tokens for ", slots,
          " slots (", shape.num_rows, " rows of ", shape.row_tokens, ")");
}

class Planner {
  public:
    Planner(Span<const Shard> shards, const GatherShape& shape, const GatherOptions& options)
        : shards_(shards), shape_(shape), options_(options), plan_{shape, {}, {}, {}, {}} {}

    // Adds a slot of `slot` tokens with sample `ref`.
    void add_sample(SampleRef ref, std::int64_t slot) {
        const Shard& shard = shards_[ref.shard];
        read_segments(options_.transform, shard, ref, segments_, plan_.runs);
        if (options_.attention == Extent::kTree) add_paths(shard, ref);
        const std::int64_t used = add_segments(shard, ref, slot);
        add_padding(slot - used, options_.positions == Positions::kSample ? used : 0);
    }

    void add_padding(std::int64_t room, std::int64_t first_position) {
        if (room == 0) return;
        plan_.pieces.push_back({nullptr, 0, 0, room, first_position, {}, 1.0F, {0, 0}});
        plan_.segments.push_back({room, room, -1});
    }

    GatherPlan take() { return std::move(plan_); }

  private:
    void add_paths(const Shard& shard, SampleRef ref) {
        for (TreeDocument document : read_documents(shard, ref)) {
            document.last += ssize(plan_.segments);
            plan_.paths.push_back({&shard, document, ref.factor()});
        }
    }

    std::int64_t add_segments(const Shard& shard, SampleRef ref, std::int64_t slot) {
        std::int64_t used = 0;    // tokens of the sample so far
        std::int64_t placed = 0;  // the same, including the padding for alignment
        std::int64_t begin = 0;   // start of the attention segment
        const std::int64_t first = ssize(plan_.segments);
        for (std::int64_t i = 0; i < ssize(segments_); ++i) {
            const Segment& segment = segments_[i];
            check<FormatError>(segment.placed <= shape_.capacity - used, shard.documents.name(),
                               ", sample ", ref.sample, " has more than ", shape_.capacity,
                               " tokens, the capacity of its bucket");
            used += segment.placed;
            const std::int64_t end = placed + segment.placed;
            const bool continues = next_attends(i);
            const std::int64_t next = continues ? end : align_up(end, options_.alignment);
            check(next <= slot, shard.documents.name(), ", sample ", ref.sample, " needs ", next,
                  " of ", slot, " tokens when its ", segments_.size(), " segments are aligned to ",
                  options_.alignment, "; pack with alignment=", options_.alignment,
                  " (megapack-build pack --alignment ", options_.alignment,
                  "), or make the row longer");
            add_piece(shard, i, next - placed, placed, begin, ref.factor());
            if (!continues) {
                const auto source = static_cast<std::int32_t>(shard.source);
                const std::int64_t parent = segment.parent < 0 ? -1 : first + segment.parent;
                plan_.segments.push_back(
                    {end - begin, next - begin, source, static_cast<std::int32_t>(parent)});
                begin = next;
            }
            placed = next;
        }
        return placed;
    }

    // Returns true if the segment after segment i attends to segment i.
    bool next_attends(std::int64_t i) const {
        const Extent reach = options_.attention;
        if (i + 1 == ssize(segments_) || reach == Extent::kDocument || reach == Extent::kTree)
            return false;
        return options_.attention == Extent::kSample || segments_[i + 1].joined;
    }

    // `at`: start of the piece in the sample; `group`: start of its attention segment.
    void add_piece(const Shard& shard, std::int64_t i, std::int64_t room, std::int64_t at,
                   std::int64_t group, float factor) {
        const Segment& segment = segments_[i];
        std::int64_t first_position = options_.attention == Extent::kGroup ? at - group : 0;
        if (options_.positions == Positions::kDocument) first_position = segment.begin;
        if (options_.positions == Positions::kSample) first_position = at;
        if (options_.attention == Extent::kTree) first_position = segment.begin;  // its depth
        const Segment* next = i + 1 < ssize(segments_) ? &segments_[i + 1] : nullptr;
        const Label label = last_label(segment, next, plan_.runs, options_.label_boundary);
        plan_.pieces.push_back({&shard, segment.token_begin, segment.placed, room, first_position,
                                label, factor, segment.runs});
    }

    Span<const Shard> shards_;
    GatherShape shape_;
    const GatherOptions& options_;
    GatherPlan plan_;
    std::vector<Segment> segments_;
};

}  // namespace

Label last_label(const Segment& segment, const Segment* next, const std::vector<Run>& runs,
                 Extent label_boundary) {
    if (!segment.ends_document) return {segment.token_begin + segment.length, -1};
    const bool crosses = next != nullptr && (label_boundary == Extent::kSample ||
                                             (label_boundary == Extent::kGroup && next->joined));
    if (!crosses) return {};
    if (next->runs.size() == 0) return {next->token_begin, -1};
    const Run& first = runs[next->runs.begin];
    return {first.at, first.literal};
}

std::int64_t GatherPlan::max_seqlen() const {
    std::int64_t longest = 0;
    for (const AttentionSegment& segment : segments) longest = std::max(longest, segment.room);
    return longest;
}

std::vector<std::int32_t> GatherPlan::sources() const {
    std::vector<std::int32_t> result;
    result.reserve(segments.size());
    for (const AttentionSegment& segment : segments) result.push_back(segment.source);
    return result;
}

GatherPlan plan_gather(Span<const Shard> shards, Span<const SampleRef> samples,
                       const GatherShape& shape, const GatherOptions& options) {
    check_shape(shape, options.alignment, samples.size());
    const std::int64_t slots = shape.slots_per_row();
    const std::int64_t slot = shape.row_tokens / slots / options.alignment * options.alignment;
    check(slot >= shape.capacity, "capacity ", shape.capacity,
          " is not a multiple of the alignment ", options.alignment, " and fills a row of ",
          shape.row_tokens, "; make the row longer or the alignment smaller");
    Planner planner(shards, shape, options);
    for (std::int64_t i = 0; i < shape.num_rows * slots; ++i) {
        const bool ends_row = (i + 1) % slots == 0;
        const std::int64_t room = ends_row ? shape.row_tokens - (slots - 1) * slot : slot;
        if (i < samples.size())
            planner.add_sample(samples[i], room);
        else
            planner.add_padding(room, 0);
    }
    return planner.take();
}

std::vector<std::int32_t> cumulative_lengths(const GatherPlan& plan, bool padded, bool per_row,
                                             std::int64_t entries) {
    check(entries >= 0, "num_cu_seqlens is ", entries, "; it must not be negative");
    std::vector<std::vector<std::int32_t>> lists(1, {0});
    std::int64_t at = 0;  // position in the rows
    for (const AttentionSegment& segment : plan.segments) {
        if (per_row && at > 0 && at % plan.shape.row_tokens == 0) lists.push_back({0});
        at += segment.room;
        const std::int64_t step = padded ? segment.room : segment.length;
        lists.back().push_back(static_cast<std::int32_t>(lists.back().back() + step));
    }
    std::int64_t longest = 0;
    for (const auto& list : lists) longest = std::max(longest, ssize(list));
    const std::int64_t size = entries == 0 ? longest : entries;
    check(longest <= size, longest - 1, " segments need ", longest,
          " entries of cu_seqlens; it has ", size, "; raise num_cu_seqlens");
    std::vector<std::int32_t> result;
    result.reserve(size * lists.size());
    for (const auto& list : lists) {
        result.insert(result.end(), list.begin(), list.end());
        result.insert(result.end(), size - list.size(), list.back());
    }
    return result;
}

TreeKeys tree_keys(const GatherPlan& plan) {
    TreeKeys keys;
    keys.cu_seqlens_k.push_back(0);
    keys.predecessors.reserve(plan.shape.num_tokens());
    std::int64_t at = 0;  // position in the row
    for (const AttentionSegment& segment : plan.segments) {
        std::int64_t before = -1;
        if (segment.parent >= 0) {  // its keys begin with those of its parent
            const std::int64_t begin = keys.cu_seqlens_k[segment.parent];
            const std::int64_t end = keys.cu_seqlens_k[segment.parent + 1];
            keys.kv_index.resize(keys.kv_index.size() + end - begin);
            std::copy_n(keys.kv_index.begin() + begin, end - begin,
                        keys.kv_index.end() - (end - begin));
            before = keys.kv_index.back();
        }
        for (std::int64_t i = 0; i < segment.room; ++i, before = at++) {
            keys.kv_index.push_back(static_cast<std::int32_t>(at));
            const bool is_padding = segment.source < 0;
            keys.predecessors.push_back(is_padding ? -1 : static_cast<std::int32_t>(before));
        }
        check(keys.kv_index.size() <= std::numeric_limits<std::int32_t>::max(),
              "the paths of a micro batch have more than 2^31 - 1 keys; make it smaller");
        keys.cu_seqlens_k.push_back(static_cast<std::int32_t>(keys.kv_index.size()));
    }
    return keys;
}

}  // namespace megapack

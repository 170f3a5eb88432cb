#include "core/gather/plan.hpp"

#include <algorithm>
#include <limits>

#include "core/base/check.hpp"
#include "core/gather/kernels.hpp"

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
          " tokens is no multiple of the alignment ", alignment);
    const std::int64_t slots = shape.num_rows * shape.slots_per_row();
    check(num_samples <= slots, num_samples, " samples of ", shape.capacity, " tokens for ", slots,
          " slots (", shape.num_rows, " rows of ", shape.row_tokens, ")");
}

class Planner {
  public:
    Planner(Span<const GatherSource> sources, const GatherShape& shape,
            const GatherOptions& options)
        : sources_(sources), shape_(shape), options_(options), plan_{shape, {}, {}} {}

    // One slot of `slot` tokens holding `ref`.
    void add_sample(SampleRef ref, std::int64_t slot) {
        const GatherSource& source = sources_[ref.shard];
        segments_.clear();
        read_segments(source, ref, segments_);
        const std::int64_t used = add_segments(source, ref, slot);
        add_padding(slot - used, options_.positions == Positions::kSample ? used : 0);
    }

    void add_padding(std::int64_t room, std::int64_t first_position) {
        if (room == 0) return;
        plan_.pieces.push_back({nullptr, 0, 0, room, first_position, -1});
        plan_.segments.push_back({room, room, -1});
    }

    GatherPlan take() { return std::move(plan_); }

  private:
    std::int64_t add_segments(const GatherSource& source, SampleRef ref, std::int64_t slot) {
        const bool whole = options_.attention == Extent::kSample;
        std::int64_t used = 0;    // tokens of the sample so far
        std::int64_t placed = 0;  // the same with alignment
        for (std::int64_t i = 0; i < ssize(segments_); ++i) {
            const Segment& segment = segments_[i];
            const bool last = i + 1 == ssize(segments_);
            check<FormatError>(segment.length <= shape_.capacity - used, source.documents.name(),
                               ", sample ", ref.sample, " has more than ", shape_.capacity,
                               " tokens, the capacity it is asked for with");
            used += segment.length;
            const std::int64_t end = whole ? used : placed + segment.length;
            const std::int64_t next = !whole || last ? align_up(end, options_.alignment) : end;
            check(next <= slot, source.documents.name(), ", sample ", ref.sample, " needs ", next,
                  " of ", slot, " tokens when its ", segments_.size(), " segments are aligned to ",
                  options_.alignment, "; pack with alignment=", options_.alignment,
                  " (megapack-build pack --alignment ", options_.alignment,
                  "), or make the row longer");
            add_piece(source, i, next - placed, whole ? used - segment.length : placed);
            if (!whole) {
                add_segment(segment.length, next - placed, source);
            }
            placed = next;
        }
        if (whole && used > 0) {
            add_segment(used, placed, source);
        }
        return placed;
    }

    void add_segment(std::int64_t length, std::int64_t room, const GatherSource& source) {
        plan_.segments.push_back({length, room, static_cast<std::int32_t>(source.number)});
    }

    void add_piece(const GatherSource& source, std::int64_t i, std::int64_t room,
                   std::int64_t position_in_sample) {
        const Segment& segment = segments_[i];
        std::int64_t first_position = 0;
        if (options_.positions == Positions::kDocument) first_position = segment.begin;
        if (options_.positions == Positions::kSample) first_position = position_in_sample;
        const Segment* next = i + 1 < ssize(segments_) ? &segments_[i + 1] : nullptr;
        const std::int64_t label_at = last_label_position(segment, next, options_.labels);
        plan_.pieces.push_back(
            {&source, segment.token_begin, segment.length, room, first_position, label_at});
    }

    Span<const GatherSource> sources_;
    GatherShape shape_;
    GatherOptions options_;
    GatherPlan plan_;
    std::vector<Segment> segments_;
};

// ---- Filling: tokens, labels, loss mask and positions, written to the caller's memory

void fill_labels(const Piece& piece, std::int64_t* labels, float* mask) {
    const std::int64_t body = piece.length - 1;
    const bool has_last = piece.last_label_at >= 0;
    labels[body] = kNoLabel;
    mask[body] = 0.0F;
    if (piece.source->has_labels()) {
        widen_chosen(piece.source->labels, piece.token_begin + 1, body, labels, mask);
        if (has_last) {
            widen_chosen(piece.source->labels, piece.last_label_at, 1, labels + body, mask + body);
        }
        return;
    }
    widen(piece.source->tokens, piece.token_begin + 1, body, labels);
    fill(1.0F, body, mask);
    if (has_last) {
        widen(piece.source->tokens, piece.last_label_at, 1, labels + body);
        mask[body] = 1.0F;
    }
}

// `at`: where its room begins in the buffers.
void fill_piece(const Piece& piece, const GatherOptions& options, std::int64_t at,
                const GatherOutput& out) {
    std::int64_t* tokens = out.tokens.data() + at;
    std::int64_t* labels = out.labels.data() + at;
    float* mask = out.loss_mask.data() + at;
    if (piece.length > 0) {
        widen(piece.source->tokens, piece.token_begin, piece.length, tokens);
        fill_labels(piece, labels, mask);
    }
    const std::int64_t padding = piece.room - piece.length;
    fill(options.pad_token, padding, tokens + piece.length);
    fill(kNoLabel, padding, labels + piece.length);
    fill(0.0F, padding, mask + piece.length);
    count_up(piece.first_position, piece.room, out.position_ids.data() + at);
}

// Samples come in random order, so the tokens of a piece are in no cache: they are asked for while
// the piece before is written.
void prefetch_piece(const Piece& piece) {
    if (piece.source == nullptr) return;
    prefetch(piece.source->tokens, piece.token_begin, piece.length);
    if (piece.source->has_labels()) {
        prefetch(piece.source->labels, piece.token_begin, piece.length);
    }
}

std::int64_t count_segment(const GatherSource& source, const Segment& segment, const Segment* next,
                           Extent labels) {
    const std::int64_t body = segment.length - 1;
    const std::int64_t last_at = last_label_position(segment, next, labels);
    if (!source.has_labels()) return body + (last_at >= 0 ? 1 : 0);
    return count_chosen(source.labels, segment.token_begin + 1, body) +
           (last_at >= 0 ? count_chosen(source.labels, last_at, 1) : 0);
}

}  // namespace

std::int64_t last_label_position(const Segment& segment, const Segment* next, Extent labels) {
    if (!segment.ends_document) return segment.token_begin + segment.length;
    return labels == Extent::kSample && next != nullptr ? next->token_begin : -1;
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

GatherPlan plan_gather(Span<const GatherSource> sources, Span<const SampleRef> samples,
                       const GatherShape& shape, const GatherOptions& options) {
    check_shape(shape, options.alignment, samples.size());
    const std::int64_t slots = shape.slots_per_row();
    const std::int64_t slot = shape.row_tokens / slots / options.alignment * options.alignment;
    check(slot >= shape.capacity, "capacity ", shape.capacity, " is no multiple of the alignment ",
          options.alignment, " and fills a row of ", shape.row_tokens,
          "; make the row longer or the alignment smaller");
    Planner planner(sources, shape, options);
    for (std::int64_t i = 0; i < shape.num_rows * slots; ++i) {
        const bool ends_row = (i + 1) % slots == 0;
        const std::int64_t room = ends_row ? shape.row_tokens - (slots - 1) * slot : slot;
        if (i < samples.size()) {
            planner.add_sample(samples[i], room);
        } else {
            planner.add_padding(room, 0);
        }
    }
    return planner.take();
}

std::vector<std::int32_t> cumulative_lengths(const GatherPlan& plan, bool padded, bool per_row,
                                             std::int64_t entries) {
    check(entries >= 0, "num_cu_seqlens is ", entries, "; it must not be negative");
    std::vector<std::vector<std::int32_t>> lists(1, {0});
    std::int64_t at = 0;  // by rooms, to see where a row ends
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

void fill_gather(const GatherPlan& plan, const GatherOptions& options, const GatherOutput& out) {
    const std::int64_t size = plan.shape.num_tokens();
    check(out.tokens.size() == size && out.labels.size() == size && out.loss_mask.size() == size &&
              out.position_ids.size() == size,
          "the buffers of a micro batch must hold ", size, " elements each");
    std::int64_t at = 0;
    for (std::int64_t i = 0; i < ssize(plan.pieces); ++i) {
        if (i == 0) prefetch_piece(plan.pieces[0]);
        if (i + 1 < ssize(plan.pieces)) prefetch_piece(plan.pieces[i + 1]);
        fill_piece(plan.pieces[i], options, at, out);
        at += plan.pieces[i].room;
    }
}

std::vector<std::int64_t> count_labels(Span<const GatherSource> sources,
                                       Span<const SampleRef> samples, Extent labels) {
    std::vector<std::int64_t> counts(samples.size(), 0);
    std::vector<Segment> segments;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        const GatherSource& source = sources[samples[i].shard];
        segments.clear();
        read_segments(source, samples[i], segments);
        for (std::int64_t s = 0; s < ssize(segments); ++s) {
            const Segment* next = s + 1 < ssize(segments) ? &segments[s + 1] : nullptr;
            counts[i] += count_segment(source, segments[s], next, labels);
        }
    }
    return counts;
}

}  // namespace megapack

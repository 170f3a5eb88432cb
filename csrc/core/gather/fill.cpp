#include "core/gather/fill.hpp"

#include "core/base/check.hpp"
#include "core/gather/kernels.hpp"

namespace megapack {
namespace {

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

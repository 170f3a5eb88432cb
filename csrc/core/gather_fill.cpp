#include "core/gather_fill.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace megapack {
namespace {

// Calls f with a typed pointer to element `at`.
template <typename F>
auto with_type(const TokenArray& array, std::int64_t at, F f) {
    switch (array.type) {
        case TokenType::kUint8:
            return f(static_cast<const std::uint8_t*>(array.data) + at);
        case TokenType::kInt8:
            return f(static_cast<const std::int8_t*>(array.data) + at);
        case TokenType::kInt16:
            return f(static_cast<const std::int16_t*>(array.data) + at);
        case TokenType::kUint16:
            return f(static_cast<const std::uint16_t*>(array.data) + at);
        case TokenType::kInt32:
            return f(static_cast<const std::int32_t*>(array.data) + at);
        case TokenType::kInt64:
            break;
    }
    return f(static_cast<const std::int64_t*>(array.data) + at);
}

void widen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to) {
    with_type(from, at, [=](const auto* tokens) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(tokens[i]);
    });
}

// Labels that somebody chose (chat: only the assistant's tokens); any negative one means none.
void widen_chosen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to,
                  float* mask) {
    with_type(from, at, [=](const auto* chosen) {
        for (std::int64_t i = 0; i < count; ++i) {
            const auto label = static_cast<std::int64_t>(chosen[i]);
            to[i] = label < 0 ? kNoLabel : label;
            mask[i] = label < 0 ? 0.0F : 1.0F;
        }
    });
}

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
    std::fill(mask, mask + body, 1.0F);
    if (has_last) {
        widen(piece.source->tokens, piece.last_label_at, 1, labels + body);
        mask[body] = 1.0F;
    }
}

std::int64_t count_chosen(const TokenArray& labels, std::int64_t at, std::int64_t count) {
    return with_type(labels, at, [=](const auto* chosen) {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count; ++i) total += static_cast<std::int64_t>(chosen[i]) >= 0;
        return total;
    });
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
    const auto size = static_cast<std::size_t>(plan.shape.num_tokens());
    check(out.tokens.size() == size && out.labels.size() == size && out.loss_mask.size() == size &&
              out.position_ids.size() == size,
          "the buffers of a micro batch must hold ", size, " elements each");
    std::int64_t at = 0;
    for (const Piece& piece : plan.pieces) {
        std::int64_t* tokens = out.tokens.data() + at;
        std::int64_t* labels = out.labels.data() + at;
        float* mask = out.loss_mask.data() + at;
        std::int64_t* positions = out.position_ids.data() + at;
        if (piece.length > 0) {
            widen(piece.source->tokens, piece.token_begin, piece.length, tokens);
            fill_labels(piece, labels, mask);
        }
        std::fill(tokens + piece.length, tokens + piece.room, options.pad_token);
        std::fill(labels + piece.length, labels + piece.room, kNoLabel);
        std::fill(mask + piece.length, mask + piece.room, 0.0F);
        for (std::int64_t i = 0; i < piece.room; ++i) positions[i] = piece.first_position + i;
        at += piece.room;
    }
}

std::vector<std::int64_t> count_labels(Span<const GatherSource> sources,
                                       Span<const SampleRef> samples, Extent labels) {
    std::vector<std::int64_t> counts(samples.size(), 0);
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < samples.size(); ++i) {
        const GatherSource& source = source_of(sources, samples[i]);
        segments.clear();
        read_segments(source, samples[i], segments);
        for (std::size_t s = 0; s < segments.size(); ++s) {
            const Segment* next = s + 1 < segments.size() ? &segments[s + 1] : nullptr;
            counts[i] += count_segment(source, segments[s], next, labels);
        }
    }
    return counts;
}

}  // namespace megapack

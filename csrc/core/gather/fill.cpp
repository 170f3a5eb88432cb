#include "core/gather/fill.hpp"

#include <algorithm>

#include "core/base/check.hpp"

// GCC makes one copy of a function per instruction set and picks one when the library is loaded,
// which needs glibc's indirect functions. Elsewhere there is the one copy for the baseline. All
// arithmetic is on integers: the copies differ in speed only.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define MEGAPACK_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define MEGAPACK_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#else
#define MEGAPACK_CLONES
#endif

#define MEGAPACK_INLINE inline __attribute__((always_inline))

namespace megapack {
namespace {

constexpr std::int64_t kNoLabel = -100;

// ---- The inner loops, compiled for several instruction sets; the processor that runs them chooses
// (a wheel built on one node of a cluster runs on the others).

template <typename T>
MEGAPACK_INLINE void widen_loop(const T* from, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(from[i]);
}

using Out = std::int64_t*;

// One per type, because a template cannot be cloned.
MEGAPACK_CLONES void widen_each(const std::uint8_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int8_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int16_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::uint16_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int32_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int64_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}

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

constexpr std::int64_t kLine = 64;  // bytes of a cache line
// Of a long run the beginning is enough: the processor sees the stream and goes on by itself.
constexpr std::int64_t kMostAhead = 16384;

// Has these elements brought into the cache, as far as that is worthwhile; changes nothing else.
void prefetch(const TokenArray& from, std::int64_t at, std::int64_t count) {
    const std::int64_t itemsize = bytes_of(from.type);
    const auto* begin = static_cast<const unsigned char*>(from.data) + at * itemsize;
    const std::int64_t size = std::min(count * itemsize, kMostAhead);
    for (std::int64_t byte = 0; byte < size; byte += kLine) __builtin_prefetch(begin + byte);
}

// to[i] = element at + i of the array, as int64.
void widen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to) {
    with_type(from, at, [=](const auto* tokens) { widen_each(tokens, count, to); });
}

// The same for labels that somebody chose: a negative one is none, and mask says which there are.
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

// How many of them are not negative.
std::int64_t count_chosen(const TokenArray& from, std::int64_t at, std::int64_t count) {
    return with_type(from, at, [=](const auto* chosen) {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count; ++i) total += static_cast<std::int64_t>(chosen[i]) >= 0;
        return total;
    });
}

// to[i] = first + i.
MEGAPACK_CLONES void count_up(std::int64_t first, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = first + i;
}

MEGAPACK_CLONES void fill(std::int64_t value, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

MEGAPACK_CLONES void fill(float value, std::int64_t count, float* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

// ---- Pieces

void fill_labels(const Piece& piece, std::int64_t* labels, float* mask) {
    const std::int64_t body = piece.length - 1;
    const bool has_last = piece.last_label_at >= 0;
    labels[body] = kNoLabel;
    mask[body] = 0.0F;
    if (piece.shard->has_labels()) {
        widen_chosen(piece.shard->labels, piece.token_begin + 1, body, labels, mask);
        if (has_last) {
            widen_chosen(piece.shard->labels, piece.last_label_at, 1, labels + body, mask + body);
        }
        return;
    }
    widen(piece.shard->tokens, piece.token_begin + 1, body, labels);
    fill(1.0F, body, mask);
    if (has_last) {
        widen(piece.shard->tokens, piece.last_label_at, 1, labels + body);
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
        widen(piece.shard->tokens, piece.token_begin, piece.length, tokens);
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
    if (piece.shard == nullptr) return;
    prefetch(piece.shard->tokens, piece.token_begin, piece.length);
    if (piece.shard->has_labels()) {
        prefetch(piece.shard->labels, piece.token_begin, piece.length);
    }
}

std::int64_t count_segment(const Shard& shard, const Segment& segment, const Segment* next,
                           Extent label_boundary) {
    const std::int64_t body = segment.length - 1;
    const std::int64_t last_at = last_label_position(segment, next, label_boundary);
    if (!shard.has_labels()) return body + (last_at >= 0 ? 1 : 0);
    return count_chosen(shard.labels, segment.token_begin + 1, body) +
           (last_at >= 0 ? count_chosen(shard.labels, last_at, 1) : 0);
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

std::vector<std::int64_t> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                       Extent label_boundary) {
    std::vector<std::int64_t> counts(samples.size(), 0);
    std::vector<Segment> segments;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        const Shard& shard = shards[samples[i].shard];
        segments.clear();
        read_segments(shard, samples[i], segments);
        for (std::int64_t s = 0; s < ssize(segments); ++s) {
            const Segment* next = s + 1 < ssize(segments) ? &segments[s + 1] : nullptr;
            counts[i] += count_segment(shard, segments[s], next, label_boundary);
        }
    }
    return counts;
}

}  // namespace megapack

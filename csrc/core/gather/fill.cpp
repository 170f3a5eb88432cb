#include "core/gather/fill.hpp"

#include <algorithm>
#include <cstring>

#include "core/base/check.hpp"

// GCC makes one copy of a function per instruction set and picks one when the library is loaded,
// which needs glibc's indirect functions. Elsewhere there is the one copy for the baseline. Floats
// are multiplied and never added: the copies differ in speed only.
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

// Weights are float16 from 0 on, finite: bits below 0x7c00. As float32 they are exact, also where a
// processor flushes denormal numbers to 0. Without branches, so that loops over it are vectorized:
// as if the number was normal it is 2^-15 (1 + m / 1024) instead of 2^-24 m where it is not.
MEGAPACK_INLINE float weight_of(std::uint16_t half) {
    const std::uint32_t normal = (static_cast<std::uint32_t>(half) << 13) + (112U << 23);
    float value = 0;
    std::memcpy(&value, &normal, sizeof value);
    value = value * 2 - 0x1p-14F;  // exact where it counts
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t small = half < 1024 ? ~0U : 0U;
    bits = (bits & small) | (normal & ~small);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The same in units of 2^-24, in which sums are exact in any order.
MEGAPACK_INLINE std::int64_t units_of(std::uint16_t half) {
    const std::uint32_t exponent = half >> 10;
    const std::uint64_t digits = (half & 1023U) + (exponent == 0 ? 0U : 1024U);
    return static_cast<std::int64_t>(digits << (exponent == 0 ? 0U : exponent - 1));
}

MEGAPACK_CLONES std::int64_t sum_units(const std::uint16_t* weights, std::int64_t count) {
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += units_of(weights[i]);
    return sum;
}

// mask[i] = weight i * factor.
MEGAPACK_CLONES void fill_weights(const std::uint16_t* weights, std::int64_t count, float factor,
                                  float* mask) {
    for (std::int64_t i = 0; i < count; ++i) mask[i] = weight_of(weights[i]) * factor;
}

// mask[i] *= weight i * factor.
MEGAPACK_CLONES void multiply(const std::uint16_t* weights, std::int64_t count, float factor,
                              float* mask) {
    for (std::int64_t i = 0; i < count; ++i) mask[i] = mask[i] * weight_of(weights[i]) * factor;
}

MEGAPACK_CLONES void multiply(std::int64_t count, float factor, float* mask) {
    for (std::int64_t i = 0; i < count; ++i) mask[i] *= factor;
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

const std::uint16_t* weights_at(const Shard& shard, std::int64_t at) {
    return static_cast<const std::uint16_t*>(shard.weights.data) + at;
}

// Adds the labels of tokens [at, at + count) to a total; their weights in units.
void add_labels(const Shard& shard, std::int64_t at, std::int64_t count, std::int64_t* labels,
                std::int64_t* units) {
    const std::int64_t found = shard.has_labels() ? count_chosen(shard.labels, at, count) : count;
    *labels += found;
    if (!shard.has_weights()) {
        *units += found << 24;
        return;
    }
    const std::uint16_t* weights = weights_at(shard, at);
    if (!shard.has_labels()) {
        *units += sum_units(weights, count);
        return;
    }
    with_type(shard.labels, at, [=](const auto* chosen) {
        for (std::int64_t i = 0; i < count; ++i) {
            if (static_cast<std::int64_t>(chosen[i]) >= 0) *units += units_of(weights[i]);
        }
    });
}

// Of `length` tokens from token_begin on, or of runs, the first of which is one token.
LabelTotals total_of(const Shard& shard, std::int64_t token_begin, std::int64_t length,
                     Span<const Run> runs, Label last) {
    std::int64_t labels = 0;
    std::int64_t units = 0;
    if (runs.empty()) add_labels(shard, token_begin + 1, length - 1, &labels, &units);
    for (std::int64_t r = 1; r < runs.size(); ++r) {
        add_labels(shard, runs[r].at, runs[r].length, &labels, &units);
    }
    if (last.at >= 0) add_labels(shard, last.at, 1, &labels, &units);
    return {labels, static_cast<double>(units) * 0x1p-24, units > 0 ? 1 : 0};
}

Span<const Run> runs_of(const std::vector<Run>& runs, Part part) {
    return {runs.data() + part.begin, part.size()};
}

// What every weight of a piece is multiplied with.
float factor_of(const Piece& piece, Span<const Run> runs, Loss loss) {
    if (loss == Loss::kTokenMean) return piece.factor;
    const double sum =
        total_of(*piece.shard, piece.token_begin, piece.length, runs, piece.last_label).weight;
    return sum > 0 ? static_cast<float>(piece.factor / sum) : 0.0F;
}

// Of `count` labels that stand at `at` in the file.
void fill_labels(const Shard& shard, std::int64_t at, std::int64_t count, float factor,
                 std::int64_t* labels, float* mask) {
    if (!shard.has_labels()) {
        widen(shard.tokens, at, count, labels);
        if (shard.has_weights()) {
            fill_weights(weights_at(shard, at), count, factor, mask);
        } else {
            fill(factor, count, mask);
        }
        return;
    }
    widen_chosen(shard.labels, at, count, labels, mask);
    if (shard.has_weights()) {
        multiply(weights_at(shard, at), count, factor, mask);
    } else if (factor != 1.0F) {
        multiply(count, factor, mask);
    }
}

// The tokens of runs.
void widen(const TokenArray& from, Span<const Run> runs, std::int64_t* to) {
    for (const Run& run : runs) {
        if (run.literal >= 0) {
            *to = run.literal;
        } else {
            widen(from, run.at, run.length, to);
        }
        to += run.length;
    }
}

// Of runs, the first of which is one token: labels are the tokens of all others.
void fill_labels(const Shard& shard, Span<const Run> runs, std::int64_t body, float factor,
                 std::int64_t* labels, float* mask) {
    runs = runs.subspan(1, runs.size() - 1);
    widen(shard.tokens, runs, labels);
    if (!shard.has_weights()) return fill(factor, body, mask);
    for (const Run& run : runs) {
        fill_weights(weights_at(shard, run.at), run.length, factor, mask);
        mask += run.length;
    }
}

void fill_labels(const Piece& piece, Span<const Run> runs, Loss loss, std::int64_t* labels,
                 float* mask) {
    const std::int64_t body = piece.length - 1;
    const float factor = factor_of(piece, runs, loss);
    if (runs.empty()) {
        fill_labels(*piece.shard, piece.token_begin + 1, body, factor, labels, mask);
    } else {
        fill_labels(*piece.shard, runs, body, factor, labels, mask);
    }
    const Label last = piece.last_label;
    if (last.at >= 0) {
        fill_labels(*piece.shard, last.at, 1, factor, labels + body, mask + body);
        if (last.literal >= 0) labels[body] = last.literal;
    } else {
        labels[body] = kNoLabel;
        mask[body] = 0.0F;
    }
}

void fill_tokens(const Piece& piece, Span<const Run> runs, std::int64_t* tokens) {
    const TokenArray& from = piece.shard->tokens;
    if (!runs.empty()) return widen(from, runs, tokens);
    widen(from, piece.token_begin, piece.length, tokens);
}

// `at`: where its room begins in the buffers.
void fill_piece(const Piece& piece, Span<const Run> runs, const GatherOptions& options,
                std::int64_t at, const GatherOutput& out) {
    std::int64_t* tokens = out.tokens.data() + at;
    std::int64_t* labels = out.labels.data() + at;
    float* mask = out.loss_mask.data() + at;
    if (piece.length > 0) {
        fill_tokens(piece, runs, tokens);
        fill_labels(piece, runs, options.loss, labels, mask);
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
    if (piece.shard->has_weights()) {
        prefetch(piece.shard->weights, piece.token_begin, piece.length);
    }
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
        fill_piece(plan.pieces[i], runs_of(plan.runs, plan.pieces[i].runs), options, at, out);
        at += plan.pieces[i].room;
    }
}

std::vector<LabelTotals> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                      Extent label_boundary, const Fim* fim) {
    std::vector<LabelTotals> totals(samples.size());
    std::vector<Segment> segments;
    std::vector<Run> runs;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        const Shard& shard = shards[samples[i].shard];
        runs.clear();
        read_segments(fim, shard, samples[i], segments, runs);
        for (std::int64_t s = 0; s < ssize(segments); ++s) {
            const Segment* next = s + 1 < ssize(segments) ? &segments[s + 1] : nullptr;
            const Label last = last_label(segments[s], next, runs, label_boundary);
            const LabelTotals more = total_of(shard, segments[s].token_begin, segments[s].length,
                                              runs_of(runs, segments[s].runs), last);
            totals[i].labels += more.labels;
            totals[i].weight += more.weight;
            totals[i].sequences += more.sequences;
        }
    }
    return totals;
}

}  // namespace megapack

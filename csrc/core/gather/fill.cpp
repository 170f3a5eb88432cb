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
#if __GNUC__ >= 11  // which asks a processor for the instruction
#define MEGAPACK_F16C
#include <immintrin.h>
#endif
#else
#define MEGAPACK_CLONES
#endif

#define MEGAPACK_INLINE inline __attribute__((always_inline))

namespace megapack {
namespace {

constexpr std::int64_t kNoLabel = -100;
constexpr std::int64_t kBlock = 256;  // tokens that are written at a time: 7 KB
constexpr std::int64_t kAhead = 512;  // tokens between those that are written and those asked for

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

// mask[i] = weight i * factor, without an instruction for it.
MEGAPACK_CLONES void fill_weights_by_bits(const std::uint16_t* weights, std::int64_t count,
                                          float factor, float* mask) {
    for (std::int64_t i = 0; i < count; ++i) mask[i] = weight_of(weights[i]) * factor;
}

#ifdef MEGAPACK_F16C
// Converts denormal numbers, too, whatever the processor does with those of float32.
__attribute__((target("avx,f16c"))) MEGAPACK_INLINE void weigh_eight(const std::uint16_t* weights,
                                                                     __m256 factor, float* mask) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
    _mm256_storeu_ps(mask, _mm256_mul_ps(_mm256_cvtph_ps(halves), factor));
}

__attribute__((target("avx,f16c"))) void fill_weights_f16c(const std::uint16_t* weights,
                                                           std::int64_t count, float factor,
                                                           float* mask) {
    const __m256 factors = _mm256_set1_ps(factor);
    if (count < 8) {
        for (std::int64_t i = 0; i < count; ++i) mask[i] = weight_of(weights[i]) * factor;
        return;
    }
    for (std::int64_t i = 0; i + 8 < count; i += 8) weigh_eight(weights + i, factors, mask + i);
    weigh_eight(weights + count - 8, factors, mask + count - 8);  // some of them again
}
#endif

// mask[i] = weight i * factor.
void fill_weights(const std::uint16_t* weights, std::int64_t count, float factor, float* mask) {
#ifdef MEGAPACK_F16C
    if (__builtin_cpu_supports("f16c")) return fill_weights_f16c(weights, count, factor, mask);
#endif
    fill_weights_by_bits(weights, count, factor, mask);
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

// Of `count` labels that stand at `at` in the file. The mask of those that somebody chose says
// which there are.
void widen_labels(const Shard& shard, std::int64_t at, std::int64_t count, std::int64_t* labels,
                  float* mask) {
    if (shard.has_labels()) {
        widen_chosen(shard.labels, at, count, labels, mask);
    } else {
        widen(shard.tokens, at, count, labels);
    }
}

// Then what they weigh.
void weigh_labels(const Shard& shard, std::int64_t at, std::int64_t count, float factor,
                  float* mask) {
    if (!shard.has_weights()) {
        if (!shard.has_labels()) return fill(factor, count, mask);
        if (factor != 1.0F) multiply(count, factor, mask);
    } else if (shard.has_labels()) {
        multiply(weights_at(shard, at), count, factor, mask);
    } else {
        fill_weights(weights_at(shard, at), count, factor, mask);
    }
}

// Samples come in random order, so their tokens are in no cache: they are asked for some time
// before they are read. A few at a time: the processor waits for memory in few places, of which
// those that it writes need some.
class Ahead {
  public:
    explicit Ahead(const std::vector<Piece>& pieces) : pieces_(pieces) { ask(kAhead); }

    // For the next `count` tokens and what stands beside them.
    void ask(std::int64_t count) {
        while (count > 0 && next_ < ssize(pieces_)) {
            const Piece& piece = pieces_[next_];
            const std::int64_t some = std::min(count, piece.length - asked_);
            if (some > 0) prefetch(*piece.shard, piece.token_begin + asked_, some);
            count -= some;
            asked_ += some;
            if (asked_ < piece.length) return;
            asked_ = 0;
            ++next_;
        }
    }

  private:
    static void prefetch(const Shard& shard, std::int64_t at, std::int64_t count) {
        megapack::prefetch(shard.tokens, at, count);
        if (shard.has_labels()) megapack::prefetch(shard.labels, at, count);
        if (shard.has_weights()) megapack::prefetch(shard.weights, at, count);
    }

    const std::vector<Piece>& pieces_;
    std::int64_t next_ = 0;
    std::int64_t asked_ = 0;  // tokens of the next piece
};

// Where a piece goes.
struct Place {
    std::int64_t* tokens;
    std::int64_t* labels;
    float* mask;
    std::int64_t* position_ids;
};

// Tokens, all labels but the last, positions: in blocks, which stay in the cache.
void fill_blocks(const Piece& piece, float factor, const Place& to, Ahead& ahead) {
    const Shard& shard = *piece.shard;
    for (std::int64_t begin = 0; begin < piece.length; begin += kBlock) {
        const std::int64_t count = std::min(kBlock, piece.length - begin);
        const std::int64_t at = piece.token_begin + begin;
        const std::int64_t labels = std::min(count, piece.length - 1 - begin);
        const std::int64_t half = (count + 1) / 2;
        widen(shard.tokens, at, count, to.tokens + begin);
        widen_labels(shard, at + 1, labels, to.labels + begin, to.mask + begin);
        ahead.ask(half);
        weigh_labels(shard, at + 1, labels, factor, to.mask + begin);
        count_up(piece.first_position + begin, count, to.position_ids + begin);
        ahead.ask(half);
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

// The same of runs, the first of which is one token.
void fill_runs(const Piece& piece, Span<const Run> runs, float factor, const Place& to,
               Ahead& ahead) {
    const Shard& shard = *piece.shard;
    const std::int64_t body = piece.length - 1;
    const std::int64_t quarter = (piece.length + 3) / 4;
    widen(shard.tokens, runs, to.tokens);
    ahead.ask(quarter);
    std::copy_n(to.tokens + 1, body, to.labels);
    ahead.ask(quarter);
    count_up(piece.first_position, piece.length, to.position_ids);
    ahead.ask(quarter);
    if (shard.has_weights()) {
        float* mask = to.mask;
        for (const Run& run : runs.subspan(1, runs.size() - 1)) {
            fill_weights(weights_at(shard, run.at), run.length, factor, mask);
            mask += run.length;
        }
    } else {
        fill(factor, body, to.mask);
    }
    ahead.ask(quarter);
}

void fill_last_label(const Piece& piece, float factor, std::int64_t* label, float* mask) {
    const Label last = piece.last_label;
    if (last.at < 0) {
        *label = kNoLabel;
        *mask = 0.0F;
        return;
    }
    widen_labels(*piece.shard, last.at, 1, label, mask);
    weigh_labels(*piece.shard, last.at, 1, factor, mask);
    if (last.literal >= 0) *label = last.literal;
}

void fill_padding(const Piece& piece, std::int64_t pad_token, const Place& to) {
    const std::int64_t length = piece.length, padding = piece.room - length;
    fill(pad_token, padding, to.tokens + length);
    fill(kNoLabel, padding, to.labels + length);
    fill(0.0F, padding, to.mask + length);
    count_up(piece.first_position + length, padding, to.position_ids + length);
}

}  // namespace

void fill_gather(const GatherPlan& plan, const GatherOptions& options, const GatherOutput& out) {
    const std::int64_t size = plan.shape.num_tokens();
    check(out.tokens.size() == size && out.labels.size() == size && out.loss_mask.size() == size &&
              out.position_ids.size() == size,
          "the buffers of a micro batch must hold ", size, " elements each");
    Ahead ahead(plan.pieces);
    Place to{out.tokens.data(), out.labels.data(), out.loss_mask.data(), out.position_ids.data()};
    for (const Piece& piece : plan.pieces) {
        if (piece.length > 0) {
            const Span<const Run> runs = runs_of(plan.runs, piece.runs);
            const float factor = factor_of(piece, runs, options.loss);
            if (runs.empty()) {
                fill_blocks(piece, factor, to, ahead);
            } else {
                fill_runs(piece, runs, factor, to, ahead);
            }
            const std::int64_t last = piece.length - 1;
            fill_last_label(piece, factor, to.labels + last, to.mask + last);
        }
        fill_padding(piece, options.pad_token, to);
        to = {to.tokens + piece.room, to.labels + piece.room, to.mask + piece.room,
              to.position_ids + piece.room};
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

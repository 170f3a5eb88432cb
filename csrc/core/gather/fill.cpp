#include "core/gather/fill.hpp"

#include <algorithm>
#include <cstring>

#include "core/base/check.hpp"

// GCC compiles a function once per instruction set and selects one when the library is loaded (this
// needs glibc's indirect functions); other compilers make only the baseline. Floats are multiplied,
// never added, so all versions give the same results.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define MEGAPACK_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define MEGAPACK_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#if __GNUC__ >= 11  // has __builtin_cpu_supports("f16c")
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
constexpr std::int64_t kBlock = 256;   // tokens written at a time: 7 KB
constexpr std::int64_t kAhead = 512;   // tokens between prefetch and use
constexpr std::int64_t kBytes = 4096;  // of a column, copied at a time

// ---- Inner loops, compiled for several instruction sets and selected at run time, so that a wheel
// runs on every node of a cluster

// A function per type, because GCC does not clone templates.
#define MEGAPACK_WIDEN(T)                                                                    \
    MEGAPACK_CLONES void widen_each(const T* from, std::int64_t count, std::int64_t* to) {   \
        for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(from[i]); \
    }
MEGAPACK_WIDEN(std::uint8_t)
MEGAPACK_WIDEN(std::int8_t)
MEGAPACK_WIDEN(std::int16_t)
MEGAPACK_WIDEN(std::uint16_t)
MEGAPACK_WIDEN(std::int32_t)
MEGAPACK_WIDEN(std::int64_t)
#undef MEGAPACK_WIDEN

// to[i] = from[at + i], as int64.
void widen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to) {
    with_type(from, at, [=](const auto* tokens) { widen_each(tokens, count, to); });
}

// The same for a column of labels: negative labels become kNoLabel.
void widen_chosen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to) {
    with_type(from, at, [=](const auto* chosen) {
        for (std::int64_t i = 0; i < count; ++i) {
            const auto label = static_cast<std::int64_t>(chosen[i]);
            to[i] = label < 0 ? kNoLabel : label;
        }
    });
}

// Counts the labels that are not negative.
std::int64_t count_chosen(const TokenArray& from, std::int64_t at, std::int64_t count) {
    return with_type(from, at, [=](const auto* chosen) {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count; ++i) total += static_cast<std::int64_t>(chosen[i]) >= 0;
        return total;
    });
}

// Returns a loss weight (float16, finite, not negative: bits below 0x7c00) in units of 2^-24. Sums
// of units are exact in any order.
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

// mask[i] = weight i * factor, without a conversion instruction. A weight has 11 significant bits,
// so float is exact.
MEGAPACK_CLONES void fill_weights_by_units(const std::uint16_t* weights, std::int64_t count,
                                           float factor, float* mask) {
    for (std::int64_t i = 0; i < count; ++i)
        mask[i] = static_cast<float>(units_of(weights[i])) * 0x1p-24F * factor;
}

#ifdef MEGAPACK_F16C
// Converts denormal numbers in any floating point mode of the processor.
__attribute__((target("avx,f16c"))) MEGAPACK_INLINE void weigh_eight(const std::uint16_t* weights,
                                                                     __m256 factor, float* mask) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
    _mm256_storeu_ps(mask, _mm256_mul_ps(_mm256_cvtph_ps(halves), factor));
}

__attribute__((target("avx,f16c"))) void fill_weights_f16c(const std::uint16_t* weights,
                                                           std::int64_t count, float factor,
                                                           float* mask) {
    const __m256 factors = _mm256_set1_ps(factor);
    if (count < 8) return fill_weights_by_units(weights, count, factor, mask);
    for (std::int64_t i = 0; i + 8 < count; i += 8) weigh_eight(weights + i, factors, mask + i);
    weigh_eight(weights + count - 8, factors, mask + count - 8);  // may overlap the loop
}
#endif

// mask[i] = weight i * factor.
void fill_weights(const std::uint16_t* weights, std::int64_t count, float factor, float* mask) {
#ifdef MEGAPACK_F16C
    if (__builtin_cpu_supports("f16c")) return fill_weights_f16c(weights, count, factor, mask);
#endif
    fill_weights_by_units(weights, count, factor, mask);
}

// mask[i] = 0 for tokens without a label.
MEGAPACK_CLONES void clear_unlabeled(const std::int64_t* labels, std::int64_t count, float* mask) {
    for (std::int64_t i = 0; i < count; ++i) mask[i] = labels[i] < 0 ? 0.0F : mask[i];
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

// Adds the labels of tokens [at, at + count) and their loss weights, in units, to two sums.
void add_labels(const Shard& shard, std::int64_t at, std::int64_t count, std::int64_t* labels,
                std::int64_t* units) {
    const std::int64_t more = shard.has_labels() ? count_chosen(shard.labels, at, count) : count;
    *labels += more;
    if (!shard.has_weights()) {
        *units += more << 24;
        return;
    }
    const std::uint16_t* weights = weights_at(shard, at);
    if (!shard.has_labels()) {
        *units += sum_units(weights, count);
        return;
    }
    with_type(shard.labels, at, [=](const auto* chosen) {
        for (std::int64_t i = 0; i < count; ++i)
            if (static_cast<std::int64_t>(chosen[i]) >= 0) *units += units_of(weights[i]);
    });
}

// Counts the labels of `length` tokens from token_begin on, or of runs. The first run has one
// token, which is not a label.
LabelTotals total_of(const Shard& shard, std::int64_t token_begin, std::int64_t length,
                     Span<const Run> runs, Label last) {
    std::int64_t labels = 0;
    std::int64_t units = 0;
    if (runs.empty()) add_labels(shard, token_begin + 1, length - 1, &labels, &units);
    for (std::int64_t r = 1; r < runs.size(); ++r)
        add_labels(shard, runs[r].at, runs[r].length, &labels, &units);
    if (last.at >= 0) add_labels(shard, last.at, 1, &labels, &units);
    return {labels, static_cast<double>(units) * 0x1p-24, units > 0 ? 1 : 0};
}

Span<const Run> runs_of(const std::vector<Run>& runs, Part part) {
    return {runs.data() + part.begin, part.size()};
}

// Returns the factor on the loss weights of a piece.
float factor_of(const Piece& piece, Span<const Run> runs, Loss loss) {
    if (loss == Loss::kTokenMean) return piece.factor;
    const double sum =
        total_of(*piece.shard, piece.token_begin, piece.length, runs, piece.last_label).weight;
    return sum > 0 ? static_cast<float>(piece.factor / sum) : 0.0F;
}

// Writes the labels of tokens [at, at + count).
void widen_labels(const Shard& shard, std::int64_t at, std::int64_t count, std::int64_t* labels) {
    if (shard.has_labels())
        widen_chosen(shard.labels, at, count, labels);
    else
        widen(shard.tokens, at, count, labels);
}

// Writes the loss mask of these labels.
void weigh_labels(const Shard& shard, std::int64_t at, std::int64_t count, float factor,
                  const std::int64_t* labels, float* mask) {
    if (shard.has_weights())
        fill_weights(weights_at(shard, at), count, factor, mask);
    else
        fill(factor, count, mask);
    if (shard.has_labels()) clear_unlabeled(labels, count, mask);
}

// Prefetches what is stored for the tokens: samples are in random order, so no cache has it. Each
// call prefetches a few tokens, because a processor can have only a limited number of memory
// requests in flight, and writing needs some of them. fetch(shard, at, count) prefetches tokens.
template <typename Fetch>
class Prefetcher {
  public:
    Prefetcher(const std::vector<Piece>& pieces, std::int64_t ahead, Fetch fetch)
        : pieces_(pieces), fetch_(fetch) {
        advance(ahead);
    }

    // Prefetches the next `count` tokens.
    void advance(std::int64_t count) {
        while (count > 0 && next_ < ssize(pieces_)) {
            const Piece& piece = pieces_[next_];
            const std::int64_t size = std::min(count, piece.length - done_);
            if (size > 0) fetch_(*piece.shard, piece.token_begin + done_, size);
            count -= size;
            done_ += size;
            if (done_ < piece.length) return;
            done_ = 0;
            ++next_;
        }
    }

  private:
    const std::vector<Piece>& pieces_;
    Fetch fetch_;
    std::int64_t next_ = 0;
    std::int64_t done_ = 0;  // prefetched tokens of the next piece
};

void prefetch_tokens(const Shard& shard, std::int64_t at, std::int64_t count) {
    prefetch(shard.tokens, at, count);
    if (shard.has_labels()) prefetch(shard.labels, at, count);
    if (shard.has_weights()) prefetch(shard.weights, at, count);
}

// Destination of a piece.
struct Place {
    std::int64_t* tokens;
    std::int64_t* labels;
    float* mask;
    std::int64_t* position_ids;
};

// Writes tokens, labels except the last, and positions in blocks, which stay in the cache.
template <typename Fetch>
void fill_blocks(const Piece& piece, float factor, const Place& to, Prefetcher<Fetch>& prefetcher) {
    const Shard& shard = *piece.shard;
    for (std::int64_t begin = 0; begin < piece.length; begin += kBlock) {
        const std::int64_t count = std::min(kBlock, piece.length - begin);
        const std::int64_t at = piece.token_begin + begin;
        const std::int64_t labels = std::min(count, piece.length - 1 - begin);
        const std::int64_t half = (count + 1) / 2;
        widen(shard.tokens, at, count, to.tokens + begin);
        widen_labels(shard, at + 1, labels, to.labels + begin);
        prefetcher.advance(half);
        weigh_labels(shard, at + 1, labels, factor, to.labels + begin, to.mask + begin);
        count_up(piece.first_position + begin, count, to.position_ids + begin);
        prefetcher.advance(half);
    }
}

// Writes the tokens of runs.
void widen(const TokenArray& from, Span<const Run> runs, std::int64_t* to) {
    for (const Run& run : runs) {
        if (run.literal >= 0)
            *to = run.literal;
        else
            widen(from, run.at, run.length, to);
        to += run.length;
    }
}

// Writes a transformed document like fill_blocks. Its first run is one token.
template <typename Fetch>
void fill_runs(const Piece& piece, Span<const Run> runs, float factor, const Place& to,
               Prefetcher<Fetch>& prefetcher) {
    const Shard& shard = *piece.shard;
    const std::int64_t body = piece.length - 1;
    const std::int64_t quarter = (piece.length + 3) / 4;
    widen(shard.tokens, runs, to.tokens);
    prefetcher.advance(quarter);
    std::copy_n(to.tokens + 1, body, to.labels);
    prefetcher.advance(quarter);
    count_up(piece.first_position, piece.length, to.position_ids);
    prefetcher.advance(quarter);
    if (shard.has_weights()) {
        float* mask = to.mask;
        for (const Run& run : runs.subspan(1, runs.size() - 1)) {
            fill_weights(weights_at(shard, run.at), run.length, factor, mask);
            mask += run.length;
        }
    } else {
        fill(factor, body, to.mask);
    }
    prefetcher.advance(quarter);
}

void fill_last_label(const Piece& piece, float factor, std::int64_t* label, float* mask) {
    const Label last = piece.last_label;
    if (last.at < 0) {
        *label = kNoLabel;
        *mask = 0.0F;
        return;
    }
    widen_labels(*piece.shard, last.at, 1, label);
    weigh_labels(*piece.shard, last.at, 1, factor, label, mask);
    if (last.literal >= 0) *label = last.literal;
}

void fill_padding(const Piece& piece, std::int64_t pad_token, const Place& to) {
    const std::int64_t length = piece.length, padding = piece.room - length;
    fill(pad_token, padding, to.tokens + length);
    fill(kNoLabel, padding, to.labels + length);
    fill(0.0F, padding, to.mask + length);
    count_up(piece.first_position + length, padding, to.position_ids + length);
}

// ---- Prefix trees

// Writes tokens and positions of a segment; its documents add labels and loss mask (add_path).
template <typename Fetch>
void fill_node(const Piece& piece, const Place& to, Prefetcher<Fetch>& prefetcher) {
    widen(piece.shard->tokens, piece.token_begin, piece.length, to.tokens);
    count_up(piece.first_position, piece.length, to.position_ids);
    fill(kNoLabel, piece.length, to.labels);
    fill(0.0F, piece.length, to.mask);
    prefetcher.advance(piece.length);
}

void add(const float* from, std::int64_t count, float* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Compares a document's tokens [at, at + count) with those at `shared`, which another document of
// the tree has: files may have changed since their prefixes were compared.
void check_shared(const Shard& shard, std::int64_t document, std::int64_t at, std::int64_t shared,
                  std::int64_t count) {
    const std::int64_t width = bytes_of(shard.tokens.type);
    const auto* tokens = static_cast<const std::uint8_t*>(shard.tokens.data);
    check<FormatError>(
        std::memcmp(tokens + at * width, tokens + shared * width, count * width) == 0,
        shard.documents.name(), ": document ", document,
        " no longer begins like the documents with which it shares a prefix: its tokens changed "
        "after they were packed; pack again");
}

// Adds the labels and loss weights of `count` tokens from `at` on, at most kBlock, to these tokens.
void add_targets(const TreePath& path, std::int64_t at, std::int64_t count, float factor,
                 const Place& to) {
    const Shard& shard = *path.shard;
    std::int64_t labels[kBlock];
    float mask[kBlock];
    if (!shard.has_labels()) {
        std::copy_n(to.tokens, count, to.labels);
        weigh_labels(shard, at, count, factor, to.labels, mask);
        return add(mask, count, to.mask);
    }
    widen_labels(shard, at, count, labels);
    weigh_labels(shard, at, count, factor, labels, mask);
    for (std::int64_t i = 0; i < count; ++i) {
        if (labels[i] < 0) continue;
        check<FormatError>(labels[i] == to.tokens[i], shard.documents.name(), ": document ",
                           path.document.document, " has label ", labels[i], " for token ",
                           to.tokens[i], "; in prefix trees a label is the token, or negative");
        to.labels[i] = labels[i];
    }
    add(mask, count, to.mask);
}

// Adds the loss of a document to the tokens on its path, except the first, which has no
// predecessor. begins: row index of every piece.
void add_path(const GatherPlan& plan, const TreePath& path, const std::vector<std::int64_t>& begins,
              Loss loss, const Place& row) {
    const TreeDocument& document = path.document;
    const Piece whole{path.shard, document.token_begin, document.length, 0, 0, {}, path.factor, {}};
    const float factor = factor_of(whole, {}, loss);
    for (std::int64_t p = document.last; p >= 0; p = plan.segments[p].parent) {
        const Piece& piece = plan.pieces[p];
        const std::int64_t depth = piece.first_position, at = document.token_begin + depth;
        check_shared(*path.shard, document.document, at, piece.token_begin, piece.length);
        for (std::int64_t i = depth == 0 ? 1 : 0; i < piece.length; i += kBlock) {
            const std::int64_t place = begins[p] + i;
            add_targets(path, at + i, std::min(kBlock, piece.length - i), factor,
                        {row.tokens + place, row.labels + place, row.mask + place, nullptr});
        }
    }
}

void add_paths(const GatherPlan& plan, Loss loss, const Place& row) {
    std::vector<std::int64_t> begins;
    std::int64_t at = 0;
    for (const Piece& piece : plan.pieces) {
        begins.push_back(at);
        at += piece.room;
    }
    for (const TreePath& path : plan.paths) add_path(plan, path, begins, loss, row);
}

// ---- Columns

// Writes the rows of a column one after another.
class RowWriter {
  public:
    RowWriter(const CarriedColumn& column, std::uint8_t* to)
        : fill_(column.fill.data()), row_bytes_(column.row_bytes()), to_(to) {}

    void copy(const std::uint8_t* rows, std::int64_t count) {
        std::memcpy(to_, rows, count * row_bytes_);
        to_ += count * row_bytes_;
    }

    // Writes `count` fill rows; each copy doubles them up to a block, which stays in the cache.
    void fill(std::int64_t count) {
        if (count == 0) return;
        const std::int64_t size = count * row_bytes_;
        const std::int64_t most = std::max<std::int64_t>(1, kFillBlock / row_bytes_) * row_bytes_;
        std::memcpy(to_, fill_, row_bytes_);
        for (std::int64_t done = row_bytes_; done < size;) {
            const std::int64_t more = std::min({done, most, size - done});
            std::memcpy(to_ + done, to_, more);
            done += more;
        }
        to_ += size;
    }

  private:
    static constexpr std::int64_t kFillBlock = 8192;  // bytes

    const std::uint8_t* fill_;
    std::int64_t row_bytes_;
    std::uint8_t* to_;
};

// Writes column c of all pieces. With of_target, a piece has the rows of its tokens from the second
// on, then that of its last label.
void fill_column(const GatherPlan& plan, const CarriedColumn& column, std::size_t c,
                 std::uint8_t* to) {
    RowWriter writer(column, to);
    const std::int64_t width = column.row_bytes(),
                       block = std::max<std::int64_t>(1, kBytes / width);
    Prefetcher prefetcher(plan.pieces, 2 * block,
                          [&](const Shard& shard, std::int64_t at, std::int64_t count) {
                              const ColumnArray rows = shard.column(c);
                              if (rows.data != nullptr)
                                  prefetch(rows.data + at * width, count * width);
                          });
    for (const Piece& piece : plan.pieces) {
        const ColumnArray rows = piece.shard == nullptr ? ColumnArray{} : piece.shard->column(c);
        if (rows.data == nullptr) {
            writer.fill(piece.room);
            continue;
        }
        const auto write = [&](std::int64_t at, std::int64_t literal, std::int64_t count) {
            if (at < 0 || literal >= 0) return writer.fill(count);
            for (std::int64_t row = 0; row < count; row += block) {
                const std::int64_t size = std::min(block, count - row);
                prefetcher.advance(size);
                writer.copy(rows.data + (at + row) * width, size);
            }
        };
        const Run whole{piece.token_begin, piece.length, -1};
        const bool is_whole = piece.runs.size() == 0;
        std::int64_t skip = column.of_target ? 1 : 0;
        for (const Run& run :
             is_whole ? Span<const Run>(&whole, 1) : runs_of(plan.runs, piece.runs)) {
            write(run.at + skip, run.literal, run.length - skip);
            skip = 0;
        }
        if (column.of_target) write(piece.last_label.at, piece.last_label.literal, 1);
        writer.fill(piece.room - piece.length);
    }
}

}  // namespace

void fill_gather(const GatherPlan& plan, const GatherOptions& options, const GatherOutput& out) {
    const std::int64_t size = plan.shape.num_tokens();
    check(out.tokens.size() == size && out.labels.size() == size && out.loss_mask.size() == size &&
              out.position_ids.size() == size,
          "the buffers of a micro batch must have ", size, " elements each");
    check(out.columns.size() == options.columns.size(), "there are ", options.columns.size(),
          " columns, and buffers for ", out.columns.size());
    for (std::size_t c = 0; c < out.columns.size(); ++c)
        check(out.columns[c].size() == size * options.columns[c].row_bytes(),
              "the buffer of column ", c, " must have ", size, " rows of ",
              options.columns[c].row_bytes(), " bytes");
    Prefetcher prefetcher(plan.pieces, kAhead, [](auto&&... range) { prefetch_tokens(range...); });
    Place to{out.tokens.data(), out.labels.data(), out.loss_mask.data(), out.position_ids.data()};
    for (const Piece& piece : plan.pieces) {
        if (piece.length > 0 && options.attention == Extent::kTree) {
            fill_node(piece, to, prefetcher);
        } else if (piece.length > 0) {
            const Span<const Run> runs = runs_of(plan.runs, piece.runs);
            const float factor = factor_of(piece, runs, options.loss);
            if (runs.empty())
                fill_blocks(piece, factor, to, prefetcher);
            else
                fill_runs(piece, runs, factor, to, prefetcher);
            const std::int64_t last = piece.length - 1;
            fill_last_label(piece, factor, to.labels + last, to.mask + last);
        }
        fill_padding(piece, options.pad_token, to);
        to = {to.tokens + piece.room, to.labels + piece.room, to.mask + piece.room,
              to.position_ids + piece.room};
    }
    const Place row{out.tokens.data(), out.labels.data(), out.loss_mask.data(), nullptr};
    if (!plan.paths.empty()) add_paths(plan, options.loss, row);
    for (std::size_t c = 0; c < options.columns.size(); ++c)
        fill_column(plan, options.columns[c], c, out.columns[c].data());
}

std::vector<LabelTotals> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                      const GatherOptions& options) {
    std::vector<LabelTotals> totals(samples.size());
    std::vector<Segment> segments;
    std::vector<Run> runs;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        const Shard& shard = shards[samples[i].shard];
        if (options.attention == Extent::kTree) {
            for (const TreeDocument& document : read_documents(shard, samples[i]))
                totals[i] += total_of(shard, document.token_begin, document.length, {}, {});
            continue;
        }
        runs.clear();
        read_segments(options.transform, shard, samples[i], segments, runs);
        for (std::int64_t s = 0; s < ssize(segments); ++s) {
            const Segment* next = s + 1 < ssize(segments) ? &segments[s + 1] : nullptr;
            const Label last = last_label(segments[s], next, runs, options.label_boundary);
            totals[i] += total_of(shard, segments[s].token_begin, segments[s].length,
                                  runs_of(runs, segments[s].runs), last);
        }
    }
    return totals;
}

}  // namespace megapack

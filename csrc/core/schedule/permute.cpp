#include "core/schedule/permute.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

// A network of few bits reaches only some orders; up to this size a shuffle takes microseconds.
constexpr std::int64_t kShuffled = 1024;

class FeistelPermutation {
  public:
    FeistelPermutation(std::uint64_t key, std::int64_t size)
        : size_(static_cast<std::uint64_t>(size)) {
        int bits = 0;
        while (((size_ - 1) >> bits) != 0) ++bits;
        right_bits_ = bits - bits / 2;
        left_mask_ = (1ULL << (bits / 2)) - 1;
        right_mask_ = (1ULL << right_bits_) - 1;
        for (int i = 0; i < 2 * kRounds; ++i)
            round_keys_[i] = random_bits(key, static_cast<std::uint64_t>(i));
    }

    std::int64_t operator()(std::int64_t position) const {
        auto x = static_cast<std::uint64_t>(position);
        do {
            x = encrypt(x);
        } while (x >= size_);
        return static_cast<std::int64_t>(x);
    }

    std::int64_t inverse(std::int64_t value) const {
        auto x = static_cast<std::uint64_t>(value);
        do {
            x = decrypt(x);
        } while (x >= size_);
        return static_cast<std::int64_t>(x);
    }

  private:
    std::uint64_t encrypt(std::uint64_t x) const {
        std::uint64_t left = x >> right_bits_;
        std::uint64_t right = x & right_mask_;
        for (int i = 0; i < 2 * kRounds; i += 2) {
            right = (right ^ mix64(left ^ round_keys_[i])) & right_mask_;
            left = (left ^ mix64(right ^ round_keys_[i + 1])) & left_mask_;
        }
        return (left << right_bits_) | right;
    }

    std::uint64_t decrypt(std::uint64_t x) const {
        std::uint64_t left = x >> right_bits_;
        std::uint64_t right = x & right_mask_;
        for (int i = 2 * kRounds; i > 0; i -= 2) {
            left = (left ^ mix64(right ^ round_keys_[i - 1])) & left_mask_;
            right = (right ^ mix64(left ^ round_keys_[i - 2])) & right_mask_;
        }
        return (left << right_bits_) | right;
    }

    static constexpr int kRounds = 4;
    std::uint64_t size_;
    int right_bits_ = 0;
    std::uint64_t left_mask_ = 0;
    std::uint64_t right_mask_ = 0;
    std::uint64_t round_keys_[2 * kRounds];
};

// Uniform in [0, bound) for bound <= 1024: the bias of the remainder is below 2^-53.
std::int64_t random_below(std::uint64_t key, std::uint64_t counter, std::int64_t bound) {
    return static_cast<std::int64_t>(random_bits(key, counter) % bound);
}

std::vector<std::int64_t> shuffled(std::uint64_t key, std::int64_t size) {
    std::vector<std::int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = size; i > 1; --i) std::swap(order[i - 1], order[random_below(key, i, i)]);
    return order;
}

}  // namespace

void permute_range(std::uint64_t key, std::int64_t size, std::int64_t first,
                   Span<std::int64_t> out) {
    check(size > 0, "a permutation of ", size, " elements; it needs at least 1");
    const auto count = static_cast<std::int64_t>(out.size());
    check(first >= 0 && count <= size && first <= size - count, "positions [", first, ", +", count,
          ") of a permutation of ", size);
    if (size <= kShuffled) {
        const std::vector<std::int64_t> order = shuffled(key, size);
        std::copy_n(order.begin() + first, count, out.begin());
        return;
    }
    const FeistelPermutation permutation(key, size);
    for (std::int64_t i = 0; i < count; ++i) out[i] = permutation(first + i);
}

void permute_inverse(std::uint64_t key, std::int64_t size, Span<const std::int64_t> values,
                     Span<std::int64_t> out) {
    check(size > 0, "a permutation of ", size, " elements; it needs at least 1");
    check(values.size() == out.size(), values.size(), " values and room for ", out.size());
    for (const std::int64_t value : values)
        check(value >= 0 && value < size, "value ", value, " of a permutation of ", size);
    if (size <= kShuffled) {
        const std::vector<std::int64_t> order = shuffled(key, size);
        std::vector<std::int64_t> place(order.size());
        for (std::int64_t i = 0; i < size; ++i) place[order[i]] = i;
        std::transform(values.begin(), values.end(), out.begin(),
                       [&](std::int64_t value) { return place[value]; });
        return;
    }
    const FeistelPermutation permutation(key, size);
    std::transform(values.begin(), values.end(), out.begin(),
                   [&](std::int64_t value) { return permutation.inverse(value); });
}

void permute_epochs(Span<const EpochRun> runs, bool shuffled, Span<std::int64_t> out) {
    std::int64_t written = 0;
    for (const EpochRun& run : runs) {
        constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
        check(run.size > 0 && run.count >= 0 && run.begin >= 0 && run.begin <= kMax - run.count,
              "positions [", run.begin, ", +", run.count, ") of epochs of ", run.size, " samples");
        for (std::int64_t done = 0; done < run.count;) {
            const std::int64_t epoch = (run.begin + done) / run.size;
            const std::int64_t at = (run.begin + done) % run.size;
            const std::int64_t count = std::min(run.count - done, run.size - at);
            check(count <= out.size() - written, "runs of more than the ", out.size(),
                  " positions asked for");
            const auto part = out.subspan(written, count);
            if (shuffled) {
                permute_range(random_bits(run.key, static_cast<std::uint64_t>(epoch)), run.size, at,
                              part);
            } else {
                std::iota(part.begin(), part.end(), at);
            }
            written += part.size();
            done += count;
        }
    }
}

}  // namespace megapack

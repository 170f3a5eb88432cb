#include "core/schedule/cycle_order.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Non-negative doubles have the same order as their bits.
std::uint64_t bits_of(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

double double_of(std::uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

// Iterates over positions, starting at any position.
class CycleOrder::Merge {
  public:
    Merge(const CycleOrder& order, std::int64_t position) : order_(order) {
        const auto draws_before = [&](double time) {
            std::int64_t before = 0;
            for (const Bucket& bucket : order.buckets_)
                before += order.draws_before(bucket, time, false);
            return before;
        };
        std::uint64_t low = 0, high = bits_of(kNever);  // draws_before(low) <= position
        while (high - low > 1) {
            const std::uint64_t middle = low + (high - low) / 2;
            const std::int64_t before = draws_before(double_of(middle));
            (before <= position ? low : high) = middle;
            if (before == position) break;
        }
        for (const Bucket& bucket : order.buckets_) {
            ranks_.push_back(order.draws_before(bucket, double_of(low), false));
            position_ += ranks_.back();
        }
        for (std::int64_t b = 0; b < ssize(ranks_); ++b) next_.push_back(time_of_next(b));
        while (position_ < position) advance();  // several draws have the same time
    }

    const std::vector<std::int64_t>& ranks() const { return ranks_; }

    // Returns the bucket of this position and moves to the next.
    std::int64_t advance() {
        const auto bucket = std::min_element(next_.begin(), next_.end()) - next_.begin();
        ++ranks_[bucket];
        next_[bucket] = time_of_next(bucket);
        ++position_;
        return bucket;
    }

  private:
    double time_of_next(std::int64_t b) const {
        const Bucket& bucket = order_.buckets_[b];
        return ranks_[b] < bucket.count ? order_.time(bucket, ranks_[b]) : kNever;
    }

    const CycleOrder& order_;
    std::int64_t position_ = 0;
    std::vector<std::int64_t> ranks_;  // draws of every bucket before the position
    std::vector<double> next_;         // time of every bucket's next draw
};

CycleOrder::CycleOrder(Span<const std::int64_t> counts, Span<const double> odds, std::uint64_t key,
                       Times times, bool largest_first) {
    check(counts.size() == odds.size(), counts.size(), " counts and ", odds.size(), " odds");
    constexpr std::int64_t kMostDraws = std::numeric_limits<std::int32_t>::max();
    for (std::int64_t b = 0; b < counts.size(); ++b) {
        check(counts[b] >= 0 && counts[b] <= kMostDraws - size_, "bucket ", b, " is drawn ",
              counts[b], " times; a cycle has from 0 to ", kMostDraws, " draws in all");
        check(odds[b] >= 0x1p-900 && odds[b] <= 0x1p900, "bucket ", b, " has odds ", odds[b],
              "; they must be from 2^-900 to 2^900, so that times of draws differ");
        size_ += counts[b];
        const auto count = static_cast<double>(counts[b]);
        Bucket bucket{counts[b], random_bits(key, b), 0.0, count * odds[b], {}};
        if (times == Times::kConsecutive) {
            bucket.begin = static_cast<double>(b);
            bucket.rate = count;
        }
        if (times == Times::kRandom) {
            for (std::int64_t t = 0; t < counts[b]; ++t)
                bucket.drawn.push_back(random_unit(bucket.key, t));
            std::sort(bucket.drawn.begin(), bucket.drawn.end());
        }
        buckets_.push_back(std::move(bucket));
        if (counts[b] > 0) largest_ = b;
    }
    if (size_ == 0) return;
    first_ = Merge(*this, 0).advance();
    if (largest_first)
        swapped_at_ = unswapped_position(largest_, 0);
    else
        largest_ = first_;
}

double CycleOrder::time(const Bucket& bucket, std::int64_t rank) const {
    if (!bucket.drawn.empty()) return bucket.drawn[rank];
    return bucket.begin + (static_cast<double>(rank) + random_unit(bucket.key, rank)) / bucket.rate;
}

std::int64_t CycleOrder::draws_before(const Bucket& bucket, double time, bool inclusive) const {
    const std::vector<double>& drawn = bucket.drawn;
    if (!drawn.empty()) {
        const auto end = inclusive ? std::upper_bound(drawn.begin(), drawn.end(), time)
                                   : std::lower_bound(drawn.begin(), drawn.end(), time);
        return end - drawn.begin();
    }
    const auto is_before = [&](std::int64_t rank) {
        const double draw_time = this->time(bucket, rank);
        return inclusive ? draw_time <= time : draw_time < time;
    };
    const double all = static_cast<double>(bucket.count);
    const double parts = (time - bucket.begin) * bucket.rate;
    auto rank = static_cast<std::int64_t>(std::min(std::max(parts, 0.0), all));
    while (rank > 0 && !is_before(rank - 1)) --rank;
    while (rank < bucket.count && is_before(rank)) ++rank;
    return rank;
}

std::vector<std::int64_t> CycleOrder::counts(std::int64_t end) const {
    check(0 <= end && end <= size_, "position ", end, " of a cycle of ", size_, " draws");
    return swapped_counts(Merge(*this, end).ranks(), end);
}

std::vector<std::int32_t> CycleOrder::range(std::int64_t begin, std::int64_t end) const {
    check(0 <= begin && begin <= end && end <= size_, "positions ", begin, " to ", end,
          " of a cycle of ", size_, " draws");
    std::vector<std::int32_t> buckets;
    buckets.reserve(end - begin);
    Merge merge(*this, begin);
    for (std::int64_t position = begin; position < end; ++position)
        buckets.push_back(static_cast<std::int32_t>(swapped_bucket(position, merge.advance())));
    return buckets;
}

CycleOrder::Draw CycleOrder::at(std::int64_t position) const {
    check(0 <= position && position < size_, "position ", position, " of a cycle of ", size_,
          " draws");
    Merge merge(*this, position);
    const std::vector<std::int64_t> before = swapped_counts(merge.ranks(), position);
    const std::int64_t bucket = swapped_bucket(position, merge.advance());
    return {bucket, before[bucket]};
}

std::int64_t CycleOrder::position(std::int64_t bucket, std::int64_t rank) const {
    check(0 <= bucket && bucket < ssize(buckets_), "bucket ", bucket, " of ", buckets_.size());
    const std::int64_t count = buckets_[bucket].count;
    check(0 <= rank && rank < count, "draw ", rank, " of a bucket with ", count, " draws");
    if (bucket == largest_ && rank == 0) return 0;
    if (bucket == first_) {  // the exchange shifts its draws before swapped_at_ by one rank
        const std::int64_t shifted = counts(swapped_at_)[bucket];
        if (rank == shifted) return swapped_at_;
        if (rank < shifted) return unswapped_position(bucket, rank + 1);
    }
    return unswapped_position(bucket, rank);
}

std::int64_t CycleOrder::unswapped_position(std::int64_t bucket, std::int64_t rank) const {
    const double draw_time = time(buckets_[bucket], rank);
    std::int64_t position = rank;
    for (std::int64_t b = 0; b < ssize(buckets_); ++b)
        if (b != bucket) position += draws_before(buckets_[b], draw_time, b < bucket);
    return position;
}

std::int64_t CycleOrder::swapped_bucket(std::int64_t position, std::int64_t bucket) const {
    if (position == 0) return largest_;
    return position == swapped_at_ ? first_ : bucket;
}

std::vector<std::int64_t> CycleOrder::swapped_counts(std::vector<std::int64_t> counts,
                                                     std::int64_t end) const {
    if (0 < end && end <= swapped_at_) {
        --counts[first_];
        ++counts[largest_];
    }
    return counts;
}

}  // namespace megapack

#include "core/planning/pool.hpp"

#include <algorithm>

namespace megapack {

Pool::Pool(Span<const Document> documents) : documents_(documents), size_(documents.size()) {
    for (std::int64_t i = size_ - 1; i >= 0; --i) {
        if (length_.empty() || length_.back() != documents[i].length) {
            length_.push_back(documents[i].length);
            end_.push_back(i + 1);
            count_.push_back(0);
        }
        ++count_.back();
    }
    longest_ = ssize(length_) - 1;
    if (length_.empty()) return;
    kind_.assign(length_.back() - length_[0] + 1, -1);
    for (std::int64_t k = 0; k <= longest_; ++k)
        kind_[length_[k] - length_[0]] = static_cast<std::int32_t>(k);
}

std::int64_t Pool::longest_up_to(std::int64_t length) const {
    const auto above = std::upper_bound(length_.begin(), length_.begin() + longest_ + 1, length);
    std::int64_t kind = above - length_.begin() - 1;
    while (kind >= 0 && count_[kind] == 0) --kind;
    return kind;
}

std::int64_t Pool::kind_of(std::int64_t length) const {
    const std::int64_t at = length - length_[0];
    return at < 0 || at >= ssize(kind_) ? -1 : kind_[at];
}

// Two kinds near to each other, so that short ones are left for the last groups.
std::pair<std::int64_t, std::int64_t> Pool::pair_of_sum(std::int64_t sum) const {
    for (std::int64_t k = longest_up_to(sum / 2); k >= 0; --k) {
        const std::int64_t rest = sum - length_[k];
        if (rest > length_[longest_]) break;
        const std::int64_t other = kind_of(rest);
        if (has(k) && has(other) && (other != k || count_[k] > 1)) return {k, other};
    }
    return {-1, -1};
}

std::vector<Document> Pool::take_sum(std::int64_t sum, std::int64_t count) {
    constexpr int kTries = 8;
    if (size_ == 0 || sum > count * length_[longest_]) return {};
    if (has(kind_of(sum))) return {take(kind_of(sum))};
    if (count < 2) return {};
    if (const auto [k, other] = pair_of_sum(sum); k >= 0) return {take(k), take(other)};
    if (count < 3) return {};
    std::int64_t first = longest_up_to(sum - 2 * length_[0]);
    for (int i = 0; i < kTries && first >= 0; ++i) {
        --count_[first];
        const auto [k, other] = pair_of_sum(sum - length_[first]);
        ++count_[first];
        if (k >= 0) return {take(first), take(k), take(other)};
        first = longest_up_to(length_[first] - 1);
    }
    return {};
}

std::vector<Document> Pool::rest() {
    std::vector<Document> documents;
    while (size_ > 0) documents.push_back(take(longest_));
    return documents;
}

Document Pool::take(std::int64_t kind) {
    --size_;
    const Document document = documents_[end_[kind] - count_[kind]--];
    while (longest_ >= 0 && count_[longest_] == 0) --longest_;
    return document;
}

}  // namespace megapack

#include "core/schedule/blend.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/check.hpp"

namespace megapack {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::int64_t kMaxTotal = std::int64_t{1} << 62;
constexpr std::uint64_t kBelowHalf = (std::uint64_t{1} << 63) - 1;

// floor(positions * share + 1/2 - 2^-64) and the fraction, in units of 2^-64.
struct Split {
    std::int64_t light;
    std::uint64_t fraction;
};

Split split(std::int64_t positions, std::uint64_t share) {
    const Wide scaled = static_cast<Wide>(positions) * share + kBelowHalf;
    return {static_cast<std::int64_t>(scaled >> 64), static_cast<std::uint64_t>(scaled)};
}

// Returns part / whole, rounded, in units of 2^-64; part is at most half of the whole.
std::uint64_t share_of(std::int64_t part, std::int64_t whole) {
    if (whole == 0) return 0;
    const auto total = static_cast<Wide>(whole);
    return static_cast<std::uint64_t>(((static_cast<Wide>(part) << 64) + total / 2) / total);
}

void check_weights(Span<const std::int64_t> weights) {
    check(weights.size() > 0 && weights.size() < (std::int64_t{1} << 30), "a blend of ",
          weights.size(), " sources; it must have 1 to 2^30 - 1");
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < weights.size(); ++i) {
        check(weights[i] >= 0 && weights[i] <= kMaxTotal - total, "weight ", weights[i],
              " of source ", i,
              " of a blend; weights must not be negative and must sum to at most 2^62");
        total += weights[i];
    }
    check(total > 0, "all ", weights.size(), " weights of a blend are 0");
}

// Moves the places of the lighter child to the front and keeps the order of both parts; returns the
// number of places moved. The loop has no branch, because the processor could not predict it.
std::int64_t move_light_to_front(Span<std::int32_t> places, std::uint64_t fraction,
                                 std::uint64_t share, std::int32_t* buffer) {
    std::int64_t light = 0;
    std::int64_t heavy = 0;
    for (std::int64_t i = 0; i < places.size(); ++i) {
        const std::int32_t place = places[i];
        const std::uint64_t next = fraction + share;
        const bool to_light = next < fraction;  // a carry: one more for the lighter child
        places[light] = place;
        buffer[heavy] = place;
        light += to_light;
        heavy += !to_light;
        fraction = next;
    }
    std::copy_n(buffer, heavy, places.data() + light);
    return light;
}

}  // namespace

Blend::Blend(Span<const std::int64_t> weights)
    : weights_(weights.begin(), weights.end()), num_sources_(weights.size()) {
    check_weights(weights);
    // Leaves are sorted by weight, and inner nodes are created in ascending weight, so the lightest
    // node is the first of one of the two queues; a leaf wins ties.
    std::vector<std::int32_t> leaves(num_sources_);
    std::iota(leaves.begin(), leaves.end(), 0);
    std::stable_sort(leaves.begin(), leaves.end(),
                     [&](std::int32_t a, std::int32_t b) { return weights[a] < weights[b]; });
    nodes_.reserve(num_sources_ - 1);
    parent_.resize(2 * num_sources_ - 1);
    std::vector<std::int64_t> sums;
    sums.reserve(num_sources_ - 1);
    std::int64_t leaf = 0;
    std::int64_t joined = 0;
    const auto lightest = [&] {
        const bool is_leaf =
            leaf < num_sources_ && (joined == ssize(sums) || weights[leaves[leaf]] <= sums[joined]);
        return is_leaf ? leaves[leaf++] : static_cast<std::int32_t>(num_sources_ + joined++);
    };
    const auto weight_of = [&](std::int32_t node) {
        return is_inner(node) ? sums[node - num_sources_] : weights[node];
    };
    while (ssize(nodes_) + 1 < num_sources_) {
        Node node;
        node.light = lightest();
        node.heavy = lightest();
        const std::int64_t sum = weight_of(node.light) + weight_of(node.heavy);
        node.light_share = share_of(weight_of(node.light), sum);
        const auto parent = static_cast<std::int32_t>(num_sources_ + nodes_.size());
        parent_[node.light] = parent_[node.heavy] = parent;
        nodes_.push_back(node);
        sums.push_back(sum);
    }
    parent_.back() = -1;
}

Blend::Range Blend::range(std::int64_t begin, std::int64_t end) const {
    check(0 <= begin && begin <= end && end <= kMaxPosition, "positions [", begin, ", ", end,
          ") of a blend; they must lie in [0, 2^53]");
    check(end - begin <= std::numeric_limits<std::int32_t>::max(), "positions [", begin, ", ", end,
          ") of a blend exceed the limit of 2^31 - 1 positions at a time");
    const std::int64_t size = end - begin;
    Range result;
    result.places.resize(size);
    std::iota(result.places.begin(), result.places.end(), 0);
    std::vector<std::int32_t> buffer(size);
    struct Visit {
        std::int32_t node;
        std::int64_t begin;  // position among those of the node
        Span<std::int32_t> places;
    };
    std::vector<Visit> open{{static_cast<std::int32_t>(parent_.size()) - 1, begin, result.places}};
    while (!open.empty()) {
        const Visit visit = open.back();
        open.pop_back();
        const std::int64_t count = visit.places.size();
        if (count == 0) continue;
        if (!is_inner(visit.node)) {
            result.runs.push_back({visit.node, visit.begin, static_cast<std::int64_t>(count)});
            continue;
        }
        const Node& node = inner(visit.node);
        const Split before = split(visit.begin, node.light_share);
        const std::int64_t light =
            move_light_to_front(visit.places, before.fraction, node.light_share, buffer.data());
        open.push_back(
            {node.heavy, visit.begin - before.light, visit.places.subspan(light, count - light)});
        open.push_back({node.light, before.light, visit.places.subspan(0, light)});
    }
    return result;
}

std::vector<std::int64_t> Blend::taken(std::int64_t end) const {
    check(0 <= end && end <= kMaxPosition, "position ", end,
          " of a blend; it must lie in [0, 2^53]");
    std::vector<std::int64_t> counts(parent_.size());
    if (end == 0) return {counts.begin(), counts.begin() + num_sources_};
    counts.back() = end;
    for (std::int64_t i = nodes_.size(); i-- > 0;) {
        const std::int64_t count = counts[num_sources_ + i];
        const std::int64_t light = split(count, nodes_[i].light_share).light;
        counts[nodes_[i].light] = light;
        counts[nodes_[i].heavy] = count - light;
    }
    counts.resize(num_sources_);
    return counts;
}

std::int64_t Blend::taken_of(std::int32_t source, std::int64_t end) const {
    check(source >= 0 && source < num_sources_, "source ", source, " of a blend of ", num_sources_,
          " sources; it must be from 0 to ", num_sources_ - 1);
    check(0 <= end && end <= kMaxPosition, "position ", end,
          " of a blend; it must lie in [0, 2^53]");
    std::vector<std::int32_t> path;  // from the source up to below the root
    for (std::int32_t node = source; parent_[node] >= 0; node = parent_[node]) path.push_back(node);
    std::int64_t count = end;
    for (auto child = path.rbegin(); child != path.rend(); ++child) {
        const Node& node = inner(parent_[*child]);
        const std::int64_t light = split(count, node.light_share).light;
        count = *child == node.light ? light : count - light;
    }
    return count;
}

}  // namespace megapack

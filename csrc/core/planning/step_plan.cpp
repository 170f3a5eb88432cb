#include "core/planning/step_plan.hpp"

#include <algorithm>
#include <functional>
#include <optional>

#include "core/base/check.hpp"
#include "core/planning/groups.hpp"
#include "core/planning/long_documents.hpp"
#include "core/planning/short_documents.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kMostWork = std::int64_t{1} << 56;

void check_rules(const StepRules& rules) {
    check(rules.num_ranks >= 1, "num_ranks is ", rules.num_ranks, "; at least 1 is needed");
    check(rules.max_tokens >= 1, "max_tokens_per_rank is ", rules.max_tokens,
          "; at least 1 is needed");
    check(rules.max_documents >= 1, "max_documents_per_rank is ", rules.max_documents,
          "; at least 1 is needed");
    check(rules.linear_length >= 0 && rules.linear_length <= std::int64_t{1} << 28,
          "linear_length is ", rules.linear_length, "; it must be from 0 to 2^28 tokens");
    const std::int64_t degree = rules.max_degree;
    check(degree >= 1 && (degree & (degree - 1)) == 0 && degree <= rules.num_ranks,
          "max_degree is ", degree, "; it must be a power of two, at most num_ranks (",
          rules.num_ranks, ")");
}

// Tokens of all documents.
std::int64_t check_lengths(Span<const std::int64_t> lengths, const StepRules& rules) {
    std::int64_t tokens = 0, work = 0;
    for (std::int64_t i = 0; i < lengths.size(); ++i) {
        const std::int64_t length = lengths[i];
        check(length >= 1, "document ", i, " has ", length, " tokens; leave it out");
        check((length - 1) / rules.max_degree < rules.max_tokens, "document ", i, " has ", length,
              " tokens; ", rules.max_degree, " ranks (max_degree) of ", rules.max_tokens,
              " tokens (max_tokens_per_rank) hold ", rules.max_degree * rules.max_tokens,
              ": raise one of them, or cut the document");
        check(length < (std::int64_t{1} << 28) && work <= kMostWork - length * length, "document ",
              i, ": squared lengths sum to more than 2^56; plan fewer documents at a time");
        tokens += length;
        work += length * length;
    }
    return tokens;
}

// Ties: the smaller document first. One number for both sorts in half the time of a pair.
std::vector<Document> longest_first(Span<const std::int64_t> lengths) {
    constexpr std::int64_t kIdBits = 35, kLastId = (std::int64_t{1} << kIdBits) - 1;
    check(lengths.size() <= kLastId, lengths.size(), " documents; plan fewer at a time");
    std::vector<std::int64_t> keys(lengths.size());
    for (std::int64_t i = 0; i < lengths.size(); ++i)
        keys[i] = lengths[i] << kIdBits | (kLastId - i);
    std::sort(keys.begin(), keys.end(), std::greater<>());
    std::vector<Document> documents;
    documents.reserve(keys.size());
    for (const std::int64_t key : keys)
        documents.push_back({key >> kIdBits, kLastId - (key & kLastId)});
    return documents;
}

// How many of the documents count as long: the longest, with `share` of the tokens, and all that
// one rank cannot hold.
std::int64_t num_long(const std::vector<Document>& documents, std::int64_t share,
                      std::int64_t max_tokens) {
    std::int64_t count = 0;
    for (std::int64_t tokens = 0; count < ssize(documents); ++count) {
        if (documents[count].length <= max_tokens && tokens >= share) break;
        tokens += documents[count].length;
    }
    return count;
}

}  // namespace

StepPlan plan_step(Span<const std::int64_t> lengths, const StepRules& rules) {
    check_rules(rules);
    const std::int64_t num_tokens = check_lengths(lengths, rules);
    const std::vector<Document> documents = longest_first(lengths);
    const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const auto attempt = [&](std::int64_t micro_batches, std::int64_t least_degree,
                             std::int64_t long_share) {
        const std::int64_t mean = ceil_div(num_tokens, micro_batches * rules.num_ranks);
        Groups groups(rules, micro_batches, mean, lengths.size());
        const auto split = documents.begin() + num_long(documents, long_share, rules.max_tokens);
        std::vector<Document> rest = deal_long(groups, {documents.begin(), split}, least_degree);
        rest.insert(rest.end(), split, documents.end());
        return deal_short(groups, rest) ? std::optional(groups.plan()) : std::nullopt;
    };
    if (documents.empty()) return {};
    std::int64_t m = ceil_div(ceil_div(num_tokens, rules.max_tokens), rules.num_ranks);
    while (true) {
        // What cannot be filled with a quarter of the tokens may be with all of them.
        for (const std::int64_t share : {num_tokens - num_tokens / 4, std::int64_t{0}}) {
            for (std::int64_t least = 1; least <= rules.max_degree; least *= 2) {
                if (auto plan = attempt(m, least, share)) return *std::move(plan);
            }
        }
        m = std::min(m + 1 + m / 16, lengths.size());  // one for each document is always enough
    }
}

}  // namespace megapack

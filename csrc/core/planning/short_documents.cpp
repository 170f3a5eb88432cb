#include "core/planning/short_documents.hpp"

#include <algorithm>
#include <queue>
#include <utility>

#include "core/planning/pool.hpp"

namespace megapack {
namespace {

// Deals each document to the group whose ranks miss most tokens; false where one has no room.
bool deal_to_emptiest(Groups& groups, Span<const Document> documents) {
    using Entry = std::pair<std::int64_t, std::int64_t>;  // tokens missing per rank, -group
    const auto entry = [&](std::int64_t g) {
        return Entry{groups.missing(g, groups.mean_tokens()) / groups[g].degree, -g};
    };
    std::vector<Entry> entries;
    for (std::int64_t g = 0; g < groups.size(); ++g) entries.push_back(entry(g));
    std::priority_queue<Entry> emptiest(entries.begin(), entries.end());
    std::vector<Entry> aside;
    for (const Document& document : documents) {
        while (!emptiest.empty() && document.length > groups.room(-emptiest.top().second)) {
            aside.push_back(emptiest.top());
            emptiest.pop();
        }
        if (emptiest.empty()) return false;
        const std::int64_t g = -emptiest.top().second;
        emptiest.pop();
        groups.place(document, g);
        emptiest.push(entry(g));
        for (const Entry& other : aside) emptiest.push(other);
        aside.clear();
    }
    return true;
}

// Fills a group to `per_rank` tokens: down to what three documents can make, then exactly, or as
// nearly as 16 tokens.
void fill(Groups& groups, std::int64_t g, std::int64_t per_rank, Pool& pool) {
    constexpr std::int64_t kWaste = 16;
    while (pool.size() > 0) {
        const std::int64_t missing = std::min(groups.missing(g, per_rank), groups.room(g));
        const std::int64_t places = groups.rules().max_documents - groups[g].documents;
        for (std::int64_t sum = missing; sum > missing - kWaste; --sum) {
            const auto found = pool.take_sum(sum, std::min<std::int64_t>(places, 3));
            for (const Document& document : found) groups.place(document, g);
            if (!found.empty()) return;
        }
        if (!pool.has_up_to(missing)) return;
        groups.place(pool.take_longest(missing), g);
    }
}

}  // namespace

bool deal_short(Groups& groups, const std::vector<Document>& documents) {
    const std::int64_t size = ssize(documents), kept = std::min(size, 3 * groups.size() + 1024);
    if (!deal_to_emptiest(groups, {documents.data(), size - kept})) return false;

    // Those that miss least first: they have the fewest ways to be filled. What room there is in
    // excess is left together, in the last groups.
    std::vector<std::pair<std::int64_t, std::int64_t>> order;
    for (std::int64_t g = 0; g < groups.size(); ++g)
        order.push_back({groups.missing(g, groups.mean_tokens()) / groups[g].degree, g});
    std::sort(order.begin(), order.end());
    Pool pool({documents.data() + size - kept, kept});
    const std::int64_t mean = groups.mean_tokens();
    const std::int64_t per_rank = std::min(groups.rules().max_tokens, mean + mean / 512);
    for (const auto& [missing, g] : order) fill(groups, g, per_rank, pool);
    return deal_to_emptiest(groups, pool.rest());
}

}  // namespace megapack

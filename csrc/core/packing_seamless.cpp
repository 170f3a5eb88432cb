#include "core/packing_seamless.hpp"

#include <cmath>

#include "core/packing_fit.hpp"
#include "core/packing_stream.hpp"

namespace megapack {

// n = floor(length / L) samples are full; n + 1 windows must overlap by D tokens in all.
bool SlidingCut::slides(std::int64_t length) const {
    const std::int64_t n = length / capacity, overlap = (n + 1) * capacity - length;
    if (overlap == capacity) return false;  // exactly n samples
    const auto L = static_cast<double>(capacity);
    if (rules_.placement == Placement::kPublished)
        return overlap <= n * static_cast<std::int64_t>(rules_.r_max * L);
    return static_cast<double>(overlap) <= std::ceil(static_cast<double>(n) * rules_.r_max * L);
}

std::int64_t SlidingCut::begin(std::int64_t length, std::int64_t k) const {
    if (!slides(length)) return k * capacity;
    const std::int64_t n = length / capacity, overlap = (n + 1) * capacity - length;
    switch (rules_.placement) {
        case Placement::kPaper:
            return k * (capacity - (overlap + n - 1) / n);
        case Placement::kPublished:
            return k < n ? k * (capacity - overlap / (n + 1) - 1) : length - capacity;
        default:
            return k * (length - capacity) / n;
    }
}

template <typename Id, typename Length>
StageOne count_stage_one(const Documents<Id, Length>& documents, const SeamlessRules& rules) {
    const SlidingCut cut(rules);
    StageOne stage;
    for (std::size_t i = 0; i < documents.size(); ++i) {
        const std::int64_t length = documents[i].length;
        if (length < cut.capacity || !cut.slides(length)) {
            stage.short_tokens += length < cut.capacity ? length : cut.tail(length);
            continue;
        }
        const std::int64_t windows = cut.num_chunks(length);
        std::int64_t covered = cut.capacity;
        for (std::int64_t k = 1; k < windows; ++k)
            covered += std::min(cut.capacity, cut.begin(length, k) - cut.begin(length, k - 1));
        ++stage.num_sliding;
        stage.repeated_tokens += windows * cut.capacity - covered;
        stage.dropped_tokens += length - covered;
    }
    return stage;
}

namespace {

// The bins of `runs` joined in their order and cut every `capacity` tokens; the segment after.
template <typename Id, typename Length>
std::int64_t write_joined(const FitPlan& plan, const std::vector<FitRun>& runs,
                          const SortedRests<Id>& sorted, Span<const Length> lengths,
                          const Samples<Id, Length>& out, std::int64_t capacity,
                          std::int64_t sample, std::int64_t segment) {
    out.open_sample(sample, segment);
    StreamCutter<Id, Length> cutter(out, capacity, sample, segment, 0);
    for (const FitRun& run : runs) {
        const BinContents contents(plan, run, sorted, capacity);
        for (std::int64_t bin = 0; bin < run.count; ++bin)
            for (const Column& column : contents.columns()) {
                const Id id =
                    sorted.ids[static_cast<std::size_t>(column.first + bin * column.stride)];
                const Rest<Id, Length> rest(id, column.length, lengths);
                cutter.push(rest.document, rest.begin, static_cast<Length>(column.length));
            }
    }
    return cutter.num_segments();
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_seamless(const Documents<Id, Length>& documents,
                                  const SeamlessRules& rules, int threads, Progress& progress) {
    const auto n = static_cast<std::int64_t>(documents.size());
    const std::int64_t capacity = rules.capacity, bin_capacity = capacity + rules.extra_capacity;
    const SlidingCut cut(rules);
    progress.add_total(3 * n);
    LengthSort<Id, Length, SlidingCut> sort(documents, cut, threads);
    const FitPlan plan = plan_fit(sort.counts(), bin_capacity, Fit::kFirst);
    progress.advance(n);

    std::vector<FitRun> full, leftover;
    std::int64_t bins = 0, left = 0;
    for (const FitRun& run : plan.runs) {
        const std::int64_t tokens = bin_capacity - run.space;
        const bool joined =
            rules.placement == Placement::kPublished ? tokens <= capacity : tokens < capacity;
        (joined ? leftover : full).push_back(run);
        (joined ? left : bins) += run.count * (joined ? tokens : 1);
    }
    const std::int64_t chunks = sort.num_chunks(), more = (left + capacity - 1) / capacity;
    // Every rest is one segment at most, and every cut of the joined bins splits one in two.
    Samples<Id, Length> out({capacity}, {chunks + bins + more}, chunks + sort.num_rests() + more);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    const StageOne stage = count_stage_one(documents, rules);
    out.repeated_tokens = stage.repeated_tokens;
    out.dropped_tokens = stage.dropped_tokens;
    progress.advance(n);

    const BinWriter<Id, Length> writer(plan, full, sorted, documents.lengths, capacity);
    writer.write(out, chunks, chunks, threads);
    out.dropped_tokens += writer.lost_tokens();
    const std::int64_t end = write_joined(plan, leftover, sorted, documents.lengths, out, capacity,
                                          chunks + bins, chunks + writer.num_segments());
    out.truncate(out.num_samples(), end);
    progress.advance(n);
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                           \
    template StageOne count_stage_one(const Documents<Id, Length>&, const SeamlessRules&);         \
    template Samples<Id, Length> pack_seamless(const Documents<Id, Length>&, const SeamlessRules&, \
                                               int, Progress&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack

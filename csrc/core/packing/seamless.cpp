#include "core/packing/seamless.hpp"

#include "core/packing/bins.hpp"
#include "core/packing/stream.hpp"

namespace megapack {

SlidingCut::SlidingCut(const SeamlessRules& rules) : capacity(rules.capacity), rules_(rules) {
    check_capacity(rules.capacity);
    check_extra_capacity(rules.extra_capacity);
}

// n = floor(length / L) samples are full; n + 1 windows must overlap by D tokens in all: by at most
// ceil(n r_max L) (equations 1 and 2), or by n floor(r_max L) in the authors' program.
bool SlidingCut::slides(std::int64_t length) const {
    const std::int64_t n = length / capacity, overlap = (n + 1) * capacity - length;
    if (overlap == capacity) return false;  // exactly n samples
    if (rules_.placement == Placement::kPublished)
        return overlap <= n * rules_.r_max.floor_of(capacity);
    return rules_.r_max.rounded_up_holds(overlap, n * capacity);
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
            return static_cast<std::int64_t>(Wide{k} * (length - capacity) / n);
    }
}

namespace {

template <typename Id, typename Length>
StageOne count_part(const Documents<Id, Length>& documents, const SlidingCut& cut, Part range) {
    StageOne stage;
    for (std::int64_t i = range.begin; i < range.end; ++i) {
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

}  // namespace

template <typename Id, typename Length>
StageOne count_stage_one(const Documents<Id, Length>& documents, const SeamlessRules& rules,
                         const Run& run) {
    const SlidingCut cut(rules);
    std::vector<StageOne> parts(run.threads);
    for_each_part(run.threads, documents.size(), run.threads, [&](std::int64_t p, Part range) {
        parts[p] = count_part(documents, cut, range);
    });
    StageOne sum;
    for (const StageOne& part : parts) {
        sum.num_sliding += part.num_sliding;
        sum.short_tokens += part.short_tokens;
        sum.dropped_tokens += part.dropped_tokens;
        sum.repeated_tokens += part.repeated_tokens;
    }
    return sum;
}

namespace {

// The bins of `runs`, none fuller than a sample, joined in their order and cut every `capacity`
// tokens.
template <typename Id, typename Length>
class JoinedBins {
  public:
    JoinedBins(const FitPlan& plan, const std::vector<FitRun>& runs, const SortedRests<Id>& sorted,
               Span<const Length> lengths, std::int64_t capacity)
        : sorted_(sorted), lengths_(lengths), capacity_(capacity) {
        std::int64_t bins = 0, tokens = 0;
        for (const FitRun& run : runs) {
            contents_.emplace_back(plan, run, sorted, capacity);
            first_bin_.push_back(bins);
            first_token_.push_back(tokens);
            bins += run.count;
            tokens += run.count * contents_.back().kept_tokens();
        }
        first_bin_.push_back(bins);
    }

    // Returns the segment after the last. Threads take consecutive bins; where in the samples a
    // thread begins follows from the tokens before, where in the segments only from counting them.
    std::int64_t write(const Samples<Id, Length>& out, std::int64_t sample, std::int64_t segment,
                       int threads) const {
        out.open_sample(sample, segment);
        const std::int64_t bins = first_bin_.back();
        std::vector<std::int64_t> next(threads + 1, 0);
        for_each_part(threads, bins, threads, [&](std::int64_t p, Part range) {
            if (p + 1 == threads) return;  // nobody begins after the last
            SegmentCounter counter(capacity_, token_of(range.begin));
            for_each(range,
                     [&](const Column& column, std::int64_t) { counter.push(column.length); });
            next[p] = counter.num_segments();
        });
        lay_out(next);
        for_each_part(threads, bins, threads, [&](std::int64_t p, Part range) {
            StreamCutter<Id, Length> cutter(out, capacity_, sample, segment + next[p],
                                            token_of(range.begin));
            for_each(range, [&](const Column& column, std::int64_t bin) {
                const Rest<Id, Length> rest(sorted_.ids[column.first + bin * column.stride],
                                            column.length, lengths_);
                cutter.push(rest.document, rest.begin, static_cast<Length>(column.length));
            });
            if (p + 1 == threads) next[threads] = cutter.num_segments();
        });
        return next[threads];
    }

  private:
    // visit(column, number of the bin in its run) for the pieces of bins [begin, end).
    template <typename Visit>
    void for_each(Part bins, Visit visit) const {
        std::int64_t bin = bins.begin;
        for (std::int64_t r = run_of(bin); bin < bins.end; ++r) {
            const std::int64_t stop = std::min(bins.end, first_bin_[r + 1]) - first_bin_[r];
            for (std::int64_t i = bin - first_bin_[r]; i < stop; ++i)
                for (const Column& column : contents_[r].columns()) visit(column, i);
            bin = first_bin_[r + 1];
        }
    }
    std::int64_t run_of(std::int64_t bin) const {
        return std::upper_bound(first_bin_.begin(), first_bin_.end(), bin) - first_bin_.begin() - 1;
    }
    std::int64_t token_of(std::int64_t bin) const {
        if (contents_.empty()) return 0;
        const std::int64_t r = std::min(run_of(bin), ssize(contents_) - 1);
        return first_token_[r] + (bin - first_bin_[r]) * contents_[r].kept_tokens();
    }

    const SortedRests<Id>& sorted_;
    Span<const Length> lengths_;
    std::int64_t capacity_;
    std::vector<BinContents> contents_;
    std::vector<std::int64_t> first_bin_, first_token_;
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_seamless(const Lengths<Length>& lengths, const SeamlessRules& rules,
                                  const Run& run) {
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    const std::int64_t n = documents.size();
    const std::int64_t capacity = rules.capacity, bin_capacity = capacity + rules.extra_capacity;
    const SlidingCut cut(rules);
    run.progress.add_total(3 * n);
    LengthSort<Id, Length, SlidingCut> sort(documents, cut, run.threads);
    const FitPlan plan = plan_fit(sort.counts(), bin_capacity, Fit::kFirst);
    run.progress.advance(n);

    std::vector<FitRun> full, leftover;
    std::int64_t bins = 0, left = 0;
    for (const FitRun& run : plan.runs) {
        const std::int64_t tokens = bin_capacity - run.space;
        const bool too_short =
            rules.placement == Placement::kPublished ? tokens <= capacity : tokens < capacity;
        (too_short ? leftover : full).push_back(run);
        (too_short ? left : bins) += run.count * (too_short ? tokens : 1);
    }
    const std::int64_t chunks = sort.num_chunks(), more = (left + capacity - 1) / capacity;
    // Every rest is one segment at most, and every cut of the joined bins splits one in two.
    Samples<Id, Length> out({capacity}, {chunks + bins + more}, chunks + sort.num_rests() + more);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    const StageOne stage = count_stage_one(documents, rules, run);
    out.repeated_tokens = stage.repeated_tokens;
    out.dropped_tokens = stage.dropped_tokens;
    run.progress.advance(n);

    const BinWriter<Id, Length> writer(plan, full, sorted, documents.lengths, capacity);
    writer.write(out, chunks, chunks, run.threads);
    out.dropped_tokens += writer.lost_tokens();
    const JoinedBins<Id, Length> joined(plan, leftover, sorted, documents.lengths, capacity);
    const std::int64_t end =
        joined.write(out, chunks + bins, chunks + writer.num_segments(), run.threads);
    out.truncate(out.num_samples(), end);
    if (rules.drop_last) drop_partial_sample(out);
    run.progress.advance(n);
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                  \
    template StageOne count_stage_one(const Documents<Id, Length>&, const SeamlessRules&, \
                                      const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)
MEGAPACK_INSTANTIATE_STRATEGY(pack_seamless, SeamlessRules);

}  // namespace megapack

// First-fit and best-fit decreasing, and Seamless Packing, which fits the documents that its
// windows do not cover. plan_fit plans bins on a histogram of lengths, Bins writes them as samples.
//
// Lengths are taken from long to short. Consecutive bins with the same contents form a run.
// Documents of one length fill a run at once, space / length of them per bin, because after the
// first one the same bin is again the first (and the best) that fits. A run is split when the
// documents of a length end in its middle. So there are a few runs per distinct length, for any
// number of documents, and the bins equal those of the rule applied document by document.
//
//     plan_fit of lengths 5 5 5 2 2, bins of 8, first fit
//         ->  bins 0 and 1: 5 2; bin 2: 5    (two runs, three entries)
#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "core/packing/columns.hpp"
#include "core/packing/length_set.hpp"
#include "core/packing/stream.hpp"

namespace megapack {
namespace {

// Every bin of a run has `copies` documents of `length`: bin b those from number base + b * copies
// on. `before`: the previous entry of the run, or -1.
struct FitEntry {
    std::int32_t length, copies;
    std::int64_t base;
    std::int32_t before;
};

// Bins [first_bin, first_bin + count) have the same contents.
struct FitRun {
    std::int64_t first_bin, count;
    std::int64_t space;
    std::int32_t last_entry;  // last entry of their contents
};

struct FitPlan {
    std::vector<FitRun> runs;  // ordered by first_bin
    std::vector<FitEntry> entries;

    std::int64_t num_bins() const {
        return runs.empty() ? 0 : runs.back().first_bin + runs.back().count;
    }
};

using RunId = std::int32_t;

// First fit: a queue, ordered by first bin, of the runs that fit the current length. Runs with less
// space wait, grouped by space, until lengths are short enough.
class FirstFitOrder {
  public:
    explicit FirstFitOrder(std::int64_t capacity) : waiting_(capacity + 1) {}

    // Sets the current length. Call it for every length, from long to short.
    void set_length(std::int64_t length) {
        for (const Key& key : waiting_[length]) active_.push(key);
        length_ = length;
    }
    RunId take() {
        if (active_.empty()) return -1;
        const RunId run = active_.top().second;
        active_.pop();
        return run;
    }
    // Adds a run, or the unused part of one, with its new space.
    void put(RunId id, const FitRun& run) {
        const Key key{run.first_bin, id};
        if (run.space >= length_)
            active_.push(key);
        else if (run.space > 0)
            waiting_[run.space].push_back(key);
    }
    void put_back(RunId id, const FitRun& run) { put(id, run); }

  private:
    using Key = std::pair<std::int64_t, RunId>;
    std::priority_queue<Key, std::vector<Key>, std::greater<>> active_;
    std::vector<std::vector<Key>> waiting_;
    std::int64_t length_ = 0;
};

// Best fit: for each amount of space a queue of the runs, in the order in which they reached it.
class BestFitOrder {
  public:
    explicit BestFitOrder(std::int64_t capacity) : spaces_(capacity), queues_(capacity + 1) {}

    void set_length(std::int64_t length) { length_ = length; }
    RunId take() {
        const std::int64_t space = spaces_.at_least(length_);
        if (space < 0) return -1;
        Queue& queue = queues_[space];
        const RunId run = queue.runs[queue.front++];
        if (queue.front == ssize(queue.runs)) {
            queue = {};
            spaces_.erase(space);
        }
        return run;
    }
    void put(RunId id, const FitRun& run) {
        if (run.space == 0) return;
        queues_[run.space].runs.push_back(id);
        spaces_.insert(run.space);
    }
    // Returns the unused part of the run just taken to the front of its queue.
    void put_back(RunId id, const FitRun& run) {
        Queue& queue = queues_[run.space];
        if (queue.front == 0)
            queue.runs.insert(queue.runs.begin(), id);
        else
            queue.runs[--queue.front] = id;
        spaces_.insert(run.space);
    }

  private:
    struct Queue {
        std::vector<RunId> runs;
        std::int64_t front = 0;
    };
    LengthSet spaces_;
    std::vector<Queue> queues_;
    std::int64_t length_ = 0;
};

template <typename Order>
class Planner {
  public:
    explicit Planner(std::int64_t capacity) : capacity_(capacity), order_(capacity) {}

    FitPlan run(const std::vector<std::int64_t>& counts) {
        for (std::int64_t l = ssize(counts); l-- > 1;) {
            order_.set_length(l);
            place(l, counts[l]);
        }
        const auto by_first_bin = [](const FitRun& a, const FitRun& b) {
            return a.first_bin < b.first_bin;
        };
        std::sort(plan_.runs.begin(), plan_.runs.end(), by_first_bin);
        return std::move(plan_);
    }

  private:
    void place(std::int64_t length, std::int64_t count) {
        for (std::int64_t rank = 0; rank < count;) {
            RunId id = order_.take();
            if (id < 0) id = open_bins(count - rank, capacity_ / length);
            rank += fill(id, length, rank, count - rank);
        }
    }

    // Opens the bins that `count` documents need with `copies` in each.
    RunId open_bins(std::int64_t count, std::int64_t copies) {
        const std::int64_t bins = (count + copies - 1) / copies;
        plan_.runs.push_back({num_bins_, bins, capacity_, -1});
        num_bins_ += bins;
        return static_cast<RunId>(plan_.runs.size()) - 1;
    }

    // Puts documents rank, rank + 1, ... into a run, at most `count`; returns their number.
    std::int64_t fill(RunId id, std::int64_t length, std::int64_t rank, std::int64_t count) {
        FitRun run = plan_.runs[id];
        const std::int64_t copies = run.space / length;
        const std::int64_t full = std::min(run.count, count / copies);
        const std::int64_t single = full < run.count ? count % copies : 0;
        RunId slot = id;  // slot of the next part of the run; -1: a new slot
        if (full > 0) slot = add(slot, run, full, length, copies, rank);
        if (single > 0) slot = add(slot, run, 1, length, single, rank + full * copies);
        if (run.count > 0) order_.put_back(keep(slot, run), run);
        return full * copies + single;
    }

    // Cuts `bins` bins off the front of `run` and puts `copies` documents into each.
    RunId add(RunId slot, FitRun& run, std::int64_t bins, std::int64_t length, std::int64_t copies,
              std::int64_t rank) {
        plan_.entries.push_back({static_cast<std::int32_t>(length),
                                 static_cast<std::int32_t>(copies), rank - run.first_bin * copies,
                                 run.last_entry});
        const auto entry = static_cast<std::int32_t>(plan_.entries.size()) - 1;
        const FitRun filled{run.first_bin, bins, run.space - copies * length, entry};
        order_.put(keep(slot, filled), filled);
        run.first_bin += bins;
        run.count -= bins;
        return -1;
    }

    RunId keep(RunId slot, const FitRun& run) {
        if (slot < 0) {
            slot = static_cast<RunId>(plan_.runs.size());
            plan_.runs.emplace_back();
        }
        plan_.runs[slot] = run;
        return slot;
    }

    std::int64_t capacity_;
    Order order_;
    FitPlan plan_;
    std::int64_t num_bins_ = 0;
};

// Plans bins for counts[l] documents of length l; counts.size() - 1 <= capacity.
FitPlan plan_fit(const std::vector<std::int64_t>& counts, std::int64_t capacity, Fit fit) {
    if (fit == Fit::kFirst) return Planner<FirstFitOrder>(capacity).run(counts);
    return Planner<BestFitOrder>(capacity).run(counts);
}

// Writes runs of bins as segments, longest first; segments past `capacity` tokens are cut or
// dropped. The offsets of every run are known beforehand, so threads write different bins.
template <typename Id, typename Length>
class Bins {
  public:
    Bins(const FitPlan& plan, const std::vector<FitRun>& runs, const SortedRests<Id>& sorted,
         Span<const Length> lengths, std::int64_t capacity)
        : sorted_(sorted), lengths_(lengths), capacity_(capacity) {
        runs_.reserve(runs.size() + 1);
        Contents next;
        for (const FitRun& run : runs) {
            fill(next, plan, run);
            runs_.push_back(next);
            next.first_bin += run.count;
            next.first_segment += run.count * ssize(next.columns);
            next.first_token += run.count * next.tokens;
        }
        next.columns.clear();
        runs_.push_back(next);  // the end of the last run
    }

    std::int64_t num_segments() const { return runs_.back().first_segment; }
    std::int64_t lost_tokens() const { return lost_tokens_; }

    // Writes every bin as a sample.
    void write(const Samples<Id, Length>& out, std::int64_t sample, std::int64_t segment,
               int threads) const {
        for_each_part(threads, num_bins(), threads, [&](std::int64_t, Part range) {
            for_each_run(range, [&](const Contents& run, Part bins) {
                prefetch_first_block(&run + 1);
                write_columns(out, run.columns, sorted_, lengths_, bins.begin, bins.end,
                              sample + run.first_bin + bins.begin,
                              segment + run.first_segment + bins.begin * ssize(run.columns));
            });
        });
    }

    // Joins the bins in order, cuts them every `capacity` tokens and returns the segment after the
    // last. A thread writes consecutive bins. The first sample of a thread follows from the tokens
    // before it; its first segment is known only after counting.
    std::int64_t write_joined(const Samples<Id, Length>& out, std::int64_t sample,
                              std::int64_t segment, int threads) const {
        out.open_sample(sample, segment);
        std::vector<std::int64_t> next(threads + 1, 0);
        for_each_part(threads, num_bins(), threads, [&](std::int64_t p, Part range) {
            if (p + 1 == threads) return;  // no thread follows the last one
            SegmentCounter counter(capacity_, token_of(range.begin));
            for_each_rest(range,
                          [&](const Column& column, std::int64_t) { counter.push(column.length); });
            next[p] = counter.num_segments();
        });
        lay_out(next);
        for_each_part(threads, num_bins(), threads, [&](std::int64_t p, Part range) {
            StreamCutter<Id, Length> cutter(out, capacity_, sample, segment + next[p],
                                            token_of(range.begin));
            for_each_rest(range, [&](const Column& column, std::int64_t bin) {
                const Rest<Id, Length> rest(sorted_.ids[column.first + bin * column.stride],
                                            column.length, lengths_);
                cutter.push(rest.document, rest.begin, static_cast<Length>(column.length));
            });
            if (p + 1 == threads) next[threads] = cutter.num_segments();
        });
        return next[threads];
    }

  private:
    struct Contents {
        std::vector<Column> columns;
        std::int64_t tokens = 0;  // per bin
        std::int64_t first_bin = 0, first_segment = 0, first_token = 0;
    };

    std::int64_t num_bins() const { return runs_.back().first_bin; }

    void fill(Contents& contents, const FitPlan& plan, const FitRun& run) {
        contents.columns.clear();
        contents.tokens = 0;
        entries_.clear();
        for (std::int32_t e = run.last_entry; e >= 0; e = plan.entries[e].before)
            entries_.push_back(plan.entries[e]);
        for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
            const std::int64_t first =
                sorted_.class_begin[entry->length] + entry->base + run.first_bin * entry->copies;
            for (std::int64_t j = 0; j < entry->copies; ++j) {
                const std::int64_t kept =
                    std::min<std::int64_t>(entry->length, capacity_ - contents.tokens);
                contents.tokens += kept;
                lost_tokens_ += run.count * (entry->length - kept);
                if (kept > 0)
                    contents.columns.push_back(
                        {first + j, entry->copies, entry->length, static_cast<std::int32_t>(kept)});
            }
        }
    }

    void prefetch_first_block(const Contents* run) const {
        if (run->columns.empty()) return;
        const std::int64_t bins = run[1].first_bin - run->first_bin;
        prefetch_columns(run->columns, sorted_, 0, std::min(bins, samples_in_block(run->columns)));
    }

    const Contents* run_of(std::int64_t bin) const {
        const auto after =
            std::upper_bound(runs_.begin(), runs_.end(), bin,
                             [](std::int64_t b, const Contents& run) { return b < run.first_bin; });
        return &*after - 1;
    }
    std::int64_t token_of(std::int64_t bin) const {
        const Contents* run = run_of(bin);
        return run->first_token + (bin - run->first_bin) * run->tokens;
    }

    // Calls visit(run, range of its bins) for the runs of `bins`.
    template <typename Visit>
    void for_each_run(Part bins, Visit visit) const {
        for (const Contents* run = run_of(bins.begin); run->first_bin < bins.end; ++run)
            visit(*run, Part{std::max(bins.begin, run->first_bin) - run->first_bin,
                             std::min(bins.end, run[1].first_bin) - run->first_bin});
    }
    // Calls visit(column, number of the bin in its run) for the rests of `range`.
    template <typename Visit>
    void for_each_rest(Part range, Visit visit) const {
        for_each_run(range, [&](const Contents& run, Part bins) {
            for (std::int64_t i = bins.begin; i < bins.end; ++i)
                for (const Column& column : run.columns) visit(column, i);
        });
    }

    const SortedRests<Id>& sorted_;
    Span<const Length> lengths_;
    std::int64_t capacity_, lost_tokens_ = 0;
    std::vector<Contents> runs_;  // and an end marker
    std::vector<FitEntry> entries_;
};

// Stage one of Seamless Packing: cuts of a document of at least `capacity` tokens.
class SlidingCut {
  public:
    explicit SlidingCut(const SeamlessRules& rules) : capacity(rules.capacity), rules_(rules) {
        check_capacity(rules.capacity);
        check_extra_capacity(rules.extra_capacity);
    }

    // Returns true if the document is covered by windows. n = floor(length / L) samples would be
    // full; n + 1 windows overlap by D tokens in all, which may be at most ceil(n r_max L)
    // (equations 1 and 2), or n floor(r_max L) in the authors' program.
    bool slides(std::int64_t length) const {
        const std::int64_t n = length / capacity, overlap = (n + 1) * capacity - length;
        if (overlap == capacity) return false;  // exactly n samples
        if (rules_.placement == Placement::kPublished)
            return overlap <= n * rules_.r_max.floor_of(capacity);
        return rules_.r_max.rounded_up_holds(overlap, n * capacity);
    }
    std::int64_t num_chunks(std::int64_t length) const {
        return length / capacity + (slides(length) ? 1 : 0);
    }
    std::int64_t tail(std::int64_t length) const { return slides(length) ? 0 : length % capacity; }
    std::int64_t begin(std::int64_t length, std::int64_t k) const {
        if (!slides(length)) return k * capacity;
        const std::int64_t n = length / capacity, overlap = (n + 1) * capacity - length;
        if (rules_.placement == Placement::kPaper) return k * (capacity - (overlap + n - 1) / n);
        if (rules_.placement == Placement::kPublished)
            return k < n ? k * (capacity - overlap / (n + 1) - 1) : length - capacity;
        return static_cast<std::int64_t>(Wide{k} * (length - capacity) / n);
    }

    std::int64_t capacity;

  private:
    SeamlessRules rules_;
};

// Counts the tokens that windows repeat or do not cover.
template <typename Length>
void count_windows(Span<const Length> lengths, const SlidingCut& cut, int threads,
                   std::int64_t& repeated, std::int64_t& dropped) {
    std::vector<std::int64_t> repeats(threads, 0), gaps(threads, 0);
    for_each_part(threads, lengths.size(), threads, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const std::int64_t length = lengths[i];
            if (length < cut.capacity || !cut.slides(length)) continue;
            const std::int64_t windows = cut.num_chunks(length);
            std::int64_t covered = cut.capacity;
            for (std::int64_t k = 1; k < windows; ++k)
                covered += std::min(cut.capacity, cut.begin(length, k) - cut.begin(length, k - 1));
            repeats[p] += windows * cut.capacity - covered;
            gaps[p] += length - covered;
        }
    });
    repeated = lay_out(repeats);
    dropped = lay_out(gaps);
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_fit_decreasing(const Lengths<Length>& lengths, const FitRules& rules,
                                        const Run& run) {
    const std::int64_t capacity = rules.capacity, n = lengths.size();
    check_capacity(capacity);
    check_extra_capacity(rules.extra_capacity);
    run.progress.add_total(3 * n);
    LengthSort<Id, Length> sort(in_file_order<Id>(lengths), PlainCut{capacity}, run.threads);
    const FitPlan plan = plan_fit(sort.counts(), capacity + rules.extra_capacity, rules.fit);
    run.progress.advance(n);

    const std::int64_t chunks = sort.num_chunks();
    // A rest has at most one segment; extra_capacity may drop some.
    Samples<Id, Length> out({capacity}, {0, chunks + plan.num_bins()}, chunks + sort.num_rests());
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.put_alone(chunk, document, begin, capacity);
    });
    run.progress.advance(n);
    const Bins<Id, Length> bins(plan, plan.runs, sorted, lengths, capacity);
    bins.write(out, chunks, chunks, run.threads);
    out.truncate(out.num_samples(), chunks + bins.num_segments());
    out.dropped_tokens = bins.lost_tokens();
    run.progress.advance(n);
    return out;
}

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
    std::int64_t num_full = 0, leftover_tokens = 0;
    for (const FitRun& bins : plan.runs) {
        const std::int64_t tokens = bin_capacity - bins.space;
        const bool too_short =
            rules.placement == Placement::kPublished ? tokens <= capacity : tokens < capacity;
        (too_short ? leftover : full).push_back(bins);
        (too_short ? leftover_tokens : num_full) += bins.count * (too_short ? tokens : 1);
    }
    const std::int64_t chunks = sort.num_chunks();
    const std::int64_t num_joined = (leftover_tokens + capacity - 1) / capacity;
    // A rest has at most one segment, and every cut of the joined bins adds one.
    Samples<Id, Length> out({capacity}, {0, chunks + num_full + num_joined},
                            chunks + sort.num_rests() + num_joined);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.put_alone(chunk, document, begin, capacity);
    });
    count_windows<Length>(lengths, cut, run.threads, out.repeated_tokens, out.dropped_tokens);
    run.progress.advance(n);

    const Bins<Id, Length> bins(plan, full, sorted, documents.lengths, capacity);
    bins.write(out, chunks, chunks, run.threads);
    out.dropped_tokens += bins.lost_tokens();
    const Bins<Id, Length> joined(plan, leftover, sorted, documents.lengths, capacity);
    const std::int64_t end =
        joined.write_joined(out, chunks + num_full, chunks + bins.num_segments(), run.threads);
    out.truncate(out.num_samples(), end);
    if (rules.drop_last) out.drop_partial_sample();
    run.progress.advance(n);
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(fit_decreasing, FitRules);
MEGAPACK_INSTANTIATE_STRATEGY(seamless, SeamlessRules);

}  // namespace megapack

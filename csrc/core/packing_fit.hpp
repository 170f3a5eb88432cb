// first_fit_decreasing, best_fit_decreasing: full chunks are samples of their own, the rests are
// fitted to bins of capacity + extra_capacity, and what lies past the capacity in a bin is dropped.
#pragma once

#include "core/packing_fit_plan.hpp"
#include "core/packing_sort.hpp"
#include "core/packing_types.hpp"

namespace megapack {

template <typename Id, typename Length>
Samples<Id, Length> pack_fit(const Documents<Id, Length>& documents, std::int64_t capacity,
                             std::int64_t extra_capacity, Fit fit, int threads, Progress& progress);

// Writes the bins of a plan (also for stage two of Seamless Packing). The segments of a bin stand
// longest first; those past `limit` tokens are cut or left out.
template <typename Id, typename Length>
class BinReader {
  public:
    BinReader(const FitPlan& plan, const SortedRests<Id>& sorted, Span<const Length> lengths,
              std::int64_t limit)
        : plan_(plan), sorted_(sorted), lengths_(lengths), limit_(limit) {}

    // The contents of a run; read_bin is about its bins from here on.
    void set_run(const FitRun& run) {
        contents_.clear();
        for (std::int32_t e = run.last_entry; e >= 0;) {
            const FitEntry& entry = plan_.entries[static_cast<std::size_t>(e)];
            const auto length = static_cast<std::size_t>(entry.length);
            contents_.push_back({sorted_.class_begin[length] + entry.base, entry.copies, 0,
                                 entry.copies, entry.length, entry.length});
            e = entry.before;
        }
        std::reverse(contents_.begin(), contents_.end());
        cut_at_limit();
    }

    // Segments and tokens that a bin of the run keeps, and tokens it loses past the limit.
    std::int64_t num_segments() const { return num_segments_; }
    std::int64_t kept_tokens() const { return kept_; }
    std::int64_t lost_tokens() const { return lost_; }

    // put(document, begin, length) for every segment of bin `bin`.
    template <typename Put>
    void read_bin(std::int64_t bin, Put put) const {
        for (const Content& content : contents_) {
            const std::int64_t first = content.first + bin * content.copies;
            for (std::int64_t j = first + content.from; j < first + content.to; ++j) {
                const Id id = sorted_.ids[static_cast<std::size_t>(j)];
                const Rest<Id, Length> rest(id, content.length, lengths_);
                put(rest.document, rest.begin, content.kept);
            }
        }
    }

  private:
    // Of the `copies` documents of `length` that each bin has, [from, to), `kept` tokens of each;
    // those of bin 0 would begin at sorted.ids[first].
    struct Content {
        std::int64_t first;
        std::int32_t copies, from, to, length, kept;
    };

    void cut_at_limit() {
        num_segments_ = kept_ = lost_ = 0;
        std::vector<Content> cut;
        for (Content content : contents_) {
            const std::int64_t room = limit_ - kept_, copies = content.to - content.from;
            const std::int64_t whole = std::min(copies, room / content.length);
            content.to = content.from + static_cast<std::int32_t>(whole);
            if (whole > 0) cut.push_back(content);
            kept_ += whole * content.length;
            num_segments_ += whole;
            if (whole == copies) continue;
            const std::int64_t head = std::min(limit_ - kept_, std::int64_t{content.length});
            if (head > 0) {
                content.from = content.to++;
                content.kept = static_cast<std::int32_t>(head);
                cut.push_back(content);
                ++num_segments_;
            }
            kept_ += head;
            lost_ += (copies - whole) * content.length - head;
        }
        contents_ = std::move(cut);
    }

    const FitPlan& plan_;
    const SortedRests<Id>& sorted_;
    Span<const Length> lengths_;
    std::int64_t limit_;
    std::vector<Content> contents_;
    std::int64_t num_segments_ = 0, kept_ = 0, lost_ = 0;
};

// Bins, given as runs of a plan, one sample each; sample and segment numbers are known beforehand,
// so that threads can write different bins.
template <typename Id, typename Length>
class BinWriter {
  public:
    BinWriter(const FitPlan& plan, std::vector<FitRun> runs, const SortedRests<Id>& sorted,
              Span<const Length> lengths, std::int64_t capacity)
        : reader_(plan, sorted, lengths, capacity), runs_(std::move(runs)) {
        for (const FitRun& run : runs_) {
            first_bin_.push_back(num_bins_);
            first_segment_.push_back(num_segments_);
            reader_.set_run(run);
            num_bins_ += run.count;
            num_segments_ += run.count * reader_.num_segments();
            lost_tokens_ += run.count * reader_.lost_tokens();
        }
    }

    std::int64_t num_bins() const { return num_bins_; }
    std::int64_t num_segments() const { return num_segments_; }
    std::int64_t lost_tokens() const { return lost_tokens_; }

    void write(const Samples<Id, Length>& out, std::int64_t sample, std::int64_t segment,
               int threads) const {
        const auto parts = static_cast<std::size_t>(std::max(threads, 1));
        parallel_for(threads, parts, [&](std::size_t p) {
            const Part range = part_of(static_cast<std::size_t>(num_bins_), parts, p);
            write_part(out, sample, segment, static_cast<std::int64_t>(range.begin),
                       static_cast<std::int64_t>(range.end));
        });
    }

  private:
    void write_part(const Samples<Id, Length>& out, std::int64_t sample, std::int64_t segment,
                    std::int64_t begin, std::int64_t end) const {
        BinReader<Id, Length> reader = reader_;
        const auto after = std::upper_bound(first_bin_.begin(), first_bin_.end(), begin);
        auto r = static_cast<std::size_t>(after - first_bin_.begin());
        for (std::int64_t bin = begin; bin < end; ++r) {
            const FitRun& run = runs_[r - 1];
            reader.set_run(run);
            const std::int64_t skipped = bin - first_bin_[r - 1];
            std::int64_t at = segment + first_segment_[r - 1] + skipped * reader.num_segments();
            const std::int64_t stop = std::min(end, first_bin_[r - 1] + run.count);
            for (std::int64_t b = run.first_bin + skipped; bin < stop; ++bin, ++b) {
                out.open_sample(sample + bin, at);
                reader.read_bin(b, [&](Id document, Length first, std::int32_t length) {
                    out.put(at++, document, first, length);
                });
            }
        }
    }

    BinReader<Id, Length> reader_;
    std::vector<FitRun> runs_;
    std::vector<std::int64_t> first_bin_, first_segment_;  // per run, among the bins written
    std::int64_t num_bins_ = 0, num_segments_ = 0, lost_tokens_ = 0;
};

}  // namespace megapack

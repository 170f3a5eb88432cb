// Bins of rests, given as runs of a FitPlan, written as samples.
#pragma once

#include <algorithm>
#include <vector>

#include "core/packing/columns.hpp"
#include "core/packing/fit_plan.hpp"
#include "core/packing/samples.hpp"
#include "core/packing/sort.hpp"

namespace megapack {

// The segments of a run's bins, longest first; those past `limit` tokens are cut or left out.
class BinContents {
  public:
    template <typename Id>
    BinContents(const FitPlan& plan, const FitRun& run, const SortedRests<Id>& sorted,
                std::int64_t limit) {
        std::vector<const FitEntry*> entries;
        entries.reserve(kUsual);
        columns_.reserve(kUsual);
        for (std::int32_t e = run.last_entry; e >= 0; e = entries.back()->before)
            entries.push_back(&plan.entries[e]);
        for (std::int64_t e = ssize(entries); e-- > 0;) {
            const FitEntry& entry = *entries[e];
            const std::int64_t first = sorted.class_begin[entry.length] + entry.base;
            for (std::int64_t j = 0; j < entry.copies; ++j)
                add({first + run.first_bin * entry.copies + j, entry.copies, entry.length, 0},
                    limit);
        }
    }

    // Columns of bins run.first_bin and following.
    const std::vector<Column>& columns() const { return columns_; }
    std::int64_t num_segments() const { return ssize(columns_); }
    std::int64_t kept_tokens() const { return kept_; }
    std::int64_t lost_tokens() const { return lost_; }

  private:
    static constexpr std::int64_t kUsual = 8;  // segments in a bin

    void add(Column column, std::int64_t limit) {
        column.kept =
            static_cast<std::int32_t>(std::min<std::int64_t>(column.length, limit - kept_));
        kept_ += column.kept;
        lost_ += column.length - column.kept;
        if (column.kept > 0) columns_.push_back(column);
    }

    std::vector<Column> columns_;
    std::int64_t kept_ = 0, lost_ = 0;
};

// Bins, given as runs of a plan, one sample each. Sample and segment numbers are known beforehand,
// so that threads can write different bins.
template <typename Id, typename Length>
class BinWriter {
  public:
    BinWriter(const FitPlan& plan, const std::vector<FitRun>& runs, const SortedRests<Id>& sorted,
              Span<const Length> lengths, std::int64_t capacity)
        : sorted_(sorted), lengths_(lengths) {
        contents_.reserve(runs.size());
        for (const FitRun& run : runs) {
            contents_.emplace_back(plan, run, sorted, capacity);
            first_bin_.push_back(num_bins_);
            first_segment_.push_back(num_segments_);
            num_bins_ += run.count;
            num_segments_ += run.count * contents_.back().num_segments();
            lost_tokens_ += run.count * contents_.back().lost_tokens();
        }
        first_bin_.push_back(num_bins_);
    }

    std::int64_t num_bins() const { return num_bins_; }
    std::int64_t num_segments() const { return num_segments_; }
    std::int64_t lost_tokens() const { return lost_tokens_; }

    void write(const Samples<Id, Length>& out, std::int64_t sample, std::int64_t segment,
               int threads) const {
        for_each_part(threads, num_bins_, threads, [&](std::int64_t, Part range) {
            const auto [begin, end] = range;
            const auto after = std::upper_bound(first_bin_.begin(), first_bin_.end(), begin);
            std::int64_t r = after - first_bin_.begin() - 1;
            for (std::int64_t bin = begin; bin < end; bin = first_bin_[++r]) {
                const std::int64_t from = bin - first_bin_[r];
                const std::int64_t to = std::min(end, first_bin_[r + 1]) - first_bin_[r];
                if (r + 1 < ssize(contents_)) prefetch_first_block(r + 1);
                write_columns(out, contents_[r].columns(), sorted_, lengths_, from, to,
                              sample + bin,
                              segment + first_segment_[r] + from * contents_[r].num_segments());
            }
        });
    }

  private:
    void prefetch_first_block(std::int64_t r) const {
        const std::vector<Column>& columns = contents_[r].columns();
        const std::int64_t bins = first_bin_[r + 1] - first_bin_[r];
        prefetch_columns(columns, sorted_, 0, std::min(bins, samples_in_block(columns)));
    }

    const SortedRests<Id>& sorted_;
    Span<const Length> lengths_;
    std::vector<BinContents> contents_;                    // per run
    std::vector<std::int64_t> first_bin_, first_segment_;  // per run, among the bins written
    std::int64_t num_bins_ = 0, num_segments_ = 0, lost_tokens_ = 0;
};

}  // namespace megapack

#include "core/packing/fit_plan.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "core/base/span.hpp"
#include "core/packing/length_set.hpp"

namespace megapack {
namespace {

using RunId = std::int32_t;

// First fit: open runs that fit the present length, by first bin; the others wait under their
// space until the lengths have come down to it.
class FirstFitOrder {
  public:
    explicit FirstFitOrder(std::int64_t capacity) : waiting_(capacity + 1) {}

    // `length` is the present length, never more than before; every length is announced.
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
    // A run, or what was not used of it, with its new space.
    void put(RunId id, const FitRun& run) {
        const Key key{run.first_bin, id};
        if (run.space >= length_) {
            active_.push(key);
        } else if (run.space > 0) {
            waiting_[run.space].push_back(key);
        }
    }
    void put_back(RunId id, const FitRun& run) { put(id, run); }

  private:
    using Key = std::pair<std::int64_t, RunId>;
    std::priority_queue<Key, std::vector<Key>, std::greater<>> active_;
    std::vector<std::vector<Key>> waiting_;
    std::int64_t length_ = 0;
};

// Best fit: per space, runs in the order in which they reached it.
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
    // What was not used of the run just taken goes back to the front of its queue.
    void put_back(RunId id, const FitRun& run) {
        Queue& queue = queues_[run.space];
        if (queue.front == 0) {
            queue.runs.insert(queue.runs.begin(), id);
        } else {
            queue.runs[--queue.front] = id;
        }
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

    // Just as many new bins as `count` documents need, `copies` in each.
    RunId open_bins(std::int64_t count, std::int64_t copies) {
        const std::int64_t bins = (count + copies - 1) / copies;
        plan_.runs.push_back({num_bins_, bins, capacity_, -1});
        num_bins_ += bins;
        return static_cast<RunId>(plan_.runs.size()) - 1;
    }

    // Documents rank, rank + 1, ... to a run, as many as it holds of `left`; how many it took.
    std::int64_t fill(RunId id, std::int64_t length, std::int64_t rank, std::int64_t left) {
        FitRun run = plan_.runs[id];
        const std::int64_t copies = run.space / length;
        const std::int64_t full = std::min(run.count, left / copies);
        const std::int64_t single = full < run.count ? left % copies : 0;
        RunId slot = id;  // where the next part of the run is kept
        if (full > 0) slot = add(slot, run, full, length, copies, rank);
        if (single > 0) slot = add(slot, run, 1, length, single, rank + full * copies);
        if (run.count > 0) order_.put_back(keep(slot, run), run);
        return full * copies + single;
    }

    // Cuts `bins` bins off the front of `run` and gives each `copies` documents.
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

}  // namespace

FitPlan plan_fit(const std::vector<std::int64_t>& counts, std::int64_t capacity, Fit fit) {
    if (fit == Fit::kFirst) return Planner<FirstFitOrder>(capacity).run(counts);
    return Planner<BestFitOrder>(capacity).run(counts);
}

}  // namespace megapack

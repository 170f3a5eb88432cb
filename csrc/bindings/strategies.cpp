// Every strategy of the core, one line each: how its rules are read, and that it is there.
#include "bindings/strategies.hpp"

#include <chrono>
#include <limits>

#include "core/packing/bucket.hpp"
#include "core/packing/bucket_naive.hpp"
#include "core/packing/bucket_stream.hpp"
#include "core/packing/concat.hpp"
#include "core/packing/decompose.hpp"
#include "core/packing/fit_decreasing.hpp"
#include "core/packing/length_sorted.hpp"
#include "core/packing/next_fit.hpp"
#include "core/packing/pad.hpp"

namespace megapack {
namespace {

template <typename T>
py::array_t<T> buffer_to_numpy(Buffer<T>& buffer) {
    const py::ssize_t size = buffer.size();
    T* data = buffer.release();
    return py::array_t<T>(size, data, py::capsule(data, [](void* p) { std::free(p); }));
}

template <typename Id, typename Length>
py::dict samples_to_dict(Samples<Id, Length>&& samples) {
    py::dict result;
    result["bucket_capacity"] = to_numpy(std::move(samples.bucket_capacity));
    result["bucket_sample_offsets"] = to_numpy(std::move(samples.bucket_sample_offsets));
    result["sample_segment_offsets"] = buffer_to_numpy(samples.sample_segment_offsets);
    result["segment_document"] = buffer_to_numpy(samples.segment_document);
    result["segment_begin"] = buffer_to_numpy(samples.segment_begin);
    result["segment_length"] = buffer_to_numpy(samples.segment_length);
    result["dropped_tokens"] = samples.dropped_tokens;
    result["repeated_tokens"] = samples.repeated_tokens;
    return result;
}

// Calls `callback(done, total)` a few times a second; an exception or Ctrl-C stops the packing.
Progress::Report report_to(const py::object& callback) {
    using Clock = std::chrono::steady_clock;
    return [callback, last = Clock::now()](std::int64_t done, std::int64_t total) mutable {
        const auto now = Clock::now();
        if (done < total && now - last < std::chrono::milliseconds(100)) return;
        last = now;
        const py::gil_scoped_acquire lock;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (!callback.is_none()) callback(done, total);
    };
}

// read(keywords) gives the rules; pack(Id{}, lengths, rules, run) packs without the GIL, Id being
// int32 unless something is wider.
template <typename Read, typename Pack>
Strategy strategy(Read read, Pack pack) {
    return [=](const DocumentLengths& lengths, Keywords& keywords, const PythonRun& asked) {
        const auto rules = read(keywords);
        keywords.check_all_taken();
        Progress progress(report_to(asked.progress));
        const Run run(asked.seed, asked.threads, progress);
        return lengths.visit([&](const auto& documents) {
            const auto run_as = [&](auto id) {
                auto samples = [&] {
                    const py::gil_scoped_release unlocked;
                    auto packed = pack(id, documents, rules, run);
                    progress.finish();
                    return packed;
                }();
                return samples_to_dict(std::move(samples));
            };
            constexpr bool kNarrow =
                std::is_same_v<decltype(documents), const Lengths<std::int32_t>&>;
            if constexpr (kNarrow)
                if (!asked.wide_ids && documents.size() <= std::numeric_limits<std::int32_t>::max())
                    return run_as(std::int32_t{});
            return run_as(std::int64_t{});
        });
    };
}

AtomSize atoms(Keywords& rules) {
    return {rules.integer("capacity"), rules.integer("atom_size")};
}

bool drop_last(Keywords& rules) {
    return rules.choice<bool>("last", {{"pad", false}, {"drop", true}});
}

// (bucket, count, [(length, copies), ...]), longest first.
GivenPattern given_pattern(const py::handle& pattern) {
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    if (!py::isinstance<py::sequence>(pattern) || py::len(pattern) != 3)
        refuse(pattern, "given", "patterns (bucket, count, [(length, copies), ...])");
    const auto parts = py::reinterpret_borrow<py::sequence>(pattern);
    GivenPattern given{
        static_cast<std::int32_t>(integer(py::object(parts[0]), "bucket", 0, kLimit)),
        integer(py::object(parts[1]), "count", 1),
        {}};
    for (const py::handle content : py::object(parts[2])) {
        const auto pair = integer_list(content, "given", 1, kLimit);
        if (pair.size() != 2) refuse(content, "given", "pairs (length, copies)");
        given.lengths.emplace_back(pair[0], pair[1]);
    }
    return given;
}

}  // namespace

SeamlessRules seamless_rules(Keywords& rules) {
    SeamlessRules result{
        rules.integer("capacity"), rules.ratio("r_max"),
        rules.choice<Placement>("placement", {{"exact", Placement::kExact},
                                              {"paper", Placement::kPaper},
                                              {"published", Placement::kPublished}})};
    if (rules.has("extra_capacity")) result.extra_capacity = rules.integer("extra_capacity");
    if (rules.has("last")) result.drop_last = drop_last(rules);
    return result;
}

BucketRules bucket_rules(Keywords& rules) {
    BucketRules result;
    result.capacities = rules.integers("buckets");
    if (rules.has("overflow"))
        result.overflow = rules.choice<Overflow>(
            "overflow",
            {{"pad", Overflow::kPad}, {"head", Overflow::kHead}, {"promote", Overflow::kPromote}});
    if (rules.has("padding_threshold")) result.padding_threshold = rules.ratio("padding_threshold");
    if (rules.has("pairs")) result.pairs = rules.flag("pairs");
    if (rules.has("shuffle_segments")) result.shuffle_segments = rules.flag("shuffle_segments");
    if (rules.has("pool_size")) result.pool_size = rules.integer("pool_size");
    if (rules.has("max_segments")) result.max_segments = rules.integer("max_segments");
    if (rules.has("given"))
        for (const py::handle pattern : rules.take("given"))
            result.given.push_back(given_pattern(pattern));
    return result;
}

// name: pack_<name> of the core; then its rules from the keywords `k`.
#define MEGAPACK_STRATEGY(name, ...)                                                       \
    {#name, strategy([](Keywords& k) { return __VA_ARGS__; },                              \
                     [](auto id, const auto& lengths, const auto& rules, const Run& run) { \
                         return pack_##name<decltype(id)>(lengths, rules, run);            \
                     })}

const std::map<std::string, Strategy>& strategies() {
    static const std::map<std::string, Strategy> all{
        MEGAPACK_STRATEGY(bucket, bucket_rules(k)),
        MEGAPACK_STRATEGY(bucket_naive, BucketNaiveRules{k.integers("buckets"), k.flag("shuffle")}),
        MEGAPACK_STRATEGY(bucket_stream, bucket_rules(k)),
        MEGAPACK_STRATEGY(concat, ConcatRules{atoms(k), k.flag("shuffle"), drop_last(k)}),
        MEGAPACK_STRATEGY(decompose, DecomposeRules{k.integers("buckets")}),
        MEGAPACK_STRATEGY(fit_decreasing,
                          FitRules{k.integer("capacity"), k.integer("extra_capacity"),
                                   k.flag("best") ? Fit::kBest : Fit::kFirst}),
        MEGAPACK_STRATEGY(length_sorted, LengthSortedRules{k.integer("capacity")}),
        MEGAPACK_STRATEGY(next_fit, NextFitRules{k.integer("capacity"), k.flag("shuffle")}),
        MEGAPACK_STRATEGY(pad, PadRules{atoms(k)}),
        MEGAPACK_STRATEGY(seamless, seamless_rules(k)),
    };
    return all;
}

}  // namespace megapack

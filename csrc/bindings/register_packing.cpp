// packing: lengths and scalars in, checked; GIL released; arrays out.
#include <chrono>
#include <limits>

#include "bindings/document_lengths.hpp"
#include "bindings/scalars.hpp"
#include "core/index/metrics.hpp"
#include "core/packing/atoms.hpp"
#include "core/packing/bucket.hpp"
#include "core/packing/decompose.hpp"
#include "core/packing/fit_decreasing.hpp"
#include "core/packing/next_fit.hpp"
#include "core/packing/order.hpp"
#include "core/packing/seamless.hpp"
#include "core/packing/stream.hpp"

namespace megapack {
namespace {

template <typename T>
py::array_t<T> buffer_to_numpy(Buffer<T>& buffer) {
    const auto size = static_cast<py::ssize_t>(buffer.size());
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

// What every strategy is told besides its own parameters.
struct Common {
    std::uint64_t seed;
    int threads;
    bool wide_ids;
    py::object progress;
};

Common common(const py::object& seed, const py::object& threads, const py::object& wide_ids,
              const py::object& progress) {
    if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0)
        refuse(progress, "progress", "a function of (done, total), or None");
    return {word(seed, "seed"), checked_threads(integer(threads, "threads")),
            flag(wide_ids, "wide_ids"), progress};
}

// pack(lengths, Id{}, run) without the GIL; Id is int32 unless something is wider.
template <typename Pack>
py::dict run_strategy(const DocumentLengths& lengths, const Common& common, Pack pack) {
    Progress progress(report_to(common.progress));
    const Run run(common.seed, common.threads, progress);
    return lengths.visit([&](const auto& documents) {
        const auto run_as = [&](auto id) {
            auto samples = [&] {
                const py::gil_scoped_release unlocked;
                auto packed = pack(documents, id, run);
                progress.finish();
                return packed;
            }();
            return samples_to_dict(std::move(samples));
        };
        constexpr bool kNarrow = std::is_same_v<decltype(documents), const Lengths<std::int32_t>&>;
        constexpr auto kMaxNarrow = std::size_t{std::numeric_limits<std::int32_t>::max()};
        if constexpr (kNarrow)
            if (!common.wide_ids && documents.size() <= kMaxNarrow) return run_as(std::int32_t{});
        return run_as(std::int64_t{});
    });
}

// pack(documents, run) on the documents in file order or, if asked, in seeded order.
template <typename Pack>
py::dict run_in_order(const DocumentLengths& lengths, bool shuffled, const Common& common,
                      Pack pack) {
    return run_strategy(lengths, common, [&](const auto& checked, auto id, const Run& run) {
        using Id = decltype(id);
        auto documents = in_file_order<Id>(checked);
        if (!shuffled) return pack(documents, run);
        const auto order =
            shuffle<Id>(documents.lengths, random_for(run.seed, Purpose::kDocuments), run.threads);
        documents.items = order.data();
        return pack(documents, run);
    });
}

py::dict concat(const DocumentLengths& lengths, const py::object& capacity,
                const py::object& atom_size, const py::object& drop_last,
                const py::object& shuffled, const Common& common) {
    const AtomRules rules{integer(capacity, "capacity"), integer(atom_size, "atom_size")};
    const bool drop = flag(drop_last, "drop_last");
    return run_in_order(lengths, flag(shuffled, "shuffle"), common,
                        [&](const auto& documents, const Run& run) {
                            rules.check_sizes();
                            auto samples = pack_streams(documents, {rules.unit()}, run);
                            if (rules.atom_size != rules.capacity)
                                samples = shuffle_atoms(samples, rules, run);
                            if (drop) drop_partial_sample(samples);
                            return samples;
                        });
}

py::dict bucket_naive(const DocumentLengths& lengths, const py::object& buckets,
                      const py::object& shuffled, const Common& common) {
    const auto capacities = integer_list(buckets, "buckets");
    return run_in_order(lengths, flag(shuffled, "shuffle"), common,
                        [&](const auto& documents, const Run& run) {
                            return pack_streams(documents, capacities, run);
                        });
}

py::dict pad(const DocumentLengths& lengths, const py::object& capacity,
             const py::object& atom_size, const Common& common) {
    const AtomRules rules{integer(capacity, "capacity"), integer(atom_size, "atom_size")};
    return run_in_order(lengths, false, common, [&](const auto& documents, const Run& run) {
        return pack_padded(documents, rules, run);
    });
}

py::dict next_fit(const DocumentLengths& lengths, const py::object& capacity,
                  const py::object& shuffled, const Common& common) {
    const std::int64_t size = integer(capacity, "capacity");
    return run_in_order(
        lengths, flag(shuffled, "shuffle"), common,
        [&](const auto& documents, const Run& run) { return pack_next_fit(documents, size, run); });
}

py::dict length_sorted(const DocumentLengths& lengths, const py::object& capacity,
                       const Common& common) {
    const std::int64_t size = integer(capacity, "capacity");
    return run_in_order(lengths, false, common, [&](const auto& documents, const Run& run) {
        return pack_length_sorted(documents, size, run);
    });
}

py::dict fit_decreasing(const DocumentLengths& lengths, const py::object& capacity,
                        const py::object& extra_capacity, const py::object& best,
                        const Common& common) {
    const std::int64_t size = integer(capacity, "capacity");
    const std::int64_t extra = integer(extra_capacity, "extra_capacity");
    const Fit fit = flag(best, "best") ? Fit::kBest : Fit::kFirst;
    return run_in_order(lengths, false, common, [&](const auto& documents, const Run& run) {
        return pack_fit(documents, size, extra, fit, run);
    });
}

// (numerator, denominator): no float can say what 0.1 is.
Ratio ratio(const py::object& value, const char* name) {
    const auto parts = integer_list(value, name);
    if (parts.size() != 2) refuse(value, name, "a numerator and a denominator");
    return {parts[0], parts[1]};
}

SeamlessRules seamless_rules(const py::object& capacity, const py::object& r_max,
                             const py::object& placement, std::int64_t extra_capacity) {
    const auto kind = choice<Placement>(placement, "placement",
                                        {{"exact", Placement::kExact},
                                         {"paper", Placement::kPaper},
                                         {"published", Placement::kPublished}});
    return {integer(capacity, "capacity"), ratio(r_max, "r_max"), kind, extra_capacity};
}

py::dict seamless(const DocumentLengths& lengths, const py::object& capacity,
                  const py::object& r_max, const py::object& placement,
                  const py::object& extra_capacity, const py::object& drop_last,
                  const Common& common) {
    const SeamlessRules rules =
        seamless_rules(capacity, r_max, placement, integer(extra_capacity, "extra_capacity"));
    const bool drop = flag(drop_last, "drop_last");
    return run_in_order(lengths, false, common, [&](const auto& documents, const Run& run) {
        auto samples = pack_seamless(documents, rules, run);
        if (drop) drop_partial_sample(samples);
        return samples;
    });
}

py::dict seamless_stage_one(const DocumentLengths& lengths, const py::object& capacity,
                            const py::object& r_max, const py::object& placement) {
    const SeamlessRules rules = seamless_rules(capacity, r_max, placement, 0);
    const StageOne stage = lengths.visit([&](const auto& documents) {
        const py::gil_scoped_release unlocked;
        Progress silent;
        return count_stage_one(in_file_order<std::int64_t>(documents), rules, Run(0, 1, silent));
    });
    py::dict result;
    result["num_sliding"] = stage.num_sliding;
    result["short_tokens"] = stage.short_tokens;
    return result;
}

py::dict decompose(const DocumentLengths& lengths, const py::object& buckets,
                   const Common& common) {
    const auto capacities = integer_list(buckets, "buckets");
    return run_in_order(lengths, false, common, [&](const auto& documents, const Run& run) {
        return pack_decompose(documents, capacities, run);
    });
}

BucketRules bucket_rules(const py::object& capacities, const py::object& overflow,
                         const py::object& padding_threshold, const py::object& pairs,
                         const py::object& shuffle_segments) {
    const auto kind = choice<Overflow>(
        overflow, "overflow",
        {{"pad", Overflow::kPad}, {"head", Overflow::kHead}, {"promote", Overflow::kPromote}});
    BucketRules rules{integer_list(capacities, "capacities"), kind,
                      ratio(padding_threshold, "padding_threshold"), flag(pairs, "pairs"),
                      flag(shuffle_segments, "shuffle_segments")};
    check_capacities(rules.capacities);
    return rules;
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

py::dict drain_buckets(const DocumentLengths& lengths, const BucketRules& rules,
                       const py::iterable& patterns, const py::object& pool_size,
                       const Common& common) {
    std::vector<GivenPattern> given;
    for (const py::handle pattern : patterns) given.push_back(given_pattern(pattern));
    const std::int64_t size = integer(pool_size, "pool_size", 1);
    return run_strategy(lengths, common, [&](const auto& documents, auto id, const Run& run) {
        return pack_buckets<decltype(id)>(documents, rules, given, size, run);
    });
}

py::dict stream_buckets(const DocumentLengths& lengths, const BucketRules& rules,
                        const py::object& pool_size, const Common& common) {
    const std::int64_t size = integer(pool_size, "pool_size", 1);
    return run_strategy(lengths, common, [&](const auto& documents, auto id, const Run& run) {
        return pack_bucket_stream<decltype(id)>(documents, rules, size, run);
    });
}

// (counts of rests by length, number of full chunks) of documents cut at `capacity`.
py::tuple length_histogram(const DocumentLengths& lengths, const py::object& capacity,
                           const py::object& threads) {
    const PlainCut cut{integer(capacity, "capacity")};
    const int num_threads = checked_threads(integer(threads, "threads"));
    check_capacity(cut.capacity);
    std::vector<std::int64_t> counts;
    std::int64_t chunks = 0;
    lengths.visit([&](const auto& documents) {
        const py::gil_scoped_release unlocked;
        const LengthSort sort(in_file_order<std::int64_t>(documents), cut, num_threads);
        counts = sort.counts();
        chunks = sort.num_chunks();
    });
    return py::make_tuple(to_numpy(std::move(counts)), chunks);
}

std::vector<std::int64_t> count_samples(const Array<std::int64_t>& counts,
                                        const BucketRules& rules) {
    const auto values = view(counts, "counts");
    const py::gil_scoped_release unlocked;
    return count_bucket_samples({values.begin(), values.end()}, rules);
}

}  // namespace

void register_packing(py::module_& m) {
    register_lengths(m);
    py::class_<Common>(m, "PackingCommon")
        .def(py::init(&common), py::kw_only(), py::arg("seed"), py::arg("threads"),
             py::arg("wide_ids"), py::arg("progress"));
    py::class_<BucketRules>(m, "BucketRules")
        .def(py::init(&bucket_rules), py::kw_only(), py::arg("capacities"),
             py::arg("overflow") = "pad", py::arg("padding_threshold") = py::make_tuple(0, 1),
             py::arg("pairs") = false, py::arg("shuffle_segments") = false);
    const py::arg lengths("lengths"), capacity("capacity"), buckets("buckets"), common("common");
    const py::arg atom_size("atom_size"), shuffled("shuffle"), extra("extra_capacity");
    const py::arg rules("rules"), pool_size("pool_size"), drop_last("drop_last");
    m.def("pack_concat", &concat, lengths, capacity, atom_size, drop_last, shuffled, common);
    m.def("pack_bucket_naive", &bucket_naive, lengths, buckets, shuffled, common);
    m.def("pack_pad", &pad, lengths, capacity, atom_size, common);
    m.def("pack_next_fit", &next_fit, lengths, capacity, shuffled, common);
    m.def("pack_length_sorted", &length_sorted, lengths, capacity, common);
    m.def("pack_fit_decreasing", &fit_decreasing, lengths, capacity, extra, py::arg("best"),
          common);
    m.def("pack_seamless", &seamless, lengths, capacity, py::arg("r_max"), py::arg("placement"),
          extra, drop_last, common);
    m.def("seamless_stage_one", &seamless_stage_one, lengths, capacity, py::arg("r_max"),
          py::arg("placement"));
    m.def("pack_decompose", &decompose, lengths, buckets, common);
    m.def("drain_buckets", &drain_buckets, lengths, rules, py::arg("given"), pool_size, common);
    m.def("stream_buckets", &stream_buckets, lengths, rules, pool_size, common);
    m.def("length_histogram", &length_histogram, lengths, capacity, py::arg("threads"));
    m.def("count_bucket_samples", &count_samples, py::arg("counts").noconvert(), rules);
}

}  // namespace megapack

// packing: numpy views in, checked; GIL released; arrays out.
#include <chrono>
#include <limits>
#include <tuple>

#include "bindings/numpy_views.hpp"
#include "core/packing_atoms.hpp"
#include "core/packing_bucket.hpp"
#include "core/packing_decompose.hpp"
#include "core/packing_fit.hpp"
#include "core/packing_metrics.hpp"
#include "core/packing_next_fit.hpp"
#include "core/packing_order.hpp"
#include "core/packing_seamless.hpp"
#include "core/packing_stream.hpp"

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

// run(lengths, Id{}, progress) without the GIL; Id is int32 unless something is wider.
template <typename Length, typename Run>
py::dict run_strategy(const Array<Length>& lengths, const Common& common, Run run) {
    const Span<const Length> documents = view(lengths, "lengths");
    Progress progress(report_to(common.progress));
    const auto run_as = [&](auto id) {
        Samples<decltype(id), Length> samples;
        {
            const py::gil_scoped_release unlocked;
            samples = run(documents, id, progress);
            progress.finish();
        }
        return samples_to_dict(std::move(samples));
    };
    constexpr auto kMaxNarrow = std::size_t{std::numeric_limits<std::int32_t>::max()};
    if constexpr (sizeof(Length) == sizeof(std::int32_t))
        if (!common.wide_ids && documents.size() <= kMaxNarrow) return run_as(std::int32_t{});
    return run_as(std::int64_t{});
}

// pack(documents, progress) on the documents in file order or, if asked, in seeded order.
template <typename Length, typename Pack>
py::dict run_in_order(const Array<Length>& lengths, bool shuffled, const Common& common,
                      Pack pack) {
    return run_strategy(lengths, common, [&](auto documents, auto id, Progress& progress) {
        using Id = decltype(id);
        if (!shuffled) return pack(in_file_order<Id>(documents), progress);
        const auto order =
            shuffle<Id>(documents, random_for(common.seed, Purpose::kDocuments), common.threads);
        return pack(Documents<Id, Length>{documents, order.data(), order.size()}, progress);
    });
}

template <typename Length>
py::dict concat(const Array<Length>& lengths, std::int64_t capacity, std::int64_t atom_size,
                bool drop_last, bool shuffled, const Common& common) {
    const AtomRules rules{capacity, atom_size, common.seed};
    return run_in_order(lengths, shuffled, common, [&](const auto& documents, Progress& progress) {
        auto samples = pack_streams(documents, {rules.unit()}, common.threads, progress);
        if (atom_size != capacity) samples = shuffle_atoms(samples, rules, common.threads);
        if (drop_last) drop_partial_sample(samples);
        return samples;
    });
}

template <typename Length>
py::dict bucket_naive(const Array<Length>& lengths, const std::vector<std::int64_t>& buckets,
                      bool shuffled, const Common& common) {
    return run_in_order(lengths, shuffled, common, [&](const auto& documents, Progress& progress) {
        return pack_streams(documents, buckets, common.threads, progress);
    });
}

template <typename Length>
py::dict pad(const Array<Length>& lengths, std::int64_t capacity, std::int64_t atom_size,
             const Common& common) {
    const AtomRules rules{capacity, atom_size, common.seed};
    return run_in_order(lengths, false, common, [&](const auto& documents, Progress& progress) {
        return pack_padded(documents, rules, common.threads, progress);
    });
}

template <typename Length>
py::dict next_fit(const Array<Length>& lengths, std::int64_t capacity, bool shuffled,
                  const Common& common) {
    return run_in_order(lengths, shuffled, common, [&](const auto& documents, Progress& progress) {
        return pack_next_fit(documents, capacity, progress);
    });
}

template <typename Length>
py::dict length_sorted(const Array<Length>& lengths, std::int64_t capacity, const Common& common) {
    return run_in_order(lengths, false, common, [&](const auto& documents, Progress& progress) {
        return pack_length_sorted(documents, capacity, common.threads, progress);
    });
}

template <typename Length>
py::dict fit_decreasing(const Array<Length>& lengths, std::int64_t capacity,
                        std::int64_t extra_capacity, bool best, const Common& common) {
    const Fit fit = best ? Fit::kBest : Fit::kFirst;
    return run_in_order(lengths, false, common, [&](const auto& documents, Progress& progress) {
        return pack_fit(documents, capacity, extra_capacity, fit, common.threads, progress);
    });
}

SeamlessRules seamless_rules(std::int64_t capacity, double r_max, const std::string& placement,
                             std::int64_t extra_capacity) {
    Placement kind = Placement::kExact;
    if (placement == "paper") kind = Placement::kPaper;
    if (placement == "published") kind = Placement::kPublished;
    return {capacity, r_max, kind, extra_capacity};
}

template <typename Length>
py::dict seamless(const Array<Length>& lengths, std::int64_t capacity, double r_max,
                  const std::string& placement, std::int64_t extra_capacity, bool drop_last,
                  const Common& common) {
    const SeamlessRules rules = seamless_rules(capacity, r_max, placement, extra_capacity);
    return run_in_order(lengths, false, common, [&](const auto& documents, Progress& progress) {
        auto samples = pack_seamless(documents, rules, common.threads, progress);
        if (drop_last) drop_partial_sample(samples);
        return samples;
    });
}

template <typename Length>
py::dict seamless_stage_one(const Array<Length>& lengths, std::int64_t capacity, double r_max,
                            const std::string& placement) {
    const auto documents = in_file_order<std::int64_t>(view(lengths, "lengths"));
    const SeamlessRules rules = seamless_rules(capacity, r_max, placement, 0);
    StageOne stage;
    {
        const py::gil_scoped_release unlocked;
        stage = count_stage_one(documents, rules, 1);
    }
    py::dict result;
    result["num_sliding"] = stage.num_sliding;
    result["short_tokens"] = stage.short_tokens;
    return result;
}

template <typename Length>
py::dict decompose(const Array<Length>& lengths, const std::vector<std::int64_t>& buckets,
                   const Common& common) {
    return run_in_order(lengths, false, common, [&](const auto& documents, Progress& progress) {
        return pack_decompose(documents, buckets, common.threads, progress);
    });
}

// (bucket, count, [(length, copies), ...]), longest first.
using PatternTuple =
    std::tuple<std::int32_t, std::int64_t, std::vector<std::pair<std::int32_t, std::int32_t>>>;

template <typename Length>
py::dict drain_buckets(const Array<Length>& lengths, const BucketRules& rules,
                       const std::vector<PatternTuple>& patterns, std::int64_t pool_size,
                       const Common& common) {
    std::vector<GivenPattern> given;
    for (const auto& [bucket, count, contents] : patterns)
        given.push_back({bucket, count, contents});
    return run_strategy(lengths, common, [&](auto documents, auto id, Progress& progress) {
        return pack_buckets<decltype(id), Length>(documents, rules, given, pool_size, common.seed,
                                                  common.threads, progress);
    });
}

template <typename Length>
py::dict stream_buckets(const Array<Length>& lengths, const BucketRules& rules,
                        std::int64_t pool_size, const Common& common) {
    return run_strategy(lengths, common, [&](auto documents, auto id, Progress& progress) {
        return pack_bucket_stream<decltype(id), Length>(documents, rules, pool_size, common.seed,
                                                        common.threads, progress);
    });
}

template <typename Id, typename Length>
SampleView<Id, Length> sample_view(const Array<std::int64_t>& bucket_sample_offsets,
                                   const Array<std::int64_t>& sample_segment_offsets,
                                   const Array<Id>& document, const Array<Length>& begin,
                                   const Array<std::int32_t>& length) {
    return {view(bucket_sample_offsets, "bucket_sample_offsets"),
            view(sample_segment_offsets, "sample_segment_offsets"),
            view(document, "segment_document"), view(begin, "segment_begin"),
            view(length, "segment_length")};
}

template <typename Length>
py::dict count_documents_of(const Array<Length>& lengths, std::int64_t capacity) {
    const Span<const Length> documents = view(lengths, "lengths");
    DocumentTotals totals;
    {
        const py::gil_scoped_release unlocked;
        totals = count_documents(documents, capacity);
    }
    py::dict result;
    result["num_tokens"] = totals.num_tokens;
    result["num_empty"] = totals.num_empty;
    result["num_longer"] = totals.num_longer;
    return result;
}

// (counts of rests by length, number of full chunks) of documents cut at `capacity`.
template <typename Length>
py::tuple length_histogram(const Array<Length>& lengths, std::int64_t capacity, int threads) {
    const auto documents = in_file_order<std::int64_t>(view(lengths, "lengths"));
    std::vector<std::int64_t> counts;
    std::int64_t chunks = 0;
    {
        const py::gil_scoped_release unlocked;
        const LengthSort<std::int64_t, Length> sort(documents, PlainCut{capacity}, threads);
        counts = sort.counts();
        chunks = sort.num_chunks();
    }
    return py::make_tuple(to_numpy(std::move(counts)), chunks);
}

template <typename Length>
void register_strategies(py::module_& m) {
    const auto lengths = py::arg("lengths").noconvert();
    const auto common = py::arg("common");
    m.def("pack_concat", &concat<Length>, lengths, py::arg("capacity"), py::arg("atom_size"),
          py::arg("drop_last"), py::arg("shuffle"), common);
    m.def("pack_bucket_naive", &bucket_naive<Length>, lengths, py::arg("buckets"),
          py::arg("shuffle"), common);
    m.def("pack_pad", &pad<Length>, lengths, py::arg("capacity"), py::arg("atom_size"), common);
    m.def("pack_next_fit", &next_fit<Length>, lengths, py::arg("capacity"), py::arg("shuffle"),
          common);
    m.def("pack_length_sorted", &length_sorted<Length>, lengths, py::arg("capacity"), common);
    m.def("pack_fit_decreasing", &fit_decreasing<Length>, lengths, py::arg("capacity"),
          py::arg("extra_capacity"), py::arg("best"), common);
    m.def("pack_seamless", &seamless<Length>, lengths, py::arg("capacity"), py::arg("r_max"),
          py::arg("placement"), py::arg("extra_capacity"), py::arg("drop_last"), common);
    m.def("seamless_stage_one", &seamless_stage_one<Length>, lengths, py::arg("capacity"),
          py::arg("r_max"), py::arg("placement"));
    m.def("pack_decompose", &decompose<Length>, lengths, py::arg("buckets"), common);
    m.def("drain_buckets", &drain_buckets<Length>, lengths, py::arg("rules"), py::arg("given"),
          py::arg("pool_size"), common);
    m.def("stream_buckets", &stream_buckets<Length>, lengths, py::arg("rules"),
          py::arg("pool_size"), common);
    m.def("length_histogram", &length_histogram<Length>, lengths, py::arg("capacity"),
          py::arg("threads"));
    m.def(
        "or_of_lengths",
        [](const Array<Length>& values) {
            const Span<const Length> documents = view(values, "lengths");
            const py::gil_scoped_release unlocked;
            return or_of(documents);
        },
        lengths);
    m.def("count_documents", &count_documents_of<Length>, lengths, py::arg("capacity"));
}

template <typename Id, typename Length>
void register_measures(py::module_& m) {
    using Offsets = Array<std::int64_t>;
    const auto with_view = [&m](const char* name, auto function) {
        m.def(name, function, py::arg("bucket_sample_offsets").noconvert(),
              py::arg("sample_segment_offsets").noconvert(),
              py::arg("segment_document").noconvert(), py::arg("segment_begin").noconvert(),
              py::arg("segment_length").noconvert(), py::arg("lengths").noconvert());
    };
    with_view("measure_samples",
              [](const Offsets& buckets, const Offsets& samples, const Array<Id>& document,
                 const Array<Length>& begin, const Array<std::int32_t>& length,
                 const Array<Length>& lengths) {
                  const auto arrays = sample_view(buckets, samples, document, begin, length);
                  const Span<const Length> documents = view(lengths, "lengths");
                  SegmentTotals totals;
                  {
                      const py::gil_scoped_release unlocked;
                      totals = measure(arrays, documents);
                  }
                  py::dict result;
                  result["tokens_per_bucket"] = totals.tokens_per_bucket;
                  result["whole_documents"] = totals.whole_documents;
                  result["segment_squares"] = totals.segment_squares;
                  result["sample_squares"] = totals.sample_squares;
                  return result;
              });
    m.def(
        "check_laws",
        [](const Offsets& capacities, const Offsets& buckets, const Offsets& samples,
           const Array<Id>& document, const Array<Length>& begin, const Array<std::int32_t>& length,
           const Array<Length>& lengths) {
            const auto arrays = sample_view(buckets, samples, document, begin, length);
            const auto sizes = view(capacities, "bucket_capacity");
            const Span<const Length> documents = view(lengths, "lengths");
            const py::gil_scoped_release unlocked;
            check_laws(arrays, sizes, documents);
        },
        py::arg("bucket_capacity").noconvert(), py::arg("bucket_sample_offsets").noconvert(),
        py::arg("sample_segment_offsets").noconvert(), py::arg("segment_document").noconvert(),
        py::arg("segment_begin").noconvert(), py::arg("segment_length").noconvert(),
        py::arg("lengths").noconvert());
    with_view("label_tokens", [](const Offsets& buckets, const Offsets& samples,
                                 const Array<Id>& document, const Array<Length>& begin,
                                 const Array<std::int32_t>& length, const Array<Length>& lengths) {
        const auto arrays = sample_view(buckets, samples, document, begin, length);
        const Span<const Length> documents = view(lengths, "lengths");
        std::vector<std::int64_t> result;
        {
            const py::gil_scoped_release unlocked;
            result = label_tokens(arrays, documents);
        }
        return to_numpy(std::move(result));
    });
}

}  // namespace

void register_packing(py::module_& m) {
    py::class_<Common>(m, "PackingCommon")
        .def(py::init([](std::uint64_t seed, int threads, bool wide_ids, py::object progress) {
                 return Common{seed, threads, wide_ids, std::move(progress)};
             }),
             py::kw_only(), py::arg("seed"), py::arg("threads"), py::arg("wide_ids"),
             py::arg("progress"));
    py::class_<BucketRules>(m, "BucketRules")
        .def(py::init([](std::vector<std::int64_t> capacities, const std::string& overflow,
                         double padding_threshold, bool pairs, bool shuffle_segments) {
                 Overflow kind = Overflow::kPad;
                 if (overflow == "head") kind = Overflow::kHead;
                 if (overflow == "promote") kind = Overflow::kPromote;
                 return BucketRules{std::move(capacities), kind, padding_threshold, pairs,
                                    shuffle_segments};
             }),
             py::kw_only(), py::arg("capacities"), py::arg("overflow") = "pad",
             py::arg("padding_threshold") = 0.0, py::arg("pairs") = false,
             py::arg("shuffle_segments") = false);
    m.def(
        "count_bucket_samples",
        [](const Array<std::int64_t>& counts, const BucketRules& rules) {
            const auto values = view(counts, "counts");
            check(static_cast<std::int64_t>(values.size()) <= rules.capacities.back(),
                  "counts has ", values.size(), " classes; the largest bucket holds ",
                  rules.capacities.back());
            const py::gil_scoped_release unlocked;
            return plan_buckets({values.begin(), values.end()}, rules).samples_in_bucket;
        },
        py::arg("counts").noconvert(), py::arg("rules"));
    register_strategies<std::int32_t>(m);
    register_strategies<std::int64_t>(m);
    register_measures<std::int32_t, std::int32_t>(m);
    register_measures<std::int64_t, std::int32_t>(m);
    register_measures<std::int32_t, std::int64_t>(m);
    register_measures<std::int64_t, std::int64_t>(m);
    m.def(
        "attention_cost",
        [](const Array<std::int64_t>& offsets, const Array<std::int32_t>& lengths) {
            const auto samples = view(offsets, "sample_segment_offsets");
            const auto segments = view(lengths, "segment_length");
            std::vector<std::int64_t> result;
            {
                const py::gil_scoped_release unlocked;
                result = attention_cost(samples, segments);
            }
            return to_numpy(std::move(result));
        },
        py::arg("sample_segment_offsets").noconvert(), py::arg("segment_length").noconvert());
}

}  // namespace megapack

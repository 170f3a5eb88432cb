// packing: numpy views in, checked; GIL released; arrays out.
#include <chrono>
#include <limits>

#include "bindings/numpy_views.hpp"
#include "core/packing_bucket.hpp"
#include "core/packing_metrics.hpp"
#include "core/packing_order.hpp"
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

// run(lengths, Id{}, progress) without the GIL; Id is int32 unless document numbers need more.
template <typename Length, typename Run>
py::dict run_strategy(const Array<Length>& lengths, bool wide_ids, const py::object& callback,
                      Run run) {
    const Span<const Length> documents = view(lengths, "lengths");
    Progress progress(report_to(callback));
    const auto run_as = [&](auto id) {
        Samples<decltype(id), Length> samples;
        {
            const py::gil_scoped_release unlocked;
            samples = run(documents, id, progress);
        }
        return samples_to_dict(std::move(samples));
    };
    constexpr auto kMaxNarrow = std::size_t{std::numeric_limits<std::int32_t>::max()};
    if (wide_ids || documents.size() > kMaxNarrow) return run_as(std::int64_t{});
    return run_as(std::int32_t{});
}

template <typename Length>
py::dict pack_streams_of(const Array<Length>& lengths, const std::vector<std::int64_t>& buckets,
                         bool shuffled, bool drop_last, std::uint64_t seed, int threads,
                         bool wide_ids, const py::object& callback) {
    return run_strategy(lengths, wide_ids, callback, [&](auto documents, auto id, auto& progress) {
        using Id = decltype(id);
        Buffer<Item<Id, Length>> order;
        if (shuffled)
            order = shuffle<Id>(documents, random_for(seed, Purpose::kDocuments), threads);
        const Item<Id, Length>* items = shuffled ? order.data() : nullptr;
        const Documents<Id, Length> stream{documents, items, documents.size(), 0};
        auto samples = pack_streams(stream, buckets, threads, progress);
        if (drop_last) drop_partial_sample(samples);
        return samples;
    });
}

template <typename Length>
py::dict pack_buckets_of(const Array<Length>& lengths, const std::vector<std::int64_t>& buckets,
                         std::int64_t pool_size, bool promote, std::uint64_t seed, int threads,
                         bool wide_ids, const py::object& callback) {
    BucketRules rules;
    rules.capacities = buckets;
    rules.promote = promote;
    return run_strategy(lengths, wide_ids, callback, [&](auto documents, auto id, auto& progress) {
        return pack_buckets<decltype(id), Length>(documents, rules, pool_size, seed, threads,
                                                  progress);
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
    result["shortest"] = totals.shortest;
    result["longest"] = totals.longest;
    return result;
}

template <typename Length>
void register_strategies(py::module_& m) {
    const auto lengths = py::arg("lengths").noconvert();
    m.def("pack_streams", &pack_streams_of<Length>, lengths, py::kw_only(), py::arg("buckets"),
          py::arg("shuffle"), py::arg("drop_last"), py::arg("seed"), py::arg("threads"),
          py::arg("wide_ids"), py::arg("progress"));
    m.def("pack_buckets", &pack_buckets_of<Length>, lengths, py::kw_only(), py::arg("buckets"),
          py::arg("pool_size"), py::arg("promote"), py::arg("seed"), py::arg("threads"),
          py::arg("wide_ids"), py::arg("progress"));
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
                      totals = measure(arrays, documents, 1);
                  }
                  py::dict result;
                  result["tokens_per_bucket"] = totals.tokens_per_bucket;
                  result["whole_documents"] = totals.whole_documents;
                  result["segment_squares"] = totals.segment_squares;
                  result["sample_squares"] = totals.sample_squares;
                  return result;
              });
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

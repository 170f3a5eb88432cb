// index: metrics and checks of the arrays of a SampleIndex.
#include "bindings/checked_array.hpp"
#include "core/index/metrics.hpp"

namespace megapack {
namespace {

SampleView sample_view(const AnyArray& bucket_sample_offsets,
                       const AnyArray& sample_segment_offsets, const AnyArray& segment_document,
                       const AnyArray& segment_begin, const AnyArray& segment_length) {
    return {integers(bucket_sample_offsets, "bucket_sample_offsets"),
            integers(sample_segment_offsets, "sample_segment_offsets"),
            integers(segment_document, "segment_document"),
            integers(segment_begin, "segment_begin"), integers(segment_length, "segment_length")};
}

// Views only the two arrays from which attention_cost is computed.
SampleView cost_view(const AnyArray& sample_segment_offsets, const AnyArray& segment_length) {
    SampleView result;
    result.sample_segment_offsets = integers(sample_segment_offsets, "sample_segment_offsets");
    result.segment_length = integers(segment_length, "segment_length");
    return result;
}

// Converts a non-negative 128-bit number to a Python int.
py::int_ python_int(Wide value) {
    const auto high = static_cast<std::uint64_t>(value >> 64);
    return (py::int_(high) << py::int_(64)) | py::int_(static_cast<std::uint64_t>(value));
}

py::dict measure_samples(const AnyArray& buckets, const AnyArray& samples, const AnyArray& document,
                         const AnyArray& begin, const AnyArray& length,
                         std::int64_t num_documents) {
    const SampleView arrays = sample_view(buckets, samples, document, begin, length);
    check(num_documents >= 0, "num_documents is ", num_documents);
    const SegmentTotals totals = unlocked([&] { return measure(arrays, num_documents); });
    py::dict result;
    result["tokens_per_bucket"] = totals.tokens_per_bucket;
    result["cut_documents"] = totals.cut_documents;
    result["segment_squares"] = python_int(totals.segment_squares);
    result["sample_squares"] = python_int(totals.sample_squares);
    return result;
}

void check_laws_of(const Array<std::int64_t>& capacities, const AnyArray& buckets,
                   const AnyArray& samples, const AnyArray& document, const AnyArray& begin,
                   const AnyArray& length, const AnyArray& lengths) {
    const SampleView arrays = sample_view(buckets, samples, document, begin, length);
    const auto sizes = view(capacities, "bucket_capacity");
    const Integers documents = integers(lengths, "lengths");
    const py::gil_scoped_release unlocked;
    check_laws(arrays, sizes, documents);
}

// Returns measure(samples, lengths of documents), computed without the GIL.
template <typename Measure>
auto of_samples(Measure measure) {
    return [measure](const AnyArray& buckets, const AnyArray& samples, const AnyArray& document,
                     const AnyArray& begin, const AnyArray& length, const AnyArray& lengths) {
        const SampleView arrays = sample_view(buckets, samples, document, begin, length);
        const Integers documents = integers(lengths, "lengths");
        auto result = unlocked([&] { return measure(arrays, documents); });
        if constexpr (std::is_same_v<decltype(result), std::int64_t>)
            return result;
        else
            return to_numpy(std::move(result));
    };
}

py::array_t<std::int64_t> cost_of_all(const AnyArray& sample_segment_offsets,
                                      const AnyArray& segment_length) {
    const SampleView arrays = cost_view(sample_segment_offsets, segment_length);
    return computed([&] { return attention_cost(arrays); });
}

py::array_t<std::int64_t> cost_of_some(const AnyArray& sample_segment_offsets,
                                       const AnyArray& segment_length,
                                       const Array<std::int64_t>& samples, std::int64_t capacity,
                                       bool whole) {
    const SampleView arrays = cost_view(sample_segment_offsets, segment_length);
    const auto chosen = view(samples, "samples");
    return computed([&] { return attention_cost_of(arrays, chosen, capacity, whole); });
}

}  // namespace

void register_index(py::module_& m) {
    const py::arg buckets("bucket_sample_offsets"), samples("sample_segment_offsets"),
        document("segment_document"), begin("segment_begin"), length("segment_length"),
        lengths("lengths");
    m.def("measure_samples", &measure_samples, buckets, samples, document, begin, length,
          py::arg("num_documents"));
    m.def("check_laws", &check_laws_of, py::arg("bucket_capacity").noconvert(), buckets, samples,
          document, begin, length, lengths);
    m.def("whole_documents", of_samples(whole_documents), buckets, samples, document, begin, length,
          lengths);
    m.def("label_tokens", of_samples(label_tokens), buckets, samples, document, begin, length,
          lengths);
    m.def("attention_cost", &cost_of_all, samples, length);
    m.def("attention_cost_of", &cost_of_some, samples, length, py::arg("samples").noconvert(),
          py::arg("capacity"), py::arg("whole"));
}

}  // namespace megapack

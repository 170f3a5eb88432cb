// What is counted from the arrays of a SampleIndex: numpy views in, checked; GIL released.
#include "bindings/scalars.hpp"
#include "core/index/metrics.hpp"

namespace megapack {
namespace {

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

// Not negative.
py::object python_int(Wide value) {
    const auto high = static_cast<std::uint64_t>(value >> 64);
    return (py::int_(high) << py::int_(64)) | py::int_(static_cast<std::uint64_t>(value));
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
    m.def(
        "measure_samples",
        [](const Offsets& buckets, const Offsets& samples, const Array<Id>& document,
           const Array<Length>& begin, const Array<std::int32_t>& length,
           const py::object& num_documents) {
            const auto arrays = sample_view(buckets, samples, document, begin, length);
            const std::int64_t documents = integer(num_documents, "num_documents", 0);
            SegmentTotals totals;
            {
                const py::gil_scoped_release unlocked;
                totals = measure(arrays, documents);
            }
            py::dict result;
            result["tokens_per_bucket"] = totals.tokens_per_bucket;
            result["cut_documents"] = totals.cut_documents;
            result["segment_squares"] = python_int(totals.segment_squares);
            result["sample_squares"] = python_int(totals.sample_squares);
            return result;
        },
        py::arg("bucket_sample_offsets").noconvert(), py::arg("sample_segment_offsets").noconvert(),
        py::arg("segment_document").noconvert(), py::arg("segment_begin").noconvert(),
        py::arg("segment_length").noconvert(), py::arg("num_documents"));
    with_view("whole_documents",
              [](const Offsets& buckets, const Offsets& samples, const Array<Id>& document,
                 const Array<Length>& begin, const Array<std::int32_t>& length,
                 const Array<Length>& lengths) {
                  const auto arrays = sample_view(buckets, samples, document, begin, length);
                  const Span<const Length> documents = view(lengths, "lengths");
                  const py::gil_scoped_release unlocked;
                  return whole_documents(arrays, documents);
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

void register_samples(py::module_& m) {
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

#include "core/packing_metrics.hpp"

namespace megapack {
namespace {

// The document lengths are read at random; asking for them early hides the wait.
constexpr std::size_t kLookAhead = 32;

template <typename Id, typename Length>
class LengthReader {
  public:
    LengthReader(Span<const Id> documents, Span<const Length> lengths)
        : documents_(documents), lengths_(lengths) {}

    std::int64_t of_segment(std::size_t segment) const {
        if (segment + kLookAhead < documents_.size())
            __builtin_prefetch(
                &lengths_[static_cast<std::size_t>(documents_[segment + kLookAhead])]);
        return lengths_[static_cast<std::size_t>(documents_[segment])];
    }

  private:
    Span<const Id> documents_;
    Span<const Length> lengths_;
};

template <typename Id, typename Length>
void measure_samples(const SampleView<Id, Length>& samples, Span<const Length> lengths, Part range,
                     std::int64_t& tokens, SegmentTotals& totals) {
    const LengthReader<Id, Length> reader(samples.segment_document, lengths);
    for (std::size_t sample = range.begin; sample < range.end; ++sample) {
        const auto first = static_cast<std::size_t>(samples.sample_segment_offsets[sample]);
        const auto end = static_cast<std::size_t>(samples.sample_segment_offsets[sample + 1]);
        std::int64_t in_sample = 0;
        for (std::size_t s = first; s < end; ++s) {
            const std::int64_t length = samples.segment_length[s];
            in_sample += length;
            totals.segment_squares += length * length;
            totals.whole_documents += length == reader.of_segment(s);
        }
        tokens += in_sample;
        totals.sample_squares += in_sample * in_sample;
    }
}

}  // namespace

template <typename Length>
DocumentTotals count_documents(Span<const Length> lengths, std::int64_t capacity) {
    DocumentTotals totals;
    for (const std::int64_t length : lengths) {
        totals.num_tokens += length;
        totals.num_empty += length == 0;
        totals.num_longer += length > capacity;
    }
    return totals;
}

template <typename Id, typename Length>
SegmentTotals measure(const SampleView<Id, Length>& samples, Span<const Length> lengths,
                      int threads) {
    const std::size_t buckets = samples.bucket_sample_offsets.size() - 1;
    const auto parts = static_cast<std::size_t>(std::max(threads, 1));
    std::vector<SegmentTotals> partial(parts);
    parallel_for(threads, parts, [&](std::size_t p) {
        SegmentTotals own;
        own.tokens_per_bucket.assign(buckets, 0);
        for (std::size_t b = 0; b < buckets; ++b) {
            const auto first = static_cast<std::size_t>(samples.bucket_sample_offsets[b]);
            const auto end = static_cast<std::size_t>(samples.bucket_sample_offsets[b + 1]);
            Part range = part_of(end - first, parts, p);
            measure_samples(samples, lengths, {first + range.begin, first + range.end},
                            own.tokens_per_bucket[b], own);
        }
        partial[p] = own;
    });
    SegmentTotals totals;
    totals.tokens_per_bucket.assign(buckets, 0);
    for (const SegmentTotals& own : partial) {
        for (std::size_t b = 0; b < buckets; ++b)
            totals.tokens_per_bucket[b] += own.tokens_per_bucket[b];
        totals.whole_documents += own.whole_documents;
        totals.segment_squares += own.segment_squares;
        totals.sample_squares += own.sample_squares;
    }
    return totals;
}

template <typename Id, typename Length>
std::vector<std::int64_t> label_tokens(const SampleView<Id, Length>& samples,
                                       Span<const Length> lengths) {
    const LengthReader<Id, Length> reader(samples.segment_document, lengths);
    std::vector<std::int64_t> result(samples.sample_segment_offsets.size() - 1, 0);
    for (std::size_t sample = 0; sample < result.size(); ++sample) {
        const auto end = static_cast<std::size_t>(samples.sample_segment_offsets[sample + 1]);
        for (auto s = static_cast<std::size_t>(samples.sample_segment_offsets[sample]); s < end;
             ++s) {
            const std::int64_t stop = samples.segment_begin[s] + samples.segment_length[s];
            result[sample] += samples.segment_length[s] - (stop == reader.of_segment(s));
        }
    }
    return result;
}

std::vector<std::int64_t> attention_cost(Span<const std::int64_t> sample_segment_offsets,
                                         Span<const std::int32_t> segment_length) {
    std::vector<std::int64_t> result(sample_segment_offsets.size() - 1, 0);
    for (std::size_t sample = 0; sample < result.size(); ++sample) {
        const auto end = static_cast<std::size_t>(sample_segment_offsets[sample + 1]);
        for (auto s = static_cast<std::size_t>(sample_segment_offsets[sample]); s < end; ++s)
            result[sample] += std::int64_t{segment_length[s]} * segment_length[s];
    }
    return result;
}

template <typename Id, typename Length>
std::string find_fault(const SampleView<Id, Length>& samples, Span<const std::int64_t> capacities,
                       Span<const Length> lengths) {
    const auto num_segments = static_cast<std::int64_t>(samples.segment_document.size());
    for (std::size_t b = 0; b < capacities.size(); ++b) {
        for (std::int64_t i = samples.bucket_sample_offsets[b];
             i < samples.bucket_sample_offsets[b + 1]; ++i) {
            const std::int64_t first = samples.sample_segment_offsets[static_cast<std::size_t>(i)];
            const std::int64_t end =
                samples.sample_segment_offsets[static_cast<std::size_t>(i) + 1];
            if (first < 0 || first >= end || end > num_segments)
                return concat_message("sample ", i, " claims segments ", first, " to ", end, " of ",
                                      num_segments);
            std::int64_t tokens = 0;
            for (auto s = static_cast<std::size_t>(first); s < static_cast<std::size_t>(end); ++s) {
                const std::int64_t document = samples.segment_document[s];
                const std::int64_t begin = samples.segment_begin[s];
                const std::int64_t length = samples.segment_length[s];
                const auto count = static_cast<std::int64_t>(lengths.size());
                if (document < 0 || document >= count)
                    return concat_message("segment ", s, " names document ", document, " of ",
                                          count);
                const std::int64_t limit = lengths[static_cast<std::size_t>(document)];
                if (begin < 0 || length <= 0 || length > limit - begin)
                    return concat_message("segment ", s, " is [", begin, ", ", begin + length,
                                          ") of document ", document, ", which has ", limit,
                                          " tokens");
                tokens += length;
            }
            if (tokens > capacities[b])
                return concat_message("sample ", i, " holds ", tokens, " tokens; its capacity is ",
                                      capacities[b]);
        }
    }
    return {};
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                     \
    template SegmentTotals measure(const SampleView<Id, Length>&, Span<const Length>, int);  \
    template std::vector<std::int64_t> label_tokens(const SampleView<Id, Length>&,           \
                                                    Span<const Length>);                     \
    template std::string find_fault(const SampleView<Id, Length>&, Span<const std::int64_t>, \
                                    Span<const Length>);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)
MEGAPACK_INSTANTIATE(std::int32_t, std::int64_t)
template DocumentTotals count_documents(Span<const std::int32_t>, std::int64_t);
template DocumentTotals count_documents(Span<const std::int64_t>, std::int64_t);

}  // namespace megapack

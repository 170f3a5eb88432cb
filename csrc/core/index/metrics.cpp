#include "core/index/metrics.hpp"

#include <limits>

namespace megapack {
namespace {

// The document lengths are read at random; asking for them early hides the wait.
constexpr std::size_t kLookAhead = 32;

Part range_of(Span<const std::int64_t> offsets, std::size_t i, std::size_t limit,
              const char* subject, const char* claims) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    const auto end = static_cast<std::size_t>(offsets[i + 1]);
    check<FormatError>(begin <= end && end <= limit, subject, i, claims, offsets[i], " to ",
                       offsets[i + 1], " of ", limit);
    return {begin, end};
}

// The segments of a sample, and the lengths of their documents. The arrays may come from a damaged
// file: nothing is read out of place, whatever they hold.
template <typename Id, typename Length>
class SampleReader {
  public:
    SampleReader(const SampleView<Id, Length>& samples, Span<const Length> lengths)
        : samples_(samples), lengths_(lengths) {
        const std::size_t segments = samples.segment_document.size();
        check<FormatError>(samples.sample_segment_offsets.size() > 0 &&
                               samples.segment_begin.size() == segments &&
                               samples.segment_length.size() == segments,
                           "the arrays of the index do not belong together");
    }

    Part samples(std::size_t bucket) const {
        return range_of(samples_.bucket_sample_offsets, bucket,
                        samples_.sample_segment_offsets.size() - 1, "bucket ", " claims samples ");
    }
    Part segments(std::size_t sample) const {
        return range_of(samples_.sample_segment_offsets, sample, samples_.segment_document.size(),
                        "sample ", " claims segments ");
    }
    std::int64_t document_length(std::size_t segment) const {
        const Span<const Id> documents = samples_.segment_document;
        if (segment + kLookAhead < documents.size()) {
            const auto ahead = static_cast<std::size_t>(documents[segment + kLookAhead]);
            if (ahead < lengths_.size()) __builtin_prefetch(lengths_.data() + ahead);
        }
        const auto document = static_cast<std::size_t>(documents[segment]);
        check<FormatError>(document < lengths_.size(), "segment ", segment, " names document ",
                           documents[segment], " of ", lengths_.size());
        return lengths_[document];
    }

  private:
    const SampleView<Id, Length>& samples_;
    Span<const Length> lengths_;
};

// A bit for every document.
class DocumentSet {
  public:
    explicit DocumentSet(std::int64_t num_documents)
        : num_documents_(static_cast<std::size_t>(num_documents)),
          words_((num_documents_ + 63) / 64, 0) {}

    void insert(std::int64_t document) {
        const auto d = static_cast<std::size_t>(document);
        check<FormatError>(d < num_documents_, "a segment names document ", document, " of ",
                           num_documents_);
        const std::uint64_t bit = std::uint64_t{1} << (d % 64);
        size_ += (words_[d / 64] & bit) == 0;
        words_[d / 64] |= bit;
    }
    std::int64_t size() const { return size_; }

  private:
    std::size_t num_documents_;
    std::vector<std::uint64_t> words_;
    std::int64_t size_ = 0;
};

}  // namespace

template <typename Id, typename Length>
SegmentTotals measure(const SampleView<Id, Length>& samples, std::int64_t num_documents) {
    const SampleReader<Id, Length> reader(samples, {});
    SegmentTotals totals;
    DocumentSet cut(num_documents);
    for (std::size_t b = 0; b + 1 < samples.bucket_sample_offsets.size(); ++b) {
        std::int64_t in_bucket = 0;
        const Part bucket = reader.samples(b);
        for (std::size_t i = bucket.begin; i < bucket.end; ++i) {
            const Part segments = reader.segments(i);
            std::int64_t in_sample = 0;
            for (std::size_t s = segments.begin; s < segments.end; ++s) {
                const std::int64_t length = samples.segment_length[s];
                in_sample += length;
                totals.segment_squares += Wide{length} * length;
                if (samples.segment_begin[s] != 0) cut.insert(samples.segment_document[s]);
            }
            in_bucket += in_sample;
            totals.sample_squares += Wide{in_sample} * in_sample;
        }
        totals.tokens_per_bucket.push_back(in_bucket);
    }
    totals.cut_documents = cut.size();
    return totals;
}

template <typename Id, typename Length>
std::int64_t whole_documents(const SampleView<Id, Length>& samples, Span<const Length> lengths) {
    const SampleReader<Id, Length> reader(samples, lengths);
    std::int64_t whole = 0;
    for (std::size_t s = 0; s < samples.segment_length.size(); ++s)
        whole += samples.segment_length[s] == reader.document_length(s);
    return whole;
}

template <typename Id, typename Length>
std::vector<std::int64_t> label_tokens(const SampleView<Id, Length>& samples,
                                       Span<const Length> lengths) {
    const SampleReader<Id, Length> reader(samples, lengths);
    std::vector<std::int64_t> result(samples.sample_segment_offsets.size() - 1, 0);
    for (std::size_t i = 0; i < result.size(); ++i) {
        const Part segments = reader.segments(i);
        for (std::size_t s = segments.begin; s < segments.end; ++s) {
            // Unsigned: whatever a damaged index says, a sum that wraps is no document's length.
            const std::uint64_t end = static_cast<std::uint64_t>(samples.segment_begin[s]) +
                                      static_cast<std::uint64_t>(samples.segment_length[s]);
            const auto length = static_cast<std::uint64_t>(reader.document_length(s));
            result[i] += samples.segment_length[s] - (end == length ? 1 : 0);
        }
    }
    return result;
}

std::vector<std::int64_t> attention_cost(Span<const std::int64_t> sample_segment_offsets,
                                         Span<const std::int32_t> segment_length) {
    check<FormatError>(!sample_segment_offsets.empty(), "sample_segment_offsets is empty");
    constexpr Wide kMost = std::numeric_limits<std::int64_t>::max();
    std::vector<std::int64_t> result(sample_segment_offsets.size() - 1, 0);
    for (std::size_t i = 0; i < result.size(); ++i) {
        const Part segments = range_of(sample_segment_offsets, i, segment_length.size(), "sample ",
                                       " claims segments ");
        Wide cost = 0;
        for (std::size_t s = segments.begin; s < segments.end; ++s)
            cost += Wide{segment_length[s]} * segment_length[s];
        check<FormatError>(cost <= kMost, "sample ", i, " has more tokens than 64 bits can square");
        result[i] = static_cast<std::int64_t>(cost);
    }
    return result;
}

// Offsets begin at 0 and end at `last`; that they ascend is seen when they are followed.
void check_ends(Span<const std::int64_t> offsets, std::size_t last, const char* name) {
    const std::int64_t begin = offsets[0], end = offsets[offsets.size() - 1];
    check<FormatError>(begin == 0 && end == static_cast<std::int64_t>(last), name, " run from ",
                       begin, " to ", end, "; they run from 0 to ", last);
}

template <typename Id, typename Length>
void check_laws(const SampleView<Id, Length>& samples, Span<const std::int64_t> capacities,
                Span<const Length> lengths) {
    const SampleReader<Id, Length> reader(samples, lengths);
    check<FormatError>(samples.bucket_sample_offsets.size() == capacities.size() + 1,
                       "the arrays of the index do not belong together");
    std::int64_t before = 0;
    for (std::size_t b = 0; b < capacities.size(); ++b) {
        check<FormatError>(capacities[b] > before, "bucket ", b, " holds ", capacities[b],
                           " tokens; capacities are positive and ascend");
        before = capacities[b];
        const Part bucket = reader.samples(b);
        for (std::size_t i = bucket.begin; i < bucket.end; ++i) {
            const Part segments = reader.segments(i);
            std::int64_t tokens = 0;
            for (std::size_t s = segments.begin; s < segments.end; ++s) {
                const std::int64_t limit = reader.document_length(s);
                const std::int64_t begin = samples.segment_begin[s];
                const std::int64_t length = samples.segment_length[s];
                check<FormatError>(
                    begin >= 0 && begin <= limit && length > 0 && length <= limit - begin,
                    "segment ", s, " is [", begin, ", +", length, ") of document ",
                    samples.segment_document[s], ", which has ", limit, " tokens");
                tokens += length;
            }
            check<FormatError>(tokens > 0 && tokens <= capacities[b], "sample ", i, " holds ",
                               tokens, " tokens; its capacity is ", capacities[b]);
        }
    }
    check_ends(samples.bucket_sample_offsets, samples.sample_segment_offsets.size() - 1,
               "bucket_sample_offsets");
    check_ends(samples.sample_segment_offsets, samples.segment_document.size(),
               "sample_segment_offsets");
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                      \
    template SegmentTotals measure(const SampleView<Id, Length>&, std::int64_t);              \
    template std::int64_t whole_documents(const SampleView<Id, Length>&, Span<const Length>); \
    template std::vector<std::int64_t> label_tokens(const SampleView<Id, Length>&,            \
                                                    Span<const Length>);                      \
    template void check_laws(const SampleView<Id, Length>&, Span<const std::int64_t>,         \
                             Span<const Length>);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)
MEGAPACK_INSTANTIATE(std::int32_t, std::int64_t)

}  // namespace megapack

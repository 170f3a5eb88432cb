#include "core/index/metrics.hpp"

#include <limits>
#include <stdexcept>

namespace megapack {
namespace {

// A set of documents, one bit each.
class DocumentSet {
  public:
    explicit DocumentSet(std::int64_t num_documents)
        : num_documents_(num_documents), words_((num_documents + 63) / 64, 0) {}

    void insert(std::int64_t document) {
        check<FormatError>(document >= 0 && document < num_documents_, "a segment names document ",
                           document, " of ", num_documents_);
        const std::uint64_t bit = std::uint64_t{1} << (document % 64);
        size_ += (words_[document / 64] & bit) == 0;
        words_[document / 64] |= bit;
    }
    std::int64_t size() const { return size_; }

  private:
    std::int64_t num_documents_;
    std::vector<std::uint64_t> words_;
    std::int64_t size_ = 0;
};

// Checks that offsets begin at 0 and end at `last`. Reading the ranges checks that they ascend.
void check_ends(const Integers& offsets, std::int64_t last, const char* name) {
    const std::int64_t begin = offsets[0], end = offsets[offsets.size() - 1];
    check<FormatError>(begin == 0 && end == last, name, " run from ", begin, " to ", end,
                       "; they run from 0 to ", last);
}

}  // namespace

SegmentTotals measure(const SampleView& samples, std::int64_t num_documents) {
    samples.check_sizes();
    SegmentTotals totals;
    DocumentSet cut(num_documents);
    for (std::int64_t b = 0; b + 1 < samples.bucket_sample_offsets.size(); ++b) {
        std::int64_t in_bucket = 0;
        const Part bucket = samples.samples(b);
        for (std::int64_t i = bucket.begin; i < bucket.end; ++i) {
            const Part segments = samples.segments(i);
            std::int64_t in_sample = 0;
            for (std::int64_t s = segments.begin; s < segments.end; ++s) {
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

std::int64_t whole_documents(const SampleView& samples, const Integers& lengths) {
    samples.check_sizes();
    samples.segment_document.require(0, samples.num_segments());
    samples.segment_length.require(0, samples.num_segments());
    const LengthLookup length_of(samples.segment_document, lengths);
    std::int64_t whole = 0;
    for (std::int64_t s = 0; s < samples.num_segments(); ++s)
        whole += samples.segment_length[s] == length_of[s];
    return whole;
}

std::vector<std::int64_t> label_tokens(const SampleView& samples, const Integers& lengths) {
    samples.check_sizes();
    const LengthLookup length_of(samples.segment_document, lengths);
    std::vector<std::int64_t> result(samples.num_samples(), 0);
    for (std::int64_t i = 0; i < ssize(result); ++i) {
        const Part segments = samples.segments(i);
        for (std::int64_t s = segments.begin; s < segments.end; ++s) {
            // Unsigned, because damaged numbers may overflow; a wrapped sum never equals a length.
            const std::uint64_t end = static_cast<std::uint64_t>(samples.segment_begin[s]) +
                                      static_cast<std::uint64_t>(samples.segment_length[s]);
            const auto length = static_cast<std::uint64_t>(length_of[s]);
            result[i] += samples.segment_length[s] - (end == length ? 1 : 0);
        }
    }
    return result;
}

std::vector<std::int64_t> attention_cost(const SampleView& samples) {
    check<FormatError>(samples.sample_segment_offsets.size() > 0,
                       "sample_segment_offsets is empty");
    constexpr Wide kMost = std::numeric_limits<std::int64_t>::max();
    std::vector<std::int64_t> result(samples.num_samples(), 0);
    for (std::int64_t i = 0; i < ssize(result); ++i) {
        const Part segments = samples.segments(i);
        Wide cost = 0;
        for (std::int64_t s = segments.begin; s < segments.end; ++s)
            cost += Wide{samples.segment_length[s]} * samples.segment_length[s];
        check<FormatError>(cost <= kMost, "sample ", i, " has more tokens than 64 bits can square");
        result[i] = static_cast<std::int64_t>(cost);
    }
    return result;
}

std::vector<std::int64_t> attention_cost_of(const SampleView& samples,
                                            Span<const std::int64_t> chosen, std::int64_t capacity,
                                            bool whole) {
    constexpr std::int64_t kLongest = std::numeric_limits<std::int32_t>::max();
    check(capacity > 0 && capacity <= kLongest, "capacity is ", capacity, "; it must be from 1 to ",
          kLongest);
    std::vector<std::int64_t> costs;
    costs.reserve(chosen.size());
    // Samples are far apart in memory: prefetch the offset of a later one, then its lengths.
    constexpr std::int64_t kAhead = 16;
    const Integers& offsets = samples.sample_segment_offsets;
    const auto in_range = [&](std::int64_t i) {
        return i < chosen.size() && chosen[i] >= 0 && chosen[i] < samples.num_samples();
    };
    for (std::int64_t i = 0; i < chosen.size(); ++i) {
        const std::int64_t sample = chosen[i];
        check<std::out_of_range>(in_range(i), "sample ", sample, " of ", samples.num_samples());
        if (in_range(i + 2 * kAhead)) __builtin_prefetch(offsets.address(chosen[i + 2 * kAhead]));
        if (in_range(i + kAhead)) {
            const std::int64_t first = offsets[chosen[i + kAhead]];
            if (first >= 0 && first < samples.segment_length.size())
                __builtin_prefetch(samples.segment_length.address(first));
        }
        const Part segments = samples.segments(sample);
        std::int64_t used = 0, pairs = 0;
        for (std::int64_t s = segments.begin; s < segments.end; ++s) {
            const std::int64_t length = samples.segment_length[s];
            check<FormatError>(length > 0 && length <= capacity - used, "sample ", sample,
                               " has more than ", capacity, " tokens");
            used += length;
            pairs += length * length;
        }
        const std::int64_t padding = capacity - used;
        costs.push_back((whole ? used * used : pairs) + padding * padding);
    }
    return costs;
}

void check_laws(const SampleView& samples, Span<const std::int64_t> capacities,
                const Integers& lengths) {
    samples.check_sizes();
    check<FormatError>(samples.bucket_sample_offsets.size() == capacities.size() + 1,
                       "the arrays of the index do not belong together");
    const LengthLookup length_of(samples.segment_document, lengths);
    std::int64_t before = 0;
    for (std::int64_t b = 0; b < capacities.size(); ++b) {
        check<FormatError>(capacities[b] > before, "bucket ", b, " holds ", capacities[b],
                           " tokens; capacities are positive and ascend");
        before = capacities[b];
        const Part bucket = samples.samples(b);
        for (std::int64_t i = bucket.begin; i < bucket.end; ++i) {
            const Part segments = samples.segments(i);
            std::int64_t tokens = 0;
            for (std::int64_t s = segments.begin; s < segments.end; ++s) {
                const std::int64_t limit = length_of[s];
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
    check_ends(samples.bucket_sample_offsets, samples.num_samples(), "bucket_sample_offsets");
    check_ends(samples.sample_segment_offsets, samples.num_segments(), "sample_segment_offsets");
}

}  // namespace megapack

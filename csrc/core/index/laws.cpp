#include "core/index/laws.hpp"

namespace megapack {
namespace {

// Offsets begin at 0 and end at `last`; that they ascend is seen when they are followed.
void check_ends(const Integers& offsets, std::int64_t last, const char* name) {
    const std::int64_t begin = offsets[0], end = offsets[offsets.size() - 1];
    check<FormatError>(begin == 0 && end == last, name, " run from ", begin, " to ", end,
                       "; they run from 0 to ", last);
}

}  // namespace

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

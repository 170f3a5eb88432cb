#include "core/gather_source.hpp"

#include <stdexcept>

#include "core/check.hpp"

namespace megapack {
namespace {

constexpr const char* kRemedy =
    "; the .samples file is damaged or was made for another dataset: pack again";

Segment read_segment(const GatherSource& source, SampleRef ref, std::int64_t s) {
    const auto refuse = [&](bool ok, auto... what) {
        check<FormatError>(ok, "source ", ref.source, ", sample ", ref.sample, ", segment ", s,
                           what..., kRemedy);
    };
    Segment segment{};
    segment.document = source.segment_document[s];
    segment.begin = source.segment_begin[s];
    segment.length = source.segment_length[s];
    const std::int64_t num_documents = source.document_offsets.size() - 1;
    refuse(segment.document >= 0 && segment.document < num_documents, " names document ",
           segment.document, " of ", num_documents);
    const std::int64_t offset = source.document_offsets[segment.document];
    const std::int64_t end = source.document_offsets[segment.document + 1];
    refuse(offset >= 0 && offset <= end && end <= source.tokens.size, " is of a document at [",
           offset, ", ", end, ") in a file of ", source.tokens.size, " tokens");
    const std::int64_t document_length = end - offset;
    // No sum of untrusted numbers before both are known to be small: it could overflow.
    refuse(segment.begin >= 0 && segment.begin < document_length && segment.length > 0 &&
               segment.length <= document_length - segment.begin,
           " is tokens [", segment.begin, ", +", segment.length, ") of a document of ",
           document_length);
    segment.token_begin = offset + segment.begin;
    segment.ends_document = segment.begin + segment.length == document_length;
    return segment;
}

}  // namespace

void check_source(const GatherSource& source) {
    check(source.document_offsets.size() > 0,
          "document_offsets is empty; it has num_documents + 1");
    check(source.sample_segment_offsets.size() > 0,
          "sample_segment_offsets is empty; it has num_samples + 1");
    const std::int64_t num_segments = source.segment_length.size();
    check<FormatError>(source.segment_document.size() == num_segments &&
                           source.segment_begin.size() == num_segments,
                       "segment_document, segment_begin and segment_length have ",
                       source.segment_document.size(), ", ", source.segment_begin.size(), " and ",
                       num_segments, " elements; they must have as many", kRemedy);
    check<FormatError>(!source.has_labels() || source.labels.size == source.tokens.size,
                       "the label file has ", source.labels.size, " elements, the token file ",
                       source.tokens.size, "; labels stand beside the tokens, one for each");
}

const GatherSource& source_of(Span<const GatherSource> sources, SampleRef ref) {
    check<std::out_of_range>(
        ref.source >= 0 && static_cast<std::size_t>(ref.source) < sources.size(), "source ",
        ref.source, " of ", sources.size());
    return sources[static_cast<std::size_t>(ref.source)];
}

void read_segments(const GatherSource& source, SampleRef ref, std::vector<Segment>& out) {
    const std::int64_t num_samples = source.sample_segment_offsets.size() - 1;
    check<std::out_of_range>(ref.sample >= 0 && ref.sample < num_samples, "sample ", ref.sample,
                             " of source ", ref.source, ", which has ", num_samples);
    const std::int64_t first = source.sample_segment_offsets[ref.sample];
    const std::int64_t last = source.sample_segment_offsets[ref.sample + 1];
    check<FormatError>(first >= 0 && first <= last && last <= source.segment_length.size(),
                       "source ", ref.source, ", sample ", ref.sample, " has segments [", first,
                       ", ", last, ") of ", source.segment_length.size(), kRemedy);
    for (std::int64_t s = first; s < last; ++s) out.push_back(read_segment(source, ref, s));
}

}  // namespace megapack

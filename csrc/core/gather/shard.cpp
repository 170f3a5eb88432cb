#include "core/gather/shard.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/base/check.hpp"

namespace megapack {
namespace {

constexpr const char* kRemedy =
    "; the .samples file is damaged or was made for another dataset: pack again";

constexpr std::int64_t kLine = 64;  // bytes of a cache line

// Tokens [begin, end) of the file.
struct Range {
    std::int64_t begin;
    std::int64_t end;
};

// Returns the tokens of a document. Checks for this document what a reader of the whole file
// checks: it begins where the document before it ends, and its sequences are contiguous.
Range document_range(const Shard& shard, std::int64_t document) {
    const IndexView& index = shard.documents;
    index.require_document(document);
    const std::int64_t first = index.document_index(document);
    const std::int64_t last = index.document_index(document + 1);
    const auto num_sequences = index.num_sequences();
    check<FormatError>(first >= 0 && first <= last && last <= num_sequences, index.name(),
                       ": document ", document, " has sequences [", first, ", ", last, ") of ",
                       num_sequences);
    const std::int64_t itemsize = bytes_of(shard.tokens.type);
    index.require_sequences(first, last);
    const auto [begin, end] = check_sequences(index, first, last, itemsize);
    check<FormatError>(end / itemsize <= shard.tokens.size, index.name(), ": document ", document,
                       " ends at token ", end / itemsize, "; the file has ", shard.tokens.size);
    return {begin / itemsize, end / itemsize};
}

Segment read_segment(const Shard& shard, SampleRef ref, std::int64_t s) {
    const auto check_segment = [&](bool ok, auto... parts) {
        check<FormatError>(ok, shard.documents.name(), ", sample ", ref.sample, ", segment ", s,
                           parts..., kRemedy);
    };
    Segment segment{};
    segment.document = shard.samples.segment_document[s];
    segment.begin = shard.samples.segment_begin[s];
    segment.length = shard.samples.segment_length[s];
    const auto num_documents = static_cast<std::int64_t>(shard.documents.num_documents());
    check_segment(segment.document >= 0 && segment.document < num_documents, " names document ",
                  segment.document, " of ", num_documents);
    const Range range = document_range(shard, segment.document);
    const std::int64_t document_length = range.end - range.begin;
    // Untrusted numbers are compared before they are added: a sum could overflow.
    check_segment(segment.begin >= 0 && segment.begin < document_length && segment.length > 0 &&
                      segment.length <= document_length - segment.begin,
                  " has tokens [", segment.begin, ", +", segment.length, ") of a document of ",
                  document_length);
    segment.token_begin = range.begin + segment.begin;
    segment.ends_document = segment.begin + segment.length == document_length;
    segment.placed = segment.length;
    return segment;
}

// Returns the segment that segment s continues, checked against the segments of the sample before
// it, which begin at `first`; -1: none.
std::int64_t read_parent(const Shard& shard, SampleRef ref, std::int64_t s, std::int64_t begin,
                         Span<const Segment> before) {
    shard.parents.require(s, s + 1);
    const std::int64_t parent = shard.parents[s];
    check<FormatError>(parent >= -1 && parent < before.size(), shard.documents.name(), ", sample ",
                       ref.sample, ", segment ", s, " continues segment ", parent, " of ",
                       before.size(), kRemedy);
    const std::int64_t end = parent < 0 ? 0 : before[parent].begin + before[parent].length;
    check<FormatError>(begin == end, shard.documents.name(), ", sample ", ref.sample, ", segment ",
                       s, " begins at token ", begin, ", and the one that it continues ends at ",
                       end, kRemedy);
    return parent;
}

bool is_excluded(const Shard& shard, std::int64_t document, const StepView* view) {
    if (view == nullptr || !view->excludes(1)) return false;
    const auto* at = std::lower_bound(shard.excluded.begin(), shard.excluded.end(), document);
    return at != shard.excluded.end() && *at == document &&
           view->excludes(shard.excluded_by[at - shard.excluded.begin()]);
}

}  // namespace

std::int64_t bytes_of(TokenType type) {
    switch (type) {
        case TokenType::kUint8:
        case TokenType::kInt8:
            return 1;
        case TokenType::kInt16:
        case TokenType::kUint16:
            return 2;
        case TokenType::kInt32:
            return 4;
        case TokenType::kInt64:
            break;
    }
    return 8;
}

void prefetch(const std::uint8_t* begin, std::int64_t num_bytes) {
    const auto before = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin) % kLine);
    for (std::int64_t byte = -before; byte < num_bytes; byte += kLine)
        __builtin_prefetch(begin + byte);
}

void check_shard(const Shard& shard) {
    check(shard.samples.sample_segment_offsets.size() > 0,
          "sample_segment_offsets is empty; it must have num_samples + 1 elements");
    const std::int64_t num_segments = shard.samples.segment_length.size();
    check<FormatError>(shard.samples.segment_document.size() == num_segments &&
                           shard.samples.segment_begin.size() == num_segments,
                       "segment_document, segment_begin and segment_length have ",
                       shard.samples.segment_document.size(), ", ",
                       shard.samples.segment_begin.size(), " and ", num_segments,
                       " elements; the numbers must be equal", kRemedy);
    check<FormatError>(shard.joined.size() == 0 || shard.joined.size() == num_segments,
                       "segment_joined has ", shard.joined.size(), " elements and there are ",
                       num_segments, " segments", kRemedy);
    check<FormatError>(
        !shard.has_trees() ||
            (shard.parents.size() == num_segments && shard.end_offsets.size() == num_segments + 1),
        "segment_parent and segment_end_offsets have ", shard.parents.size(), " and ",
        shard.end_offsets.size(), " elements and there are ", num_segments, " segments", kRemedy);
    check(!shard.has_trees() || (shard.excluded.empty() && shard.longest_transformed < 0),
          "documents of prefix trees are neither excluded nor transformed");
    check<FormatError>(!shard.has_labels() || shard.labels.size == shard.tokens.size,
                       "column labels has ", shard.labels.size, " rows and there are ",
                       shard.tokens.size, " tokens; it must have one row per token");
    check<FormatError>(!shard.has_weights() || (shard.weights.size == shard.tokens.size &&
                                                shard.weights.type == TokenType::kUint16),
                       "column weights has ", shard.weights.size, " rows and there are ",
                       shard.tokens.size, " tokens; it must have one float16 per token");
    for (const ColumnArray& column : shard.columns)
        check<FormatError>(column.data == nullptr ||
                               (column.row_bytes > 0 && column.num_bytes % column.row_bytes == 0 &&
                                column.num_bytes / column.row_bytes == shard.tokens.size),
                           "a column has ", column.num_bytes, " bytes and ", column.row_bytes,
                           " per row, the token file ", shard.tokens.size,
                           " elements; it must have one row per token");
    check(!shard.has_labels() || shard.longest_transformed < 0,
          "fill-in-the-middle moves tokens and cannot be used with a column of labels");
    check(shard.excluded.size() == shard.excluded_by.size() &&
              std::is_sorted(shard.excluded.begin(), shard.excluded.end()),
          "excluded documents must ascend, with one list for each");
}

void check_runs(const SampleRuns& runs, std::int64_t num_shards) {
    const std::int64_t count = runs.shards.size();
    check(runs.first_ids.size() == count + 1 && runs.first_samples.size() == count &&
              runs.first_ids[0] == 0 &&
              std::is_sorted(runs.first_ids.begin(), runs.first_ids.end()),
          "runs of samples must be contiguous from id 0 on");
    for (std::int64_t r = 0; r < count; ++r) {
        check(runs.shards[r] >= 0 && runs.shards[r] < num_shards && runs.first_samples[r] >= 0,
              "run ", r, " begins with sample ", runs.first_samples[r], " of shard ",
              runs.shards[r], "; there are ", num_shards);
    }
}

std::vector<SampleRef> locate_samples(const SampleRuns& runs, Span<const std::int64_t> sample_ids,
                                      const StepView* view) {
    if (view != nullptr) view->check_entries(sample_ids.size());
    const std::int64_t num_samples = runs.first_ids[runs.shards.size()];
    std::vector<SampleRef> refs;
    refs.reserve(sample_ids.size());
    for (const std::int64_t id : sample_ids) {
        check<std::out_of_range>(id >= 0 && id < num_samples, "sample ", id, " of ", num_samples,
                                 " samples");
        const auto* after = std::upper_bound(runs.first_ids.begin(), runs.first_ids.end(), id);
        const std::int64_t run = after - runs.first_ids.begin() - 1;
        refs.push_back({runs.shards[run], runs.first_samples[run] + id - runs.first_ids[run], view,
                        ssize(refs)});
    }
    return refs;
}

std::vector<std::int64_t> not_open(Span<const Shard> shards, Span<const SampleRef> samples) {
    std::vector<std::int64_t> result;
    for (const SampleRef& ref : samples)
        if (!shards[ref.shard].is_open()) result.push_back(ref.shard);
    std::sort(result.begin(), result.end());
    result.erase(std::unique(result.begin(), result.end()), result.end());
    return result;
}

void read_segments(const Shard& shard, SampleRef ref, std::vector<Segment>& out) {
    const std::int64_t num_samples = shard.samples.num_samples();
    check<std::out_of_range>(ref.sample >= 0 && ref.sample < num_samples, "sample ", ref.sample,
                             " of ", shard.documents.name(), ", which has ", num_samples);
    const Part part = shard.samples.segments(ref.sample);
    const std::int64_t first = ssize(out);
    bool group_started = false;  // the sample already has a segment of the group
    for (std::int64_t s = part.begin; s < part.end; ++s) {
        Segment segment = read_segment(shard, ref, s);
        group_started = group_started && shard.joined.size() > 0 && shard.joined[s] != 0;
        if (is_excluded(shard, segment.document, ref.view)) continue;
        segment.joined = group_started;
        segment.parent = -1;
        if (shard.has_trees())
            segment.parent =
                read_parent(shard, ref, s, segment.begin, {out.data() + first, ssize(out) - first});
        group_started = true;
        out.push_back(segment);
    }
}

std::vector<TreeDocument> read_documents(const Shard& shard, SampleRef ref) {
    const Part part = shard.samples.segments(ref.sample);
    shard.end_offsets.require(part.begin, part.end + 1);
    std::vector<TreeDocument> out;
    for (std::int64_t s = part.begin; s < part.end; ++s) {
        const std::int64_t begin = shard.end_offsets[s], end = shard.end_offsets[s + 1];
        check<FormatError>(begin >= 0 && begin <= end && end <= shard.end_documents.size(),
                           shard.documents.name(), ", segment ", s, " ends documents ", begin,
                           " to ", end, " of ", shard.end_documents.size(), kRemedy);
        shard.end_documents.require(begin, end);
        const std::int64_t length =
            shard.samples.segment_begin[s] + shard.samples.segment_length[s];
        const auto num_documents = static_cast<std::int64_t>(shard.documents.num_documents());
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t document = shard.end_documents[i];
            check<FormatError>(document >= 0 && document < num_documents, shard.documents.name(),
                               ", segment ", s, " ends document ", document, " of ", num_documents,
                               kRemedy);
            const Range range = document_range(shard, document);
            check<FormatError>(range.end - range.begin == length, shard.documents.name(),
                               ", segment ", s, " ends document ", document, " at token ", length,
                               " of ", range.end - range.begin, kRemedy);
            out.push_back({document, range.begin, length, s - part.begin});
        }
    }
    return out;
}

}  // namespace megapack

// Random bytes as an .idx: FormatError or consistent arrays, no read outside of them.
// core: storage/mmididx.cpp
#include <cstdlib>
#include <vector>

#include "core/storage/mmididx.hpp"

using namespace megapack;

namespace {

void require(bool ok) {
    if (!ok) std::abort();
}

void read_documents(const IndexView& index, std::int64_t itemsize) {
    std::vector<std::int64_t> offsets(index.num_documents() + 1);
    document_offsets(index, itemsize, offsets);
    std::vector<std::int64_t> lengths(index.num_documents());
    document_lengths(index, lengths);
    require(offsets[0] == 0);
    for (std::int64_t d = 0; d < ssize(lengths); ++d)
        require(lengths[d] >= 0 && offsets[d] + lengths[d] == offsets[d + 1]);
    std::vector<std::int32_t> narrow(index.num_documents());
    if (document_lengths(index, narrow))
        require(std::vector<std::int64_t>(narrow.begin(), narrow.end()) == lengths);
}

// The writer reproduces the pointers and documents of a valid file.
void write_again(const IndexView& index, std::int64_t itemsize) {
    std::vector<std::int32_t> lengths(index.num_sequences());
    std::vector<std::int64_t> pointers(index.num_sequences());
    std::vector<std::int64_t> documents(index.num_documents() + 1);
    copy_sequence_lengths(index, lengths);
    copy_sequence_pointers(index, pointers);
    copy_document_indices(index, documents);
    std::vector<std::int64_t> scanned(index.num_sequences());
    scan_lengths(lengths, itemsize, 0, scanned);
    require(scanned == pointers);
    const Span<const std::int64_t> ends{documents.data() + 1, ssize(documents) - 1};
    std::vector<std::int64_t> shifted(ends.size());
    const auto num_sequences = static_cast<std::int64_t>(index.num_sequences());
    require(shift_document_ends(ends, num_sequences, 0, 0, shifted) == num_sequences);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    for (const std::int64_t itemsize : {2, 4}) {
        try {
            const IndexView index({data, static_cast<std::int64_t>(size)}, "fuzz.idx");
            read_documents(index, itemsize);
            write_again(index, itemsize);
        } catch (const FormatError&) {
        }
    }
    return 0;
}

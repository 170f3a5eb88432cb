// Megatron's .idx, little endian:
//   magic[9] version:u64 dtype:u8 num_sequences:u64 num_document_indices:u64    (34 bytes)
//   lengths:i32[S] pointers:i64[S] document_indices:i64[D] and, when multimodal, modes:i8[S]
// Nothing in it is aligned, so every number is copied out, never reinterpreted. Documents are
// half-open ranges of sequences: document d is [document_indices[d], document_indices[d + 1]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/base/blocks.hpp"
#include "core/base/check.hpp"
#include "core/base/span.hpp"

namespace megapack {

constexpr std::int64_t kIndexHeaderBytes = 34;

struct IndexHeader {
    std::uint8_t dtype_code = 0;
    std::int64_t num_sequences = 0;
    std::int64_t num_document_indices = 0;  // documents + 1

    // GPT-NeoX's merge writes document_indices = [0] and so loses the documents; its own reader
    // goes by sequences, hence every sequence is one document then.
    bool lacks_document_indices() const {
        return num_document_indices == 0 || (num_document_indices == 1 && num_sequences > 0);
    }
    std::int64_t num_documents() const {
        return lacks_document_indices() ? num_sequences : num_document_indices - 1;
    }

    // Where each array begins, in bytes from the beginning of the file.
    std::int64_t lengths_at() const { return kIndexHeaderBytes; }
    std::int64_t pointers_at() const { return lengths_at() + 4 * num_sequences; }
    std::int64_t document_indices_at() const { return pointers_at() + 8 * num_sequences; }
    std::int64_t modes_at() const { return document_indices_at() + 8 * num_document_indices; }
};

// `bytes` holds at least the header of a file of `file_bytes`; the arrays the header promises lie
// inside the file, or it is a FormatError. `name` is the file, for messages.
IndexHeader parse_index_header(Span<const std::uint8_t> bytes, std::int64_t file_bytes,
                               const std::string& name);

// A whole .idx in memory (usually a mapping).
class IndexView {
  public:
    IndexView() = default;  // of a file that is not open
    // `checks`: of these bytes, where somebody promised what they are; the caller keeps it.
    IndexView(Span<const std::uint8_t> bytes, std::string name,
              const BlockChecks* checks = nullptr);

    const IndexHeader& header() const { return header_; }
    std::int64_t num_sequences() const { return header_.num_sequences; }
    std::int64_t num_documents() const { return header_.num_documents(); }
    const std::string& name() const { return name_; }

    std::int32_t length(std::int64_t sequence) const;
    std::int64_t pointer(std::int64_t sequence) const;
    std::int64_t document_index(std::int64_t i) const;  // i <= num_documents
    const std::uint8_t* at(std::int64_t byte) const { return bytes_.data() + byte; }

    // Asked for before numbers are read and relied on, each one or all: FormatError where a block
    // of the file that they lie in is damaged. First the range of a document, then the sequences
    // [first, last) of the file and the neighbours that check_sequences reads.
    void require_document(std::int64_t document) const {
        if (is_checked() && !header_.lacks_document_indices())
            require(header_.document_indices_at(), 8, document, document + 2);
    }
    void require_sequences(std::int64_t first, std::int64_t last) const {
        if (!is_checked()) return;
        const std::int64_t before = first == 0 ? 0 : first - 1;
        require(header_.lengths_at(), 4, before, last);
        require(header_.pointers_at(), 8, before, last == num_sequences() ? last : last + 1);
    }
    void require_all() const {
        if (checks_ != nullptr) checks_->require(0, bytes_.size());
    }

  private:
    bool is_checked() const { return checks_ != nullptr && !checks_->all_sound(); }
    void require(std::int64_t at, std::int64_t width, std::int64_t begin, std::int64_t end) const {
        checks_->require(at + width * begin, at + width * end);
    }

    Span<const std::uint8_t> bytes_;
    const BlockChecks* checks_ = nullptr;
    std::string name_;
    IndexHeader header_;
};

// Plain copies, unchecked beyond their size.
void copy_sequence_lengths(const IndexView& index, Span<std::int32_t> out);
void copy_sequence_pointers(const IndexView& index, Span<std::int64_t> out);
void copy_document_indices(const IndexView& index, Span<std::int64_t> out);

// What a reader relies on: no negative length, pointers that follow from the lengths, documents
// that begin at 0, never go back and end at num_sequences. FormatError names the first violation.
void check_lengths_and_pointers(const IndexView& index, std::int64_t itemsize);
// The same for sequences [first, last) and the neighbours they touch: the first begins where the
// one before it ends, the one at `last` begins where they end. Returns the bytes [begin, end) they
// take.
std::pair<std::int64_t, std::int64_t> check_sequences(const IndexView& index, std::int64_t first,
                                                      std::int64_t last, std::int64_t itemsize);
void check_document_indices(const IndexView& index);

// True when document d is exactly sequence d, the layout of all but sentence-split corpora.
bool is_one_sequence_per_document(const IndexView& index);

// Tokens per document; out has num_documents. False, and nothing meaningful in out, when a
// document is too long for 32 bits. Checks lengths and document indices on the way.
bool document_lengths(const IndexView& index, Span<std::int32_t> out);
void document_lengths(const IndexView& index, Span<std::int64_t> out);

// Token position of every document in .bin and, last, the number of tokens; out has
// num_documents + 1. Checks everything the reader relies on.
void document_offsets(const IndexView& index, std::int64_t itemsize, Span<std::int64_t> out);

// Writing, block by block. `begin` is the byte or the sequence at which the block starts.

// out[i] = begin + itemsize * (lengths[0] + ... + lengths[i - 1]); returns the next block's begin.
std::int64_t scan_lengths(Span<const std::int32_t> lengths, std::int64_t itemsize,
                          std::int64_t begin, Span<std::int64_t> out);

// out[i] = begin + ends[i], for document ends of a source with num_sequences sequences; `previous`
// is the end before ends[0]. Returns the last end. FormatError when they go back or beyond.
std::int64_t shift_document_ends(Span<const std::int64_t> ends, std::int64_t num_sequences,
                                 std::int64_t previous, std::int64_t begin, Span<std::int64_t> out);

}  // namespace megapack

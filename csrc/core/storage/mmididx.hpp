// Megatron's .idx, little endian:
//   magic[9] version:u64 dtype:u8 num_sequences:u64 num_document_indices:u64    (34 bytes)
//   lengths:i32[S] pointers:i64[S] document_indices:i64[D] and, when multimodal, modes:i8[S]
// Nothing is aligned: numbers are copied out, never reinterpreted. Document d consists of sequences
// [document_indices[d], document_indices[d + 1]).
//
//     lengths {5, 3, 4}, document_indices {0, 2, 3}, uint16 tokens
//         ->  document_lengths {8, 4}, pointers {0, 10, 16}, document_offsets {0, 8, 12}
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

    // GPT-NeoX's merge writes document_indices = [0] and so loses the documents. Its own reader
    // uses sequences, so every sequence counts as a document here.
    bool lacks_document_indices() const {
        return num_document_indices == 0 || (num_document_indices == 1 && num_sequences > 0);
    }
    std::int64_t num_documents() const {
        return lacks_document_indices() ? num_sequences : num_document_indices - 1;
    }

    // Byte offsets of the arrays in the file.
    std::int64_t lengths_at() const { return kIndexHeaderBytes; }
    std::int64_t pointers_at() const { return lengths_at() + 4 * num_sequences; }
    std::int64_t document_indices_at() const { return pointers_at() + 8 * num_sequences; }
    std::int64_t modes_at() const { return document_indices_at() + 8 * num_document_indices; }
};

// Reads the header from `bytes`, which may be only the beginning of a file of `file_bytes`. Throws
// FormatError unless the arrays fit into the file. `name`: the file's name in messages.
IndexHeader parse_index_header(Span<const std::uint8_t> bytes, std::int64_t file_bytes,
                               const std::string& name);

// A whole .idx in memory, usually a mapping.
class IndexView {
  public:
    IndexView() = default;  // no file
    // `checks`: checksums of these bytes, if known; the caller keeps them alive.
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

    // Check blocks before their numbers are used; throw FormatError if one is damaged. In order,
    // they check the blocks of a document's range, of sequences [first, last) and the neighbors
    // that check_sequences reads, and of the whole file.
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
    bool is_checked() const { return checks_ != nullptr && !checks_->all_checked(); }
    void require(std::int64_t at, std::int64_t width, std::int64_t begin, std::int64_t end) const {
        checks_->require(at + width * begin, at + width * end);
    }

    Span<const std::uint8_t> bytes_;
    const BlockChecks* checks_ = nullptr;
    std::string name_;
    IndexHeader header_;
};

// Copy an array without any check except its size.
void copy_sequence_lengths(const IndexView& index, Span<std::int32_t> out);
void copy_sequence_pointers(const IndexView& index, Span<std::int64_t> out);
void copy_document_indices(const IndexView& index, Span<std::int64_t> out);

// Checks sequences [first, last): no negative length, the first begins where the one before it
// ends, each later one (also the one at `last`) where its predecessor ends. Returns their bytes
// [begin, end). Throws FormatError for the first violation.
std::pair<std::int64_t, std::int64_t> check_sequences(const IndexView& index, std::int64_t first,
                                                      std::int64_t last, std::int64_t itemsize);
// Throws FormatError unless documents begin at 0, never descend and end at num_sequences.
void check_document_indices(const IndexView& index);

// Returns true if document d is sequence d, as in all corpora that are not split into sentences.
bool is_one_sequence_per_document(const IndexView& index);

// Write the tokens per document to `out`, which has num_documents elements; check lengths and
// document indices. The first returns false if a document is too long for 32 bits.
bool document_lengths(const IndexView& index, Span<std::int32_t> out);
void document_lengths(const IndexView& index, Span<std::int64_t> out);

// Writes the token offset of every document in .bin and, last, the number of tokens; `out` has
// num_documents + 1 elements. Checks all lengths, pointers and document indices.
void document_offsets(const IndexView& index, std::int64_t itemsize, Span<std::int64_t> out);

// ---- Writing, block by block; `begin` is the first byte or sequence of the block

// out[i] = begin + itemsize * (lengths[0] + ... + lengths[i - 1]); returns the next `begin`.
std::int64_t scan_lengths(Span<const std::int32_t> lengths, std::int64_t itemsize,
                          std::int64_t begin, Span<std::int64_t> out);

// out[i] = begin + ends[i], for the document ends of a file with num_sequences sequences;
// `previous` is the end before ends[0]. Returns the last end. Throws FormatError if an end is below
// its predecessor or above num_sequences.
std::int64_t shift_document_ends(Span<const std::int64_t> ends, std::int64_t num_sequences,
                                 std::int64_t previous, std::int64_t begin, Span<std::int64_t> out);

}  // namespace megapack

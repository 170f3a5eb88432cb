// Documents in one flat buffer with offsets: checks of their text, and special tokens added to
// their token ids.
//
//     frame_documents<std::uint16_t>(ids {5, 6, 7}, offsets {0, 2, 3}, prefix {1}, suffix {2}, 10)
//         ->  tokens {1, 5, 6, 2, 1, 7, 2}, offsets {0, 4, 7}
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Returns 1 for every document that is valid UTF-8, else 0. offsets: (documents + 1), ascending.
std::vector<std::uint8_t> valid_utf8(Span<const std::uint8_t> text,
                                     Span<const std::int64_t> offsets);

// Returns the number of words of every document, like len(text.split()) in Python.
std::vector<std::int64_t> count_words(Span<const std::uint8_t> text,
                                      Span<const std::int64_t> offsets);

// Returns 1 for every document with a character inside one of `ranges`, else 0. Ranges are
// ascending pairs (first, last) of code points above U+07FF. The text must be valid UTF-8.
std::vector<std::uint8_t> has_characters(Span<const std::uint8_t> text,
                                         Span<const std::int64_t> offsets,
                                         Span<const std::int64_t> ranges);

template <typename Stored>
struct FramedDocuments {
    std::vector<Stored> tokens;
    std::vector<std::int64_t> offsets;  // (documents + 1)
    std::vector<std::int64_t> marked;   // the marked ids among `ids`, in their order
};

// Adds `prefix` before and `suffix` after every document and narrows the ids (uint32 or int32) to
// Stored. Also returns the ids with a nonzero byte in `marks` (vocab_size bytes; empty: no id).
// Throws DataError for an id outside [0, vocab_size).
template <typename Stored, typename Id>
FramedDocuments<Stored> frame_documents(Span<const Id> ids, Span<const std::int64_t> offsets,
                                        Span<const std::int64_t> prefix,
                                        Span<const std::int64_t> suffix, std::int64_t vocab_size,
                                        Span<const std::uint8_t> marks = {});

}  // namespace megapack

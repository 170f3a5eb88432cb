// Many documents as one flat buffer with offsets: checks of their text, and their tokens framed.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// (documents): 1 where the document is valid UTF-8. offsets: (documents + 1), ascending.
std::vector<std::uint8_t> valid_utf8(Span<const std::uint8_t> text,
                                     Span<const std::int64_t> offsets);

// (documents): words separated by white space, as len(text.split()) counts them in Python.
std::vector<std::int64_t> count_words(Span<const std::uint8_t> text,
                                      Span<const std::int64_t> offsets);

// (documents): 1 where the document has a character inside one of `ranges`: pairs (first, last) of
// code points, ascending, all above U+07FF. The text must be valid UTF-8.
std::vector<std::uint8_t> has_characters(Span<const std::uint8_t> text,
                                         Span<const std::int64_t> offsets,
                                         Span<const std::int64_t> ranges);

template <typename Stored>
struct FramedDocuments {
    std::vector<Stored> tokens;
    std::vector<std::int64_t> offsets;  // (documents + 1)
    std::int64_t max_token = -1;
};

// Puts `prefix` before and `suffix` behind every document and narrows ids to Stored in the same
// pass. Ids: uint32 or int32. Throws DataError for an id below 0 or not below vocab_size.
template <typename Stored, typename Id>
FramedDocuments<Stored> frame_documents(Span<const Id> ids, Span<const std::int64_t> offsets,
                                        Span<const std::int64_t> prefix,
                                        Span<const std::int64_t> suffix, std::int64_t vocab_size);

}  // namespace megapack

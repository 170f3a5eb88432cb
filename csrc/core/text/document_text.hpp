// Checks over many documents held as one flat UTF-8 buffer with offsets.
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

}  // namespace megapack

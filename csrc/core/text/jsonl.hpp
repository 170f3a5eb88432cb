// JSON Lines -> the text of one key.
//
//     {"text": "caf\u00e9", "id": 7}  ->  "caf\xc3\xa9"
//
// Checks every line completely (grammar, UTF-8) and unescapes its text into one flat buffer,
// without Python objects and without the GIL. Accepts what Python's json.loads accepts, including
// NaN and Infinity; the last of several equal keys wins. Two differences: integers of over 4,300
// digits pass, and containers nest at most kMaxJsonDepth deep. If an object has no key `a.b`, key
// `b` of its object `a` is used. orjson needs a Python object per document, and refuses NaN and
// Infinity, which json.dumps writes; `make bench-build` compares the speed: equal on long lines,
// and this parser is faster on short ones.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

enum class LineStatus : std::uint8_t {
    ok = 0,
    blank = 1,         // only white space
    malformed = 2,     // not JSON
    not_object = 3,    // JSON, but not {...}
    missing_key = 4,   // an object without the key
    wrong_type = 5,    // the value of the key is not one of the accepted JsonValues
    invalid_utf8 = 6,  // invalid bytes, or a text with half a surrogate pair
};

// Accepted values of the key. Strings are unescaped, other values are copied as written.
enum class JsonValues : std::uint8_t {
    strings = 0,
    scalars = 1,  // strings, numbers, true, false
    lists = 2,    // only [...]
    any = 3,      // every value; strings are copied as written, too
};

inline constexpr int kMaxJsonDepth = 900;

struct JsonlTexts {
    std::vector<std::uint8_t> text;     // UTF-8 of all texts, concatenated
    std::vector<std::int64_t> offsets;  // (lines + 1): text of line i is [offsets[i], offsets[i+1])
    std::vector<std::uint8_t> status;   // (lines): LineStatus; only `ok` lines have text
    std::vector<std::int64_t> line_begin;  // (lines): offset of line i in the buffer
};

JsonlTexts extract_jsonl(Span<const std::uint8_t> buffer, std::string_view key, JsonValues values);

}  // namespace megapack

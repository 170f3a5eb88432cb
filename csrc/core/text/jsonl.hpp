// JSON Lines -> the text of one key, at the speed of memory.
//
// Each line is checked as a whole (grammar, UTF-8) and its text is unescaped into one flat buffer,
// so that documents reach the tokenizer without ever becoming objects of the interpreter. A line
// passes here exactly when Python's json.loads accepts it (NaN and Infinity included, the last of
// duplicate keys wins; but for integers of over 4,300 digits, which Python refuses); containers may
// nest kMaxJsonDepth deep. A key `a.b` that an object does not
// have is looked for as key `b` of its object `a`. It is our own because it was measured beside
// orjson (`make bench-build`): as fast on long lines and faster on short ones, without a Python
// object of every document and the interpreter's lock, which the worker's other threads need;
// orjson also refuses NaN and Infinity, which json.dumps writes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

enum class LineStatus : std::uint8_t {
    ok = 0,
    blank = 1,         // nothing but white space
    malformed = 2,     // not JSON
    not_object = 3,    // JSON, but no {...}
    missing_key = 4,   // an object without the key
    wrong_type = 5,    // the key's value is not of the kind asked for
    invalid_utf8 = 6,  // bytes that are no UTF-8, or a text with half a surrogate pair
};

// Which values of the key are taken. Strings are unescaped; the others keep their own spelling.
enum class JsonValues : std::uint8_t {
    strings = 0,
    scalars = 1,  // strings, numbers, true, false
    lists = 2,    // [...] alone
    any = 3,      // strings, too, in their own spelling
};

inline constexpr int kMaxJsonDepth = 900;

struct JsonlTexts {
    std::vector<std::uint8_t> text;     // UTF-8 of all texts, one after the other
    std::vector<std::int64_t> offsets;  // (lines + 1): text of line i is [offsets[i], offsets[i+1])
    std::vector<std::uint8_t> status;   // (lines): LineStatus; a line that is not ok has no text
    std::vector<std::int64_t> line_begin;  // (lines): where line i starts in the buffer
};

JsonlTexts extract_jsonl(Span<const std::uint8_t> buffer, std::string_view key, JsonValues values);

}  // namespace megapack

// Random bytes as JSON Lines: lines, texts and offsets are consistent.
// core: text/jsonl.cpp
#include <cstdlib>
#include <string_view>

#include "core/text/jsonl.hpp"
#include "core/text/utf8.hpp"

using namespace megapack;

namespace {

void require(bool ok) {
    if (!ok) std::abort();
}

std::size_t count_lines(const std::uint8_t* data, std::size_t size) {
    std::size_t lines = 0;
    for (std::size_t i = 0; i < size; ++i) lines += data[i] == '\n' ? 1 : 0;
    return lines + (size > 0 && data[size - 1] != '\n' ? 1 : 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    for (const auto values :
         {JsonValues::strings, JsonValues::scalars, JsonValues::lists, JsonValues::any}) {
        const JsonlTexts texts =
            extract_jsonl({data, static_cast<std::int64_t>(size)}, "text", values);
        const std::size_t lines = texts.status.size();
        require(lines == count_lines(data, size));
        require(texts.offsets.size() == lines + 1 && texts.line_begin.size() == lines);
        require(texts.offsets[0] == 0);
        require(texts.offsets[lines] == static_cast<std::int64_t>(texts.text.size()));
        require(texts.text.size() <= size);
        require(is_utf8(texts.text));
        for (std::size_t i = 0; i < lines; ++i) {
            const std::int64_t length = texts.offsets[i + 1] - texts.offsets[i];
            require(length >= 0 && (texts.status[i] == 0 || length == 0));
        }
    }
    return 0;
}

#include "core/text/documents.hpp"

#include <algorithm>
#include <limits>

#include "core/base/check.hpp"
#include "core/text/utf8.hpp"

namespace megapack {
namespace {

template <typename Result, typename Measure>
std::vector<Result> for_each_document(Span<const std::uint8_t> text,
                                      Span<const std::int64_t> offsets, Measure measure) {
    check(!offsets.empty(),
          "offsets is empty; it must have one entry more than there are documents");
    std::vector<Result> result;
    result.reserve(offsets.size() - 1);
    for (std::int64_t i = 0; i + 1 < offsets.size(); ++i) {
        const std::int64_t begin = offsets[i];
        const std::int64_t end = offsets[i + 1];
        check(begin >= 0 && begin <= end && end <= text.size(), "document ", i, " has bytes [",
              begin, ", ", end, ") of a text of ", text.size());
        result.push_back(measure(text.subspan(begin, end - begin)));
    }
    return result;
}

// Returns the bytes of the white space character at p (as str.isspace() of Python), or 0.
std::int64_t white_space_bytes(const std::uint8_t* p, const std::uint8_t* end) {
    const std::uint8_t c = p[0];
    if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F) ? 1 : 0;
    const auto room = end - p;
    if (c == 0xC2) return room >= 2 && (p[1] == 0x85 || p[1] == 0xA0) ? 2 : 0;
    if (room < 3 || c < 0xE1 || c > 0xE3) return 0;
    const unsigned tail = (static_cast<unsigned>(p[1]) << 8) | p[2];
    if (c == 0xE1) return tail == 0x9A80 ? 3 : 0;  // U+1680
    if (c == 0xE3) return tail == 0x8080 ? 3 : 0;  // U+3000
    const bool space = (tail >= 0x8080 && tail <= 0x808A) || tail == 0x80A8 || tail == 0x80A9 ||
                       tail == 0x80AF || tail == 0x819F;  // U+2000..200A, 2028, 2029, 202F, 205F
    return space ? 3 : 0;
}

std::int64_t words(Span<const std::uint8_t> document) {
    std::int64_t count = 0;
    bool inside = false;
    for (const std::uint8_t* p = document.begin(); p != document.end();) {
        const std::int64_t space = white_space_bytes(p, document.end());
        count += space == 0 && !inside ? 1 : 0;
        inside = space == 0;
        p += space == 0 ? 1 : space;  // continuation bytes are never white space
    }
    return count;
}

// Returns true if code point c is in one of the ascending ranges (first, last).
bool in_ranges(std::int64_t c, Span<const std::int64_t> ranges) {
    const std::int64_t* above = std::upper_bound(ranges.begin(), ranges.end(), c);
    const auto num_below = above - ranges.begin();  // odd: c is between a first and its last
    return num_below % 2 == 1 || (num_below > 0 && *(above - 1) == c);
}

// Returns a nonzero number if one of eight bytes is 0xE0 or above: it starts a character of 3 or 4
// bytes.
std::uint64_t long_leads(std::uint64_t word) {
    return word & (word << 1) & (word << 2) & kHighBits;
}

// Returns the same for 32 bytes.
std::uint64_t long_leads_of_32(const std::uint8_t* p) {
    return long_leads(load_8_bytes(p)) | long_leads(load_8_bytes(p + 8)) |
           long_leads(load_8_bytes(p + 16)) | long_leads(load_8_bytes(p + 24));
}

bool has_any(Span<const std::uint8_t> document, Span<const std::int64_t> ranges) {
    const std::uint8_t* p = document.begin();
    const std::uint8_t* const end = document.end();
    while (p != end) {
        if (end - p >= 32 && long_leads_of_32(p) == 0) {
            p += 32;
        } else if (end - p >= 8 && long_leads(load_8_bytes(p)) == 0) {
            p += 8;
        } else if (*p < 0xE0) {  // a character below U+0800, or a continuation byte
            ++p;
        } else {
            const std::int64_t length = *p < 0xF0 ? 3 : 4;
            if (end - p < length) return false;
            std::int64_t c = *p & (length == 3 ? 0x0F : 0x07);
            for (std::int64_t i = 1; i < length; ++i) c = (c << 6) | (p[i] & 0x3F);
            if (in_ranges(c, ranges)) return true;
            p += length;
        }
    }
    return false;
}

void check_offsets(Span<const std::int64_t> offsets, std::int64_t num_ids) {
    check(!offsets.empty() && offsets[0] == 0, "offsets must start with 0");
    for (std::int64_t i = 0; i + 1 < offsets.size(); ++i)
        check(offsets[i] <= offsets[i + 1], "offsets descend at document ", i);
    check(offsets[offsets.size() - 1] == num_ids, "offsets end at ", offsets[offsets.size() - 1],
          "; there are ", num_ids, " token ids");
}

// Unsigned and without a branch, so that it vectorizes: a negative id exceeds every limit.
template <typename Id>
std::uint32_t largest(Span<const Id> ids) {
    std::uint32_t result = 0;
    for (const Id id : ids) result = std::max(result, static_cast<std::uint32_t>(id));
    return result;
}

// Adds the marked ids to `out`. Marked ids are special tokens, whose ids are usually close
// together. So most blocks have no id between the first and the last of them, and need no lookup
// per id.
template <typename Id>
void append_marked(Span<const Id> ids, Span<const std::uint8_t> marks,
                   std::vector<std::int64_t>& out) {
    constexpr std::int64_t kBlock = 256;
    std::uint32_t first = 0;
    auto last = static_cast<std::uint32_t>(marks.size()) - 1;
    while (first < last && marks[first] == 0) ++first;
    while (last > first && marks[last] == 0) --last;
    const std::uint32_t range = last - first;
    for (std::int64_t begin = 0; begin < ids.size(); begin += kBlock) {
        const std::int64_t end = std::min(begin + kBlock, ids.size());
        std::uint32_t inside = 0;
        for (std::int64_t i = begin; i < end; ++i)
            inside |=
                static_cast<std::uint32_t>(static_cast<std::uint32_t>(ids[i]) - first <= range);
        if (inside == 0) continue;
        for (std::int64_t i = begin; i < end; ++i) {
            const auto id = static_cast<std::int64_t>(ids[i]);
            if (marks[id] != 0) out.push_back(id);
        }
    }
}

template <typename Stored>
Stored* append(Span<const std::int64_t> ids, Stored* out) {
    for (const std::int64_t id : ids) *out++ = static_cast<Stored>(id);
    return out;
}

}  // namespace

std::vector<std::uint8_t> valid_utf8(Span<const std::uint8_t> text,
                                     Span<const std::int64_t> offsets) {
    return for_each_document<std::uint8_t>(text, offsets, [](Span<const std::uint8_t> document) {
        return static_cast<std::uint8_t>(is_utf8(document));
    });
}

std::vector<std::int64_t> count_words(Span<const std::uint8_t> text,
                                      Span<const std::int64_t> offsets) {
    return for_each_document<std::int64_t>(text, offsets, words);
}

std::vector<std::uint8_t> has_characters(Span<const std::uint8_t> text,
                                         Span<const std::int64_t> offsets,
                                         Span<const std::int64_t> ranges) {
    check(ranges.size() % 2 == 0 && std::is_sorted(ranges.begin(), ranges.end()),
          "ranges must be ascending pairs (first, last)");
    return for_each_document<std::uint8_t>(text, offsets, [&](Span<const std::uint8_t> document) {
        return static_cast<std::uint8_t>(has_any(document, ranges));
    });
}

template <typename Stored, typename Id>
FramedDocuments<Stored> frame_documents(Span<const Id> ids, Span<const std::int64_t> offsets,
                                        Span<const std::int64_t> prefix,
                                        Span<const std::int64_t> suffix, std::int64_t vocab_size,
                                        Span<const std::uint8_t> marks) {
    check(vocab_size > 0 && vocab_size - 1 <= std::numeric_limits<Stored>::max(), "vocab_size ",
          vocab_size, " does not fit the stored dtype, whose largest id is ",
          std::numeric_limits<Stored>::max());
    check(marks.empty() || marks.size() == vocab_size, "marks has ", marks.size(),
          " entries; it needs one for each of ", vocab_size, " ids");
    check_offsets(offsets, ids.size());
    std::int64_t max_token = ids.empty() ? -1 : static_cast<std::int64_t>(largest(ids));
    for (const auto frame : {prefix, suffix}) {
        for (const std::int64_t id : frame) {
            check(id >= 0, "special token id ", id, " is negative");
            max_token = std::max(max_token, id);
        }
    }
    check<DataError>(max_token < vocab_size, "token id ", max_token,
                     " (as unsigned) is outside the vocabulary of ", vocab_size,
                     "; the tokenizer and its vocabulary size do not belong together");

    const std::int64_t num_documents = offsets.size() - 1;
    const std::int64_t added = prefix.size() + suffix.size();
    FramedDocuments<Stored> result;
    if (!marks.empty()) append_marked(ids, marks, result.marked);
    result.tokens.resize(ids.size() + added * num_documents);
    result.offsets.resize(offsets.size());
    Stored* out = result.tokens.data();
    for (std::int64_t i = 0; i < num_documents; ++i) {
        out = append(prefix, out);
        for (std::int64_t k = offsets[i]; k < offsets[i + 1]; ++k)
            *out++ = static_cast<Stored>(ids[k]);
        out = append(suffix, out);
        result.offsets[i + 1] = out - result.tokens.data();
    }
    return result;
}

#define MEGAPACK_FRAME_DOCUMENTS(Stored, Id)                                \
    template FramedDocuments<Stored> frame_documents(                       \
        Span<const Id>, Span<const std::int64_t>, Span<const std::int64_t>, \
        Span<const std::int64_t>, std::int64_t, Span<const std::uint8_t>)
MEGAPACK_FRAME_DOCUMENTS(std::uint16_t, std::uint32_t);
MEGAPACK_FRAME_DOCUMENTS(std::uint16_t, std::int32_t);
MEGAPACK_FRAME_DOCUMENTS(std::int32_t, std::uint32_t);
MEGAPACK_FRAME_DOCUMENTS(std::int32_t, std::int32_t);
#undef MEGAPACK_FRAME_DOCUMENTS

}  // namespace megapack

#include "core/text/jsonl.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "core/text/utf8.hpp"

namespace megapack {
namespace {

// Sets the high bit of every byte that equals `byte` (exact for the lowest such byte).
constexpr std::uint64_t bytes_equal(std::uint64_t word, std::uint8_t byte) {
    const std::uint64_t difference = word ^ (0x0101010101010101U * byte);
    return (difference - 0x0101010101010101U) & ~difference & kHighBits;
}

// Sets the high bit of every byte that ends a plain run: quote, backslash, control, not ASCII.
constexpr std::uint64_t special_bytes(std::uint64_t word) {
    const std::uint64_t controls = (word - 0x2020202020202020U) & ~word & kHighBits;
    return bytes_equal(word, '"') | bytes_equal(word, '\\') | controls | (word & kHighBits);
}

// Returns how many of the eight bytes precede the first special one.
std::size_t plain_bytes(std::uint64_t word) {  // little-endian, like every supported machine
    const std::uint64_t special = special_bytes(word);
    return special == 0 ? 8 : static_cast<std::size_t>(__builtin_ctzll(special)) / 8;
}

// Returns 0 to 15, or -1 for another character.
int hex_digit(std::uint8_t c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

bool is_digit(std::uint8_t c) {
    return c >= '0' && c <= '9';
}

constexpr std::size_t kSlack = 8;  // plain runs are copied eight bytes at a time

// Reads JSON value by value without building a tree. Every method moves `p_` past what it read
// and returns false for invalid JSON.
class JsonReader {
  public:
    explicit JsonReader(Span<const std::uint8_t> text) : p_(text.begin()), end_(text.end()) {}

  protected:
    bool at(std::uint8_t c) const { return p_ != end_ && *p_ == c; }

    bool take(std::uint8_t c) {
        if (!at(c)) return false;
        ++p_;
        return true;
    }

    void skip_space() {
        while (p_ != end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\n' || *p_ == '\r')) ++p_;
    }

    bool colon() {
        skip_space();
        if (!take(':')) return false;
        skip_space();
        return true;
    }

    // Skips any value without recursion: one flag per open container.
    bool skip_value() {
        std::array<bool, kMaxJsonDepth> is_object{};
        std::size_t depth = 0;
        while (true) {
            if (p_ == end_) return false;
            const std::uint8_t c = *p_;
            bool opened = false;
            if (c == '{' || c == '[') {
                ++p_;
                skip_space();
                if (!take(c == '{' ? '}' : ']')) {
                    if (depth == is_object.size()) return false;
                    is_object[depth++] = c == '{';
                    opened = true;
                }
            } else if (!scalar()) {
                return false;
            }
            if (!opened && !next_value(is_object, &depth)) return false;
            if (depth == 0) return true;
            if (opened && is_object[depth - 1] && !skip_name()) return false;
        }
    }

    // Reads a string after its opening quote. With kCopy, unescapes it to `out`.
    template <bool kCopy>
    bool string(std::uint8_t* out, std::size_t* written) {
        std::uint8_t* const begin = out;
        lone_surrogate_ = false;
        while (p_ != end_) {
            if (end_ - p_ >= static_cast<std::ptrdiff_t>(kSlack)) {
                const std::uint64_t word = load_8_bytes(p_);
                if (kCopy) std::memcpy(out, &word, sizeof(word));
                const std::size_t plain = plain_bytes(word);
                p_ += plain;
                if (kCopy) out += plain;
                if (plain == kSlack) continue;
            }
            while (p_ != end_ && *p_ >= 0x20 && *p_ < 0x80 && *p_ != '"' && *p_ != '\\') {
                if (kCopy) *out++ = *p_;
                ++p_;
            }
            if (p_ == end_ || *p_ < 0x20) return false;
            if (take('"')) {
                if (kCopy) *written = static_cast<std::size_t>(out - begin);
                return true;
            }
            if (take('\\')) {
                std::uint32_t c = 0;
                if (!escape(&c)) return false;
                if (kCopy) out = write_utf8(c, out);
                continue;
            }
            const std::size_t length = utf8_character(p_, end_);
            if (length == 0) return false;
            if (kCopy) {
                std::memcpy(out, p_, length);
                out += length;
            }
            p_ += length;
        }
        return false;
    }

    const std::uint8_t* p_;
    const std::uint8_t* end_;
    bool lone_surrogate_ = false;  // in the last string

  private:
    // After a value: closes containers until one continues with a comma; depth 0 ends the value.
    bool next_value(const std::array<bool, kMaxJsonDepth>& is_object, std::size_t* depth) {
        while (*depth > 0) {
            const bool object = is_object[*depth - 1];
            skip_space();
            if (take(',')) {
                skip_space();
                return !object || skip_name();
            }
            if (!take(object ? '}' : ']')) return false;
            --*depth;
        }
        return true;
    }

    bool skip_name() { return take('"') && string<false>(nullptr, nullptr) && colon(); }

    bool scalar() {
        if (take('"')) return string<false>(nullptr, nullptr);
        for (const std::string_view word :
             {"true", "false", "null", "NaN", "Infinity", "-Infinity"}) {
            if (literal(word)) return true;
        }
        return number();
    }

    bool literal(std::string_view word) {
        const auto room = static_cast<std::size_t>(end_ - p_);
        if (room < word.size() || std::memcmp(p_, word.data(), word.size()) != 0) return false;
        p_ += word.size();
        return true;
    }

    bool number() {
        take('-');
        if (!take('0') && !digits()) return false;
        if (take('.') && !digits()) return false;
        if (take('e') || take('E')) {
            if (!take('+')) take('-');
            return digits();
        }
        return true;
    }

    bool digits() {
        const std::uint8_t* begin = p_;
        while (p_ != end_ && is_digit(*p_)) ++p_;
        return p_ != begin;
    }

    bool escape(std::uint32_t* c) {
        if (p_ == end_) return false;
        constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
        const auto name = static_cast<char>(*p_++);
        if (name == 'u') return unicode_escape(c);
        const std::size_t at = kNames.find(name);
        if (at == std::string_view::npos) return false;
        *c = static_cast<std::uint8_t>(kValues[at]);
        return true;
    }

    bool unicode_escape(std::uint32_t* c) {
        if (!four_hex_digits(c)) return false;
        if (*c < 0xD800 || *c > 0xDFFF) return true;
        const std::uint8_t* after_high = p_;
        std::uint32_t low = 0;
        if (*c < 0xDC00 && take('\\') && take('u') && four_hex_digits(&low) && low >= 0xDC00 &&
            low <= 0xDFFF) {
            *c = 0x10000 + ((*c - 0xD800) << 10) + (low - 0xDC00);
            return true;
        }
        p_ = after_high;
        lone_surrogate_ = true;
        return true;
    }

    bool four_hex_digits(std::uint32_t* value) {
        if (end_ - p_ < 4) return false;
        *value = 0;
        for (int i = 0; i < 4; ++i) {
            const int digit = hex_digit(*p_++);
            if (digit < 0) return false;
            *value = *value * 16 + static_cast<std::uint32_t>(digit);
        }
        return true;
    }
};

// Parses one line. An unescaped string is never longer than its source: `out` needs the size of the
// line + kSlack.
class LineParser : JsonReader {
  public:
    LineParser(Span<const std::uint8_t> line, std::string_view key, JsonValues values)
        : JsonReader(line), key_(key), values_(values) {}

    // Writes the text to `out` and its size to *written (0 unless the status is ok).
    LineStatus parse(std::uint8_t* out, std::size_t* written) {
        skip_space();
        if (p_ == end_) return LineStatus::blank;
        LineStatus status = LineStatus::not_object;
        bool is_json = *p_ == '{' ? object(key_, out, written, &status) : skip_value();
        skip_space();
        is_json = is_json && p_ == end_;
        if (!is_json) status = LineStatus::malformed;
        if (status != LineStatus::ok) *written = 0;
        return status;
    }

  private:
    // Looks for the member named by the whole key. Without one, splits the key at its first
    // dot and looks for the second part inside the member named by the first.
    bool object(std::string_view key, std::uint8_t* out, std::size_t* written, LineStatus* status) {
        *status = LineStatus::missing_key;
        ++p_;
        skip_space();
        if (take('}')) return true;
        const std::size_t dot = key.find('.');
        bool whole = false;
        while (true) {
            std::string_view name;
            if (!member_name(&name) || !colon()) return false;
            bool is_json = false;
            if (name == key) {
                whole = true;
                is_json = wanted_value(out, written, status);
            } else if (whole || dot == std::string_view::npos || name != key.substr(0, dot)) {
                is_json = skip_value();
            } else if (at('{')) {
                is_json = object(key.substr(dot + 1), out, written, status);
            } else {
                *status = LineStatus::missing_key;  // the last of several equal names counts
                is_json = skip_value();
            }
            if (!is_json) return false;
            skip_space();
            if (take('}')) return true;
            if (!take(',')) return false;
            skip_space();
        }
    }

    // *name is valid until the next call. Half a surrogate pair never equals a key.
    bool member_name(std::string_view* name) {
        if (!take('"')) return false;
        const std::uint8_t* begin = p_;
        if (!string<false>(nullptr, nullptr)) return false;
        *name = std::string_view(reinterpret_cast<const char*>(begin),
                                 static_cast<std::size_t>(p_ - begin - 1));
        if (name->find('\\') == std::string_view::npos) return true;
        unescaped_name_.resize(name->size() + kSlack);
        std::size_t size = 0;
        p_ = begin;
        string<true>(unescaped_name_.data(), &size);
        *name = std::string_view(reinterpret_cast<const char*>(unescaped_name_.data()), size);
        return true;
    }

    bool wanted_value(std::uint8_t* out, std::size_t* written, LineStatus* status) {
        if (at('"') && (values_ == JsonValues::strings || values_ == JsonValues::scalars)) {
            ++p_;
            if (!string<true>(out, written)) return false;
            *status = lone_surrogate_ ? LineStatus::invalid_utf8 : LineStatus::ok;
            return true;
        }
        const bool scalar = !at('{') && !at('[') && !at('n');
        const bool accepted =
            values_ == JsonValues::any ||
            (values_ == JsonValues::lists ? at('[') : values_ == JsonValues::scalars && scalar);
        const std::uint8_t* begin = p_;
        if (!skip_value()) return false;
        *status = accepted ? LineStatus::ok : LineStatus::wrong_type;
        *written = static_cast<std::size_t>(p_ - begin);
        if (accepted) std::memcpy(out, begin, *written);
        return true;
    }

    std::string_view key_;
    JsonValues values_;
    std::vector<std::uint8_t> unescaped_name_;
};

}  // namespace

JsonlTexts extract_jsonl(Span<const std::uint8_t> buffer, std::string_view key, JsonValues values) {
    JsonlTexts result;
    result.text.resize(buffer.size() + kSlack);
    result.offsets.push_back(0);
    std::size_t written = 0;
    const std::uint8_t* p = buffer.begin();
    while (p != buffer.end()) {
        const auto room = static_cast<std::size_t>(buffer.end() - p);
        const auto* newline = static_cast<const std::uint8_t*>(std::memchr(p, '\n', room));
        const std::uint8_t* end = newline == nullptr ? buffer.end() : newline;
        const Span<const std::uint8_t> line(p, end - p);
        std::size_t size = 0;
        LineStatus status =
            LineParser(line, key, values).parse(result.text.data() + written, &size);
        if (status == LineStatus::malformed && !is_utf8(line)) status = LineStatus::invalid_utf8;
        written += size;
        result.offsets.push_back(static_cast<std::int64_t>(written));
        result.status.push_back(static_cast<std::uint8_t>(status));
        result.line_begin.push_back(p - buffer.begin());
        p = newline == nullptr ? end : newline + 1;
    }
    result.text.resize(written);
    return result;
}

}  // namespace megapack

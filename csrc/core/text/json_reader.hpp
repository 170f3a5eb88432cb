// JSON read from memory, value by value, without a tree of it.
#pragma once

#include <array>
#include <cstring>
#include <string_view>

#include "core/base/span.hpp"
#include "core/text/json_text.hpp"
#include "core/text/jsonl.hpp"
#include "core/text/utf8.hpp"

namespace megapack {

constexpr std::size_t kSlack = 8;  // plain runs are copied eight bytes at a time

// Every reader leaves `p_` behind what it read and returns false where the text is no JSON.
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

    // Any value, without recursion: a bit per open container.
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

    // The rest of a string whose opening quote is taken. With kCopy it is unescaped to `out`.
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
    bool lone_surrogate_ = false;  // in the string read last

  private:
    // Behind a value: closes containers until one goes on with a comma; depth 0 ends the value.
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
        switch (*p_++) {
            case '"':
            case '\\':
            case '/':
                *c = p_[-1];
                return true;
            case 'b':
                *c = '\b';
                return true;
            case 'f':
                *c = '\f';
                return true;
            case 'n':
                *c = '\n';
                return true;
            case 'r':
                *c = '\r';
                return true;
            case 't':
                *c = '\t';
                return true;
            case 'u':
                return unicode_escape(c);
            default:
                return false;
        }
    }

    bool unicode_escape(std::uint32_t* c) {
        if (!four_hex_digits(c)) return false;
        if (*c < 0xD800 || *c > 0xDFFF) return true;
        const std::uint8_t* behind_first = p_;
        std::uint32_t low = 0;
        if (*c < 0xDC00 && take('\\') && take('u') && four_hex_digits(&low) && low >= 0xDC00 &&
            low <= 0xDFFF) {
            *c = 0x10000 + ((*c - 0xD800) << 10) + (low - 0xDC00);
            return true;
        }
        p_ = behind_first;
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

}  // namespace megapack

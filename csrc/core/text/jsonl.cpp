#include "core/text/jsonl.hpp"

#include <cstring>
#include <string>

#include "core/text/json_reader.hpp"

namespace megapack {
namespace {

// One line. Unescaped strings are never longer than their source: `out` needs the line's size +
// kSlack.
class LineParser : JsonReader {
  public:
    LineParser(Span<const std::uint8_t> line, std::string_view key, JsonValues values)
        : JsonReader(line), key_(key), values_(values) {}

    // Leaves the text at `out` and its length in *written (0 unless the status is ok).
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
    // The member called by the whole key is the one; without it, what the rest of the key finds in
    // the member called by its part before the first dot.
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
                *status = LineStatus::missing_key;  // the last of members of one name counts
                is_json = skip_value();
            }
            if (!is_json) return false;
            skip_space();
            if (take('}')) return true;
            if (!take(',')) return false;
            skip_space();
        }
    }

    // Valid until the next name. A name with half a surrogate pair is nobody's.
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
        const bool container = at('{') || at('[');
        const bool taken =
            values_ == JsonValues::any ||
            (values_ == JsonValues::lists ? at('[') : values_ == JsonValues::scalars && !container);
        const std::uint8_t* begin = p_;
        if (!skip_value()) return false;
        *status = taken ? LineStatus::ok : LineStatus::wrong_type;
        *written = static_cast<std::size_t>(p_ - begin);
        if (taken) std::memcpy(out, begin, *written);
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

// extract_jsonl: what it takes, what it refuses, and that no byte outside of the line is touched.
#include "core/text/jsonl.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using megapack::extract_jsonl;
using megapack::JsonlTexts;
using megapack::JsonValues;
using megapack::LineStatus;
using megapack::Span;

void require(bool ok, const char* what, const std::string& line) {
    if (ok) return;
    std::fprintf(stderr, "%s: %s\n", what, line.c_str());
    std::exit(1);
}

// The buffer is exactly as long as the text, on the heap, so that the sanitizer sees every excess.
JsonlTexts extract(const std::string& text, JsonValues values = JsonValues::strings,
                   const char* key = "text") {
    const std::vector<std::uint8_t> buffer(text.begin(), text.end());
    return extract_jsonl(buffer, key, values);
}

void expect(const std::string& line, LineStatus status, const std::string& text = "",
            JsonValues values = JsonValues::strings, const char* key = "text") {
    const JsonlTexts result = extract(line, values, key);
    require(result.status.size() == 1, "lines", line);
    require(result.status[0] == static_cast<std::uint8_t>(status), "status", line);
    require(std::string(result.text.begin(), result.text.end()) == text, "text", line);
    require(result.offsets.back() == static_cast<std::int64_t>(text.size()), "offsets", line);
}

void takes_what_json_allows() {
    expect(R"({"text": "plain"})", LineStatus::ok, "plain");
    expect(R"( { "a" : [1, {"text": "inner"}] , "text" : "outer" } )", LineStatus::ok, "outer");
    expect(R"({"text": "first", "text": "last"})", LineStatus::ok, "last");
    expect(R"({"text": "\"\\\/\b\f\n\r\t"})", LineStatus::ok, "\"\\/\b\f\n\r\t");
    expect(R"({"text": "\u0041\u00e9\u20AC\ud83d\ude00"})", LineStatus::ok,
           "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    expect(R"({"\u0074ext": "escaped key"})", LineStatus::ok, "escaped key");
    expect(R"({"n": [-0.5e+10, 0, NaN, -Infinity, true, null], "text": ""})", LineStatus::ok);
    expect("{\"text\": \"" + std::string(1000, 'x') + "\"}", LineStatus::ok,
           std::string(1000, 'x'));
}

void names_what_is_wrong() {
    expect(" \t\r", LineStatus::blank);
    expect(R"(["text"])", LineStatus::not_object);
    expect("17", LineStatus::not_object);
    expect(R"({"texts": "x"})", LineStatus::missing_key);
    expect(R"({"text": 5})", LineStatus::wrong_type);
    expect(R"({"text": "a", "text": null})", LineStatus::wrong_type);
    expect(R"({"text": "half \ud800"})", LineStatus::invalid_utf8);
    expect("{\"text\": \"\xC3\"}", LineStatus::invalid_utf8);
    expect("{\"text\": \"\xED\xA0\x80\"}", LineStatus::invalid_utf8);
    const std::string whole = R"({"a": [-1.5e+9, null], "text": "\u00e9\n"})";
    for (std::size_t size = 1; size < whole.size(); ++size) {
        expect(whole.substr(0, size), LineStatus::malformed);
    }
    for (const char* line :
         {"{\"text\": \"\\x\"}", "{\"text\": \"x\",}", "{\"text\": \"x\"} x",
          "{\"text\": \"a\tb\"}", "{text: 1}", "{\"text\": 01}", "{\"text\": 1.}", "{\"text\": -}",
          "[1,]", "[1 2]", "[}", "{\"a\" 1}", "{\"a\": [}"}) {
        expect(line, LineStatus::malformed);
    }
}

void keeps_lines_apart() {
    const JsonlTexts result = extract("{\"text\": \"a\"}\nbad\n\n{\"text\": \"bc\"}");
    require(result.status.size() == 4 && result.status[0] == 0 && result.status[3] == 0, "status",
            "four lines");
    require(result.offsets == std::vector<std::int64_t>({0, 1, 1, 1, 3}), "offsets", "four lines");
    require(result.line_begin == std::vector<std::int64_t>({0, 14, 18, 19}), "line_begin",
            "four lines");
    require(extract("").status.empty(), "no lines", "");
}

void takes_other_values_when_asked() {
    expect(R"({"text": 12})", LineStatus::ok, "12", JsonValues::scalars);
    expect(R"({"text": [1]})", LineStatus::wrong_type, "", JsonValues::scalars);
    expect(R"({"text": [ {"a": "\n"} ]})", LineStatus::ok, R"([ {"a": "\n"} ])", JsonValues::lists);
    expect(R"({"text": "x"})", LineStatus::wrong_type, "", JsonValues::lists);
    expect(R"({"text": "\u00e9"})", LineStatus::ok, R"("\u00e9")", JsonValues::any);
    expect(R"({"text": {"a": [1]} })", LineStatus::ok, R"({"a": [1]})", JsonValues::any);
}

void follows_dots_into_objects() {
    const auto at = [](const char* line, LineStatus status, const char* text = "") {
        expect(line, status, text, JsonValues::strings, "a.b.c");
    };
    at(R"({"a.b.c": "whole", "a": {"b": {"c": "deep, longer"}}})", LineStatus::ok, "whole");
    at(R"({"a": {"b": {"c": "deep, longer"}, "b.c": "rest"}})", LineStatus::ok, "rest");
    at(R"({"\u0061": {"\u0062": {"\u0063": "escaped"}}})", LineStatus::ok, "escaped");
    at(R"({"a": {"b": {"c": "first"}}, "a": 5})", LineStatus::missing_key);
    at(R"({"a": {"b": {"c": "x"} "d": 1}})", LineStatus::malformed);
}

void does_not_recurse() {
    const auto depth = static_cast<std::size_t>(megapack::kMaxJsonDepth);
    const auto nested = [](std::size_t n) {
        return "{\"a\": " + std::string(n, '[') + "1" + std::string(n, ']') + ", \"text\": \"x\"}";
    };
    expect(nested(depth), LineStatus::ok, "x");
    expect(nested(depth + 1), LineStatus::malformed);
    expect("{\"a\": " + std::string(1000000, '['), LineStatus::malformed);
}

}  // namespace

int main() {
    takes_what_json_allows();
    names_what_is_wrong();
    keeps_lines_apart();
    takes_other_values_when_asked();
    follows_dots_into_objects();
    does_not_recurse();
    return 0;
}

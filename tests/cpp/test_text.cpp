// Text: what extract_jsonl takes and refuses, and that no byte outside of the line is touched; then
// UTF-8, words, characters and framing over many documents in one buffer.
#include "core/text/documents.hpp"
#include "core/text/jsonl.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

// --- lines of JSON ---

// The buffer is exactly as long as the text, on the heap, so that the sanitizer sees every excess.
JsonlTexts extract(const std::string& text, JsonValues values = JsonValues::strings,
                   const char* key = "text") {
    const std::vector<std::uint8_t> buffer(text.begin(), text.end());
    return extract_jsonl(buffer, key, values);
}

void expect(const std::string& line, LineStatus status, const std::string& text = "",
            JsonValues values = JsonValues::strings, const char* key = "text") {
    const JsonlTexts result = extract(line, values, key);
    require(result.status.size() == 1, "lines: " + line);
    require(result.status[0] == static_cast<std::uint8_t>(status), "status: " + line);
    require(std::string(result.text.begin(), result.text.end()) == text, "text: " + line);
    require(result.offsets.back() == static_cast<std::int64_t>(text.size()), "offsets: " + line);
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
    require(result.status.size() == 4 && result.status[0] == 0 && result.status[3] == 0, "status");
    require(result.offsets == std::vector<std::int64_t>({0, 1, 1, 1, 3}), "offsets");
    require(result.line_begin == std::vector<std::int64_t>({0, 14, 18, 19}), "line_begin");
    require(extract("").status.empty(), "no lines");
}

void takes_other_values_when_asked() {
    expect(R"({"text": 12})", LineStatus::ok, "12", JsonValues::scalars);
    expect(R"({"text": [1]})", LineStatus::wrong_type, "", JsonValues::scalars);
    expect(R"({"text": null})", LineStatus::wrong_type, "", JsonValues::scalars);
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
    const auto depth = static_cast<std::size_t>(kMaxJsonDepth);
    const auto nested = [](std::size_t n) {
        return "{\"a\": " + std::string(n, '[') + "1" + std::string(n, ']') + ", \"text\": \"x\"}";
    };
    expect(nested(depth), LineStatus::ok, "x");
    expect(nested(depth + 1), LineStatus::malformed);
    expect("{\"a\": " + std::string(1000000, '['), LineStatus::malformed);
}

// --- documents ---

struct Documents {
    std::vector<std::uint8_t> text;
    std::vector<std::int64_t> offsets{0};

    explicit Documents(const std::vector<std::string>& texts) {
        for (const std::string& item : texts) {
            text.insert(text.end(), item.begin(), item.end());
            offsets.push_back(static_cast<std::int64_t>(text.size()));
        }
    }
};

void judges_utf8() {
    const Documents documents({"", "plain ascii text", "\xC3\xA9", "\xC3", "\x80", "\xC0\x80",
                               "\xED\xA0\x80", "\xF4\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                               "12345678\xFF", "\xE2\x82", "\xF0\x9F\x98\x80 ok"});
    const std::vector<std::uint8_t> expected{1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1};
    require(valid_utf8(documents.text, documents.offsets) == expected, "valid_utf8");
}

void counts_words() {
    const Documents documents({"", " \n", "one", " two words\t",
                               "a\xC2\xA0"
                               "b\xE3\x80\x80"
                               "c",
                               "x\x1Cy", "\xE2\x80\x8Bone"});
    const std::vector<std::int64_t> expected{0, 0, 1, 2, 3, 2, 1};
    require(count_words(documents.text, documents.offsets) == expected, "count_words");
}

void finds_characters() {
    const std::vector<std::int64_t> ranges{0x88F, 0x88F, 0x11DE0, 0x11DE9};
    const Documents documents({"abc", "\xE0\xA2\x8F", "\xE0\xA2\x90", "xx\xF0\x91\xB7\xA0",
                               "\xF0\x91\xB7\xA9", "\xF0\x91\xB7\xAA", ""});
    const std::vector<std::uint8_t> expected{0, 1, 0, 1, 1, 0, 0};
    require(has_characters(documents.text, documents.offsets, ranges) == expected,
            "has_characters");
}

void frames_documents() {
    const std::vector<std::uint32_t> ids{5, 6, 7};
    const std::vector<std::int64_t> offsets{0, 2, 2, 3};
    const std::vector<std::int64_t> prefix{1};
    const std::vector<std::int64_t> suffix{2, 3};
    const auto framed =
        frame_documents<std::uint16_t, std::uint32_t>(ids, offsets, prefix, suffix, 10);
    require(framed.tokens == std::vector<std::uint16_t>({1, 5, 6, 2, 3, 1, 2, 3, 1, 7, 2, 3}),
            "framed tokens");
    require(framed.offsets == std::vector<std::int64_t>({0, 5, 8, 12}), "framed offsets");
    require(framed.max_token == 7, "max_token");
}

template <typename Id>
bool refuses_to_frame(const std::vector<Id>& ids, const std::vector<std::int64_t>& offsets,
                      std::int64_t vocab_size) {
    const std::vector<std::int64_t> none;
    return refuses<std::exception>(
        [&] { frame_documents<std::uint16_t, Id>(ids, offsets, none, none, vocab_size); });
}

void refuses_ids_and_offsets() {
    require(refuses_to_frame<std::uint32_t>({9, 10}, {0, 2}, 10), "id equal to vocab_size");
    require(refuses_to_frame<std::int32_t>({-1}, {0, 1}, 10), "negative id");
    require(refuses_to_frame<std::uint32_t>({70000}, {0, 1}, 70001), "vocabulary beyond uint16");
    require(refuses_to_frame<std::uint32_t>({1, 2}, {0, 1}, 10), "offsets that end early");
    require(refuses_to_frame<std::uint32_t>({1, 2}, {0, 3, 2}, 10), "offsets that descend");
    require(refuses_to_frame<std::uint32_t>({1, 2}, {}, 10), "no offsets");
    require(!refuses_to_frame<std::uint32_t>({}, {0}, 10), "no documents are fine");
    const std::vector<std::uint8_t> text{1, 2};
    const std::vector<std::int64_t> beyond{0, 3};
    require(refuses([&] { valid_utf8(text, beyond); }), "offsets beyond the text");
}

}  // namespace

int main() {
    takes_what_json_allows();
    names_what_is_wrong();
    keeps_lines_apart();
    takes_other_values_when_asked();
    follows_dots_into_objects();
    does_not_recurse();
    judges_utf8();
    counts_words();
    finds_characters();
    frames_documents();
    refuses_ids_and_offsets();
    std::puts("ok");
    return 0;
}

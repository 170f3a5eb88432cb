// Text: values and depth in extract_jsonl (tests/fuzz reads random bytes); UTF-8, words, characters
// and framing of documents in one buffer.
#include "core/text/documents.hpp"
#include "core/text/jsonl.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

// ---- JSON lines

// The buffer has no spare capacity, so that the sanitizer finds every read after its end.
void expect(const std::string& line, LineStatus status, const std::string& text = "",
            JsonValues values = JsonValues::strings) {
    const std::vector<std::uint8_t> buffer(line.begin(), line.end());
    const JsonlTexts result = extract_jsonl(buffer, "text", values);
    require(result.status.size() == 1, "lines: " + line);
    require(result.status[0] == static_cast<std::uint8_t>(status), "status: " + line);
    require(std::string(result.text.begin(), result.text.end()) == text, "text: " + line);
    require(result.offsets.back() == static_cast<std::int64_t>(text.size()), "offsets: " + line);
}

void test_other_values() {
    expect(R"({"text": 12})", LineStatus::ok, "12", JsonValues::scalars);
    expect(R"({"text": [1]})", LineStatus::wrong_type, "", JsonValues::scalars);
    expect(R"({"text": null})", LineStatus::wrong_type, "", JsonValues::scalars);
    expect(R"({"text": [ {"a": "\n"} ]})", LineStatus::ok, R"([ {"a": "\n"} ])", JsonValues::lists);
    expect(R"({"text": "x"})", LineStatus::wrong_type, "", JsonValues::lists);
    expect(R"({"text": "\u00e9"})", LineStatus::ok, R"("\u00e9")", JsonValues::any);
    expect(R"({"text": {"a": [1]} })", LineStatus::ok, R"({"a": [1]})", JsonValues::any);
}

void test_depth() {
    const auto depth = static_cast<std::size_t>(kMaxJsonDepth);
    const auto nested = [](std::size_t n) {
        return "{\"a\": " + std::string(n, '[') + "1" + std::string(n, ']') + ", \"text\": \"x\"}";
    };
    expect(nested(depth), LineStatus::ok, "x");
    expect(nested(depth + 1), LineStatus::malformed);
    expect("{\"a\": " + std::string(1000000, '['), LineStatus::malformed);
}

// ---- Documents

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

void test_utf8() {
    const Documents documents({"", "plain ascii text", "\xC3\xA9", "\xC3", "\x80", "\xC0\x80",
                               "\xED\xA0\x80", "\xF4\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                               "12345678\xFF", "\xE2\x82", "\xF0\x9F\x98\x80 ok"});
    const std::vector<std::uint8_t> expected{1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1};
    require(valid_utf8(documents.text, documents.offsets) == expected, "valid_utf8");
}

void test_words() {
    const Documents documents({"", " \n", "one", " two words\t",
                               "a\xC2\xA0"
                               "b\xE3\x80\x80"
                               "c",
                               "x\x1Cy", "\xE2\x80\x8Bone"});
    const std::vector<std::int64_t> expected{0, 0, 1, 2, 3, 2, 1};
    require(count_words(documents.text, documents.offsets) == expected, "count_words");
}

void test_characters() {
    const std::vector<std::int64_t> ranges{0x88F, 0x88F, 0x11DE0, 0x11DE9};
    const Documents documents({"abc", "\xE0\xA2\x8F", "\xE0\xA2\x90", "xx\xF0\x91\xB7\xA0",
                               "\xF0\x91\xB7\xA9", "\xF0\x91\xB7\xAA", ""});
    const std::vector<std::uint8_t> expected{0, 1, 0, 1, 1, 0, 0};
    require(has_characters(documents.text, documents.offsets, ranges) == expected,
            "has_characters");
    // The search takes steps of 32 and of 8 bytes: put the character at every place of a step.
    for (std::size_t at = 0; at <= 80; ++at) {
        const std::string text = std::string(at, 'x') + "\xE0\xA2\x8F" + std::string(80 - at, 'x');
        const Documents one({text});
        require(has_characters(one.text, one.offsets, ranges) == std::vector<std::uint8_t>{1},
                "has_characters at every place");
    }
}

void test_framing() {
    const std::vector<std::uint32_t> ids{5, 6, 7};
    const std::vector<std::int64_t> offsets{0, 2, 2, 3};
    const std::vector<std::int64_t> prefix{1};
    const std::vector<std::int64_t> suffix{2, 3};
    const auto framed =
        frame_documents<std::uint16_t, std::uint32_t>(ids, offsets, prefix, suffix, 10);
    require(framed.tokens == std::vector<std::uint16_t>({1, 5, 6, 2, 3, 1, 2, 3, 1, 7, 2, 3}),
            "framed tokens");
    require(framed.offsets == std::vector<std::int64_t>({0, 5, 8, 12}), "framed offsets");
    require(framed.marked.empty(), "no marked ids without marks");
}

void test_marked_ids() {
    // More than one block of ids, with marked ids on both sides of its end; 1 is a prefix only.
    std::vector<std::uint32_t> ids(600, 4);
    ids[0] = ids[255] = 2;
    ids[256] = ids[599] = 9;
    const std::vector<std::int64_t> offsets{0, 100, 600};
    const std::vector<std::int64_t> prefix{1};
    const std::vector<std::int64_t> none;
    std::vector<std::uint8_t> marks(10, 0);
    marks[1] = marks[2] = marks[9] = 1;
    const auto frame = [&] {
        return frame_documents<std::int32_t, std::uint32_t>(ids, offsets, prefix, none, 10, marks);
    };
    require(frame().marked == std::vector<std::int64_t>({2, 2, 9, 9}), "marked ids");
    marks.pop_back();
    require(refuses<std::exception>(frame), "one mark per id of the vocabulary");
}

template <typename Id>
bool refuses_to_frame(const std::vector<Id>& ids, const std::vector<std::int64_t>& offsets,
                      std::int64_t vocab_size) {
    const std::vector<std::int64_t> none;
    return refuses<std::exception>(
        [&] { frame_documents<std::uint16_t, Id>(ids, offsets, none, none, vocab_size); });
}

void test_refused_ids_and_offsets() {
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
    return pass({test_other_values, test_depth, test_utf8, test_words, test_characters,
                 test_framing, test_marked_ids, test_refused_ids_and_offsets});
}

// UTF-8, words, characters and framing over many documents in one buffer.
#include "core/text/documents.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/base/check.hpp"

namespace {

using megapack::Span;

void require(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

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
    require(megapack::valid_utf8(documents.text, documents.offsets) == expected, "valid_utf8");
}

void counts_words() {
    const Documents documents({"", " \n", "one", " two words\t",
                               "a\xC2\xA0"
                               "b\xE3\x80\x80"
                               "c",
                               "x\x1Cy", "\xE2\x80\x8Bone"});
    const std::vector<std::int64_t> expected{0, 0, 1, 2, 3, 2, 1};
    require(megapack::count_words(documents.text, documents.offsets) == expected, "count_words");
}

void finds_characters() {
    const std::vector<std::int64_t> ranges{0x88F, 0x88F, 0x11DE0, 0x11DE9};
    const Documents documents({"abc", "\xE0\xA2\x8F", "\xE0\xA2\x90", "xx\xF0\x91\xB7\xA0",
                               "\xF0\x91\xB7\xA9", "\xF0\x91\xB7\xAA", ""});
    const std::vector<std::uint8_t> expected{0, 1, 0, 1, 1, 0, 0};
    require(megapack::has_characters(documents.text, documents.offsets, ranges) == expected,
            "has_characters");
}

void frames_documents() {
    const std::vector<std::uint32_t> ids{5, 6, 7};
    const std::vector<std::int64_t> offsets{0, 2, 2, 3};
    const std::vector<std::int64_t> prefix{1};
    const std::vector<std::int64_t> suffix{2, 3};
    const auto framed =
        megapack::frame_documents<std::uint16_t, std::uint32_t>(ids, offsets, prefix, suffix, 10);
    require(framed.tokens == std::vector<std::uint16_t>({1, 5, 6, 2, 3, 1, 2, 3, 1, 7, 2, 3}),
            "framed tokens");
    require(framed.offsets == std::vector<std::int64_t>({0, 5, 8, 12}), "framed offsets");
    require(framed.max_token == 7, "max_token");
}

template <typename Id>
bool refuses(const std::vector<Id>& ids, const std::vector<std::int64_t>& offsets,
             std::int64_t vocab_size) {
    const std::vector<std::int64_t> none;
    try {
        megapack::frame_documents<std::uint16_t, Id>(ids, offsets, none, none, vocab_size);
    } catch (const std::exception&) {
        return true;
    }
    return false;
}

void refuses_ids_and_offsets() {
    require(refuses<std::uint32_t>({9, 10}, {0, 2}, 10), "id equal to vocab_size");
    require(refuses<std::int32_t>({-1}, {0, 1}, 10), "negative id");
    require(refuses<std::uint32_t>({70000}, {0, 1}, 70001), "vocabulary beyond uint16");
    require(refuses<std::uint32_t>({1, 2}, {0, 1}, 10), "offsets that end early");
    require(refuses<std::uint32_t>({1, 2}, {0, 3, 2}, 10), "offsets that descend");
    require(refuses<std::uint32_t>({1, 2}, {}, 10), "no offsets");
    require(!refuses<std::uint32_t>({}, {0}, 10), "no documents are fine");
    const std::vector<std::uint8_t> text{1, 2};
    try {
        megapack::valid_utf8(text, std::vector<std::int64_t>{0, 3});
        require(false, "offsets beyond the text");
    } catch (const std::invalid_argument&) {
    }
}

}  // namespace

int main() {
    judges_utf8();
    counts_words();
    finds_characters();
    frames_documents();
    refuses_ids_and_offsets();
    return 0;
}

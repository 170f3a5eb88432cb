// Arithmetic of the .idx reader and writer, including overflow. tests/fuzz reads random bytes.
#include "core/storage/mmididx.hpp"

#include <limits>
#include <vector>

#include "core/storage/tokens.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

void test_one_sequence_per_document() {
    std::vector<std::int32_t> lengths(10000, 2);
    std::vector<std::int64_t> pointers(10000), documents(10001);
    for (std::size_t i = 0; i < 10000; ++i) pointers[i] = static_cast<std::int64_t>(4 * i);
    for (std::size_t i = 0; i <= 10000; ++i) documents[i] = static_cast<std::int64_t>(i);
    const auto bytes = make_index(lengths, pointers, documents);
    require(is_one_sequence_per_document(IndexView(bytes, "a")), "one each");
    documents[9999] = 9998;
    const auto other = make_index(lengths, pointers, documents);
    require(!is_one_sequence_per_document(IndexView(other, "a")), "not one each");
    std::vector<std::int32_t> out(10000);
    require(document_lengths(IndexView(other, "a"), out) && out[9998] == 0 && out[9999] == 4,
            "an empty document and one of two sequences");
}

void test_long_documents() {
    constexpr std::int32_t big = std::numeric_limits<std::int32_t>::max();
    const auto bytes = make_index({big, big}, {0, big}, {0, 2});
    const IndexView index(bytes, "a");
    std::vector<std::int32_t> narrow(1);
    require(!document_lengths(index, narrow), "a sum above 32 bits");
    std::vector<std::int64_t> wide(1);
    document_lengths(index, wide);
    require(wide[0] == 2 * std::int64_t{big}, "the same sum in 64 bits");
}

void test_scan_and_shift() {
    const std::vector<std::int32_t> lengths{3, 0, 2};
    std::vector<std::int64_t> out(3);
    require(scan_lengths(lengths, 4, 100, out) == 120, "the byte after the block");
    require(out == std::vector<std::int64_t>{100, 112, 112}, "pointers");
    const std::vector<std::int64_t> ends{1, 1, 3};
    require(shift_document_ends(ends, 3, 0, 1000, out) == 3, "the last end");
    require(out == std::vector<std::int64_t>{1001, 1001, 1003}, "shifted");
    require(refuses<FormatError>([&] { shift_document_ends(ends, 2, 0, 0, out); }), "beyond");
    require(refuses<FormatError>([&] { shift_document_ends(ends, 3, 2, 0, out); }), "backwards");
    const std::vector<std::int32_t> negative{1, -5, 2};
    require(refuses<FormatError>([&] { scan_lengths(negative, 2, 0, out); }), "negative");
}

void test_ranges_and_narrowing() {
    const std::vector<std::int64_t> tokens{5, -3, 70000};
    const auto range = token_range(Span<const std::int64_t>(tokens));
    require(range.first == -3 && range.second == 70000, "range");
    const auto none = token_range(Span<const std::int64_t>());
    require(none.first > none.second, "no tokens have no range");
    const std::vector<std::int32_t> ids{0, 65535, 7};
    std::vector<std::uint16_t> out(3);
    narrow_tokens(Span<const std::int32_t>(ids), Span<std::uint16_t>(out));
    require(out == std::vector<std::uint16_t>{0, 65535, 7}, "narrowed");
}

}  // namespace

int main() {
    return pass({test_one_sequence_per_document, test_long_documents, test_scan_and_shift,
                 test_ranges_and_narrowing});
}

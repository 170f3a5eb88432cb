// Checksums of blocks: published values, damaged and intact blocks, several threads.
#include "core/base/blocks.hpp"

#include <cstring>
#include <thread>
#include <vector>

#include "require.hpp"

using namespace megapack;

namespace {

std::vector<std::uint8_t> numbers(std::int64_t size) {
    std::vector<std::uint8_t> bytes(size);
    for (std::int64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    return bytes;
}

bool is_damaged(const BlockChecks& checks, std::int64_t begin, std::int64_t end) {
    const auto message = message_of<FormatError>([&] { checks.require(begin, end); });
    require(
        message == "nothing was thrown" || message.find("x is damaged: bytes 65536 to 131072") == 0,
        "message");
    return message != "nothing was thrown";
}

void test_published_values() {
    const auto hash = [](const char* text) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(text);
        return xxh64({bytes, static_cast<std::int64_t>(std::strlen(text))});
    };
    require(hash("") == 0xEF46DB3751D8E999, "xxh64 of no bytes");
    require(hash("a") == 0xD24EC4F1A98C6E5B, "xxh64 of a");
    require(hash("abc") == 0x44BC2CF5AD770999, "xxh64 of abc");
    const auto bytes = numbers(2 * kBlockBytes + 5);
    const auto sums = block_checksums(bytes);
    require(sums.size() == 3 && sums[2] == xxh64({bytes.data() + 2 * kBlockBytes, 5}),
            "last block");
    require(block_checksums(Span<const std::uint8_t>()).empty(), "no block of no bytes");
}

void test_damaged_block() {
    auto bytes = numbers(3 * kBlockBytes - 1);
    const auto expected = block_checksums(bytes);
    bytes[kBlockBytes + 99] ^= 1;
    const BlockChecks checks(bytes, expected, "x", "restore it");
    require(!is_damaged(checks, 0, kBlockBytes), "the block before");
    require(!is_damaged(checks, 2 * kBlockBytes, 3 * kBlockBytes - 1), "the block after");
    require(!is_damaged(checks, kBlockBytes + 5, kBlockBytes + 5), "an empty range in it");
    require(is_damaged(checks, kBlockBytes - 1, kBlockBytes + 1), "its first byte");
    require(is_damaged(checks, 2 * kBlockBytes - 1, 2 * kBlockBytes), "its last byte");
    require(is_damaged(checks, 0, 3 * kBlockBytes - 1), "all of it");
    bytes[kBlockBytes + 99] ^= 1;
    require(!is_damaged(checks, 0, 3 * kBlockBytes - 1), "a failed block is checked again");
    require(refuses<FormatError>([&] { BlockChecks(bytes, {1, 2}, "x", "restore it"); }),
            "another number of checksums");
}

void test_threads() {
    auto bytes = numbers(40 * kBlockBytes);
    const auto expected = block_checksums(bytes);
    bytes[kBlockBytes] ^= 1;
    const BlockChecks checks(bytes, expected, "x", "restore it");
    std::vector<std::thread> threads;
    std::vector<int> refused(4, 0);
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (std::int64_t b = 0; b < 40; ++b) {
                const std::int64_t begin = (b * 7 + t) % 40 * kBlockBytes;
                try {
                    checks.require(begin, begin + kBlockBytes);
                } catch (const FormatError&) {
                    ++refused[t];
                }
            }
        });
    }
    for (auto& thread : threads) thread.join();
    for (const int times : refused) require(times == 1, "every thread sees the damaged block once");
}

}  // namespace

int main() {
    return pass({test_published_values, test_damaged_block, test_threads});
}

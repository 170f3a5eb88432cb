// Checksums of blocks: their definition, what is refused and what is not, and many readers at once.
#include "core/base/blocks.hpp"

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/base/check.hpp"

using namespace megapack;

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
    if (ok) return;
    std::printf("FAILED: %s\n", what);
    ++failures;
}

std::vector<std::uint8_t> numbers(std::int64_t size) {
    std::vector<std::uint8_t> bytes(size);
    for (std::int64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    return bytes;
}

bool refuses(const BlockChecks& checks, std::int64_t begin, std::int64_t end) {
    try {
        checks.require(begin, end);
    } catch (const FormatError& error) {
        expect(std::string(error.what()).find("x is damaged: bytes 65536 to 131072") == 0, "words");
        return true;
    }
    return false;
}

void has_the_published_values() {
    const auto hash = [](const char* text) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(text);
        return xxh64({bytes, static_cast<std::int64_t>(std::strlen(text))});
    };
    expect(hash("") == 0xEF46DB3751D8E999, "xxh64 of nothing");
    expect(hash("a") == 0xD24EC4F1A98C6E5B, "xxh64 of a");
    expect(hash("abc") == 0x44BC2CF5AD770999, "xxh64 of abc");
    const auto bytes = numbers(2 * kBlockBytes + 5);
    const auto sums = block_checksums(bytes);
    expect(sums.size() == 3 && sums[2] == xxh64({bytes.data() + 2 * kBlockBytes, 5}), "last block");
    expect(block_checksums(Span<const std::uint8_t>()).empty(), "no block of nothing");
}

void refuses_what_touches_a_damaged_block() {
    auto bytes = numbers(3 * kBlockBytes - 1);
    const auto promised = block_checksums(bytes);
    bytes[kBlockBytes + 99] ^= 1;
    const BlockChecks checks(bytes, promised, "x", "restore it");
    expect(!refuses(checks, 0, kBlockBytes), "the block before");
    expect(!refuses(checks, 2 * kBlockBytes, 3 * kBlockBytes - 1), "the block behind");
    expect(!refuses(checks, kBlockBytes + 5, kBlockBytes + 5), "nothing of it");
    expect(refuses(checks, kBlockBytes - 1, kBlockBytes + 1), "its first byte");
    expect(refuses(checks, 2 * kBlockBytes - 1, 2 * kBlockBytes), "its last byte");
    expect(refuses(checks, 0, 3 * kBlockBytes - 1), "all of it");
    bytes[kBlockBytes + 99] ^= 1;
    expect(!refuses(checks, 0, 3 * kBlockBytes - 1), "what failed is compared again");
    bool refused = false;
    try {
        BlockChecks(bytes, {1, 2}, "x", "restore it");
    } catch (const FormatError&) {
        refused = true;
    }
    expect(refused, "another number of checksums");
}

void is_shared_by_threads() {
    auto bytes = numbers(40 * kBlockBytes);
    const auto promised = block_checksums(bytes);
    bytes[kBlockBytes] ^= 1;
    const BlockChecks checks(bytes, promised, "x", "restore it");
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
    for (const int times : refused) expect(times == 1, "every thread sees the damaged block once");
}

}  // namespace

int main() {
    has_the_published_values();
    refuses_what_touches_a_damaged_block();
    is_shared_by_threads();
    if (failures == 0) std::printf("ok\n");
    return failures;
}

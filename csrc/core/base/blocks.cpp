#include "core/base/blocks.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/check.hpp"

namespace megapack {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                        kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                        kPrime5 = 0x27D4EB2F165667C5;

template <typename T>
T load(const std::uint8_t* from) {  // little-endian, like every supported machine
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

std::uint64_t rotate(std::uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

std::uint64_t round(std::uint64_t sum, std::uint64_t lane) {
    return rotate(sum + lane * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t sum) {
    return (hash ^ round(0, sum)) * kPrime1 + kPrime4;
}

Span<const std::uint8_t> block_of(Span<const std::uint8_t> bytes, std::int64_t block) {
    const std::int64_t begin = block * kBlockBytes;
    return bytes.subspan(begin, std::min(kBlockBytes, bytes.size() - begin));
}

std::int64_t num_blocks(Span<const std::uint8_t> bytes) {
    return (bytes.size() + kBlockBytes - 1) / kBlockBytes;
}

}  // namespace

std::uint64_t xxh64(Span<const std::uint8_t> bytes) {
    const std::uint8_t* at = bytes.begin();
    const auto size = static_cast<std::uint64_t>(bytes.size());
    std::uint64_t hash = kPrime5;
    if (size >= 32) {
        std::uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
        for (; bytes.end() - at >= 32; at += 32) {
            a = round(a, load<std::uint64_t>(at));
            b = round(b, load<std::uint64_t>(at + 8));
            c = round(c, load<std::uint64_t>(at + 16));
            d = round(d, load<std::uint64_t>(at + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = merge(merge(merge(merge(hash, a), b), c), d);
    }
    hash += size;
    for (; bytes.end() - at >= 8; at += 8)
        hash = rotate(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
    for (; bytes.end() - at >= 4; at += 4)
        hash = rotate(hash ^ load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    for (; at != bytes.end(); ++at) hash = rotate(hash ^ *at * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

std::vector<std::uint64_t> block_checksums(Span<const std::uint8_t> bytes) {
    std::vector<std::uint64_t> result(num_blocks(bytes));
    for (std::int64_t b = 0; b < ssize(result); ++b) result[b] = xxh64(block_of(bytes, b));
    return result;
}

BlockChecks::BlockChecks(Span<const std::uint8_t> bytes, std::vector<std::uint64_t> expected,
                         std::string name, std::string remedy)
    : bytes_(bytes),
      expected_(std::move(expected)),
      name_(std::move(name)),
      remedy_(std::move(remedy)),
      checked_(new std::atomic<std::uint8_t>[expected_.size()]()),
      num_unchecked_(ssize(expected_)) {
    check<FormatError>(ssize(expected_) == num_blocks(bytes_), name_, " has ", num_blocks(bytes_),
                       " blocks and ", expected_.size(), " checksums; ", remedy_);
}

void BlockChecks::check_block(std::int64_t block) const {
    const Span<const std::uint8_t> bytes = block_of(bytes_, block);
    const std::int64_t begin = block * kBlockBytes;
    check<FormatError>(xxh64(bytes) == expected_[block], name_, " is damaged: bytes ", begin,
                       " to ", begin + bytes.size(), " do not have their checksum; ", remedy_);
    if (checked_[block].exchange(1, std::memory_order_relaxed) == 0)
        num_unchecked_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace megapack

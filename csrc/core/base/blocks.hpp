// Checksums of a file's blocks, compared when something of a block is read for the first time: so a
// mapped file of any size opens at once, and nothing of it is used unchecked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

constexpr int kBlockBits = 16;
constexpr std::int64_t kBlockBytes = std::int64_t{1} << kBlockBits;

// XXH64 with seed 0 (Yann Collet's, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
std::uint64_t xxh64(Span<const std::uint8_t> bytes);

// XXH64 of every kBlockBytes bytes; the last block may be shorter.
std::vector<std::uint64_t> block_checksums(Span<const std::uint8_t> bytes);

// One array or file and the checksums promised for its blocks. Any number of threads may read.
class BlockChecks {
  public:
    // `name` begins the message of an error, `remedy` ends it. Throws FormatError unless there is
    // one checksum for each block.
    BlockChecks(Span<const std::uint8_t> bytes, std::vector<std::uint64_t> promised,
                std::string name, std::string remedy);

    // Called before bytes [begin, end) are read; they exist. FormatError if a block is damaged.
    void require(std::int64_t begin, std::int64_t end) const {
        if (begin >= end || all_sound()) return;
        // Relaxed: the bytes themselves never change, so there is nothing to order.
        for (std::int64_t b = begin >> kBlockBits; b <= (end - 1) >> kBlockBits; ++b)
            if (sound_[b].load(std::memory_order_relaxed) == 0) compare(b);
    }
    // Every block was compared: what a long run asks, many times for each segment it gathers.
    bool all_sound() const { return num_unseen_.load(std::memory_order_relaxed) == 0; }

  private:
    void compare(std::int64_t block) const;

    Span<const std::uint8_t> bytes_;
    std::vector<std::uint64_t> promised_;
    std::string name_, remedy_;
    std::unique_ptr<std::atomic<std::uint8_t>[]> sound_;  // 1: was compared
    mutable std::atomic<std::int64_t> num_unseen_;
};

}  // namespace megapack

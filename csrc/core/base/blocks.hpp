// Checksums of the blocks of a file. A block is checked when something in it is read for the first
// time: a mapped file of any size opens at once, and no byte is used unchecked.
//
//     BlockChecks checks(bytes, {xxh64 of block 0, ...}, "a.samples", "pack again");
//     checks.require(0, 8);  // FormatError "a.samples is damaged: bytes 0 to 65536 ..."
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

// XXH64 with seed 0 (Yann Collet, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
std::uint64_t xxh64(Span<const std::uint8_t> bytes);

// Returns XXH64 of every block of kBlockBytes bytes; the last one may be shorter.
std::vector<std::uint64_t> block_checksums(Span<const std::uint8_t> bytes);

// An array or file and the expected checksums of its blocks. Threads may share it.
class BlockChecks {
  public:
    // Error messages start with `name` and end with `remedy`. Throws FormatError unless there is
    // one checksum per block.
    BlockChecks(Span<const std::uint8_t> bytes, std::vector<std::uint64_t> expected,
                std::string name, std::string remedy);

    // Checks the blocks of bytes [begin, end), which must exist; call it before reading them.
    // Throws FormatError if a block is damaged.
    void require(std::int64_t begin, std::int64_t end) const {
        if (begin >= end || all_checked()) return;
        // Relaxed order suffices: the bytes never change.
        for (std::int64_t b = begin >> kBlockBits; b <= (end - 1) >> kBlockBits; ++b)
            if (checked_[b].load(std::memory_order_relaxed) == 0) check_block(b);
    }
    // Returns true once every block is checked, which is the usual case in a long run. Called many
    // times per segment.
    bool all_checked() const { return num_unchecked_.load(std::memory_order_relaxed) == 0; }

  private:
    void check_block(std::int64_t block) const;

    Span<const std::uint8_t> bytes_;
    std::vector<std::uint64_t> expected_;
    std::string name_, remedy_;
    std::unique_ptr<std::atomic<std::uint8_t>[]> checked_;  // per block: 0 or 1
    mutable std::atomic<std::int64_t> num_unchecked_;
};

}  // namespace megapack

// int32 or int64 numbers of an index, possibly unaligned (inside a mapped file), read as int64: the
// width is looked up at run time, so what reads an index is compiled once.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/base/blocks.hpp"
#include "core/base/span.hpp"

namespace megapack {

class Integers {
  public:
    Integers() = default;
    // `checks`: of these bytes, if they are a file's; the caller keeps it.
    Integers(const void* data, std::int64_t size, bool wide, const BlockChecks* checks = nullptr)
        : data_(static_cast<const unsigned char*>(data)),
          size_(size),
          checks_(checks),
          wide_(wide) {}
    Integers(Span<const std::int32_t> numbers) : Integers(numbers.data(), numbers.size(), false) {}
    Integers(Span<const std::int64_t> numbers) : Integers(numbers.data(), numbers.size(), true) {}

    std::int64_t size() const { return size_; }
    std::int64_t operator[](std::int64_t i) const {
        return wide_ ? read<std::int64_t>(i) : read<std::int32_t>(i);
    }
    // Asked for before numbers [begin, end) are read and relied on: FormatError where a block of
    // the file that they lie in is damaged.
    void require(std::int64_t begin, std::int64_t end) const {
        if (checks_ != nullptr) checks_->require(begin * width(), end * width());
    }
    // Where number i lies, for a prefetch.
    const void* address(std::int64_t i) const { return data_ + i * width(); }

  private:
    std::int64_t width() const { return wide_ ? 8 : 4; }
    template <typename T>
    T read(std::int64_t i) const {
        T value;
        std::memcpy(&value, data_ + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
        return value;
    }

    const unsigned char* data_ = nullptr;
    std::int64_t size_ = 0;
    const BlockChecks* checks_ = nullptr;
    bool wide_ = false;
};

}  // namespace megapack

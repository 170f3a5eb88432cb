// int32 or int64 numbers of an index, possibly unaligned (inside a mapped file), read as int64: the
// width is looked up at run time, so what reads an index is compiled once.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/base/span.hpp"

namespace megapack {

class Integers {
  public:
    Integers() = default;
    Integers(const void* data, std::int64_t size, bool wide)
        : data_(static_cast<const unsigned char*>(data)), size_(size), wide_(wide) {}
    Integers(Span<const std::int32_t> numbers) : Integers(numbers.data(), numbers.size(), false) {}
    Integers(Span<const std::int64_t> numbers) : Integers(numbers.data(), numbers.size(), true) {}

    std::int64_t size() const { return size_; }
    std::int64_t operator[](std::int64_t i) const {
        return wide_ ? read<std::int64_t>(i) : read<std::int32_t>(i);
    }
    // Where number i lies, for a prefetch.
    const void* address(std::int64_t i) const { return data_ + i * (wide_ ? 8 : 4); }

  private:
    template <typename T>
    T read(std::int64_t i) const {
        T value;
        std::memcpy(&value, data_ + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
        return value;
    }

    const unsigned char* data_ = nullptr;
    std::int64_t size_ = 0;
    bool wide_ = false;
};

}  // namespace megapack

// Buffer<T>: an array that owns its memory and is not zeroed. Large arrays use huge pages: the
// first access to a 4 KiB page costs as much as packing documents of a thousand tokens; with 2 MiB
// pages that cost is negligible.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "core/base/span.hpp"

namespace megapack {

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>, "Buffer memory is never initialised");

  public:
    Buffer() = default;
    explicit Buffer(std::int64_t size) : data_(allocate(size)), size_(size) {}

    T* data() const { return data_.get(); }
    std::int64_t size() const { return size_; }
    T& operator[](std::int64_t i) const { return data_.get()[i]; }
    operator Span<T>() const { return {data(), size_}; }
    operator Span<const T>() const { return {data(), size_}; }

    // Shortens the array without freeing memory: the kernel allocates only pages that were touched.
    void truncate(std::int64_t size) { size_ = size < size_ ? size : size_; }

    // Returns the whole huge pages in elements [begin, end) to the kernel; do not read them again.
    void discard(std::int64_t begin, std::int64_t end) const {
        const auto first = reinterpret_cast<std::uintptr_t>(data() + begin) + kHugePage - 1;
        const auto last = reinterpret_cast<std::uintptr_t>(data() + end);
        const std::uintptr_t from = first / kHugePage * kHugePage,
                             to = last / kHugePage * kHugePage;
        if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
    }

    // Passes ownership to the caller, who frees the memory with std::free.
    T* release() {
        size_ = 0;
        return data_.release();
    }

  private:
    static constexpr std::size_t kHugePage = std::size_t{1} << 21;

    struct Free {
        void operator()(T* p) const { std::free(p); }
    };

    static T* allocate(std::int64_t size) {
        constexpr std::size_t kCacheLine = 64;
        constexpr auto kMost = static_cast<std::int64_t>((~std::size_t{0} >> 2) / sizeof(T));
        if (size < 0 || size > kMost) throw std::bad_alloc();
        const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
        const std::size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kCacheLine;
        const std::size_t rounded = (bytes / alignment + 1) * alignment;
        void* memory = std::aligned_alloc(alignment, rounded);
        if (memory == nullptr) throw std::bad_alloc();
        if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
        return static_cast<T*>(memory);
    }

    std::unique_ptr<T, Free> data_;
    std::int64_t size_ = 0;
};

}  // namespace megapack

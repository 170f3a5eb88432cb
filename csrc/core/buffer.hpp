// Buffer<T>: an array that owns its memory, is not zeroed, and lies on huge pages when it is large.
// A first touch of a fresh 4 KiB page costs about as much as packing a thousand tokens' worth of
// documents; on 2 MiB pages that cost disappears.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/span.hpp"

namespace megapack {

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>, "Buffer memory is never initialised");

  public:
    Buffer() = default;
    explicit Buffer(std::size_t size) : data_(allocate(size)), size_(size) {}

    T* data() const { return data_.get(); }
    std::size_t size() const { return size_; }
    T& operator[](std::size_t i) const { return data_.get()[i]; }
    operator Span<T>() const { return {data(), size_}; }
    operator Span<const T>() const { return {data(), size_}; }

    // Forgets the tail. What was never touched was never given by the system.
    void truncate(std::size_t size) { size_ = size < size_ ? size : size_; }

    // Gives the memory away; free it with std::free.
    T* release() {
        size_ = 0;
        return data_.release();
    }

  private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };

    static T* allocate(std::size_t size) {
        constexpr std::size_t kHugePage = std::size_t{1} << 21;
        constexpr std::size_t kCacheLine = 64;
        if (size > (~std::size_t{0} >> 1) / sizeof(T)) throw std::bad_alloc();
        const std::size_t bytes = size * sizeof(T);
        const std::size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kCacheLine;
        const std::size_t rounded = (bytes / alignment + 1) * alignment;
        void* memory = std::aligned_alloc(alignment, rounded);
        if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
        return static_cast<T*>(memory);
    }

    std::unique_ptr<T, Free> data_;
    std::size_t size_ = 0;
};

}  // namespace megapack

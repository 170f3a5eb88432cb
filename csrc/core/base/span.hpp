// Span<T>: a pointer and a length; the caller owns the memory (std::span needs C++20). Sizes and
// positions are signed, as everywhere in the core.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

namespace megapack {

template <typename T>
class Span {
  public:
    constexpr Span() = default;
    constexpr Span(T* data, std::int64_t size) : data_(data), size_(size) {}

    // Views a vector without a copy; the caller keeps it alive.
    template <typename U, typename = std::enable_if_t<std::is_same_v<std::remove_const_t<T>, U>>>
    Span(std::vector<U>& values)
        : data_(values.data()), size_(static_cast<std::int64_t>(values.size())) {}
    template <typename U,
              typename = std::enable_if_t<std::is_const_v<T> && std::is_same_v<T, const U>>>
    Span(const std::vector<U>& values)
        : data_(values.data()), size_(static_cast<std::int64_t>(values.size())) {}
    // Span<T> -> Span<const T>.
    template <typename U, typename = std::enable_if_t<std::is_same_v<T, const U>>>
    constexpr Span(Span<U> other) : data_(other.data()), size_(other.size()) {}

    constexpr T* data() const { return data_; }
    constexpr std::int64_t size() const { return size_; }
    constexpr bool empty() const { return size_ == 0; }
    constexpr T& operator[](std::int64_t i) const { return data_[i]; }
    constexpr T* begin() const { return data_; }
    constexpr T* end() const { return data_ + size_; }
    constexpr Span subspan(std::int64_t offset, std::int64_t count) const {
        return {data_ + offset, count};
    }

  private:
    T* data_ = nullptr;
    std::int64_t size_ = 0;
};

// Size of a container, signed (std::ssize of C++20).
template <typename Container>
std::int64_t ssize(const Container& container) {
    return static_cast<std::int64_t>(container.size());
}

}  // namespace megapack

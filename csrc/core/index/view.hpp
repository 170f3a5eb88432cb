// Arrays of a packing, in memory or mapped from a .samples file. No number is trusted:
// numbers that serve as addresses are checked when they are read, and blocks of a file are compared
// with their checksums before their numbers are used.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/base/blocks.hpp"
#include "core/base/check.hpp"
#include "core/base/parallel.hpp"
#include "core/base/span.hpp"

namespace megapack {

// int32 or int64 numbers of an index, possibly unaligned (in a mapped file), read as int64. The
// width is looked up at run time, so readers of an index are compiled once.
class Integers {
  public:
    Integers() = default;
    // `checks`: checksums of these bytes, if known; the caller keeps them alive.
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
    // Checks the blocks of numbers [begin, end); call it before using them. Throws FormatError if a
    // block is damaged.
    void require(std::int64_t begin, std::int64_t end) const {
        if (checks_ != nullptr) checks_->require(begin * width(), end * width());
    }
    // Address of number i, for a prefetch.
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

struct SampleView {
    Integers bucket_sample_offsets;   // num_buckets + 1
    Integers sample_segment_offsets;  // num_samples + 1
    Integers segment_document;        // num_segments each
    Integers segment_begin;
    Integers segment_length;

    std::int64_t num_samples() const { return sample_segment_offsets.size() - 1; }
    std::int64_t num_segments() const { return segment_length.size(); }

    // Compares the sizes of the arrays; reads no element.
    void check_sizes() const {
        check<FormatError>(sample_segment_offsets.size() > 0 &&
                               segment_document.size() == num_segments() &&
                               segment_begin.size() == num_segments(),
                           "the arrays of the index do not belong together");
    }
    Part samples(std::int64_t bucket) const {
        return range(bucket_sample_offsets, bucket, num_samples(), "bucket ", " claims samples ");
    }
    // Returns the segments of a sample and checks their blocks.
    Part segments(std::int64_t sample) const {
        const Part part =
            range(sample_segment_offsets, sample, num_segments(), "sample ", " claims segments ");
        for (const Integers* column : {&segment_document, &segment_begin, &segment_length})
            column->require(part.begin, part.end);
        return part;
    }

  private:
    static Part range(const Integers& offsets, std::int64_t i, std::int64_t limit,
                      const char* subject, const char* claims) {
        offsets.require(i, i + 2);
        const Part part{offsets[i], offsets[i + 1]};
        check<FormatError>(part.begin >= 0 && part.begin <= part.end && part.end <= limit, subject,
                           i, claims, part.begin, " to ", part.end, " of ", limit);
        return part;
    }
};

// Lengths of documents, looked up in random order with a prefetch.
class LengthLookup {
  public:
    LengthLookup(const Integers& segment_document, const Integers& lengths)
        : segment_document_(segment_document), lengths_(lengths) {}

    // Length of the document of a segment.
    std::int64_t operator[](std::int64_t segment) const {
        if (segment + kAhead < segment_document_.size()) {
            const std::int64_t ahead = segment_document_[segment + kAhead];
            if (ahead >= 0 && ahead < lengths_.size()) __builtin_prefetch(lengths_.address(ahead));
        }
        const std::int64_t document = segment_document_[segment];
        check<FormatError>(document >= 0 && document < lengths_.size(), "segment ", segment,
                           " names document ", document, " of ", lengths_.size());
        return lengths_[document];
    }

  private:
    static constexpr std::int64_t kAhead = 32;  // segments between prefetch and use

    Integers segment_document_, lengths_;
};

}  // namespace megapack

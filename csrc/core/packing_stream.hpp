// Documents joined to a stream that is cut every `capacity` tokens.
#pragma once

#include "core/packing_types.hpp"

namespace megapack {

// Writes a stream's segments: a sample is open, `room` tokens of it are free, `segment` is next.
template <typename Id, typename Length>
class StreamCutter {
  public:
    // A cutter that stands `position` tokens into a stream whose first sample is `sample`; whoever
    // lays out the streams has opened that first sample, a cutter opens the later ones.
    StreamCutter(const Samples<Id, Length>& out, std::int64_t capacity, std::int64_t sample,
                 std::int64_t segment, std::int64_t position)
        : out_(&out),
          capacity_(capacity),
          sample_(sample + position / capacity),
          segment_(segment),
          room_(capacity - position % capacity) {}

    void push(Id document, Length begin, Length length) {
        while (length >= room_) {
            out_->put(segment_++, document, begin, static_cast<std::int32_t>(room_));
            begin = static_cast<Length>(begin + room_);
            length = static_cast<Length>(length - room_);
            room_ = capacity_;
            out_->open_sample(++sample_, segment_);
        }
        if (length == 0) return;
        out_->put(segment_++, document, begin, static_cast<std::int32_t>(length));
        room_ -= length;
    }

    std::int64_t num_segments() const { return segment_; }

  private:
    const Samples<Id, Length>* out_;
    std::int64_t capacity_, sample_, segment_, room_;
};

// How many segments the same stream has, without writing them.
class SegmentCounter {
  public:
    SegmentCounter(std::int64_t capacity, std::int64_t position)
        : capacity_(capacity), room_(capacity - position % capacity) {}

    void push(std::int64_t length) {
        segments_ += length > 0 ? 1 : 0;
        std::int64_t beyond = length - room_;
        if (length >= capacity_) {
            segments_ += beyond / capacity_;
            beyond %= capacity_;
        }
        // Documents end samples at random: no branch here, it would be mispredicted.
        segments_ += beyond > 0 ? 1 : 0;
        room_ = (beyond >= 0 ? capacity_ : 0) - beyond;
    }
    std::int64_t num_segments() const { return segments_; }

  private:
    std::int64_t capacity_, room_, segments_ = 0;
};

// Every document goes to the smallest bucket that holds it, or to the largest; the documents of a
// bucket are joined in their order and cut at its capacity; the last sample may be short.
// With one bucket this is plain concatenation, with several BucketLLM's "Naive Bucketing".
template <typename Id, typename Length>
Samples<Id, Length> pack_streams(const Documents<Id, Length>& documents,
                                 const std::vector<std::int64_t>& capacities, int threads,
                                 Progress& progress);

// Removes the last sample of a one-bucket packing if it is not full; its tokens count as dropped.
template <typename Id, typename Length>
void drop_partial_sample(Samples<Id, Length>& samples);

}  // namespace megapack

// Documents joined into a stream that is cut every `capacity` tokens: StreamCutter writes the
// segments, SegmentCounter counts them. Capacity 8, documents of 3, 9 and 4 tokens:
//
//     0 0 0 1 1 1 1 1 | 1 1 1 1 2 2 2 2   ->  4 segments, one cut inside document 1
#pragma once

#include "core/packing/strategy.hpp"

namespace megapack {

// Writes the segments of a stream. `room_` tokens of the open sample are free.
template <typename Id, typename Length>
class StreamCutter {
  public:
    // Starts `position` tokens into a stream with the first sample `sample`. The caller opens that
    // sample; the cutter opens later ones.
    StreamCutter(const Samples<Id, Length>& out, std::int64_t capacity, std::int64_t sample,
                 std::int64_t segment, std::int64_t position)
        : out_(&out),
          capacity_(capacity),
          stream_(sample),
          sample_(sample + position / capacity),
          segment_(segment),
          room_(capacity - position % capacity) {}

    void push(Id document, Length begin, Length length) {
        while (length >= room_) {
            out_->put(segment_++, document, begin, room_);
            begin = static_cast<Length>(begin + room_);
            length = static_cast<Length>(length - room_);
            room_ = capacity_;
            out_->open_sample(++sample_, segment_);
        }
        if (length == 0) return;
        out_->put(segment_++, document, begin, length);
        room_ -= length;
    }

    // Appends the documents of `range`; `end` is the position in the stream after them.
    void push_range(const Documents<Id, Length>& documents, Part range, std::int64_t end) {
        const std::int64_t last = stream_ + end / capacity_;
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            i = documents.in_order(
                [&](auto item_at) { return push_before(last, i, range.end, item_at); });
            if (i < range.end) push(documents[i].document, 0, documents[i].length);
        }
    }

    std::int64_t num_segments() const { return segment_; }

  private:
    // Appends documents from i on without a branch: whether a document ends a sample is random, and
    // a branch on it would be mispredicted. Every document is written as if the next sample began
    // in it; later documents overwrite the excess, as long as a sample before `last` remains
    // to be opened. Returns the first document for which that is uncertain, or that spans a sample.
    template <typename ItemAt>
    std::int64_t push_before(std::int64_t last, std::int64_t i, std::int64_t end, ItemAt item_at) {
        Id* const document = out_->segment_document.data();
        Length* const begin = out_->segment_begin.data();
        std::int32_t* const length = out_->segment_length.data();
        std::int64_t* offset = out_->sample_segment_offsets.data() + sample_ + 1;
        const std::int64_t* const stop = out_->sample_segment_offsets.data() + last;
        const auto capacity = static_cast<Length>(capacity_);
        constexpr int kSign = 8 * sizeof(Length) - 1;
        auto room = static_cast<Length>(room_);
        std::int64_t segment = segment_;
        for (; i < end && offset < stop; ++i) {
            const Item<Id, Length> item = item_at(i);
            const Length beyond = item.length - room;
            if (beyond >= capacity) break;
            const Length before = beyond >> kSign;  // all bits set: it ends in this sample
            const Length first = room + (beyond & before);
            document[segment] = item.document;
            begin[segment] = 0;
            length[segment] = static_cast<std::int32_t>(first);
            segment += static_cast<std::int64_t>(item.length > 0);
            document[segment] = item.document;
            begin[segment] = first;
            length[segment] = static_cast<std::int32_t>(beyond);
            *offset = segment;
            offset += 1 + before;
            segment += static_cast<std::int64_t>(beyond > 0);
            room = (~before & capacity) - beyond;
        }
        sample_ = offset - out_->sample_segment_offsets.data() - 1;
        segment_ = segment, room_ = room;
        return i;
    }

    const Samples<Id, Length>* out_;
    std::int64_t capacity_, stream_, sample_, segment_, room_;  // stream_: first sample
};

// Counts the segments of a stream without writing them.
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
        // No branch: whether a document ends a sample is random, so it would be mispredicted.
        segments_ += beyond > 0 ? 1 : 0;
        room_ = (beyond >= 0 ? capacity_ : 0) - beyond;
    }
    std::int64_t num_segments() const { return segments_; }

  private:
    std::int64_t capacity_, room_, segments_ = 0;
};

}  // namespace megapack

// next_fit: full chunks are samples of their own; a rest that does not fit in the open sample
// closes it and opens the next.
#pragma once

#include "core/packing/strategy.hpp"

namespace megapack {

struct NextFitRules {
    std::int64_t capacity;
    bool shuffle = false;  // documents in seeded order (Purpose::kDocuments)
};

template <typename Id, typename Length>
Samples<Id, Length> pack_next_fit(const Lengths<Length>& lengths, const NextFitRules& rules,
                                  const Run& run);

// Samples filled one after the other, from sample `sample` and segment `segment` of `out` on.
template <typename Id, typename Length>
class NextFit {
  public:
    NextFit(const Samples<Id, Length>& out, std::int64_t capacity, std::int64_t sample,
            std::int64_t segment)
        : out_(out), capacity_(capacity), sample_(sample), segment_(segment) {}

    void push(Id document, Length begin, std::int64_t length) {
        if (length > room_) {
            out_.open_sample(sample_++, segment_);
            room_ = capacity_;
        }
        out_.put(segment_++, document, begin, static_cast<std::int32_t>(length));
        room_ -= length;
    }
    std::int64_t num_samples() const { return sample_; }
    std::int64_t num_segments() const { return segment_; }

  private:
    const Samples<Id, Length>& out_;
    std::int64_t capacity_, sample_, segment_, room_ = 0;
};

}  // namespace megapack

// Seamless Packing (Yin et al. 2025, section 3): long documents are covered by overlapping windows
// where that needs little repetition; the rest is fitted to bins slightly larger than a sample.
#pragma once

#include "core/base/ratio.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

// Where the windows of a long document begin.
//   kExact: evenly spread, nothing lost.
//   kPaper: equation 3 as printed, which may leave the document's end uncovered.
//   kPublished: the arithmetic of the authors' program.
enum class Placement { kExact, kPaper, kPublished };

struct SeamlessRules {
    std::int64_t capacity;
    Ratio r_max;  // largest share of a sample that is repeated
    Placement placement;
    std::int64_t extra_capacity = 0;
    bool drop_last = false;  // a last sample that is not full counts as dropped
};

template <typename Id, typename Length>
Samples<Id, Length> pack_seamless(const Lengths<Length>& lengths, const SeamlessRules& rules,
                                  const Run& run);

// What stage one makes of the documents.
struct StageOne {
    std::int64_t num_sliding = 0;   // documents covered by overlapping windows
    std::int64_t short_tokens = 0;  // left to stage two
    std::int64_t dropped_tokens = 0, repeated_tokens = 0;
};

template <typename Id, typename Length>
StageOne count_stage_one(const Documents<Id, Length>& documents, const SeamlessRules& rules,
                         const Run& run);

// How stage one treats a document of at least `capacity` tokens.
class SlidingCut {
  public:
    explicit SlidingCut(const SeamlessRules& rules);

    bool slides(std::int64_t length) const;
    std::int64_t num_chunks(std::int64_t length) const {
        return length / capacity + (slides(length) ? 1 : 0);
    }
    std::int64_t tail(std::int64_t length) const { return slides(length) ? 0 : length % capacity; }
    std::int64_t begin(std::int64_t length, std::int64_t k) const;

    std::int64_t capacity;

  private:
    SeamlessRules rules_;
};

}  // namespace megapack

// Token ids of a tokenizer -> tokens as they are stored: checked, narrowed, framed by document.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

template <typename Stored>
struct FramedDocuments {
    std::vector<Stored> tokens;
    std::vector<std::int64_t> offsets;  // (documents + 1)
    std::int64_t max_token = -1;
};

// Puts `prefix` before and `suffix` behind every document and narrows ids to Stored in the same
// pass. Ids: uint32 or int32. Throws DataError for an id below 0 or not below vocab_size.
template <typename Stored, typename Id>
FramedDocuments<Stored> frame_documents(Span<const Id> ids, Span<const std::int64_t> offsets,
                                        Span<const std::int64_t> prefix,
                                        Span<const std::int64_t> suffix, std::int64_t vocab_size);

}  // namespace megapack

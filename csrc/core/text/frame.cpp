#include "core/text/frame.hpp"

#include <algorithm>
#include <limits>

#include "core/base/check.hpp"

namespace megapack {
namespace {

void check_offsets(Span<const std::int64_t> offsets, std::int64_t num_ids) {
    check(!offsets.empty() && offsets[0] == 0, "offsets must start with 0");
    for (std::int64_t i = 0; i + 1 < offsets.size(); ++i) {
        check(offsets[i] <= offsets[i + 1], "offsets descend at document ", i);
    }
    check(offsets[offsets.size() - 1] == num_ids, "offsets end at ", offsets[offsets.size() - 1],
          "; there are ", num_ids, " token ids");
}

// Branch-free inside, so that it vectorizes: as unsigned, a negative id is larger than any limit.
template <typename Id>
std::uint32_t largest(Span<const Id> ids) {
    std::uint32_t result = 0;
    for (const Id id : ids) result = std::max(result, static_cast<std::uint32_t>(id));
    return result;
}

template <typename Stored>
Stored* append(Span<const std::int64_t> ids, Stored* out) {
    for (const std::int64_t id : ids) *out++ = static_cast<Stored>(id);
    return out;
}

}  // namespace

template <typename Stored, typename Id>
FramedDocuments<Stored> frame_documents(Span<const Id> ids, Span<const std::int64_t> offsets,
                                        Span<const std::int64_t> prefix,
                                        Span<const std::int64_t> suffix, std::int64_t vocab_size) {
    check(vocab_size > 0 && vocab_size - 1 <= std::numeric_limits<Stored>::max(), "vocab_size ",
          vocab_size, " does not fit the stored dtype, whose largest id is ",
          std::numeric_limits<Stored>::max());
    check_offsets(offsets, ids.size());
    std::int64_t max_token = ids.empty() ? -1 : static_cast<std::int64_t>(largest(ids));
    for (const auto frame : {prefix, suffix}) {
        for (const std::int64_t id : frame) {
            check(id >= 0, "special token id ", id, " is negative");
            max_token = std::max(max_token, id);
        }
    }
    check<DataError>(max_token < vocab_size, "token id ", max_token,
                     " (as unsigned) is outside the vocabulary of ", vocab_size,
                     "; the tokenizer and its vocabulary size do not belong together");

    const std::int64_t num_documents = offsets.size() - 1;
    const std::int64_t added = prefix.size() + suffix.size();
    FramedDocuments<Stored> result;
    result.max_token = num_documents == 0 ? -1 : max_token;
    result.tokens.resize(ids.size() + added * num_documents);
    result.offsets.resize(offsets.size());
    Stored* out = result.tokens.data();
    for (std::int64_t i = 0; i < num_documents; ++i) {
        out = append(prefix, out);
        const std::int64_t begin = offsets[i];
        const std::int64_t end = offsets[i + 1];
        for (std::int64_t k = begin; k < end; ++k) *out++ = static_cast<Stored>(ids[k]);
        out = append(suffix, out);
        result.offsets[i + 1] = out - result.tokens.data();
    }
    return result;
}

template FramedDocuments<std::uint16_t> frame_documents(Span<const std::uint32_t>,
                                                        Span<const std::int64_t>,
                                                        Span<const std::int64_t>,
                                                        Span<const std::int64_t>, std::int64_t);
template FramedDocuments<std::uint16_t> frame_documents(Span<const std::int32_t>,
                                                        Span<const std::int64_t>,
                                                        Span<const std::int64_t>,
                                                        Span<const std::int64_t>, std::int64_t);
template FramedDocuments<std::int32_t> frame_documents(Span<const std::uint32_t>,
                                                       Span<const std::int64_t>,
                                                       Span<const std::int64_t>,
                                                       Span<const std::int64_t>, std::int64_t);
template FramedDocuments<std::int32_t> frame_documents(Span<const std::int32_t>,
                                                       Span<const std::int64_t>,
                                                       Span<const std::int64_t>,
                                                       Span<const std::int64_t>, std::int64_t);

}  // namespace megapack

// What every strategy stands on: a strategy is
//
//     template <typename Id, typename Length>
//     Samples<Id, Length> pack_<name>(const Lengths<Length>&, const <Name>Rules&, const Run&);
//
// whole in one place, its rules checked at its beginning.
#pragma once

#include "core/base/check.hpp"
#include "core/packing/documents.hpp"
#include "core/packing/lengths.hpp"
#include "core/packing/run.hpp"
#include "core/packing/samples.hpp"

// At the end of a strategy's source: the function for all widths.
#define MEGAPACK_INSTANTIATE_STRATEGY(pack, Rules)                                                \
    template Samples<std::int32_t, std::int32_t> pack(const Lengths<std::int32_t>&, const Rules&, \
                                                      const Run&);                                \
    template Samples<std::int64_t, std::int32_t> pack(const Lengths<std::int32_t>&, const Rules&, \
                                                      const Run&);                                \
    template Samples<std::int64_t, std::int64_t> pack(const Lengths<std::int64_t>&, const Rules&, \
                                                      const Run&)

// Fill-in-the-middle: moves the middle of a whole document to its end, so that a model learns to
// write text between two texts (Bavarian et al., arXiv 2207.14255, section 3).
//
//     d = a b c d e [eod], cuts 1 and 3:   PSM   PRE a SUF d e MID b c [END] [eod]
//                                          SPM   PRE SUF d e MID a b c [END] [eod]
//
// The transformation of a document depends only on (seed, epoch, document), through the numbers
//     u_k = random_unit(random_bits(random_bits(random_bits(seed, 6), epoch), document), k).
// It is transformed if u_0 < rate, to SPM if u_1 < spm_rate, and cut at places floor(u_2 n) and
// floor(u_3 n) of the n places before, between and after its tokens. With cuts between characters,
// every character is equally likely; each cut draws words 2 + 2 i (or 3 + 2 i) of the document's
// key for i = 0, 1, ...: a token and a character number below the largest character count of any
// token, until the token has that character. tests/reference/fim.py defines the same in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/shard.hpp"

namespace megapack {

// Where tokens can be cut between characters (UTF-8); empty: tokens are not cut. A token has a cut
// at every character that begins after its first byte.
struct CharacterCuts {
    std::vector<std::uint16_t> characters;  // per id: characters that begin in the token
    std::vector<std::int32_t> first_cut;    // (ids + 1): first cut of the token
    // Cut c replaces its token by parts [first_part[2 c], first_part[2 c + 1]) on its left and
    // parts up to first_part[2 c + 2] on its right. A cut without parts moves to the token's end.
    std::vector<std::int32_t> first_part;
    std::vector<std::int32_t> parts;
    std::uint64_t most = 0;  // largest number of characters of a token

    bool is_forbidden(std::int64_t cut) const {
        return first_part[2 * cut] == first_part[2 * cut + 2];
    }
};

struct Fim {
    std::int64_t prefix;  // sentinels
    std::int64_t suffix;
    std::int64_t middle;
    std::int64_t end = -1;  // -1: none
    std::int64_t eod = -1;  // end-of-document token, which stays last; -1: none
    double spm_rate = 0;
    CharacterCuts cuts = {};
};

// Returns the key from which the keys of all documents of an epoch are derived.
std::uint64_t fim_key(std::uint64_t seed, std::int64_t epoch);

// Throws std::invalid_argument for wrong sentinels, rates or inconsistent tables.
void check_fim(const Fim& fim);

// Tokens of the file from `at` on; or, if literal >= 0, the token `literal` with the loss weight of
// the token at `at`.
struct Run {
    std::int64_t at;
    std::int64_t length;
    std::int64_t literal;
};

// The drawn transformation of a document; it is cut before these tokens or characters of its body.
struct FimDraw {
    std::int64_t segment;  // number in the sample
    std::int64_t document;
    bool spm;
    std::int64_t first;
    std::int64_t second;
};

// Replaces `segments` by the segments of a sample (read_segments, shard.hpp). Transforms segments
// that are whole documents, have room and are drawn, and appends their runs to `runs`. Transforms
// none if fim is null or the rate is 0.
void read_segments(const Fim* fim, const Shard& shard, SampleRef ref,
                   std::vector<Segment>& segments, std::vector<Run>& runs,
                   std::vector<FimDraw>* draws = nullptr);

// Returns the draws of every sample.
std::vector<std::vector<FimDraw>> draw_fim(const Fim* fim, Span<const Shard> shards,
                                           Span<const SampleRef> samples);

}  // namespace megapack

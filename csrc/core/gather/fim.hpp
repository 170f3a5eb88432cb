// Fill-in-the-middle: of a whole document the middle is moved behind the end, so that a model
// learns to write what stands between two texts (Bavarian et al., arXiv 2207.14255, section 3).
//
//     d = a b c d e [eod], cuts 1 and 3:   PSM   PRE a SUF d e MID b c [END] [eod]
//                                          SPM   PRE SUF d e MID a b c [END] [eod]
//
// What happens to a document is a pure function of (seed, epoch, document). Its numbers are
//     u_k = random_unit(random_bits(random_bits(random_bits(seed, 6), epoch), document), k),
// it is transformed where u_0 < rate, to SPM where u_1 < spm_rate, and cut at floor(u_2 n) and
// floor(u_3 n) of the n places in front of, between and behind its tokens. Of characters the places
// are as likely, each drawn by trial: word 2 + 2 i of the document's key, or 3 + 2 i, times the
// places of n tokens of the most characters that some token has, the first that is one.
// The definition in plain Python is tests/reference/fim.py.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/shard.hpp"

namespace megapack {

// How tokens are cut between their characters (UTF-8: bytes that begin one). Empty: they are not.
// A token has one cut for every character that begins behind its first byte.
struct CharacterCuts {
    std::vector<std::uint16_t> characters;  // that begin in a token, by id
    std::vector<std::int32_t> first_cut;    // its first, by id, one more than there are ids
    // The tokens left of cut c are parts [first_part[2 c], first_part[2 c + 1]), those right of it
    // end at first_part[2 c + 2]. Without any the cut moves to the end of its token.
    std::vector<std::int32_t> first_part;
    std::vector<std::int32_t> parts;
    std::uint64_t most = 0;  // characters of a token

    bool is_forbidden(std::int64_t cut) const {
        return first_part[2 * cut] == first_part[2 * cut + 2];
    }
};

struct Fim {
    std::int64_t prefix;  // sentinels
    std::int64_t suffix;
    std::int64_t middle;
    std::int64_t end = -1;  // -1: none
    std::int64_t eod = -1;  // stays behind all, where a document ends with it
    double spm_rate = 0;
    CharacterCuts cuts = {};
};

// Of a pass of a run with this seed: what its documents' keys are made of.
std::uint64_t fim_key(std::uint64_t seed, std::int64_t epoch);

// Throws std::invalid_argument for sentinels that are none and for tables that contradict
// themselves.
void check_fim(const Fim& fim);

// Tokens of the file from `at` on, or one token (literal >= 0) of the weight of that at `at`.
struct Run {
    std::int64_t at;
    std::int64_t length;
    std::int64_t literal;
};

// What is decided of a document: the places, in front of that token or character of its body.
struct FimDraw {
    std::int64_t segment;  // of the sample
    std::int64_t document;
    bool spm;
    std::int64_t first;
    std::int64_t second;
};

// The segments of a sample in place of those before, as `read_segments` (shard.hpp) reads them.
// Those that are whole documents, have room and are drawn are transformed: they get their runs, at
// the end of `runs`. None is without fim or at rate 0.
void read_segments(const Fim* fim, const Shard& shard, SampleRef ref,
                   std::vector<Segment>& segments, std::vector<Run>& runs,
                   std::vector<FimDraw>* draws = nullptr);

// The draws of every sample.
std::vector<std::vector<FimDraw>> draw_fim(const Fim* fim, Span<const Shard> shards,
                                           Span<const SampleRef> samples);

}  // namespace megapack

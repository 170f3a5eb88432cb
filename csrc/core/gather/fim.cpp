#include "core/gather/fim.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

constexpr std::uint64_t kPurpose = 6;  // counter that derives the keys of this module from the seed
constexpr std::uint64_t kTries = 1024;

using Place = std::pair<std::int64_t, std::int64_t>;  // token of the body, character in it

// A cut before a token of the body, or (cut >= 0) inside it.
struct Cut {
    std::int64_t token;
    std::int64_t cut;
};

std::uint64_t number_of(const Shard& shard, const Segment& segment) {
    return static_cast<std::uint64_t>(shard.first_document) +
           static_cast<std::uint64_t>(segment.document);
}

std::int64_t token_at(const Shard& shard, std::int64_t at) {
    return with_type(shard.tokens, at, [](const auto* t) { return static_cast<std::int64_t>(*t); });
}

// Returns floor(bits / 2^64 * count), and the fraction as 64 bits.
std::pair<std::int64_t, std::uint64_t> place_of(std::uint64_t bits, std::uint64_t count) {
    __extension__ using Wide = unsigned __int128;
    const Wide at = static_cast<Wide>(bits) * count;
    return {static_cast<std::int64_t>(at >> 64), static_cast<std::uint64_t>(at)};
}

// Transforms one document in three steps. Each step prefetches the tables that the next one reads,
// so all documents of a sample finish a step before any starts the next.
class Writer {
  public:
    // Step 1: draws the places.
    Writer(const Fim& fim, const Shard& shard, const Segment& segment, std::uint64_t key,
           std::vector<Run>& runs)
        : fim_(fim), shard_(shard), begin_(segment.token_begin), runs_(runs) {
        const std::int64_t last = begin_ + segment.length - 1;
        ends_ = fim.eod >= 0 && token_at(shard, last) == fim.eod;
        body_ = segment.length - (ends_ ? 1 : 0);
        spm_ = random_unit(key, 1) < fim_.spm_rate;
        std::tie(low_, high_) = cuts(key);
    }

    // Step 2: finds the cuts.
    void find_cuts() {
        first_ = before(low_);
        second_ = before(high_);
        if (first_.cut >= 0 && second_.cut >= 0 && first_.token == second_.token)
            second_ = {second_.token + 1, -1};
    }

    // Step 3: appends the runs.
    void write() {
        first_ = allowed(first_);
        second_ = allowed(second_);
        const std::int64_t from = ssize(runs_);
        const Cut begin{0, -1};
        sentinel(fim_.prefix);
        if (!spm_) tokens(begin, first_);
        sentinel(fim_.suffix);
        tokens(second_, {body_, -1});
        sentinel(fim_.middle);
        if (spm_) tokens(begin, first_);
        tokens(first_, second_);
        if (fim_.end >= 0) sentinel(fim_.end);
        if (ends_) runs_.push_back({begin_ + body_, 1, -1});
        weigh_sentinels(from);
    }

    // Returns the drawn transformation.
    FimDraw draw(std::int64_t segment, std::int64_t document) const {
        return {segment, document, spm_, position(low_), position(high_)};
    }

  private:
    bool by_character() const { return !fim_.cuts.first_cut.empty(); }

    std::pair<Place, Place> cuts(std::uint64_t key) const {
        if (by_character()) return std::minmax({character(key, 2), character(key, 3)});
        const auto last = static_cast<double>(body_ + 1);
        const auto token = [&](std::uint64_t k) {
            return Place{static_cast<std::int64_t>(random_unit(key, k) * last), 0};
        };
        return std::minmax({token(2), token(3)});
    }

    // Draws a token and a character number below the largest character count of any token, until
    // the token has that character. So most tokens need not be read.
    Place character(std::uint64_t key, std::uint64_t k) const {
        return with_type(shard_.tokens, begin_, [&](const auto* tokens) {
            for (std::uint64_t i = 0; i < kTries; ++i) {
                const std::uint64_t bits = random_bits(key, k + 2 * i);
                const auto [token, fraction] =
                    place_of(bits, static_cast<std::uint64_t>(body_ + 1));
                const std::int64_t c = place_of(fraction, fim_.cuts.most).first;
                if (token == body_) {
                    if (c == 0) return Place{token, c};
                    continue;
                }
                const auto id = static_cast<std::int64_t>(tokens[token]);
                if (c >= characters_of(id)) continue;
                __builtin_prefetch(&fim_.cuts.first_cut[id]);  // for find_cuts
                return Place{token, c};
            }
            return Place{body_, 0};
        });
    }

    std::int64_t characters_of(std::int64_t id) const {
        return id >= 0 && id < ssize(fim_.cuts.characters) ? fim_.cuts.characters[id] : 0;
    }

    // Returns the tokens or characters before a place.
    std::int64_t position(Place place) const {
        if (!by_character()) return place.first;
        std::int64_t characters = place.second;
        for (std::int64_t t = 0; t < place.first; ++t)
            characters += characters_of(token_at(shard_, begin_ + t));
        return characters;
    }

    Cut before(Place place) const {
        const auto [token, c] = place;
        if (!by_character() || token == body_) return {token, -1};
        const CharacterCuts& cuts = fim_.cuts;
        const std::int64_t id = token_at(shard_, begin_ + token);
        const std::int64_t inner = cuts.first_cut[id + 1] - cuts.first_cut[id];
        const std::int64_t at_begin = cuts.characters[id] - inner;  // 0 or 1
        if (c < at_begin) return {token, -1};
        const std::int64_t cut = cuts.first_cut[id] + c - at_begin;
        __builtin_prefetch(&cuts.first_part[2 * cut]);
        return {token, cut};
    }

    Cut allowed(Cut cut) const {
        if (cut.cut < 0 || !fim_.cuts.is_forbidden(cut.cut)) return cut;
        return {cut.token + 1, -1};
    }

    void sentinel(std::int64_t id) { runs_.push_back({-1, 1, id}); }

    // Appends the body between two cuts, which are not inside the same token.
    void tokens(Cut from, Cut to) {
        if (from.cut >= 0) parts(from.token++, 2 * from.cut + 1);
        if (to.token > from.token)
            runs_.push_back({begin_ + from.token, to.token - from.token, -1});
        if (to.cut >= 0) parts(to.token, 2 * to.cut);
    }

    void parts(std::int64_t token, std::int64_t part) {
        const CharacterCuts& cuts = fim_.cuts;
        for (std::int64_t p = cuts.first_part[part]; p < cuts.first_part[part + 1]; ++p)
            runs_.push_back({begin_ + token, 1, cuts.parts[p]});
    }

    // Sets each sentinel's loss weight to that of the next token of the document, or of the last
    // token if none follows.
    void weigh_sentinels(std::int64_t from) {
        std::int64_t at = -1;
        for (std::int64_t r = ssize(runs_) - 1; at < 0; --r)
            if (runs_[r].at >= 0) at = runs_[r].at + runs_[r].length - 1;
        for (std::int64_t r = ssize(runs_) - 1; r >= from; --r) {
            if (runs_[r].at < 0) runs_[r].at = at;
            at = runs_[r].at;
        }
    }

    const Fim& fim_;
    const Shard& shard_;
    std::int64_t begin_;
    std::int64_t body_;
    bool ends_;
    bool spm_;
    Place low_, high_;
    Cut first_{}, second_{};
    std::vector<Run>& runs_;
};

// Prefetches what the draw of a document reads: its last token and, for cuts between characters,
// the tokens of the first draws (perhaps their neighbors, since the end of the body is unknown).
void prefetch_draws(const Fim& fim, const Shard& shard, const Segment& segment, std::uint64_t key) {
    prefetch(shard.tokens, segment.token_begin + segment.length - 1, 1);
    if (fim.cuts.first_cut.empty()) return;
    for (std::uint64_t word = 2; word < 6; ++word) {
        const auto length = static_cast<std::uint64_t>(segment.length);
        const std::int64_t token = place_of(random_bits(key, word), length).first;
        prefetch(shard.tokens, segment.token_begin + token, 1);
    }
}

}  // namespace

void check_fim(const Fim& fim) {
    check(fim.prefix >= 0 && fim.suffix >= 0 && fim.middle >= 0 && fim.prefix != fim.suffix &&
              fim.suffix != fim.middle && fim.middle != fim.prefix,
          "sentinels are ", fim.prefix, ", ", fim.suffix, " and ", fim.middle,
          "; they must be three different tokens");
    check(fim.spm_rate >= 0 && fim.spm_rate <= 1, "spm_rate is ", fim.spm_rate,
          "; it must be from 0 to 1");
    const CharacterCuts& cuts = fim.cuts;
    if (cuts.first_cut.empty()) return;
    const auto ascends_to = [](const std::vector<std::int32_t>& from, std::int64_t end) {
        return !from.empty() && from.front() == 0 && from.back() == end &&
               std::is_sorted(from.begin(), from.end());
    };
    check(ssize(cuts.first_cut) == ssize(cuts.characters) + 1 &&
              ascends_to(cuts.first_part, ssize(cuts.parts)) && ssize(cuts.first_part) % 2 == 1 &&
              ascends_to(cuts.first_cut, ssize(cuts.first_part) / 2),
          "the tables of character cuts do not fit each other");
    for (std::int64_t id = 0; id < ssize(cuts.characters); ++id) {
        const std::int64_t inner = cuts.first_cut[id + 1] - cuts.first_cut[id];
        check(cuts.characters[id] == inner || cuts.characters[id] == inner + 1, "token ", id,
              " has ", cuts.characters[id], " characters and ", inner, " cuts");
    }
    for (const std::int32_t part : cuts.parts) check(part >= 0, "a part is token ", part);
    const auto most = std::max_element(cuts.characters.begin(), cuts.characters.end());
    check(most != cuts.characters.end() && cuts.most == *most, "cuts.most is ", cuts.most,
          "; it must be the largest number of characters of a token");
}

std::uint64_t fim_key(std::uint64_t seed, std::int64_t epoch) {
    return random_bits(random_bits(seed, kPurpose), static_cast<std::uint64_t>(epoch));
}

void read_segments(const Fim* fim, const Shard& shard, SampleRef ref,
                   std::vector<Segment>& segments, std::vector<Run>& runs,
                   std::vector<FimDraw>* draws) {
    segments.clear();
    read_segments(shard, ref, segments);
    if (fim == nullptr || ref.view == nullptr || ref.view->fim_rates.empty()) return;
    const double rate = ref.view->fim_rates[ref.position];
    if (!(rate > 0)) return;
    const std::uint64_t epoch_key = fim_key(ref.view->seed, ref.view->epochs[ref.position]);
    std::vector<std::pair<std::int64_t, std::uint64_t>> drawn;  // (segment, key)
    for (std::int64_t s = 0; s < ssize(segments); ++s) {
        const Segment& segment = segments[s];
        const bool whole = segment.begin == 0 && segment.ends_document;
        if (!whole || segment.length < 2 || segment.length > shard.longest_transformed) continue;
        const std::uint64_t key = random_bits(epoch_key, number_of(shard, segment));
        if (!(random_unit(key, 0) < rate)) continue;
        drawn.emplace_back(s, key);
        prefetch_draws(*fim, shard, segment, key);
    }
    std::vector<Writer> writers;
    writers.reserve(drawn.size());
    for (const auto& [s, key] : drawn) writers.emplace_back(*fim, shard, segments[s], key, runs);
    for (Writer& writer : writers) writer.find_cuts();
    for (std::int64_t i = 0; i < ssize(drawn); ++i) {
        Segment& segment = segments[drawn[i].first];
        segment.runs.begin = ssize(runs);
        writers[i].write();
        segment.runs.end = ssize(runs);
        segment.placed = 0;
        for (auto r = segment.runs.begin; r < segment.runs.end; ++r)
            segment.placed += runs[r].length;
        if (draws == nullptr) continue;
        const auto document = static_cast<std::int64_t>(number_of(shard, segment));
        draws->push_back(writers[i].draw(drawn[i].first, document));
    }
}

std::vector<std::vector<FimDraw>> draw_fim(const Fim* fim, Span<const Shard> shards,
                                           Span<const SampleRef> samples) {
    std::vector<std::vector<FimDraw>> result(samples.size());
    std::vector<Segment> segments;
    std::vector<Run> runs;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        runs.clear();
        read_segments(fim, shards[samples[i].shard], samples[i], segments, runs, &result[i]);
    }
    return result;
}

}  // namespace megapack

#include "core/gather/fim.hpp"

#include <algorithm>
#include <tuple>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

constexpr std::uint64_t kPurpose = 6;  // of the seed's numbers

// In front of a token of the body, or (cut >= 0) inside of it.
struct Cut {
    std::int64_t token;
    std::int64_t cut;
};

std::int64_t place(std::uint64_t key, std::uint64_t k, std::int64_t last) {
    return static_cast<std::int64_t>(random_unit(key, k) * static_cast<double>(last + 1));
}

std::int64_t token_at(const Shard& shard, std::int64_t at) {
    return with_type(shard.tokens, at, [](const auto* t) { return static_cast<std::int64_t>(*t); });
}

// The characters of a document, found without a look at most of its tokens twice.
class Characters {
  public:
    Characters(const CharacterCuts& cuts, const Shard& shard, std::int64_t at, std::int64_t count)
        : cuts_(cuts), shard_(shard), at_(at), count_(count) {
        const auto ids = static_cast<std::uint64_t>(cuts.characters.size());
        const std::uint16_t* characters = cuts.characters.data();
        sums_.reserve(count / kBlock + 1);
        with_type(shard.tokens, at, [&](const auto* tokens) {
            for (std::int64_t begin = 0; begin < count; begin += kBlock) {
                const std::int64_t end = std::min(begin + kBlock, count);
                std::int64_t sum = 0;
                for (std::int64_t i = begin; i < end; ++i) {
                    const auto id = static_cast<std::uint64_t>(tokens[i]);
                    sum += id < ids ? characters[id] : 0;
                }
                sums_.push_back(sum);
                total_ += sum;
            }
        });
    }

    std::int64_t total() const { return total_; }

    // Where character c begins; behind the last token for c = total().
    Cut find(std::int64_t c) const {
        if (c == total_) return {count_, -1};
        std::int64_t block = 0;
        for (; c >= sums_[block]; ++block) c -= sums_[block];
        std::int64_t token = block * kBlock;
        std::int64_t id = token_at(shard_, at_ + token);
        for (; c >= characters_of(id); id = token_at(shard_, at_ + ++token)) {
            c -= characters_of(id);
        }
        const std::int64_t inner = cuts_.first_cut[id + 1] - cuts_.first_cut[id];
        const std::int64_t at_begin = cuts_.characters[id] - inner;  // 0 or 1
        return {token, c < at_begin ? -1 : cuts_.first_cut[id] + c - at_begin};
    }

  private:
    static constexpr std::int64_t kBlock = 256;

    std::int64_t characters_of(std::int64_t id) const {
        return id >= 0 && id < ssize(cuts_.characters) ? cuts_.characters[id] : 0;
    }

    const CharacterCuts& cuts_;
    const Shard& shard_;
    std::int64_t at_;
    std::int64_t count_;
    std::int64_t total_ = 0;
    std::vector<std::int64_t> sums_;
};

// Transforms one document.
class Writer {
  public:
    Writer(const Fim& fim, const Shard& shard, const Segment& segment, std::vector<Run>& runs)
        : fim_(fim), shard_(shard), begin_(segment.token_begin), runs_(runs) {
        const std::int64_t last = begin_ + segment.length - 1;
        ends_ = fim.eod >= 0 && token_at(shard, last) == fim.eod;
        body_ = segment.length - (ends_ ? 1 : 0);
    }

    FimDraw write(std::uint64_t key) {
        FimDraw draw{0, 0, random_unit(key, 1) < fim_.spm_rate, 0, 0};
        const auto [first, second] = cuts(key, draw);
        const std::int64_t from = ssize(runs_);
        const Cut begin{0, -1};
        sentinel(fim_.prefix);
        if (!draw.spm) tokens(begin, first);
        sentinel(fim_.suffix);
        tokens(second, {body_, -1});
        sentinel(fim_.middle);
        if (draw.spm) tokens(begin, first);
        tokens(first, second);
        if (fim_.end >= 0) sentinel(fim_.end);
        if (ends_) runs_.push_back({begin_ + body_, 1, -1});
        weigh_sentinels(from);
        return draw;
    }

  private:
    std::pair<Cut, Cut> cuts(std::uint64_t key, FimDraw& draw) const {
        const auto sorted = [&](std::int64_t last) {
            std::tie(draw.first, draw.second) =
                std::minmax({place(key, 2, last), place(key, 3, last)});
        };
        if (fim_.cuts.first_cut.empty()) {
            sorted(body_);
            return {{draw.first, -1}, {draw.second, -1}};
        }
        const Characters characters(fim_.cuts, shard_, begin_, body_);
        sorted(characters.total());
        const Cut first = characters.find(draw.first);
        Cut second = characters.find(draw.second);
        if (first.cut >= 0 && second.cut >= 0 && first.token == second.token) {
            second = {second.token + 1, -1};
        }
        return {allowed(first), allowed(second)};
    }

    Cut allowed(Cut cut) const {
        if (cut.cut < 0 || !fim_.cuts.is_forbidden(cut.cut)) return cut;
        return {cut.token + 1, -1};
    }

    void sentinel(std::int64_t id) { runs_.push_back({-1, 1, id}); }

    // Of the body what stands between two cuts, which are not inside of one token.
    void tokens(Cut from, Cut to) {
        if (from.cut >= 0) parts(from.token++, 2 * from.cut + 1);
        if (to.token > from.token) {
            runs_.push_back({begin_ + from.token, to.token - from.token, -1});
        }
        if (to.cut >= 0) parts(to.token, 2 * to.cut);
    }

    void parts(std::int64_t token, std::int64_t part) {
        const CharacterCuts& cuts = fim_.cuts;
        for (std::int64_t p = cuts.first_part[part]; p < cuts.first_part[part + 1]; ++p) {
            runs_.push_back({begin_ + token, 1, cuts.parts[p]});
        }
    }

    // Each weighs as the token of the document that follows it, or the last one.
    void weigh_sentinels(std::int64_t from) {
        std::int64_t at = -1;
        for (std::int64_t r = ssize(runs_) - 1; at < 0; --r) {
            if (runs_[r].at >= 0) at = runs_[r].at + runs_[r].length - 1;
        }
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
    std::vector<Run>& runs_;
};

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
    const auto ascends_to = [](const std::vector<std::int64_t>& from, std::int64_t end) {
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
    for (const std::int64_t part : cuts.parts) check(part >= 0, "a part is token ", part);
}

void transform(const Fim* fim, const Shard& shard, SampleRef ref, std::vector<Segment>& segments,
               std::vector<Run>& runs, std::vector<FimDraw>* draws) {
    if (fim == nullptr || !(ref.fim_rate > 0)) return;
    const auto epoch = static_cast<std::uint64_t>(ref.epoch);
    const std::uint64_t of_epoch = random_bits(random_bits(fim->seed, kPurpose), epoch);
    for (std::int64_t s = 0; s < ssize(segments); ++s) {
        Segment& segment = segments[s];
        const bool whole = segment.begin == 0 && segment.ends_document;
        if (!whole || segment.length < 2 || segment.length > shard.fim_longest) continue;
        const std::int64_t document = shard.first_document + segment.document;
        const std::uint64_t key = random_bits(of_epoch, static_cast<std::uint64_t>(document));
        if (!(random_unit(key, 0) < ref.fim_rate)) continue;
        segment.runs.begin = ssize(runs);
        FimDraw draw = Writer(*fim, shard, segment, runs).write(key);
        segment.runs.end = ssize(runs);
        segment.placed = 0;
        for (auto r = segment.runs.begin; r < segment.runs.end; ++r) {
            segment.placed += runs[r].length;
        }
        if (draws == nullptr) continue;
        draw.segment = s;
        draw.document = document;
        draws->push_back(draw);
    }
}

std::vector<std::vector<FimDraw>> draw_fim(const Fim* fim, Span<const Shard> shards,
                                           Span<const SampleRef> samples) {
    std::vector<std::vector<FimDraw>> result(samples.size());
    std::vector<Segment> segments;
    std::vector<Run> runs;
    for (std::int64_t i = 0; i < samples.size(); ++i) {
        const Shard& shard = shards[samples[i].shard];
        segments.clear();
        runs.clear();
        read_segments(shard, samples[i], segments);
        transform(fim, shard, samples[i], segments, runs, &result[i]);
    }
    return result;
}

}  // namespace megapack

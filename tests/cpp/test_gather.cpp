// For any content of an index or .idx, the gather throws or is right; it never leaves its arrays.
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <random>

#include "core/gather/fill.hpp"
#include "core/gather/read_ahead.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

#define REQUIRE(condition) require(condition, "line " + std::to_string(__LINE__) + ": " #condition)

// An .idx of one sequence per document.
std::vector<std::uint8_t> make_idx(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int64_t> pointers, documents{0};
    std::int64_t pointer = 0;
    for (const std::int32_t length : lengths) {
        pointers.push_back(pointer);
        pointer += 2 * length;
        documents.push_back(ssize(documents));
    }
    return make_index(lengths, pointers, documents);
}

// Arrays on the heap without spare capacity, so that AddressSanitizer finds every access outside.
struct Corpus {
    std::vector<std::int32_t> lengths{5, 1, 9, 3};
    std::vector<std::uint8_t> idx = make_idx(lengths);
    std::vector<std::uint16_t> tokens;
    std::vector<std::int64_t> sample_segment_offsets{0, 2, 3, 5};
    std::vector<std::int32_t> document{0, 1, 2, 2, 3};
    std::vector<std::int32_t> begin{0, 0, 0, 6, 0};
    std::vector<std::int32_t> length{5, 1, 6, 3, 3};

    Corpus() {
        for (int i = 0; i < 18; ++i) tokens.push_back(static_cast<std::uint16_t>(100 + i));
        tokens.shrink_to_fit();
        idx.shrink_to_fit();
    }

    Shard shard() const {
        Shard shard{IndexView(idx, "test.idx")};
        shard.tokens = {tokens.data(), static_cast<std::int64_t>(tokens.size()),
                        TokenType::kUint16};
        shard.samples.sample_segment_offsets = {sample_segment_offsets.data(), 4, true};
        shard.samples.segment_document = {document.data(), 5, false};
        shard.samples.segment_begin = {begin.data(), 5, false};
        shard.samples.segment_length = {length.data(), 5, false};
        // Two columns whose rows are the tokens themselves.
        const auto* rows = reinterpret_cast<const std::uint8_t*>(tokens.data());
        shard.columns.assign(2, {rows, 2 * ssize(tokens), 2});
        check_shard(shard);
        return shard;
    }
};

// Columns of the token, of the target, and one that the shard lacks.
const std::vector<CarriedColumn> kColumns{
    {{0xff, 0xff}, false}, {{0xff, 0xff}, true}, {{1, 2, 3}, true}};

struct Rows {
    explicit Rows(std::int64_t num_tokens)
        : of_token(2 * num_tokens), of_target(2 * num_tokens), missing(3 * num_tokens) {}

    std::vector<Span<std::uint8_t>> spans() { return {of_token, of_target, missing}; }

    std::vector<std::uint8_t> of_token, of_target, missing;
};

// Tokens of the corpus are from 100 on, inserted ones up to 7: these and places without a token or
// label have the fill row.
void check_columns(const Rows& rows, const std::vector<std::int64_t>& tokens,
                   const std::vector<std::int64_t>& labels) {
    const auto are_rows = [](const std::vector<std::uint8_t>& column, const auto& values) {
        for (std::size_t i = 0; i < values.size(); ++i)
            if (column[2 * i] + 256 * column[2 * i + 1] != (values[i] > 7 ? values[i] : 0xffff))
                return false;
        return true;
    };
    REQUIRE(are_rows(rows.of_token, tokens) && are_rows(rows.of_target, labels));
    for (std::size_t i = 0; i < rows.missing.size(); ++i) REQUIRE(rows.missing[i] == i % 3 + 1);
}

// One shard of three samples; ids are sample numbers.
const std::vector<std::int64_t> kFirstIds{0, 3}, kShards{0}, kFirstSamples{0};
const SampleRuns kRuns{kFirstIds, kShards, kFirstSamples};

struct Batch {
    std::vector<std::int64_t> tokens, labels, positions;
    std::vector<float> mask;
    GatherPlan plan;
};

Batch gather(const Shard& shard, const std::vector<std::int64_t>& ids, GatherShape shape,
             GatherOptions options) {
    options.columns = kColumns;
    const std::vector<Shard> shards{shard};
    const std::vector<SampleRef> refs = locate_samples(kRuns, ids);
    Batch batch{{}, {}, {}, {}, plan_gather(shards, refs, shape, options)};
    const auto size = static_cast<std::size_t>(shape.num_tokens());
    batch.tokens.assign(size, -7);
    batch.labels.assign(size, -7);
    batch.positions.assign(size, -7);
    batch.mask.assign(size, -7.0F);
    Rows rows(shape.num_tokens());
    fill_gather(batch.plan, options,
                {batch.tokens, batch.labels, batch.mask, batch.positions, rows.spans()});
    check_columns(rows, batch.tokens, batch.labels);
    REQUIRE(count_labels(shards, refs, options).size() == ids.size());
    return batch;
}

void check_is_complete(const Batch& batch) {
    std::int64_t room = 0;
    for (const AttentionSegment& segment : batch.plan.segments) room += segment.room;
    REQUIRE(room == batch.plan.shape.num_tokens());
    for (const std::int64_t position : batch.positions) REQUIRE(position >= 0);
    for (const float mask : batch.mask) REQUIRE(mask == 0.0F || mask == 1.0F);
}

// Sums of loss weights are exact, from the smallest to the largest float16.
void test_weights() {
    const Corpus corpus;
    const std::vector<std::uint16_t> halves{0x3c00, 0x3800, 1,      0x7bff, 0, 0, 0x0400, 0, 0,
                                            0,      0,      0x4000, 0,      0, 0, 0,      0, 0};
    Shard shard = corpus.shard();
    shard.weights = {halves.data(), 18, TokenType::kUint16};
    check_shard(shard);
    const std::vector<Shard> shards{shard};
    const auto refs = locate_samples(kRuns, std::vector<std::int64_t>{0, 1});
    const auto totals = count_labels(shards, refs, {});
    REQUIRE(totals[0].labels == 4 && totals[0].weight == 0.5 + 0x1p-24 + 65504);
    REQUIRE(totals[0].sequences == 1 && totals[1].weight == 2 && totals[1].sequences == 1);
    shard.weights.size = 17;
    REQUIRE(refuses<FormatError>([&] { check_shard(shard); }));
}

// Ids 0 to 119 with random characters, cuts and parts, some of them forbidden.
CharacterCuts random_cuts(std::mt19937_64& random) {
    CharacterCuts cuts;
    cuts.first_cut.push_back(0);
    cuts.first_part.push_back(0);
    for (int id = 0; id < 120; ++id) {
        const auto inner = static_cast<int>(random() % 4);
        cuts.characters.push_back(static_cast<std::uint16_t>(inner + random() % 2));
        cuts.first_cut.push_back(cuts.first_cut.back() + inner);
        for (int c = 0; c < inner; ++c) {
            const bool forbidden = random() % 3 == 0;
            for (int side = 0; side < 2; ++side) {
                for (auto n = forbidden ? 0 : 1 + random() % 2; n > 0; --n) cuts.parts.push_back(7);
                cuts.first_part.push_back(static_cast<std::int32_t>(ssize(cuts.parts)));
            }
        }
    }
    cuts.parts.shrink_to_fit();
    cuts.most = *std::max_element(cuts.characters.begin(), cuts.characters.end());
    return cuts;
}

// Documents 0 and 3 are whole and have room: all their tokens are in the batch, between sentinels,
// and counted labels equal filled ones.
void test_fim() {
    Corpus corpus;
    std::mt19937_64 random(2);
    int inner = 0;
    for (int round = 0; round < 2000; ++round) {
        Fim fim{1, 2, 3, round % 2 ? 4 : -1, round % 3 ? 117 : -1, 0.5, {}};
        if (round % 4 > 1) fim.cuts = random_cuts(random);
        check_fim(fim);
        Shard shard = corpus.shard();
        shard.longest_transformed = 5;
        const std::vector<std::uint16_t> halves(18, static_cast<std::uint16_t>(0x3c00 + round));
        if (round % 5 == 0) shard.weights = {halves.data(), 18, TokenType::kUint16};
        check_shard(shard);
        const std::vector<Shard> shards{shard};
        const std::vector<std::int64_t> epochs(3, 0);
        const std::vector<double> rates(3, 1.0);
        StepView view;
        view.epochs = epochs, view.fim_rates = rates, view.seed = random();
        const auto refs = locate_samples(kRuns, std::vector<std::int64_t>{0, 1, 2}, &view);
        GatherOptions options;
        options.transform = &fim;
        options.columns = kColumns;
        options.loss = round % 7 ? Loss::kTokenMean : Loss::kSequenceMean;
        options.label_boundary = round % 2 ? Extent::kSample : Extent::kDocument;
        const GatherShape shape{1, 72, 24};
        const GatherPlan plan = plan_gather(shards, refs, shape, options);
        std::vector<std::int64_t> tokens(72), labels(72), positions(72);
        std::vector<float> mask(72);
        Rows rows(72);
        fill_gather(plan, options, {tokens, labels, mask, positions, rows.spans()});
        check_columns(rows, tokens, labels);
        std::int64_t counted = 0;
        for (const auto& total : count_labels(shards, refs, options)) counted += total.labels;
        REQUIRE(counted == ssize(labels) - std::count(labels.begin(), labels.end(), -100));
        REQUIRE(tokens[0] == 1 && std::count(tokens.begin(), tokens.end(), 3) == 2);
        const auto kept = std::count_if(tokens.begin(), tokens.end(), [](auto t) { return t > 7; });
        inner += kept < 18;
        REQUIRE(kept >= 18 - 4 && kept <= 18);
        REQUIRE(ssize(draw_fim(&fim, shards, refs)[2]) == 1);
    }
    REQUIRE(inner > 100);
    const Fim same{1, 2, 1};
    REQUIRE(refuses([&] { check_fim(same); }));
    Fim inconsistent{1, 2, 3};
    inconsistent.cuts = random_cuts(random);
    inconsistent.cuts.first_part.back() += 1;
    REQUIRE(refuses([&] { check_fim(inconsistent); }));
}

// Readahead requests whole pages, each once for any number of segments in it.
void test_read_ahead() {
    const Corpus corpus;
    const std::vector<Shard> shards{corpus.shard()};
    const std::vector<std::int64_t> ids{2, 0, 1, 0}, none;
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t bytes = read_ahead_samples(shards, locate_samples(kRuns, ids));
    REQUIRE(bytes == page || bytes == 2 * page);
    REQUIRE(read_ahead_samples(shards, locate_samples(kRuns, none)) == 0);
    const std::vector<SampleRef> missing{{0, 3}};
    REQUIRE(refuses<std::out_of_range>([&] { read_ahead_samples(shards, missing); }));
}

// A sample with excluded documents equals the sample without their segments.
void test_excluded_documents() {
    const Corpus corpus;
    const std::vector<std::int64_t> documents{1, 3}, lists{2, 1};
    Shard shard = corpus.shard();
    shard.excluded = documents;
    shard.excluded_by = lists;
    check_shard(shard);
    const std::vector<Shard> shards{shard};
    const auto lengths = [&](std::int64_t id, std::int64_t num_lists) {
        const std::vector<std::int64_t> ids{id};
        StepView view;
        view.num_lists = num_lists;
        const auto refs = locate_samples(kRuns, ids, &view);
        return cumulative_lengths(plan_gather(shards, refs, {1, 7, 7}, {}), false, false, 0);
    };
    using Bounds = std::vector<std::int32_t>;
    REQUIRE(lengths(0, 0) == (Bounds{0, 5, 6, 7}) && lengths(0, 1) == lengths(0, 0));
    REQUIRE(lengths(0, 2) == (Bounds{0, 5, 7}));
    REQUIRE(lengths(2, 0) == (Bounds{0, 3, 6, 7}) && lengths(2, 1) == (Bounds{0, 3, 7}));
}

// Ids alternate between two shards. The first one is not open, because nothing of it is read.
void test_shards() {
    const Corpus corpus;
    std::vector<Shard> shards(2);
    shards[1] = corpus.shard();
    shards[1].source = 7;
    const std::vector<std::int64_t> first_ids{0, 5, 6, 6, 8}, owner{0, 1, 0, 1}, from{0, 0, 5, 1};
    const SampleRuns runs{first_ids, owner, from};
    check_runs(runs, 2);
    const std::vector<std::int64_t> second{7, 5}, both{4, 5};
    const auto refs = locate_samples(runs, second);
    REQUIRE(refs[0].shard == 1 && refs[0].sample == 2 && refs[1].sample == 0);
    REQUIRE(not_open(shards, refs).empty());
    const auto closed = locate_samples(runs, both);
    REQUIRE(not_open(shards, closed) == (std::vector<std::int64_t>{0}));
    const GatherPlan plan = plan_gather(shards, refs, {1, 14, 7}, {});
    REQUIRE(plan.sources() == (std::vector<std::int32_t>{7, 7, -1, 7, 7, -1}));
    const GatherShape shape{1, 14, 7};
    REQUIRE(refuses<std::out_of_range>([&] { plan_gather(shards, closed, shape, {}); }));
    const std::vector<std::int64_t> descending{0, 5, 4, 6, 8};
    const std::vector<SampleRuns> wrong{{descending, owner, from}, {first_ids, from, from}};
    for (const SampleRuns& bad : wrong) REQUIRE(refuses([&] { check_runs(bad, 2); }));
}

// Random numbers in an index: most are refused, and no access is outside an array.
void test_damaged_arrays() {
    std::mt19937_64 random(1);
    const std::int64_t values[] = {-1, 0,  1,  2,  3,       4,          5,
                                   9,  17, 18, 19, 1 << 20, 2147483647, -2147483648LL};
    int refused = 0;
    int accepted = 0;
    for (int round = 0; round < 20000; ++round) {
        Corpus corpus;
        for (int damage = 0; damage < 2; ++damage) {
            const std::int64_t value = values[random() % std::size(values)];
            const auto narrow = static_cast<std::int32_t>(value);
            const auto at = static_cast<std::size_t>(random() % 5);
            const std::size_t where = 34 + random() % (corpus.idx.size() - 34);
            const auto what = random() % 5;
            if (what == 0) corpus.document[at] = narrow;
            if (what == 1) corpus.begin[at] = narrow;
            if (what == 2) corpus.length[at] = narrow;
            if (what == 3)
                corpus.sample_segment_offsets[at % 4] = value * (random() % 2 ? 1 : 1LL << 31);
            if (what == 4) corpus.idx[where] = static_cast<std::uint8_t>(random());
        }
        GatherOptions options;
        options.alignment = 1 + static_cast<std::int64_t>(random() % 3);
        options.label_boundary = random() % 2 ? Extent::kSample : Extent::kDocument;
        try {
            check_is_complete(gather(corpus.shard(), {0, 1, 2}, {3, 18, 18}, options));
            ++accepted;
        } catch (const std::exception&) {
            ++refused;
        }
    }
    REQUIRE(refused > 5000 && accepted > 500);
}

void test_refused_shapes() {
    const Corpus corpus;
    Shard shard = corpus.shard();
    shard.columns[1].num_bytes -= 1;
    REQUIRE(refuses<FormatError>([&] { check_shard(shard); }));
    const GatherOptions options{{}, {}, {}, {}, 1, 0, nullptr, kColumns};
    const std::vector<Shard> shards{corpus.shard()};
    const auto refs = locate_samples(kRuns, std::vector<std::int64_t>{0});
    const GatherPlan plan = plan_gather(shards, refs, {1, 8, 8}, options);
    std::vector<std::int64_t> numbers(8);
    std::vector<float> mask(8);
    Rows few(7);
    REQUIRE(refuses(
        [&] { fill_gather(plan, options, {numbers, numbers, mask, numbers, few.spans()}); }));
    REQUIRE(refuses([&] { fill_gather(plan, options, {numbers, numbers, mask, numbers}); }));
    const GatherShape shapes[] = {
        {0, 8, 8}, {1, 8, 0}, {1, 4, 8}, {1 << 20, 1 << 20, 8}, {1, 8, 8}};
    for (const GatherShape& shape : shapes)
        REQUIRE(refuses([&] { gather(corpus.shard(), {0, 1}, shape, {}); }));
    for (const std::int64_t id : {-1LL, 3LL, 1LL << 62})
        REQUIRE(refuses<std::out_of_range>([&] { gather(corpus.shard(), {id}, {1, 8, 8}, {}); }));
}

}  // namespace

int main() {
    return pass({test_weights, test_fim, test_read_ahead, test_excluded_documents, test_shards,
                 test_damaged_arrays, test_refused_shapes});
}

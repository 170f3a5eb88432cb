// gather: a Gatherer holds the mapped arrays of its shards. Each call checks its arguments,
// releases the GIL and writes a whole micro batch into the caller's buffers.
//
//     gatherer.gather(ids, StepView(...), BatchShape(1, 16, 16, False, 0), tokens, labels, ...)
//         ->  (cu_seqlens, cu_seqlens_padded or None, sources, max_seqlen, trees or None)
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/checked_array.hpp"
#include "core/base/buffer.hpp"
#include "core/gather/fill.hpp"
#include "core/gather/read_ahead.hpp"

namespace megapack {
namespace {

TokenType token_type(const py::dtype& dtype) {
    static const std::map<std::string, TokenType> types{
        {"u1", TokenType::kUint8},  {"i1", TokenType::kInt8},  {"i2", TokenType::kInt16},
        {"u2", TokenType::kUint16}, {"i4", TokenType::kInt32}, {"i8", TokenType::kInt64}};
    check(dtype.byteorder() != '>', "tokens are big-endian; .bin files are little-endian");
    const auto type = types.find(dtype.kind() + std::to_string(dtype.itemsize()));
    check(type != types.end(), "tokens have dtype ", NameOf{dtype},
          "; a gather reads 8 to 64 bit integers");
    return type->second;
}

TokenArray token_array(const py::array& array, const char* name) {
    const py::dtype dtype = array.dtype();
    check(array.ndim() == 1 && (array.size() < 2 || array.strides(0) == dtype.itemsize()), name,
          " must be contiguous and have one dimension");
    const auto address = reinterpret_cast<std::uintptr_t>(array.data());
    check(address % static_cast<std::uintptr_t>(dtype.itemsize()) == 0, name, " is not aligned");
    return {array.data(), array.size(), token_type(dtype)};
}

Extent extent(const std::string& value, const char* name) {
    return choice<Extent>(value, name,
                          {{"document", Extent::kDocument},
                           {"group", Extent::kGroup},
                           {"sample", Extent::kSample},
                           {"tree", Extent::kTree}});
}

// "longalign" is the sequence mean in another unit; factors of samples include the conversion.
Loss loss(const std::string& value) {
    return choice<Loss>(value, "loss",
                        {{"token_mean", Loss::kTokenMean},
                         {"sequence_mean", Loss::kSequenceMean},
                         {"longalign", Loss::kSequenceMean}});
}

// Columns as pairs: whether a position has the row of the token that it predicts, and a fill row.
using Columns = std::vector<std::pair<bool, Array<std::uint8_t>>>;
using ShardColumns = std::vector<std::optional<Array<std::uint8_t>>>;
using ColumnOutputs = std::vector<OutputArray<std::uint8_t>>;
using TreeArrays = std::tuple<AnyArray, AnyArray, AnyArray>;

std::vector<CarriedColumn> carried(const Columns& columns) {
    std::vector<CarriedColumn> result;
    for (const auto& [of_target, fill_row] : columns) {
        const auto fill = view(fill_row, "fill row");
        check(!fill.empty(), "a fill row is empty; it has at least one byte");
        result.push_back({{fill.begin(), fill.end()}, of_target});
    }
    return result;
}

Positions positions(const std::string& value) {
    return choice<Positions>(value, "positions",
                             {{"segment", Positions::kSegment},
                              {"document", Positions::kDocument},
                              {"sample", Positions::kSample}});
}

// Reads bytes [begin, begin + num_bytes) of an array ahead, at most to its end.
void read_ahead_numpy(const AnyArray& object, std::int64_t begin, std::int64_t num_bytes) {
    const py::array array = array_view(object, "array").array;
    const auto size = static_cast<std::int64_t>(array.nbytes());
    check(begin >= 0 && begin <= size && num_bytes >= 0, "begin is ", begin, " and num_bytes ",
          num_bytes, "; the array has ", size, " bytes");
    const Span<const std::uint8_t> bytes(static_cast<const std::uint8_t*>(array.data()), size);
    const py::gil_scoped_release release;
    read_ahead(bytes.subspan(begin, std::min(num_bytes, size - begin)));
}

// Memory lent as arrays. numpy and torch destroy the owner (base) of an array's memory with its
// last view; the owner then returns the memory to the pool.
class MemoryPool {
  public:
    explicit MemoryPool(std::int64_t max_blocks) : returned_(std::make_shared<Returned>()) {
        check(max_blocks >= 0, "max_blocks is ", max_blocks, "; it must not be negative");
        returned_->limit = max_blocks;
    }

    // Returns uint8 (num_bytes,), not cleared.
    py::array_t<std::uint8_t> take(std::int64_t num_bytes) const {
        check(num_bytes > 0, "num_bytes is ", num_bytes, "; it must be positive");
        auto lease = std::make_unique<Lease>(Lease{returned_, returned_->block(num_bytes)});
        const std::uint8_t* memory = lease->block.data();
        const py::capsule owner(lease.get(), [](void* p) {
            const std::unique_ptr<Lease> ended(static_cast<Lease*>(p));
            ended->pool->keep(std::move(ended->block));
        });
        static_cast<void>(lease.release());
        return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(num_bytes), memory, owner);
    }

  private:
    using Block = Buffer<std::uint8_t>;

    struct Returned {
        std::mutex mutex;
        std::vector<Block> blocks;
        std::int64_t limit = 0;

        Block block(std::int64_t size) {
            const std::lock_guard<std::mutex> lock(mutex);
            const auto at = std::find_if(blocks.begin(), blocks.end(),
                                         [&](const Block& b) { return b.size() == size; });
            if (at == blocks.end()) return Block(size);
            Block block = std::move(*at);
            blocks.erase(at);
            return block;
        }
        void keep(Block&& block) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (ssize(blocks) == limit) blocks.erase(blocks.begin());  // the longest unused
            if (ssize(blocks) < limit) blocks.push_back(std::move(block));
        }
    };
    struct Lease {
        std::shared_ptr<Returned> pool;
        Block block;
    };

    std::shared_ptr<Returned> returned_;
};

// Narrows numbers to 32 bits: the gather looks them up at random, so they should fit in a cache.
std::vector<std::int32_t> narrowed(const Array<std::int64_t>& array, const char* name) {
    std::vector<std::int32_t> result;
    for (const std::int64_t value : view(array, name)) {
        result.push_back(static_cast<std::int32_t>(value));
        check(result.back() == value, name, " has ", value, "; the limit is 2^31 - 1");
    }
    return result;
}

using Table = Array<std::int64_t>;
using Numbers32 = py::array_t<std::int32_t>;
using Numbers64 = py::array_t<std::int64_t>;

// `tables` are the arrays of CharacterCuts: characters (ids,), first_cut (ids + 1,), first_part
// (2 cuts + 1,), parts.
std::shared_ptr<Fim> make_fim(std::int64_t prefix, std::int64_t suffix, std::int64_t middle,
                              std::int64_t end, std::int64_t eod, double spm_rate,
                              const std::optional<std::tuple<Table, Table, Table, Table>>& tables) {
    auto fim = std::make_shared<Fim>(Fim{prefix, suffix, middle, end, eod, spm_rate});
    if (tables) {
        const auto& [characters, first_cut, first_part, parts] = *tables;
        for (const std::int64_t count : view(characters, "characters")) {
            check(count >= 0 && count <= std::numeric_limits<std::uint16_t>::max(), "a token has ",
                  count, " characters; the limit is 65535");
            fim->cuts.characters.push_back(static_cast<std::uint16_t>(count));
            fim->cuts.most = std::max(fim->cuts.most, static_cast<std::uint64_t>(count));
        }
        fim->cuts.first_cut = narrowed(first_cut, "first_cut");
        fim->cuts.first_part = narrowed(first_part, "first_part");
        fim->cuts.parts = narrowed(parts, "parts");
    }
    check_fim(*fim);
    return fim;
}

// A StepView and the arrays that it points to.
struct HeldView {
    HeldView(std::int64_t num_lists, const std::optional<Array<float>>& loss_weight,
             const std::optional<Array<std::int64_t>>& epochs,
             const std::optional<Array<double>>& fim_rates, std::uint64_t seed) {
        view.num_lists = num_lists;
        view.seed = seed;
        if (loss_weight) view.loss_weight = megapack::view(*loss_weight, "loss_weight");
        if (epochs) view.epochs = megapack::view(*epochs, "epochs");
        if (fim_rates) view.fim_rates = megapack::view(*fim_rates, "fim_rates");
        kept = py::make_tuple(loss_weight, epochs, fim_rates);
    }

    StepView view;
    py::tuple kept;
};

// Shape of a micro batch and of its cu_seqlens.
struct BatchShape {
    GatherShape rows;
    bool per_row;                 // a list of cu_seqlens per row, or one for all rows
    std::int64_t num_cu_seqlens;  // entries of a list; 0: as many as the longest needs
};

class Gatherer {
  public:
    Gatherer(const Array<std::int64_t>& first_ids, const Array<std::int64_t>& shards,
             const Array<std::int64_t>& first_samples, const Array<std::int64_t>& sources,
             const std::string& positions_name, const std::string& attention,
             const std::string& label_boundary, const std::string& loss_name,
             std::int64_t alignment, std::int64_t pad_token, std::shared_ptr<Fim> fim,
             const Columns& columns)
        : fim_(std::move(fim)),
          options_{positions(positions_name),
                   extent(attention, "attention"),
                   extent(label_boundary, "label_boundary"),
                   loss(loss_name),
                   alignment,
                   pad_token,
                   fim_.get(),
                   carried(columns)},
          runs_{view(first_ids, "first_ids"), view(shards, "shards"),
                view(first_samples, "first_samples")},
          shards_(sources.size()),
          num_closed_(sources.size()) {
        const auto numbers = view(sources, "sources");
        check_runs(runs_, numbers.size());
        for (std::int64_t shard = 0; shard < numbers.size(); ++shard)
            shards_[shard].source = numbers[shard];
        kept_.push_back(py::make_tuple(first_ids, shards, first_samples));
    }

    // Opens a shard unless it is open; after that, other threads may read it. excluded: documents,
    // ascending; excluded_by: number (from 1) of the first exclusion list of each; fim_longest:
    // documents of 2 to fim_longest tokens have room for sentinels; -1: no document has; columns:
    // bytes of every carried column, None for one that the shard lacks; trees: segment_parent,
    // segment_end_offsets and end_document.
    void open(std::int64_t shard, const py::array& tokens, const std::optional<py::array>& labels,
              const std::optional<py::array>& weights, const AnyArray& index_bytes,
              const py::str& index_name, const AnyArray& sample_segment_offsets,
              const AnyArray& segment_document, const AnyArray& segment_begin,
              const AnyArray& segment_length, const Array<std::int64_t>& excluded,
              const Array<std::int64_t>& excluded_by,
              const std::optional<Array<std::uint8_t>>& segment_joined, std::int64_t first_document,
              std::int64_t fim_longest, const ShardColumns& columns,
              const std::optional<TreeArrays>& trees) {
        check(shard >= 0 && shard < ssize(shards_), "shard ", shard, " does not exist; there are ",
              shards_.size(), " shards");
        Shard& place = shards_[shard];
        if (place.is_open()) return;
        Shard opened(index_view(index_bytes, index_name));
        opened.tokens = token_array(tokens, "tokens");
        if (labels) opened.labels = token_array(*labels, "labels");
        if (weights) opened.weights = token_array(*weights, "weights");
        check(columns.size() == options_.columns.size(), "shard ", shard, " has ", columns.size(),
              " columns, and batches have ", options_.columns.size());
        for (std::size_t c = 0; c < columns.size(); ++c) {
            opened.columns.push_back({nullptr, 0, options_.columns[c].row_bytes()});
            if (!columns[c]) continue;
            const auto bytes = view(*columns[c], "columns");
            opened.columns[c].data = bytes.data();
            opened.columns[c].num_bytes = bytes.size();
        }
        opened.samples.sample_segment_offsets =
            integers(sample_segment_offsets, "sample_segment_offsets");
        opened.samples.segment_document = integers(segment_document, "segment_document");
        opened.samples.segment_begin = integers(segment_begin, "segment_begin");
        opened.samples.segment_length = integers(segment_length, "segment_length");
        opened.excluded = view(excluded, "excluded");
        opened.excluded_by = view(excluded_by, "excluded_by");
        if (segment_joined) opened.joined = view(*segment_joined, "segment_joined");
        check(trees.has_value() == (options_.attention == Extent::kTree),
              "attention tree needs samples with prefix trees, and they need attention tree");
        if (trees) {
            opened.parents = integers(std::get<0>(*trees), "segment_parent");
            opened.end_offsets = integers(std::get<1>(*trees), "segment_end_offsets");
            opened.end_documents = integers(std::get<2>(*trees), "end_document");
        }
        opened.source = place.source;
        opened.first_document = first_document;
        opened.longest_transformed = fim_longest;
        check_shard(opened);
        place = opened;
        if (readahead_disabled_) megapack::disable_readahead({&place, 1});
        --num_closed_;
        kept_.push_back(py::make_tuple(tokens, labels, weights, index_bytes, sample_segment_offsets,
                                       segment_document, segment_begin, segment_length, excluded,
                                       excluded_by, segment_joined, columns, trees));
    }

    std::int64_t num_closed() const { return num_closed_; }

    // Returns the shards of these samples that are not open.
    Numbers64 closed(const Array<std::int64_t>& sample_ids) const {
        return to_numpy(not_open(shards_, locate_samples(runs_, view(sample_ids, "sample_ids"))));
    }

    // Returns cu_seqlens, the same with padding (or None without alignment), the source of every
    // segment, max_seqlen, and with prefix trees cu_seqlens_k, kv_index and predecessors.
    std::tuple<Numbers32, std::optional<Numbers32>, Numbers32, std::int64_t,
               std::optional<std::tuple<Numbers32, Numbers32, Numbers32>>>
    gather(const Array<std::int64_t>& sample_ids, const HeldView& step_view,
           const BatchShape& shape, OutputArray<std::int64_t>& tokens,
           OutputArray<std::int64_t>& labels, OutputArray<float>& loss_mask,
           OutputArray<std::int64_t>& position_ids, ColumnOutputs& columns) const {
        const auto samples = view(sample_ids, "sample_ids");
        GatherOutput out{mutable_view(tokens, "tokens"), mutable_view(labels, "labels"),
                         mutable_view(loss_mask, "loss_mask"),
                         mutable_view(position_ids, "position_ids")};
        for (auto& column : columns) out.columns.push_back(mutable_view(column, "columns"));
        const bool aligned = options_.alignment > 1;
        const bool in_trees = options_.attention == Extent::kTree;
        std::vector<std::int32_t> cu_seqlens, cu_seqlens_padded, segment_sources;
        TreeKeys keys;
        const std::int64_t max_seqlen = unlocked([&] {
            const auto refs = locate_samples(runs_, samples, &step_view.view);
            const GatherPlan plan = plan_gather(shards_, refs, shape.rows, options_);
            const auto lengths = [&](bool padded) {
                return cumulative_lengths(plan, padded, shape.per_row, shape.num_cu_seqlens);
            };
            cu_seqlens = lengths(false);
            if (aligned) cu_seqlens_padded = lengths(true);
            segment_sources = plan.sources();
            if (in_trees) keys = tree_keys(plan);
            fill_gather(plan, options_, out);
            return plan.max_seqlen();
        });
        std::optional<Numbers32> padded;
        if (aligned) padded = to_numpy(std::move(cu_seqlens_padded));
        std::optional<std::tuple<Numbers32, Numbers32, Numbers32>> trees;
        if (in_trees)
            trees.emplace(to_numpy(std::move(keys.cu_seqlens_k)),
                          to_numpy(std::move(keys.kv_index)),
                          to_numpy(std::move(keys.predecessors)));
        return {to_numpy(std::move(cu_seqlens)), std::move(padded),
                to_numpy(std::move(segment_sources)), max_seqlen, std::move(trees)};
    }

    // Returns, per sample: labels, sum of their weights, sequences with labels.
    std::tuple<Numbers64, py::array_t<double>, Numbers64> count(
        const Array<std::int64_t>& sample_ids, const HeldView& step_view) const {
        const auto samples = view(sample_ids, "sample_ids");
        std::vector<std::int64_t> labels, sequences;
        std::vector<double> weight;
        unlocked([&] {
            const auto refs = locate_samples(runs_, samples, &step_view.view);
            for (const LabelTotals& total : count_labels(shards_, refs, options_)) {
                labels.push_back(total.labels);
                weight.push_back(total.weight);
                sequences.push_back(total.sequences);
            }
        });
        return {to_numpy(std::move(labels)), to_numpy(std::move(weight)),
                to_numpy(std::move(sequences))};
    }

    // Returns, per transformed document: position in sample_ids, segment in the sample, number in
    // the source, 1 for SPM, and the two cuts in tokens or characters.
    py::typing::Tuple<Numbers64, py::ellipsis> fim_draws(const Array<std::int64_t>& sample_ids,
                                                         const HeldView& step_view) const {
        const auto samples = view(sample_ids, "sample_ids");
        std::array<std::vector<std::int64_t>, 6> columns;
        unlocked([&] {
            const auto refs = locate_samples(runs_, samples, &step_view.view);
            const auto draws = draw_fim(fim_.get(), shards_, refs);
            for (std::int64_t i = 0; i < ssize(draws); ++i) {
                for (const FimDraw& draw : draws[i]) {
                    const std::int64_t row[] = {i,        draw.segment, draw.document,
                                                draw.spm, draw.first,   draw.second};
                    for (std::size_t c = 0; c < columns.size(); ++c) columns[c].push_back(row[c]);
                }
            }
        });
        py::tuple result(columns.size());
        for (std::size_t c = 0; c < columns.size(); ++c)
            result[c] = to_numpy(std::move(columns[c]));
        return result;
    }

    // Returns the bytes requested.
    std::int64_t read_ahead(const Array<std::int64_t>& sample_ids) const {
        const auto samples = view(sample_ids, "sample_ids");
        return unlocked(
            [&] { return read_ahead_samples(shards_, locate_samples(runs_, samples)); });
    }

    // Returns shard, begin and end of the token ranges that samples need.
    std::tuple<Numbers64, Numbers64, Numbers64> token_ranges(
        const Array<std::int64_t>& sample_ids) const {
        const auto samples = view(sample_ids, "sample_ids");
        std::vector<std::int64_t> shard, begin, end;
        unlocked([&] {
            for (const TokenRange& range :
                 megapack::token_ranges(shards_, locate_samples(runs_, samples))) {
                shard.push_back(range.shard);
                begin.push_back(range.begin);
                end.push_back(range.end);
            }
        });
        return {to_numpy(std::move(shard)), to_numpy(std::move(begin)), to_numpy(std::move(end))};
    }

    // Returns the segments of samples in order: position of the sample, shard, first token, tokens,
    // and 1 if the document continues after the segment.
    std::tuple<Numbers64, Numbers64, Numbers64, Numbers64, Numbers64> segments(
        const Array<std::int64_t>& sample_ids) const {
        const auto samples = view(sample_ids, "sample_ids");
        std::vector<std::int64_t> position, shard, begin, length, continues;
        unlocked([&] {
            const std::vector<SampleRef> located = locate_samples(runs_, samples);
            std::vector<Segment> segments;
            for (std::size_t i = 0; i < located.size(); ++i) {
                segments.clear();
                read_segments(shards_[located[i].shard], located[i], segments);
                for (const Segment& segment : segments) {
                    position.push_back(static_cast<std::int64_t>(i));
                    shard.push_back(located[i].shard);
                    begin.push_back(segment.token_begin);
                    length.push_back(segment.length);
                    continues.push_back(segment.ends_document ? 0 : 1);
                }
            }
        });
        return {to_numpy(std::move(position)), to_numpy(std::move(shard)),
                to_numpy(std::move(begin)), to_numpy(std::move(length)),
                to_numpy(std::move(continues))};
    }

    // Applies to open shards and to those opened later.
    void disable_readahead() {
        readahead_disabled_ = true;
        megapack::disable_readahead(shards_);
    }

  private:
    std::shared_ptr<Fim> fim_;
    GatherOptions options_;
    SampleRuns runs_;
    std::vector<Shard> shards_;
    std::int64_t num_closed_;
    bool readahead_disabled_ = false;
    std::vector<py::tuple> kept_;  // owners of the arrays that shards_ points to
};

}  // namespace

void register_gather(py::module_& m) {
    m.def("read_ahead", &read_ahead_numpy, py::arg("array"), py::arg("begin"),
          py::arg("num_bytes"));
    py::class_<MemoryPool>(m, "MemoryPool")
        .def(py::init<std::int64_t>(), py::arg("max_blocks"))
        .def("take", &MemoryPool::take, py::arg("num_bytes"));
    py::class_<Fim, std::shared_ptr<Fim>>(m, "Fim").def(
        py::init(&make_fim), py::kw_only(), py::arg("prefix"), py::arg("suffix"), py::arg("middle"),
        py::arg("end") = -1, py::arg("eod") = -1, py::arg("spm_rate"),
        py::arg("tables") = py::none());
    py::class_<HeldView>(m, "StepView")
        .def(py::init<std::int64_t, const std::optional<Array<float>>&,
                      const std::optional<Array<std::int64_t>>&,
                      const std::optional<Array<double>>&, std::uint64_t>(),
             py::arg("num_lists"), py::arg("loss_weight").noconvert(),
             py::arg("epochs").noconvert(), py::arg("fim_rates").noconvert(), py::arg("seed"));
    py::class_<BatchShape>(m, "BatchShape")
        .def(py::init([](std::int64_t num_rows, std::int64_t row_tokens, std::int64_t capacity,
                         bool per_row, std::int64_t num_cu_seqlens) {
                 return BatchShape{{num_rows, row_tokens, capacity}, per_row, num_cu_seqlens};
             }),
             py::arg("num_rows"), py::arg("row_tokens"), py::arg("capacity"), py::arg("per_row"),
             py::arg("num_cu_seqlens"));
    py::class_<Gatherer>(m, "Gatherer")
        .def(py::init<const Array<std::int64_t>&, const Array<std::int64_t>&,
                      const Array<std::int64_t>&, const Array<std::int64_t>&, const std::string&,
                      const std::string&, const std::string&, const std::string&, std::int64_t,
                      std::int64_t, std::shared_ptr<Fim>, const Columns&>(),
             py::kw_only(), py::arg("first_ids").noconvert(), py::arg("shards").noconvert(),
             py::arg("first_samples").noconvert(), py::arg("sources").noconvert(),
             py::arg("positions"), py::arg("attention"), py::arg("label_boundary"), py::arg("loss"),
             py::arg("alignment"), py::arg("pad_token"), py::arg("fim") = py::none(),
             py::arg("columns").noconvert() = Columns())
        .def("open", &Gatherer::open, py::arg("shard"), py::kw_only(), py::arg("tokens"),
             py::arg("labels"), py::arg("weights"), py::arg("index_bytes"), py::arg("index_name"),
             py::arg("sample_segment_offsets"), py::arg("segment_document"),
             py::arg("segment_begin"), py::arg("segment_length"), py::arg("excluded").noconvert(),
             py::arg("excluded_by").noconvert(), py::arg("segment_joined").noconvert() = py::none(),
             py::arg("first_document") = 0, py::arg("fim_longest") = -1,
             py::arg("columns").noconvert() = ShardColumns(), py::arg("trees") = py::none())
        .def_property_readonly("num_closed", &Gatherer::num_closed)
        .def("closed", &Gatherer::closed, py::arg("sample_ids").noconvert())
        .def("gather", &Gatherer::gather, py::arg("sample_ids").noconvert(), py::arg("view"),
             py::arg("shape"), py::arg("tokens").noconvert(), py::arg("labels").noconvert(),
             py::arg("loss_mask").noconvert(), py::arg("position_ids").noconvert(),
             py::arg("columns").noconvert() = ColumnOutputs())
        .def("count_labels", &Gatherer::count, py::arg("sample_ids").noconvert(), py::arg("view"))
        .def("fim_draws", &Gatherer::fim_draws, py::arg("sample_ids").noconvert(), py::arg("view"))
        .def("token_ranges", &Gatherer::token_ranges, py::arg("sample_ids").noconvert())
        .def("segments", &Gatherer::segments, py::arg("sample_ids").noconvert())
        .def("read_ahead", &Gatherer::read_ahead, py::arg("sample_ids").noconvert())
        .def("disable_readahead", &Gatherer::disable_readahead);
}

}  // namespace megapack

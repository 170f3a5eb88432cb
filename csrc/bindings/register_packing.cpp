// packing: document lengths, rules of strategies, packed samples.
//
//     lengths = DocumentLengths(numpy array)
//     pack("next_fit", lengths, {"capacity": 8, "shuffle": False}, Run(seed=0, threads=1))
//         -> {"bucket_capacity": ..., "segment_document": ..., "dropped_tokens": 0, ...}
//
// A new strategy needs one line in `strategies()`, which reads its rules.
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <variant>

#include "bindings/scalars.hpp"
#include "core/packing/bucket_plan.hpp"
#include "core/packing/sort.hpp"

namespace megapack {
namespace {

// ---- Document lengths

// Calls f with the array as a span of int32, int64 or uint64.
template <typename F>
auto with_lengths(const py::array& array, F f) {
    check(array.ndim() == 1 && (array.flags() & py::array::c_style) != 0 && is_aligned(array),
          "lengths must be a contiguous, aligned array of one dimension");
    const py::dtype dtype = array.dtype();
    const char kind = dtype.kind();
    const bool known = (kind == 'i' && (dtype.itemsize() == 4 || dtype.itemsize() == 8)) ||
                       (kind == 'u' && dtype.itemsize() == 8);
    check(known && dtype.byteorder() != '>', "lengths has dtype ", NameOf{dtype},
          "; it must be int32, int64 or uint64");
    const auto as = [&](auto zero) {
        using T = decltype(zero);
        return f(Span<const T>(static_cast<const T*>(array.data()), array.size()));
    };
    if (dtype.itemsize() == 4) return as(std::int32_t{});
    return kind == 'i' ? as(std::int64_t{}) : as(std::uint64_t{});
}

// Document lengths from numpy. The constructor checks them once and does not copy them.
class DocumentLengths {
  public:
    // `array`: int32, int64 or uint64, shape (num_documents,); the caller must not change it while
    // this object exists. Counts documents longer than `capacity`.
    DocumentLengths(const py::array& array, std::int64_t capacity)
        : kept_(array), lengths_(check_array(array, capacity)) {}

    // Calls f with Lengths<std::int32_t> or Lengths<std::int64_t>; returns its result.
    template <typename F>
    auto visit(F f) const {
        return std::visit(f, lengths_);
    }
    std::int64_t size() const {
        return visit([](const auto& lengths) { return lengths.size(); });
    }
    LengthTotals totals() const {
        return visit([](const auto& lengths) { return lengths.totals(); });
    }

  private:
    using Checked = std::variant<Lengths<std::int32_t>, Lengths<std::int64_t>>;

    static Checked check_array(const py::array& array, std::int64_t capacity) {
        return with_lengths(array, [&](auto lengths) -> Checked {
            const py::gil_scoped_release unlocked;
            if constexpr (std::is_same_v<decltype(lengths), Span<const std::uint64_t>>) {
                check_lengths(lengths);  // all of them are below 2^63
                return Lengths<std::int64_t>(
                    {reinterpret_cast<const std::int64_t*>(lengths.data()), lengths.size()},
                    capacity);
            } else {
                return Lengths(lengths, capacity);
            }
        });
    }

    py::array kept_;
    Checked lengths_;
};

// ---- The rules of a strategy

// Rules by name; megapack/packing/strategies.py checked their values.
class Rules {
  public:
    Rules(std::string strategy, const py::dict& values)
        : strategy_(std::move(strategy)), unread_(values.attr("copy")()) {}

    template <typename T>
    T take(const char* name) {
        check(unread_.contains(name), strategy_, " needs ", name);
        return unread_.attr("pop")(name).cast<T>();
    }
    // Sets `value` if the rule is given.
    template <typename T>
    void take(const char* name, T& value) {
        if (unread_.contains(name)) value = take<T>(name);
    }
    std::int64_t integer(const char* name) { return take<std::int64_t>(name); }
    bool flag(const char* name) { return take<bool>(name); }
    std::vector<std::int64_t> integers(const char* name) {
        return take<std::vector<std::int64_t>>(name);
    }
    // Takes a pair (numerator, denominator), because a float cannot hold 0.1 exactly.
    Ratio ratio(const char* name) {
        const auto [numerator, denominator] = take<std::pair<std::int64_t, std::int64_t>>(name);
        return {numerator, denominator};
    }
    template <typename T>
    T choice(const char* name, std::initializer_list<std::pair<const char*, T>> known) {
        return megapack::choice<T>(take<std::string>(name), name, known);
    }
    bool has(const char* name) const { return unread_.contains(name); }

    void check_all_taken() const {
        check(unread_.empty(), strategy_, " has no rule ", std::string(py::repr(unread_)));
    }

  private:
    std::string strategy_;
    py::dict unread_;
};

AtomSize atoms(Rules& rules) {
    return {rules.integer("capacity"), rules.integer("atom_size")};
}

bool drop_last(Rules& rules) {
    return rules.choice<bool>("last", {{"pad", false}, {"drop", true}});
}

SeamlessRules seamless_rules(Rules& rules) {
    SeamlessRules result{
        rules.integer("capacity"), rules.ratio("r_max"),
        rules.choice<Placement>("placement", {{"exact", Placement::kExact},
                                              {"paper", Placement::kPaper},
                                              {"published", Placement::kPublished}})};
    rules.take("extra_capacity", result.extra_capacity);
    if (rules.has("last")) result.drop_last = drop_last(rules);
    return result;
}

BucketRules bucket_rules(Rules& rules) {
    using Pattern = std::tuple<std::int32_t, std::int64_t, decltype(GivenPattern::lengths)>;
    BucketRules result;
    result.capacities = rules.integers("buckets");
    if (rules.has("overflow"))
        result.overflow = rules.choice<Overflow>(
            "overflow",
            {{"pad", Overflow::kPad}, {"head", Overflow::kHead}, {"promote", Overflow::kPromote}});
    if (rules.has("padding_threshold")) result.padding_threshold = rules.ratio("padding_threshold");
    rules.take("pairs", result.pairs);
    rules.take("lookahead", result.lookahead);
    rules.take("shuffle_segments", result.shuffle_segments);
    rules.take("pool_size", result.pool_size);
    rules.take("max_segments", result.max_segments);
    if (rules.has("given"))
        for (auto& [bucket, count, lengths] : rules.take<std::vector<Pattern>>("given"))
            result.given.push_back({bucket, count, std::move(lengths)});
    return result;
}

// The caller's dictionary of rules keeps the array of second sizes alive.
BucketSecondRules bucket_second_rules(Rules& rules) {
    return {bucket_rules(rules), view(rules.take<Array<std::int64_t>>("second"), "second"),
            rules.integers("second_capacities")};
}

// ---- The strategies

// Seed and threads of a core Run, and two options that only the bindings use.
struct PythonRun {
    std::uint64_t seed;
    int threads;
    bool wide_ids;  // use int64 document numbers even if int32 is enough (for tests)
    py::object progress;
};

using Strategy = std::function<py::dict(const DocumentLengths&, Rules&, const PythonRun&)>;

template <typename T>
py::array_t<T> buffer_to_numpy(Buffer<T>& buffer) {
    const py::ssize_t size = buffer.size();
    T* data = buffer.release();
    return py::array_t<T>(size, data, py::capsule(data, [](void* p) { std::free(p); }));
}

template <typename Id, typename Length>
py::dict samples_to_dict(Samples<Id, Length>&& samples) {
    py::dict result;
    result["bucket_capacity"] = to_numpy(std::move(samples.bucket_capacity));
    result["bucket_sample_offsets"] = to_numpy(std::move(samples.bucket_sample_offsets));
    result["sample_segment_offsets"] = buffer_to_numpy(samples.sample_segment_offsets);
    result["segment_document"] = buffer_to_numpy(samples.segment_document);
    result["segment_begin"] = buffer_to_numpy(samples.segment_begin);
    result["segment_length"] = buffer_to_numpy(samples.segment_length);
    result["dropped_tokens"] = samples.dropped_tokens;
    result["repeated_tokens"] = samples.repeated_tokens;
    return result;
}

// Calls `callback(done, total)` at most ten times a second; exceptions and Ctrl-C stop the packing.
Progress::Report report_to(const py::object& callback) {
    using Clock = std::chrono::steady_clock;
    return [callback, last = Clock::now()](std::int64_t done, std::int64_t total) mutable {
        const auto now = Clock::now();
        if (done < total && now - last < std::chrono::milliseconds(100)) return;
        last = now;
        const py::gil_scoped_acquire lock;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (!callback.is_none()) callback(done, total);
    };
}

// Builds a Strategy from two functions: read(Rules) returns the rules of the strategy, and
// pack(Id{}, lengths, rules, run) runs without the GIL. Id is int32 if numbers and lengths fit.
template <typename Read, typename Pack>
Strategy strategy(Read read, Pack pack) {
    return [=](const DocumentLengths& lengths, Rules& given, const PythonRun& options) {
        const auto rules = read(given);
        given.check_all_taken();
        Progress progress(report_to(options.progress));
        const Run run(options.seed, options.threads, progress);
        return lengths.visit([&](const auto& documents) {
            const auto run_as = [&](auto id) {
                auto samples = [&] {
                    const py::gil_scoped_release unlocked;
                    auto packed = pack(id, documents, rules, run);
                    progress.finish();
                    return packed;
                }();
                return samples_to_dict(std::move(samples));
            };
            constexpr bool kNarrow =
                std::is_same_v<decltype(documents), const Lengths<std::int32_t>&>;
            if constexpr (kNarrow)
                if (!options.wide_ids &&
                    documents.size() <= std::numeric_limits<std::int32_t>::max())
                    return run_as(std::int32_t{});
            return run_as(std::int64_t{});
        });
    };
}

// Map entry for pack_<name>; the arguments after the name build its rules from `k`.
#define MEGAPACK_STRATEGY(name, ...)                                                       \
    {#name, strategy([](Rules& k) { return __VA_ARGS__; },                                 \
                     [](auto id, const auto& lengths, const auto& rules, const Run& run) { \
                         return pack_##name<decltype(id)>(lengths, rules, run);            \
                     })}

// Strategies by their name in the core.
const std::map<std::string, Strategy>& strategies() {
    static const std::map<std::string, Strategy> all{
        MEGAPACK_STRATEGY(bucket, bucket_rules(k)),
        MEGAPACK_STRATEGY(bucket_second, bucket_second_rules(k)),
        MEGAPACK_STRATEGY(bucket_naive, BucketNaiveRules{k.integers("buckets"), k.flag("shuffle")}),
        MEGAPACK_STRATEGY(bucket_stream, bucket_rules(k)),
        MEGAPACK_STRATEGY(concat, ConcatRules{atoms(k), k.flag("shuffle"), drop_last(k)}),
        MEGAPACK_STRATEGY(decompose, DecomposeRules{k.integers("buckets")}),
        MEGAPACK_STRATEGY(fit_decreasing,
                          FitRules{k.integer("capacity"), k.integer("extra_capacity"),
                                   k.flag("best") ? Fit::kBest : Fit::kFirst}),
        MEGAPACK_STRATEGY(length_sorted, LengthSortedRules{k.integer("capacity")}),
        MEGAPACK_STRATEGY(next_fit, NextFitRules{k.integer("capacity"), k.flag("shuffle")}),
        MEGAPACK_STRATEGY(pad, PadRules{atoms(k)}),
        MEGAPACK_STRATEGY(seamless, seamless_rules(k)),
    };
    return all;
}

// ---- Functions of the module

using OnProgress = std::optional<py::typing::Callable<void(std::int64_t, std::int64_t)>>;

PythonRun run(std::uint64_t seed, std::int64_t threads, bool wide_ids, const OnProgress& progress) {
    return {seed, checked_threads(threads), wide_ids,
            progress ? py::object(*progress) : py::object(py::none())};
}

py::dict pack(const std::string& name, const DocumentLengths& lengths, const py::dict& rules,
              const PythonRun& run) {
    const auto strategy = strategies().find(name);
    check(strategy != strategies().end(), "the core has no strategy '", name, "'");
    Rules given(name, rules);
    return strategy->second(lengths, given, run);
}

// Cuts documents at `capacity`. Returns the rests of each length, and the number of full chunks.
std::pair<py::array_t<std::int64_t>, std::int64_t> length_histogram(const DocumentLengths& lengths,
                                                                    std::int64_t capacity,
                                                                    std::int64_t threads) {
    const PlainCut cut{capacity};
    const int num_threads = checked_threads(threads);
    check_capacity(capacity);
    std::vector<std::int64_t> counts;
    std::int64_t chunks = 0;
    lengths.visit([&](const auto& documents) {
        const py::gil_scoped_release unlocked;
        const LengthSort sort(in_file_order<std::int64_t>(documents), cut, num_threads);
        counts = sort.counts();
        chunks = sort.num_chunks();
    });
    return {to_numpy(std::move(counts)), chunks};
}

std::vector<std::int64_t> count_samples(const Array<std::int64_t>& counts, const py::dict& rules) {
    const auto values = view(counts, "counts");
    Rules given("bucket", rules);
    const BucketRules checked = bucket_rules(given);
    given.check_all_taken();
    const py::gil_scoped_release unlocked;
    return count_bucket_samples({values.begin(), values.end()}, checked);
}

}  // namespace

void register_packing(py::module_& m) {
    using D = DocumentLengths;
    py::class_<D>(m, "DocumentLengths")
        .def(py::init<const py::array&, std::int64_t>(), py::arg("lengths"), py::kw_only(),
             py::arg("capacity") = kMaxTokens)
        .def("__len__", &D::size)
        .def_property_readonly("num_tokens", [](const D& d) { return d.totals().num_tokens; })
        .def_property_readonly("num_empty", [](const D& d) { return d.totals().num_empty; })
        .def_property_readonly("num_longer", [](const D& d) { return d.totals().num_longer; })
        .def_property_readonly("longest", [](const D& d) { return d.totals().longest; });
    py::class_<PythonRun>(m, "Run").def(py::init(&run), py::kw_only(), py::arg("seed"),
                                        py::arg("threads"), py::arg("wide_ids") = false,
                                        py::arg("progress") = py::none());
    m.def("pack", &pack, py::arg("strategy"), py::arg("lengths"), py::arg("rules"), py::arg("run"));
    m.def("length_histogram", &length_histogram, py::arg("lengths"), py::arg("capacity"),
          py::arg("threads"));
    m.def("count_bucket_samples", &count_samples, py::arg("counts").noconvert(), py::arg("rules"));
}

}  // namespace megapack

// schedule: random numbers, permutations, cycles of buckets, blends, equal work.
#include "bindings/scalars.hpp"
#include "core/schedule/assign.hpp"
#include "core/schedule/blend.hpp"
#include "core/schedule/cycle_order.hpp"
#include "core/schedule/permute.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kMaxPositions = std::int64_t{1} << 40;  // per call: 8 TiB of ids

// Returns a vector of `count` results; throws if the count would need more than 8 TiB.
template <typename T>
std::vector<T> results(std::int64_t count) {
    check(count >= 0 && count <= kMaxPositions, "count is ", count, "; it must be from 0 to 2^40");
    return std::vector<T>(count);
}

py::array_t<std::int64_t> permute_range_numpy(std::uint64_t key, std::int64_t size,
                                              std::int64_t first, std::int64_t count) {
    check(count <= size, count, " positions of a permutation of ", size);
    std::vector<std::int64_t> out = results<std::int64_t>(count);
    unlocked([&] { permute_range(key, size, first, out); });
    return to_numpy(std::move(out));
}

py::array_t<std::int64_t> permute_inverse_numpy(std::uint64_t key, std::int64_t size,
                                                const Array<std::int64_t>& values) {
    const auto values_view = view(values, "values");
    std::vector<std::int64_t> out(values_view.size());
    unlocked([&] { permute_inverse(key, size, values_view, out); });
    return to_numpy(std::move(out));
}

py::array_t<std::int64_t> permute_epochs_numpy(const Array<std::uint64_t>& keys,
                                               const Array<std::int64_t>& sizes,
                                               const Array<std::int64_t>& begins,
                                               const Array<std::int64_t>& counts, bool shuffled) {
    const auto key = view(keys, "keys");
    const auto size = view(sizes, "sizes"), begin = view(begins, "begins"),
               count = view(counts, "counts");
    check(key.size() == size.size() && size.size() == begin.size() && begin.size() == count.size(),
          "keys, sizes, begins and counts have ", key.size(), ", ", size.size(), ", ", begin.size(),
          " and ", count.size(), " elements; the numbers must be equal");
    return computed([&] {
        std::vector<EpochRun> runs;
        runs.reserve(key.size());
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < key.size(); ++i) {
            runs.push_back({key[i], size[i], begin[i], count[i]});
            check(count[i] >= 0 && count[i] <= kMaxPositions - total, "counts[", i, "] is ",
                  count[i], "; counts must be 0 or more and sum to at most ", kMaxPositions);
            total += count[i];
        }
        std::vector<std::int64_t> out(total);
        permute_epochs(runs, shuffled, out);
        return out;
    });
}

CycleOrder make_cycle_order(const Array<std::int64_t>& counts, const Array<double>& odds,
                            std::uint64_t key, const std::string& times, bool largest_first) {
    const auto chosen =
        choice<CycleOrder::Times>(times, "times",
                                  {{"spread", CycleOrder::Times::kSpread},
                                   {"random", CycleOrder::Times::kRandom},
                                   {"consecutive", CycleOrder::Times::kConsecutive}});
    const auto counts_view = view(counts, "counts");
    const auto odds_view = view(odds, "odds");
    return unlocked([&] { return CycleOrder(counts_view, odds_view, key, chosen, largest_first); });
}

void register_cycle_order(py::module_& m) {
    py::class_<CycleOrder>(m, "CycleOrder")
        .def(py::init(&make_cycle_order), py::arg("counts").noconvert(),
             py::arg("odds").noconvert(), py::arg("key"), py::arg("times"),
             py::arg("largest_first"))
        .def("__len__", &CycleOrder::size)
        .def(
            "counts",
            [](const CycleOrder& order, std::int64_t end) { return to_numpy(order.counts(end)); },
            py::arg("end"))
        .def(
            "range",
            [](const CycleOrder& order, std::int64_t begin, std::int64_t end) {
                return computed([&] { return order.range(begin, end); });
            },
            py::arg("begin"), py::arg("end"))
        .def(
            "at",
            [](const CycleOrder& order, std::int64_t position) {
                const CycleOrder::Draw draw = order.at(position);
                return std::make_pair(draw.bucket, draw.rank);
            },
            py::arg("position"))
        .def("position", &CycleOrder::position, py::arg("bucket"), py::arg("rank"));
}

using Numbers32 = py::array_t<std::int32_t>;
using Numbers64 = py::array_t<std::int64_t>;

// Returns source, first rank and count of every run, and the places of all runs (Blend::Range).
std::tuple<Numbers32, Numbers64, Numbers64, Numbers32> blend_range_numpy(const Blend& blend,
                                                                         std::int64_t begin,
                                                                         std::int64_t end) {
    std::vector<std::int32_t> source;
    std::vector<std::int64_t> first_rank, count;
    Blend::Range range = unlocked([&] {
        Blend::Range result = blend.range(begin, end);
        for (const Blend::Run& run : result.runs) {
            source.push_back(run.source);
            first_rank.push_back(run.first_rank);
            count.push_back(run.count);
        }
        return result;
    });
    return {to_numpy(std::move(source)), to_numpy(std::move(first_rank)),
            to_numpy(std::move(count)), to_numpy(std::move(range.places))};
}

void register_blend(py::module_& m) {
    const auto make = [](const Array<std::int64_t>& weights) {
        return Blend(view(weights, "weights"));
    };
    py::class_<Blend>(m, "Blend")
        .def(py::init(make), py::arg("weights").noconvert())
        .def("range", &blend_range_numpy, py::arg("begin"), py::arg("end"))
        .def(
            "taken",
            [](const Blend& blend, std::int64_t end) { return to_numpy(blend.taken(end)); },
            py::arg("end"))
        .def("taken_of", &Blend::taken_of, py::arg("source"), py::arg("end"))
        .def(py::pickle(
            [](const Blend& blend) -> Array<std::int64_t> {
                return to_numpy(std::vector<std::int64_t>(blend.weights()));
            },
            make));
}

py::array_t<std::int64_t> assign_evenly_numpy(const Array<std::int64_t>& costs,
                                              const Array<std::int64_t>& bin_sizes) {
    const auto costs_view = view(costs, "costs");
    const auto sizes_view = view(bin_sizes, "bin_sizes");
    return computed([&] { return assign_evenly(costs_view, sizes_view); });
}

}  // namespace

void register_schedule(py::module_& m) {
    m.def("random_bits", &random_bits, py::arg("key"), py::arg("counter"));
    m.def("permute_range", &permute_range_numpy, py::arg("key"), py::arg("size"), py::arg("first"),
          py::arg("count"));
    m.def("permute_inverse", &permute_inverse_numpy, py::arg("key"), py::arg("size"),
          py::arg("values").noconvert());
    m.def("permute_epochs", &permute_epochs_numpy, py::arg("keys").noconvert(),
          py::arg("sizes").noconvert(), py::arg("begins").noconvert(),
          py::arg("counts").noconvert(), py::arg("shuffled"));
    register_cycle_order(m);
    register_blend(m);
    m.def("assign_evenly", &assign_evenly_numpy, py::arg("costs").noconvert(),
          py::arg("bin_sizes").noconvert());
}

}  // namespace megapack

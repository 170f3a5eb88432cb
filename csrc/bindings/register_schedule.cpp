// schedule and balance: small pure functions; arrays out.
#include "bindings/integers.hpp"
#include "bindings/scalars.hpp"
#include "core/balance_deal.hpp"
#include "core/schedule_blend.hpp"
#include "core/schedule_order.hpp"
#include "core/schedule_permute.hpp"
#include "core/schedule_random.hpp"

namespace megapack {
namespace {

std::uint64_t random_bits_of(const py::object& key, const py::object& counter) {
    return random_bits(word(key, "key"), word(counter, "counter"));
}

py::array_t<std::int64_t> permute_range_numpy(const py::object& key, const py::object& size,
                                              const py::object& first, const py::object& count) {
    const std::uint64_t chosen = word(key, "key");
    const std::int64_t all = integer(size, "size", 1), begin = integer(first, "first", 0, all);
    std::vector<std::int64_t> out(
        static_cast<std::size_t>(integer(count, "count", 0, all - begin)));
    {
        const py::gil_scoped_release release;
        permute_range(chosen, all, begin, out);
    }
    return to_numpy(std::move(out));
}

py::array_t<std::int32_t> order_cycle_numpy(const Array<std::int64_t>& counts,
                                            const Array<double>& odds, const py::object& key,
                                            const py::object& spread) {
    const std::uint64_t chosen = word(key, "key");
    const bool spread_out = flag(spread, "spread");
    const auto counts_view = view(counts, "counts");
    const auto odds_view = view(odds, "odds");
    std::vector<std::int32_t> order;
    {
        const py::gil_scoped_release release;
        order = order_cycle(counts_view, odds_view, chosen, spread_out);
    }
    return to_numpy(std::move(order));
}

py::tuple blend_pattern_numpy(const Array<std::int64_t>& shares) {
    const auto shares_view = view(shares, "shares");
    BlendPattern pattern;
    {
        const py::gil_scoped_release release;
        pattern = blend_pattern(shares_view);
    }
    return py::make_tuple(to_numpy(std::move(pattern.dataset)), to_numpy(std::move(pattern.rank)));
}

py::array_t<std::int64_t> attention_cost_of_numpy(const py::array& sample_segment_offsets,
                                                  const py::array& segment_length,
                                                  const Array<std::int64_t>& samples,
                                                  const py::object& capacity,
                                                  const py::object& whole) {
    const std::int64_t size = integer(capacity, "capacity");
    const bool as_one = flag(whole, "whole");
    const Integers offsets = integers(sample_segment_offsets, "sample_segment_offsets");
    const Integers lengths = integers(segment_length, "segment_length");
    const auto samples_view = view(samples, "samples");
    std::vector<std::int64_t> costs;
    {
        const py::gil_scoped_release release;
        costs = attention_cost_of(offsets, lengths, samples_view, size, as_one);
    }
    return to_numpy(std::move(costs));
}

py::array_t<std::int64_t> deal_evenly_numpy(const Array<std::int64_t>& costs,
                                            const Array<std::int64_t>& bin_sizes) {
    const auto costs_view = view(costs, "costs");
    const auto sizes_view = view(bin_sizes, "bin_sizes");
    std::vector<std::int64_t> order;
    {
        const py::gil_scoped_release release;
        order = deal_evenly(costs_view, sizes_view);
    }
    return to_numpy(std::move(order));
}

}  // namespace

void register_schedule(py::module_& m) {
    m.def("random_bits", &random_bits_of, py::arg("key"), py::arg("counter"));
    m.def("permute_range", &permute_range_numpy, py::arg("key"), py::arg("size"), py::arg("first"),
          py::arg("count"));
    m.def("order_cycle", &order_cycle_numpy, py::arg("counts").noconvert(),
          py::arg("odds").noconvert(), py::arg("key"), py::arg("spread"));
    m.def("blend_pattern", &blend_pattern_numpy, py::arg("shares").noconvert());
    m.def("attention_cost_of", &attention_cost_of_numpy, py::arg("sample_segment_offsets"),
          py::arg("segment_length"), py::arg("samples").noconvert(), py::arg("capacity"),
          py::arg("whole"));
    m.def("deal_evenly", &deal_evenly_numpy, py::arg("costs").noconvert(),
          py::arg("bin_sizes").noconvert());
}

}  // namespace megapack

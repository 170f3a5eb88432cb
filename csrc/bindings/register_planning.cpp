// plan_step: the ranks and micro batches of one step's documents.
#include "bindings/scalars.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {
namespace {

py::tuple plan_step_numpy(const Array<std::int64_t>& lengths, const py::object& num_ranks,
                          const py::object& max_tokens_per_rank,
                          const py::object& max_documents_per_rank, const py::object& max_degree,
                          const py::object& linear_length) {
    constexpr std::int64_t kMostRanks = std::int64_t{1} << 20;
    constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
    const StepRules rules{integer(num_ranks, "num_ranks", 1, kMostRanks),
                          integer(max_tokens_per_rank, "max_tokens_per_rank", 1, kMostTokens),
                          integer(max_documents_per_rank, "max_documents_per_rank", 1),
                          integer(max_degree, "max_degree", 1, kMostRanks),
                          integer(linear_length, "linear_length", 0)};
    const auto lengths_view = view(lengths, "lengths");
    StepPlan plan;
    {
        const py::gil_scoped_release release;
        plan = plan_step(lengths_view, rules);
    }
    return py::make_tuple(plan.num_micro_batches, to_numpy(std::move(plan.first_rank)),
                          to_numpy(std::move(plan.degree)), to_numpy(std::move(plan.micro_batch)));
}

}  // namespace

void register_planning(py::module_& m) {
    m.def("plan_step", &plan_step_numpy, py::arg("lengths").noconvert(), py::kw_only(),
          py::arg("num_ranks"), py::arg("max_tokens_per_rank"), py::arg("max_documents_per_rank"),
          py::arg("max_degree"), py::arg("linear_length"));
}

}  // namespace megapack

// plan_step: the ranks and micro batches of one step's documents.
#include "bindings/scalars.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {
namespace {

using Numbers = py::array_t<std::int64_t>;

// Returns (number of micro batches, first rank, degree and micro batch of every document).
std::tuple<std::int64_t, Numbers, Numbers, Numbers> plan_step_numpy(
    const Array<std::int64_t>& lengths, const Array<double>& costs, const Array<double>& max_costs,
    const Array<std::int64_t>& groups, const std::string& balance, std::int64_t num_ranks,
    std::int64_t max_tokens_per_rank, std::int64_t max_documents_per_rank,
    std::int64_t max_context_parallel_size, std::int64_t linear_cost_tokens,
    std::int64_t micro_batch_multiple) {
    const StepRules rules{num_ranks,
                          max_tokens_per_rank,
                          max_documents_per_rank,
                          max_context_parallel_size,
                          linear_cost_tokens,
                          choice<Balance>(balance, "balance",
                                          {{"micro_batches", Balance::kMicroBatches},
                                           {"step", Balance::kStep},
                                           {"pipeline", Balance::kPipeline}}),
                          micro_batch_multiple};
    const auto lengths_view = view(lengths, "lengths");
    const auto costs_view = view(costs, "costs");
    const auto caps_view = view(max_costs, "max_costs_per_rank");
    const auto groups_view = view(groups, "groups");
    check(lengths_view.empty() ? costs_view.empty() : costs_view.size() % lengths_view.size() == 0,
          "costs has ", costs_view.size(), " numbers for ", lengths_view.size(), " documents");
    check(groups_view.empty() || groups_view.size() == lengths_view.size(), "groups has ",
          groups_view.size(), " numbers for ", lengths_view.size(),
          " documents; give one for each");
    StepPlan plan = unlocked(
        [&] { return plan_step(lengths_view, {costs_view, caps_view}, groups_view, rules); });
    return {plan.num_micro_batches, to_numpy(std::move(plan.first_rank)),
            to_numpy(std::move(plan.degree)), to_numpy(std::move(plan.micro_batch))};
}

}  // namespace

void register_planning(py::module_& m) {
    m.def("plan_step", &plan_step_numpy, py::arg("lengths").noconvert(),
          py::arg("costs").noconvert(), py::arg("max_costs_per_rank").noconvert(),
          py::arg("groups").noconvert(), py::kw_only(), py::arg("balance"), py::arg("num_ranks"),
          py::arg("max_tokens_per_rank"), py::arg("max_documents_per_rank"),
          py::arg("max_context_parallel_size"), py::arg("linear_cost_tokens"),
          py::arg("micro_batch_multiple"));
}

}  // namespace megapack

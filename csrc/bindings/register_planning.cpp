// plan_step: the ranks and micro batches of one step's documents. plan_trees: of prefix trees.
#include "bindings/scalars.hpp"

#include <algorithm>

#include "core/planning/step_plan.hpp"
#include "core/planning/trees.hpp"

namespace megapack {
namespace {

using Numbers = py::array_t<std::int64_t>;
using Numbers32 = py::array_t<std::int32_t>;

Balance balance_of(const std::string& name) {
    return choice<Balance>(name, "balance",
                           {{"micro_batches", Balance::kMicroBatches},
                            {"step", Balance::kStep},
                            {"pipeline", Balance::kPipeline}});
}

// Returns (number of micro batches, first rank, degree and micro batch of every document).
std::tuple<std::int64_t, Numbers, Numbers, Numbers> plan_step_numpy(
    const Array<std::int64_t>& lengths, const Array<double>& costs, const Array<double>& max_costs,
    const Array<std::int64_t>& groups, const std::string& balance, std::int64_t num_ranks,
    std::int64_t max_tokens_per_rank, std::int64_t max_documents_per_rank,
    std::int64_t max_context_parallel_size, std::int64_t linear_cost_tokens,
    std::int64_t micro_batch_multiple) {
    const StepRules rules{
        num_ranks,          max_tokens_per_rank, max_documents_per_rank, max_context_parallel_size,
        linear_cost_tokens, balance_of(balance), micro_batch_multiple};
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

// Returns (sequences in sorted order, number of tokens that each shares with the one before).
template <typename T>
std::tuple<Numbers, Numbers> sort_sequences_numpy(const Array<T>& items,
                                                  const Array<std::int64_t>& offsets) {
    const auto items_view = view(items, "sequences");
    const auto offsets_view = view(offsets, "offsets");
    check(offsets_view.size() >= 1 && offsets_view[0] >= 0 &&
              offsets_view[offsets_view.size() - 1] <= items_view.size() &&
              std::is_sorted(offsets_view.begin(), offsets_view.end()),
          "offsets must not decrease and lie between 0 and ", items_view.size());
    SortedSequences sorted = unlocked([&] { return sort_sequences(items_view, offsets_view); });
    return {to_numpy(std::move(sorted.order)), to_numpy(std::move(sorted.shared))};
}

// Checks what the core uses as positions: a sequence shares at most all tokens of itself and of the
// sequence before it.
void check_sorted(Span<const std::int64_t> lengths, Span<const std::int64_t> shared) {
    check(lengths.size() == shared.size(), "there are ", lengths.size(), " lengths and ",
          shared.size(), " shared prefixes");
    for (std::int64_t k = 0; k < lengths.size(); ++k) {
        const std::int64_t before = k == 0 ? 0 : lengths[k - 1];
        check(lengths[k] > 0, "sequence ", k, " has ", lengths[k],
              " tokens; it must have 1 or more");
        check(shared[k] >= 0 && shared[k] <= std::min(lengths[k], before), "sequence ", k,
              " shares ", shared[k], " tokens with the sequence before it; it must share 0 to ",
              std::min(lengths[k], before));
    }
}

// Returns (number of micro batches, offsets of trees, their sequences, shared tokens as above).
std::tuple<std::int64_t, Numbers, Numbers, Numbers> plan_trees_numpy(
    const Array<std::int64_t>& lengths, const Array<std::int64_t>& shared,
    const Array<std::int64_t>& groups, const std::string& balance, std::int64_t num_ranks,
    std::int64_t max_tokens_per_rank, std::int64_t linear_cost_tokens,
    std::int64_t micro_batch_multiple, std::int64_t token_multiple) {
    const auto lengths_view = view(lengths, "lengths"), shared_view = view(shared, "shared"),
               groups_view = view(groups, "groups");
    const TreeRules rules{num_ranks,           max_tokens_per_rank,  linear_cost_tokens,
                          balance_of(balance), micro_batch_multiple, token_multiple};
    check(groups_view.empty() || groups_view.size() == lengths_view.size(),
          "groups must have a number for each sequence");
    check_sorted(lengths_view, shared_view);
    TreePlan plan =
        unlocked([&] { return plan_trees(lengths_view, shared_view, groups_view, rules); });
    return {plan.num_micro_batches, to_numpy(std::move(plan.offsets)),
            to_numpy(std::move(plan.sequences)), to_numpy(std::move(plan.shared))};
}

Numbers limit_depth_numpy(const Array<std::int64_t>& lengths, const Array<std::int64_t>& shared,
                          std::int64_t max_depth) {
    const auto lengths_view = view(lengths, "lengths"), shared_view = view(shared, "shared");
    check_sorted(lengths_view, shared_view);
    return computed([&] {
        std::vector<std::int64_t> limited(shared_view.begin(), shared_view.end());
        limit_depth(lengths_view, limited, max_depth);
        return limited;
    });
}

// Returns (begins, lengths, parents, depths and first sequences of nodes, last nodes of sequences).
std::tuple<Numbers32, Numbers32, Numbers32, Numbers32, Numbers, Numbers32> tree_nodes_numpy(
    const Array<std::int64_t>& lengths, const Array<std::int64_t>& shared) {
    const auto lengths_view = view(lengths, "lengths"), shared_view = view(shared, "shared");
    check_sorted(lengths_view, shared_view);
    TreeNodes nodes = unlocked([&] { return tree_nodes(lengths_view, shared_view); });
    return {to_numpy(std::move(nodes.begins)),    to_numpy(std::move(nodes.lengths)),
            to_numpy(std::move(nodes.parents)),   to_numpy(std::move(nodes.depths)),
            to_numpy(std::move(nodes.sequences)), to_numpy(std::move(nodes.sequence_nodes))};
}

Numbers32 tree_paths_numpy(const Array<std::int32_t>& begins, const Array<std::int32_t>& lengths,
                           const Array<std::int32_t>& parents, const Array<std::int32_t>& nodes) {
    const auto begins_view = view(begins, "begins"), lengths_view = view(lengths, "lengths"),
               parents_view = view(parents, "parents"), nodes_view = view(nodes, "nodes");
    check(begins_view.size() == lengths_view.size() && begins_view.size() == parents_view.size(),
          "the arrays of nodes differ in size");
    return computed(
        [&] { return tree_paths(begins_view, lengths_view, parents_view, nodes_view); });
}

}  // namespace

void register_planning(py::module_& m) {
    m.def("plan_step", &plan_step_numpy, py::arg("lengths").noconvert(),
          py::arg("costs").noconvert(), py::arg("max_costs_per_rank").noconvert(),
          py::arg("groups").noconvert(), py::kw_only(), py::arg("balance"), py::arg("num_ranks"),
          py::arg("max_tokens_per_rank"), py::arg("max_documents_per_rank"),
          py::arg("max_context_parallel_size"), py::arg("linear_cost_tokens"),
          py::arg("micro_batch_multiple"));
    m.def("sort_sequences", &sort_sequences_numpy<std::uint16_t>, py::arg("items").noconvert(),
          py::arg("offsets").noconvert());
    m.def("sort_sequences", &sort_sequences_numpy<std::int32_t>, py::arg("items").noconvert(),
          py::arg("offsets").noconvert());
    m.def("sort_sequences", &sort_sequences_numpy<std::int64_t>, py::arg("items").noconvert(),
          py::arg("offsets").noconvert());
    m.def("plan_trees", &plan_trees_numpy, py::arg("lengths").noconvert(),
          py::arg("shared").noconvert(), py::arg("groups").noconvert(), py::kw_only(),
          py::arg("balance"), py::arg("num_ranks"), py::arg("max_tokens_per_rank"),
          py::arg("linear_cost_tokens"), py::arg("micro_batch_multiple"),
          py::arg("token_multiple"));
    m.def("limit_depth", &limit_depth_numpy, py::arg("lengths").noconvert(),
          py::arg("shared").noconvert(), py::arg("max_depth"));
    m.def("tree_nodes", &tree_nodes_numpy, py::arg("lengths").noconvert(),
          py::arg("shared").noconvert());
    m.def("tree_paths", &tree_paths_numpy, py::arg("begins").noconvert(),
          py::arg("lengths").noconvert(), py::arg("parents").noconvert(),
          py::arg("nodes").noconvert());
}

}  // namespace megapack

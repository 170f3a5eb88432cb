// packing: lengths and rules in, checked; GIL released; arrays out.
#include "bindings/strategies.hpp"
#include "core/packing/sort.hpp"

namespace megapack {
namespace {

PythonRun run(const py::object& seed, const py::object& threads, const py::object& wide_ids,
              const py::object& progress) {
    if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0)
        refuse(progress, "progress", "a function of (done, total), or None");
    return {word(seed, "seed"), checked_threads(integer(threads, "threads")),
            flag(wide_ids, "wide_ids"), progress};
}

py::dict pack(const std::string& name, const DocumentLengths& lengths, const py::dict& rules,
              const PythonRun& run) {
    const auto found = strategies().find(name);
    check(found != strategies().end(), "the core has no strategy '", name, "'");
    Keywords keywords(name, rules);
    return found->second(lengths, keywords, run);
}

py::dict seamless_stage_one(const DocumentLengths& lengths, const py::dict& rules) {
    Keywords keywords("seamless", rules);
    const SeamlessRules checked = seamless_rules(keywords);
    const StageOne stage = lengths.visit([&](const auto& documents) {
        const py::gil_scoped_release unlocked;
        Progress silent;
        return count_stage_one(in_file_order<std::int64_t>(documents), checked, Run(0, 1, silent));
    });
    py::dict result;
    result["num_sliding"] = stage.num_sliding;
    result["short_tokens"] = stage.short_tokens;
    return result;
}

// (counts of rests by length, number of full chunks) of documents cut at `capacity`.
py::tuple length_histogram(const DocumentLengths& lengths, const py::object& capacity,
                           const py::object& threads) {
    const PlainCut cut{integer(capacity, "capacity")};
    const int num_threads = checked_threads(integer(threads, "threads"));
    check_capacity(cut.capacity);
    std::vector<std::int64_t> counts;
    std::int64_t chunks = 0;
    lengths.visit([&](const auto& documents) {
        const py::gil_scoped_release unlocked;
        const LengthSort sort(in_file_order<std::int64_t>(documents), cut, num_threads);
        counts = sort.counts();
        chunks = sort.num_chunks();
    });
    return py::make_tuple(to_numpy(std::move(counts)), chunks);
}

std::vector<std::int64_t> count_samples(const Array<std::int64_t>& counts, const py::dict& rules) {
    const auto values = view(counts, "counts");
    Keywords keywords("bucket", rules);
    const BucketRules checked = bucket_rules(keywords);
    keywords.check_all_taken();
    const py::gil_scoped_release unlocked;
    return count_bucket_samples({values.begin(), values.end()}, checked);
}

}  // namespace

void register_packing(py::module_& m) {
    register_lengths(m);
    py::class_<PythonRun>(m, "Run").def(py::init(&run), py::kw_only(), py::arg("seed"),
                                        py::arg("threads"), py::arg("wide_ids") = false,
                                        py::arg("progress") = py::none());
    m.def("pack", &pack, py::arg("strategy"), py::arg("lengths"), py::arg("rules"), py::arg("run"));
    m.def("seamless_stage_one", &seamless_stage_one, py::arg("lengths"), py::arg("rules"));
    m.def("length_histogram", &length_histogram, py::arg("lengths"), py::arg("capacity"),
          py::arg("threads"));
    m.def("count_bucket_samples", &count_samples, py::arg("counts").noconvert(), py::arg("rules"));
}

}  // namespace megapack

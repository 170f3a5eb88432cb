// What a strategy is called with from Python.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "bindings/document_lengths.hpp"
#include "bindings/keywords.hpp"
#include "core/packing/bucket_plan.hpp"
#include "core/packing/run.hpp"
#include "core/packing/seamless.hpp"

namespace megapack {

// core's Run, and what Python alone may ask for.
struct PythonRun {
    std::uint64_t seed;
    int threads;
    bool wide_ids;  // int64 document numbers where int32 would do (tests)
    py::object progress;
};

using Strategy = std::function<py::dict(const DocumentLengths&, Keywords&, const PythonRun&)>;

// By the name in the core: pack_<name>.
const std::map<std::string, Strategy>& strategies();

BucketRules bucket_rules(Keywords& rules);
SeamlessRules seamless_rules(Keywords& rules);

}  // namespace megapack

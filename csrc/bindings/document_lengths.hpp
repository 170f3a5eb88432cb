// Document lengths from numpy: checked when this is made (core/packing/lengths.hpp), never copied.
// What packs takes this and no array, so lengths are read for their check once.
#pragma once

#include <variant>

#include "bindings/numpy_views.hpp"
#include "core/packing/lengths.hpp"

namespace megapack {

class DocumentLengths {
  public:
    // int32, int64 or uint64 (num_documents,), which nobody changes meanwhile; documents longer
    // than `capacity` are counted on the way.
    DocumentLengths(const py::array& array, std::int64_t capacity)
        : kept_(array), lengths_(check_array(array, capacity)) {}

    // f(Lengths<std::int32_t>) or f(Lengths<std::int64_t>).
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

    static Checked check_array(const py::array& array, std::int64_t capacity);

    py::array kept_;
    Checked lengths_;
};

void register_lengths(py::module_& m);

}  // namespace megapack

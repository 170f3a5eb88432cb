// Arrays of files whose blocks have checksums. Readers of an index accept numpy arrays and these.
#pragma once

#include "bindings/scalars.hpp"
#include "core/base/blocks.hpp"
#include "core/index/view.hpp"
#include "core/storage/mmididx.hpp"

namespace megapack {

// A contiguous array of one dimension and any type; a block is checked before the core reads it.
class CheckedArray {
  public:
    CheckedArray(const py::array& array, const Array<std::uint64_t>& checksums, const py::str& name,
                 const std::string& remedy)
        : array_(array), checks_(bytes_of(array), listed(checksums), file_name(name), remedy) {}

    const py::array& array() const { return array_; }
    const BlockChecks& checks() const { return checks_; }

    // Checks elements [begin, end); they may be read from then on.
    void require(std::int64_t begin, std::int64_t end) const {
        check(begin >= 0 && begin <= end && end <= array_.size(), "elements [", begin, ", ", end,
              ") are outside an array of ", array_.size());
        const py::gil_scoped_release unlocked;
        checks_.require(begin * width(), end * width());
    }
    // Checks elements at positions. Negative ones count from the end, those outside are ignored.
    void require_at(const Array<std::int64_t>& positions) const {
        const auto chosen = view(positions, "positions");
        const std::int64_t size = array_.size();
        const py::gil_scoped_release unlocked;
        for (std::int64_t at : chosen) {
            if (at < 0) at += size;
            if (at >= 0 && at < size) checks_.require(at * width(), (at + 1) * width());
        }
    }

  private:
    static Span<const std::uint8_t> bytes_of(const py::array& array) {
        check(array.ndim() == 1 && (array.size() < 2 || array.strides(0) == array.itemsize()),
              "array must be contiguous and have one dimension");
        return {static_cast<const std::uint8_t*>(array.data()),
                static_cast<std::int64_t>(array.nbytes())};
    }
    static std::vector<std::uint64_t> listed(const Array<std::uint64_t>& checksums) {
        const auto given = view(checksums, "checksums");
        return {given.begin(), given.end()};
    }
    std::int64_t width() const { return array_.itemsize(); }

    py::array array_;
    BlockChecks checks_;
};

// A numpy array or a CheckedArray.
class AnyArray : public py::object {
  public:
    PYBIND11_OBJECT_DEFAULT(AnyArray, py::object, is_array)

    static bool is_array(PyObject* object) {
        return py::isinstance<py::array>(object) || py::isinstance<CheckedArray>(object);
    }
};

// A view of an object, which the caller keeps alive.
struct ArrayView {
    py::array array;
    const BlockChecks* checks = nullptr;
};

inline ArrayView array_view(const py::object& object, const char* name) {
    if (py::isinstance<CheckedArray>(object)) {
        const auto& checked = object.cast<const CheckedArray&>();
        return {checked.array(), &checked.checks()};
    }
    check<py::type_error>(py::isinstance<py::array>(object), name, " must be a numpy array");
    return {py::reinterpret_borrow<py::array>(object)};
}

inline Integers integers(const py::object& object, const char* name) {
    const auto [array, checks] = array_view(object, name);
    const py::dtype dtype = array.dtype();
    const bool is_integer = dtype.kind() == 'i' && (dtype.itemsize() == 4 || dtype.itemsize() == 8);
    check(is_integer && dtype.byteorder() != '>', name, " has dtype ", NameOf{dtype},
          "; it must be int32 or int64");
    check(array.ndim() == 1 && (array.size() < 2 || array.strides(0) == dtype.itemsize()) &&
              is_aligned(array),
          name, " must be a contiguous, aligned array of one dimension");
    return {array.data(), array.size(), dtype.itemsize() == 8, checks};
}

// Views an .idx whose blocks are checked when they are read.
inline IndexView index_view(const py::object& bytes, const py::str& name) {
    const auto [array, checks] = array_view(bytes, "bytes");
    check<py::type_error>(Array<std::uint8_t>::check_(array), "bytes must be contiguous uint8");
    return {
        {static_cast<const std::uint8_t*>(array.data()), array.size()}, file_name(name), checks};
}

// Views an .idx and checks all of its blocks.
inline IndexView whole_index(const AnyArray& bytes, const py::str& name) {
    IndexView index = index_view(bytes, name);
    const py::gil_scoped_release unlocked;
    index.require_all();
    return index;
}

}  // namespace megapack

namespace pybind11::detail {
template <>
struct handle_type_name<megapack::AnyArray> {
    static constexpr auto name = handle_type_name<array>::name;
};
}  // namespace pybind11::detail

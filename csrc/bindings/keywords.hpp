// The rules of a strategy as Python gives them, {name: value}. Each is asked for by its name and
// checked; what nobody has asked for is refused.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bindings/scalars.hpp"
#include "core/base/ratio.hpp"

namespace megapack {

// (numerator, denominator): no float can say what 0.1 is.
inline Ratio ratio(const py::handle& value, const char* name) {
    const auto parts = integer_list(value, name);
    if (parts.size() != 2) refuse(value, name, "a numerator and a denominator");
    return {parts[0], parts[1]};
}

class Keywords {
  public:
    Keywords(std::string subject, const py::dict& values)
        : subject_(std::move(subject)), left_(values.attr("copy")()) {}

    bool has(const char* name) const { return left_.contains(name); }
    py::object take(const char* name) {
        check(has(name), subject_, " needs ", name);
        return left_.attr("pop")(name);
    }
    std::int64_t integer(const char* name) { return megapack::integer(take(name), name); }
    std::vector<std::int64_t> integers(const char* name) { return integer_list(take(name), name); }
    bool flag(const char* name) { return megapack::flag(take(name), name); }
    Ratio ratio(const char* name) { return megapack::ratio(take(name), name); }
    template <typename T>
    T choice(const char* name, std::initializer_list<std::pair<const char*, T>> known) {
        return megapack::choice<T>(take(name), name, known);
    }

    void check_all_taken() const {
        for (const auto& [name, value] : left_)
            refuse(name, "a rule", "one that " + subject_ + " has");
    }

  private:
    std::string subject_;
    py::dict left_;
};

}  // namespace megapack

// Exceptions of the core. A message names the subject, the value, the limit and the remedy; the
// bindings translate the type to a Python exception.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace megapack {

// A file is damaged or has another format (megapack.errors.FormatError).
struct FormatError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Documents or tokens that cannot be stored or packed (megapack.errors.DataError).
struct DataError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string concat_message(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

// Throws unless `ok`: check<DataError>(length >= 0, "document ", i, " has length ", length).
template <typename Error = std::invalid_argument, typename... Parts>
void check(bool ok, const Parts&... parts) {
    if (!ok) throw Error(concat_message(parts...));
}

}  // namespace megapack

// Messages carry every part; Span views what it is given.
#include <cassert>
#include <cstdio>
#include <string>

#include "core/base/check.hpp"
#include "core/base/span.hpp"

int main() {
    try {
        megapack::check(false, "sample ", 3, " has ", 8, " tokens");
        return 1;
    } catch (const std::invalid_argument& error) {
        if (std::string(error.what()) != "sample 3 has 8 tokens") return 1;
    }
    std::vector<int> values{1, 2, 3};
    megapack::Span<const int> span(values);
    if (span.size() != 3 || span.subspan(1, 2)[1] != 3) return 1;
    std::puts("ok");
    return 0;
}

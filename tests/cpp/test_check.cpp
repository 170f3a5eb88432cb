// Messages carry every part; Span views what it is given.
#include "core/base/span.hpp"
#include "require.hpp"

int main() {
    const auto told =
        message_of([] { megapack::check(false, "sample ", 3, " has ", 8, " tokens"); });
    require(told == "sample 3 has 8 tokens", told);
    std::vector<int> values{1, 2, 3};
    megapack::Span<const int> span(values);
    require(span.size() == 3 && span.subspan(1, 2)[1] == 3, "a span");
    std::puts("ok");
    return 0;
}

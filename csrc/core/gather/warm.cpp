#include "core/gather/warm.hpp"

#include <sys/mman.h>
#include <unistd.h>

namespace megapack {

void will_need(Span<const std::uint8_t> bytes) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    const std::uintptr_t begin = address / page * page;
    // Whether the advice was taken does not matter.
    static_cast<void>(
        madvise(reinterpret_cast<void*>(begin), bytes.size() + (address - begin), MADV_WILLNEED));
}

}  // namespace megapack

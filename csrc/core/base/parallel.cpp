#include "core/base/parallel.hpp"

#include <exception>
#include <mutex>
#include <vector>

namespace megapack {

void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& task) {
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        for (std::int64_t i = next++; i < count; i = next++) {
            try {
                task(i);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failure_mutex);
                if (!failure) failure = std::current_exception();
                next = count;
            }
        }
    };
    const std::int64_t helpers = std::min<std::int64_t>(count, std::max(threads, 1));
    std::vector<std::thread> others;
    others.reserve(helpers);  // an allocation must not fail while unjoined threads exist
    try {
        for (std::int64_t t = 1; t < helpers; ++t) others.emplace_back(work);
    } catch (...) {
        // The system refused another thread; the threads that started do the rest.
    }
    work();
    for (std::thread& thread : others) thread.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace megapack

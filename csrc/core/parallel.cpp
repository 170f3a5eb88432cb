#include "core/parallel.hpp"

#include <exception>
#include <mutex>
#include <system_error>
#include <vector>

namespace megapack {

void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& task) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                task(i);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failure_mutex);
                if (!failure) failure = std::current_exception();
                next = count;
            }
        }
    };
    const std::size_t helpers = std::min(count, static_cast<std::size_t>(std::max(threads, 1)));
    std::vector<std::thread> others;
    try {
        for (std::size_t t = 1; t < helpers; ++t) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The system gives no more threads: those there are do all the work.
    }
    work();
    for (std::thread& thread : others) thread.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace megapack

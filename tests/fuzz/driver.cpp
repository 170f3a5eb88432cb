// Runs a libFuzzer harness where there is no libFuzzer: deterministic mutation of seed files.
//   fuzz SECONDS CURRENT SEED...    mutate for SECONDS (0: only run the seeds)
// CURRENT is a file that always holds the size (u64) and bytes of the input being run, so that
// whoever started this can keep the input that crashed it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMost = 4096;
constexpr std::uint64_t kNumbers[] = {0,          1,          2,          3,          7,
                                      8,          255,        1u << 15,   65535,      0x7fffffff,
                                      0x80000000, 0xffffffff, 1ull << 53, 1ull << 61, 1ull << 62,
                                      ~0ull >> 1, 1ull << 63, ~0ull};

class Mutator {
  public:
    Bytes next(const std::vector<Bytes>& seeds) {
        Bytes data = seeds[below(seeds.size())];
        for (std::size_t changes = 1 + below(4); changes > 0; --changes) change(data, seeds);
        if (data.size() > kMost) data.resize(kMost);
        return data;
    }

  private:
    std::size_t below(std::size_t limit) { return random_() % limit; }

    // Headers, where most decisions are made, more often.
    std::size_t position(const Bytes& data) {
        return below((below(5) < 3 ? data.size() : std::min<std::size_t>(data.size(), 64)) + 1);
    }

    void change(Bytes& data, const std::vector<Bytes>& seeds) {
        const std::size_t at = position(data);
        const auto from = data.begin() + static_cast<std::ptrdiff_t>(at);
        const std::size_t width = std::size_t{1} << below(4);
        const auto until = from + static_cast<std::ptrdiff_t>(std::min(width, data.size() - at));
        switch (below(7)) {
            case 0:
            case 1:
                if (at < data.size()) data[at] ^= static_cast<std::uint8_t>(1u << below(8));
                break;
            case 2:
            case 3: {
                const std::uint64_t number = kNumbers[below(std::size(kNumbers))] + below(3) - 1;
                std::uint8_t bytes[8];
                std::memcpy(bytes, &number, 8);
                data.resize(std::max(data.size(), at + width));
                std::copy(bytes, bytes + width, data.begin() + static_cast<std::ptrdiff_t>(at));
                break;
            }
            case 4:
                data.resize(at);
                break;
            case 5:
                data.erase(from, until);
                break;
            default: {
                const Bytes& other = seeds[below(seeds.size())];
                const std::size_t begin = below(other.size() + 1);
                const std::size_t length = std::min<std::size_t>(below(32), other.size() - begin);
                const auto first = other.begin() + static_cast<std::ptrdiff_t>(begin);
                data.insert(from, first, first + static_cast<std::ptrdiff_t>(length));
            }
        }
    }

    std::mt19937_64 random_{20240607};
};

std::uint8_t* map_current(const char* path) {
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    const std::size_t size = 8 + (1u << 20);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return nullptr;
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return address == MAP_FAILED ? nullptr : static_cast<std::uint8_t*>(address);
}

void run(std::uint8_t* current, const Bytes& data) {
    const std::uint64_t size = data.size();
    std::memcpy(current, &size, 8);
    if (size > 0) std::memcpy(current + 8, data.data(), size);
    // An exact copy on the heap: ASan then sees a read of one byte too many.
    const Bytes exact(data);
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

}  // namespace

int main(int argc, char** argv) {
    std::uint8_t* current = argc > 2 ? map_current(argv[2]) : nullptr;
    if (current == nullptr) {
        std::fprintf(stderr, "usage: fuzz SECONDS CURRENT SEED...\n");
        return 2;
    }
    std::vector<Bytes> seeds{Bytes{}};
    for (int i = 3; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        if (seeds.back().size() > (1u << 20)) seeds.back().resize(1u << 20);
    }
    for (const Bytes& seed : seeds) run(current, seed);
    const std::chrono::duration<double> seconds(std::atof(argv[1]));
    const auto deadline = std::chrono::steady_clock::now() + seconds;
    Mutator mutator;
    std::size_t count = 0;
    while (std::chrono::steady_clock::now() < deadline) {
        for (int i = 0; i < 256; ++i, ++count) run(current, mutator.next(seeds));
    }
    std::printf("%zu seeds, %zu mutated inputs, nothing found\n", seeds.size(), count);
    return 0;
}

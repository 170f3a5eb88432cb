// Runs a libFuzzer harness without libFuzzer.
//   fuzz INPUTS CURRENT
// INPUTS: size (u64) and bytes of every input. CURRENT: number (u64) of the input being run, so
// that the caller can keep an input that crashes it.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
    const int current = argc == 3 ? open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
    if (current < 0) {
        std::fprintf(stderr, "usage: fuzz INPUTS CURRENT\n");
        return 2;
    }
    std::ifstream inputs(argv[1], std::ios::binary);
    std::uint64_t count = 0;
    for (std::uint64_t size = 0; inputs.read(reinterpret_cast<char*>(&size), 8); ++count) {
        // On the heap without spare capacity: ASan then finds a read one byte after the end.
        std::vector<std::uint8_t> data(size);
        inputs.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(size));
        if (pwrite(current, &count, sizeof(count), 0) != sizeof(count)) return 2;
        LLVMFuzzerTestOneInput(data.data(), data.size());
    }
    std::printf("%llu\n", static_cast<unsigned long long>(count));
    return 0;
}

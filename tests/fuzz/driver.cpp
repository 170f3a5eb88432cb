// Runs a libFuzzer harness where there is no libFuzzer.
//   fuzz INPUTS CURRENT
// INPUTS: of every input its size (u64) and its bytes. CURRENT always holds the number of the one
// being run (u64), so that whoever started this can keep the input that crashed it.
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
        // Of its own size on the heap: ASan then sees a read of one byte too many.
        std::vector<std::uint8_t> data(size);
        inputs.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(size));
        if (pwrite(current, &count, sizeof(count), 0) != sizeof(count)) return 2;
        LLVMFuzzerTestOneInput(data.data(), data.size());
    }
    std::printf("%llu\n", static_cast<unsigned long long>(count));
    return 0;
}

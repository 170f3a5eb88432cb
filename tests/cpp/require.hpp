// Helpers of the tests in this folder. A test that fails ends its program.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/base/check.hpp"

inline void require(bool ok, const std::string& message) {
    if (ok) return;
    std::printf("failed: %s\n", message.c_str());
    std::exit(1);
}

// Runs tests; returns exit status 0.
inline int pass(std::initializer_list<void (*)()> tests) {
    for (const auto test : tests) test();
    std::puts("ok");
    return 0;
}

// Returns the message of the Error that `run` throws.
template <typename Error = std::invalid_argument, typename Run>
std::string message_of(const Run& run) {
    try {
        run();
    } catch (const Error& error) {
        return error.what();
    }
    return "nothing was thrown";
}

template <typename Error = std::invalid_argument, typename Run>
bool refuses(const Run& run) {
    return message_of<Error>(run) != "nothing was thrown";
}

template <typename T>
void append(std::vector<std::uint8_t>& bytes, T value) {
    const std::size_t at = bytes.size();
    bytes.resize(at + sizeof(T));
    std::memcpy(bytes.data() + at, &value, sizeof(T));
}

// Returns an .idx of uint16 tokens.
inline std::vector<std::uint8_t> make_index(const std::vector<std::int32_t>& lengths,
                                            const std::vector<std::int64_t>& pointers,
                                            const std::vector<std::int64_t>& documents) {
    std::vector<std::uint8_t> bytes{'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
    append<std::uint64_t>(bytes, 1);
    append<std::uint8_t>(bytes, 8);
    append<std::uint64_t>(bytes, lengths.size());
    append<std::uint64_t>(bytes, documents.size());
    for (const auto x : lengths) append(bytes, x);
    for (const auto x : pointers) append(bytes, x);
    for (const auto x : documents) append(bytes, x);
    return bytes;
}

// What the programs of this folder share: a test that fails ends its program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/base/check.hpp"

inline void require(bool ok, const std::string& what) {
    if (ok) return;
    std::printf("failed: %s\n", what.c_str());
    std::exit(1);
}

// The message of what `run` throws as Error.
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

// The inner loops of the gather, compiled for several instruction sets; the processor that runs
// them chooses (a wheel built on one node of a cluster runs on the others).
#pragma once

#include <cstdint>

#include "core/gather/source.hpp"

namespace megapack {

constexpr std::int64_t kNoLabel = -100;

// Has these elements brought into the cache, as far as that is worthwhile; changes nothing else.
void prefetch(const TokenArray& from, std::int64_t at, std::int64_t count);

// to[i] = element at + i of the array, as int64.
void widen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to);

// The same for labels that somebody chose: a negative one is none, and mask says which there are.
void widen_chosen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to,
                  float* mask);

// How many of them are not negative.
std::int64_t count_chosen(const TokenArray& from, std::int64_t at, std::int64_t count);

// to[i] = first + i.
void count_up(std::int64_t first, std::int64_t count, std::int64_t* to);

void fill(std::int64_t value, std::int64_t count, std::int64_t* to);
void fill(float value, std::int64_t count, float* to);

}  // namespace megapack

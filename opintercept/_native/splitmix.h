// Makes 64 bits that look random of a number: the twin of `_values.splitmix.splitmix64`.

#pragma once

#include <cstdint>

namespace opintercept {

inline uint64_t splitmix64(uint64_t number) {
  uint64_t z = number * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

} // namespace opintercept

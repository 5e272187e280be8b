// Which set of vector instructions this process uses.

#include "vectors/sets.h"

#include <ATen/Version.h>

#include <string>

opintercept::Set opintercept::chosen_set() {
  static const Set chosen = [] {
    const std::string best = at::get_cpu_capability();
    return best == "AVX512" ? Set::AVX512 : best == "AVX2" ? Set::AVX2 : Set::DEFAULT;
  }();
  return chosen;
}

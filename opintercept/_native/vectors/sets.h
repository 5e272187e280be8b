// The sources of this folder are compiled once for each set of vector instructions, `build.SETS`, into a namespace
// named after the set, CPU_CAPABILITY as in ATen. All are in one library, which picks one when it is used.
//
// Invariant: a processor runs no instruction that it lacks. Of an inline function or an instance of a template that has
// one name in several objects, the linker keeps the first, and `build.py` links the sets in ascending order, after what
// is compiled once. So the sources here may use the standard library. They construct nothing when the library is
// loaded, since that runs for each set. `tests/native/test_vectors.py` looks for instructions where they may not be.
//
// `vectors.h` stands in for `at::vec::Vectorized`, which has 32 bytes where registers have 16: sums would come in
// another order there and have other bits. Nor does it convert a part of a register to a wider type without a store.

#pragma once

namespace opintercept {

enum class Set { DEFAULT, AVX2, AVX512 };

Set chosen_set(); // as torch chooses its own: ATEN_CPU_CAPABILITY may ask for less than the processor has

} // namespace opintercept

#ifdef OPINTERCEPT_AVX // which `build.py` defines where these sets exist
#define FOR_EACH_SET(...) \
  namespace DEFAULT {     \
  __VA_ARGS__             \
  }                       \
  namespace AVX2 {        \
  __VA_ARGS__             \
  }                       \
  namespace AVX512 {      \
  __VA_ARGS__             \
  }
#define CHOSEN(name)                                            \
  (chosen_set() == Set::AVX512     ? &opintercept::AVX512::name \
       : chosen_set() == Set::AVX2 ? &opintercept::AVX2::name   \
                                   : &opintercept::DEFAULT::name)
#else
#define FOR_EACH_SET(...) \
  namespace DEFAULT {     \
  __VA_ARGS__             \
  }
#define CHOSEN(name) (&opintercept::DEFAULT::name)
#endif

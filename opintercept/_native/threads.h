// How many of torch's threads read values, and whether they let go of the interpreter's lock meanwhile.

#pragma once

#include <Python.h>

#include <ATen/Parallel.h>

#include <cstdint>

// See `vectors/run.h`.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace opintercept {

constexpr int64_t PARALLEL = 1 << 18; // from here on, several threads are faster than one
constexpr int64_t WITH_LOCK = 1 << 14; // up to here, letting go of the interpreter's lock takes longer than it is worth

// How many threads to read this many values on.
inline int workers_for(int64_t values) {
  if (values < PARALLEL || GOMP_parallel == nullptr || at::in_parallel_region()) {
    return 1;
  }
  return at::get_num_threads();
}

// Other threads may run Python: while a large tensor is read, or a device is waited for.
class Unlocked {
 public:
  explicit Unlocked(bool unlocks) : state(unlocks ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state != nullptr) {
      PyEval_RestoreThread(state);
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state;
};

// Runs `use` meanwhile, since a driver may wait for a device, and that for another thread of Python.
template <typename Use>
auto unlocked(const Use& use) {
  Unlocked others(true);
  return use();
}

} // namespace opintercept

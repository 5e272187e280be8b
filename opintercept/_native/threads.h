// Runs parts of a work on torch's threads, and lets go of the interpreter's lock meanwhile.

#pragma once

#include <Python.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>

// How compiled OpenMP code starts its threads. Torch brings the library along; a second one would have threads of its
// own, and `-fopenmp` is not known to every compiler.
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

template <typename Work>
struct Job {
  const Work& work;
  int64_t chunks;
  std::atomic<int64_t> next{0};
  std::atomic<int> workers{0};

  static void run(void* job) {
    auto& self = *static_cast<Job*>(job);
    int worker = self.workers++;
    for (int64_t chunk; (chunk = self.next++) < self.chunks;) {
      self.work(chunk, worker);
    }
  }
};

// Calls `work(chunk, number of the worker)` for each chunk.
template <typename Work>
void run(int64_t chunks, int workers, const Work& work) {
  Job<Work> job{work, chunks};
  if (workers > 1) {
    GOMP_parallel(&Job<Work>::run, &job, static_cast<unsigned>(workers), 0);
  } else {
    Job<Work>::run(&job);
  }
}

// Other threads may run Python while a large tensor is read.
class Unlocked {
 public:
  explicit Unlocked(int64_t values) : state(values > WITH_LOCK ? PyEval_SaveThread() : nullptr) {}
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

} // namespace opintercept

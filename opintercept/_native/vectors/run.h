// Runs parts of a work on torch's threads.

#pragma once

#include <atomic>
#include <cstdint>

// How compiled OpenMP code starts its threads. Torch brings the library along; a second one would have threads of its
// own, and `-fopenmp` is not known to every compiler.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace opintercept::CPU_CAPABILITY {

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

} // namespace opintercept::CPU_CAPABILITY

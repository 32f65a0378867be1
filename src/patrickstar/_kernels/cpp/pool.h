// One pool of threads for the process, whoever asks: two engines share it, so they never run more threads than one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace patrickstar {

class Job;

// While it lives, this thread rounds to nearest and keeps denormal numbers, whatever it did before: threads inherit that
// from whoever starts them, users may change it (`torch.set_flush_denormal`), and results must not depend on it.
class DefaultArithmetic {
  public:
    DefaultArithmetic();
    ~DefaultArithmetic();

  private:
    uint64_t before_;
};

// Starts `work(0) ... work(pages - 1)`, in any order, on up to `threads` threads of the pool. All jobs together have as
// many threads as the one that asks for most. Where no thread can be had, it is done when this returns.
std::shared_ptr<Job> start(int64_t pages, int threads, std::function<void(int64_t)> work);

// Sleeps until all pages of the job are done. In a process that was forked from the one that started it, returns at once:
// nobody works there.
void finish(Job& job);

// How many threads the pool has started.
int pool_size();

}  // namespace patrickstar

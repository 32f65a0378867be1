// One thread pool per process. Engines share it, so several engines run no more threads than one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace patrickstar {

class Job;

// During its lifetime this thread rounds to nearest and keeps denormals. Threads inherit these settings from the thread
// that starts them, users may change them (`torch.set_flush_denormal`), and results must not depend on them.
class DefaultArithmetic {
  public:
    DefaultArithmetic();
    ~DefaultArithmetic();

  private:
    uint64_t before_;
};

// Starts `work(0) ... work(pieces - 1)`, in any order, on up to `threads` threads of the pool. All jobs together use at
// most the largest number of threads that one of them requests. If no thread can be created, runs the work itself.
std::shared_ptr<Job> start(int64_t pieces, int threads, std::function<void(int64_t)> work);

// Waits until all pieces of the job are done; meanwhile the calling thread runs some, as one of the job's threads. In a
// child forked after the start, returns at once, because the child has none of the threads.
void finish(const std::shared_ptr<Job>& job);

// Starts and finishes a job.
void run(int64_t pieces, int threads, std::function<void(int64_t)> work);

// Number of threads that the pool has started.
int pool_size();

}  // namespace patrickstar
